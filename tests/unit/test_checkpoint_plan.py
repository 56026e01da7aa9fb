"""Plans of reads: they fill what a rank holds, however it was cut when it was saved, or are refused."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from zerobench.zero.checkpoint.operations import Flat, LoadPlanner


def metadata(chunks: list[tuple[int, int]], numel: int = 12) -> Metadata:
    boxes = [ChunkStorageMetadata(torch.Size([at]), torch.Size([size])) for at, size in chunks]
    properties = TensorProperties(torch.float32)
    return Metadata({"weight": TensorStorageMetadata(properties, torch.Size([numel]), boxes)})


def reads(saved: Metadata, wanted: dict[int, int], name: str = "weight") -> list[tuple[int, int, int]]:
    """(element of the tensor, element of its saved chunk, elements) of each read for chunks {begin: elements}."""
    flat = Flat(12, torch.float32, {at: torch.empty(size) for at, size in wanted.items()})
    planner = LoadPlanner()
    planner.set_up_planner({name: flat}, saved)
    items = planner.create_local_plan().items
    return [
        (item.dest_index.offset[0] + item.dest_offsets[0], item.storage_offsets[0], item.lengths[0]) for item in items
    ]


def test_what_saved_and_wanted_chunks_share_is_read() -> None:
    assert reads(metadata([(0, 4), (4, 8)]), {2: 6}) == [(2, 2, 2), (4, 0, 4)]
    assert reads(metadata([(0, 12)]), {0: 3, 9: 3}) == [(0, 0, 3), (9, 9, 3)]


@pytest.mark.parametrize(("chunks", "name"), [([(0, 4), (8, 4)], "weight"), ([(0, 12)], "bias")])
def test_elements_that_were_not_saved_are_missed(chunks: list[tuple[int, int]], name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: the checkpoint lacks some of its elements"):
        reads(metadata(chunks), {2: 6}, name)
