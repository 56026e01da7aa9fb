"""`zerobench compare`, `zerobench noise` and `zerobench budget` on runs that happened."""

import subprocess
from pathlib import Path

import pytest
import yaml

from tests.cells import cell
from tests.end_to_end.command import SMALL, zerobench
from zerobench import cli
from zerobench.commands import interleave
from zerobench.commands.budget import budget as verb
from zerobench.config.schema import Measure
from zerobench.host.revisions import full_hash
from zerobench.results.provenance import PACKAGE
from zerobench.sweep.cell import run_cell


@pytest.mark.thorough
def test_two_revisions_are_measured_in_turns(tmp_path: Path, monkeypatch, capsys) -> None:
    """Each in a worktree of its own, which is gone afterwards; what cannot be measured is one sentence."""
    monkeypatch.chdir(tmp_path)
    places: list[Path] = []

    def launch(place: Path, overrides: list[str], folder: Path, revision: str) -> None:
        assert (place / "zerobench/cli.py").is_file()
        assert overrides == ["strategy=ddp"]
        places.append(place)
        measure = Measure(steps=2, warmup=2, passes="timed")
        assert run_cell(cell("ddp", 1, results_dir=str(folder), measure=measure), lambda _: None).status == "ok"

    command = ["compare", "--interleave", "HEAD", ".", "--launches", "3", "--runs", "runs"]
    refused = [*command[:4], "--runs", "no", "--", "strategy=zero9"]
    assert cli.run(refused) == 2
    assert "HEAD cannot measure it: strategy=zero9: no such strategy" in capsys.readouterr().err
    monkeypatch.setattr(interleave, "_launch", launch)
    assert cli.run([*command, "--", "strategy=ddp"]) == 0
    shown, told = capsys.readouterr()
    assert "3 pairs of launches, interleaved: in 80 of 100 cases a change of " in shown
    assert f"A: HEAD is {full_hash(PACKAGE, 'HEAD')}, of {PACKAGE.parent}" in told
    a, b = places[0], places[1]
    assert places == [a, b, b, a, a, b]
    assert a != b == PACKAGE.parent
    assert not a.exists()
    assert cli.run([*command, "--", "strategy=ddp"]) == 2
    assert "--runs runs: there is something in that folder already" in capsys.readouterr().err


# -- budgets: what holds, what is missing and what cannot be judged, each by its exit code -------------------------


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a budget, and with the runs that meet it."""
    where = tmp_path_factory.mktemp("checkout")
    done = budget(where, "record", "-m", "strategy=zero2,zero3", "world_size=2", *SMALL)
    assert done.returncode == 0, done.stderr
    return where


def budget(where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return zerobench("budget", *arguments, cwd=where)


def test_what_holds_is_0_and_runs_are_reused(checkout: Path) -> None:
    done = budget(checkout, "check", "--strict")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "70 of 70 limits hold" in done.stdout
    assert done.stderr.count("reused an earlier run") == 2
    absent = budget(checkout, "check", "nowhere.yaml")
    assert (absent.returncode, "nowhere.yaml: there is no such budget file" in absent.stderr) == (125, True)


def test_what_cannot_be_judged_is_125_and_what_is_missing_1(checkout: Path) -> None:
    done = budget(checkout, "check", "results_dir=late", "launch.timeout_s=0.05")
    assert done.returncode == 125, done.stdout + done.stderr
    assert "0 of 70 limits hold" in done.stdout
    assert "unjudged: zero2 gpt_tiny N=2 b=8: it could not be measured (timeout: timed pass: " in done.stdout
    assert budget(checkout, "check", "--runs", "nowhere").returncode == 125
    file = checkout / "results/budgets/default.yaml"
    other = checkout / "other.yaml"
    other.write_text(file.read_text().replace("cpu, torch", "NVIDIA H100, torch"))
    done = budget(checkout, "check", "other.yaml")
    assert done.returncode == 125
    assert "unjudged: other.yaml: no budget for cpu, torch" in done.stdout
    assert "there is one for: NVIDIA H100" in done.stdout
    other.write_text(file.read_text().replace("zero3 gpt_tiny", "zero9 gpt_tiny").replace("work:", "work: x"))
    done = budget(checkout, "check", "other.yaml", "--runs", "results/runs")
    assert done.returncode == 1
    assert "missing: zero9 gpt_tiny N=2 b=8: it is in the budget, but not among the runs" in done.stdout


def test_a_file_from_runs_alone_is_warned_to_have_no_command(checkout: Path, capsys) -> None:
    runs, plain = str(checkout / "results/runs"), str(checkout / "plain.yaml")
    assert verb(["record", "--file", plain, "--runs", runs]) == 0
    assert "plain.yaml has no command, so budget check will want --runs, too" in capsys.readouterr().err
    assert verb(["record", "--file", plain, "--runs", runs, "-m", "strategy=zero2"]) == 0
    assert capsys.readouterr().err == ""
    assert "command" in yaml.safe_load(Path(plain).read_text())
