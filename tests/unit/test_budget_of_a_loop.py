"""Budgets of a watched loop: recorded, explained where they change, refused where they are noisy, checked by line."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

import zerobench
from zerobench import cli
from zerobench.commands.compare import rows_of
from zerobench.judging.budget_file import BudgetFile, read_budget
from zerobench.judging.judge import Limit
from zerobench.judging.lines import Line, LineTable
from zerobench.judging.reports import MARKER_OF_CHANGES
from zerobench.watching.watch import WATCH_TO

TRAIN = '''\
"""Trains a toy."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zerobench


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 8)

    def forward(self, x):
        h = self.first(x)
        return self.second(h.tanh())


class Momentum(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            if not self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
            self.state[p]["momentum"].mul_(0.9).add_(p.grad)
            p.sub_(0.01 * self.state[p]["momentum"])


def main():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = DistributedDataParallel(Net(), bucket_cap_mb=25, gradient_as_bucket_view=True)
    optimizer, seen = Momentum(model.parameters()), []
    with zerobench.watch(model, optimizer, name="toy"):
        for _ in range(3):
            out = model(torch.ones(64, 32))
            out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


main()
'''


FAULT = ("h = self.first(x)\n", "h = self.first(x).sigmoid()\n")
"""A line of the toy, and the line in its place that makes another activation."""


def git(place: Path, *arguments: str) -> str:
    """Runs git with an author of its own; returns what it prints."""
    who = ["-c", "user.name=Ada", "-c", "user.email=ada@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", str(place), *who, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def repository(place: Path, versions: Sequence[Mapping[str, str]]) -> list[str]:
    """Makes a repository with a commit per version, whose files are NAME -> text; returns their hashes.

    The checkout is at the last commit.
    """
    place.mkdir(parents=True)
    git(place, "init", "-q", "-b", "main")
    hashes = []
    for number, files in enumerate(versions):
        for name, text in files.items():
            (place / name).write_text(text)
        git(place, "add", "-A")
        git(place, "commit", "-q", "-m", f"change {number}")
        hashes.append(git(place, "rev-parse", "HEAD"))
    return hashes


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
    rows = rows_of("peak", {"peak": LineTable()}, {"peak": table})
    assert [row[0] for row in rows[:2]] == ["a.py:11 in f (m11)", "a.py:10 in f (m10)"]
    assert rows[-1] == ["3 other lines", "0 B", "6.0 KiB", "+6.0 KiB"]
    assert len(rows) == 9
    assert rows_of("peak", {}, {"peak": table}) == [], "older runs have no lines"


@pytest.mark.thorough
def test_a_training_script_is_bisected_by_git_itself(tmp_path: Path, monkeypatch, capfd) -> None:
    """The recipe of the page, in processes of its own; one commit cannot be imported."""
    moved = '"""Moved down."""\n' + TRAIN
    faulty = moved.replace(*FAULT)
    texts = [TRAIN, moved, "import nothing\n" + moved, faulty, faulty + "# the end\n"]
    hashes = repository(tmp_path / "r", [{"train.py": text, "n": str(n)} for n, text in enumerate(texts)])
    monkeypatch.setenv(WATCH_TO, str(tmp_path / "watched"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path / "r")
    git(tmp_path / "r", "checkout", "-q", hashes[0])
    subprocess.run(["python", "train.py"], check=True)
    assert cli.run(["budget", "record", "--file", "../budget.yaml", "--runs", "../watched"]) == 0
    check = "python train.py || exit 125; zerobench budget check ../budget.yaml --runs ../watched"
    subprocess.run(["git", "bisect", "start", hashes[-1], hashes[0]], check=True)
    done = subprocess.run(
        ["git", "bisect", "run", "sh", "-c", f"rm -rf ../watched; {check}"], capture_output=True, text=True
    )
    assert f"{hashes[3]} is the first bad commit" in done.stdout or f"{hashes[2]}\n{hashes[3]}" in done.stdout, done
    line = next(number for number, text in enumerate(faulty.splitlines(), 1) if "self.first(x)" in text)
    assert f"train.py:{line} in Net.forward: +" in done.stdout
