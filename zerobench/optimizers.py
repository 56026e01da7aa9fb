"""torch.optim optimizers by name, from a resolved `optimizer` section."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn, optim

OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {"adamw": optim.AdamW, "adam": optim.Adam, "sgd": optim.SGD}

IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "loop": {"foreach": False, "fused": False},
}

STATES_PER_PARAMETER = {"adamw": 2, "adam": 2, "sgd": 0}
"""Tensors of the parameter's size that an optimizer keeps; SGD with momentum keeps one."""


def build(section: dict[str, Any], parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
    """The optimizer over `parameters`."""
    options = {k: v for k, v in section.items() if k not in ("name", "implementation", "beta1", "beta2")}
    if "beta1" in section:
        options["betas"] = (section["beta1"], section["beta2"])
    return OPTIMIZERS[section["name"]](parameters, **options, **IMPLEMENTATIONS[section["implementation"]])


def states_per_parameter(section: dict[str, Any]) -> int:
    """Tensors of the parameter's size that the optimizer of this section keeps."""
    return STATES_PER_PARAMETER[section["name"]] + bool(section.get("momentum"))
