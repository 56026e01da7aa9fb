"""A sweep under fire: killed ranks, Ctrl-C, full disks and memory. Every cell is a row; nothing is left."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

import zerobench
from tests.end_to_end.command import SMALL, start
from tests.end_to_end.command import zerobench as zerobench_here
from tests.faults.disk import mounted
from tests.ranks import wait_until

LONG = ["measure.steps=100000", "launch.timeout_s=600"]


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
    sweep = start(tmp_path, *SMALL, "-m", f"strategy={','.join(names)}", "world_size=2", *LONG)
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


SWEEP = ["-m", "offload=nvme,none", "strategy=zero2", "world_size=2", "precision=bf16"]


def check(folder: Path, errors: str, words: str) -> None:
    runs = zerobench.load(folder / "results/runs").runs.set_index("systems")
    assert sorted(runs.status) == ["crash", "ok"], errors
    assert runs.status["offload=nvme"] == "crash", errors
    reason = runs.reason["offload=nvme"]
    assert words in reason, reason
    assert "\n" not in reason
    assert "states-" in reason  # the file is named
    assert not [path for path in folder.rglob("*") if path.suffix == ".bin" or "scratch" in path.name]


@pytest.mark.thorough
def test_a_full_disk_is_a_row(tmp_path: Path) -> None:
    """The states of a rank do not fit beside the other's: the kernel refuses, the next cell runs, the disk is empty."""
    more = ["model.hidden=64", "measure.passes=accounted"]
    with mounted(tmp_path / "disk", "256k") as home:
        ended = zerobench_here(*SMALL, *SWEEP, *more, f"offload.path={home}", cwd=tmp_path)
        assert list(home.iterdir()) == []
    assert ended.returncode == 1
    check(tmp_path, ended.stderr, "failed: the disk is full: ")
    assert f"{home}/zerobench-" in ended.stdout


LIMIT_BYTES = 800 * 2**20
"""The command, its fork server and a rank fit; the large cell's parameters alone, 0.8 GB, do not."""

HIERARCHIES = {"/sys/fs/cgroup": "memory.max", "/sys/fs/cgroup/memory": "memory.limit_in_bytes"}
"""Where control groups of version 2 and 1 are, and what limits one's memory."""


def make_group() -> Path | None:
    """A control group whose processes have LIMIT_BYTES together; None where none can be made."""
    for root, file in HIERARCHIES.items():
        group = Path(root, f"zerobench-{os.getpid()}")
        if not Path(root, "cgroup.procs").is_file():
            continue
        with suppress(OSError):
            group.mkdir()
            try:
                (group / file).write_text(str(LIMIT_BYTES))
                for swap in group.glob("memory.swap.max"):
                    swap.write_text("0")
                return group
            except OSError:
                group.rmdir()
    return None


@pytest.fixture
def limited() -> Iterator[Path]:
    group = make_group()
    if group is None:
        pytest.skip("no control group with a memory limit can be made here")
    yield group
    group.rmdir()


@pytest.mark.thorough
def test_what_a_memory_limit_kills_is_a_row(limited: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "zerobench", *SMALL, "model.hidden=4096", "strategy=ddp", "world_size=1"]
    ended = subprocess.run(
        [*command, "measure.passes=accounted", "launch.check_memory=false"], cwd=tmp_path, capture_output=True,
        text=True, timeout=300,
        preexec_fn=lambda: (limited / "cgroup.procs").write_text(str(os.getpid())),
    )  # fmt: skip
    wait_until(lambda: not (limited / "cgroup.procs").read_text(), 60)  # no process is left
    assert ended.returncode == 1, ended.stderr
    runs = zerobench.load(tmp_path / "results/runs").runs
    assert list(runs.status) == ["oom"], list(runs.reason)
    words = "accounted pass: rank 0 was killed by signal 9 (SIGKILL); the kernel ran out of memory and killed a process"
    assert runs.reason[0] == words
