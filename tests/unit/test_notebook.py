"""The tutorial notebook: without outputs in git, on its page as it is, and executed."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from tools.docs import notebook
from zerobench.results.tables import load


def cells() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(notebook.NOTEBOOK.read_text())["cells"]
    return found


def test_git_has_no_outputs() -> None:
    code = [cell for cell in cells() if cell["cell_type"] == "code"]
    assert len(code) > 5
    assert [cell["id"] for cell in code if cell["outputs"] or cell["execution_count"] or cell["metadata"]] == []


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


def test_outputs_become_markdown(tmp_path: Path) -> None:
    outputs = [
        {"output_type": "stream", "name": "stdout", "text": "one\n"},
        {"output_type": "display_data", "data": {"text/plain": "\x1b[1mtwo\x1b[0m", "text/html": "<pre>two</pre>"}},
        {
            "output_type": "execute_result",
            "data": {"text/html": "<table class='x'>\n\n<tr></tr></table>", "text/plain": "x"},
        },
        {"output_type": "display_data", "data": {"image/png": "iVBORw==", "text/plain": "<Sheet>"}},
    ]
    code = {"cell_type": "code", "source": "results.plot.memory();", "outputs": outputs}
    made = {"cells": [{"cell_type": "markdown", "source": "# A title"}, code]}
    page = notebook.page_of(copy.deepcopy(made), "Executed today.", tmp_path / "figures")
    assert notebook.sources_on(page) == [("text", "# A title"), ("code", "results.plot.memory();")]
    assert "```text\none\ntwo\n```\n\n<table>\n<tr></tr></table>\n\n![memory](figures/memory.png)\n" in page
    assert (tmp_path / "figures/memory.png").read_bytes() == b"\x89PNG\x07"[:4]
