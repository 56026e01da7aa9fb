"""In which dtypes a model is trained: what the model, the engine and the theory are told."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from omegaconf import MISSING
from torch import nn

from ..sections import known
from ..strategies import spec_of, specs
from ..theory.shapes import PrecisionShape
from ..zero.options import TILE_BYTES
from ..zero.precision import DTYPES, LossScaling
from .axis import Axis, CellView


@dataclass
class Precision(Axis):
    """Dtypes, each fp32, bf16 or fp16. `name`: the model's; below fp32 the optimizer updates fp32 master weights.

    `gradient_dtype`: in which gradients are accumulated; null: the model's. `wire_dtype`: in which they are reduced;
    null: `gradient_dtype`. `tile_bytes`: most that the fp32 gradients which the optimizer is given in place of
    half-precision ones take at once, 4 MiB where null (256 MiB on a GPU); our stages update in tiles of that size where
    an optimizer is not fused, too. Under megatron null means fp32 gradients, and no tiles. fsdp2 casts fp32 shards as
    it gathers them; with `masters` false there are none, and its shards and the optimizer's states are in `name` too.
    """

    name: str = MISSING
    gradient_dtype: str | None = None
    wire_dtype: str | None = None
    tile_bytes: int | None = None
    masters: bool = True

    def resolved(self, strategy: str, updated_by: str) -> Precision:
        """Returns the section with what was left open filled in as the strategy has it. `updated_by`: cpu or cuda,
        where the optimizer runs.
        """
        usual: dict[str, Any] = {"gradient_dtype": self.name, "tile_bytes": TILE_BYTES[updated_by]}
        defaults = {**usual, **spec_of(strategy).precision_defaults}
        gradients = self.gradient_dtype or defaults["gradient_dtype"]
        wire, tile = self.wire_dtype or gradients, self.tile_bytes or defaults["tile_bytes"]
        return replace(self, gradient_dtype=gradients, wire_dtype=wire, tile_bytes=tile)

    def validate(self, cell: CellView) -> list[str]:
        """Returns sentences on dtypes that make no sense, or are not to be had under the strategy."""
        return self.problems(cell.strategy.name)

    def problems(self, strategy: str) -> list[str]:
        """Returns the sentences of `validate`, which depend on the strategy alone."""
        chosen = {"gradient_dtype": self.gradient_dtype, "wire_dtype": self.wire_dtype}
        unknown = {key: dtype for key, dtype in chosen.items() if dtype not in DTYPES}
        if unknown:
            return [f"precision.{key}={dtype}: use one of {', '.join(DTYPES)}" for key, dtype in unknown.items()]
        problems, spec = [], spec_of(strategy)
        if self.gradient_dtype not in (self.name, "fp32"):
            words = f"the gradients of a {self.name} model are accumulated in {self.name}"
            words += " or fp32" * (self.name != "fp32")
            problems.append(f"precision.gradient_dtype={self.gradient_dtype}: {words}")
        if not self.masters and (spec.half != "casts" or self.name == "fp32"):
            casting = ", ".join(name for name, other in specs().items() if other.half == "casts")
            words = f"precision={self.name} with strategy={strategy} has no other way; it is for bf16 with {casting}"
            problems.append(f"precision.masters=false: {words}")
        if spec.half == "casts":
            problems += self._casting_problems(strategy)
        elif not spec.composes.gradient_dtypes:
            words = f"strategy={strategy} keeps and sends gradients in the model's dtype, {self.name}; leave it out"
            other = {key: dtype for key, dtype in chosen.items() if dtype != self.name}
            problems += [f"precision.{key}={dtype}: {words}" for key, dtype in other.items()]
        if self.scales and spec.half == "masters" and not spec.takes("loss_scaling"):
            problems.append(f"precision={self.name}: strategy={strategy} scales no losses here; use bf16 or fp32")
        if self.name != "fp32" and spec.half is None:
            words = f"strategy={strategy} has no fp32 master weights here; use precision=fp32"
            problems.append(f"precision={self.name}: {words}")
        return problems + self.scale_problems()

    def _casting_problems(self, strategy: str) -> list[str]:
        problems = []
        if self.scales:
            problems.append(f"precision={self.name}: strategy={strategy} scales no losses here; use bf16 or fp32")
        if self.gradient_dtype != self.name:
            words = f"strategy={strategy} has whole gradients in {self.name} and their shards in fp32; leave it out"
            problems.append(f"precision.gradient_dtype={self.gradient_dtype}: {words}")
        if self.wire_dtype != self.name and not self.masters:
            words = f"without fp32 masters strategy={strategy} reduces in {self.name}; leave it out"
            problems.append(f"precision.wire_dtype={self.wire_dtype}: {words}")
        elif self.wire_dtype not in (self.name, "fp32"):
            words = f"strategy={strategy} reduces in {' or '.join(dict.fromkeys((self.name, 'fp32')))}"
            problems.append(f"precision.wire_dtype={self.wire_dtype}: {words}")
        return problems

    def cast(self, model: nn.Module, strategy: str) -> nn.Module:
        """Returns the model, built in fp32 whatever the precision, in the dtype that `strategy` wants it in: buffers
        too. Raises ValueError for a model in another dtype.
        """
        for name, parameter in model.named_parameters():
            if parameter.dtype != torch.float32:
                raise ValueError(f"{name} is {parameter.dtype}: build the model in float32; precision casts it")
        keeps = self.name == "fp32" or (spec_of(strategy).half == "casts" and self.masters)
        return model if keeps else model.to(self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype."""
        return DTYPES[self.name]

    def engine_options(self, cell: CellView, folder: str | None = None) -> dict[str, Any]:
        """Keyword arguments for the engine of the strategy: what differs from its defaults."""
        return self.options_of(cell.strategy.name)

    def options_of(self, strategy: str) -> dict[str, Any]:
        """Keyword arguments for the engine of `strategy`: what differs from its defaults."""
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
        """Returns sizes of an element. Where nothing `travels`, nothing is cast for a wire."""
        gradients = known(self.gradient_dtype)
        sent = known(self.wire_dtype) if travels else gradients
        return PrecisionShape(DTYPES[gradients].itemsize, DTYPES[sent].itemsize, self.tile_bytes, gradients != sent)

    @property
    def numbers(self) -> set[str]:
        """Every dtype that a gradient takes from backward to the update."""
        return {self.name, known(self.gradient_dtype), known(self.wire_dtype)}

    @property
    def scales(self) -> bool:
        """True where the loss is scaled."""
        return False

    def scale_problems(self) -> list[str]:
        """Returns sentences on the loss scale, where there is one."""
        return []

    @property
    def label(self) -> str:
        """ "bf16", with what differs from that: "bf16, gradient_dtype=fp32"."""
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
    initial_scale: float | None = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    minimum_scale: float = 1.0

    @property
    def scales(self) -> bool:
        """True: gradients below 6e-8 would be lost."""
        return True

    def scale_problems(self) -> list[str]:
        """Returns a sentence on a scale that is missing or below its least."""
        if self.initial_scale is None:
            words = "fp16 needs loss scaling, for gradients below 6e-8 would be lost; name a scale, as 65536"
            return [f"precision.initial_scale=null: {words}"]
        if self.initial_scale < self.minimum_scale:
            least = f"it must be at least precision.minimum_scale={self.minimum_scale:g}"
            return [f"precision.initial_scale={self.initial_scale:g}: {least}"]
        return []

    def options_of(self, strategy: str) -> dict[str, Any]:
        """Keyword arguments for the engine of `strategy`: what differs from its defaults."""
        options = super().options_of(strategy)
        if spec_of(strategy).half == "masters":
            options["loss_scaling"] = LossScaling(
                known(self.initial_scale), self.growth, self.backoff, self.interval, self.minimum_scale
            )
        return options


PRECISIONS: dict[str, type] = {"fp32": Fp32, "bf16": Bf16, "fp16": Fp16}
