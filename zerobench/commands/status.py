"""`zerobench status`: its command line. The table is in commands/folder_contents.py, which takes longer to load."""

from __future__ import annotations

from pathlib import Path

from ..results.options import RESULTS, STATUS, Parser, add_columns, add_options, verb

EPILOG = """\
examples:
  zerobench status                                   results/runs
  zerobench status results/mlp --where status!=ok    what failed there
  zerobench status --columns cell,step               two columns

Exit code: 0; 2 no such folder; 130 interrupted."""


@verb
def status(arguments: list[str]) -> int:
    """Runs the verb. Returns the exit code: 0, or 2 if there is no such folder."""
    description = "What a results folder or a collection holds: a line per cell with its newest launches."
    parser = Parser("zerobench status", description, EPILOG)
    parser.add_argument("results", nargs="?", type=Path, default=RESULTS, help="default: %(default)s")
    add_options(parser, attempts=False)
    add_columns(parser, STATUS)
    chosen = parser.parse_args(arguments)
    from .folder_contents import look, only, print_status

    held = only(look(chosen.results), chosen.where)
    print_status(held, chosen.columns)
    return 0
