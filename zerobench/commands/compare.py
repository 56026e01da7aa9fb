"""`zerobench compare A B`: prints a comparison of two runs or two sets of runs; comparison.py computes it.

Each pair of cells has a passage (commands/passages.py), printed as text or Markdown.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from ..host.terminal import file_console, stdout_console
from ..judging.comparison import Compared, Comparison, Measured, compare_cells, compare_runs
from ..judging.paired import NoiseFloor, read_floors
from ..results.options import Parser, add_options, verb
from ..results.selection import matching
from ..results.tables import Results
from .comparison_text import MINIMUM_EFFECT, passages
from .interleave import Side, add_interleave, check_sides, load_side, measure_in_turns, split_overrides
from .passages import Passage, print_passages

NOISE_FOLDER = "results/noise"


@dataclass(frozen=True)
class Judge:
    """Rules for comparing times: the smallest relevant effect as a fraction, and noise floors."""

    minimum_effect: float
    floors: list[NoiseFloor]

    @classmethod
    def of(cls, chosen: argparse.Namespace) -> Judge:
        """Returns the judge that the options of `add_judge` describe. Raises ValueError."""
        if not chosen.minimum_effect >= 0:
            raise ValueError(f"--minimum-effect {chosen.minimum_effect}: must be 0 or more")
        return cls(chosen.minimum_effect / 100, read_floors(chosen.noise))

    def compare_runs(self, a: Side | Results, b: Side | Results) -> Comparison:
        """Compares the cells of two sides."""
        return compare_runs(a.runs, b.runs, self.minimum_effect, self.floors, (a.lines, b.lines))

    def compare_cells(self, a: Measured, b: Measured) -> Compared:
        """Compares two cells."""
        return compare_cells(a, b, self.minimum_effect, self.floors)


def add_judge(parser: argparse.ArgumentParser) -> None:
    """Adds --minimum-effect and --noise."""
    effect_help = "smaller changes of times count as noise (default: %(default)s)"
    parser.add_argument("--minimum-effect", type=float, default=MINIMUM_EFFECT, metavar="PERCENT", help=effect_help)
    noise_help = "folder of `zerobench noise record` (default: %(default)s)"
    parser.add_argument("--noise", type=Path, default=Path(NOISE_FOLDER), metavar="DIR", help=noise_help)


@verb
def compare(arguments: list[str]) -> int:
    """Runs the verb. Returns the exit code: 0 compared, 1 changed with --fail-on-change, 2 nothing to compare."""
    own, overrides = split_overrides(arguments)
    chosen = _parser().parse_args(own)
    try:
        check_sides(chosen.a, chosen.b, chosen.interleave, overrides)
        judge = Judge.of(chosen)
        if chosen.interleave:
            chosen.a, chosen.b = chosen.interleave
            a, b = measure_in_turns(chosen.a, chosen.b, chosen.launches, overrides or [], chosen.runs)
        else:
            a, b = (load_side(where) for where in (chosen.a, chosen.b))
            a, b = (replace(side, runs=matching(side.runs, chosen.where)) for side in (a, b))
    except KeyboardInterrupt:
        return 130
    comparison = judge.compare_runs(a, b)
    if not comparison.pairs:
        raise ValueError(f"no cell of {chosen.a} is also in {chosen.b}")
    try:
        _write(passages(comparison), chosen.format, chosen.out)
    except OSError as error:
        raise ValueError(f"--out: {error}") from error
    return int(chosen.fail_on_change and comparison.worse)


def _parser() -> argparse.ArgumentParser:
    description = "Changes from A to B: bytes and volumes exactly, times by paired ratios of launches."
    parser = Parser("zerobench compare", description)
    where = "a run, a results folder, a collection, or a quoted pattern that matches several: 'results/runs/zero1-*'"
    parser.add_argument("a", metavar="A", nargs="?", help=where)
    parser.add_argument("b", metavar="B", nargs="?", help="likewise")
    add_interleave(parser)
    add_judge(parser)
    add_options(parser, attempts=False)
    parser.add_argument("--format", choices=("text", "markdown"), default="text")
    parser.add_argument("--out", type=Path, metavar="FILE", help="instead of standard output")
    change_help = (
        "exit code 1 if bytes or volumes changed, a step became slower, a cell fails in B only, is on one side only,"
        " or trains something else; losses are shown and do not count"
    )
    parser.add_argument("--fail-on-change", action="store_true", help=change_help)
    return parser


def _write(comparison: list[Passage], style: str, out: Path | None) -> None:
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
    with nullcontext(sys.stdout) if out is None else out.open("w") as file:
        if style == "markdown":
            file.write("\n".join(passage.markdown() for passage in comparison))
        else:
            print_passages(stdout_console() if out is None else file_console(file), comparison)
