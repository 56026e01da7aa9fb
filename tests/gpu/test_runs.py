"""Whole runs on a GPU: every strategy trains as DDP does, alone over NCCL and with two ranks that share the GPU."""

from pathlib import Path

import pytest
import torch

from tests.distributed.variants import measured

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)


@pytest.mark.parametrize(("n", "backend"), [(1, "nccl"), (2, "gloo")])
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "megatron"])
def test_trains_as_ddp_does(tmp_path: Path, strategy: str, n: int, backend: str) -> None:
    (expected, of_ddp), (row, results) = (
        measured(tmp_path, name, n, "words", device="cuda", backend=backend) for name in ("ddp", strategy)
    )
    assert list(results.steps["loss"]) == pytest.approx(list(of_ddp.steps["loss"]), rel=1e-5)
    assert row.reserved_bytes >= row.allocated_bytes
    assert (row.ranks_per_gpu, row.step_s is None) == (n, n > 1)
    assert row.states_bytes == row.predicted_states_bytes
    assert expected.psi == row.psi
