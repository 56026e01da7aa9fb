"""Calls of torch in an exchange of a simulated world, however large the world."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zerobench.host.environment import SIMULATED, rank_environment
from zerobench.zero.comm.hierarchical import connect


class Counted(TorchDispatchMode):
    """Counts operators."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def operators(job: tuple[int, str], tell: Any) -> list[int]:
    """Counts operators of a reduce-scatter, an all-gather and an all-to-all among `n` ranks, on the last of them."""
    n, folder = job
    with rank_environment(n - 1, n, "cpu", SIMULATED, folder, threads=1, timeout_s=60) as device:
        comm = connect(None, device)
        full, here = torch.ones(n * 512), torch.empty(n * 512)
        found = []
        for launch in (
            lambda: comm.reduce_scatter(full),
            lambda: comm.all_gather(full),
            lambda: comm.all_to_all(full, here, "reduce_scatter"),
        ):
            with Counted() as counted:
                launch().wait()
            found.append(counted.calls)
        assert full[-512:].eq(1).all()
        assert full[:-512].eq(0).all()
        assert here[:-512].eq(0).all()
        return found
