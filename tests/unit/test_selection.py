"""Which runs are taken: --where, failed and superseded attempts, and the columns of what was swept over."""

import argparse
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.cells import cell
from tests.made_up import results_of, run
from zerobench import cli
from zerobench.config.schema_memory import CpuOffload
from zerobench.config.schema_training import AdamW, Sgd
from zerobench.records import RunRow
from zerobench.results import selection
from zerobench.results.options import Where
from zerobench.results.tables import Results, collect
from zerobench.sweep.cell import _blank_row


def of(name: str, **choices: Any) -> RunRow:
    """An ok run of a cell with these choices, made up."""
    made = run("zero1", 2)
    blank = _blank_row(cell(choices.pop("strategy", "zero1"), choices.pop("ranks", 2), **choices))
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
    ("condition", "words"),
    [
        ("strategy=zero9", "no such run; strategy is zero1 or zero2 or zero3"),
        ("stratgy=zero1", "no run has such a key or column; did you mean strategy?"),
        ("lr=1e-3", "did you mean optimizer.lr?"),
    ],
)
def test_a_condition_that_none_meets_is_a_sentence(condition: str, words: str) -> None:
    with pytest.raises(ValueError, match=r"^--where") as raised:
        some().chosen([Where.parse(condition)])
    assert words in str(raised.value)


def test_of_several_conditions_the_one_that_fits_nothing_is_named() -> None:
    conditions = [Where.parse("strategy=zero3"), Where.parse("world_size=7")]
    with pytest.raises(
        ValueError, match=r"^--where world_size=7: no such run among those with strategy=zero3; world_size is"
    ):
        some().chosen(conditions)


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


@pytest.mark.slow
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
    assert "failed or superseded runs left out; --all takes them" in shown
    assert check(["zero1"], "--where", "strategy=zero1,zero2", "--all")[0] == 125, "the newest attempt crashed"
    code, shown = check(["zero2"], "--where", "strategy=zero2")
    assert code == 125
    assert "invalid" in shown
