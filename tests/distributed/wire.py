"""Run in a network namespace of its own: counts what really crosses the loopback interface in STEPS steps.

unshare -n python -m tests.distributed.wire CASE WORLD_SIZE STEPS FOLDER
"""

from __future__ import annotations

import fcntl
import socket
import struct
import sys
from pathlib import Path
from typing import Any

from tests.cells import cell
from zerobench.config.resolve import Cell
from zerobench.config.schema import Measure
from zerobench.config.schema_training import Bf16
from zerobench.launch.processes import launch
from zerobench.worker import RankJob, run_rank

BUCKET_BYTES = 2**20
"""Large messages: each brings headers and acknowledgments along, how many is up to the moment. With buckets of 64 KiB
they are 1.8 % and more at three ranks.
"""

CASES: dict[str, dict[str, Any]] = {
    "zero2 bf16 twice": {"precision": Bf16(gradient_dtype="fp32", wire_dtype="bf16"), "accumulation": 2},
    "zero3 bf16 late": {"precision": Bf16(), "accumulation": 2, "strategy": {"accumulate": "last"}},
}
"""Cells by name, which begins with the strategy; the name of a strategy alone is its plain cell."""


def cell_of(case: str, n: int, **more: Any) -> Cell:
    return cell(case.split()[0], n, "wide", bucket_bytes=BUCKET_BYTES, **CASES.get(case, {}), **more)


def raise_loopback() -> None:
    set_flags, up_and_running = 0x8914, 0x41
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        fcntl.ioctl(one, set_flags, struct.pack("16sh14x", b"lo", up_and_running))


def loopback_bytes() -> int:
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split()[1])


def main(case: str, n: int, steps: int, folder: str) -> None:
    raise_loopback()
    config = cell_of(case, n, measure=Measure(steps=steps, warmup=2)).config
    jobs = [RankJob(config, "timed", rank, f"{folder}/rendezvous-{steps}", folder) for rank in range(n)]
    outcome = launch(run_rank, jobs, Path(folder) / "logs", 120)
    assert outcome.status == "ok", outcome.reason
    print(loopback_bytes())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
