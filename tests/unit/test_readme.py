"""The README's figures are those of the committed runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import zerobench
from zerobench.zero import STAGES

ROOT = Path(__file__).parents[2]


def test_the_readmes_table_is_that_of_the_committed_runs() -> None:
    done = subprocess.run([sys.executable, ROOT / "analysis/readme.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, "run `make plots`"


def test_committed_runs_are_whole_and_agree() -> None:
    runs = zerobench.load(ROOT / "results/reference/cpu/stages").runs
    assert list(runs.strategy) == ["ddp", *STAGES]
    assert set(runs.status) == {"ok"}
    assert runs.passes_agree.all()
    assert runs.loss_last.nunique() == 1
    for ending in ("png", "svg"):
        assert (ROOT / f"results/reference/cpu/figures/memory.{ending}").stat().st_size > 10_000


def test_every_file_of_the_package_is_in_the_tree() -> None:
    tree = (ROOT / "README.md").read_text()
    for path in (ROOT / "zerobench").rglob("*.py"):
        if not path.name.startswith("__"):
            assert path.name in tree, f"README's file tree lacks {path.name}"
