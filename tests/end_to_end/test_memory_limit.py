"""A sweep under a memory limit of the kernel's: the rank is killed, the row says oom, the next cell runs."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import zerobench
from tests.end_to_end.command import SMALL
from tests.ranks import wait_until

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


def test_what_a_memory_limit_kills_is_a_row(limited: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "zerobench", *SMALL, "-m", "model.hidden=4096,16", "strategy=ddp", "world_size=1"]
    ended = subprocess.run(
        [*command, "measure.passes=accounted", "launch.check_memory=false"], cwd=tmp_path, capture_output=True,
        text=True, timeout=300,
        preexec_fn=lambda: (limited / "cgroup.procs").write_text(str(os.getpid())),
    )  # fmt: skip
    wait_until(lambda: not (limited / "cgroup.procs").read_text(), 60)  # no process is left
    assert ended.returncode == 1, ended.stderr
    runs = zerobench.load(tmp_path / "results/runs").runs
    assert list(runs.status) == ["oom", "ok"], list(runs.reason)
    words = "accounted pass: rank 0 was killed by signal 9 (SIGKILL); the kernel ran out of memory and killed a process"
    assert runs.reason[0] == words
