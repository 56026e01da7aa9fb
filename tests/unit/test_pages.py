"""The figures in numbers of README and docs/, and the tutorial notebook, are those of the committed runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import zerobench
from analysis.__main__ import FIGURES
from tools.docs import notebook
from tools.docs.pages import pages
from tools.docs.recorded import CODE, PROMINENT, REFERENCE, engine_code
from zerobench import cli

ROOT = Path(__file__).parents[2]
PEERS = ("fsdp2", "fsdp2_no_reshard", "zero_redundancy")
"""Strategies that theory does not predict."""


@pytest.mark.slow
def test_every_block_of_every_page_is_that_of_the_committed_runs() -> None:
    # in a process of its own: other tests register models and strategies, which the references would list
    code = "from tools.docs.pages import outdated; print(*outdated())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout.split(), done.returncode) == ([], 0), f"run `make pages`\n{done.stderr}"


@pytest.mark.parametrize("experiment", PROMINENT)
def test_a_table_on_the_first_pages_is_recorded_by_this_engine(experiment: str) -> None:
    assert (REFERENCE / experiment / CODE).read_text().strip() == engine_code(), (
        f"results/reference/cpu/{experiment} was recorded by an earlier engine; renew it:"
        f' make experiments plots EXPERIMENTS="{" ".join(PROMINENT)}"'
    )


def test_the_main_jobs_committed_runs_agree() -> None:
    runs = zerobench.load(REFERENCE / "stages").runs
    assert list(runs.strategy) == ["ddp", "zero1", "zero2", "zero3"]
    assert runs.passes_agree.all()
    assert runs.loss_last.nunique() == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "experiment", sorted({*FIGURES.values(), *(p.parent.name for p in REFERENCE.glob("*/runs.md"))})
)
def test_every_experiment_has_committed_tables_that_say_where_they_come_from(experiment: str, capsys) -> None:
    results = zerobench.load(REFERENCE / experiment)
    assert set(results.runs.status) == {"ok"}
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


def test_the_page_has_the_cells_of_today_and_figures_that_are_there() -> None:
    page, cells = notebook.PAGE.read_text(), json.loads(notebook.NOTEBOOK.read_text())["cells"]
    sources = [(one["cell_type"] == "code", "".join(one["source"]).strip()) for one in cells]
    assert [(kind == "code", text) for kind, text in notebook.sources_on(page)] == sources, "run `make notebook`"
    drawn = {one.stem for one in notebook.FIGURES.glob("*.png")}
    assert drawn == {"memory", "volume", "timeline", "losses"}
    assert all(f"({notebook.FIGURES.name}/{name}.png)" in page for name in drawn)


@pytest.mark.thorough
def test_the_notebook_runs_and_bears_out_what_it_says(tmp_path: Path) -> None:
    for name in ("nbclient", "ipykernel"):
        pytest.importorskip(name, reason="the extra [notebook] is not installed: pip install -e '.[notebook]'")
    executed = notebook.executed(notebook.read(notebook.NOTEBOOK), tmp_path)
    outputs = {  # by a cell's last line
        cell["source"].split("\n")[-1]: [output["data"] for output in cell["outputs"] if "data" in output]
        for cell in executed["cells"]
        if cell["cell_type"] == "code"
    }
    runs = zerobench.load(tmp_path / "results/runs/notebook").runs.set_index("strategy")
    assert all(f"{size / 2**20:.1f}" in outputs["results"][0]["text/html"] for size in runs.peak_bytes)
    assert all(any("image/png" in one for one in shown) for line, shown in outputs.items() if ".plot." in line)
    assert runs.max_optimizer_bytes["zero1"] / runs.max_optimizer_bytes["ddp"] == pytest.approx(0.5, abs=0.01)
    assert runs.max_gradients_bytes["zero2"] < 0.5 * runs.max_gradients_bytes["zero1"]
    assert runs.volume_psi["zero1"] == runs.volume_psi["zero2"] == runs.volume_psi["ddp"] == 2.0
    assert runs.volume_psi["zero3"] == pytest.approx(3.0, abs=0.1)
    assert runs.peak_bytes["zero3"] < runs.peak_bytes["ddp"]
