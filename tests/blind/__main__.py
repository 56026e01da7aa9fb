"""`python -m tests.blind --seed S`: writes predictions of a seed's cells, or, once they are committed, runs them."""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from tests.csv_rows import write_rows
from tests.equality.worlds import run_real
from zerobench.fake_execution import execute
from zerobench.worker import RankRecord

from .draw import Drawn, draw

HELP = """\
Draws 30 cells by a seed and predicts what the fullest rank of each holds and sends, by execution on fake tensors. The
predictions are to be committed; the same command then runs the cells in real worlds and compares.
"""
MOST_PEAK = 0.01


@dataclass(frozen=True)
class Figures:
    """Of the fullest rank of a cell; `wire_bytes` of that rank in a step."""

    number: int
    cell: str
    rank: int
    states_bytes: int
    peak_bytes: int
    wire_bytes: float


def predict(drawn: Drawn) -> Figures:
    """Returns what an execution of the fullest rank says. Raises ValueError with the sentence where there is none."""
    found = execute(drawn.config)
    if found.problem:
        raise ValueError(f"{drawn.words}: {found.problem}")
    sent = round(found.wire_bytes, 3)
    return Figures(drawn.number, drawn.words, found.rank, found.states_bytes, found.peak_bytes, sent)


def measure(drawn: Drawn, predicted: Figures, folder: Path) -> Figures:
    """Returns the figures of a real world: the largest of any rank, and what the predicted rank sent."""
    ((_, records),) = run_real({"cell": drawn.config}, folder).items()
    failed = [one for one in records.values() if isinstance(one, str)]
    if failed:
        raise ValueError(f"{drawn.words}: {failed[0]}")
    ranks: list[Any] = list(records.values())
    peaks = [_most(one, "total") for one in ranks]
    sent = sum(row.wire_bytes for row in ranks[predicted.rank].traffic if not row.control)
    states = max(_most(one, "states") for one in ranks)
    return Figures(drawn.number, drawn.words, peaks.index(max(peaks)), states, max(peaks), round(sent, 3))


def _most(record: RankRecord, category: str) -> int:
    rows = (row for row in record.memory if (row.phase, row.category, row.tier) == ("step", category, "device"))
    return next(rows).max_bytes


def committed(file: Path) -> str:
    """Returns the commit that has the file as it is now. Raises ValueError where none has."""
    changed = _git("status", "--porcelain", "--", str(file))
    last = _git("log", "-1", "--format=%h", "--", str(file))
    if changed or not last:
        raise ValueError(f"{file}: commit it first, so that the predictions are there before the runs")
    return last


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.strip()


def read(file: Path) -> list[Figures]:
    """Returns the rows that were written."""
    kinds = {"cell": str, "wire_bytes": float}
    with file.open(newline="") as source:
        rows = list(csv.DictReader(source))
    return [Figures(**{key: kinds.get(key, int)(value) for key, value in row.items()}) for row in rows]


def summary(seed: int, commit: str, predicted: list[Figures], measured: list[Figures]) -> str:
    """Returns the verdict, and a line per cell."""
    lines, missed = [], 0
    for before, after in zip(predicted, measured, strict=True):
        states, sent = before.states_bytes - after.states_bytes, before.wire_bytes - after.wire_bytes
        peak = before.peak_bytes / after.peak_bytes - 1
        missed += bool(states) or abs(peak) > MOST_PEAK
        figures = f"{after.states_bytes} | {states} | {after.peak_bytes} | {100 * peak:.3f} | {sent:g}"
        lines.append(f"| {before.number} | {before.cell} | {figures} |")
    head = [
        f"# Blind test, seed {seed}", "",
        f"Written by `make blind SEED={seed}`. The predictions are of commit {commit}, before any of these runs.", "",
        f"{len(predicted) - missed} of {len(predicted)} cells: states 0 bytes off and the peak within 1 %.", "",
        "| | cell | states, bytes | off by | peak, bytes | off by, % | wire off by, bytes |",
        "| --: | --- | --: | --: | --: | --: | --: |",
    ]  # fmt: skip
    return "\n".join([*head, *lines, ""])


def main(arguments: list[str]) -> int:
    """Returns 0, 1 where a prediction was missed, 2 for a wrong command."""
    parser = argparse.ArgumentParser("python -m tests.blind", description=HELP)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", type=Path, default=Path("results/blind"), metavar="FOLDER")
    options, console = parser.parse_args(arguments), Console(highlight=False)
    folder, cells = options.out / f"seed-{options.seed}", draw(options.seed)
    file = folder / "predictions.csv"
    if not file.exists():
        write_rows(
            Figures, [predict(one) for one in track(cells, "predictions", console=console, transient=True)], file
        )
        console.print(f"{file}: commit it, then call this again", markup=False)
        return 0
    try:
        commit = committed(file)
    except ValueError as error:
        parser.error(str(error))
    predicted = read(file)
    with tempfile.TemporaryDirectory() as scratch:
        measured = [
            measure(one, before, Path(scratch) / str(one.number))
            for one, before in track(list(zip(cells, predicted, strict=True)), "runs", console=console, transient=True)
        ]
    write_rows(Figures, measured, folder / "measured.csv")
    told = summary(options.seed, commit, predicted, measured)
    (folder / "summary.md").write_text(told)
    verdict = next(line for line in told.splitlines() if " cells: " in line)
    console.print(f"{verdict} {folder}", markup=False)
    return 0 if verdict.startswith(f"{len(cells)} of") else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
