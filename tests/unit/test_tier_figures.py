"""Figures and account of tiers, from rows made by hand: sizes where they belong, failures named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.made_up import MIB, figure_of, results_of, run, texts
from zerobench import cli
from zerobench.commands.account.memory import passages_of_tiers
from zerobench.records import MemoryRow, RunRow
from zerobench.results.frames import frame_of
from zerobench.results.tables import collect

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


def test_a_delayed_run_stands_beside_the_one_that_is_not() -> None:
    figure = figure_of("delayed", results_of([late(False), late(True)]))
    labels = [line.get_label() for line in figure.axes[0].lines]
    assert {"not delayed", "delayed", "delayed from here on"} <= set(labels)
    assert "× delayed: crash" in " ".join(texts(figure_of("delayed", results_of([late(False), late(True, "crash")]))))


@pytest.mark.parametrize("name", ["infinity", "delayed"])
def test_runs_of_another_kind_are_nothing_to_draw(name: str) -> None:
    with pytest.raises(ValueError, match="no finished run"):
        figure_of(name, results_of([run("ddp", 2)]))


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
    assert list(passages_of_tiers(vars(row), results_of([row]).memory)) == []
