"""The figures in numbers of README and docs/ are those of the committed runs."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

import zerobench
from analysis.__main__ import FIGURES
from tools.docs import quoted
from tools.docs.pages import EXPERIMENT, SOURCES, pages, rewritten
from tools.docs.recorded import REFERENCE, other_defaults, recorded
from tools.docs.render import templates
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


def test_a_block_that_was_changed_by_hand_is_seen_and_made_anew() -> None:
    made = {"stages": "of the runs ](results/a.png)"}
    page = "before <!-- stages: written by `make pages` -->\n\nby hand\n\n<!-- end of stages --> after"
    new = rewritten(page, made, depth=2)
    assert "by hand" not in new
    assert "](../../results/a.png)" in new
    assert rewritten(new, made, depth=2) == new


@pytest.mark.parametrize("name", ["stages", "nothing"])
def test_a_block_that_has_no_end_or_is_unknown_is_a_sentence(name: str) -> None:
    with pytest.raises(ValueError, match="page"):
        rewritten(f"<!-- {name}: written by `make pages` -->", {})


def test_the_main_jobs_committed_runs_are_whole_and_agree() -> None:
    runs = zerobench.load(REFERENCE / "stages").runs
    assert list(runs.strategy) == [*COMPARED]
    assert set(runs.status) == {"ok"}
    assert runs.passes_agree.all()
    assert runs.loss_last.nunique() == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "experiment",
    [
        pytest.param(one, marks=pytest.mark.thorough if n % 4 else ())
        for n, one in enumerate(sorted({*FIGURES.values()}))
    ],
)
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


def test_two_hops_send_each_slice_to_a_node_once() -> None:
    runs = zerobench.load(REFERENCE / "nodes").runs
    for strategy, two in runs.groupby("strategy"):
        flat, hops = two.sort_values("between_nodes_bytes", na_position="first").itertuples()
        assert pd.isna(flat.between_nodes_bytes), strategy
        assert hops.between_nodes_bytes == hops.predicted_between_nodes_bytes
        assert hops.volume_psi == pytest.approx(1.5 * flat.volume_psi), "1 + 1/L of it"


def runs_of(**section: object) -> pd.DataFrame:
    return pd.DataFrame({"config": [json.dumps({"strategy": section})]})


def test_defaults_that_changed_since_are_named_with_both_values() -> None:
    runs = runs_of(name="zero2", mode="own", bucket_bytes=4096, broadcast_buffers=True)
    assert other_defaults(runs, "experiment=stages") == {"bucket_bytes": (4096, "auto")}


def test_what_was_chosen_or_is_a_peers_is_no_default() -> None:
    assert other_defaults(runs_of(name="zero2", mode="own", bucket_bytes=4096), "strategy.bucket_bytes=4096") == {}
    assert other_defaults(runs_of(name="zero2", mode="vendor", bucket_bytes=4096), "") == {}
    assert other_defaults(runs_of(name="fsdp2", prefetch=7), "") == {}


def test_a_table_of_earlier_code_says_so_from_its_own_provenance() -> None:
    words = recorded("tiling")
    runs = pd.read_parquet(REFERENCE / "tiling/runs.parquet")
    assert runs["commit"].iloc[0][:7] in words
    assert runs["started"].iloc[0][:10] in words
    earlier = bool(other_defaults(runs, ""))
    assert ("`zerobench experiment=tiling --dry-run` predicts them" in words) == earlier


def test_every_template_is_of_a_block_and_every_block_of_an_experiment_has_a_date() -> None:
    assert set(templates()) - set(SOURCES) == {"table1_lines"}  # a second table of table1_in_flight
    assert all((REFERENCE / experiment).is_dir() for experiment in EXPERIMENT.values())
    named = {page.name for page in REFERENCE.iterdir()} & set(SOURCES)
    texts = [page.read_text() for page in pages()]
    for name in named:
        block = next(text.split(f"<!-- end of {name} -->")[0] for text in texts if f"<!-- end of {name} -->" in text)
        assert block.rstrip().rsplit("\n", 1)[1].startswith("Recorded on "), name


def test_a_recorded_output_is_of_the_command_on_the_page() -> None:
    page = (ROOT / "docs/how-to/memory-questions.md").read_text()
    shown = {number: command for command, number in re.findall(r"\| `([^`]+)` \|.*questions/(\w+)\.txt\)", page)}
    assert len(shown) == 17
    assert {number: quoted.read_output(number)[0] for number in shown} == shown
