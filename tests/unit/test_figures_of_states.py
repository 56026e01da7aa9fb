"""Figures of where states and activations are, of what is sent, and of memory limits, from rows made by hand."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis.__main__ import main
from tests.made_up import MIB, figure_of, results_of, run, texts
from zerobench import cli
from zerobench.commands.account_memory import tier_passages
from zerobench.records import MemoryRow, RunRow, SearchRow
from zerobench.results.frames import frame_of
from zerobench.results.tables import collect


def test_buffers_are_lines_over_the_models_sizes() -> None:
    small, large = (
        {"max_gradients_bytes": n * MIB, "max_communication_bytes": 8 * MIB, "psi": n * 10**6} for n in (1, 4)
    )
    rows = [run("zero2", 2, **small), run("zero2", 4, **large)]
    rows[1] = replace(rows[1], world_size=2, batch=rows[0].batch)
    axes = figure_of("buffers", results_of(rows)).axes
    assert len(axes) == 1, "a setting is one panel, whatever the model's size"
    lines = {line.get_linestyle(): list(line.get_ydata()) for line in axes[0].lines}
    assert lines == {"-": [8, 8], ":": [1, 4], "--": pytest.approx([4e6 / MIB, 16e6 / MIB])}


def test_nodes_draw_what_crosses_of_what_a_rank_sends() -> None:
    """Flat: two of the three others are in the other node. In two hops the meter has told."""
    flat = run("zero2", 4, wire_bytes=6 * 10**6)
    config = json.dumps(json.loads(flat.config) | {"node_size": 2})
    told = {"between_nodes_bytes": 2 * 10**6, "predicted_between_nodes_bytes": 2 * 10**6}
    hops = replace(flat, config=config, cell_id="two hops", run_id="two hops", **told)
    axes = figure_of("nodes", results_of([flat, hops])).axes[0]
    assert [bar.get_height() for bar in axes.patches] == pytest.approx([4, 2, 2, 4])
    assert [text.get_text() for text in axes.texts if text.get_gid()] == ["4.00\nof 6.00", "2.00\nof 6.00"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["flat\nzero2", "two hops\nzero2"]
    assert axes.collections[0].get_segments()[0][0][1] == pytest.approx(2)


POOL = {"name": "nvme", "block_bytes": 4 * MIB, "buffers": 16}


def stored(layers: int, status: str = "ok", **more: Any) -> RunRow:
    """A run of a model of so many layers, whose states are in files."""
    row = run("zero3", 2, status, repeat=0, **(more if status == "ok" else {}))
    config = json.loads(row.config)
    config["model"]["layers"] = layers
    return replace(row, cell_id=f"cell {layers}", run_id=f"run {layers}", config=json.dumps(config | {"offload": POOL}))


def test_host_memory_is_drawn_beside_the_pool_and_failures_are_named() -> None:
    sizes = {"nvme_bytes": 80 * MIB, "predicted_nvme_bytes": 80 * MIB, "host_peak_bytes": 67 * MIB}
    grown = sizes | {"nvme_bytes": 640 * MIB, "psi": 8 * 10**6}
    figure = figure_of("infinity", results_of([stored(3, **sizes), stored(24, **grown), stored(48, "oom")]))
    lines = {tuple(line.get_ydata()) for line in figure.axes[0].lines}
    assert (80.0, 640.0) in lines
    assert (67.0, 67.0) in lines
    assert (64.0, 64.0) in {tuple(line.get_ydata()) for line in figure.axes[0].lines}
    assert "oom" in " ".join(texts(figure))


def late(delayed: bool, status: str = "ok") -> RunRow:
    row = run("zero2", 1, status)
    config = json.loads(row.config) | {"offload": {"name": "cpu", "delayed": delayed, "delayed_after": 40}}
    return replace(row, cell_id=f"delayed {delayed}", run_id=f"delayed {delayed}", config=json.dumps(config))


@pytest.mark.slow
def test_a_delayed_run_stands_beside_the_one_that_is_not() -> None:
    figure = figure_of("delayed", results_of([late(False), late(True)]))
    labels = [line.get_label() for line in figure.axes[0].lines]
    assert {"not delayed", "delayed", "delayed from here on"} <= set(labels)
    assert "× delayed: crash" in " ".join(texts(figure_of("delayed", results_of([late(False), late(True, "crash")]))))


@pytest.mark.parametrize("name", ["infinity", "delayed"])
def test_runs_of_another_kind_are_nothing_to_draw(name: str) -> None:
    with pytest.raises(ValueError, match="no finished run"):
        figure_of(name, results_of([run("ddp", 2)]))


@pytest.mark.slow
def test_show_sets_other_tiers_and_links_beside_their_formulas(tmp_path: Path, capsys) -> None:
    moved = {"down_bytes": 4 * MIB, "predicted_down_bytes": 3 * MIB, "up_bytes": 0, "predicted_host_states_bytes": MIB}
    results = results_of([run("zero2", 2, host_peak_all_bytes=5 * MIB, **moved)])
    elsewhere = [
        MemoryRow(0, "step", "master", MIB, MIB, MIB, None, "host"),
        MemoryRow(0, "step", "states", MIB, MIB, MIB, None, "host"),
        MemoryRow(0, "step", "total", 2 * MIB, MIB, 2 * MIB, None, "host"),
    ]
    frame = frame_of([vars(one) for one in elsewhere], MemoryRow)
    frame.insert(0, "run_id", results.runs["run_id"].iloc[0])
    collect(replace(results, memory=pd.concat([results.memory, frame], ignore_index=True)), tmp_path)
    assert cli.run(["show", "zero2", "--results", str(tmp_path)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "host states 1.0 MiB 1.0 MiB 1.0 MiB 0 B" in lines
    assert "host master 1.0 MiB 1.0 MiB – –" in lines
    assert "host a node of 2 – 5.0 MiB – –" in lines
    assert "device to host 4.0 MiB 3.0 MiB 1.0 MiB" in lines
    assert not any(line.startswith("host to device") for line in lines)
    assert sum("told apart by the engine's labels" in line for line in lines) == 1


def test_nothing_is_said_where_nothing_leaves() -> None:
    row = run("zero2", 2)
    assert list(tier_passages(vars(row), results_of([row]).memory)) == []


def search(strategy: str, limit: int, rate: float | None, **more: Any) -> dict[str, Any]:
    row = SearchRow(
        f"{strategy}{limit}", strategy, "tiny", 2, 16, 32, "cpu", limit * MIB, "found" if rate else "nothing_fits", "",
        5, MIB, "a b c", tokens_per_s=rate, **more,
    )  # fmt: skip
    return asdict(row)


@pytest.mark.slow
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
    assert main(["memory_cap", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 2, (
        "no runs: the search's are in the folder"
    )
    collect(replace(results_of([run("ddp", 2)]), searches=results.searches), tmp_path / "runs")
    assert main(["memory_cap", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 0
