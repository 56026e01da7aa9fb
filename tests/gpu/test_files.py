"""The file tier's memory on a GPU: pinned, aligned, copied to and from without waiting, read and written directly."""

from pathlib import Path

import pytest
import torch

from tests.faults.disk import opened
from zerobench.zero.offload.disk import ALIGN_BYTES, Pool

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)


def test_a_pinned_pool_between_a_gpu_and_a_file(tmp_path: Path) -> None:
    size = 2**20
    pool = Pool(size, 3, pinned=True)
    values = torch.arange(size // 4, dtype=torch.int32, device="cuda")
    with opened(tmp_path) as store:
        region, there, back = store.allocate(size), pool.take(), pool.take()
        assert there.is_pinned()
        assert there.data_ptr() % ALIGN_BYTES == 0
        there.view(torch.int32).copy_(values, non_blocking=True)
        torch.cuda.synchronize()
        pool.give(there, after=region.write(there))
        region.read(back).wait()
        assert torch.equal(back.view(torch.int32).to("cuda", non_blocking=True), values)
        pool.give(back)
        store.drain()
        assert pool.taken == 0
