"""`git bisect run zerobench budget check FILE`: the commit that moved a figure, whose line the check names."""

from __future__ import annotations

import json
import math
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import toy_repository as toy
from tests.cells import cell
from tests.made_up import run as made_up_run
from zerobench import cli
from zerobench.records import LineRow
from zerobench.results.folders import claim_folder, write_run
from zerobench.watching.watch import WATCH_TO

KIB = 2**10


def commits_of(place: Path, commits: list[dict[str, Any]]) -> list[str]:
    """A repository whose commits have these figures; their hashes."""
    texts = [json.dumps({"peak_bytes": 64 * KIB, "status": "ok", "n": n} | one) for n, one in enumerate(commits)]
    return toy.repository(place, [{"figures.json": text} for text in texts])


def made_up(place: Path, runs: Path) -> None:
    """Runs of a commit without a process: its figures are in its file."""
    values = json.loads((place / "figures.json").read_text())
    line = LineRow(0, "peak", "activations", "net", "a.py:1 in f", values["peak_bytes"], 1)
    row = made_up_run("ddp", 1, values["status"], peak_bytes=values["peak_bytes"])
    write_run(claim_folder(runs, "ddp"), "ddp", row, cell("ddp", 1).config, {}, {"lines": [line]})


class Bisection:
    """`git bisect run`, with a check of this process. `codes`: commit -> exit code of its check."""

    def __init__(self, place: Path, good: str, bad: str, measure: Callable[[Path, Path], Any]) -> None:
        self.place, self.codes, self.measure = place, dict[str, int](), measure
        self.file = place.parent / f"{place.name}.yaml"
        toy.git(place, "checkout", "-q", good)
        assert cli.run(["budget", "record", "--file", str(self.file), "--runs", str(self._runs())]) == 0
        self.said = self._git("start", bad, good)
        while "is the first bad commit" not in self.said and "only 'skip'ped commits left" not in self.said:
            code = self.check()
            self.said = self._git({0: "good", 125: "skip"}.get(code, "bad"))

    def check(self) -> int:
        """Checks the commit that is checked out."""
        commit = toy.git(self.place, "rev-parse", "HEAD")
        words = ["budget", "check", str(self.file), "--runs", str(self._runs())]
        self.codes[commit] = cli.run(words)
        return self.codes[commit]

    @property
    def found(self) -> list[str]:
        """The first bad commit, or all that it may be."""
        first = re.search(r"([0-9a-f]{40}) is the first bad commit", self.said)
        return [first[1]] if first else re.findall(r"^[0-9a-f]{40}$", self.said, re.MULTILINE)

    def _runs(self) -> Path:
        runs = self.place.parent / f"{self.place.name}-{toy.git(self.place, 'rev-parse', 'HEAD')[:10]}"
        if not runs.exists():
            self.measure(self.place, runs)
        return runs

    def _git(self, *words: str) -> str:
        done = subprocess.run(["git", "-C", self.place, "bisect", *words], capture_output=True, text=True)
        return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_planted_commit_is_found_within_the_bound(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    count = chance.randint(2, 12)
    place = chance.randint(1, count)
    hashes = commits_of(tmp_path / "r", [{"peak_bytes": 64 * KIB + (n >= place)} for n in range(count + 1)])
    one = Bisection(tmp_path / "r", hashes[0], hashes[-1], made_up)
    assert one.found == [hashes[place]]
    assert set(one.codes.values()) <= {0, 1}
    assert len(one.codes) <= math.ceil(math.log2(count)) + 1


@pytest.mark.thorough
@pytest.mark.slow
def test_a_commit_that_cannot_be_judged_is_skipped(tmp_path: Path) -> None:
    commits: list[dict[str, Any]] = [{"peak_bytes": KIB * (1 + (n >= 9))} for n in range(13)]
    for n in (5, 6, 7, 8):
        commits[n]["status"] = "crash"
    hashes = commits_of(tmp_path / "r", commits)
    one = Bisection(tmp_path / "r", hashes[0], hashes[-1], made_up)
    assert set(one.found) == set(hashes[5:10])
    assert {one.codes[hashes[n]] for n in (5, 6, 7, 8)} == {125}


@pytest.mark.thorough
def test_a_training_script_is_bisected_by_git_itself(tmp_path: Path, monkeypatch, capfd) -> None:
    """The recipe of the page, in processes of its own; one commit cannot be imported."""
    fault = toy.FAULTS["an activation more"]
    moved = '"""Moved down."""\n' + toy.TRAIN
    texts = [toy.TRAIN, moved, "import nothing\n" + moved, fault.plant(moved), fault.plant(moved) + "# the end\n"]
    hashes = toy.repository(tmp_path / "r", [{"train.py": text, "n": str(n)} for n, text in enumerate(texts)])
    monkeypatch.setenv(WATCH_TO, str(tmp_path / "watched"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path / "r")
    toy.git(tmp_path / "r", "checkout", "-q", hashes[0])
    subprocess.run(["python", "train.py"], check=True)
    assert cli.run(["budget", "record", "--file", "../budget.yaml", "--runs", "../watched"]) == 0
    check = "python train.py || exit 125; zerobench budget check ../budget.yaml --runs ../watched"
    subprocess.run(["git", "bisect", "start", hashes[-1], hashes[0]], check=True)
    done = subprocess.run(
        ["git", "bisect", "run", "sh", "-c", f"rm -rf ../watched; {check}"], capture_output=True, text=True
    )
    assert f"{hashes[3]} is the first bad commit" in done.stdout or f"{hashes[2]}\n{hashes[3]}" in done.stdout, done
    assert f"train.py:{fault.line(texts[3])} in Net.forward: +" in done.stdout


@pytest.mark.thorough
def test_twenty_planted_faults_are_found_with_their_lines(tmp_path: Path, capsys) -> None:
    chance = random.Random(16)
    for number in range(20):
        kind = sorted(toy.FAULTS)[number % len(toy.FAULTS)]
        fault, count = toy.FAULTS[kind], chance.randint(2, 33)
        place, versions = chance.randint(1, count), []
        for n in range(count + 1):
            text = "".join(f"# note {m}\n" for m in range(n // 2)) + toy.TRAIN
            versions.append({"train.py": fault.plant(text) if n >= place else text, "n": str(n)})
        repository = tmp_path / f"r{number}"
        hashes = toy.repository(repository, versions)
        one = Bisection(repository, hashes[0], hashes[-1], toy.run_forked)
        assert one.found == [hashes[place]], kind
        assert len(one.codes) <= math.ceil(math.log2(count)) + 1, kind
        toy.git(repository, "checkout", "-q", hashes[place])
        capsys.readouterr()
        assert one.check() == 1
        (peak,) = [line for line in capsys.readouterr().out.splitlines() if ": peak_bytes is" in line]
        line = fault.line(versions[place]["train.py"])
        assert f"{fault.part or fault.category} moved most" in peak, kind
        assert re.search(rf"; (backward of )?train.py:{line} in ", peak), (kind, peak)
