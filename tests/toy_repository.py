"""Git repositories made up for tests: a training loop of a few lines, its commits, and faults that a commit plants."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from zerobench.launch import fork_server
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


@dataclass(frozen=True)
class Fault:
    """A replaced part of the toy, the category whose bytes it moves, and what stands on the line that makes them."""

    old: str
    new: str
    category: str
    at: str
    part: str = ""
    """The category whose sum moves most, where it is another: storages change theirs too."""

    def plant(self, text: str) -> str:
        """Returns the toy with the fault."""
        assert text.count(self.old) == 1
        return text.replace(self.old, self.new)

    def line(self, text: str) -> int:
        """Returns the number of the line that makes the bytes, in a toy that has the fault."""
        (number,) = (number for number, line in enumerate(text.splitlines(), 1) if self.at in line)
        return number


FAULTS = {
    "an activation more": Fault("h = self.first(x)\n", "h = self.first(x).sigmoid()\n", "activations", "self.first(x)"),
    "states in fp64": Fault("zeros_like(p)", "zeros_like(p, dtype=torch.float64)", "optimizer", "zeros_like"),
    "logits kept": Fault(
        "            out.square()",
        "            seen.append(out.detach().clone())\n            out.square()",
        "activations",
        "seen.append",
    ),
    # With views the buckets are the gradients; without them they are communication buffers, and gradients come beside.
    "gradients beside buckets": Fault("view=True", "view=False", "gradients", "self.second(h.tanh())", "communication"),
}
"""Kind -> the fault."""


def git(place: Path, *arguments: str, given: str | None = None) -> str:
    """Runs git with an author of its own; returns what it prints."""
    who = ["-c", "user.name=Ada", "-c", "user.email=ada@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", "-C", str(place), *who, *arguments], capture_output=True, text=True, check=True, input=given
    )
    return done.stdout.strip()


def repository(
    place: Path, versions: Sequence[Mapping[str, str]], parents: Mapping[int, tuple[int, ...]] = MappingProxyType({})
) -> list[str]:
    """Makes a repository with a commit per version, whose files are NAME -> text; returns their hashes.

    `parents`: number of a commit -> those of its parents; without an entry, the commit before it. The checkout is at
    the last one.
    """
    place.mkdir(parents=True)
    git(place, "init", "-q", "-b", "main")
    stream = []
    for number, files in enumerate(versions):
        mine = parents.get(number, (number - 1,) if number else ())
        stream += [
            "commit refs/heads/main",
            f"mark :{number + 1}",
            f"author Ada <ada@example.org> {10**9 + number} +0000",
        ]
        stream += [f"committer Ada <ada@example.org> {10**9 + number} +0000", *_data(f"change {number}")]
        stream += [f"{'merge' if other else 'from'} :{parent + 1}" for other, parent in enumerate(mine)]
        stream += ["deleteall"]
        for name, text in files.items():
            stream += [f"M 100644 inline {name}", *_data(text)]
    git(place, "fast-import", "--quiet", "--export-marks=marks", given="\n".join(stream) + "\n")
    marks = dict(line.split() for line in (place / "marks").read_text().splitlines())
    (place / "marks").unlink()
    git(place, "reset", "-q", "--hard")
    return [marks[f":{number + 1}"] for number in range(len(versions))]


def _data(text: str) -> list[str]:
    return [f"data {len(text.encode())}", text]


def run_forked(place: Path, runs: Path) -> None:
    """Runs a commit's train.py in a process from the fork server, which has loaded torch already."""
    process = fork_server.context().Process(target=_train, args=(str(place), str(runs)))
    runs.mkdir()
    process.start()
    process.join()
    assert process.exitcode == 0


def _train(place: str, runs: str) -> None:
    os.chdir(place)
    os.environ[WATCH_TO] = runs
    sys.path.insert(0, place)
    runpy.run_path(f"{place}/train.py", run_name="__main__")
