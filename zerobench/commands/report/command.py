"""`zerobench report RUNS`, `zerobench report A B`: a page of HTML on finished runs, or on what moved between two."""

from __future__ import annotations

import argparse
import shlex
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from ...judging import noise_floor
from ...results.conditions import add_options
from ...results.selection import chosen as chosen_runs
from ...results.tables import Results, load
from ...sizes import printable, show_bytes, show_count
from ..arguments import Parser
from ..compare import NOISE_FOLDER
from ..comparison_text import MINIMUM_EFFECT
from .content import of_runs, of_two
from .verdict import Judge

EXAMPLES = """\
examples:
  zerobench report results/runs --out report.html
  zerobench report results/runs --where model=gpt_small --where world_size=2 --title "ZeRO on two ranks"
  zerobench report results/runs/before results/runs/after --out moved.html

The page opens from the disk and asks for nothing: style, script and figures are in it. Print it for a PDF.
A folder is a results folder, a run, or a collection (zerobench export --format parquet), which has no logs.
"""


def report(arguments: list[str]) -> int:
    """Runs the verb. Returns the exit code: 0, or 2 where there is nothing to report."""
    chosen = _parser().parse_args(arguments)
    try:
        if len(chosen.runs) > 2:
            given = show_count(len(chosen.runs), "folder")
            raise ValueError(f"RUNS: {given} given; name one, or two to compare, or a folder of collections")
        if not chosen.minimum_effect >= 0:
            raise ValueError(f"--minimum-effect {chosen.minimum_effect}: must be 0 or more")
        if chosen.out.is_dir():
            raise ValueError(f"--out {chosen.out}: is a folder; name a file, as {chosen.out / 'report.html'}")
        judge = Judge(chosen.minimum_effect / 100, noise_floor.read(chosen.noise))
        sides = [_load(where, chosen) for where in chosen.runs]
        own = shlex.join(["zerobench", "report", *arguments])
        make = of_two if len(sides) == 2 else of_runs
        page = make(sides, chosen.runs, judge, chosen.title, own)
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        chosen.out.write_text(page, encoding="utf-8")
    except (FileNotFoundError, ValueError) as error:
        print(printable(f"zerobench report: {error}"), file=sys.stderr)
        return 2
    counted = " and ".join(show_count(len(side.runs), "run") for side in sides)
    print(f"report: {printable(chosen.out)}, {counted}, {show_bytes(chosen.out.stat().st_size)}")
    return 0


def _load(where: Path, options: argparse.Namespace) -> Results:
    """Reads one folder. Raises ValueError, a sentence, where no run is left."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = load(where)
    for warning in caught:
        print(printable(f"zerobench report: {warning.message}"), file=sys.stderr)
    if results.runs.empty:
        raise ValueError(_why_none(where, caught))
    return chosen_runs(results, options.where)[0]


def _why_none(where: Path, caught: Sequence[warnings.WarningMessage]) -> str:
    inside = [path.name for path in sorted(where.glob("*/")) if any(path.glob("*/run.json"))]
    if inside:
        return f"{where}: no runs here; `zerobench report {where / inside[0]}` reports those in it"
    if caught:
        return f"{where}: no run can be read"
    return f"{where}: no runs here; `zerobench experiment=stages results_dir={where}` makes some"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="zerobench report",
        description="Writes finished runs as one page of HTML: the verdict in words, the table of runs, figures,\n"
        "accounts with predictions and residuals, failures with their logs, provenance, commands.\n"
        "Of two folders: what moved.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    words = "a results folder, a run or a collection; two of them, before and after, are compared"
    parser.add_argument("runs", nargs="*", type=Path, default=[Path("results/runs")], metavar="RUNS", help=words)
    parser.add_argument(
        "--out", type=Path, default=Path("report.html"), metavar="FILE", help="default: %(default)s, here"
    )
    parser.add_argument("--title", metavar="TEXT", help="heading of the page (default: the folders' names)")
    parser.add_argument(
        "--minimum-effect", type=float, default=MINIMUM_EFFECT, metavar="PERCENT",
        help="times that differ by less are noise (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--noise", type=Path, default=Path(NOISE_FOLDER), metavar="DIR",
        help="what `zerobench noise record` wrote (default: %(default)s)",
    )  # fmt: skip
    add_options(parser, attempts=False)
    return parser
