"""A GPU suite's runs beside estimates: which runs count, and what is written."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tools.docs import predicted
from tools.docs.render import render
from validation import gpu_runs
from validation.__main__ import main
from validation.gpu_runs import GpuRunRow, GpuStep, rows_of, steps
from validation.store import write
from zerobench.results import tables

ROOT = Path(__file__).parents[2]
HERE = ROOT / "results" / "h100"
ROW = GpuRunRow("zero1 a", 100, 100, 200, 201, 300, 303, 400, 440)


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


def test_the_blocks_say_what_the_rows_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = [GpuStep("a", 1.0, 0.9, 1.1, measured) for measured in (1.05, 2.0)]
    monkeypatch.setattr(predicted, "steps", lambda _: taken)
    folder = tmp_path / "h100"
    folder.mkdir()
    about = {"device_class": "GPU X", "torch": "2.99"}
    (folder / "suite.json").write_text(json.dumps({"about": about}))
    off = replace(ROW, cell="zero2 b", estimated_states=90, reserved=200)
    write(folder / gpu_runs.ESTIMATED, GpuRunRow, [ROW, off])
    monkeypatch.setattr(predicted, "GPU", folder)
    words = " ".join(predicted.gpu_summary().split())
    assert "On one GPU X (torch 2.99) states took the bytes" in words
    assert "without a GPU in 1 of 2 cells" in words
    assert "in 2 cells are 1.00% off the simulated ones in the median, 1.0% at most" in words
    assert "Of 2 steps that were predicted beforehand, 1 took a time within" in words
    assert "| states of a rank | 2 | 1 | 5.00% | 9.00% | 10.00% |" in render("gpu_memory", predicted.gpu_memory())
    assert render("gpu_reserved", predicted.gpu_reserved()).splitlines()[2].endswith("| 200 B | 440 B | +120.0% |")
