"""Schemas of how a model is trained: optimizers and precisions. Defaults that are not torch's suit a small GPT."""

from __future__ import annotations

import math
from dataclasses import dataclass

from omegaconf import MISSING

MIB = 2**20

NORMS = {"2": 2.0, "inf": math.inf}
"""Valid values of `clip_norm` -> the p of the norm."""

ACCUMULATE = ("every", "last")
"""Valid values of `strategy.accumulate`: the micro-batches of a step that are reduced over the ranks."""


@dataclass
class Optimizer:
    """A torch.optim optimizer; the options are torch's. `implementation` is fused, foreach or loop; auto: fused where
    torch has it, else foreach on CUDA and loop on a CPU, as torch itself chooses.
    """

    name: str = MISSING
    lr: float = 3e-4
    implementation: str = "auto"


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


@dataclass
class Betas(Decaying):
    """Options of the Adam family, whose members have two tensors of states each."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8


@dataclass
class Adam(Betas):
    """torch.optim.Adam; `amsgrad` keeps a third tensor."""

    name: str = "adam"
    amsgrad: bool = False


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


@dataclass
class RMSprop(Decaying):
    """torch.optim.RMSprop: one tensor of states, one more with momentum, one more centered."""

    name: str = "rmsprop"
    lr: float = 1e-3
    alpha: float = 0.99
    eps: float = 1e-8
    momentum: float = 0.0
    centered: bool = False


@dataclass
class Rprop(Optimizer):
    """torch.optim.Rprop: two tensors of states."""

    name: str = "rprop"
    lr: float = 1e-3
    eta_minus: float = 0.5
    eta_plus: float = 1.2
    step_min: float = 1e-6
    step_max: float = 50.0


@dataclass
class Asgd(Decaying):
    """torch.optim.ASGD: one tensor of states, the averaged weights."""

    name: str = "asgd"
    lr: float = 0.01
    lambd: float = 1e-4
    alpha: float = 0.75
    t0: float = 1e6


@dataclass
class Precision:
    """Dtypes, each fp32, bf16 or fp16. `name`: the model's; below fp32 the optimizer updates fp32 master weights.

    `gradient_dtype`: in which gradients are accumulated; null: the model's. `wire_dtype`: in which they are reduced;
    null: `gradient_dtype`. `tile_bytes`: most that the fp32 gradients which the optimizer is given in place of
    half-precision ones take at once, 4 MiB where null (256 MiB on a GPU); our stages update in tiles of that size where
    an optimizer is not fused, too. Under megatron null means fp32 gradients, and no tiles. fsdp2 casts fp32 shards as
    it gathers them.
    """

    name: str = MISSING
    gradient_dtype: str | None = None
    wire_dtype: str | None = None
    tile_bytes: int | None = None


@dataclass
class Fp32(Precision):
    """Model states in fp32: 16 bytes a parameter under Adam."""

    name: str = "fp32"


@dataclass
class Bf16(Precision):
    """bf16 parameters and gradients, fp32 master weights and optimizer states: the paper's 2 + 2 + 12 bytes."""

    name: str = "bf16"


@dataclass
class Fp16(Bf16):
    """As bf16, with dynamic loss scaling: the loss is multiplied by a scale, which grows by `growth` after `interval`
    steps without overflow, and shrinks by `backoff`, not below `minimum_scale`, on a step that overflowed, which all
    ranks skip.
    """

    name: str = "fp16"
    initial_scale: float | None = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    minimum_scale: float = 1.0


OPTIMIZERS: dict[str, type] = {
    "sgd": Sgd, "adam": Adam, "adamw": AdamW, "adamax": Adamax, "nadam": NAdam, "radam": RAdam, "adagrad": Adagrad,
    "adadelta": Adadelta, "rmsprop": RMSprop, "rprop": Rprop, "asgd": Asgd,
}  # fmt: skip
PRECISIONS: dict[str, type] = {"fp32": Fp32, "bf16": Bf16, "fp16": Fp16}
