"""`python -m tests.equality`: fake execution beside real ranks, for every variant; writes the tables."""

from __future__ import annotations

import argparse
import sys
import tempfile
from fnmatch import fnmatchcase
from pathlib import Path

from rich.console import Console
from rich.progress import track

from tests.csv_rows import read_rows, write_rows

from .compare import Difference
from .hold import hold
from .report import summary
from .variants import VARIANTS

AT_ONCE = 10
"""Variants in one launch; the tables are written after each."""

HELP = """\
Runs every variant in real worlds (gloo, tensors with values, a process per rank) and executes each of their ranks on
fake tensors (backend=simulated tensors=fake), and compares all that is recorded: bytes by phase and category, every
operation of traffic, and the allocator's own total.
"""
HEAD = """\
# Fake execution beside real ranks

Written by `make fake-equality`. A row of the table is a cell at all its world sizes, first and last rank; `rows off`
counts rows of memory (tier, phase, category) and of traffic that differ in any byte. What the ledger does not see is in
the allocator's total alone: buffers that gloo makes in its own threads (docs/explanation/fake-worlds.md). Each rank:
`equality.csv`.

"""


def main(arguments: list[str]) -> int:
    """Returns 0 where nothing differs, 1 where something does, 2 for a wrong command."""
    parser = argparse.ArgumentParser("python -m tests.equality", description=HELP)
    parser.add_argument("--sizes", nargs="+", type=int, default=[2, 3, 4], metavar="N", help="world sizes")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="NAME", help="variants by name or pattern")
    parser.add_argument("--out", type=Path, default=Path("results/fake_equality"), metavar="FOLDER")
    parser.add_argument("--add", action="store_true", help="keep the rows of other variants that FOLDER has")
    options = parser.parse_args(arguments)
    console, rows = Console(highlight=False), []
    names = [name for name in VARIANTS if any(fnmatchcase(name, pattern) for pattern in options.only)]
    if not names:
        parser.error(f"--only {' '.join(options.only)}: no variant has that name")
    if options.add:
        rows += [row for row in read_rows(Difference, options.out / "equality.csv") if row.cell not in names]
    for begin in track(range(0, len(names), AT_ONCE), "variants, some at a time", console=console, transient=True):
        for n in options.sizes:
            chosen = {
                name: VARIANTS[name].config(n) for name in names[begin : begin + AT_ONCE] if n in VARIANTS[name].sizes
            }
            with tempfile.TemporaryDirectory() as folder:
                rows += hold(chosen, Path(folder)) if chosen else []
        write_rows(Difference, rows, options.out / "equality.csv")
        (options.out / "equality.md").write_text(HEAD + summary(rows))
    different = [row for row in rows if not row.is_none]
    for row in different:
        words = f"{row.memory_rows} rows of memory and {row.traffic_rows} of traffic differ"
        console.print(f"{row.cell}, rank {row.rank} of {row.world_size}: {words}", markup=False)
    console.print(f"{len(rows) - len(different)} of {len(rows)} ranks are equal; {options.out}", markup=False)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
