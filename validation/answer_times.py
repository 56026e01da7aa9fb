"""How long commands take to answer, before and after a change: medians of interleaved runs, ratios to `import torch`.

Each round runs every command of answer_times.csv once with the package of each revision, in its checkout, each after an
`import torch`: the clock of a machine drifts, and the median of all of these is the unit. A cell
costs a fourth of what "run, 5 cells" takes beyond "run, 1 cell". `first`: the median until a command's first line, on
standard output or standard error. Measure on an idle machine.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd

from zerobench.host.revisions import full_hash, worktree
from zerobench.host.terminal import progress_bar

ROOT = Path(__file__).parents[1]

COMMANDS: dict[str, str] = dict(pd.read_csv(Path(__file__).with_suffix(".csv")).itertuples(index=False))
"""Name -> arguments of `python -m`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--before", metavar="REV", help="a revision to measure beside this checkout")
    parser.add_argument("--keep", metavar="CODE", help="of the rows measured before, those of this code stay")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each command (default: %(default)s)")


def run(chosen: argparse.Namespace) -> int:
    """Measures, and writes a row per command and revision. Returns the exit code."""
    with ExitStack() as stack:
        codes = {full_hash(ROOT, "HEAD")[:8]: ROOT}
        if chosen.before:
            codes[full_hash(ROOT, chosen.before)[:8]] = stack.enter_context(worktree(ROOT, chosen.before))
        unit = ("import torch", "", ["-c", "import torch"])
        commands = [(what, code, ["-m", *COMMANDS[what].split()]) for what in COMMANDS for code in codes]
        work = [run for command in commands for run in (unit, command)]
        seconds: list[tuple[str, str, float, float]] = []
        with progress_bar("answer times", chosen.rounds * len(work), "runs") as advance:
            for _ in range(chosen.rounds):
                for what, code, words in work:
                    folder = codes.get(code, ROOT)
                    environment = os.environ | {"PYTHONPATH": str(folder)}
                    with TemporaryDirectory() as scratch:
                        command = [sys.executable, "-P", *(word.format(scratch=scratch) for word in words)]
                        begun = time.perf_counter()
                        with subprocess.Popen(
                            command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
                        ) as running:
                            assert running.stdout is not None
                            running.stdout.readline()
                            first = time.perf_counter() - begun
                            running.stdout.read()
                        if running.returncode:
                            raise subprocess.CalledProcessError(running.returncode, command)
                    seconds.append((what, code, time.perf_counter() - begun, first))
                    advance()
    columns = ["command", "code", "s", "first_s"]
    frame = pd.DataFrame(seconds, columns=columns).groupby(["command", "code"], sort=False)
    table = frame["s"].agg(["median", "min", "max", "count"]).round(2).assign(first=frame["first_s"].median().round(2))
    table = table.reset_index()
    for ratio, of in {"of_import_torch": "median", "first_of_import_torch": "first"}.items():
        table[ratio] = (table[of] / table["median"].iloc[0]).round(2)
    known = pd.read_csv(ROOT / "results/answer_times.csv")
    table = pd.concat([table, known[known["code"] == chosen.keep]])
    table.to_csv(ROOT / "results/answer_times.csv", index=False)
    print(table.to_string(index=False))
    return 0
