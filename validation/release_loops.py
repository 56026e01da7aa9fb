"""The loops that are measured under each release: one model, trained for three steps on N gloo ranks.

    ZEROBENCH_WATCH_TO=RUNS python -m validation.release_loops WORLD_SIZE LOOP ...

This module is run by a release's own Python, with this zerobench and the torch of the release. Each loop is that of a
user: torch's wrapper with its defaults, AdamW, and zerobench.watch around it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

WIDTH, BLOCKS, BATCH, STEPS = 256, 4, 8, 3

Wrapped = tuple[nn.Module, torch.optim.Optimizer]


class ResidualBlock(nn.Module):
    """Two linear layers with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (batch, WIDTH) to the same shape."""
        out: torch.Tensor = x + self.down(nn.functional.gelu(self.up(x)))
        return out


def _ddp(model: nn.Module) -> Wrapped:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model), torch.optim.AdamW(model.parameters())


def _fsdp2(model: nn.Module) -> Wrapped:
    from torch.distributed.fsdp import fully_shard

    for block in model.children():
        fully_shard(block)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters())


def _zero_redundancy(model: nn.Module) -> Wrapped:
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    outer = DistributedDataParallel(model)
    return outer, ZeroRedundancyOptimizer(outer.parameters(), optimizer_class=torch.optim.AdamW)


LOOPS: dict[str, Callable[[nn.Module], Wrapped]] = {
    "ddp": _ddp, "fsdp2": _fsdp2, "zero_redundancy": _zero_redundancy,
}  # fmt: skip
"""Name -> what wraps the model and makes its optimizer."""


def _rank(rank: int, world_size: int, loop: str, meeting: str) -> None:
    """Trains on one rank; rank 0 writes the run."""
    from zerobench.watching import Watch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", store=dist.FileStore(meeting, world_size), rank=rank, world_size=world_size)
    model, optimizer = LOOPS[loop](nn.Sequential(*(ResidualBlock() for _ in range(BLOCKS))))
    with Watch(model, optimizer, name=loop):
        for _ in range(STEPS):
            model(torch.randn(BATCH, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


def main(arguments: list[str]) -> int:
    """Runs the loops one after the other. Returns 1 if one has failed, which a line on standard error says."""
    world_size, loops = int(arguments[0]), arguments[1:]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    failed = 0
    for loop in loops:
        with tempfile.TemporaryDirectory() as aside:
            job: tuple[Any, ...] = (world_size, loop, str(Path(aside) / "meeting"))
            try:
                mp.start_processes(_rank, job, world_size, start_method="fork")
            except (mp.ProcessExitedException, mp.ProcessRaisedException) as error:
                said = [line for line in str(error).splitlines() if line.strip()]
                print(f"{loop}: {said[-1] if said else 'it failed'}", file=sys.stderr)
                failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
