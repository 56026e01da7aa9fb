"""The figures in numbers of README and docs/, and the tutorial notebook, are those of the committed runs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import zerobench
from analysis.__main__ import FIGURES, WITHOUT_FIGURE
from tools.docs import notebook
from tools.docs.pages import pages
from tools.docs.recorded import REFERENCE
from zerobench import cli
from zerobench.results.tables import load

ROOT = Path(__file__).parents[2]
COMPARED = ("ddp", "zero1", "zero2", "zero3")
"""The strategies of the committed runs."""
OF = {
    "activation": ("zero2", "zero3"),
    "partition": ("zero1", "zero2"),
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
    "compile": (*COMPARED, "fsdp2"),
    "long_sequences": ("zero3",),
    "low_bit": ("zero2",),
    "muon": (*COMPARED, "megatron"),
}
"""Strategies of experiments on what only some strategies have."""
PEERS = ("fsdp2",)
"""Strategies that theory does not predict."""


@pytest.mark.slow
def test_every_block_of_every_page_is_that_of_the_committed_runs() -> None:
    # in a process of its own: other tests register models and strategies, which the references would list
    code = "from tools.docs.pages import outdated; print(*outdated())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout.split(), done.returncode) == ([], 0), f"run `make pages`\n{done.stderr}"


def test_the_main_jobs_committed_runs_are_whole_and_agree() -> None:
    runs = zerobench.load(REFERENCE / "stages").runs
    assert list(runs.strategy) == [*COMPARED]
    assert set(runs.status) == {"ok"}
    assert runs.passes_agree.all()
    assert runs.loss_last.nunique() == 1


@pytest.mark.slow
@pytest.mark.parametrize("experiment", sorted({*FIGURES.values(), *set(WITHOUT_FIGURE) & {*OF, "memory_cap"}}))
def test_every_experiment_has_committed_tables_that_say_where_they_come_from(experiment: str, capsys) -> None:
    results = zerobench.load(REFERENCE / experiment)
    assert set(results.runs.status) == {"ok"}
    assert set(results.runs.strategy) == set(OF.get(experiment, COMPARED))
    assert all(f"experiment={experiment}" in command for command in results.runs.command)
    assert results.runs.commit.notna().all()
    assert results.runs.torch_version.notna().all()
    accounted = results.runs[results.runs.states_bytes.notna() & ~results.runs.strategy.isin(PEERS)]
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
    assert any(f"results/reference/cpu/figures/{figure}.png" in page.read_text() for page in pages())


def cells() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(notebook.NOTEBOOK.read_text())["cells"]
    return found


def test_the_page_has_the_cells_of_today_and_figures_that_are_there() -> None:
    page = notebook.PAGE.read_text()
    sources = [(one["cell_type"] == "code", "".join(one["source"]).strip()) for one in cells()]
    assert [(kind == "code", text) for kind, text in notebook.sources_on(page)] == sources, "run `make notebook`"
    drawn = {one.stem for one in notebook.FIGURES.glob("*.png")}
    assert drawn == {"memory", "volume", "timeline", "losses"}
    assert all(f"({notebook.FIGURES.name}/{name}.png)" in page for name in drawn)


def executed(folder: Path) -> Any:
    """The notebook, executed in a kernel in `folder`."""
    pytest.importorskip("nbclient", reason="the extra [notebook] is not installed: pip install -e '.[notebook]'")
    pytest.importorskip("ipykernel", reason="the extra [notebook] is not installed: pip install -e '.[notebook]'")
    return notebook.executed(notebook.read(notebook.NOTEBOOK), folder)


def shown(read: Any, beginning: str) -> list[dict[str, Any]]:
    """Outputs, by type, of the cells whose last line begins so."""
    mine = [one for one in read["cells"] if one["cell_type"] == "code" and one["source"].split("\n")[-1] == beginning]
    return [output["data"] for one in mine for output in one["outputs"] if "data" in output]


def check(read: Any, folder: Path, strategies: list[str]) -> None:
    """Every cell ran, shows what it is for, and the tables are those of the runs on disk."""
    [table] = shown(read, "results")
    runs = load(folder / "results/runs/notebook").runs
    assert list(runs.strategy) == strategies
    for run in runs.itertuples():
        assert f"{run.peak_bytes / 2**20:.1f}" in table["text/html"]
    assert "<svg" in table["text/html"]
    assert "Run zero3 gpt_tiny N=2 b=4: ok" in shown(read, "zero3")[0]["text/html"]
    drawn = [one["source"] for one in read["cells"] if one["cell_type"] == "code" and ".plot." in one["source"]]
    assert all(any("image/png" in one for one in shown(read, line)) for line in drawn)
    assert runs.set_index("strategy").peak_bytes["zero3"] < runs.set_index("strategy").peak_bytes["ddp"]


@pytest.mark.thorough
def test_all_of_it_runs_and_bears_out_what_it_says(tmp_path: Path) -> None:
    check(executed(tmp_path), tmp_path, ["ddp", "zero1", "zero2", "zero3"])
    runs = load(tmp_path / "results/runs/notebook").runs.set_index("strategy")
    assert runs.max_optimizer_bytes["zero1"] / runs.max_optimizer_bytes["ddp"] == pytest.approx(0.5, abs=0.01)
    assert runs.max_gradients_bytes["zero2"] < 0.5 * runs.max_gradients_bytes["zero1"]
    assert runs.volume_psi["zero1"] == runs.volume_psi["zero2"] == runs.volume_psi["ddp"] == 2.0
    assert runs.volume_psi["zero3"] == pytest.approx(3.0, abs=0.1)
