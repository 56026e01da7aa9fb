"""How a model is trained: torch.optim's elementwise optimizers, Muon, AdamW with low-bit states, precisions, and valid
words of options.

Elementwise: the update of an element depends only on that element, or on its block of elements, which no shard cuts, so
that a shard can be updated separately. Each of Muon's matrices is owned by one rank (zero/optim/segments.py). Defaults
that differ from torch's suit a small GPT.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from omegaconf import MISSING
from torch import nn, optim

from ..sections import Key, known
from ..strategies import names_with, spec_of, specs
from ..theory.shapes import OptimizerShape, PrecisionShape
from ..zero.low_bit import AdamW8bit, AdamWBf16, block_numel
from ..zero.optim.muon import REST, MuonWithAdamW, split
from ..zero.optim.segments import OWNED
from ..zero.options import ONE_PASS, usual_tile_bytes
from ..zero.precision import DTYPES, LossScaling
from .axis import Axis, CellKeys

PAIRS = {"betas": ("beta1", "beta2"), "etas": ("eta_minus", "eta_plus"), "step_sizes": ("step_min", "step_max")}
"""torch's options that are pairs -> our keys for their parts."""

IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "loop": {"foreach": False},
}
"""`implementation` -> torch's options; `fused` is off unless given."""


@dataclass(frozen=True)
class Kind:
    """An optimizer. `states`: number of tensors of the parameter's size that it keeps, given its options; `counts`:
    4-byte scalars that it keeps per tensor; `fused`: whether torch has a fused implementation; `fused_on_cuda`: whether
    the oldest supported torch has it on CUDA too; `foreach`: whether it has a foreach implementation; `element_bytes`:
    of an element of a state; None: the same as the updated tensor's.
    """

    make: Callable[..., optim.Optimizer]
    states: Callable[[Any], int]
    counts: int
    fused: bool = False
    fused_on_cuda: bool = True
    foreach: bool = True
    element_bytes: int | None = None


KINDS: dict[str, Kind] = {
    "sgd": Kind(optim.SGD, lambda chosen: int(chosen.momentum > 0), 0, fused=True),
    "adam": Kind(optim.Adam, lambda chosen: 2 + chosen.amsgrad, 1, fused=True),
    "adamw": Kind(optim.AdamW, lambda chosen: 2 + chosen.amsgrad, 1, fused=True),
    "adamax": Kind(optim.Adamax, lambda _: 2, 1),
    "nadam": Kind(optim.NAdam, lambda _: 2, 2),
    "radam": Kind(optim.RAdam, lambda _: 2, 1),
    "adagrad": Kind(optim.Adagrad, lambda _: 1, 1, fused=True, fused_on_cuda=False),
    "adadelta": Kind(optim.Adadelta, lambda _: 2, 1),
    "rmsprop": Kind(optim.RMSprop, lambda chosen: 1 + chosen.centered + (chosen.momentum > 0), 1),
    "rprop": Kind(optim.Rprop, lambda _: 2, 1),
    "asgd": Kind(optim.ASGD, lambda _: 1, 3),
    "muon": Kind(optim.AdamW, lambda _: 2, 1, fused=True),  # its part that is AdamW
    "adamw8bit": Kind(AdamW8bit, lambda _: 2, 0, foreach=False, element_bytes=1),
    "adamw_bf16": Kind(AdamWBf16, lambda _: 2, 0, foreach=False, element_bytes=2),
}


LR = Key("learning rate", limits=(0, 1e6))
WEIGHT_DECAY = Key("torch's weight_decay", limits=(0, 1e6))
MOMENTUM = Key("torch's momentum; 0: no state is kept for it", limits=(0, 1))
EPS = Key("added to the denominator", limits=(0, 1e6))
DECOUPLED_WEIGHT_DECAY = Key("decoupled weight decay, as in AdamW")
ALPHA = Key("RMSprop's smoothing, ASGD's power of the learning rate", limits=(0, 1e6))


@dataclass
class Optimizer(Axis):
    """A torch.optim optimizer; the options are torch's. `implementation` is fused, foreach or loop; auto: fused where
    torch has it, else foreach on CUDA and loop on a CPU, as torch itself chooses.
    """

    name: str = MISSING
    lr: float = LR(3e-4)
    implementation: str = Key(
        "fused, foreach, loop, or auto: fused if torch has it", words=("auto", "fused", "foreach", "loop")
    )("auto")

    @property
    def states(self) -> int:
        """Number of tensors of the parameter's size that it keeps."""
        return KINDS[self.name].states(self)

    def build(self, parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
        section = self.values()
        parts = {part for pair in PAIRS.values() for part in pair}
        options = {key: value for key, value in section.items() if key not in ("name", "implementation", *parts)}
        options |= {pair: (section[low], section[high]) for pair, (low, high) in PAIRS.items() if low in section}
        return KINDS[self.name].make(parameters, **options, **IMPLEMENTATIONS[self.implementation])

    def build_for(self, model: nn.Module) -> optim.Optimizer:
        """Returns the optimizer of a model."""
        return self.build(p for p in model.parameters() if p.requires_grad)

    def owned(self, model: nn.Module) -> Collection[nn.Parameter]:
        """Returns the parameters whose update needs them whole."""
        return ()

    def theory_shape(self) -> OptimizerShape:
        kind = KINDS[self.name]
        fused = self.implementation == "fused"
        return OptimizerShape(self.states, kind.counts, fused, kind.element_bytes, self.block_numel)

    @property
    def takes_elements(self) -> bool:
        """Whether updating some elements separately gives the same result as updating the whole."""
        return True

    @property
    def block_numel(self) -> int:
        """Number of elements whose states cannot be cut because they share a scale; 1: no such states."""
        return block_numel(KINDS[self.name].make)

    def validate(self, cell: CellKeys) -> list[str]:
        """Returns an error message if torch cannot update the strategy's parameters with this `implementation`."""
        strategy, kind = cell.strategy.name, KINDS[self.name]
        refused = spec_of(strategy).refused_optimizers.get(self.name, ())
        if self.implementation not in refused:
            return []
        others = [name for name in IMPLEMENTATIONS if name not in refused and (name != "fused" or kind.fused)]
        why = f"torch has no rule to update the DTensors of strategy={strategy} with {self.label}"
        instead = f"optimizer.implementation={' or '.join(others)}" if others else "another optimizer"
        return [f"optimizer={self.name}: {why}; use {instead}"]

    def problems(self) -> list[str]:
        """Returns error messages for options that torch rejects under any strategy."""
        if self.implementation not in IMPLEMENTATIONS:
            return [f"optimizer.implementation={self.implementation}: use auto, {', '.join(IMPLEMENTATIONS)}"]
        if self.implementation == "fused" and not KINDS[self.name].fused:
            have = ", ".join(other for other, kind in KINDS.items() if kind.fused)
            why = f"torch has no fused {self.name} (it has {have}); use foreach, loop"
            return [f"optimizer.implementation=fused: {why}"]
        if self.implementation == "foreach" and not KINDS[self.name].foreach:
            return [f"optimizer.implementation=foreach: {self.name} has a loop only; use loop"]
        return [f"optimizer.{key}=1: must be below 1" for key in ("beta1", "beta2") if getattr(self, key, 0) == 1]

    @property
    def label(self) -> str:
        return f"{self.name}/{self.implementation}"


def default_implementation(name: str, device: str) -> str:
    """Returns the implementation for `auto`: fused if torch has it, else torch's own default on the device."""
    kind = KINDS[name]
    if kind.fused and (kind.fused_on_cuda or device != "cuda"):
        return "fused"
    return "foreach" if device == "cuda" and kind.foreach else "loop"


@dataclass
class Decaying(Optimizer):
    """Optimizers with weight decay."""

    weight_decay: float = WEIGHT_DECAY(0.0)


@dataclass
class Sgd(Decaying):
    """torch.optim.SGD: a tensor of states with momentum, none without."""

    name: str = "sgd"
    lr: float = LR(0.1)
    momentum: float = MOMENTUM(0.0)
    dampening: float = Key("torch's dampening of momentum", limits=(0, 1))(0.0)
    nesterov: bool = Key("Nesterov's momentum")(False)

    def problems(self) -> list[str]:
        if self.nesterov and (self.momentum <= 0 or self.dampening != 0):
            why = "it needs optimizer.momentum above 0 and optimizer.dampening=0"
            return [*super().problems(), f"optimizer.nesterov=true: {why}"]
        return super().problems()


@dataclass
class Betas(Decaying):
    """Options of the Adam family, whose members have two tensors of states each."""

    beta1: float = Key("decay of the first moment", limits=(0, 1))(0.9)
    beta2: float = Key("decay of the second moment", limits=(0, 1))(0.999)
    eps: float = EPS(1e-8)


@dataclass
class Adam(Betas):
    """torch.optim.Adam; `amsgrad` keeps a third tensor."""

    name: str = "adam"
    amsgrad: bool = Key("keep the largest second moment, a third tensor of states")(False)


@dataclass
class AdamW(Adam):
    """torch.optim.AdamW."""

    name: str = "adamw"
    weight_decay: float = WEIGHT_DECAY(0.01)


@dataclass
class Adamax(Betas):
    """torch.optim.Adamax."""

    name: str = "adamax"
    lr: float = LR(2e-3)


@dataclass
class NAdam(Betas):
    """torch.optim.NAdam."""

    name: str = "nadam"
    lr: float = LR(2e-3)
    momentum_decay: float = Key("NAdam's momentum_decay", limits=(0, 1e6))(4e-3)
    decoupled_weight_decay: bool = DECOUPLED_WEIGHT_DECAY(False)


@dataclass
class RAdam(Betas):
    """torch.optim.RAdam."""

    name: str = "radam"
    lr: float = LR(1e-3)
    decoupled_weight_decay: bool = DECOUPLED_WEIGHT_DECAY(False)


@dataclass
class Adagrad(Decaying):
    """torch.optim.Adagrad: one tensor of states, which is there before the first step."""

    name: str = "adagrad"
    lr: float = LR(0.01)
    lr_decay: float = Key("Adagrad's lr_decay", limits=(0, 1e6))(0.0)
    initial_accumulator_value: float = Key("initial value of Adagrad's sums", limits=(0, 1e6))(0.0)
    eps: float = EPS(1e-10)


@dataclass
class Adadelta(Decaying):
    """torch.optim.Adadelta: two tensors of states."""

    name: str = "adadelta"
    lr: float = LR(1.0)
    rho: float = Key("Adadelta's decay of averages", limits=(0, 1))(0.9)
    eps: float = EPS(1e-6)


@dataclass
class RMSprop(Decaying):
    """torch.optim.RMSprop: one tensor of states, one more with momentum, one more centered."""

    name: str = "rmsprop"
    lr: float = LR(1e-3)
    alpha: float = ALPHA(0.99)
    eps: float = EPS(1e-8)
    momentum: float = MOMENTUM(0.0)
    centered: bool = Key("RMSprop subtracts the mean gradient, one more tensor of states")(False)


@dataclass
class Rprop(Optimizer):
    """torch.optim.Rprop: two tensors of states."""

    name: str = "rprop"
    lr: float = LR(1e-3)
    eta_minus: float = Key("Rprop's factor for elements whose gradient changed its sign", limits=(1e-6, 1))(0.5)
    eta_plus: float = Key("Rprop's factor for the other elements", limits=(1, 1e6))(1.2)
    step_min: float = Key("Rprop's least step", limits=(0, 1e6))(1e-6)
    step_max: float = Key("Rprop's largest step", limits=(0, 1e6))(50.0)

    def problems(self) -> list[str]:
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
    lr: float = LR(0.01)
    lambd: float = Key("ASGD's decay", limits=(0, 1e6))(1e-4)
    alpha: float = ALPHA(0.75)
    t0: float = Key("steps before ASGD begins to average weights", unit="steps", limits=(1, 1e12))(1e6)


ADJUSTMENTS = ("original", "match_rms_adamw")
"""Muon's ways to adjust a learning rate."""


@dataclass
class Muon(Betas):
    """torch.optim.Muon for hidden matrices, AdamW for what `adamw` lists: words and names of parameters. Momentum is a
    matrix's only tensor of states. `lr` is Muon's; `beta1`, `beta2`, `eps`, `implementation` are AdamW's.
    """

    name: str = "muon"
    lr: float = LR(0.02)
    adamw: list[str] = Key(
        "parameters for AdamW; Muon updates the other matrices",
        rule="a list of `not_2d` or `not_2d_or_3d`, `embeddings`, `head` and names of parameters, `*` standing for any"
        " part",
    ).made(lambda: [*REST])  # fmt: skip
    adamw_lr: float = Key("AdamW's learning rate", limits=(0, 1e6))(3e-4)
    momentum: float = MOMENTUM(0.95)
    nesterov: bool = Key("Nesterov's momentum")(True)
    ns_steps: int = Key("Newton-Schulz iterations of an update", unit="iterations", limits=(1, 99))(5)
    adjust_lr: str = Key(
        "factor of a matrix's learning rate: original, by its shape, or match_rms_adamw, to use AdamW's",
        rule="`original` or `match_rms_adamw`",
    )("original")

    def problems(self) -> list[str]:
        if self.adjust_lr in ADJUSTMENTS:
            return super().problems()
        return [*super().problems(), f"optimizer.adjust_lr={self.adjust_lr}: use {' or '.join(ADJUSTMENTS)}"]

    def build_for(self, model: nn.Module) -> optim.Optimizer:
        matrices, rest = split(model, self.adamw)
        muon = {"lr": self.lr, "momentum": self.momentum, "nesterov": self.nesterov, "ns_steps": self.ns_steps}
        adamw = {"lr": self.adamw_lr, "betas": (self.beta1, self.beta2), "eps": self.eps}
        groups: list[dict[str, Any]] = [
            {"params": matrices, OWNED: True, "adjust_lr_fn": self.adjust_lr, **muon},
            {"params": rest, OWNED: False, **adamw, **IMPLEMENTATIONS[self.implementation]},
        ]
        return MuonWithAdamW([{**group, "weight_decay": self.weight_decay} for group in groups if group["params"]])

    def owned(self, model: nn.Module) -> Collection[nn.Parameter]:
        return set(split(model, self.adamw)[0])

    @property
    def takes_elements(self) -> bool:
        return False

    def theory_shape(self) -> OptimizerShape:
        return OptimizerShape(self.states, KINDS[self.name].counts, fused=False, owned=OptimizerShape(1, 0))

    def validate(self, cell: CellKeys) -> list[str]:
        """Returns error messages for options that do not work with matrices owned by one rank."""
        spec, offload = spec_of(cell.strategy.name), cell.offload
        if not spec.composes.owned:
            why = f"strategy={spec.name} cuts its matrices, which Muon needs whole"
            return [f"optimizer=muon: {why}; use one of {', '.join(names_with('owned'))}"]
        refused = {
            "node_size": cell.node_size, "shard_group": cell.shard_group,
            "zeropp": None if cell.zeropp.name == "none" else cell.zeropp.name,
            "offload": "nvme" if offload.name == "nvme" else None,
            "offload.fraction": part if (part := getattr(offload, "fraction", 1.0)) < 1 else None,
        }  # fmt: skip
        named = [f"{key}={value}" for key, value in refused.items() if value is not None]
        why = "Muon's matrices are owned whole by one rank each, in the memory of one tier; leave it out"
        return [f"{setting}: {why}, or use optimizer=adamw" for setting in named]


@dataclass
class LowBitStates(Betas):
    """AdamW, ours, with states of fewer bits than those of torch. The strategies are ddp and our stages, which cut no
    block of states (docs/how-to/low-bit-states.md).
    """

    weight_decay: float = WEIGHT_DECAY(0.01)

    @property
    def takes_elements(self) -> bool:
        return False

    def validate(self, cell: CellKeys) -> list[str]:
        """Returns an error message if the strategy or the offload cannot keep such states."""
        if spec_of(cell.strategy.name).partitions_as:
            ours = [name for name, spec in specs().items() if spec.theory is not None]
            why = f"strategy={cell.strategy.name} has no rule to cut its states; use strategy={', '.join(ours)}"
            return [f"optimizer={self.name}: {why}"]
        if cell.offload.name == "nvme" and self.block_numel > 1:
            why = "offload=nvme has files only for states of a parameter's size, not for states per block"
            return [f"optimizer={self.name}: {why}; use offload=cpu, or optimizer=adamw_bf16"]
        return []


@dataclass
class Adamw8bit(LowBitStates):
    """Our AdamW8bit: 8-bit states, 2.03 bytes per parameter instead of 8."""

    name: str = "adamw8bit"


@dataclass
class AdamwBf16(LowBitStates):
    """Our AdamWBf16: bf16 states, rounded stochastically, 4 bytes per parameter instead of 8."""

    name: str = "adamw_bf16"


OPTIMIZERS: dict[str, type] = {
    "sgd": Sgd, "adam": Adam, "adamw": AdamW, "adamax": Adamax, "nadam": NAdam, "radam": RAdam, "adagrad": Adagrad,
    "adadelta": Adadelta, "rmsprop": RMSprop, "rprop": Rprop, "asgd": Asgd, "muon": Muon, "adamw8bit": Adamw8bit,
    "adamw_bf16": AdamwBf16,
}  # fmt: skip


@dataclass
class Precision(Axis):
    """Dtypes, each fp32, bf16 or fp16. `name`: the model's; below fp32 the optimizer updates fp32 master weights.

    `gradient_dtype`: in which gradients are accumulated; null: the model's. `wire_dtype`: in which they are reduced;
    null: `gradient_dtype`. `tile_bytes`: the most bytes of fp32 gradients that exist at
    a time in place of half-precision ones for the optimizer; null: 4 MiB on a CPU. If the optimizer is not fused, our
    stages also update in tiles of that size. On a GPU, null means 0 for fused Adam and AdamW, whose single kernel needs
    no such gradients, and 256 MiB for others. Under megatron, null means fp32 gradients and no tiles. fsdp2 casts fp32
    shards as it gathers them; if `masters` is false, its shards and the optimizer's states have the dtype `name`.
    """

    name: str = MISSING
    gradient_dtype: str | None = Key(
        "dtype in which gradients are accumulated: fp32, bf16 or fp16; null: the model's",
        words=("fp32", "bf16", "fp16"),
    )(None)
    wire_dtype: str | None = Key(
        "dtype in which gradients are reduced; null: gradient_dtype", words=("fp32", "bf16", "fp16")
    )(None)
    tile_bytes: int | None = Key(
        "limit of the fp32 gradients that an update makes at a time; null: 4 MiB; on a GPU 0 or 256 MiB", unit="bytes",
        words=(str(ONE_PASS),), limits=(2**10, 2**40),
    )(None)  # fmt: skip
    masters: bool = Key(
        "fp32 master weights and states; false, with fsdp2: all states in the model's dtype", omitted=True
    )(True)

    def resolved(self, strategy: str, updated_by: str, optimizer: Optimizer) -> Precision:
        """Fills in the options that depend on the strategy. `updated_by`: cpu or cuda, where the optimizer runs."""
        kind = KINDS[optimizer.name].make
        tile_bytes = usual_tile_bytes(updated_by, kind, optimizer.implementation == "fused")
        usual: dict[str, Any] = {"gradient_dtype": self.name, "tile_bytes": tile_bytes}
        defaults = {**usual, **spec_of(strategy).precision_defaults}
        if tile_bytes == ONE_PASS:
            defaults["tile_bytes"] = tile_bytes
        gradients = self.gradient_dtype or defaults["gradient_dtype"]
        wire = self.wire_dtype or gradients
        # 0 asks for the single kernel; if the engine has none, it uses tiles of the default size, which theory needs
        tile = defaults["tile_bytes"] if self.tile_bytes in (None, ONE_PASS) else self.tile_bytes
        return replace(self, gradient_dtype=gradients, wire_dtype=wire, tile_bytes=tile)

    def problems(self, strategy: str) -> list[str]:
        """Returns error messages for dtypes that are invalid or that the strategy does not support."""
        chosen = {"gradient_dtype": self.gradient_dtype, "wire_dtype": self.wire_dtype}
        unknown = {key: dtype for key, dtype in chosen.items() if dtype not in DTYPES}
        if unknown:
            return [f"precision.{key}={dtype}: use one of {', '.join(DTYPES)}" for key, dtype in unknown.items()]
        problems, spec = [], spec_of(strategy)
        if self.gradient_dtype not in (self.name, "fp32"):
            why = f"the gradients of a {self.name} model are accumulated in {self.name}"
            why += " or fp32" if self.name != "fp32" else ""
            problems.append(f"precision.gradient_dtype={self.gradient_dtype}: {why}")
        if not self.masters and (spec.half != "casts" or self.name == "fp32"):
            casting = ", ".join(name for name, other in specs().items() if other.half == "casts")
            why = f"precision={self.name} with strategy={strategy} has no other way; it is for bf16 with {casting}"
            problems.append(f"precision.masters=false: {why}")
        if spec.half == "casts":
            if self.scales:
                problems.append(f"precision={self.name}: strategy={strategy} scales no losses here; use bf16 or fp32")
            if self.gradient_dtype != self.name:
                why = f"strategy={strategy} has whole gradients in {self.name} and their shards in fp32; leave it out"
                problems.append(f"precision.gradient_dtype={self.gradient_dtype}: {why}")
            if self.wire_dtype != self.name and not self.masters:
                why = f"without fp32 masters strategy={strategy} reduces in {self.name}; leave it out"
                problems.append(f"precision.wire_dtype={self.wire_dtype}: {why}")
            elif self.wire_dtype not in (self.name, "fp32"):
                why = f"strategy={strategy} reduces in {' or '.join(dict.fromkeys((self.name, 'fp32')))}"
                problems.append(f"precision.wire_dtype={self.wire_dtype}: {why}")
        elif not spec.composes.gradient_dtypes:
            why = f"strategy={strategy} keeps and sends gradients in the model's dtype, {self.name}; leave it out"
            other = {key: dtype for key, dtype in chosen.items() if dtype != self.name}
            problems += [f"precision.{key}={dtype}: {why}" for key, dtype in other.items()]
        if self.scales and spec.half == "masters" and not spec.takes("loss_scaling"):
            problems.append(f"precision={self.name}: strategy={strategy} scales no losses here; use bf16 or fp32")
        if self.name != "fp32" and spec.half is None:
            why = f"strategy={strategy} has no fp32 master weights here; use precision=fp32"
            problems.append(f"precision={self.name}: {why}")
        return problems + self.scale_problems()

    def cast(self, model: nn.Module, strategy: str, upcast_frozen: bool = True) -> nn.Module:
        """Casts a model, always built in fp32, with its buffers to the dtype that `strategy` needs. `upcast_frozen`: if
        that is fp32, frozen parameters are in fp32 too. Raises ValueError for a model in another dtype.
        """
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point() and parameter.dtype != torch.float32:  # codes of integers stay as they are
                raise ValueError(f"{name} is {parameter.dtype}: build the model in float32; precision casts it")
        keeps = self.name == "fp32" or (spec_of(strategy).half == "casts" and self.masters)
        for parameter in model.parameters():
            if keeps and not upcast_frozen and not parameter.requires_grad:
                parameter.data = parameter.data.to(self.dtype)
        return model if keeps else model.to(self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.name]

    def engine_options(self, cell: CellKeys, folder: str | None = None) -> dict[str, Any]:
        return self.options_of(cell.strategy.name)

    def options_of(self, strategy: str) -> dict[str, Any]:
        """Returns keyword arguments for the engine of `strategy` that differ from its defaults."""
        gradients, wire = DTYPES[known(self.gradient_dtype)], DTYPES[known(self.wire_dtype)]
        spec = spec_of(strategy)
        if spec.half == "casts" and self.name != "fp32" and self.masters:
            return {"param_dtype": self.dtype, "reduce_dtype": wire}
        if spec.half != "masters":
            return {}
        options: dict[str, Any] = {"tile_bytes": self.tile_bytes}
        if self.gradient_dtype != spec.precision_defaults.get("gradient_dtype", self.name):
            options["gradient_dtype"] = gradients
        if wire != gradients:
            options["wire_dtype"] = wire
        return options

    def theory_shape(self, travels: bool = True) -> PrecisionShape:
        """Returns the bytes per element. If nothing `travels`, nothing is cast for sending."""
        gradients = known(self.gradient_dtype)
        sent = known(self.wire_dtype) if travels else gradients
        return PrecisionShape(DTYPES[gradients].itemsize, DTYPES[sent].itemsize, self.tile_bytes, gradients != sent)

    @property
    def numbers(self) -> set[str]:
        """All dtypes of a gradient between backward and the update."""
        return {self.name, known(self.gradient_dtype), known(self.wire_dtype)}

    @property
    def scales(self) -> bool:
        return False

    def scale_problems(self) -> list[str]:
        return []

    @property
    def label(self) -> str:
        """ "bf16", plus dtypes that differ from it: "bf16, gradient_dtype=fp32"."""
        parts, before = [self.name or ""], self.name
        for key, dtype in (("gradient_dtype", self.gradient_dtype), ("wire_dtype", self.wire_dtype)):
            parts += [f"{key}={dtype}"] if dtype not in (before, None) else []
            before = dtype or before
        return ", ".join(filter(None, [*parts, *(["masters=false"] if not self.masters else [])]))


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
    initial_scale: float | None = Key("initial factor of fp16 losses", limits=(2**-24, 2**100))(65536.0)
    growth: float = Key("factor of the scale after `interval` steps without overflow", limits=(1, 1e6))(2.0)
    backoff: float = Key("factor of the scale after a step that overflowed", limits=(1e-6, 1))(0.5)
    interval: int = Key("steps without overflow after which the scale grows", unit="steps", limits=(1, 1e9))(2000)
    minimum_scale: float = Key("least scale", limits=(2**-24, 2**100))(1.0)

    @property
    def scales(self) -> bool:
        """True: gradients below 6e-8 would be lost."""
        return True

    def scale_problems(self) -> list[str]:
        if self.initial_scale is None:
            why = "fp16 needs loss scaling, for gradients below 6e-8 would be lost; name a scale, as 65536"
            return [f"precision.initial_scale=null: {why}"]
        if self.initial_scale < self.minimum_scale:
            least = f"it must be at least precision.minimum_scale={self.minimum_scale:g}"
            return [f"precision.initial_scale={self.initial_scale:g}: {least}"]
        return []

    def options_of(self, strategy: str) -> dict[str, Any]:
        options = super().options_of(strategy)
        if spec_of(strategy).half == "masters":
            options["loss_scaling"] = LossScaling(
                known(self.initial_scale), self.growth, self.backoff, self.interval, self.minimum_scale
            )
        return options


PRECISIONS: dict[str, type] = {"fp32": Fp32, "bf16": Bf16, "fp16": Fp16}

NORMS = {"2": 2.0, "inf": math.inf}
"""Value of `clip_norm` -> the p of the norm."""
