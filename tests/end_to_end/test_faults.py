"""A sweep under fire: killed ranks, timeouts, Ctrl-C, killed parents. Every cell ends as a row; nothing is left."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

import zerobench
from tests.end_to_end.command import SMALL, heed_ctrl_c
from tests.end_to_end.command import zerobench as zerobench_here

LONG = ["measure.steps=100000", "launch.timeout_s=600"]


def start(cwd: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "zerobench", *SMALL, *arguments]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=cwd, text=True, preexec_fn=heed_ctrl_c, **streams)


def ranks_of(parent: subprocess.Popen[str], count: int) -> list[psutil.Process]:
    """The rank processes, once they are all there and busy: grandchildren by way of the fork server."""
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        below = psutil.Process(parent.pid).children(recursive=True)
        ranks = [p for p in below if p.ppid() != parent.pid]
        if len(ranks) == count and all(sum(p.cpu_times()[:2]) > 0.4 for p in ranks):
            return ranks
        time.sleep(0.1)
    raise AssertionError("the ranks did not come up")


def wait_until_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=100)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def test_killed_ranks_are_crashes_the_sweep_goes_on_and_ctrl_c_leaves_a_row_and_no_process(
    tmp_path: Path, thorough: bool
) -> None:
    """In `make test-all` a rank of a second cell is killed as well, the other one."""
    killed = [1, 0] if thorough else [1]
    names = ["zero1", "zero2", "zero3"][-len(killed) - 1 :]
    sweep = start(tmp_path, "-m", f"strategy={','.join(names)}", "world_size=2", *LONG)
    for rank in killed:
        ranks = ranks_of(sweep, 2)
        ranks[rank].kill()
        wait_until_gone(ranks)
    last = ranks_of(sweep, 2)
    sweep.send_signal(signal.SIGINT)
    _, errors = sweep.communicate(timeout=180)
    assert sweep.returncode == 130, errors
    assert "Traceback" not in errors
    runs = zerobench.load(tmp_path / "results/runs").runs.sort_values("started")
    assert list(runs.status) == [*("crash" for _ in killed), "interrupted"], errors
    assert all("was killed by signal 9 (SIGKILL)" in reason for reason in runs.reason[:-1])
    wait_until_gone(last)


def test_a_timeout_is_a_row(tmp_path: Path) -> None:
    words = ["world_size=1", "measure.steps=100000", "launch.timeout_s=1"]
    assert zerobench_here(*SMALL, *words, cwd=tmp_path).returncode == 1
    run = zerobench.load(tmp_path / "results/runs").runs.iloc[0]
    assert run.status == "timeout"
    assert "launch.timeout_s=1 was over" in run.reason
    log = tmp_path / "results/runs" / run.run_id / "logs/timed/rank0.log"
    assert "run_rank" in log.read_text()
