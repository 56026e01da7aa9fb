"""A GPU suite's runs beside estimates: which runs count, and what is written."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from validation import gpu_runs
from validation.__main__ import main
from validation.gpu_runs import rows_of, steps
from zerobench.results import tables

ROOT = Path(__file__).parents[2]
HERE = ROOT / "results" / "h100"


def test_estimates_are_of_each_cell_whose_memory_was_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def none_fits(what: str, work: list[object], **_: object) -> None:
        asked.append(len(work))
        raise ValueError("enough")

    monkeypatch.setattr(gpu_runs, "execute_cells", none_fits)
    assert main(["gpu-runs", str(HERE)]) == 2
    assert asked == [len(rows_of(HERE))]
    assert not {row.cell for row in rows_of(HERE) if row.allocated <= 0}


def test_a_folder_without_a_gpu_s_memory_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu-runs", str(ROOT / "results" / "reference" / "cpu" / "stages")]) == 2
    assert "no run there has the memory of a GPU; name the folder of a GPU suite" in capsys.readouterr().err


def test_a_step_is_compared_only_with_the_run_of_its_shape(tmp_path: Path) -> None:
    found = steps(HERE)
    assert len({step.cell for step in found}) == len(found) == 10
    for name in (*(f"{table}.parquet" for table in tables.TABLES), "suite.json"):
        if (HERE / name).exists():
            shutil.copy(HERE / name, tmp_path / name)
    lines = (HERE / gpu_runs.PREDICTED).read_text().splitlines()
    (tmp_path / gpu_runs.PREDICTED).write_text("\n".join([lines[0], lines[1].replace(",8,1,1024,", ",16,1,1024,")]))
    assert steps(tmp_path) == []
