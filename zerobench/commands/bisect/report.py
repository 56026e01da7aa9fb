"""The output of a search: commit, metric, category, lines of code; as text or as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

from ...host.terminal import stdout_console
from ...records import COLLECTIVES
from ...sizes import printable, show_bytes, show_count
from .measure import Bench, Measured, Range
from .moved import also_moved, lines_moved, parts_moved
from .search import METRICS, Found, Target, bounds, same

LINES = 5
"""Most lines of code that the text shows."""


@dataclass(frozen=True)
class Report:
    """The outcome. `commits`: number in GOOD..BAD. `moved`: all targets that differ between the ends."""

    bench: Bench
    commits: int
    good: Measured
    bad: Measured
    found: list[Found]
    moved: list[Target]
    unmoved: list[str]
    skipped: list[tuple[Measured, str]]

    @property
    def elsewhere(self) -> list[Target]:
        """Targets that moved between the ends and at no commit that was found."""
        explained = [(one.before, one.after) for one in self.found]
        return [
            target
            for target in self.moved
            if not any(
                not same(a.value(target.cell, target.metric), b.value(target.cell, target.metric)) for a, b in explained
            )
        ]


def show_value(value: Any) -> str:
    """Formats a metric's value: bytes in full, quotients with six digits, words as they are."""
    if isinstance(value, Range):
        return f"{show_value(value.low)} to {show_value(value.high)}"
    if isinstance(value, float):
        return f"{value:.6g}" if value % 1 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def write(report: Report, style: str, prefix: str = "") -> None:
    """Prints the outcome on standard output; `prefix`: the folder of the repository that the command ran in."""
    if style == "json":
        json.dump(_plain(report, prefix), sys.stdout, indent=1)
        sys.stdout.write("\n")
        return
    console = stdout_console()
    for number, found in enumerate(report.found):
        if number:
            console.print()
        for line in _sentences(report, found, prefix):
            console.print(printable(line), markup=False, highlight=False, soft_wrap=True)
    for line in _rest(report):
        console.print(printable(line), markup=False, highlight=False, soft_wrap=True)


def _sentences(report: Report, found: Found, prefix: str) -> list[str]:
    target, commit = found.target, found.after.commit
    before, after = (one.value(target.cell, target.metric) for one in (found.before, found.after))
    lines = [f"{commit.short} {commit.subject}", f"  author date  {commit.date}"]
    change = f"{show_value(before)} → {show_value(after)}{_by(target.metric, before, after)}"
    lines += [f"  {target.cell}: {target.metric} {change}"]
    if parts := parts_moved(found):
        lines += [f"  category     {', '.join(_part(*part) for part in parts.items())}"]
    moves = lines_moved(found, report.bench.repository, prefix)
    lines += [f"  line         {move.words}" for move in moves[:LINES]]
    if len(moves) > LINES:
        lines += [f"  and {show_count(len(moves) - LINES, 'line')} more"]
    others = also_moved(found, METRICS).items()
    if shown := [f"{name} {show_value(a)} → {show_value(b)}" for name, (a, b) in others]:
        lines += [f"  also moved   {', '.join(shown)}"]
    if suspects := found.suspects:
        words = ", ".join(one.commit.short for one in suspects)
        lines += [f"  or one of    {words}: {'they' if len(suspects) > 1 else 'it'} could not be measured"]
    bad = report.bad.value(target.cell, target.metric)
    if not same(after, bad):
        lines += [f"  at BAD it is {show_value(bad)}: other commits moved it too; --all finds every one"]
    return [*lines, f"  git show {commit.short}"]


def _rest(report: Report) -> list[str]:
    lines = []
    if not report.found:
        lines += ["nothing moved from GOOD to BAD"]
    elif elsewhere := list(dict.fromkeys(one.metric for one in report.elsewhere)):
        lines += [f"moved by other commits: {', '.join(elsewhere)}; search for one with --metric"]
    lines += report.unmoved
    if report.skipped:
        lines += [f"skipped: {one.commit.short} {one.commit.subject}: {why}" for one, why in report.skipped]
    runs = show_count(report.bench.runs, "run")
    lines += [
        f"{show_count(report.commits, 'commit')}, {runs}, {report.bench.remembered} remembered in {report.bench.cache}"
    ]
    return lines


def _by(metric: str, before: Any, after: Any) -> str:
    if not isinstance(before, int | float) or not isinstance(after, int | float):
        return ""
    percent = f", {100 * (after - before) / before:+.2f} %" if before else ""
    return f" ({_signed(after - before, metric.endswith('_bytes'))}{percent})"


def _signed(by: float, in_bytes: bool, unit: str = "") -> str:
    return f"{'+' if by > 0 else '−'}{show_bytes(abs(by)) if in_bytes else show_value(abs(by))}{unit}"


def _part(name: str, by: float) -> str:
    return f"{name} {_signed(by, in_bytes=False, unit=' ψ') if name in COLLECTIVES else _signed(by, in_bytes=True)}"


def _plain(report: Report, prefix: str) -> dict[str, Any]:
    return {
        "good": report.good.commit.hash,
        "bad": report.bad.commit.hash,
        "commits": report.commits,
        "runs": report.bench.runs,
        "remembered": report.bench.remembered,
        "found": [_plain_found(report, one, prefix) for one in report.found],
        "moved_by_others": [{"cell": one.cell, "metric": one.metric} for one in report.elsewhere],
        "unmoved": report.unmoved,
        "skipped": [{"commit": one.commit.hash, "reason": why} for one, why in report.skipped],
    }


def _plain_found(report: Report, found: Found, prefix: str) -> dict[str, Any]:
    target, commit = found.target, found.after.commit
    moves = lines_moved(found, report.bench.repository, prefix)
    others = {name: tuple(map(_plain_value, both)) for name, both in also_moved(found, METRICS).items()}
    return {
        "cell": target.cell,
        "metric": target.metric,
        "commit": commit.hash,
        "subject": commit.subject,
        "author_date": commit.date,
        "parent": found.before.commit.hash,
        "before": _plain_value(found.before.value(target.cell, target.metric)),
        "after": _plain_value(found.after.value(target.cell, target.metric)),
        "at_good": _plain_value(report.good.value(target.cell, target.metric)),
        "at_bad": _plain_value(report.bad.value(target.cell, target.metric)),
        "parts": parts_moved(found),
        "lines": [{**asdict(move), "difference": move.difference, "words": move.words} for move in moves],
        "also_moved": {name: {"before": a, "after": b} for name, (a, b) in others.items()},
        "suspects": [one.commit.hash for one in found.suspects],
        "show": f"git show {commit.hash}",
    }


def _plain_value(value: Any) -> Any:
    return list(bounds(value)) if isinstance(value, Range) else value
