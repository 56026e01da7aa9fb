"""torch.optim optimizers by name, from a resolved `optimizer` section."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn, optim

from .theory.memory import OptimizerShape

OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {"adamw": optim.AdamW, "adam": optim.Adam, "sgd": optim.SGD}

IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "loop": {"foreach": False, "fused": False},
}

SHAPES = {"adamw": OptimizerShape(2, True), "adam": OptimizerShape(2, True), "sgd": OptimizerShape(0, False)}
"""What each keeps; SGD with momentum keeps one tensor more."""


def build(section: dict[str, Any], parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
    """The optimizer over `parameters`."""
    options = {k: v for k, v in section.items() if k not in ("name", "implementation", "beta1", "beta2")}
    if "beta1" in section:
        options["betas"] = (section["beta1"], section["beta2"])
    return OPTIMIZERS[section["name"]](parameters, **options, **IMPLEMENTATIONS[section["implementation"]])


def shape_of(section: dict[str, Any]) -> OptimizerShape:
    """What the optimizer of this section keeps of each parameter."""
    shape = SHAPES[section["name"]]
    return OptimizerShape(shape.states + bool(section.get("momentum")), shape.counts)
