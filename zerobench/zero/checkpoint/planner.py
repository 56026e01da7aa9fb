"""DCP plans of each rank's writes and reads. Resharding is DCP's: saved and requested chunks are ranges of one flat
tensor, and their intersections are read.
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
    """This rank's part of a flattened tensor of `numel` elements: 1-D chunks, by their first element."""

    numel: int
    dtype: torch.dtype
    chunks: dict[int, torch.Tensor]

    def boxes(self) -> list[ChunkStorageMetadata]:
        """Returns the chunks in DCP's form."""
        return [ChunkStorageMetadata(torch.Size([at]), chunk.shape) for at, chunk in self.chunks.items()]


class SavePlanner(DefaultSavePlanner):
    """Plans the writes of this rank's Flats. Each plan carries its rank's facts, which `merge` combines."""

    def __init__(self, facts: dict[str, Any], merge: Callable[[list[dict[str, Any]]], dict[str, Any]]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.facts = facts
        self.merge = merge

    def create_local_plan(self) -> SavePlan:
        """Returns one item per chunk."""
        items = []
        for name, flat in self.state_dict.items():
            for box in flat.boxes():
                data = TensorWriteData(box, TensorProperties(flat.dtype), torch.Size([flat.numel]))
                items.append(WriteItem(MetadataIndex(name, box.offsets), WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items, planner_data=self.facts)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Calls DCP's own, which checks that all ranks' chunks fill every tensor, and adds the merged facts."""
        plans, metadata = super().create_global_plan([replace(plan, planner_data=None) for plan in all_plans])
        facts = self.merge([plan.planner_data for plan in all_plans])
        return plans, replace(metadata, planner_data=facts)

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        """Returns the chunk."""
        assert index.offset is not None
        return self.state_dict[index.fqn].chunks[index.offset[0]]


class LoadPlanner(DefaultLoadPlanner):
    """Plans the reads that fill this rank's Flats, whichever chunks the tensors were saved in."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict = state_dict
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """Returns an item per saved chunk that overlaps one of ours. Raises ValueError where they leave a gap."""
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
        """Returns the chunk to fill."""
        assert index.offset is not None
        return self.state_dict[index.fqn].chunks[index.offset[0]]
