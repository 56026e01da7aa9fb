"""The passes of a joined job, both sides in one process: what they come home with, what they leave in the store, and
what they do without ranks that are lost.
"""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tests.cells import cell
from zerobench.cluster import job
from zerobench.cluster import store as job_store
from zerobench.cluster.job import Job, JobContext, JobError
from zerobench.cluster.serialize import to_plain
from zerobench.cluster.store import LostError
from zerobench.launch import follower, over_cluster
from zerobench.launch.over_cluster import INTERRUPTED, place, why_not
from zerobench.launch.start_ranks import Interrupted, Outcome

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
    """follower.follow without its signals, which a thread cannot have."""
    while (order := follower._next_order(mine)) is not None:
        if mine.job.rank in follower.crew_of(order):
            mine.store.post(f"end/{mine.passes}/{mine.job.rank}", to_plain(follower._end_of(mine, order)))


def dismiss(contexts: list[JobContext], threads: list[threading.Thread]) -> None:
    """Ends the followers' threads and what each process of the job keeps running."""
    over_cluster._dismiss(contexts[0])
    for thread in threads:
        thread.join(20)
    for context in contexts:
        context.heartbeat.stop()
        context.stop_joining()


def test_a_long_sweep_leaves_little_in_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower.here, "launch", launch_here)
    monkeypatch.setattr(over_cluster, "POLL_S", 0.005)
    monkeypatch.setattr(follower, "POLL_S", 0.005)
    monkeypatch.setitem(follower.WORKERS, "double", double)
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
        dismiss(contexts, threads)
    assert [number for number, reason in enumerate(reasons) if reason] == [DISK_FULL]
    assert reasons[DISK_FULL] == "rank 1 could not run its part: OSError: [Errno 28] No space left on device"
    pulses, last_order = len(contexts), 2
    assert store.num_keys() <= before + pulses + last_order


class Died(Exception):
    """Ends a follower's thread as SIGKILL ends a process: without a word."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_sweep_goes_on_with_the_ranks_that_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks on three nodes; the node of rank 1 dies in a pass of all four, and comes back too late."""
    contexts: list[JobContext] = []

    def launch(worker: Any, jobs: Sequence[int], log_dir: Path, *_: Any, first: int = 0, **__: Any) -> Outcome:
        if jobs[0] == 3 and first == 1:  # the job of rank 1 in the first pass
            contexts[1].heartbeat.stop()
            raise Died
        return Outcome("ok", "", [worker(job, print) for job in jobs])

    monkeypatch.setattr(follower.here, "launch", launch)
    monkeypatch.setattr(over_cluster, "POLL_S", 0.005)
    monkeypatch.setattr(follower, "POLL_S", 0.005)
    monkeypatch.setattr(job_store, "BEAT_S", 0.05)
    monkeypatch.setattr(follower, "_end_of", follower._take_part)  # which hides no Died
    monkeypatch.setitem(follower.WORKERS, "double", double)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    nodes = ("a/0", "a/1", "a/2", "a/2")
    jobs = [Job(rank, 4, rank // 3, "127.0.0.1", store.port, True, "run/0", at) for rank, at in enumerate(nodes)]
    contexts += [JobContext(one, "code") for one in jobs]
    monkeypatch.setattr(job, "_contexts", [contexts[0]])
    # at once, but only of a rank whose heartbeat has ended: on a busy machine any may be late
    monkeypatch.setattr(contexts[0].monitor, "silent", lambda rank: not contexts[rank].heartbeat._thread.is_alive())
    threads = [threading.Thread(target=follow, args=(context,), daemon=True) for context in contexts[1:]]
    for thread in threads:
        thread.start()

    def run(*jobs: int) -> Outcome:
        return over_cluster._Pass(contexts[0], double, jobs, tmp_path, 20).run(print)

    try:
        whole, three, two = (cell("zero1", n) for n in (4, 3, 2))
        assert place(whole) is whole  # as long as all are there
        assert [one.config.nodes for one in (whole, three, two)] == [3, 3, 2]
        lost = run(2, 3, 4, 5)
        assert lost.status == "crash"
        assert lost.reason == "rank 1 is lost: its process says nothing (rank 1 of the job, on a/1)"
        assert (run(0, 1, 2).results, run(6).results, run(4, 5).results) == ([0, 2, 4], [12], [8, 10])
        assert [info.rank for info in contexts[0].living.members] == [0, 2, 3]
        assert [place(one).config.nodes for one in (three, two)] == [2, 2]  # 0, 2, 3 and 0, 2
        assert (place(three).cell_id != three.cell_id, place(two) is two) == (True, True)
        left = (
            "world_size=4: 3 of the job's 4 ranks are left, without the ranks of a/1; "
            "the same command runs it in a new job"
        )
        assert (why_not(whole.config), why_not(three.config)) == (left, None)
        with pytest.raises(JobError, match=left):
            over_cluster.places(4, tmp_path)
        contexts[0].store.post("order/2", {"living": [0, 2, 3], "jobs": []})
        with pytest.raises(LostError, match="rank 0 counts this process as lost"):
            follower._next_order(contexts[1])
        contexts[3].leave(INTERRUPTED)
        with pytest.raises(Interrupted):
            place(two)  # whichever process was stopped by the user
    finally:
        dismiss(contexts, threads)


def test_torchruns_report_has_the_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    follower.tell_torchrun(LostError("rank 0 is lost"))
    report = ChildFailedError("zerobench", {1: ProcessFailure(1, 4711, 2, str(file))})
    assert "LostError: rank 0 is lost" in str(report)
