"""The figure of searches under memory limits."""

from __future__ import annotations

from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.made_up import MIB, figure_of, results_of, run, texts
from zerobench.records import SearchRow
from zerobench.results.frames import frame_of
from zerobench.results.tables import collect


def search(strategy: str, limit: int, rate: float | None, **more: Any) -> dict[str, Any]:
    row = SearchRow(
        f"{strategy}{limit}", strategy, "tiny", 2, 16, 32, "cpu", limit * MIB, "found" if rate else "nothing_fits", "",
        5, MIB, "a b c", tokens_per_s=rate, **more,
    )  # fmt: skip
    return asdict(row)


def test_memory_cap_has_a_bar_a_limit_or_says_that_nothing_fits(tmp_path: Path) -> None:
    best = {"micro_batch": 4, "accumulation": 2, "checkpointing": True}
    interval = {"tokens_per_s_low": 180.0, "tokens_per_s_high": 230.0}
    rows = [search("ddp", 10, None), search("ddp", 20, 200.0, **best, **interval), search("zero1", 10, 100.0)]
    results = replace(results_of([]), searches=frame_of(rows, SearchRow))
    axes = figure_of("memory_cap", results).axes[0]
    words = texts(axes.figure)
    assert "4×2 r" in words
    assert [word for word in words if "nothing fits" in word] == ["× ddp: nothing fits"]
    assert [word for word in words if "missing" in word] == ["× zero1: missing"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["10 MiB", "20 MiB"]
    assert {(round(bar.get_x()), bar.get_height()) for bar in axes.patches} == {(0, 100.0), (1, 200.0)}
    ((whisker,),) = [[s[:, 1].tolist() for s in bar.get_segments()] for bar in axes.collections]
    assert whisker == [180.0, 230.0]
    collect(results, tmp_path / "runs")
    main = import_module("analysis.memory_cap").main
    assert main([str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 2, (
        "no runs: the search's are in the folder"
    )
    collect(replace(results_of([run("ddp", 2)]), searches=results.searches), tmp_path / "runs")
    assert main([str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 0
