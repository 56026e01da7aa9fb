"""Reasons why torch's own engine for local ranks does not carry ours, each as torch has it today.

`start_processes` of torch.distributed.elastic.multiprocessing starts ranks from the same fork server as
launch/start_ranks.py does. A test that fails here says that torch has changed: then
docs/explanation/ranks-and-engines.md
and the docstring of that module are to be read again, and the duty may move.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, start_processes
from torch.distributed.elastic.utils.distributed import create_c10d_store

from tests.faults import workers
from tests.faults.test_launch import is_alive, wait_for_pid
from tests.ranks import free_port
from zerobench.cluster import store as job_store
from zerobench.cluster.store import JobStore
from zerobench.launch.start_ranks import launch

pytestmark = pytest.mark.thorough

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    before = {one: signal.getsignal(one) for one in ENDING}
    yield
    for one, handler in before.items():
        signal.signal(one, handler)


def start(worker: object, folder: Path) -> PContext:
    arguments = {rank: (rank, None) for rank in range(2)}
    nothing: dict[int, dict[str, str]] = {rank: {} for rank in range(2)}
    logs = DefaultLogsSpecs(log_dir=str(folder))
    return start_processes("ranks", worker, arguments, nothing, logs, start_method="forkserver")  # type: ignore[arg-type]


def test_a_rank_that_leaves_with_code_0_is_waited_for(tmp_path: Path) -> None:
    ranks = start(workers.leaves_content, tmp_path)
    try:
        deadline = time.monotonic() + 300
        while is_alive(ranks.pids()[0]):
            assert time.monotonic() < deadline
            assert ranks.wait(0.2, 0.1) is None
        assert ranks.wait(3, 0.1) is None
    finally:
        ranks.close()
    assert launch(workers.leaves_content, [0, 1], tmp_path / "ours", 60).reason == "rank 0 exited early with code 0"


def test_the_lowest_failed_rank_is_told_alone_not_the_first_cause(tmp_path: Path) -> None:
    ranks = start(workers.loses_its_peer, tmp_path)
    deadline = time.monotonic() + 300
    while any(is_alive(pid) for pid in ranks.pids().values()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    found = ranks.wait(20, 0.1)
    assert found is not None
    assert list(found.failures) == [0]
    ours = launch(workers.loses_its_peer, [0, 1], tmp_path / "ours", 60)
    assert ours.reason == "rank 1 was killed by signal 9 (SIGKILL)"


def test_signals_of_the_process_are_taken_and_not_given_back(tmp_path: Path) -> None:
    before = [signal.getsignal(one) for one in ENDING]
    ranks = start(workers.leaves_content, tmp_path)
    ranks.close()
    assert all(signal.getsignal(one) is not mine for one, mine in zip(ENDING, before, strict=True))


def test_ranks_outlive_a_parent_that_is_killed(tmp_path: Path) -> None:
    """Ours do not: test_launch.py. The fork server does not end either, as long as its children have its pipe."""
    script = f"""
import time
from pathlib import Path
from tests.faults.test_elastic_engine import start
from tests.faults.workers import says_pid_in_the_folder
if __name__ == "__main__":
    import os
    os.environ["SAYS_PID_IN"] = {str(tmp_path)!r}
    ranks = start(says_pid_in_the_folder, Path({str(tmp_path / "logs")!r}))
    time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", script])
    pids = [wait_for_pid(tmp_path / f"pid{rank}") for rank in range(2)]
    parent.kill()
    parent.wait()
    time.sleep(3)
    left = [pid for pid in pids if is_alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == pids


def test_a_connection_to_the_store_holds_up_a_signal_until_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_store, "_TRY_S", 1.0)

    def connect(how: object) -> float:
        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        begun = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            how()  # type: ignore[operator]
        return time.monotonic() - begun

    port = free_port()
    assert connect(lambda: create_c10d_store(False, "127.0.0.1", port, 2, timeout=6)) > 5
    assert connect(lambda: JobStore("127.0.0.1", port, "test", patience_s=60)) < 30


def test_an_agent_that_is_killed_leaves_its_processes(tmp_path: Path) -> None:
    wait = f"says_pid_and_sleeps({str(tmp_path / 'pid')!r}, None)"
    script = f"from tests.faults.workers import says_pid_and_sleeps; {wait}"
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python", sys.executable, "-c", script]
    running = subprocess.Popen(agent)
    pid = wait_for_pid(tmp_path / "pid")
    running.kill()
    running.wait()
    time.sleep(2)
    left = is_alive(pid)
    if left:
        os.kill(pid, signal.SIGKILL)
    assert left


def test_submitit_brings_results_home_as_pickles(tmp_path: Path) -> None:
    submitit = pytest.importorskip("submitit", reason="zerobench's extra [slurm] is not installed")
    executor = submitit.LocalExecutor(tmp_path)
    executor.update_parameters(timeout_min=1)
    one = executor.submit(os.getppid)
    assert isinstance(one.result(), int)
    assert len(list(tmp_path.glob("*_result.pkl"))) == 1
