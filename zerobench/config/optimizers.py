"""torch.optim's elementwise optimizers by name: their options, and what theory is told of each.

Elementwise: the update of an element depends on that element alone, so that a shard can be updated apart. Defaults
that are not torch's suit a small GPT.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from omegaconf import MISSING
from torch import nn, optim

from ..strategies import spec_of
from ..theory.shapes import OptimizerShape
from .axis import Axis, CellView

PAIRS = {"betas": ("beta1", "beta2"), "etas": ("eta_minus", "eta_plus"), "step_sizes": ("step_min", "step_max")}
"""torch's options that are pairs, and our keys for their parts."""

IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "loop": {"foreach": False},
}
"""`implementation` -> torch's options; `fused` is off where it is not named."""


@dataclass(frozen=True)
class Kind:
    """An optimizer of torch. `counts`: 4-byte scalars that it keeps of each tensor; `fused`: whether torch has a fused
    implementation; `fused_on_cuda`: whether the oldest torch that we support has it there, too.
    """

    make: Callable[..., optim.Optimizer]
    counts: int
    fused: bool = False
    fused_on_cuda: bool = True


KINDS: dict[str, Kind] = {
    "sgd": Kind(optim.SGD, 0, fused=True),
    "adam": Kind(optim.Adam, 1, fused=True),
    "adamw": Kind(optim.AdamW, 1, fused=True),
    "adamax": Kind(optim.Adamax, 1),
    "nadam": Kind(optim.NAdam, 2),
    "radam": Kind(optim.RAdam, 1),
    "adagrad": Kind(optim.Adagrad, 1, fused=True, fused_on_cuda=False),
    "adadelta": Kind(optim.Adadelta, 1),
    "rmsprop": Kind(optim.RMSprop, 1),
    "rprop": Kind(optim.Rprop, 1),
    "asgd": Kind(optim.ASGD, 3),
}


@dataclass
class Optimizer(Axis):
    """A torch.optim optimizer; the options are torch's. `implementation` is fused, foreach or loop; auto: fused where
    torch has it, else foreach on CUDA and loop on a CPU, as torch itself chooses.
    """

    name: str = MISSING
    lr: float = 3e-4
    implementation: str = "auto"

    @property
    def states(self) -> int:
        """Tensors of the parameter's size that it keeps."""
        return 1

    def build(self, parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
        """Returns the optimizer over `parameters`."""
        section = self.values()
        parts = {part for pair in PAIRS.values() for part in pair}
        options = {key: value for key, value in section.items() if key not in ("name", "implementation", *parts)}
        options |= {pair: (section[low], section[high]) for pair, (low, high) in PAIRS.items() if low in section}
        return KINDS[self.name].make(parameters, **options, **IMPLEMENTATIONS[self.implementation])

    def theory_shape(self) -> OptimizerShape:
        """Returns what it keeps of each parameter."""
        return OptimizerShape(self.states, KINDS[self.name].counts, self.implementation == "fused")

    def validate(self, cell: CellView) -> list[str]:
        """Returns a sentence where torch cannot update what the strategy has for parameters; `implementation` is
        resolved.
        """
        strategy, kind = cell.strategy.name, KINDS[self.name]
        refused = spec_of(strategy).refused_optimizers.get(self.name, ())
        if self.implementation not in refused:
            return []
        others = [one for one in IMPLEMENTATIONS if one not in refused and (one != "fused" or kind.fused)]
        words = f"torch has no rule to update the DTensors of strategy={strategy} with {self.label}"
        instead = f"optimizer.implementation={' or '.join(others)}" if others else "another optimizer"
        return [f"optimizer={self.name}: {words}; use {instead}"]

    def problems(self) -> list[str]:
        """Returns sentences on options that torch would refuse under any strategy."""
        if self.implementation not in IMPLEMENTATIONS:
            return [f"optimizer.implementation={self.implementation}: use auto, {', '.join(IMPLEMENTATIONS)}"]
        if self.implementation == "fused" and not KINDS[self.name].fused:
            have = ", ".join(other for other, kind in KINDS.items() if kind.fused)
            words = f"torch has no fused {self.name} (it has {have}); use foreach, loop"
            return [f"optimizer.implementation=fused: {words}"]
        return []

    @property
    def label(self) -> str:
        """Its name and implementation: "adamw/fused"."""
        return f"{self.name}/{self.implementation}"


def default_implementation(name: str, device: str) -> str:
    """Returns what `implementation=auto` becomes: fused where torch has it, else what torch itself takes there."""
    kind = KINDS[name]
    if kind.fused and (kind.fused_on_cuda or device != "cuda"):
        return "fused"
    return "foreach" if device == "cuda" else "loop"


@dataclass
class Decaying(Optimizer):
    """Those with weight decay."""

    weight_decay: float = 0.0


@dataclass
class Sgd(Decaying):
    """torch.optim.SGD: a tensor of states with momentum, none without."""

    name: str = "sgd"
    lr: float = 0.1
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False

    @property
    def states(self) -> int:
        """Tensors of the parameter's size that it keeps."""
        return int(self.momentum > 0)

    def problems(self) -> list[str]:
        """Returns sentences on options that torch would refuse."""
        if self.nesterov and (self.momentum <= 0 or self.dampening != 0):
            words = "it needs optimizer.momentum above 0 and optimizer.dampening=0"
            return [*super().problems(), f"optimizer.nesterov=true: {words}"]
        return super().problems()


@dataclass
class Betas(Decaying):
    """Options of the Adam family, whose members have two tensors of states each."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    @property
    def states(self) -> int:
        """Tensors of the parameter's size that it keeps."""
        return 2


@dataclass
class Adam(Betas):
    """torch.optim.Adam; `amsgrad` keeps a third tensor."""

    name: str = "adam"
    amsgrad: bool = False

    @property
    def states(self) -> int:
        """Tensors of the parameter's size that it keeps."""
        return 2 + self.amsgrad


@dataclass
class AdamW(Adam):
    """torch.optim.AdamW."""

    name: str = "adamw"
    weight_decay: float = 0.01


@dataclass
class Adamax(Betas):
    """torch.optim.Adamax."""

    name: str = "adamax"
    lr: float = 2e-3


@dataclass
class NAdam(Betas):
    """torch.optim.NAdam."""

    name: str = "nadam"
    lr: float = 2e-3
    momentum_decay: float = 4e-3
    decoupled_weight_decay: bool = False


@dataclass
class RAdam(Betas):
    """torch.optim.RAdam."""

    name: str = "radam"
    lr: float = 1e-3
    decoupled_weight_decay: bool = False


@dataclass
class Adagrad(Decaying):
    """torch.optim.Adagrad: one tensor of states, which is there before the first step."""

    name: str = "adagrad"
    lr: float = 0.01
    lr_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10


@dataclass
class Adadelta(Decaying):
    """torch.optim.Adadelta: two tensors of states."""

    name: str = "adadelta"
    lr: float = 1.0
    rho: float = 0.9
    eps: float = 1e-6

    @property
    def states(self) -> int:
        """Tensors of the parameter's size that it keeps."""
        return 2


@dataclass
class RMSprop(Decaying):
    """torch.optim.RMSprop: one tensor of states, one more with momentum, one more centered."""

    name: str = "rmsprop"
    lr: float = 1e-3
    alpha: float = 0.99
    eps: float = 1e-8
    momentum: float = 0.0
    centered: bool = False

    @property
    def states(self) -> int:
        """Tensors of the parameter's size that it keeps."""
        return 1 + self.centered + (self.momentum > 0)


@dataclass
class Rprop(Optimizer):
    """torch.optim.Rprop: two tensors of states."""

    name: str = "rprop"
    lr: float = 1e-3
    eta_minus: float = 0.5
    eta_plus: float = 1.2
    step_min: float = 1e-6
    step_max: float = 50.0

    @property
    def states(self) -> int:
        """Tensors of the parameter's size that it keeps."""
        return 2

    def problems(self) -> list[str]:
        """Returns sentences on options that torch would refuse."""
        problems = super().problems()
        pairs = ("eta_minus", self.eta_minus, "eta_plus", self.eta_plus), (
            "step_min", self.step_min, "step_max", self.step_max,
        )  # fmt: skip
        for low, least, high, most in pairs:
            if least >= most:
                problems.append(f"optimizer.{low}={least:g}: it must be below optimizer.{high}={most:g}")
        return problems


@dataclass
class Asgd(Decaying):
    """torch.optim.ASGD: one tensor of states, the averaged weights."""

    name: str = "asgd"
    lr: float = 0.01
    lambd: float = 1e-4
    alpha: float = 0.75
    t0: float = 1e6


OPTIMIZERS: dict[str, type] = {
    "sgd": Sgd, "adam": Adam, "adamw": AdamW, "adamax": Adamax, "nadam": NAdam, "radam": RAdam, "adagrad": Adagrad,
    "adadelta": Adadelta, "rmsprop": RMSprop, "rprop": Rprop, "asgd": Asgd,
}  # fmt: skip
