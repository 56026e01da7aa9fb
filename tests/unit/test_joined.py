"""The passes of a joined job, both sides in one process: what they come home with, and what they leave in the store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from zerobench.cluster.job import Job, JobContext
from zerobench.cluster.serialize import to_plain
from zerobench.launch import over_cluster
from zerobench.launch.processes import Outcome

PASSES = 12
DISK_FULL = 5
"""The pass in which rank 1's process fails."""


def double(job: int, tell: Callable[[Any], None]) -> int:
    return 2 * job


def launch_here(worker: Any, jobs: Sequence[int], log_dir: Path, *_: Any, first: int = 0, **__: Any) -> Outcome:
    """In place of launch.launch: no processes."""
    if first == 1 and jobs[0] == DISK_FULL:
        raise OSError(28, "No space left on device")
    return Outcome("ok", "", [worker(job, print) for job in jobs])


def follow(mine: JobContext) -> None:
    """joined.follow without its signals, which a thread cannot have."""
    while (order := over_cluster._next_order(mine)) is not None:
        if mine.job.rank < len(order["jobs"]):
            mine.store.post(f"end/{mine.passes}/{mine.job.rank}", to_plain(over_cluster._end_of(mine, order)))


def test_a_long_sweep_leaves_little_in_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(over_cluster.here, "launch", launch_here)
    monkeypatch.setattr(over_cluster, "POLL_S", 0.005)
    monkeypatch.setitem(over_cluster.WORKERS, "double", double)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    jobs = [Job(rank, 3, rank, "127.0.0.1", store.port, True, "run/0", "host/0") for rank in range(3)]
    contexts = [JobContext(one, "code") for one in jobs]
    threads = [threading.Thread(target=follow, args=(context,), daemon=True) for context in contexts[1:]]
    before = store.num_keys()
    for thread in threads:
        thread.start()
    try:
        reasons = []
        for number in range(PASSES):
            ranks = 1 + number % 3
            outcome = over_cluster._Pass(contexts[0], double, [number] * ranks, tmp_path, 20).run(print)
            reasons.append(outcome.reason)
            assert outcome.results == ([] if outcome.reason else [2 * number] * ranks)
    finally:
        over_cluster._dismiss(contexts[0])
        for thread in threads:
            thread.join(20)
        for context in contexts:
            context.heartbeat.stop()
    assert [number for number, reason in enumerate(reasons) if reason] == [DISK_FULL]
    assert reasons[DISK_FULL] == "rank 1 could not run its part: OSError: [Errno 28] No space left on device"
    pulses, last_order = len(contexts), 2
    assert store.num_keys() <= before + pulses + last_order
