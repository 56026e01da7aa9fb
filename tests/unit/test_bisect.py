"""`git bisect run zerobench budget check FILE`: the commit that moved a figure, whose line the check names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.toy_repository import git, repository
from zerobench import cli
from zerobench.watching.watch import WATCH_TO

TRAIN = '''\
"""Trains a toy."""
import torch
from torch import nn

import zerobench


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 8)

    def forward(self, x):
        h = self.first(x)
        return self.second(h.tanh())


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
with zerobench.watch(model, optimizer, name="toy"):
    for _ in range(3):
        model(torch.ones(64, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
'''


@pytest.mark.thorough
@pytest.mark.slow
def test_a_training_script_is_bisected_by_git_itself(tmp_path: Path, monkeypatch, capfd) -> None:
    """The recipe of the page, in processes of its own; one commit cannot be imported."""
    moved = '"""Moved down."""\n' + TRAIN
    faulty = moved.replace("self.first(x)\n", "self.first(x).sigmoid()\n")
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
    line = 1 + next(n for n, text in enumerate(faulty.splitlines()) if "sigmoid" in text)
    assert f"train.py:{line} in Net.forward: +" in done.stdout
