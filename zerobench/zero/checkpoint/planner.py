"""What each rank writes and reads, as DCP's plans. Resharding is DCP's: chunks that were saved and chunks that are
wanted are ranges of the same flat tensor, and what they share is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, LoadPlan, SavePlan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list


@dataclass
class Flat:
    """What this rank holds of a flattened tensor of `numel` elements: 1-D chunks, by the element that they start at."""

    numel: int
    dtype: torch.dtype
    chunks: dict[int, torch.Tensor]

    def boxes(self) -> list[ChunkStorageMetadata]:
        """The chunks as DCP describes them."""
        return [ChunkStorageMetadata(torch.Size([at]), chunk.shape) for at, chunk in self.chunks.items()]


class SavePlanner(DefaultSavePlanner):
    """Plans the chunks of this rank's Flats. The ranks' facts travel with the plans, and `merge` makes one of them."""

    def __init__(self, facts: dict[str, Any], merge: Callable[[list[dict[str, Any]]], dict[str, Any]]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.facts = facts
        self.merge = merge

    def create_local_plan(self) -> SavePlan:
        """One item a chunk."""
        items = []
        for name, flat in self.state_dict.items():
            for box in flat.boxes():
                data = TensorWriteData(box, TensorProperties(flat.dtype), torch.Size([flat.numel]))
                items.append(WriteItem(MetadataIndex(name, box.offsets), WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items, planner_data=self.facts)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """DCP's own, which checks that the chunks of all ranks fill every tensor, and the merged facts."""
        plans, metadata = super().create_global_plan([replace(plan, planner_data=None) for plan in all_plans])
        facts = self.merge([plan.planner_data for plan in all_plans])
        return plans, replace(metadata, planner_data=facts)

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        """The chunk itself."""
        assert index.offset is not None
        return self.state_dict[index.fqn].chunks[index.offset[0]]


class LoadPlanner(DefaultLoadPlanner):
    """Plans the reads that fill the chunks of this rank's Flats, wherever and however the tensors were cut."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict = state_dict
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """As many items as saved chunks overlap ours. Raises ValueError where they leave a gap."""
        assert self.metadata is not None
        items = []
        for name, flat in self.state_dict.items():
            saved: Any = self.metadata.state_dict_metadata.get(name)
            found = create_read_items_for_chunk_list(name, saved, flat.boxes()) if saved else []
            if sum(item.lengths[0] for item in found) != sum(chunk.numel() for chunk in flat.chunks.values()):
                raise ValueError(f"{name}: the checkpoint lacks some of its elements")
            items += found
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The chunk to be filled."""
        assert index.offset is not None
        return self.state_dict[index.fqn].chunks[index.offset[0]]
