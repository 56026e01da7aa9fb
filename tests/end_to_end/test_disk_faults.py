"""A disk that fails under a sweep: the cell is a row that says so in a sentence, the others are ok, no file is left."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

import zerobench
from tests.end_to_end.command import SMALL
from tests.end_to_end.command import zerobench as run_zerobench
from tests.faults.disk import mounted

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


def test_a_full_disk_is_a_row(tmp_path: Path) -> None:
    """The states of a rank do not fit beside the other's: the kernel refuses, the next cell runs, the disk is empty."""
    more = ["model.hidden=64", "measure.passes=accounted"]
    with mounted(tmp_path / "disk", "256k") as home:
        ended = run_zerobench(*SMALL, *SWEEP, *more, f"offload.path={home}", cwd=tmp_path)
        assert list(home.iterdir()) == []
    assert ended.returncode == 1
    check(tmp_path, ended.stderr, "failed: the disk is full: ")
    assert f"{home}/zerobench-" in ended.stdout


@pytest.mark.thorough
def test_a_block_that_is_damaged_underneath_is_a_row(tmp_path: Path) -> None:
    """Again and again, a byte in each block of every file that ranks have made, until the sweep is over."""
    command = [sys.executable, "-m", "zerobench", *SMALL, *SWEEP, "measure.passes=timed", "measure.steps=60"]
    sweep = subprocess.Popen(command, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 300
    while sweep.poll() is None and time.monotonic() < deadline:
        with suppress(FileNotFoundError):  # folders come and go with their ranks
            for file in (tmp_path / "results").rglob("states-*.bin"):
                damage(file)
        time.sleep(0.01)
    _, errors = sweep.communicate(timeout=60)
    assert sweep.returncode == 1, errors
    check(tmp_path, errors, "are not the bytes that were written")


def damage(file: Path) -> None:
    with file.open("r+b") as underneath:
        for block in range(0, os.fstat(underneath.fileno()).st_size, 4096):
            underneath.seek(block + 5)
            underneath.write(os.urandom(1))
