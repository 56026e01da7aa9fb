"""Exports for other programs, each read back: the trace as JSON, and LaTeX whatever runs are called."""

import gzip
import json
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import zerobench
from tests.cells import cell
from tests.made_up import MIB, results_of, run
from zerobench import cli
from zerobench.commands.export import export, to_latex
from zerobench.config.schema import Measure
from zerobench.records import CATEGORIES
from zerobench.results.tables import Results, collect
from zerobench.sweep import cell as cells

pytestmark = pytest.mark.slow

REFERENCE = Path(__file__).parents[2] / "results" / "reference" / "cpu" / "stages"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two real ranks of zero3 with their events; and a cell that is invalid."""
    where = tmp_path_factory.mktemp("runs")
    measure = Measure(steps=1, warmup=2, events=True, passes="accounted")
    cells.run_cell(cell("zero3", 2, measure=measure, results_dir=str(where)), lambda _: None)
    cells.run_cell(cell("zero1", 1, measure=Measure(steps=1, warmup=2, events=True), backend="simulated",
                        results_dir=str(where), node_size=3), lambda _: None)  # fmt: skip
    return where


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    return zerobench.load(folder)


@pytest.fixture(scope="module")
def trace(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("trace") / "step.json.gz"
    assert export([str(folder), "--format", "perfetto", "--out", str(out)]) == 0
    read: dict[str, Any] = json.loads(gzip.decompress(out.read_bytes()))
    assert sorted(path.name for path in out.parent.iterdir()) == ["step.json.gz"]
    return list(read["traceEvents"])


def test_a_trace_has_a_process_for_each_rank(trace: list[dict[str, Any]], results: Results) -> None:
    run = results.runs["run_id"].iloc[0]
    names = {one["pid"]: one["args"]["name"] for one in trace if one["name"] == "process_name"}
    assert list(names.values()) == [f"{run} rank 0", f"{run} rank 1"]
    threads = {one["args"]["name"] for one in trace if one["name"] == "thread_name"}
    assert {"phases", "forward", "backward", "collectives", "units", "updates and moves"} <= threads


def test_counters_are_the_ledgers_maxima(trace: list[dict[str, Any]], results: Results) -> None:
    highest: dict[tuple[int, str], int] = defaultdict(int)
    for one in trace:
        if one["ph"] == "C":
            key = one["pid"], one["name"]
            highest[key] = max(highest[key], one["args"]["bytes"])
    step = results.memory[(results.memory["phase"] == "step") & (results.memory["tier"] == "device")]
    for rank, memory in step.groupby("rank"):
        table = memory[memory["category"].isin(CATEGORIES)].set_index("category")["max_bytes"].to_dict()
        assert {c: highest[int(str(rank)) + 1, f"device {c}"] for c in CATEGORIES} == table


def test_collectives_of_a_trace_are_the_traffic(trace: list[dict[str, Any]], results: Results) -> None:
    spans = [one for one in trace if one["ph"] == "X" and one["cat"] == "collectives"]
    traffic = results.traffic[results.traffic["step"] == results.traffic["step"].max()]
    for rank, mine in traffic.groupby("rank"):
        own = [one for one in spans if one["pid"] == int(str(rank)) + 1]
        assert sum(one["args"]["wire_bytes"] for one in own) == mine["wire_bytes"].sum()
        assert sum(one["args"]["payload_bytes"] for one in own) == mine["payload_bytes"].sum()
        assert {one["name"] for one in own} >= {"all_gather blocks.0", "reduce_scatter blocks.0"}
    units = [one["name"] for one in trace if one["ph"] == "X" and one["cat"] == "units" and one["pid"] == 1]
    assert sorted(units) == sorted(["(root)", *(f"blocks.{i}" for i in range(3) for _ in range(2))])


def test_without_events_there_is_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export([str(REFERENCE), "--format", "perfetto", "--out", str(tmp_path / "step.json")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("zerobench export: --format perfetto: no run here has a table of events")
    assert "measure.events=true" in said
    assert list(tmp_path.iterdir()) == []


def test_an_export_says_what_it_wrote_and_makes_its_folder(
    folder: Path, tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert export([str(folder), "--out", "new/folder/runs.csv"]) == 0
    assert export([str(folder), "--format", "parquet", "--out", "all"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"new/folder/runs.csv: the table runs of {folder} as csv",
        "all: 1 run, a table each as parquet; zerobench.load reads it",
    ]  # fmt: skip
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.csv")} == {"new/folder/runs.csv"}


def test_files_for_other_programs_need_a_place(capsys: pytest.CaptureFixture[str]) -> None:
    for name, where in (("perfetto", "FILE"), ("parquet", "FOLDER")):
        with pytest.raises(SystemExit):
            export([str(REFERENCE), "--format", name])
        assert f"--format {name} needs --out {where}" in capsys.readouterr().err


HOSTILE = r"50%_off #1 & $x^2$ {a}\b ~[c] <i>" + "\nψ × é"


def rows_of(text: str) -> list[list[str]]:
    """The cells of the rows between the lines of booktabs."""
    return [re.split(r"(?<!\\) & ", line.removesuffix(r" \\")) for line in text.splitlines() if line.endswith(r"\\")]


def test_numbers_have_units_and_intervals_and_failures_a_word() -> None:
    rows = [run("ddp", 2, repeat=n, step=step) for n, step in enumerate((0.1, 0.1, 0.1))]
    rows += [run("zero1", 2, step_s_low=None, step_s_high=None, peak_bytes=5 * MIB), run("zero3", 2, "oom")]
    text = to_latex(results_of(rows), "runs", "cell,peak_bytes,step_s,volume_psi,tokens_per_s,world_size")
    head, ddp, zero1, zero3 = rows_of(text)
    assert head == ["cell", "peak (MiB)", "step (ms)", r"volume ($\psi$)", "tokens (tokens / s)", "world size (ranks)"]
    assert ddp == ["ddp tiny N=2 b=4", "36.0", "100 [100, 100]", "3.000", "1280 [1280, 1280]", "2"]
    assert zero1[:3] == ["zero1 tiny N=2 b=4", "5.000", "100"]
    assert zero3[:3] == ["zero3 tiny N=2 b=4", "oom", "--"]
    assert rows_of(to_latex(results_of(rows), "runs", "cell"))[3] == ["zero3 tiny N=2 b=4 (oom)"]
    small = replace(rows[0], loss_deviation=3e-4)
    assert rows_of(to_latex(results_of([small]), "runs", "loss_deviation"))[1] == ["0.000300"]
    assert text.splitlines()[0] == r"% \usepackage{booktabs}"


def test_what_runs_are_called_reaches_no_command_of_latex() -> None:
    rows = [replace(run("ddp", 2), model=HOSTILE, device_class="cpu\n\\input{/etc/passwd}")]
    text = to_latex(results_of(rows), "runs", "model,strategy,peak_bytes")
    first = r"50\%\_off \#1 \& \$x\textasciicircum 2\$ \{a\}\textbackslash b "
    assert rows_of(text)[1][0] == first + r"\textasciitilde [c] <i>\textbackslash n$\psi$ × é"
    assert not any(line.startswith(r"\input") for line in text.splitlines())


def test_the_verb_writes_it_and_names_a_column_that_is_none(tmp_path: Path, capsys) -> None:
    collect(results_of([run("ddp", 2), run("zero1", 2)]), tmp_path / "runs")
    out = tmp_path / "runs.tex"
    onto = ["--format", "parquet", "--where", "strategy=ddp", "--out", str(tmp_path / "runs")]
    assert cli.run(["export", str(tmp_path / "runs"), *onto]) == 2, "the other run would be lost"
    assert cli.run(["export", str(tmp_path / "runs"), "--format", "latex", "--out", str(out)]) == 0
    assert re.findall(r"\\(begin|toprule|midrule|bottomrule|end)", out.read_text()) == [
        "begin", "toprule", "midrule", "bottomrule", "end",
    ]  # fmt: skip
    assert capsys.readouterr().out == f"{out}: the table runs of {tmp_path / 'runs'} as latex\n"
    assert cli.run(["export", str(tmp_path / "runs"), "--format", "latex", "--table", "memory"]) == 0
    body = "".join(line for line in capsys.readouterr().out.splitlines() if not line.startswith("%"))
    assert not re.search(r"(?<!\\)[_#%~]", re.sub(r"\$.*?\$", "", body)), "all columns, without a bare sign"
    assert cli.run(["export", str(tmp_path / "runs"), "--format", "latex", "--columns", "peek"]) == 2
    assert "--columns: peek is no column of runs; docs/reference/columns.md lists them" in capsys.readouterr().err
