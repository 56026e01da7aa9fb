"""Results as Python sees them: `zerobench.run`, typed frames, the long form, what they show; which runs are taken."""

import argparse
import runpy
import shutil
import sys
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pandas as pd
import pytest

import zerobench
from tests.cells import cell
from tests.made_up import results_of, run
from tests.unit.test_status_show_prune import make
from zerobench import cli
from zerobench.commands.plot import load_all
from zerobench.config.schema_memory import CpuOffload
from zerobench.config.schema_training import AdamW, Sgd
from zerobench.records import LINKS, MemoryRow, RunRow
from zerobench.records.describe import columns_of
from zerobench.registry import MODELS
from zerobench.results import selection, tables
from zerobench.results.frames import to_frame
from zerobench.results.options import Where
from zerobench.results.tables import ALL_TABLES, COLUMNS, FIGURES, RANKS, Results, collect, load, merge
from zerobench.sweep import from_python
from zerobench.sweep.cell import new_row

STAGES = Path(__file__).parents[2] / "results/reference/cpu/stages"

MEANS = {"wire_bytes", "within_bytes", "between_bytes"}
"""Bytes of traffic that are means over a group of ranks, and so no integers."""


@pytest.fixture(scope="module")
def stages() -> Results:
    return load(STAGES)


def test_columns_are_typed_and_each_has_a_meaning_and_every_number_its_unit(stages: Results) -> None:
    for table in ALL_TABLES:
        frame, columns = getattr(stages, table), columns_of(table)
        assert {column.name for column in columns} == set(frame.columns), table
        for column in columns:
            assert column.meaning[5:].endswith("."), column
            assert bool(column.unit) == (column.kind in ("int", "float")), column
        units = frame.attrs["units"]
        assert units == {column.name: column.unit for column in columns if column.unit}
        assert frame.head(1).attrs == frame.attrs, "pandas carries them along"
        sizes = [name for name, unit in units.items() if unit == "bytes" and name not in MEANS]
        assert {str(frame[name].dtype) for name in sizes} <= {"Int64"}, table
    assert stages.sweep().attrs["units"]["peak_bytes"] == "bytes"


@pytest.mark.slow
def test_files_and_merges_hold_what_they_held(stages: Results, tmp_path: Path) -> None:
    collect(stages, tmp_path)
    for again in (load(tmp_path), merge([stages.of(stages.runs.run_id[:1]), stages.of(stages.runs.run_id[1:])])):
        for name in ALL_TABLES:
            pd.testing.assert_frame_equal(getattr(again, name), getattr(stages, name))


def test_runs_that_two_folders_have_count_once_and_the_newest_is_the_latest(tmp_path: Path) -> None:
    first, second = make(tmp_path / "a"), make(tmp_path / "b")
    whole = load(first)
    collect(whole, first.parent / "all")
    for name in ("runs", "lines", "traffic"):
        assert len(getattr(load(first.parent), name)) == len(getattr(whole, name))
    assert selection.latest(load_all([second.parent, first.parent]).runs)["run_id"].tolist() == [second.name]


def test_the_long_form_has_the_runs_figures_and_those_that_they_are_made_of(stages: Results) -> None:
    long = stages.long(beside=["strategy"])
    assert list(long.columns) == ["run_id", "strategy", *COLUMNS[1:]]
    assert list(long.metric.cat.categories) == list(FIGURES)
    whole = long[long["rank"].isna()].pivot(index="run_id", columns="metric", values="value")
    for name in ("peak_bytes", "step_s", "volume_psi", "predicted_states_bytes"):
        assert dict(whole[name]) == dict(zip(stages.runs.run_id, stages.runs[name].astype(float), strict=True))
    ranks = long[long["rank"].notna()]
    assert set(ranks.metric) <= set(RANKS)
    most = ranks.groupby(["run_id", "metric"], observed=True).value.max()
    for (run_id, metric), value in most.items():
        if not metric.endswith("_s"):  # a run's time is the median of the slowest rank's in each step
            assert value == pytest.approx(whole.loc[run_id, metric], rel=1e-12), metric
    steps = stages.steps[(stages.steps["mode"] == "timed") & ~stages.steps["warmup"]]
    slowest = steps.groupby(["run_id", "step"]).seconds.max().groupby("run_id").median()
    assert dict(whole["step_s"]) == pytest.approx(dict(slowest))
    traffic = stages.traffic[~stages.traffic.control & ~stages.traffic.kind.isin(LINKS)]
    assert ranks[ranks.metric == "payload_bytes"].value.sum() == traffic.payload_bytes.sum() / 10


@pytest.mark.slow
def test_the_long_form_takes_names_and_says_which_there_are(stages: Results) -> None:
    assert set(stages.long("step_s", "peak_bytes").metric) == {"step_s", "peak_bytes"}
    assert set(stages.long("step_s").unit) == {"s"}
    for wrong, sentence in (
        (lambda: stages.long("peak_byte"), "long: 'peak_byte' is not a metric of the runs; do you mean peak_bytes"),
        (lambda: stages.long(beside=["stratgy"]), "'stratgy' is not a column of the runs; do you mean strategy"),
    ):
        with pytest.raises(ValueError, match=sentence):
            wrong()
    assert results_of([run("ddp", 2, "oom")]).long().empty
    assert list(results_of([]).long().columns) == list(COLUMNS)


def test_a_run_is_found_as_it_is_named(stages: Results) -> None:
    run_id = stages.runs.run_id.iloc[1]
    found = [stages.run(name) for name in (run_id, run_id[:24], "zero1 gpt_small N=2 b=8")]
    assert {one.row.run_id for one in found} == {run_id}
    assert set(found[0].memory.run_id) == {run_id}
    assert found[0].config["strategy"]["name"] == "zero1"
    with pytest.raises(ValueError, match="these results fits 4 runs; name one of these\n  "):
        stages.run("")
    with pytest.raises(ValueError, match="no such run in these results; the nearest: 'zero1 gpt_small N=2 b=8'"):
        stages.run("zero1 gpt_small N=4 b=8")


# -- HTML for a notebook -------------------------------------------------------------------------------


def html(results: Results) -> ElementTree.Element:
    return ElementTree.fromstring(results._repr_html_())


@pytest.mark.slow
def test_html_escapes_what_comes_from_folders_and_says_what_failed() -> None:
    evil = "<script>alert(1)</script>"
    failed = replace(run("zero3", 2, "crash"), reason=evil)
    text = results_of([run("ddp", 2), failed])._repr_html_()
    assert evil not in text
    assert "crash: &lt;script&gt;" in text
    assert html(results_of([])).text == "Results: no runs."
    alone = html(results_of([failed]))
    assert alone.find(".//{http://www.w3.org/2000/svg}svg") is None, "nothing was measured"
    assert "crash" in "".join(html(results_of([failed]).run("zero3-2-2-0")).itertext())


def test_a_table_of_an_older_version_is_filled_and_typed() -> None:
    """Without a tier it has the device's; a missing text is None; a table without rows has the same types."""
    kept = pd.DataFrame({"run_id": ["a"], "rank": [0], "category": ["gradients"], "beyond": [1]})
    old, none = to_frame([kept], MemoryRow, "run_id"), to_frame([], MemoryRow, "run_id")
    assert list(old.columns) == list(none.columns) == ["run_id", *(one.name for one in fields(MemoryRow))]
    assert old.loc[0, ["run_id", "category", "tier"]].tolist() == ["a", "gradients", "device"]
    assert old["phase"].tolist() == [None]
    assert old.dtypes[1:].equals(none.dtypes[1:])
    none["phase"] = "written by a caller"
    none["more"] = 1
    assert list(to_frame([], MemoryRow, "run_id").columns) == list(old.columns)


@pytest.mark.slow
def test_of_many_runs_a_damaged_or_removed_one_is_left_out_with_a_sentence(tmp_path: Path, monkeypatch) -> None:
    """A table of many runs is read when it is used, and its pages are checked then."""
    monkeypatch.setattr(tables, "MANY", 4)
    for repeat in range(4):
        make(tmp_path, repeat=repeat)
    first, second, *_ = sorted(path for path in tmp_path.iterdir() if (path / "run.json").is_file())
    content = bytearray((first / "memory.parquet").read_bytes())
    content[40] ^= 1
    (first / "memory.parquet").write_bytes(content)
    found = load(tmp_path)
    shutil.rmtree(second)
    with pytest.warns(UserWarning, match="rows of memory are left out") as caught:
        left = set(found.runs.run_id) - set(found.memory.run_id)
    assert left == {first.name, second.name}
    told = sorted(str(one.message) for one in caught)
    assert [first.name in told[0], second.name in told[1]] == [True, True]
    assert "the run was removed meanwhile" in told[1]


def of(name: str, **choices: Any) -> RunRow:
    """An ok run of a cell with these choices, made up."""
    made = run("zero1", 2)
    blank = new_row(cell(choices.pop("strategy", "zero1"), choices.pop("ranks", 2), **choices))
    told = {key: getattr(blank, key) for key in ("cell_id", "config", "strategy", "world_size", "optimizer", "seed")}
    return replace(made, run_id=name, **told)


@cache
def some() -> Results:
    return results_of(
        [
            of("a", optimizer=AdamW(lr=1e-3)),
            of("b", optimizer=AdamW(lr=0.01)),
            of("c", optimizer=Sgd(momentum=0.9)),
            of("d", strategy="zero2", offload=CpuOffload(fraction=0.5)),
            of("e", strategy="zero3", seed=3, deterministic=True),
        ]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("conditions", "kept"),
    [
        (["strategy=zero2"], "d"),
        (["strategy!=zero1"], "de"),
        (["optimizer.lr=1e-3"], "a"),
        (["optimizer.lr=0.001,.01"], "ab"),
        (["offload=cpu"], "d"),
        (["offload=none", "strategy!=zero1"], "e"),
        (["seed=3"], "e"),
        (["run_id=b"], "b"),
        (["status=ok", "strategy.prefetch=1"], "e"),
    ],
)
def test_runs_are_taken_by_key_or_column(conditions: list[str], kept: str) -> None:
    found, words = some().chosen([Where.parse(one) for one in conditions])
    assert "".join(found.runs["run_id"]) == kept
    assert set(found.memory["run_id"]) == set(kept)
    assert words == ""


@pytest.mark.parametrize(
    ("conditions", "words"),
    [
        (["strategy=zero9"], "--where strategy=zero9: no such run; strategy is zero1 or zero2 or zero3"),
        (["strategy=zero3", "world_size=7"], "=7: no such run among those with strategy=zero3; world_size is"),
        (["stratgy=zero1"], "no run has such a key or column; did you mean strategy?"),
        (["lr=1e-3"], "did you mean optimizer.lr?"),
    ],
)
def test_a_condition_that_none_meets_is_a_sentence(conditions: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=r"^--where") as raised:
        some().chosen([Where.parse(one) for one in conditions])
    assert words in str(raised.value)


@pytest.mark.parametrize("text", ["strategy", "=zero1", "strategy="])
def test_what_is_no_condition_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="write KEY=VALUE"):
        Where.parse(text)


@cache
def attempts() -> Results:
    """zero1: crashed, then ok, then ok again, then crashed again; zero2: invalid alone; zero3: out of memory."""
    zero1 = [run("zero1", 2), run("zero1", 2), run("zero1", 2, "crash"), run("zero1", 2, "crash")]
    rows = [zero1[2], zero1[0], zero1[1], zero1[3], run("zero2", 2, "invalid"), run("zero3", 2, "oom")]
    began = "2026-01-01T00:00:0{}+00:00"
    return results_of([replace(row, run_id=f"r{n}", started=began.format(n)) for n, row in enumerate(rows)])


@pytest.mark.slow
def test_failed_and_superseded_attempts_are_left_out_unless_asked_for() -> None:
    found, words = attempts().chosen([], everything=False)
    assert list(found.runs["run_id"]) == ["r2", "r5"]
    assert words == "3 failed attempts and 1 superseded run left out; --all takes them"
    assert len(attempts().chosen([], everything=True)[0].runs) == 6
    assert list(selection.standing_or_failed(attempts().runs)["run_id"]) == ["r2", "r4", "r5"]


def test_every_swept_key_is_a_column() -> None:
    swept = some().sweep()
    own = [column for column in swept if column not in RunRow.__dataclass_fields__]
    assert own == ["cell", "offload", "deterministic", "optimizer.lr"]
    assert swept["optimizer.lr"].tolist()[:2] == [0.001, 0.01]
    assert swept["offload"].tolist() == ["none", "none", "none", "cpu", "none"]
    assert swept["deterministic"].tolist() == [False] * 4 + [True]
    assert list(swept.columns[len(own) :]) == list(RunRow.__dataclass_fields__)
    assert "seed" in swept
    assert "strategy.bucket_bytes" not in swept, "it follows from the strategy"
    assert [c for c in results_of([]).sweep() if c not in RunRow.__dataclass_fields__] == ["cell"]


@pytest.mark.thorough
def test_verbs_take_where(tmp_path: Path, capsys) -> None:
    collect(some(), tmp_path / "runs")
    assert cli.run(["export", str(tmp_path / "runs"), "--where", "optimizer=adamw", "--where", "strategy=zero1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("cell,optimizer.lr,run_id")
    assert cli.run(["status", str(tmp_path / "runs"), "--where", "strategy=zero2"]) == 0
    assert "1 run of 1 cell" in capsys.readouterr().out
    assert cli.run(["compare", str(tmp_path / "runs"), str(tmp_path / "runs"), "--where", "strategy=zero2"]) == 0
    shown = capsys.readouterr().out
    assert "zero2" in shown
    assert "zero1" not in shown
    for verb, code in ((["export"], 2), (["status"], 2), (["budget", "check", "--runs"], 125)):
        assert cli.run([*verb, str(tmp_path / "runs"), "--where", "strategy=zero9"]) == code
        assert "no such run; strategy is zero1 or" in capsys.readouterr().err


@pytest.mark.slow
def test_budgets_from_runs_take_no_attempts_unless_asked(tmp_path: Path, capsys) -> None:
    """But a cell with a budget, all of whose attempts failed, is told of."""
    collect(attempts(), tmp_path / "runs")
    limits = "{limits: {peak_bytes: <= 1 GiB}}"
    cells = {name: f"{name} tiny N=2 b=4" for name in ("zero1", "zero2", "zero3")}

    def check(names: list[str], *flags: str) -> tuple[int, str]:
        budgeted = ", ".join(f"{cells[name]}: {limits}" for name in names)
        (tmp_path / "a.yaml").write_text(f"environments: {{any: {{cells: {{{budgeted}}}}}}}\n")
        code = cli.run(["budget", "check", str(tmp_path / "a.yaml"), "--runs", str(tmp_path / "runs"), *flags])
        return code, capsys.readouterr().out

    code, shown = check(["zero1"], "--where", "strategy=zero1,zero2")
    assert code == 0, "the ok run counts, although an attempt after it crashed"
    assert "failed attempts and 1 superseded run left out; --all takes them" in shown
    assert check(["zero1"], "--where", "strategy=zero1,zero2", "--all")[0] == 125, "the newest attempt crashed"
    code, shown = check(["zero2"], "--where", "strategy=zero2")
    assert code == 125
    assert "invalid" in shown


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Command lines that would have run; no fork server starts."""
    seen: list[Any] = []
    monkeypatch.setattr(from_python.fork_server, "start", lambda: None)
    real = from_python.compose_cells
    monkeypatch.setattr(from_python, "compose_cells", lambda words: (seen.append(list(sys.argv)), real(words))[1])
    monkeypatch.setattr(from_python, "run_cells", lambda cells, tables: (seen.append(len(cells)), (130, []))[1])
    return seen


@pytest.mark.slow
def test_lists_are_sweeps_and_a_run_records_the_same_command(composed: list[Any]) -> None:
    before = list(sys.argv)
    with pytest.raises(KeyboardInterrupt):
        zerobench.run("measure.steps=3", strategy=["ddp", "zero1"], model="gpt_tiny", clip=None, world_size=(1, 2))
    words = "zerobench -m measure.steps=3 strategy=ddp,zero1 model=gpt_tiny clip=null world_size=1,2"
    assert composed == [words.split(), 4]
    assert sys.argv == before


def test_what_is_no_choice_is_a_sentence(composed: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for choices, keys, sentence in (
        ((), {"strateg": "ddp"}, "strateg: no such key; did you mean strategy"),
        (("--dry-run",), {}, "--dry-run is a flag of the command line; write choices as KEY=VALUE"),
        (("status",), {}, "'status' is not KEY=VALUE, such as strategy=ddp"),
        (("zero9",), {}, "'zero9' is not KEY=VALUE, .*; strategies are ddp, .*zero1, zero2, zero3"),
    ):
        with pytest.raises(ValueError, match=sentence):
            zerobench.run(*choices, **keys)
    monkeypatch.setattr(from_python.multiprocessing, "parent_process", lambda: object())
    with pytest.raises(RuntimeError, match='below `if __name__ == "__main__":`'):
        zerobench.run(strategy="ddp")
    assert all(not isinstance(one, int) for one in composed), "nothing ran"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("import zerobench\nzerobench.run(\n    strategy='ddp'\n)\n", "line 2 of s.py calls it without `if __name__"),
        ("import zerobench\ndef go():\n    zerobench.run(strategy='ddp')\ngo()\n", "line 4 of s.py calls it without"),
        ("import zerobench\nif __name__ == '__main__':\n    zerobench.run(strategy='ddp')\n", None),
    ],
)
def test_script_without_main_guard_is_refused_before_ranks(
    composed: list[Any], tmp_path: Path, script: str, error: str | None
) -> None:
    (tmp_path / "s.py").write_text(script)
    with pytest.raises(RuntimeError if error else KeyboardInterrupt, match=error):
        runpy.run_path(str(tmp_path / "s.py"), run_name="__main__")
    assert (composed == []) is bool(error)


@pytest.mark.slow
def test_a_notebooks_own_model_is_refused_for_ranks_cannot_import_it(composed: list[Any], monkeypatch) -> None:
    monkeypatch.setitem(MODELS.builders, "bigram", lambda width=4: None)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "mine.py", raising=False)
    with pytest.raises(KeyboardInterrupt):  # in a script it would have run
        zerobench.run(strategy="ddp", model="bigram", world_size=2)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", None)
    with pytest.raises(ValueError, match="model=bigram is registered in this notebook, which ranks cannot import"):
        zerobench.run(strategy="ddp", model="bigram", world_size=2)
