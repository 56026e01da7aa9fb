"""A GPU suite's runs beside estimates: which runs count, and what is written."""

import shutil
from pathlib import Path

import pandas as pd
import pytest

from validation import gpu_runs
from validation.__main__ import main
from validation.gpu_runs import rows_of, steps
from validation.one_gpu import NEXT, PARTS, costs_of, fitted, refitted
from zerobench.config.compose import compose_cells
from zerobench.fake_execution import CUDA
from zerobench.results import tables
from zerobench.timing import hardware
from zerobench.timing.prediction import execute_schedules, reduced, step_time

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


def test_six_rates_place_all_ten_steps_also_without_the_step_itself() -> None:
    assert fitted(pd.read_csv(HERE / PARTS)) == pytest.approx(hardware.validated()["one_gpu"], rel=1e-3)
    found = refitted(HERE)
    assert found["measured"].between(found["low"], found["high"]).tolist() == [True] * 10
    for column in ("predicted", "left_out"):
        assert (found[column] / found["measured"] - 1).abs().median() < 0.05
    alone = refitted(HERE, lambda one, other: one.split()[1] == other.split()[1])
    assert (alone["left_out"] / alone["measured"] - 1).abs().median() > 0.1, "one model cannot tell products apart"


@pytest.mark.slow
def test_a_prediction_is_that_of_the_parts() -> None:
    """FSDP2 at 124M: its host is slower than its GPU, and its copies run on other streams."""
    words = "model=gpt2_124m strategy=fsdp2 world_size=1 micro_batch=8 sequence=1024 precision=bf16 data=synthetic"
    (cell,) = compose_cells([*words.split(), "device=cuda"])
    (schedule,) = execute_schedules("one step", [reduced(cell.config)], CUDA)
    step, known = (
        step_time(schedule, costs_of("h100-3200")),
        refitted(HERE).set_index("cell").loc["fsdp2 gpt2_124m b=8"],
    )
    assert step.step_s == pytest.approx(known["predicted"], rel=0.01)
    assert step.host_s == pytest.approx(known["host"] - known["device"], rel=0.02)
    assert len(pd.read_csv(HERE / NEXT)) == 20
