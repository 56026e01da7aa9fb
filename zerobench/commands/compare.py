"""`zerobench compare`: the changes between two sides, as a table and as sentences."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from ..budgets.comparison import (
    ROUGH_NOISE,
    Change,
    Compared,
    Comparison,
    Effect,
    Judge,
    Pair,
    compare_runs,
    detectable,
    interleaved,
    pairs_needed,
    read_floors,
    same_runs,
)
from ..budgets.lines import Lines, moved_lines
from ..host.terminal import file_console, stdout_console
from ..results.grid import Grid, Passage, print_passages
from ..results.options import Parser, add_options, verb
from ..results.selection import matching
from ..sizes import counted, show_bytes, show_count
from .interleave import add_interleave, check_sides, load_side, measure_in_turns, split_overrides

MINIMUM_EFFECT = 3.0
"""Smallest relevant effect, in percent."""
NOT_COMPARABLE = "not comparable"
NO_FLOOR = "no noise floor is recorded for this machine; zerobench noise record measures it"
DRIFT = "not interleaved: what drifted in between would count as change, so there is no verdict on times"
IN_TURNS = (
    "zerobench compare --interleave REV_A REV_B -- OVERRIDES measures two revisions in turns; launches by hand need a "
    "results_dir each, in turns a0 b0 b1 a1 a2 b2, and zerobench compare 'a*' 'b*'"
)
ONE_PAIR = (
    f"1 pair of launches, so there is no verdict on times. More pairs: measure.repeats=6 in one sweep; {IN_TURNS}"
)


def passages(comparison: Comparison) -> list[Passage]:
    """Returns a passage per pair of cells, and one on the cells that only one side has."""
    sections = [Passage(title(pair), _parts(pair)) for pair in comparison.pairs]
    for side, cells in (("A", comparison.only_a), ("B", comparison.only_b)):
        failed = {id(c): f": {c.row['status']}: {c.row['reason']}" for c in cells if c.row["status"] != "ok"}
        if cells:
            sections.append(Passage(f"only in {side}", [cell.name + failed.get(id(cell), "") for cell in cells]))
    return sections


def title(pair: Compared) -> str:
    """Returns the name of a pair of cells."""
    if pair.a.row["cell_id"] == pair.b.row["cell_id"]:  # names tell from neighbors, which may be others in A and B
        return min(pair.a.name, pair.b.name, key=len)
    return pair.a.name if pair.a.name == pair.b.name else f"{pair.a.name} against {pair.b.name}"


def _parts(pair: Compared) -> list[str | Grid]:
    differs = [f"differs: {difference}" for difference in pair.differs]
    if pair.refused:
        return [*differs, f"{NOT_COMPARABLE}: {'; '.join(pair.refused)}"]
    if pair.failed:
        return [*differs, *(f"{side} is {row['status']}: {row['reason']}" for side, row in pair.failed.items())]
    rough = []
    for change in pair.rough:
        if change.relative is not None:
            verdict = f"noise, below {100 * ROUGH_NOISE:.0f} %" if abs(change.relative) < ROUGH_NOISE else "moved"
            sizes = f"{show_bytes(change.a or 0)} → {show_bytes(change.b or 0)} ({percent(change.relative)})"
            rough.append(f"{change.metric} {sizes}: {verdict}; the system's figure is not exact")
    return [*differs, *_exact(pair), *rough, *_losses(pair), *_times(pair)]


def _exact(pair: Compared) -> Iterator[str | Grid]:
    if pair.moved:
        yield Grid(["bytes and volumes", "A", "B", "difference", ""], [_moved(change) for change in pair.moved])
    parts = parts_of_peak(pair)
    made_of = f": {made_up(parts)} at the peak" if parts else ""
    by = next((change.difference for change in pair.moved if change.metric == "peak_bytes"), None)
    if by:
        yield f"peak_bytes {'grew' if by > 0 else 'shrank'} by {show_bytes(abs(by))}{made_of}"
    elif parts:
        yield f"peak_bytes is unchanged, but its composition differs{made_of}"
    for at, heading in HEADER.items():
        if rows := line_rows(at, pair.a.lines, pair.b.lines):
            yield Grid([heading, "A", "B", "difference"], rows)
    yield from (f"{metric}: noise" for metric in pair.unsteady)
    count = len(pair.equal) + len(pair.moved) + len(pair.unsteady)
    yield f"{len(pair.equal)} of {count} bytes and volumes are equal, exactly"


def _moved(change: Change) -> list[str]:
    def figure(value: float | None, sign: str = "") -> str:
        return "–" if value is None else f"{value:{sign}.6f}" if isinstance(value, float) else f"{value:{sign},}"

    share = "" if change.relative is None else percent(change.relative, 2)
    return [change.metric, figure(change.a), figure(change.b), figure(change.difference, "+"), share]


def percent(share: float, digits: int = 1) -> str:
    """Formats a signed percentage; a value that rounds to zero is +0, never −0."""
    return f"{round(100 * share, digits) + 0.0:+.{digits}f} %"


def parts_of_peak(pair: Compared) -> list[tuple[str, float]]:
    """Returns the categories whose share of the peak has changed, each with its difference in bytes."""
    metrics = {change.metric: change.difference or 0 for change in pair.at_peak}
    return [(metric.removeprefix("peak_").removesuffix("_bytes"), difference) for metric, difference in metrics.items()]


def made_up(parts: Sequence[tuple[str, float]]) -> str:
    """Formats differences by category, the largest first: "gradients +1.0 MiB, inputs −512 B"."""
    return ", ".join(f"{name} {signed(by)}" for name, by in sorted(parts, key=lambda part: -abs(part[1])))


def signed(size: float) -> str:
    """Formats a difference of bytes: "+1.0 MiB", "−512 B"."""
    return f"{'+' if size > 0 else '−' if size < 0 else ''}{show_bytes(abs(size))}"


def _losses(pair: Compared) -> Iterator[str]:
    if pair.loss_refused:
        yield f"losses {NOT_COMPARABLE}: {'; '.join(pair.loss_refused)}"
        return
    for change in pair.losses:
        if change.a == change.b:
            yield f"{change.metric} is equal to the bit"
        else:
            by = f"a difference of {change.difference or 0:+.3g}"
            yield f"{change.metric} is {change.a} in A and {change.b} in B, {by}"


def _times(pair: Compared) -> Iterator[str | Grid]:
    if pair.time_refused:
        yield f"times {NOT_COMPARABLE}: {'; '.join(pair.time_refused)}"
        return
    rows = [
        [effect.metric, f"{effect.a * 1000:.2f}", f"{effect.b * 1000:.2f}", f"{effect.ratio:.3f}",
         interval(effect) or "–", f"{100 * effect.threshold:.1f} %", effect.verdict]
        for effect in pair.effects
    ]  # fmt: skip
    yield Grid(["times", "A ms", "B ms", "ratio B/A", "95 % interval", "least effect", "verdict"], rows)
    ours, theirs = (side.row["tokens_per_s"] for side in (pair.a, pair.b))
    rates = f"{counted([pair.a.row['sequence']])}/s {ours:.0f} → {theirs:.0f} ({percent(theirs / ours - 1)})"
    yield f"{rates}: {pair.effects[0].verdict}"
    yield _launches(list(pair.pairs))
    yield from [f"noise floor: of {floor.title}" for floor in pair.floors] or [NO_FLOOR]


def interval(effect: Effect) -> str:
    """Formats the interval of a ratio: "0.981–1.024"; empty if there is none."""
    return "" if effect.low is None or effect.high is None else f"{effect.low:.3f}–{effect.high:.3f}"


def _launches(pairs: list[Pair]) -> str:
    """Reports the number of pairs, the effect that so many detect, and how many detect the smallest relevant effect."""
    count = f"{show_count(len(pairs), 'pair')} of launches"
    if same_runs(pairs):
        return f"{count}: the same on both sides"
    if len(pairs) == 1:
        return ONE_PAIR
    if not interleaved(pairs):
        return f"{count}, {DRIFT}; {IN_TURNS}"
    effect, needed = detectable(pairs), pairs_needed(pairs, MINIMUM_EFFECT / 100)
    if effect is None:
        return f"{count}, interleaved"
    more = f"{MINIMUM_EFFECT:g} % needs {f'{needed} pairs' if needed else 'a quieter machine'}"
    return f"{count}, interleaved: in 80 of 100 cases a change of {percent(effect)} is found; {more}"


SHOWN = 8
"""Most lines of a table that a comparison lists."""

HEADER = {"peak": "lines of code at the peak", "growth": "lines of code that grow over the steps"}


def line_rows(at: str, a: Lines, b: Lines) -> list[list[str]]:
    """Returns a row per line that moved: line, bytes in A, in B, difference; none if a side has no lines.

    Lines beyond SHOWN are combined into one row, so that the differences add up to the table's total.
    """
    if at not in a or at not in b:
        return []
    moved = moved_lines(a[at], b[at])
    rows = [(f"{line.line} ({line.about})" if line.about else line.line, line.before, line.after) for line in moved]
    if len(left := rows[SHOWN:]) > 1:
        others = f"{len(left)} other lines", sum(before for _, before, _ in left), sum(after for *_, after in left)
        rows = [*rows[:SHOWN], others]
    return [[label, show_bytes(before), show_bytes(after), signed(after - before)] for label, before, after in rows]


NOISE_FOLDER = "results/noise"


def judge_of(chosen: argparse.Namespace) -> Judge:
    """Returns the judge that the options of `add_judge` describe. Raises ValueError."""
    if not chosen.minimum_effect >= 0:
        raise ValueError(f"--minimum-effect {chosen.minimum_effect}: must be 0 or more")
    return Judge(chosen.minimum_effect / 100, read_floors(chosen.noise))


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
    chosen = parser.parse_args(own)
    try:
        check_sides(chosen.a, chosen.b, chosen.interleave, overrides)
        if chosen.runs and not chosen.interleave:
            raise ValueError("--runs is the folder of the runs of --interleave; A and B name finished runs")
        judge = judge_of(chosen)
        if chosen.interleave:
            chosen.a, chosen.b = chosen.interleave
            a, b = measure_in_turns(chosen.a, chosen.b, chosen.launches, overrides or [], chosen.runs)
        else:
            a, b = (load_side(where) for where in (chosen.a, chosen.b))
        a, b = (replace(side, runs=matching(side.runs, chosen.where)) for side in (a, b))
    except KeyboardInterrupt:
        return 130
    comparison = compare_runs(a.runs, b.runs, judge, (a.lines, b.lines))
    if not comparison.pairs:
        raise ValueError(f"no cell of {chosen.a} is also in {chosen.b}")
    try:
        if chosen.out is not None:
            chosen.out.parent.mkdir(parents=True, exist_ok=True)
        with nullcontext(sys.stdout) if chosen.out is None else chosen.out.open("w") as file:
            if chosen.format == "markdown":
                file.write("\n".join(passage.markdown() for passage in passages(comparison)))
            else:
                print_passages(stdout_console() if chosen.out is None else file_console(file), passages(comparison))
    except OSError as error:
        raise ValueError(f"--out: {error}") from error
    return int(chosen.fail_on_change and comparison.worse)
