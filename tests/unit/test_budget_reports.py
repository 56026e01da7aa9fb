"""Budgets of a watched loop, and a check's reports for GitHub, a comment and charts; texts of strangers stay texts."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import zerobench
from tests.unit.test_documents import ROOT
from zerobench import cli
from zerobench.budgets.budget_file import BudgetFile, read_budget
from zerobench.budgets.judge import Finding, Limit
from zerobench.budgets.lines import CodeLine
from zerobench.budgets.reports import (
    CUT,
    MARKER,
    MARKER_OF_CHANGES,
    MOST_ANNOTATIONS,
    MOST_OF_COMMENT,
    check_body,
    commands_of,
    fitted,
    is_github,
    print_findings,
    repository_root,
    write_benchmark,
    write_comment,
)

HERE = Path(__file__)
KEPT = next(n for n, line in enumerate(HERE.read_text().splitlines(), 1) if line.strip().startswith("self.kept"))
"""The line that holds a copy of the logits in a loop that keeps them."""


class Net(nn.Module):
    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.keeps = keeps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        if self.keeps:
            self.kept = x.detach().double()
        return x.square().mean()


def train(to: Path, keeps: bool) -> None:
    torch.manual_seed(0)
    net = Net(keeps)
    optimizer = torch.optim.AdamW(net.parameters())
    with zerobench.watch(net, optimizer, to=to):
        for _ in range(3):
            net(torch.randn(64, 16)).backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.fixture(scope="module")
def loops(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of the loop: `before`, `after` with a line more, and `noisy`, which has both."""
    where = tmp_path_factory.mktemp("loops")
    train(where / "before", False)
    train(where / "after", True)
    shutil.copytree(where / "before", where / "noisy")
    train(where / "noisy", True)
    return where


def budget(*words: str | Path) -> int:
    return cli.run(["budget", *map(str, words)])


def _limits(file: BudgetFile) -> dict[str, Limit]:
    (environment,) = file.environments.values()
    (cell,) = environment.cells.values()
    return cell.limits


@pytest.fixture
def recorded(loops: Path, tmp_path: Path) -> Path:
    file = tmp_path / "b.yaml"
    assert budget("record", "--runs", loops / "before", "--file", file) == 0
    return file


@pytest.mark.slow
def test_a_check_names_the_line_of_a_loop(loops: Path, recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert budget("check", recorded, "--runs", loops / "before") == 0
    assert budget("check", recorded, "--runs", loops / "after") == 1
    (words,) = [line for line in capsys.readouterr().out.splitlines() if ": peak_bytes is" in line]
    assert f"{HERE.name}:{KEPT} in Net.forward: +8.0 KiB" in words


@pytest.mark.slow
def test_a_recording_explains_what_it_changes(loops: Path, recorded: Path, tmp_path: Path, capsys) -> None:
    was, text = read_budget(recorded), recorded.read_text()
    capsys.readouterr()
    comment = tmp_path / "out/c.md"
    words = ["record", "--runs", loops / "after", "--file", recorded, "--comment", comment]
    assert budget(*words, "--dry-run") == 0
    shown = capsys.readouterr().out
    assert recorded.read_text() == text, "a dry run writes nothing"
    assert "nothing was written" in shown
    assert budget(*words) == 0
    assert shown.replace("; --dry-run: nothing was written", "") == capsys.readouterr().out
    now, before = (_limits(one) for one in (read_budget(recorded), was))
    changed = {metric for metric in now if now[metric] != before[metric]}
    assert {"peak_bytes", "max_activations_bytes"} <= changed
    body = comment.read_text()
    assert body.startswith(MARKER_OF_CHANGES)
    rows = [line.split(" | ") for line in body.splitlines() if line.startswith("| plain")]
    assert {row[1] for row in rows} == changed
    for metric in changed:
        assert f"  {metric} " in shown
    (peak,) = [row for row in rows if row[1] == "peak_bytes"]
    assert peak[2] == f"{before['peak_bytes'].value:,.0f} B ({before['peak_bytes'].value / 1024:.1f} KiB)"
    assert peak[4:6] == ["+8,192 B (8.0 KiB)", "activations"]
    assert f"{HERE.name}:{KEPT} in Net.forward: +8.0 KiB" in peak[6]
    assert budget("check", recorded, "--runs", loops / "after", "--strict") == 0


@pytest.mark.slow
def test_a_noisy_baseline_is_refused(loops: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "n.yaml"
    words = ["record", "--runs", loops / "noisy", "--file", file, "--metrics", "peak_bytes,states_bytes"]
    assert budget(*words) == 2
    assert not file.exists()
    (said,) = capsys.readouterr().err.splitlines()
    values = sorted(zerobench.load(loops / "noisy").runs["peak_bytes"])
    for part in ("plain Net N=1 b=64: peak_bytes differs between 2 launches", *(f"{value:,} B" for value in values)):
        assert part in said
    tolerance = said.rpartition("--tolerance ")[2]
    assert budget(*words, "--tolerance", tolerance) == 0
    capsys.readouterr()
    assert budget(*words) == 0, "the tolerance is in the file now"
    for run_id in zerobench.load(loops / "noisy").runs["run_id"]:
        own = tmp_path / f"{run_id}.yaml"
        assert budget("record", "--runs", loops / "noisy", "--file", own, "--where", f"run_id={run_id}") == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tolerance", "peak=2"], "--tolerance peak=2: peak is none of"),
        (["--tolerance", "peak_bytes=much"], "'much' is no percentage from 0 to 100"),
        (["--tolerance", "peak_bytes=-2"], "is no percentage"),
        (["--tolerance", "peak_bytes=nan"], "is no percentage"),
    ],
)
def test_a_wrong_tolerance_is_a_sentence(loops: Path, tmp_path: Path, words: list[str], said: str, capsys) -> None:
    file = tmp_path / "t.yaml"
    assert budget("record", "--runs", loops / "before", "--file", file, *words) == 2
    assert said in capsys.readouterr().err
    assert not file.exists()


@pytest.mark.thorough
def test_a_comparison_names_the_lines_that_moved(loops: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = str(loops / "before"), str(loops / "after")
    assert cli.run(["compare", a, b, "--format", "markdown"]) == 0
    text = capsys.readouterr().out
    assert "| lines of code at the peak | A | B | difference |" in text
    (row,) = [line for line in text.splitlines() if f"{HERE.name}:{KEPT} in Net.forward" in line]
    assert row.endswith("| 0 B | 8.0 KiB | +8.0 KiB |")
    assert cli.run(["compare", a, a]) == 0
    assert "lines of code" not in capsys.readouterr().out


def finding(
    kind: str = "regression", cell: str = "c", metric: str = "peak_bytes", file: str = "", line: int = 0
) -> Finding:
    code_lines = (CodeLine(file, line, f"{file}:{line} in f: +1 B"),) if file else ()
    return Finding(kind, cell, metric, f"{cell}: {metric} moved", code_lines)


def parse(command: str) -> tuple[str, dict[str, str], str]:
    """Level, properties and message of a command, as the runner of a workflow reads them."""
    found = re.fullmatch(r"::(\w+) ([^:\r\n]*)::([^\r\n]*)", command)
    assert found is not None, command
    pairs = dict(part.split("=", 1) for part in found[2].split(","))
    for code, char in (("%3A", ":"), ("%2C", ","), ("%0D", "\r"), ("%0A", "\n"), ("%25", "%")):
        pairs = {key: value.replace(code, char) for key, value in pairs.items()}
    return found[1], pairs, found[3].replace("%0D", "\r").replace("%0A", "\n").replace("%25", "%")


def test_each_kind_has_its_level_and_lines_inside_the_repository_alone(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "repo/src").mkdir(parents=True)
    for name in ("repo/src/a,b.py", "outside.py"):
        (tmp_path / name).write_text("")
    (tmp_path / "repo/link.py").symlink_to(tmp_path / "outside.py")
    monkeypatch.chdir(tmp_path / "repo/src")
    findings = [
        finding(file="a,b.py", line=3),
        finding("missing", metric="", file=str(tmp_path / "outside.py"), line=3),
        finding("improvement", file="gone.py", line=3),
        finding("unjudged", file="../link.py", line=1),
        finding(metric="states_bytes", file="a\0b.py", line=1),
        finding(metric="resident_bytes", file=".", line=1),
    ]
    parsed = [parse(one) for one in commands_of(findings, tmp_path / "repo")]
    assert [(level, pairs.get("file"), pairs.get("line")) for level, pairs, _ in parsed] == [
        ("error", "src/a,b.py", "3"), ("error", None, None), ("warning", None, None), ("notice", None, None),
    ]  # fmt: skip
    assert parsed[1][2].count("moved") == 3, "what has no line is one annotation of its cell"
    assert parsed[0][1]["title"] == "peak_bytes of c"
    assert all("file" not in parse(one)[1] for one in commands_of(findings, None))


def test_limits_broken_by_one_cause_are_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    def broken(metric: str, by: float, line: int = 0, cell: str = "c") -> Finding:
        return replace(
            finding(cell=cell, metric=metric, file="a.py" * bool(line), line=line), limit=Limit(0.0), value=by
        )

    findings = [
        broken("peak_bytes", 4, 7), broken("growth_bytes", 8, 7), broken("max_activations_bytes", 4, 7),
        broken("backward_peak_bytes", 4), broken("max_optimizer_bytes", 2, 9), broken("resident_bytes", 3),
        broken("volume_psi", 1), broken("volume_all_gather_psi", 1), broken("wire_bytes", 5),
        broken("peak_bytes", 4, 7, "d"),
    ]  # fmt: skip
    print_findings(findings)
    shown = capsys.readouterr().out.splitlines()
    assert shown == [
        "regression: c: growth_bytes moved",
        "  the same cause: peak_bytes +4 B, max_activations_bytes +4 B, backward_peak_bytes +4 B",
        "regression: c: volume_psi moved",
        "  the same cause: volume_all_gather_psi +1 ψ, wire_bytes +5 B",
        "regression: c: max_optimizer_bytes moved",
        "regression: c: resident_bytes moved",
        "regression: d: peak_bytes moved",
        "0 of 10 limits hold",
    ]


def test_findings_of_a_line_are_one_annotation_and_a_level_has_ten(monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    same = [finding(metric=metric, file="pyproject.toml", line=2) for metric in ("peak_bytes", "states_bytes")]
    ((_, pairs, message),) = [parse(one) for one in commands_of(same, ROOT)]
    assert pairs["title"] == "peak_bytes of c and 1 more"
    assert message == "c: peak_bytes moved\nc: states_bytes moved"
    many = [finding(cell=f"c{n}") for n in range(30)] + [finding(cell="last", file="pyproject.toml", line=1)]
    parsed = [parse(one) for one in commands_of(many, ROOT)]
    assert len(parsed) == MOST_ANNOTATIONS
    assert parsed[0][1]["file"] == "pyproject.toml", "those with a line are shown first"
    assert parsed[-1][1]["title"] == "22 more findings"
    assert all(any(f"{one.cell}: " in message for _, _, message in parsed) for one in many)


def test_the_checkout_is_the_workflows_or_the_nearest(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert repository_root({}) is None
    (tmp_path / ".git").mkdir()
    (tmp_path / "a/b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a/b")
    assert repository_root({}) == tmp_path
    assert repository_root({"GITHUB_WORKSPACE": str(tmp_path / "a")}) == tmp_path / "a"
    assert is_github({"GITHUB_ACTIONS": "true"})
    assert not is_github({}) | is_github({"GITHUB_ACTIONS": "false"})


def test_a_comment_fits_and_closes_its_folds(tmp_path: Path) -> None:
    code_lines = tuple(CodeLine("a.py", n, "x" * 90) for n in range(20))
    findings = [Finding("regression", f"c{n}", "peak_bytes", "s" * 500, code_lines) for n in range(100)]
    write_comment(tmp_path / "c.md", MARKER, check_body(findings))
    text = (tmp_path / "c.md").read_text()
    assert len(text) <= MOST_OF_COMMENT
    assert text.endswith(CUT)
    assert text.count("<details>") == text.count("</details>")
    assert fitted(["a", "b"], 100) == "a\nb\n"


def test_charts_have_what_smaller_is_better_for(tmp_path: Path) -> None:
    limits = {
        "peak_bytes": Limit(4.0, "", 0.005),
        "volume_psi": Limit(2.5),
        "tokens_per_s": Limit(9.0),
        "nvme_bytes": Limit(0.0),
    }
    write_benchmark(
        tmp_path / "b.json", [Finding("ok", "c", name, "", (), limit, limit.value) for name, limit in limits.items()]
    )
    assert json.loads((tmp_path / "b.json").read_text()) == [
        {"name": "c: peak_bytes", "unit": "B", "value": 4, "range": "± 0.5 %", "extra": "limit: 4 ± 0.5 %"},
        {"name": "c: volume_psi", "unit": "ψ", "value": 2.5, "extra": "limit: 2.5"},
    ]


GATE = ROOT / "examples/ci/memory-gate.yml"


def steps(job: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load(GATE.read_text())["jobs"][job]["steps"])
