"""Budgets gate: what holds, what is missing and what cannot be judged, each by its exit code."""

import subprocess
from pathlib import Path

import pytest
import yaml

from tests.end_to_end.command import SMALL, zerobench
from zerobench.commands.budget import budget as verb


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
    assert "missing: zero9 gpt_tiny N=2 b=8: the budget has it, the runs do not" in done.stdout


def test_a_file_from_runs_alone_is_warned_to_have_no_command(checkout: Path, capsys) -> None:
    runs, plain = str(checkout / "results/runs"), str(checkout / "plain.yaml")
    assert verb(["record", "--file", plain, "--runs", runs]) == 0
    assert "plain.yaml has no command, so budget check will want --runs, too" in capsys.readouterr().err
    assert verb(["record", "--file", plain, "--runs", runs, "-m", "strategy=zero2"]) == 0
    assert capsys.readouterr().err == ""
    assert "command" in yaml.safe_load(Path(plain).read_text())
