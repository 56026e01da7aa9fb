"""Budgets of a watched loop: recorded, explained where they change, refused where they are noisy, checked by line."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import zerobench
from zerobench import cli
from zerobench.budgets.budget_file import BudgetFile, read_budget
from zerobench.budgets.judge import Limit
from zerobench.budgets.lines import Line, LineTable
from zerobench.budgets.reports import MARKER_OF_CHANGES
from zerobench.commands.compare import line_rows

pytestmark = pytest.mark.slow

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


def test_a_check_names_the_line_of_a_loop(loops: Path, recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert budget("check", recorded, "--runs", loops / "before") == 0
    assert budget("check", recorded, "--runs", loops / "after") == 1
    (words,) = [line for line in capsys.readouterr().out.splitlines() if ": peak_bytes is" in line]
    assert f"{HERE.name}:{KEPT} in Net.forward: +8.0 KiB" in words


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


def test_a_comparison_names_the_lines_that_moved(loops: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = str(loops / "before"), str(loops / "after")
    assert cli.run(["compare", a, b, "--format", "markdown"]) == 0
    text = capsys.readouterr().out
    assert "| lines of code at the peak | A | B | difference |" in text
    (row,) = [line for line in text.splitlines() if f"{HERE.name}:{KEPT} in Net.forward" in line]
    assert row.endswith("| 0 B | 8.0 KiB | +8.0 KiB |")
    assert cli.run(["compare", a, a]) == 0
    assert "lines of code" not in capsys.readouterr().out


def test_lines_that_a_comparison_does_not_list_are_one_row() -> None:
    table = LineTable(tuple(Line("activations", f"m{n}", f"a.py:{n} in f", 1024 * n, 1) for n in range(1, 12)))
    rows = line_rows("peak", {"peak": LineTable()}, {"peak": table})
    assert [row[0] for row in rows[:2]] == ["a.py:11 in f (m11)", "a.py:10 in f (m10)"]
    assert rows[-1] == ["3 other lines", "0 B", "6.0 KiB", "+6.0 KiB"]
    assert len(rows) == 9
    assert line_rows("peak", {}, {"peak": table}) == [], "older runs have no lines"
