"""DCP's two operations over the ranks, by its planners and storage, with JSON in place of pickles.

DCP's own `save` and `load` send plans and results as pickles: a stranger's process that takes a rank's place in a gloo
group could run code on the others. Here each step ends with an exchange of JSON (`Ranks.each`), after which all ranks
know of a failure.

    save    1 plan: each rank's chunks and facts to all    2 assign: rank 0's global plan, a file for each rank
            3 write: each rank its chunks; what is where goes to all    4 finish: rank 0 writes the index
    load    1 plan: each rank the reads that fill its own tensors    2 read
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import LoadPlanner, SavePlan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from .consensus import Ranks
from .index import File, FileOffset
from .metadata import dtype_name
from .planner import Flat, SavePlanner
from .safetensors import DTYPES
from .storage import FolderReader, FolderWriter


def save(ranks: Ranks, tensors: dict[str, Flat], writer: FolderWriter, planner: SavePlanner) -> None:
    """Writes a checkpoint. Raises RuntimeError, the same sentence on all ranks, where one fails."""
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
    """Fills `tensors`. Raises RuntimeError, the same sentence on all ranks, where one fails."""

    def plan() -> None:
        planner.set_up_planner(tensors, reader.metadata, ranks.rank == 0)
        plans.append(planner.create_local_plan())

    plans: list[Any] = []
    ranks.each(plan)
    ranks.each(lambda: reader.read_data(planner.finish_plan(plans[0]), planner).wait())


def plan_to_json(plan: SavePlan) -> dict[str, Any]:
    """Converts a plan of `SavePlanner`: per chunk its tensor, first element, elements, dtype, and the tensor's."""
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
    """Converts the place of a chunk: tensor, first element, byte in the file; name, bytes and SHA-256 of that."""
    at: FileOffset = result.storage_data
    return [*_place(result.index), at.offset, at.file.name, at.file.size, at.file.sha256]


def result_from_json(plain: list[Any]) -> WriteResult:
    """Converts the result of `result_to_json` back."""
    name, first, offset, *file = plain
    return WriteResult(MetadataIndex(name, torch.Size([first])), 0, FileOffset(File(*file), offset))


def _place(index: MetadataIndex) -> tuple[str, int]:
    assert index.offset is not None
    return index.fqn, index.offset[0]
