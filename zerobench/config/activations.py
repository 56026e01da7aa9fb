"""ZeRO-R: residual policies of activations, and the buffers that gradients pass through."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..strategies import names_with, spec_of
from ..zero.activations.policies import POLICIES, ActivationPolicy
from .axis import Axis, CellView


@dataclass
class Activation(Axis):
    """Activations between forward and backward: they stay on the device."""

    name: str = "none"

    def validate(self, cell: CellView) -> list[str]:
        """Returns sentences on a policy beside the model's own checkpointing, and beside a search."""
        problems, searched = [], cell.search.checkpointing
        if self.name == "offload" and cell.model.checkpoints:
            words = "model.checkpointing=true computes blocks again; say activation=checkpoint_offload for both"
            problems.append(f"activation=offload: {words}")
        if self.name == "selective" and cell.model.checkpoints:
            words = "model.checkpointing=true keeps the inputs of blocks alone; leave one of the two out"
            problems.append(f"activation=selective: {words}")
        searches = cell.search.memory_limit is not None and cell.model.can_checkpoint
        if self.name != "none" and searches and list(searched) != [cell.recomputes]:
            only = str([cell.recomputes]).lower()
            problems.append(f"activation={self.name}: a search tries all of search.checkpointing; let that be {only}")
        return problems

    def policy(self) -> ActivationPolicy:
        """Returns the policy of the blocks, whatever the model does itself."""
        return POLICIES[self.name]

    @property
    def label(self) -> str:
        """The choice as on a command line: "activation=checkpoint"."""
        return "" if self.name == "none" else f"activation={self.name}"


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
    least_bytes: int = 64 * 1024

    def policy(self) -> ActivationPolicy:
        """Returns the policy of the blocks, whatever the model does itself."""
        return replace(POLICIES[self.name], least_bytes=self.least_bytes)


@dataclass
class CheckpointOffloadActivations(OffloadActivations):
    """Blocks are computed again from inputs that wait in host memory (ZeRO-R's P_a+cpu without its partitioning)."""

    name: str = "checkpoint_offload"


@dataclass
class Buffers(Axis):
    """Constant-size buffers (C_B, ZeRO section 6.2), or one fused buffer that grows with the model."""

    name: str = "constant"

    @property
    def label(self) -> str:
        """The choice as on a command line: "buffers=fused"."""
        return "" if self.name == "constant" else f"buffers={self.name}"


@dataclass
class FusedBuffers(Buffers):
    """Gradients are reduced in one buffer of the model's size, and cast to fp32 all at once."""

    name: str = "fused"

    def validate(self, cell: CellView) -> list[str]:
        """Returns a sentence where the strategy has no buffer to fuse."""
        strategy = cell.strategy
        if not spec_of(strategy.name).composes.fused_buffers:
            others = ", ".join(names_with("fused_buffers"))
            return [f"buffers=fused: strategy={strategy.name} has buffers of its own; use one of {others}"]
        if strategy.has_buckets or cell.precision.gradient_dtype != "fp32":
            return []
        words = "zero3 reduces unit by unit, and gradients in fp32 are not cast: there is nothing to fuse"
        return [f"buffers=fused: {words}; use precision=bf16"]
