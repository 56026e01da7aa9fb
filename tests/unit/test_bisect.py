"""`git bisect run zerobench budget check FILE`: the commit that moved a figure, whose line the check names."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import toy_repository as toy
from zerobench import cli
from zerobench.watching.watch import WATCH_TO


@pytest.mark.thorough
def test_a_training_script_is_bisected_by_git_itself(tmp_path: Path, monkeypatch, capfd) -> None:
    """The recipe of the page, in processes of its own; one commit cannot be imported."""
    moved = '"""Moved down."""\n' + toy.TRAIN
    faulty = moved.replace(*toy.FAULT)
    texts = [toy.TRAIN, moved, "import nothing\n" + moved, faulty, faulty + "# the end\n"]
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
    line = next(number for number, text in enumerate(faulty.splitlines(), 1) if "self.first(x)" in text)
    assert f"train.py:{line} in Net.forward: +" in done.stdout
