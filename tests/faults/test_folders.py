"""Results folders as people have them: with odd names, full, read-only, removed midway."""

from __future__ import annotations

from pathlib import Path

import zerobench
from tests.cells import cell
from zerobench.cell import run_cell

ODD = "a b#c?d%20;e&f'g\"h[i]*{j}$k\\l\nm~é"
"""A name that the system takes, with what means something to URLs, shells, globs, Hydra's grammar or people."""


def test_ranks_meet_in_a_folder_of_any_name(tmp_path: Path) -> None:
    home = tmp_path / ODD
    row = run_cell(cell("zero3", 2, results_dir=str(home)).changed(timeout_s=20), lambda _: None)
    assert (row.status, row.reason) == ("ok", "")
    assert [path.name for path in tmp_path.iterdir()] == [ODD], "nothing lands beside it"
    assert list(zerobench.load(home).runs.status) == ["ok"]
