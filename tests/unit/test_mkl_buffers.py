"""Buffers that MKL keeps are told apart from memory of the code that is measured."""

import pytest
import torch

from tests.ranks import run_ranks
from zerobench.probes import malloc_heap
from zerobench.probes.malloc_heap import HeapGrowth, malloc_bytes

SIDE = 640


def product(rank: int, n: int) -> tuple[int, int | None, int]:
    """In a fresh process: MKL's buffers after its first product, growth of the heap, and of all that malloc gave."""
    torch.ones(8, 8) @ torch.ones(8, 8)
    grown = HeapGrowth()
    a, b, before = torch.ones(SIDE, SIDE), torch.ones(SIDE, SIDE), malloc_bytes() or 0
    grown.begin()
    c = a @ b
    return malloc_heap.mkl_bytes(), grown.most(), (malloc_bytes() or 0) - before - c.nbytes


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch has no MKL")
def test_mkls_buffers_are_not_memory_of_the_code_that_multiplies() -> None:
    """Fails where torch's build has MKL and hides its function: then every run would be told of its buffers."""
    assert malloc_heap._mem_stat() is not None
    [(buffers, growth, all_of_malloc)] = run_ranks(1, product)
    assert growth is None or growth < 2 * 2**20
    assert all_of_malloc >= buffers


def test_a_build_without_mkl_has_no_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    malloc_heap._mem_stat.cache_clear()
    assert malloc_heap.mkl_bytes() == 0
    malloc_heap._mem_stat.cache_clear()
