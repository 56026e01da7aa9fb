"""DCP's save and load over the ranks, using its planners and storage, with JSON instead of pickles.

DCP's own `save` and `load` send plans and results as pickles: a foreign process that takes a rank's place in a gloo
group could run code on the others. Here each step ends with an exchange of JSON (`Ranks.each`), so that all ranks learn
of a failure.

    save    1 plan: each rank sends its chunks and facts to all    2 assign: rank 0's global plan, a file per rank
            3 write: each rank writes its chunks and sends their locations to all    4 finish: rank 0 writes the index
    load    1 plan: each rank plans the reads that fill its tensors    2 read

DCP plans each rank's writes and reads, and does the resharding: saved and requested chunks are ranges of one flat
tensor, and their intersections are read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, LoadPlan, SavePlan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from .consensus import Ranks
from .index import File, FileOffset
from .metadata import dtype_name
from .safetensors import DTYPES
from .storage import FolderReader, FolderWriter


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
        """Calls DCP's own method, which checks that all ranks' chunks fill every tensor, and adds the merged facts."""
        plans, metadata = super().create_global_plan([replace(plan, planner_data=None) for plan in all_plans])
        facts = self.merge([plan.planner_data for plan in all_plans])
        return plans, replace(metadata, planner_data=facts)

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        """Returns the chunk."""
        assert index.offset is not None
        return self.state_dict[index.fqn].chunks[index.offset[0]]


class LoadPlanner(DefaultLoadPlanner):
    """Plans the reads that fill this rank's Flats, however the tensors were divided into chunks when saved."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict = state_dict
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """Returns an item per saved chunk that overlaps this rank's chunks. Raises ValueError if a gap remains."""
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


def save(ranks: Ranks, tensors: dict[str, Flat], writer: FolderWriter, planner: SavePlanner) -> None:
    """Writes a checkpoint. Raises RuntimeError, with the same message on all ranks, if one fails."""
    is_first, mine, whole = ranks.rank == 0, SavePlan([]), Metadata({})

    def plan() -> Any:
        nonlocal mine
        planner.set_up_planner(tensors, None, is_first)
        mine = planner.create_local_plan()
        return plan_to_json(mine)

    plans = ranks.each(plan)

    def assign() -> Any:
        nonlocal whole
        if not is_first:
            return None
        central, whole = planner.create_global_plan([plan_from_json(one) for one in plans])
        return [
            {"file": str(one.storage_data), "chunks": [_place(item.index) for item in one.items]}
            for one in writer.prepare_global_plan(central)
        ]

    assigned = ranks.each(assign)[0][ranks.rank]

    def write() -> Any:
        chunks = {tuple(place) for place in assigned["chunks"]}
        items = [item for item in mine.items if _place(item.index) in chunks]
        own = planner.finish_plan(replace(mine, items=items, storage_data=Path(assigned["file"])))
        return [result_to_json(one) for one in writer.write_data(own, planner).wait()]

    results = ranks.each(write)
    ranks.each(
        lambda: writer.finish(whole, [list(map(result_from_json, one)) for one in results]) if is_first else None
    )


def load(ranks: Ranks, tensors: dict[str, Flat], reader: FolderReader, planner: LoadPlanner) -> None:
    """Fills `tensors`. Raises RuntimeError, with the same message on all ranks, if one fails."""

    def plan() -> None:
        planner.set_up_planner(tensors, reader.metadata, ranks.rank == 0)
        plans.append(planner.create_local_plan())

    plans: list[Any] = []
    ranks.each(plan)
    ranks.each(lambda: reader.read_data(planner.finish_plan(plans[0]), planner).wait())


def plan_to_json(plan: SavePlan) -> dict[str, Any]:
    """Converts a plan of `SavePlanner`: per chunk (tensor, first element, elements, dtype, elements of the tensor)."""
    items = [
        [*_place(item.index), data.chunk.sizes[0], dtype_name(data.properties.dtype), data.size[0]]
        for item in plan.items
        if (data := item.tensor_data) is not None
    ]
    return {"items": items, "facts": plan.planner_data}


def plan_from_json(told: dict[str, Any]) -> SavePlan:
    """Converts the result of `plan_to_json` back."""
    items = []
    for name, at, numel, dtype, whole in told["items"]:
        box = ChunkStorageMetadata(torch.Size([at]), torch.Size([numel]))
        data = TensorWriteData(box, TensorProperties(DTYPES[dtype]), torch.Size([whole]))
        items.append(WriteItem(MetadataIndex(name, box.offsets), WriteItemType.SHARD, tensor_data=data))
    return SavePlan(items, planner_data=told["facts"])


def result_to_json(result: WriteResult) -> list[Any]:
    """Converts a chunk's location: tensor, first element, byte offset in the file; the file's name, bytes, SHA-256."""
    at: FileOffset = result.storage_data
    return [*_place(result.index), at.offset, at.file.name, at.file.size, at.file.sha256]


def result_from_json(plain: list[Any]) -> WriteResult:
    """Converts the result of `result_to_json` back."""
    name, first, offset, *file = plain
    return WriteResult(MetadataIndex(name, torch.Size([first])), 0, FileOffset(File(*file), offset))


def _place(index: MetadataIndex) -> tuple[str, int]:
    assert index.offset is not None
    return index.fqn, index.offset[0]
