"""How long commands take to answer, before and after a change: medians of interleaved runs, ratios to `import torch`.

Each round runs every command of answer_times.csv once with the package of each revision, in its checkout. A cell
costs a fourth of what "run, 5 cells" takes beyond "run, 1 cell". Measure on an idle machine.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd

from zerobench.commands.estimate.command import ask
from zerobench.fake_execution import execute
from zerobench.fake_execution.execute import CUDA
from zerobench.host.revisions import full_hash, worktree
from zerobench.host.terminal import progress_bar

ROOT = Path(__file__).parents[1]

PARTS = {
    "build": "_build", "forward": "loss_of", "backward": "_engine_run_backward", "gradients": "_arrive",
    "update": "run", "sums by phase": "end", "allocator": "memory",
}  # fmt: skip
"""Part of a simulation -> the function of this package or of torch that it is the time of."""

COMMANDS: dict[str, str] = dict(pd.read_csv(Path(__file__).with_suffix(".csv")).itertuples(index=False))
"""Name -> arguments of `python -m`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--before", metavar="REV", help="a revision to measure beside this checkout")
    parser.add_argument("--keep", metavar="CODE", help="of the rows measured before, those of this code stay")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each command (default: %(default)s)")


def run(chosen: argparse.Namespace) -> int:
    """Measures, and writes a row per command and revision. Returns the exit code."""
    with ExitStack() as stack:
        codes = {full_hash(ROOT, "HEAD")[:8]: ROOT}
        if chosen.before:
            codes[full_hash(ROOT, chosen.before)[:8]] = stack.enter_context(worktree(ROOT, chosen.before))
        work = [("import torch", "", ["-c", "import torch"])]
        work += [(what, code, ["-m", *COMMANDS[what].split()]) for what in COMMANDS for code in codes]
        seconds: list[tuple[str, str, float]] = []
        with progress_bar("answer times", chosen.rounds * len(work), "runs") as advance:
            for _ in range(chosen.rounds):
                for what, code, words in work:
                    folder = codes.get(code, ROOT)
                    environment = os.environ | {"PYTHONPATH": str(folder)}
                    with TemporaryDirectory() as scratch:
                        command = [sys.executable, "-P", *(word.format(scratch=scratch) for word in words)]
                        begun = time.perf_counter()
                        subprocess.run(command, env=environment, cwd=folder, capture_output=True, check=True)
                    seconds.append((what, code, time.perf_counter() - begun))
                    advance()
    frame = pd.DataFrame(seconds, columns=["command", "code", "s"]).groupby(["command", "code"], sort=False)["s"]
    table = frame.agg(["median", "min", "max", "count"]).round(2).reset_index()
    table["of_import_torch"] = (table["median"] / table["median"].iloc[0]).round(2)
    shares().to_csv(ROOT / "results/simulation_shares.csv", index=False)
    known = pd.read_csv(ROOT / "results/answer_times.csv")
    table = pd.concat([table, known[known["code"] == chosen.keep]])
    table.to_csv(ROOT / "results/answer_times.csv", index=False)
    print(table.to_string(index=False))
    return 0


def shares() -> pd.DataFrame:
    """Returns part -> percent of a simulation's time under Python's profiler, in a process that has loaded all."""
    (cell,) = ask(["strategy=zero3", "model=zero_4b", "precision=bf16", "sequence=1024", "world_size=8"]).cells
    execute(cell.config, target=CUDA)
    profile = cProfile.Profile()
    profile.runcall(execute, cell.config, target=CUDA)
    calls: Any = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    names = ("execute", *PARTS.values())
    whole, *seconds = (max(spent[3] for (_, _, its), spent in calls.items() if its == name) for name in names)
    rows = [(part, round(100 * spent / whole)) for part, spent in zip(PARTS, seconds, strict=True)]
    return pd.DataFrame(rows, columns=["part", "percent"])
