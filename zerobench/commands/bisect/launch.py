"""The command of a search, run once in a worktree: its processes end with it.

A *sweep* consists of overrides of zerobench alone; it runs with the zerobench of the worktree where there is one, else
with this one. Any other command runs in the worktree as it would in the checkout, and its watched loops leave their
runs in the folder that WATCH_TO names.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from ...watching.watch import WATCH_TO
from ..revisions import environment
from ..run_to_end import Ended, run_to_end

PLACEHOLDER = "{runs}"
"""In a word of the command: the folder for its runs."""


@dataclass(frozen=True)
class Launch:
    """A command. `prefix`: the folder of the repository that it is started in. `timeout_s`: for one run."""

    command: tuple[str, ...]
    prefix: str = ""
    timeout_s: float = 3600.0

    def __call__(self, place: Path, runs: Path) -> Ended:
        """Runs the command in the worktree `place`; its runs go to the folder `runs`."""
        words, where = [word.replace(PLACEHOLDER, str(runs)) for word in self.command], place / self.prefix
        if is_sweep(self.command):
            overrides = words[1:] if words[0] == "zerobench" else words
            # -P: not the package in the current folder
            words = [sys.executable, "-P", "-m", "zerobench", *overrides, f"results_dir={runs}", "rerun=true"]
            where = Path.cwd()
        runs.mkdir(parents=True, exist_ok=True)
        return run_to_end(words, where if where.is_dir() else place, variables(place, runs), self.timeout_s)


def is_sweep(command: tuple[str, ...]) -> bool:
    """Returns True for a command line of zerobench's own: overrides and flags alone, or after its name."""
    words = command[1:] if command[:1] == ("zerobench",) else command
    return bool(words) and all("=" in word or word.startswith(("-", "~")) for word in words)


def variables(place: Path, runs: Path) -> dict[str, str]:
    """Returns the environment of a command: packages of the worktree are found first, and this Python's programs."""
    found = environment()
    packages = [str(place), *([str(place / "src")] if (place / "src").is_dir() else []), found.get("PYTHONPATH", "")]
    programs = [str(Path(sys.executable).parent), found.get("PATH", "")]
    return found | {
        WATCH_TO: str(runs),
        "PYTHONPATH": os.pathsep.join(filter(None, packages)),
        "PATH": os.pathsep.join(filter(None, programs)),
    }
