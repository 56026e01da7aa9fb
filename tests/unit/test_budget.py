"""Limits, verdicts, sentences and files of budgets."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.cells import cell
from zerobench.budgets.budget_file import (
    BudgetFile,
    CellBudget,
    Environment,
    Wanted,
    environment_of,
    folder_below,
    read_budget,
    record_cell,
    write_budget,
)  # fmt: skip
from zerobench.budgets.judge import RECORDED, Finding, Limit, judge_cell, parse_limit, recorded, show_limit
from zerobench.budgets.reports import check_body, write_junit
from zerobench.commands import budget
from zerobench.commands.budget import exit_code
from zerobench.config.cell import work_id
from zerobench.config.compose import compose_cells
from zerobench.config.schema_memory import AllOfZeropp, CpuOffload
from zerobench.sizes import parse_bytes, parse_memory, show_bytes

MIB = 2**20


def row(**more: Any) -> dict[str, Any]:
    zeros = dict.fromkeys(RECORDED, 0)
    return {"status": "ok", "reason": "", **zeros, "peak_bytes": 10 * MIB, "max_gradients_bytes": 4 * MIB, **more}


def exact(values: dict[str, Any]) -> dict[str, Limit]:
    return {metric: Limit(float(values[metric])) for metric in RECORDED}


@pytest.mark.parametrize(
    ("metric", "text", "limit"),
    [
        ("peak_bytes", 1234, Limit(1234)),
        ("states_bytes", "<= 24 GiB", Limit(24 * 2**30, "<=")),
        ("peak_bytes", "1.5 MiB ± 2 %", Limit(1.5 * MIB, "", 0.02)),
        ("step_s", "0.25 ± 25 %", Limit(0.25, "", 0.25)),
        ("tokens_per_s", ">= 1000", Limit(1000, ">=")),
        ("volume_psi", 2.986, Limit(2.986)),
        ("outside_ledger_bytes", -4, Limit(-4)),
    ],
)
def test_limits_are_read_and_written(metric: str, text: Any, limit: Limit) -> None:
    assert parse_limit(metric, text) == limit
    assert parse_limit(metric, show_limit(metric, limit)) == limit


@pytest.mark.parametrize(
    "text", ["about 3", "24 GB/s", "", "<=", None, True, "± 2 %", "-3 MiB", "nan", "<= inf", "5 MiB ± 1.2.3 %"]
)
def test_a_limit_that_is_none_gets_a_sentence(text: Any) -> None:
    with pytest.raises(ValueError, match=r"peak_bytes: .* is no limit; write a value"):
        parse_limit("peak_bytes", text)


@pytest.mark.parametrize(
    ("metric", "limit", "value", "verdict"),
    [
        ("outside_ledger_bytes", Limit(58_240), -5_300_000, "regression"),  # a ledger above the allocator cannot be
        ("outside_ledger_bytes", Limit(-5_300_000), -5_300_000, "ok"),
        ("outside_ledger_bytes", Limit(2**20), 0, "improvement"),
        ("peak_bytes", Limit(100), 100, "ok"),
        ("peak_bytes", Limit(100), 101, "regression"),
        ("peak_bytes", Limit(100), 99, "improvement"),
        ("peak_bytes", Limit(100, "", 0.02), 102, "ok"),
        ("peak_bytes", Limit(100, "", 0.02), 103, "regression"),
        ("peak_bytes", Limit(100, "<="), 3, "ok"),
        ("peak_bytes", Limit(100, "<="), 101, "regression"),
        ("tokens_per_s", Limit(100, "", 0.1), 80, "regression"),
        ("tokens_per_s", Limit(100, "", 0.1), 120, "improvement"),
        ("tokens_per_s", Limit(100, ">="), 99, "regression"),
        ("max_master_bytes", Limit(0), 1, "regression"),
        ("volume_psi", Limit(2.9), 2.9 * (1 + 1e-12), "ok"),
    ],
)
def test_verdicts_go_both_ways(metric: str, limit: Limit, value: float, verdict: str) -> None:
    assert limit.judge(metric, value) == verdict


def test_what_is_recorded_of_a_cell_is_held_and_a_change_of_it_caught(tmp_path: Path) -> None:
    """Through the file, as `record` writes it and `check` reads it."""
    config = cell("zero3", 4, offload=CpuOffload(), node_size=2, zeropp=AllOfZeropp()).config
    about = dict.fromkeys(("commit", "torch_version", "processor", "source_hash", "data"), "") | {"cores": 2}
    values = {metric: 0.5 if metric.endswith(("psi", "share")) else 2**22 for metric in RECORDED}
    measured = row(**values, **about) | {"name": "c", "work": "0", "environment": "cpu, torch 2.13"}
    file = BudgetFile(tmp_path / "b.yaml")
    record_cell(file, measured, Wanted(tuple(recorded(config))), {"c"})
    write_budget(file)
    ((_, held),) = read_budget(file.path).of("cpu, torch 2.13")
    assert judge_cell("c", held.limits, measured) == []
    for metric in RECORDED:
        found = judge_cell("c", held.limits, measured | {metric: 2 * measured[metric]})
        kind = "improvement" if metric in ("quantized_gather_share", "quantized_reduction_share") else "regression"
        assert [finding.kind for finding in found if finding.metric == metric] == [kind], metric
    without = measured | {"peak_bytes": None}
    ((gone,), _) = record_cell(file, without, Wanted(("peak_bytes", "states_bytes")), {"c"})
    assert gone.row[1:] == ["peak_bytes", "4,194,304 B (4.0 MiB)", "–", "not measured", "", ""]


def test_a_sentence_has_cell_metric_category_value_and_limit() -> None:
    limits = exact(row())
    worse = row(peak_bytes=12 * MIB, max_gradients_bytes=6 * MIB, max_temporary_bytes=8)
    found = {f.metric: f for f in judge_cell("zero2 tiny N=2", limits, worse)}
    assert set(found) == {"peak_bytes", "max_gradients_bytes", "max_temporary_bytes"}
    words = found["peak_bytes"].sentence
    assert found["peak_bytes"].kind == "regression"
    for part in ("zero2 tiny N=2: peak_bytes is 12,582,912 B (12.0 MiB)", "2,097,152 B (2.0 MiB), 20.00% above",
                 "10,485,760 B (10.0 MiB)", "gradients moved most: 4,194,304 B (4.0 MiB) before"):  # fmt: skip
        assert part in words
    moved = row(volume_psi=3.0, volume_all_gather_psi=2.0)
    limits = exact(row(volume_psi=2.0, volume_all_gather_psi=1.0))
    (volume,) = [f for f in judge_cell("c", limits, moved) if f.metric == "volume_psi"]
    assert "all_gather moved most: 1 ψ before, 2 ψ now" in volume.sentence


@pytest.mark.parametrize("metric", ["peak_bytes", "allocator_peak_bytes"])
@pytest.mark.parametrize("limit", [Limit(10.0 * MIB), Limit(10.0 * MIB, "<=")])
def test_a_peak_below_the_states_is_an_error_and_no_improvement(metric: str, limit: Limit) -> None:
    own = row(states_bytes=9 * MIB) | {metric: 8 * MIB}
    (found,) = judge_cell("c", {metric: limit}, own)
    assert found.kind == "regression"
    assert "; less than the 9,437,184 B of states, which cannot be: it was reset" in found.sentence
    kinds = [one.kind for one in judge_cell("c", {metric: limit}, own | {metric: 9 * MIB})]
    assert kinds == ([] if limit.bound else ["improvement"])


def test_missing_cells_and_metrics_and_failed_runs() -> None:
    limits = {"peak_bytes": Limit(1), "step_s": Limit(1, "", 0.25)}
    assert [f.kind for f in judge_cell("c", limits, None)] == ["missing"]
    (found,) = judge_cell("c", limits, row(peak_bytes=1))
    assert (found.kind, found.metric) == ("missing", "step_s")
    (found,) = judge_cell("c", limits, row(status="oom", reason="rank 1 ran out"))
    assert found.kind == "unjudged"
    assert "oom: rank 1 ran out" in found.sentence


def test_exit_codes() -> None:
    for kinds, code in {"": 0, "improvement": 0, "missing": 1, "unjudged": 125, "unjudged regression": 1}.items():
        assert exit_code([Finding(kind, "c", "m", "") for kind in kinds.split()], strict=False) == code
    assert exit_code([Finding("improvement", "c", "m", "")], strict=True) == 1


def test_limits_for_any_environment_hold_beside_its_own() -> None:
    anywhere = {"c": CellBudget(None, {"peak_bytes": Limit(9, "<="), "states_bytes": Limit(8, "<=")})}
    own = {"c": CellBudget("1", {"peak_bytes": Limit(7)})}
    file = BudgetFile(Path("b.yaml"), [], {"any": Environment({}, anywhere), "cpu, torch 2.13": Environment({}, own)})
    assert file.of("cpu, torch 2.13") == [*anywhere.items(), *own.items()]
    assert file.of("cuda, torch 2.13") == [], "ceilings for any do not stand in for what was measured elsewhere"
    assert BudgetFile(Path("b.yaml"), [], {"any": file.environments["any"]}).of("cuda") == list(anywhere.items())
    assert environment_of("cpu", "2.13.0+cpu") == "cpu, torch 2.13"


@pytest.mark.parametrize(
    ("environment", "here", "worse"),
    [
        ("cpu, torch 2.13", "Intel Xeon", ["peak_bytes", "timed_allocator_peak_bytes"]),
        ("cpu, torch 2.13", "AMD EPYC", ["allocator_peak_bytes", "peak_bytes", "timed_allocator_peak_bytes"]),
        ("H100, torch 2.13", "Intel Xeon", ["allocator_peak_bytes", "peak_bytes", "timed_allocator_peak_bytes"]),
    ],
)
def test_scratch_of_kernels_is_judged_on_the_processor_of_the_record(
    environment: str, here: str, worse: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ceiling by hand, here of timed_allocator_peak_bytes, holds on every processor."""
    monkeypatch.setattr(budget, "code_age", lambda row: "current")
    limits = dict.fromkeys(("peak_bytes", "allocator_peak_bytes"), Limit(MIB))
    limits["timed_allocator_peak_bytes"] = Limit(9, "<=")
    budgets = Environment({"processor": "AMD EPYC"}, {"c": CellBudget(None, limits)})
    measured = row(environment=environment, processor=here, name="c", work="1", largest="", lines={})
    measured |= dict.fromkeys(limits, 2 * MIB)
    found = budget._check_file(BudgetFile(Path("b.yaml"), [], {environment: budgets}), [measured], [], False)
    assert sorted(one.metric for one in found if one.kind != "ok") == worse
    assert ("b.yaml: recorded on AMD EPYC, measured on Intel Xeon: " in capsys.readouterr().out) == (len(worse) == 2)


def test_runs_without_a_budget_hide_no_regression(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "code_age", lambda row: "current")
    file = BudgetFile(Path("b.yaml"), [], {"A100, torch 2.13": Environment({}, {"c": CellBudget("1", exact(row()))})})
    rows = [row(name="c", work="1", environment=f"A100, torch 2.{n}", peak_bytes=11 * MIB) for n in (13, 12)]
    kinds = [finding.kind for finding in budget._check_file(file, rows, [], False) if finding.kind != "ok"]
    assert kinds == ["regression", "unjudged"]


@pytest.mark.slow
def test_a_cell_of_the_name_that_does_other_work_is_told_by_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command of the file was changed: what it was recorded by says what the budget is for."""
    monkeypatch.setattr(budget, "code_age", lambda row: "current")
    command = ["strategy=zero2", "model=gpt_tiny", "world_size=2", "device=cpu", "clip=1.0"]
    (before,), (now,) = compose_cells(command), compose_cells([*command[:-1], "optimizer.lr=0.1"])
    budgeted = CellBudget(work_id(before.config), {"peak_bytes": Limit(MIB)})
    measured = row(
        environment="H200, torch 2.13", name="c", work=work_id(now.config), config=json.dumps(now.config.written())
    )
    said = []
    for about in ({"command": command}, {}):
        file = BudgetFile(Path("b.yaml"), [], {"H200, torch 2.13": Environment(about, {"c": budgeted})})
        (found,) = budget._check_file(file, [measured], [], False)
        assert found.kind == "missing"
        said.append(found.sentence.partition("; ")[0])
    whole = "c: its work is not the budget's"
    assert said == [f"{whole} (optimizer.lr was 0.0003 and is 0.1, clip was 1.0 and is null)", whole]


def test_record_without_cells_runs_those_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, ran = BudgetFile(tmp_path / "b.yaml", ["model=gpt_tiny", "strategy=zero2"], {}, "runs/budget"), []
    write_budget(file)
    monkeypatch.setattr(budget, "run_rows", lambda cells: ran.extend(cells) or [])
    assert budget.record(["--file", str(file.path)]) == 0
    assert budget.record(["--file", str(file.path), "results_dir=runs/other", "rerun=true"]) == 0
    folders = [(cell.config.strategy.name, cell.config.results_dir) for cell in ran]
    assert folders == [("zero2", "runs/budget"), ("zero2", "runs/other")]
    assert read_budget(file.path) == file


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("a: [", "it is no yaml"),
        ("enviroments: {}", "enviroments is none of command, results_dir, environments; did you mean environments?"),
        ("environments: {cpu: {cells: {c: {limits: {peak_byte: 3}}}}}", "did you mean peak_bytes?"),
        ("environments: {cpu: {cells: {c: {limits: {peak_bytes: x}}}}}", "c: peak_bytes: 'x' is no limit"),
        ("environments: {cpu: {cells: [c]}}", "must be a mapping"),
        ("command: one\ncommand: another", "command is given twice"),
        ("!!python/object/apply:os.system ['true']", "it is no yaml"),
    ],
)
def test_a_wrong_file_gets_a_sentence(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "b.yaml"
    path.write_text(content)
    with pytest.raises(ValueError) as error:
        read_budget(path)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_reports(tmp_path: Path) -> None:
    findings = [
        Finding("regression", "a", "peak_bytes", "a: peak | moved"),
        Finding("unjudged", "b", "", "b: crash", limits=0),
        Finding("improvement", "a", "states_bytes", "a: less"),
        Finding("ok", "a", "volume_psi", ""),
    ]
    write_junit(tmp_path / "out/j.xml", findings)
    suite = ElementTree.parse(tmp_path / "out/j.xml").getroot()
    assert {k: suite.get(k) for k in ("tests", "failures", "errors")} == {"tests": "4", "failures": "1", "errors": "1"}
    assert suite.find(".//failure").get("message") == "a: peak | moved"
    text = "\n".join(check_body(findings))
    assert "1 of 3 limits hold" in text
    assert "a: peak \\| moved" in text


def test_sizes() -> None:
    assert parse_bytes("96 MiB") == 96 * MIB == parse_bytes("96mib")
    assert parse_bytes("1.5GB") == 1_500_000_000
    assert parse_bytes(17) == 17
    assert parse_memory("80 GiB") == parse_memory(80 * 2**30) == 80 * 2**30
    assert [parse_memory(text) for text in ("0", "80 B", 2**20)] == [0, 80, 2**20], "no device, said, and enough"
    for text in ("80", 80, " 1048575 ", "79.5"):
        with pytest.raises(ValueError, match=f"size: {str(text).strip()} without a unit is .* did you mean .* GiB"):
            parse_memory(text, "size: ")
    assert [show_bytes(n) for n in (512, 1536, 96 * MIB, 3 * 2**30)] == ["512 B", "1.5 KiB", "96.0 MiB", "3.00 GiB"]
    for wrong in ("", "x MiB", "3 furlongs", "-1 MiB"):
        with pytest.raises(ValueError, match="is no size"):
            parse_bytes(wrong)


def test_limit_of_removed_metric_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "b.yaml"
    path.write_text("environments: {any: {cells: {c: {limits: {peak_bytes: 7, heap_bytes: 9}}}}}")
    assert read_budget(path).environments["any"].cells["c"].limits == {"peak_bytes": Limit(7.0)}


def test_file_names_results_folder_below_working_directory(tmp_path: Path) -> None:
    path = tmp_path / "b.yaml"
    write_budget(BudgetFile(path, ["model=gpt_tiny"], {}, "runs/budget"))
    assert read_budget(path).results_dir == "runs/budget"
    for folder in ("/tmp/x", "../x", "a/../../x", ".git/x", "a b", "${oc.env:HOME}"):
        assert folder_below(folder) == ""
        path.write_text(f"command: [model=gpt_tiny]\nresults_dir: '{folder}'\nenvironments: {{}}\n")
        with pytest.raises(ValueError, match=r"results_dir is .*; it is a folder below the working directory"):
            read_budget(path)
