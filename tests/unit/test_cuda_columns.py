"""What CUDA's allocator says, as the timed pass keeps it; torch.cuda is played, for there need be no GPU."""

from __future__ import annotations

from unittest import mock

import torch

from zerobench.join import PROCESS_MEMORY
from zerobench.probes.clock import _allocator_memory
from zerobench.records import RunRow

STATS = {
    "allocated_bytes.all.peak": 100,
    "reserved_bytes.all.peak": 160,
    "inactive_split_bytes.all.peak": 40,
    "num_alloc_retries": 2,
}


def test_the_allocators_own_figures_are_kept() -> None:
    with (
        mock.patch.object(torch.cuda, "memory_stats", return_value=STATS),
        mock.patch.object(torch.cuda, "mem_get_info", return_value=(700, 1000)),
    ):
        memory = _allocator_memory()
    assert memory == {
        "allocated_bytes": 100,
        "reserved_bytes": 160,
        "split_bytes": 40,
        "alloc_retries": 2,
        "device_used_bytes": 300,
    }
    assert set(memory) < set(PROCESS_MEMORY) <= set(RunRow.__dataclass_fields__)
