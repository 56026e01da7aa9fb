"""A git repository made up for tests: a training loop of a few lines, its commits, and a fault that a commit plants."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

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
