"""Fake tensors that act as a GPU's: collectives, kernels and memory that a GPU would have."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cells import cell
from zerobench.execution import CPU, CUDA, Execution, Target, execute
from zerobench.fake.as_gpu import BLAS_WORKSPACE


def executed(target: Target, strategy: str, world_size: int = 4, **more: Any) -> Execution:
    """One cell, executed; it must go well."""
    found = execute(cell(strategy, world_size, **more).config, target=target)
    assert not found.problem
    return found


def most(found: Execution, category: str) -> int:
    """The most bytes of a category on the device in a step."""
    assert found.record is not None
    rows = [row for row in found.record.memory if (row.phase, row.tier, row.category) == ("step", "device", category)]
    return rows[0].max_bytes


@pytest.mark.parametrize(
    "given", [{"kind": "tpu"}, {"kind": "cuda", "attention": "fast"}, {"attention": "flash"}, {"architecture": "z"}]
)
def test_an_unknown_target_is_named_in_a_sentence(given: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="use"):
        Target(**given)


def test_reductions_on_a_gpu_have_no_slots_to_receive_in() -> None:
    """gloo's exchange receives the others' pieces in slots; NCCL reduces in place: the rest is alike."""
    on_cpu, on_gpu = executed(CPU, "zero2", model="wide"), executed(CUDA, "zero2", model="wide")
    assert most(on_gpu, "communication") < most(on_cpu, "communication")
    assert on_gpu.states_bytes <= on_cpu.states_bytes
    assert on_gpu.volume_elements == on_cpu.volume_elements


def test_memory_under_the_allocator_is_the_ledgers_in_blocks_of_512_bytes() -> None:
    for strategy in ("ddp", "zero3", "fsdp2"):
        found = executed(CUDA, strategy)
        assert found.allocated_bytes is not None
        assert found.reserved_bytes is not None
        of_storages = found.allocated_bytes - 2 * BLAS_WORKSPACE["hopper"]
        low, high = found.reserved_bytes
        living = sum(row.storages for row in found.record.lines if row.at == "peak")  # type: ignore[union-attr]
        assert found.allocated_bytes % 512 == 0
        assert found.peak_bytes <= of_storages <= found.peak_bytes + 512 * (living + 64)
        assert found.allocated_bytes <= low <= high < 2 * found.allocated_bytes
    assert executed(CPU, "ddp").allocated_bytes is None


def test_workspaces_are_the_architectures_and_one_per_thread() -> None:
    sizes = {one: executed(Target("cuda", architecture=one), "ddp").allocated_bytes for one in BLAS_WORKSPACE}
    assert sizes["hopper"] - sizes["ampere"] == 2 * (BLAS_WORKSPACE["hopper"] - BLAS_WORKSPACE["ampere"])  # type: ignore[operator]
