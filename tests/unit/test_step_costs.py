"""Where a step's time goes: time inside counted functions is exclusive, and every function that is named is there."""

from __future__ import annotations

import time

import pytest

from validation import step_costs
from validation.__main__ import main
from validation.store import read


def burn(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_time_inside_another_kind_counts_once() -> None:
    clock = step_costs.KindClock()
    inner = clock.wrapped("sums", burn)
    with clock.of("backward"):
        burn(0.02)
        inner(0.05)
        with clock.of("engine"):
            inner(0.05)
        burn(0.02)
    assert clock.seconds["sums"] == pytest.approx(0.1, abs=0.01)
    assert clock.seconds["backward"] == pytest.approx(0.04, abs=0.01)
    assert clock.seconds["engine"] < 0.01


def test_every_function_that_is_named_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with step_costs.kinds_counted():
        pass
    monkeypatch.setitem(step_costs.KINDS, "sums", ("comm.gloo:PairwiseReduction.gone",))
    with pytest.raises(AttributeError, match="gone"), step_costs.kinds_counted():
        pass


@pytest.mark.slow
def test_a_row_per_strategy_is_printed_and_written(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["model=gpt_tiny", "micro_batch=1", "sequence=8"]
    out = ["--rounds", "1", "--steps", "2", "--out", str(tmp_path / "rows.csv")]
    names = ["ddp", "zero1", "zero1:bucket_bytes=1MiB"]
    assert main(["step-costs", "--strategies", ",".join(names), *out, *small]) == 0
    said = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()][2:]
    assert [line[:2] for line in said[1:2]] == [["ddp", "1.000"]]
    assert [line[0] for line in said] == ["alone", *names]
    rows = read(tmp_path / "rows.csv", step_costs.StepCost)
    assert [row.strategy for row in rows] == ["alone", *names]
    assert rows[2].copies > 0 < rows[2].sums
    assert all(row.wall > 0 and row.forward > 0 and row.optimizer > 0 for row in rows)


def test_a_cell_that_is_refused_is_refused_before_any_launch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["step-costs", "--rounds", "0"]) == 2
    assert "--rounds, --steps: at least 1" in capsys.readouterr().err
    assert main(["step-costs", "world_size=0"]) == 2
    assert "world_size=0: must be at least 1" in capsys.readouterr().err


def test_a_ratio_is_of_one_round() -> None:
    walls = {("ddp", 0): 10.0, ("zero1", 0): 11.0, ("ddp", 1): 20.0, ("zero1", 1): 19.0}
    rows = [
        step_costs.StepCost("", "", "", name, 0.0, number, wall, *[0.0] * 12) for (name, number), wall in walls.items()
    ]
    assert step_costs.ratios(rows, "zero1", "ddp") == pytest.approx([1.1, 0.95])
