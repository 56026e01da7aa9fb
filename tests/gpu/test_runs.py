"""Whole runs on a GPU: every strategy trains as DDP does, alone over NCCL and with two ranks that share the GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cells import cell
from zerobench.results import tables
from zerobench.sweep import cell as cells

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)


def run(folder: Path, strategy: str, n: int, backend: str) -> tuple[Any, list[float]]:
    one = cell(strategy, n, "words", results_dir=str(folder), device="cuda", backend=backend)
    assert not one.problems, one.problems
    row = cells.run_cell(one, lambda _: None)
    assert row.status == "ok", row.reason
    return row, list(tables.load(folder / row.run_id).steps["loss"])


@pytest.mark.parametrize(("n", "backend"), [(1, "nccl"), (2, "gloo")])
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "megatron"])
def test_trains_as_ddp_does(tmp_path: Path, strategy: str, n: int, backend: str) -> None:
    expected, losses = run(tmp_path, "ddp", n, backend)
    row, mine = run(tmp_path, strategy, n, backend)
    assert mine == pytest.approx(losses, rel=1e-5)
    assert row.reserved_bytes >= row.allocated_bytes
    assert (row.ranks_per_gpu, row.step_s is None) == (n, n > 1)
    assert row.states_bytes == row.predicted_states_bytes
    assert expected.psi == row.psi
