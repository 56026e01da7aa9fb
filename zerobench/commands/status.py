"""`zerobench status`: its command line. The table is in commands/status_table.py, which takes longer to load."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..results.options import RESULTS, STATUS, Parser, add_columns, add_options, verb

EVERY_S = 0.5

EPILOG = """\
examples:
  zerobench status                                   results/runs
  zerobench status results/mlp --where status!=ok    what failed there
  zerobench status --columns cell,step               two columns
  zerobench status --follow                          a sweep that runs elsewhere, live; then the table
  zerobench status --follow --every 5 | tee log.txt  the same over a slow file system, a line per change

Exit code: 0; 1 a sweep that was followed was killed; 2 no such folder; 130 interrupted."""


@verb
def status(arguments: list[str]) -> int:
    """Runs the verb. Returns the exit code: 0, 1 if a followed sweep was killed, 2 if there is no such folder."""
    words = "What a results folder or a collection holds: a line per cell with its newest launches."
    parser = Parser("zerobench status", words, EPILOG)
    parser.add_argument("results", nargs="?", type=Path, default=RESULTS, help="default: %(default)s")
    words = "first follow the sweeps that run into this folder, in any process or machine, until they have ended"
    parser.add_argument("--follow", action="store_true", help=words)
    words = "between two looks of --follow (default: %(default)g)"
    parser.add_argument("--every", type=_seconds, default=EVERY_S, metavar="SECONDS", help=words)
    add_options(parser, attempts=False)
    add_columns(parser, STATUS)
    chosen = parser.parse_args(arguments)
    from .folder_contents import look
    from .status_table import only, print_status

    code = 0
    if chosen.follow:
        from .follow import follow

        code = follow(chosen.results, chosen.every)
    held = only(look(chosen.results), chosen.where)
    print_status(held, chosen.columns)
    return code


def _seconds(text: str) -> float:
    """Parses --every. Raises ArgumentTypeError."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.05 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} must be seconds, from 0.05 to 3600")
    return seconds
