"""`zerobench status`: its command line. commands/status_table.py has what it prints, which takes longer to load."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..results.conditions import RESULTS, add_options
from ..sizes import printable


def status(arguments: list[str]) -> int:
    """Runs the verb. Returns the exit code: 0, or 2 where there is no such folder."""
    parser = argparse.ArgumentParser(
        prog="zerobench status",
        description="What a results folder or a collection holds: a line a cell with its newest launches.",
    )
    parser.add_argument("results", nargs="?", type=Path, default=RESULTS, help="default: %(default)s")
    add_options(parser, attempts=False)
    chosen = parser.parse_args(arguments)
    from .holdings import look
    from .status_table import only, print_status

    try:
        held = only(look(chosen.results), chosen.where)
    except (OSError, ValueError) as error:
        print(printable(f"zerobench status: {error}"), file=sys.stderr)
        return 2
    print_status(held)
    return 0
