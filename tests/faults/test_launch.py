"""Every end of the ranks is their results or an error, and no process is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.faults import workers
from tests.ranks import wait_until
from zerobench.ranks.start_ranks import Failure, LaunchError, explain, launch


def ranks_alive() -> list[psutil.Process]:
    """Processes below this one that are ranks: children of the fork server."""
    below = psutil.Process().children(recursive=True)
    return [p for p in below if p.is_running() and p.status() != psutil.STATUS_ZOMBIE and p.parent().pid != os.getpid()]


def test_results_come_back_in_order(tmp_path: Path) -> None:
    told: list = []
    assert launch(workers.fine, [0, 1, 2], tmp_path, 60, told.append) == [0, 1, 4]
    assert sorted(t["rank"] for t in told) == [0, 1, 2]


@pytest.mark.parametrize(
    ("worker", "status", "words"),
    [
        (workers.raises, "crash", "rank 1 raised ValueError: this rank does not like its job"),
        (workers.killed, "crash", "rank 1 was killed by signal 9 (SIGKILL)"),
        (workers.killed_without_a_name, "crash", "rank 1 was killed by signal 36 (<N/A>)"),
        (workers.leaves, "crash", "rank 0 exited early with code 7"),
        (workers.leaves_content, "crash", "rank 0 exited early with code 0"),
        (workers.exits_content, "crash", "rank 0 raised SystemExit: 0"),
        (workers.kills_server, "crash", "was lost with the fork server of all ranks, process"),
        (workers.out_of_memory, "oom", "can't allocate memory"),
        (workers.starts_a_thread_in_limited_memory, "oom", "KiB (ulimit -v)"),
    ],
)
def test_a_rank_that_fails_ends_the_pass_at_once(tmp_path: Path, worker, status: str, words: str) -> None:
    begun = time.monotonic()
    with pytest.raises(LaunchError) as raised:
        launch(worker, [0, 1, 2], tmp_path, 300)
    assert raised.value.status == status
    assert words in raised.value.reason
    assert "\n" not in raised.value.reason
    assert time.monotonic() - begun < 200
    assert ranks_alive() == []


KILLED_BY_9, RAISED = ("crash", "was killed by signal 9"), ("crash", "raised ValueError: no")
TIMEOUT = ("timeout", "still ran")


@pytest.mark.parametrize(
    ("failures", "status", "words"),
    [
        ([("crash", "raised RuntimeError: Connection closed by peer"), KILLED_BY_9], "crash", "rank 1 was killed"),
        ([("crash", "was lost"), ("oom", "raised OutOfMemoryError: out of memory")], "oom", "rank 1 raised OutOf"),
        ([("crash", "raised RuntimeError: the connection broke while"), RAISED], "crash", "rank 1 raised ValueError"),
        ([TIMEOUT, RAISED], "crash", "rank 1 raised ValueError"),
        ([("stopped", "still ran"), ("crash", "raised RuntimeError: gloo said so")], "crash", "rank 1 raised Runtime"),
        ([TIMEOUT, ("timeout", "waited in the kernel")], "timeout", "rank 0, 1 still ran; rank 1 waited"),
    ],
)
def test_the_first_cause_is_told_and_not_who_suffered_from_it(
    failures: list[tuple[str, str]], status: str, words: str
) -> None:
    found = explain([Failure(rank, *failure) for rank, failure in enumerate(failures)], 5)
    assert found[0] == status
    assert words in found[1]


def test_a_hang_is_a_timeout_with_stacks_in_the_log(tmp_path: Path) -> None:
    """The time is over when rank 1 hangs and rank 0 has ended, however long that takes on a busy machine."""
    log, looks = tmp_path / "rank1.log", [False]

    def over() -> str | None:
        looks.append("about to hang" in log.read_text() and len(ranks_alive()) == 1)
        return "timeout" if all(looks[-2:]) else None  # the second time: rank 0's result has been read

    with pytest.raises(LaunchError) as raised:
        launch(workers.hangs, [0, 1], tmp_path, 300, watch=over)
    assert raised.value.status == "timeout"
    assert raised.value.reason == "launch.timeout_s=300 was over and rank 1 still ran; the stacks are in the logs"
    assert "in hangs" in log.read_text()
    assert ranks_alive() == []


def test_a_timeout_names_the_rank_that_was_stopped(tmp_path: Path) -> None:
    def over() -> str | None:
        return "timeout" if psutil.STATUS_STOPPED in [rank.status() for rank in ranks_alive()] else None

    with pytest.raises(LaunchError) as raised:
        launch(workers.stops, [0, 1], tmp_path, 300, watch=over)
    words = "rank 0, 1 still ran; rank 1 was stopped by a signal (SIGSTOP, for example), and others may have waited"
    assert raised.value.status == "timeout"
    assert words in raised.value.reason
    assert ranks_alive() == []


@pytest.mark.parametrize("stopped", [*(pytest.param(n, marks=pytest.mark.thorough) for n in (0, 1)), 2])
def test_ranks_die_with_a_parent_that_is_killed(tmp_path: Path, stopped: int) -> None:
    """Also where so many of them, which nothing but SIGKILL reaches, are stopped."""
    script = (
        "from pathlib import Path\nfrom tests.faults import workers\nfrom zerobench.ranks.start_ranks import launch\n"
        f"launch(workers.says_pid_and_sleeps, [r'{tmp_path}/0', r'{tmp_path}/1'], Path(r'{tmp_path}/logs'), 300)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script])
    pids = [wait_for_pid(tmp_path / name) for name in ("0", "1")]
    server = psutil.Process(pids[0]).ppid()
    for pid in pids[:stopped]:
        os.kill(pid, signal.SIGSTOP)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_until(lambda: not any(is_alive(pid) for pid in [*pids, server]), 100)  # fails if one is left


def wait_for_pid(path: Path) -> int:
    wait_until(lambda: path.exists() and path.read_text())
    return int(path.read_text())


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


KILLED = """
import os, signal, sys, tempfile
from zerobench.ranks import fork_server
fork_server.PRELOAD.clear()
fork_server.start()
print(*sorted(os.listdir(tempfile.gettempdir())), flush=True)
if sys.argv[1:]:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_commands_temporary_files_go_with_the_next_command(tmp_path_factory: pytest.TempPathFactory) -> None:
    """multiprocessing's own folder, with the fork server's socket, would stay. A socket's address is short."""
    home = tmp_path_factory.mktemp("t")
    environment = {**os.environ, "TMPDIR": str(home)}
    for word in (["killed"], []):
        done = subprocess.run(
            [sys.executable, "-c", KILLED, *word], env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == (-signal.SIGKILL if word else 0), done.stderr
        name, lease = done.stdout.split()
        assert name.startswith("zerobench-temp-")
        assert lease == f"{name}.lease"
        assert sorted(os.listdir(home)) == ([name, lease] if word else [])


LONG_TMPDIR = """
import sys
from zerobench.ranks import fork_server
fork_server.PRELOAD.clear()
fork_server.SHORT_PARENTS = sys.argv[1:]
fork_server.start()
print(fork_server.forkserver._forkserver._forkserver_address)
"""


def test_long_tmpdir_has_its_socket_in_a_short_folder(tmp_path: Path) -> None:
    """A socket's path has at most 107 bytes; job folders of clusters are longer."""
    home = tmp_path / ("d" * 90)
    home.mkdir()
    environment = {**os.environ, "TMPDIR": str(home)}

    def start(*short: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", LONG_TMPDIR, *short]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)

    done = start(str(tmp_path / "none"), "/tmp")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("/tmp/zerobench-temp-")
    assert not Path(done.stdout).parent.exists()
    refused = start(str(tmp_path / "none"))
    assert f"NoFolderError: TMPDIR={home}: the socket" in refused.stderr
    assert os.listdir(home) == []
