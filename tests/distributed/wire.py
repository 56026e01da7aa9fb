"""Run in a network namespace of its own: prints the bytes of a step that really cross the loopback interface, by case.

unshare -n python -m tests.distributed.wire FOLDER CASE ...
"""

from __future__ import annotations

import fcntl
import json
import socket
import struct
import sys
from pathlib import Path
from typing import Any

from tests.cells import cell
from zerobench.config.cell import Cell
from zerobench.config.schema import Measure
from zerobench.config.schema_training import Bf16
from zerobench.launch.start_ranks import launch
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

MEASURED = (
    ("zero1", 2), ("zero2", 3), ("zero3", 4), ("zero2 bf16 twice", 2), ("zero3 bf16 late", 2), ("fsdp2", 2),
)  # fmt: skip
"""(case, number of ranks), all in one process: what it loads takes longer than they do."""


def cell_of(case: str, n: int, **more: Any) -> Cell:
    return cell(case.split()[0], n, "wide", bucket_bytes=BUCKET_BYTES, **CASES.get(case, {}), **more)


def raise_loopback() -> None:
    set_flags, up_and_running = 0x8914, 0x41
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        fcntl.ioctl(one, set_flags, struct.pack("16sh14x", b"lo", up_and_running))


def loopback_bytes() -> int:
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split()[1])


def carried(case: str, n: int, steps: int, folder: str) -> int:
    """Bytes of a run of so many steps, all ranks together."""
    config = cell_of(case, n, measure=Measure(steps=steps, warmup=2)).config
    meeting = f"{folder}/rendezvous {case} {steps}"
    jobs = [RankJob(config, "timed", rank, meeting, folder) for rank in range(n)]
    before = loopback_bytes()
    outcome = launch(run_rank, jobs, Path(folder) / "logs", 120)
    assert outcome.status == "ok", f"{case}: {outcome.reason}"
    return loopback_bytes() - before


def main(folder: str, *cases: str) -> None:
    raise_loopback()
    ranks = dict(MEASURED)
    found = {case: carried(case, ranks[case], 14, folder) - carried(case, ranks[case], 4, folder) for case in cases}
    print(json.dumps({case: more / 10 for case, more in found.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
