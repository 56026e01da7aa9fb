"""Budgets gate: a leak and a double gather, planted in the engine, are caught and named."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from tests.end_to_end.command import ROOT, SMALL, zerobench
from zerobench.commands.budget import budget as verb

Plant = tuple[str, str, str]
"""A file of the package, a text in it, and another text in its place."""

LEAK = (
    "zerobench/zero/bucket.py",
    "            self.unit.heap.give_back(full)\n",
    "            self.kept = [*getattr(self, 'kept', []), full][-2:]\n",
)
DOUBLE_GATHER = (
    "zerobench/zero/units/gathered_unit.py",
    "            self.gather = self.source.launch(full, ",
    "            self.comm.all_gather(full, self.name).wait()\n            self.gather = self.source.launch(full, ",
)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with a budget that it meets."""
    where = tmp_path_factory.mktemp("checkout")
    for name in ("zerobench", "conf"):
        shutil.copytree(ROOT / name, where / name)  # with what is compiled: that takes as long as a run
    done = budget(where, "record", "-m", "strategy=zero2,zero3", "world_size=2", *SMALL)
    assert done.returncode == 0, done.stderr
    return where


def budget(where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `zerobench budget` on the code as it is, which is the checkout's."""
    return zerobench("budget", *arguments, cwd=where)


def planted_budget(where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `zerobench budget` on the code of the checkout at `where`."""
    command = [sys.executable, "-m", "zerobench", "budget", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(where)}
    return subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True, timeout=180)


def check_with(where: Path, plants: Sequence[Plant], *arguments: str) -> subprocess.CompletedProcess[str]:
    """`budget check` while the engine is changed."""
    whole = {where / path: (where / path).read_text() for path, _, _ in plants}
    for path, before, after in plants:
        assert whole[where / path].count(before) == 1
        (where / path).write_text(whole[where / path].replace(before, after))
    try:
        return planted_budget(where, "check", "results_dir=planted", *arguments)
    finally:
        for file, text in whole.items():
            file.write_text(text)


def test_what_holds_is_0_and_runs_are_reused(checkout: Path) -> None:
    done = budget(checkout, "check", "--strict")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "70 of 70 limits hold" in done.stdout
    assert done.stderr.count("reused an earlier run") == 2
    absent = budget(checkout, "check", "nowhere.yaml")
    assert (absent.returncode, "nowhere.yaml: there is no such budget file" in absent.stderr) == (125, True)


@pytest.mark.thorough
def test_a_leak_and_a_double_gather_are_caught_and_named_apart(checkout: Path) -> None:
    """Planted together: the leak is in ZeRO-2's buckets as well, the second gather in ZeRO-3 alone."""
    plants = (LEAK, DOUBLE_GATHER)
    done = check_with(checkout, plants, "--junit", "out/junit.xml", "--markdown", "out/budget.md")
    assert done.returncode == 1, done.stdout + done.stderr
    report = ElementTree.parse(checkout / "out/junit.xml").getroot()
    lines = [failure.get("message", "") for failure in report.iter("failure")]
    assert report.get("failures") == str(len(lines))
    assert done.stdout.count("regression: ") < len(lines), "a cause is one message, and the limits that it breaks"
    (volume,) = [line for line in lines if ": volume_psi is" in line]
    assert "zero3 gpt_tiny N=2" in volume
    assert "all_gather moved most" in volume
    (wire,) = [line for line in lines if ": wire_bytes is" in line]
    assert "zero3 gpt_tiny N=2" in wire
    assert "all_gather moved most" in wire
    lines = [line for line in lines if "zero2 gpt_tiny N=2" in line]
    (states,) = [line for line in lines if "zero2 gpt_tiny N=2 b=8: states_bytes is" in line]
    assert "above its budget of" in states
    assert "communication moved most" in states
    assert "; zerobench/zero/bucket.py:" in states, "the line that takes the buffer"
    assert any("max_communication_bytes" in line for line in lines)
    assert not any("max_optimizer" in line or "volume" in line for line in lines), "nothing else moved"
    assert "communication moved most" in (checkout / "out/budget.md").read_text()


@pytest.mark.thorough
def test_what_cannot_be_judged_is_125_and_what_is_missing_1(checkout: Path) -> None:
    crashing = ("zerobench/zero/stage2.py", "    stage = 2\n", "    stage = 2\n\n    def adopt(self):\n        1 / 0\n")
    done = check_with(checkout, [crashing])
    assert done.returncode == 125
    assert "35 of 70 limits hold" in done.stdout
    assert "unjudged: zero2 gpt_tiny N=2 b=8: it could not be measured (crash: timed pass: rank" in done.stdout
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


def test_an_improvement_is_a_notice(checkout: Path) -> None:
    file = checkout / "results/budgets/default.yaml"
    generous = checkout / "generous.yaml"
    lines = file.read_text().splitlines()
    place = next(i for i, line in enumerate(lines) if "states_bytes" in line)
    lines[place] = lines[place].split(":")[0] + ": 999999999"
    generous.write_text("\n".join(lines) + "\n")
    done = budget(checkout, "check", "generous.yaml", "--runs", "results/runs")
    assert done.returncode == 0, done.stdout
    assert "improvement: " in done.stdout
    assert "below its budget of 999,999,999 B" in done.stdout
    assert budget(checkout, "check", "generous.yaml", "--runs", "results/runs", "--strict").returncode == 1
