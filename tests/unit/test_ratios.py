"""Ours against the peers: ratios, their words, and what becomes of what is not there."""

from pathlib import Path

import pandas as pd
import pytest

from analysis import compare
from analysis.__main__ import main
from tests.made_up import results_of, run, texts
from zerobench.results.tables import collect

NAN = float("nan")


def launches(strategy: str, steps: list[float], ranks: int = 2, minute: int = 0, **more):
    rows = [run(strategy, ranks, repeat=n, step=step, **more) for n, step in enumerate(steps)]
    for n, row in enumerate(rows):
        row.started = f"2026-01-01T10:{10 * n + minute:02}:00+00:00"
    return rows


def peaks(size: int) -> dict[str, int]:
    """By the allocator, in both passes; the ledger's own says nothing here."""
    return {"allocator_peak_bytes": size, "timed_allocator_peak_bytes": size + 100, "peak_bytes": 1}


def example() -> list:
    return [
        *launches("zero3", [0.07, 0.08, 0.09], minute=1, **peaks(100), loopback_bytes=600),
        *launches("fsdp2", [0.10, 0.10, 0.10], **peaks(200), loopback_bytes=800),
        *launches("ddp", [0.05, 0.06, 0.07], minute=2, **peaks(400), loopback_bytes=400),
        run("deepspeed_zero3", 2, "invalid", repeat=0),
    ]


@pytest.mark.slow
def test_a_ratio_is_that_of_paired_launches_with_its_interval() -> None:
    found = {(one.peer, one.metric): one for one in compare.ratios_of(results_of(example())) if one.pairs}
    step = found["fsdp2", "step_s"]
    assert step.ratio == pytest.approx((0.7 * 0.8 * 0.9) ** (1 / 3))
    assert step.low < 0.75 < 0.85 < step.high
    assert (step.pairs, step.interleaved, step.goal) == (3, True, 0.80)
    assert step.verdict == "met, within noise"
    assert found["fsdp2", "allocator_peak_bytes"].ratio == 0.5
    assert found["fsdp2", "timed_allocator_peak_bytes"].ratio == pytest.approx(2 / 3)
    assert found["fsdp2", "loopback_bytes"].ratio == 0.75
    assert found["fsdp2", "allocator_peak_bytes"].verdict == ""
    assert pd.isna(found["ddp", "step_s"].goal)


@pytest.mark.parametrize(
    ("ratio", "low", "high", "word"),
    [
        (0.7, 0.6, 0.79, "met"),
        (0.8, 0.8, 0.8, "met"),
        (0.7, 0.6, 0.9, "met, within noise"),
        (0.9, 0.7, 1.1, "missed, within noise"),
        (0.9, 0.85, 0.95, "missed"),
        (0.9, NAN, NAN, "missed, no interval"),
    ],
)
def test_the_word_for_a_ratio(ratio: float, low: float, high: float, word: str) -> None:
    assert compare.judge(ratio, low, high, 0.8) == word
    assert compare.judge(ratio, low, high, None) == ""


def test_larger_models_have_their_own_bound_and_other_ranks_none() -> None:
    (goal,) = [goal for goal in compare.GOALS if (goal.ours, goal.peer) == ("zero3", "fsdp2")]
    assert (goal.bound(10**7), goal.bound(5 * 10**7)) == (0.80, 0.70)
    rows = [*launches("zero3", [0.08], ranks=4), *launches("fsdp2", [0.1], ranks=4)]
    (step,) = [one for one in compare.ratios_of(results_of(rows)) if one.metric == "step_s" and one.peer == "fsdp2"]
    assert pd.isna(step.goal)
    assert step.verdict == ""


@pytest.mark.slow
def test_the_table_says_what_is_not_there() -> None:
    results = results_of(example())
    ratios = compare.ratios_of(results)
    lines = compare.table(ratios).splitlines()
    (line,) = [line for line in lines if "zero3 / deepspeed_zero3" in line]
    assert line == "| zero3 / deepspeed_zero3 | – | – | – | – | ≤ 0.85 | zero3 ok, deepspeed_zero3 invalid |"
    (line,) = [line for line in lines if "zero3 / fsdp2 |" in line]
    assert line.split(" | ")[2:6] == ["0.500", "0.667", "0.750", "≤ 0.80"]
    words = compare.source(results.runs, ratios)
    assert "2026-01-01" in words
    assert ", interleaved;" in words
    assert "deepspeed_zero3, N = 2" in words


@pytest.mark.thorough
def test_the_command_writes_tables_and_a_figure(tmp_path: Path, capsys) -> None:
    where = tmp_path / "results/compare/cpu"
    collect(results_of(example()), where / "compare")
    assert main(["compare", str(where)]) == 0
    figure = {f"compare.{ending}" for ending in ("png", "svg", "txt")}
    assert {p.name for p in where.iterdir()} == {"compare", "ratios.parquet", "ratios.md", *figure}
    kept = pd.read_parquet(where / "ratios.parquet")
    assert set(kept["metric"]) == set(compare.METRICS)
    assert "zero3 / fsdp2" in capsys.readouterr().out
    figure = compare.draw(results_of(example()))
    assert [axes.get_xlabel() for axes in figure.axes] == list(compare.PANELS)
    assert "× none" in texts(figure)
    points = [point for point in figure.axes[1].lines if point.get_marker() == "D"]
    drawn = [(point.get_fillstyle(), point.get_xdata()[0]) for point in points]
    assert drawn == [("full", 0.25), ("full", 0.5), ("none", 0.4), ("none", pytest.approx(2 / 3))]
