"""Where shards live, how bytes travel and how activations are kept: choices that compose with a stage.

tiers         which parts of the model states live in host memory or in files
ZeRO-R        policies for activations, and the buffers that gradients pass through
ZeRO++        on zero3: codecs for communication, and secondary shards

Each is a separate group, with an axis per choice (axis.py).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from .. import zero
from ..sections import Key
from ..strategies import names_with, spec_of, specs
from ..theory.shapes import NOWHERE, TierShape
from ..zero.activations.policies import POLICIES, ActivationPolicy
from ..zero.comm.zeropp import Zeropp
from ..zero.offload.disk import problems_of_path
from .axis import CellKeys, Choice

MIB = 2**20


OPTIMIZER = Key("masters and optimizer states leave the device")
GRADIENTS = Key("gradient shards leave the device")
PARAMETERS = Key("parameter shards leave the device; null: under zero3")
FRACTION = Key("part of the optimizer's shard that leaves", unit="of 1", limits=(1e-9, 1))


@dataclass
class OffloadConfig(Choice):
    """Which part of the model states lives in another tier than the device: none."""

    group: ClassVar = "offload"
    name: str = "none"

    def resolved(self, strategy: str) -> OffloadConfig:
        """Returns the section with the options that depend on the strategy filled in."""
        return self

    def theory_shape(self) -> TierShape:
        """Returns the tier of each of the model states."""
        return NOWHERE

    def files_in(self, folder: str) -> str | None:
        """Returns where ranks create folders for states in files: `path`, or the run's `folder`; None without files."""
        return None

    @property
    def updates_on_host(self) -> bool:
        """Whether the CPU updates the optimizer's shard."""
        return bool(getattr(self, "optimizer", False))

    @property
    def exact_steps(self) -> int | None:
        """Number of first steps whose updates are not delayed; None if no update is."""
        return None

    @property
    def settles_after(self) -> int:
        """Number of steps before the steady state. The step after the last update on time makes no update: its
        gradients are kept for the next step.
        """
        return 0 if self.exact_steps is None else self.exact_steps + 1

    def _refused(self, cell: CellKeys) -> list[str]:
        strategy = cell.strategy.name
        if spec_of(strategy).composes.offload:
            return []
        others = ", ".join(names_with("offload"))
        return [f"offload={self.name}: strategy={strategy} does not offload here; use one of {others}"]


@dataclass
class CpuOffload(OffloadConfig):
    """ZeRO-Offload (arXiv 2101.06840): the parts named here live in pinned host memory, and the update runs there.

    `fraction` of the optimizer's shard goes, the rest stays. `delayed`: from step `delayed_after` on the update runs
    behind the next step's forward and backward, whose parameters are one update older (delayed parameter update).
    """

    name: str = "cpu"
    optimizer: bool = OPTIMIZER(True)
    gradients: bool = GRADIENTS(True)
    parameters: bool = PARAMETERS(False)
    fraction: float = FRACTION(1.0)
    delayed: bool = Key("updates run behind the next step, whose parameters are one update older")(False)
    delayed_after: int = Key("steps after which updates are late", unit="steps", limits=(0, 1e6))(40)

    def validate(self, cell: CellKeys) -> list[str]:
        if refused := self._refused(cell) or _whole_parameters(cell.strategy.name, self.parameters):
            return refused
        problems = []
        if self.delayed and cell.precision.name == "fp16":
            problems.append("offload.delayed=true: loss scaling must judge an update before the next; use bf16 or fp32")
        return problems + _problems_of_policy(self.policy(), cell.strategy.name)

    def engine_options(self, cell: CellKeys, folder: str | None = None) -> dict[str, Any]:
        return {"offload": self.policy()}

    def policy(self) -> zero.Offload:
        delayed_after = self.delayed_after if self.delayed else None
        return zero.Offload(
            optimizer=self.optimizer, gradients=self.gradients, parameters=self.parameters, fraction=self.fraction,
            delayed_after=delayed_after,
        )  # fmt: skip

    def theory_shape(self) -> TierShape:
        return TierShape("host", self.optimizer, self.gradients, self.parameters, self.fraction, delayed=self.delayed)

    @property
    def exact_steps(self) -> int | None:
        return self.delayed_after if self.delayed else None


@dataclass
class NvmeOffloadConfig(OffloadConfig):
    """ZeRO-Infinity (arXiv 2104.07857): the parts live in files under `path` (null: the run's own folder next to the
    results), read and written in blocks of `block_bytes`, `depth` at a time, through a pool of `buffers` of them.

    `parameters`: null means under zero3. `direct`: past the page cache if the file system can.
    """

    name: str = "nvme"
    path: str | None = Key("folder of the files; null: the run's own", rule="a folder")(None)
    optimizer: bool = OPTIMIZER(True)
    gradients: bool = GRADIENTS(True)
    parameters: bool | None = PARAMETERS(None)
    fraction: float = FRACTION(1.0)
    block_bytes: int = Key("size of one read or write", unit="bytes", limits=(4096, 2**30))(4 * MIB)
    buffers: int = Key(
        "size of the pool in host memory through which files are read and written", unit="blocks", limits=(8, 65536)
    )(16)
    depth: int = Key("blocks that are read or written at a time", unit="blocks", limits=(1, 256))(8)
    direct: bool = Key("bypass the page cache if the file system can")(True)

    def resolved(self, strategy: str) -> OffloadConfig:
        leave = spec_of(strategy).composes.offload
        parameters = "parameters" in leave if self.parameters is None and leave else self.parameters
        return replace(self, parameters=parameters, path=self.path and os.path.expanduser(self.path))

    def validate(self, cell: CellKeys) -> list[str]:
        strategy = cell.strategy.name
        if refused := self._refused(cell) or _whole_parameters(strategy, bool(self.parameters)):
            return refused
        problems = problems_of_path(self.path) if self.path else []
        problems = [f"offload.path={problem}" for problem in problems]
        return problems + _problems_of_policy(self.policy(strategy), strategy)

    def engine_options(self, cell: CellKeys, folder: str | None = None) -> dict[str, Any]:
        return {"offload": self.policy(cell.strategy.name, folder)}

    def policy(self, strategy: str, folder: str | None = None) -> zero.NvmeOffload:
        return zero.NvmeOffload(
            path=self.path or folder or "(the run's own folder)", optimizer=self.optimizer, gradients=self.gradients,
            parameters=_parameters_leave(strategy) if self.parameters is None else self.parameters,
            fraction=self.fraction,
            block_bytes=self.block_bytes, buffers=self.buffers, depth=self.depth, direct=self.direct,
        )  # fmt: skip

    def theory_shape(self) -> TierShape:
        return TierShape(
            "nvme", self.optimizer, self.gradients, bool(self.parameters), self.fraction,
            block_bytes=self.block_bytes, buffers=self.buffers, direct=self.direct,
        )  # fmt: skip

    def files_in(self, folder: str) -> str | None:
        return self.path or folder


def _whole_parameters(strategy: str, parameters: bool) -> list[str]:
    if not parameters or _parameters_leave(strategy):
        return []
    others = " or ".join(name for name in specs() if _parameters_leave(name))
    return [f"offload.parameters=true: strategy={strategy} has whole parameters on every rank; use {others}"]


def _parameters_leave(strategy: str) -> bool:
    return "parameters" in spec_of(strategy).composes.offload


def _problems_of_policy(policy: zero.Offload | zero.NvmeOffload, strategy: str) -> list[str]:
    try:
        policy.check(strategy, spec_of(strategy).composes.offload)
    except ValueError as error:
        return [str(error)]
    return []


@dataclass
class Activation(Choice):
    """Activations between forward and backward: they stay on the device."""

    group: ClassVar = "activation"
    name: str = "none"

    def validate(self, cell: CellKeys) -> list[str]:
        problems, searched = [], cell.search.checkpointing
        if self.name == "offload" and cell.model.checkpoints:
            why = "model.checkpointing=true computes blocks again; say activation=checkpoint_offload for both"
            problems.append(f"activation=offload: {why}")
        if self.name == "selective" and cell.model.checkpoints:
            why = "model.checkpointing=true keeps the inputs of blocks alone; leave one of the two out"
            problems.append(f"activation=selective: {why}")
        searches = cell.search.memory_limit is not None and cell.model.can_checkpoint
        if self.name != "none" and searches and list(searched) != [cell.recomputes]:
            only = str([cell.recomputes]).lower()
            problems.append(f"activation={self.name}: a search tries all of search.checkpointing; let that be {only}")
        return problems

    def policy(self) -> ActivationPolicy:
        """Returns the policy for the blocks, regardless of checkpointing by the model itself."""
        return POLICIES[self.name]


@dataclass
class CheckpointActivations(Activation):
    """Blocks keep their inputs alone and compute the rest again in backward."""

    name: str = "checkpoint"


@dataclass
class SelectiveActivations(Activation):
    """Blocks keep their inputs, attention's outputs and every second matrix product (torchtitan's choice by operators),
    and compute the rest again in backward.
    """

    name: str = "selective"


@dataclass
class OffloadActivations(Activation):
    """Sends a block's saved tensors of `least_bytes` and more to host memory, and fetches them back in reverse
    order ahead of its use.
    """

    name: str = "offload"
    least_bytes: int = Key("smallest tensor that leaves the device, or is divided", unit="bytes", limits=(0, 2**40))(
        64 * 1024
    )

    def policy(self) -> ActivationPolicy:
        return replace(POLICIES[self.name], least_bytes=self.least_bytes)


@dataclass
class CheckpointOffloadActivations(OffloadActivations):
    """Blocks are computed again from inputs that wait in host memory (P_a+cpu without P_a)."""

    name: str = "checkpoint_offload"


@dataclass
class PartitionActivations(OffloadActivations):
    """ZeRO-R's P_a: each of the ranks that share the model keeps a part of a block's input, and the whole is
    gathered before the block is computed again.
    """

    name: str = "partition"

    def validate(self, cell: CellKeys) -> list[str]:
        if cell.tensor_parallel > 1:
            return super().validate(cell)
        why = "it is for ranks that share a model, which would all keep the same; let tensor_parallel be 2 or more"
        return [f"activation={self.name}: {why}, or use activation=checkpoint"]


@dataclass
class PartitionOffloadActivations(PartitionActivations):
    """ZeRO-R's P_a+cpu: the parts wait in host memory."""

    name: str = "partition_offload"


@dataclass
class Buffers(Choice):
    """Constant-size buffers (C_B, ZeRO section 6.2), or one fused buffer that grows with the model."""

    group: ClassVar = "buffers"
    usual: ClassVar = "constant"
    name: str = "constant"


@dataclass
class FusedBuffers(Buffers):
    """Gradients are reduced in one buffer of the model's size, and cast to fp32 all at once."""

    name: str = "fused"

    def validate(self, cell: CellKeys) -> list[str]:
        strategy = cell.strategy
        if not spec_of(strategy.name).composes.fused_buffers:
            others = ", ".join(names_with("fused_buffers"))
            return [f"buffers=fused: strategy={strategy.name} has buffers of its own; use one of {others}"]
        if strategy.has_buckets or cell.precision.gradient_dtype != "fp32":
            return []
        why = "zero3 reduces unit by unit, and gradients in fp32 are not cast: there is nothing to fuse"
        return [f"buffers=fused: {why}; use precision=bf16"]


QUANTIZE_WEIGHTS = Key("parameters are gathered in int8")
SECONDARY_SHARDS = Key("backward gathers from secondary shards inside a node")
DIFFERENCES = Key("secondary shards stay; differences from them go between nodes in int4", omitted=True)
BITS_WITHIN = Key(
    "bits of quantized gradients within a node, 4 or 8; between nodes 4", unit="bits", limits=(4, 8), omitted=True
)
QUANTIZE_GRADIENTS = Key("gradients are reduced in int4, in two hops")


@dataclass
class ZeroppConfig(Choice):
    """ZeRO++ (arXiv 2306.10209) on zero3: nothing of it."""

    group: ClassVar = "zeropp"
    name: str = "none"

    def theory_shape(self) -> dict[str, Any]:
        """Returns the fields of theory's GroupShape that differ from their defaults."""
        return {}


@dataclass
class PartsOfZeropp(ZeroppConfig):
    """Which of its three parts, and elements a quantization block has. A choice's own part cannot be taken from it;
    others can be added.
    """

    quantize_weights: bool = QUANTIZE_WEIGHTS(False)
    secondary_shards: bool = SECONDARY_SHARDS(False)
    quantize_gradients: bool = QUANTIZE_GRADIENTS(False)
    weight_block: int = Key("elements that share a scale in parameters' codes", unit="elements", limits=(8, 2**20))(256)
    gradient_block: int = Key("elements that share a scale in gradients' codes", unit="elements", limits=(8, 2**20))(
        256
    )
    bits_within: int = BITS_WITHIN(4)
    differences: bool = DIFFERENCES(False)

    def validate(self, cell: CellKeys) -> list[str]:
        chosen, name = f"zeropp={self.name}", cell.strategy.name
        if not spec_of(name).composes.zeropp:
            why = f"it is for {' or '.join(names_with('zeropp'))}, whose gathers and reductions it shortens"
            return [f"{chosen}: {why}; leave it out with strategy={name}"]
        if cell.shard_group is not None:
            return [f"{chosen}: its shards are over all ranks; leave shard_group={cell.shard_group} out"]
        others = ", ".join(choice for choice in CHOICES if choice not in (self.name, "all"))
        named = [field.name for field in fields(self) if field.default is True]
        if missing := [part for part in named if not getattr(self, part)]:
            why = f"{chosen} means that part; use one of {others}, and add what else is wanted"
            return [f"zeropp.{part}=false: {why}" for part in missing]
        try:
            replace(self, weight_block=256, gradient_block=256).policy()  # block sizes are checked by their limits
        except ValueError as error:
            return [str(error)]
        ranks, codes = cell.world_size or 1, self.quantize_weights or self.quantize_gradients
        if (codes and not self.differences) or ranks == 1 or cell.node_size not in (None, ranks):
            return []
        why = f"all {ranks} ranks are one node, so that its gathers would be plain zero3's"
        return [f"{chosen}: {why}; let node_size be a divisor of world_size={ranks} below it"]

    def engine_options(self, cell: CellKeys, folder: str | None = None) -> dict[str, Any]:
        return {"zeropp": self.policy()}

    def policy(self) -> Zeropp:
        return Zeropp(
            quantize_weights=self.quantize_weights, secondary_shards=self.secondary_shards,
            quantize_gradients=self.quantize_gradients, weight_block=self.weight_block,
            gradient_block=self.gradient_block, bits_within=self.bits_within, differences=self.differences,
        )  # fmt: skip

    def theory_shape(self) -> dict[str, Any]:
        return {
            "weight_block": self.weight_block if self.quantize_weights else None,
            "gradient_block": self.gradient_block if self.quantize_gradients else None,
            "difference_block": self.weight_block if self.differences else None,
            "secondary": self.secondary_shards, "bits_within": self.bits_within,
        }  # fmt: skip


@dataclass
class Qwz(PartsOfZeropp):
    """Parameters are gathered in int8."""

    name: str = "qwz"
    quantize_weights: bool = QUANTIZE_WEIGHTS(True)


@dataclass
class Hpz(PartsOfZeropp):
    """The backward gathers from secondary shards inside a node."""

    name: str = "hpz"
    secondary_shards: bool = SECONDARY_SHARDS(True)


@dataclass
class Qgz(PartsOfZeropp):
    """Gradients are exchanged in int4, first inside a node, then between nodes."""

    name: str = "qgz"
    quantize_gradients: bool = QUANTIZE_GRADIENTS(True)


@dataclass
class AllOfZeropp(PartsOfZeropp):
    """The three together."""

    name: str = "all"
    quantize_weights: bool = QUANTIZE_WEIGHTS(True)
    secondary_shards: bool = SECONDARY_SHARDS(True)
    quantize_gradients: bool = QUANTIZE_GRADIENTS(True)


CHOICES: dict[str, type] = {"none": ZeroppConfig, "qwz": Qwz, "hpz": Hpz, "qgz": Qgz, "all": AllOfZeropp}

SCHEMAS: dict[str, dict[str, type]] = {
    "offload": {"none": OffloadConfig, "cpu": CpuOffload, "nvme": NvmeOffloadConfig},
    "activation": {
        "none": Activation,
        "checkpoint": CheckpointActivations,
        "selective": SelectiveActivations,
        "offload": OffloadActivations,
        "checkpoint_offload": CheckpointOffloadActivations,
        "partition": PartitionActivations,
        "partition_offload": PartitionOffloadActivations,
    },
    "buffers": {"constant": Buffers, "fused": FusedBuffers},
    "zeropp": CHOICES,
}
"""Group -> choice -> dataclass, the default choice first."""
