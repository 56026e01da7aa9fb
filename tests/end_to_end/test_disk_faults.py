"""A disk that fails under a sweep: the cell is a row that says so in a sentence, the others are ok, no file is left."""

from pathlib import Path

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
