"""The README's figures are those of the committed runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

import zerobench
from analysis.blocks import TABLES_ALONE
from analysis.common import FIGURES
from analysis.readme import BLOCKS
from zerobench import cli

ROOT = Path(__file__).parents[2]
COMPARED = ("ddp", "zero1", "zero2", "zero3")
"""The strategies of the committed runs."""
OF = {
    "activation": ("zero2", "zero3"),
    "arena": ("zero1", "zero2", "zero3"),
    "buffers": ("zero2",),
    "tiling": ("zero3",),
    "zeropp": ("zero3",),
    "nodes": ("zero1", "zero2", "zero3"),
    "shard_group": ("zero1", "zero2", "zero3"),
    "offload": ("zero1", "zero2", "zero3"),
    "infinity": ("zero3",),
    "delayed": ("zero2",),
    "offload_time": ("zero2",),
}
"""Those of experiments on what only some strategies have."""
REFERENCE = ROOT / "results/reference/cpu"


def test_the_readmes_table_is_that_of_the_committed_runs() -> None:
    done = subprocess.run([sys.executable, ROOT / "analysis/readme.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, "run `make plots`"


def test_the_main_jobs_committed_runs_are_whole_and_agree() -> None:
    runs = zerobench.load(REFERENCE / "stages").runs
    assert list(runs.strategy) == [*COMPARED]
    assert set(runs.status) == {"ok"}
    assert runs.passes_agree.all()
    assert runs.loss_last.nunique() == 1


@pytest.mark.parametrize("experiment", sorted({*FIGURES.values(), *TABLES_ALONE}))
def test_every_experiment_has_committed_tables_that_say_where_they_come_from(experiment: str, capsys) -> None:
    results = zerobench.load(REFERENCE / experiment)
    assert set(results.runs.status) == {"ok"}
    assert set(results.runs.strategy) == set(OF.get(experiment, COMPARED))
    assert all(f"experiment={experiment}" in command for command in results.runs.command)
    assert results.runs.commit.notna().all()
    assert results.runs.torch_version.notna().all()
    accounted = results.runs[results.runs.states_bytes.notna()]
    states = accounted.states_bytes / accounted.predicted_states_bytes
    assert ((states - 1).abs() < 0.01).all()
    predicted = accounted.predicted_volume_psi.to_list()  # to the element; a float's last bit is the sums' order
    assert accounted.volume_psi.to_list() == pytest.approx(predicted, rel=1e-12)
    table = REFERENCE / experiment / "runs.md"
    assert cli.run(["export", str(table.parent), "--latest", "--format", "markdown"]) == 0
    assert capsys.readouterr().out == table.read_text(), "run `make reference`, or export it again"


@pytest.mark.parametrize("figure", FIGURES)
def test_every_figure_is_drawn_and_shown(figure: str) -> None:
    for ending in ("png", "svg"):
        assert (REFERENCE / f"figures/{figure}.{ending}").stat().st_size > 10_000
    assert f"results/reference/cpu/figures/{figure}.png" in (ROOT / "README.md").read_text()


def test_what_has_no_figure_has_a_block() -> None:
    assert set(TABLES_ALONE) <= set(BLOCKS)


def test_two_hops_send_each_slice_to_a_node_once() -> None:
    runs = zerobench.load(REFERENCE / "nodes").runs
    for strategy, two in runs.groupby("strategy"):
        flat, hops = two.sort_values("between_nodes_bytes", na_position="first").itertuples()
        assert pd.isna(flat.between_nodes_bytes), strategy
        assert hops.between_nodes_bytes == hops.predicted_between_nodes_bytes
        assert hops.volume_psi == pytest.approx(1.5 * flat.volume_psi), "1 + 1/L of it"


def test_every_file_of_the_package_is_in_the_tree() -> None:
    tree = (ROOT / "README.md").read_text()
    for path in (ROOT / "zerobench").rglob("*.py"):
        if not path.name.startswith("__"):
            assert path.name in tree, f"README's file tree lacks {path.name}"
