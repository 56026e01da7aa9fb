"""torch.optim's elementwise optimizers by name, from a resolved `optimizer` section.

Elementwise: the update of an element depends on that element alone, so that a shard can be updated apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn, optim

from ..theory.shapes import OptimizerShape

Section = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """An optimizer. `states`: tensors of the parameter's size that it keeps, by its options; `counts`: 4-byte scalars
    that it keeps of each tensor; `fused`: whether torch has a fused implementation; `fused_on_cuda`: whether the oldest
    torch that we support has it there, too.
    """

    make: Callable[..., optim.Optimizer]
    states: Callable[[Section], int]
    counts: int
    fused: bool = False
    fused_on_cuda: bool = True


KINDS: dict[str, Kind] = {
    "sgd": Kind(optim.SGD, lambda s: int(s["momentum"] > 0), 0, fused=True),
    "adam": Kind(optim.Adam, lambda s: 2 + s["amsgrad"], 1, fused=True),
    "adamw": Kind(optim.AdamW, lambda s: 2 + s["amsgrad"], 1, fused=True),
    "adamax": Kind(optim.Adamax, lambda s: 2, 1),
    "nadam": Kind(optim.NAdam, lambda s: 2, 2),
    "radam": Kind(optim.RAdam, lambda s: 2, 1),
    "adagrad": Kind(optim.Adagrad, lambda s: 1, 1, fused=True, fused_on_cuda=False),
    "adadelta": Kind(optim.Adadelta, lambda s: 2, 1),
    "rmsprop": Kind(optim.RMSprop, lambda s: 1 + s["centered"] + (s["momentum"] > 0), 1),
    "rprop": Kind(optim.Rprop, lambda s: 2, 1),
    "asgd": Kind(optim.ASGD, lambda s: 1, 3),
}

PAIRS = {"betas": ("beta1", "beta2"), "etas": ("eta_minus", "eta_plus"), "step_sizes": ("step_min", "step_max")}
"""torch's options that are pairs, and our keys for their parts."""

IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "loop": {"foreach": False},
}
"""Keyword arguments of torch for each `implementation`; `fused` is off unless named."""


def build(section: Section, parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
    """The optimizer of a resolved section over `parameters`."""
    parts = {part: pair for pair, both in PAIRS.items() for part in both}
    options = {k: v for k, v in section.items() if k not in ("name", "implementation", *parts)}
    options |= {pair: (section[low], section[high]) for pair, (low, high) in PAIRS.items() if low in section}
    return KINDS[section["name"]].make(parameters, **options, **IMPLEMENTATIONS[section["implementation"]])


def shape_of(section: Section) -> OptimizerShape:
    """Returns theory's view of the optimizer: its states of each parameter."""
    kind = KINDS[section["name"]]
    return OptimizerShape(kind.states(section), kind.counts, section["implementation"] == "fused")


def words_of(config: dict[str, Any]) -> str:
    """ "adamw/fused" of a resolved cell, or "adamw/fused, clipped at 1", with the norm where it is not 2."""
    words = f"{config['optimizer']['name']}/{config['optimizer']['implementation']}"
    if config["clip"] is None:
        return words
    return f"{words}, clipped at {config['clip']:g}" + f" (norm {config['clip_norm']})" * (config["clip_norm"] != "2")


def default_implementation(name: str, device: str) -> str:
    """Resolves `implementation=auto`: fused where torch has it, else torch's own choice on that device."""
    kind = KINDS[name]
    if kind.fused and (kind.fused_on_cuda or device != "cuda"):
        return "fused"
    return "foreach" if device == "cuda" else "loop"


def problems_of(section: Section) -> list[str]:
    """Sentences on what of a section, with `implementation` resolved, makes no sense."""
    name, how = section["name"], section["implementation"]
    problems = []
    if how not in IMPLEMENTATIONS:
        problems.append(f"optimizer.implementation={how}: use auto, {', '.join(IMPLEMENTATIONS)}")
    elif how == "fused" and not KINDS[name].fused:
        have = ", ".join(other for other, kind in KINDS.items() if kind.fused)
        problems.append(f"optimizer.implementation=fused: torch has no fused {name} (it has {have}); use foreach, loop")
    if section.get("nesterov") and (section["momentum"] <= 0 or section["dampening"] != 0):
        problems.append("optimizer.nesterov=true: it needs optimizer.momentum above 0 and optimizer.dampening=0")
    for low, high in (("eta_minus", "eta_plus"), ("step_min", "step_max")):
        if low in section and section[low] >= section[high]:
            problems.append(f"optimizer.{low}={section[low]:g}: it must be below optimizer.{high}={section[high]:g}")
    return problems
