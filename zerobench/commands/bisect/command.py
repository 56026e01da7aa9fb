"""`zerobench bisect`: its options, its targets, and the progress that it shows."""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...config.unknown_keys import meant
from ...records import RunRow
from ...results.options import Parser, add_options
from ...results.row_checks import columns_of
from ...sizes import parse_bytes, printable, show_count
from ...watching.watch import WATCH_TO
from ..compare.interleave import split_overrides
from ..revisions import Commit, commit, git, is_ancestor
from .launch import PLACEHOLDER, Launch
from .measure import STATUS, Bench, Launcher, Measured
from .report import Report, show_value, write
from .search import METRICS, Found, Search, Target, same, walk

CACHE = Path("results/bisect")
AUTO = "auto"

DESCRIPTION = f"""\
Finds the commit in GOOD..BAD that moved a metric, in at most ceil(log2 n) runs beside those of GOOD and BAD, for n
commits. COMMAND is a sweep, as in -- -m strategy=zero1,zero2, or any command of the repository, as in -- pytest
tests/test_memory.py: the loops that it watches with zerobench.watch leave their runs in the folder that the variable
{WATCH_TO} names (a word {PLACEHOLDER} of the command becomes that folder). Each commit is checked out in a
worktree of its own among the temporary files; your checkout, index and stash are not touched."""

EPILOG = """\
examples:
  zerobench bisect v1.2 HEAD -- pytest tests/test_memory.py
  zerobench bisect HEAD~40 HEAD --metric peak_bytes --above "24 GiB" -- python train.py
  zerobench bisect main my-branch --metric volume_psi -- -m strategy=zero2,zero3 world_size=2 model=gpt_tiny

The search assumes nothing but that the metric at GOOD and at BAD differ: it ends at a commit that differs from its
parent; where several do, it is one of them, and --all measures every commit. A commit that cannot be measured is
skipped. What was measured is remembered in --cache by the commit's content, the command and the environment: a second
search is free. Exit code: 0 found, 1 nothing moved or only commits that cannot be measured are left, 2 refused."""


@dataclass(frozen=True)
class Choice:
    """The subject of a search: metrics or AUTO, with a threshold where one is given."""

    metrics: tuple[str, ...]
    above: float | None
    below: float | None


def bisect(arguments: list[str], launcher: Launcher | None = None) -> int:
    """Runs the verb; `launcher` runs the command instead of a process. Returns the exit code: see EPILOG."""
    own, words = split_overrides(arguments)
    chosen = _parser().parse_args(own)
    try:
        choice = _choice(chosen)
        if not words:
            raise ValueError("say behind -- what is measured, as in -- pytest tests/test_memory.py")
        if not chosen.repo.is_dir():
            raise ValueError(f"--repo {chosen.repo}: there is no such folder")
        top = Path(git(chosen.repo, "rev-parse", "--show-toplevel"))
        prefix = git(chosen.repo, "rev-parse", "--show-prefix")
        good, bad = _ends(top, chosen.good, chosen.bad)
        launch = launcher or Launch(tuple(words), prefix, chosen.timeout)
        bench = Bench(top, tuple(words), chosen.cache.absolute(), launch, chosen.where, chosen.rerun, chosen.launches)
        report = _search(bench, good, bad, choice, chosen.all)
    except ValueError as error:
        print(printable(f"zerobench bisect: {error}"), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("zerobench bisect: interrupted; what was measured is remembered", file=sys.stderr)
        return 130
    write(report, chosen.format, prefix)
    return 0 if report.found and not any(one.suspects for one in report.found) else 1


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser("zerobench bisect", description=DESCRIPTION, epilog=EPILOG, formatter_class=raw)
    parser.usage = "zerobench bisect GOOD BAD [--metric METRIC] [--above VALUE | --below VALUE] [--all] -- COMMAND"
    add = parser.add_argument
    add("good", metavar="GOOD", help="a revision before the change")
    add("bad", metavar="BAD", help="a revision after it")
    words = (
        "columns of the table of runs, comma-separated (default: the first of peak_bytes, growth_bytes, ... that moved)"
    )
    add("--metric", default=AUTO, metavar="METRIC", help=words)
    limits = parser.add_mutually_exclusive_group()
    limits.add_argument("--above", metavar="VALUE", help="the commit at which the metric first lies above, as in 24GiB")
    limits.add_argument("--below", metavar="VALUE", help="the commit at which it first lies below")
    add("--all", action="store_true", help="measure every commit, and name each that moved the metric")
    add("--repo", type=Path, default=Path("."), metavar="DIR", help="the repository (default: that of this folder)")
    add(
        "--cache", type=Path, default=CACHE, metavar="DIR", help="what was measured is kept here (default: %(default)s)"
    )
    add("--rerun", action="store_true", help="measure again what is remembered")
    words = "of the command per commit; of a metric that differs between them the ranges are compared (default: 1)"
    add("--launches", type=int, default=1, metavar="K", help=words)
    add(
        "--timeout",
        type=float,
        default=3600.0,
        metavar="SECONDS",
        help="of one run; then it is skipped (default: 3600)",
    )
    add_options(parser, attempts=False)
    add("--format", choices=("text", "json"), default="text")
    return parser


def _choice(chosen: argparse.Namespace) -> Choice:
    """Checks metrics and thresholds. Raises ValueError, a sentence."""
    metrics = tuple(dict.fromkeys(chosen.metric.split(",")))
    given = chosen.above or chosen.below
    name = "--above" if chosen.above else "--below"
    kinds = dict(columns_of(RunRow))
    for metric in metrics if metrics != (AUTO,) else ():
        if metric != STATUS and kinds.get(metric) not in (int, float):
            raise ValueError(f"--metric {metric}: no such figure of a run{meant(metric, list(METRICS))}")
        if metric not in (*METRICS, STATUS) and given is None:
            raise ValueError(f"--metric {metric}: it does not repeat exactly; give a threshold, --above or --below")
    if given is not None and (metrics == (AUTO,) or STATUS in metrics):
        raise ValueError(f"{name} {given}: a threshold is one of a metric; give --metric, as peak_bytes")
    if chosen.launches < 1:
        raise ValueError(f"--launches {chosen.launches}: must be 1 or more")
    if chosen.timeout <= 0:
        raise ValueError(f"--timeout {chosen.timeout:g}: must be above 0 seconds")
    limit = _limit(name, given, metrics) if given is not None else None
    return Choice(metrics, limit if chosen.above else None, limit if chosen.below else None)


def _limit(name: str, given: str, metrics: tuple[str, ...]) -> float:
    try:
        return parse_bytes(given) if all(metric.endswith("_bytes") for metric in metrics) else float(given)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _ends(repository: Path, good: str, bad: str) -> tuple[Commit, Commit]:
    """Returns both ends. Raises ValueError where BAD does not come after GOOD."""
    one, other = commit(repository, good), commit(repository, bad)
    if one.hash == other.hash:
        raise ValueError(f"GOOD and BAD are one commit, {one.short}; name an earlier and a later one")
    if not is_ancestor(repository, one.hash, other.hash):
        if is_ancestor(repository, other.hash, one.hash):
            raise ValueError(f"GOOD {good} comes after BAD {bad}; turn them round")
        raise ValueError(f"GOOD {good} is no ancestor of BAD {bad}; `git merge-base {good} {bad}` names one")
    return one, other


def _search(bench: Bench, good: Commit, bad: Commit, choice: Choice, everything: bool) -> Report:
    count = int(git(bench.repository, "rev-list", "--count", f"{good.hash}..{bad.hash}"))
    progress = Progress(bench, count, everything)
    ends = bench.measure(good), bench.measure(bad)
    for one, name in zip(ends, ("GOOD", "BAD"), strict=True):
        if one.problem:
            raise ValueError(f"{name} {one.commit.short} cannot be measured: {one.problem}")
    cells = [cell for cell in ends[0].cells if cell in ends[1].cells]
    if not cells:
        here, there = (" and ".join(one.cells) for one in ends)
        raise ValueError(f"no cell is in both ends: GOOD has {here}, BAD has {there}")
    moved, unmoved = _targets(*ends, cells, choice)
    search = Search(bench, progress.tell)
    targets = moved[:1] if choice.metrics == (AUTO,) else moved
    found: list[Found] = []
    for target in targets:
        progress.target = target
        found += walk(search, target, *ends) if everything else [search.find(target, *ends)]
    return Report(bench, count, ends[0], ends[1], found, moved, unmoved, list(search.skipped.values()))


def _targets(good: Measured, bad: Measured, cells: list[str], choice: Choice) -> tuple[list[Target], list[str]]:
    """Returns the targets that moved from GOOD to BAD, the most telling first, and sentences on the others."""
    metrics = METRICS if choice.metrics == (AUTO,) else choice.metrics
    moved, unmoved = [], []
    for target in (Target(cell, metric, choice.above, choice.below) for metric in metrics for cell in cells):
        a, b = (one.value(target.cell, target.metric) for one in (good, bad))
        if a is None or b is None:
            end, name = (good, "GOOD") if a is None else (bad, "BAD")
            unmoved.append(f"{target.cell}: {target.metric}: nothing to compare: at {name} {end.reason(target.cell)}")
        elif not target.is_old(a, a):
            unmoved.append(f"{target.cell}: {target.metric} is {show_value(a)} at GOOD, beyond the threshold already")
        elif target.is_old(a, b):
            words = (
                f"{show_value(a)} at both ends"
                if same(a, b)
                else f"{show_value(a)} → {show_value(b)}, no threshold crossed"
            )
            unmoved.append(f"{target.cell}: {target.metric} is {words}")
        else:
            moved.append((target, a, b))
    if choice.metrics == (AUTO,):
        unmoved = [f"{len(METRICS)} metrics of {show_count(len(cells), 'cell')} are equal"] if not moved else []
    order: dict[str, int] = {metric: place for place, metric in enumerate(metrics)}
    moved.sort(key=lambda one: (order[one[0].metric], -_relative(one[1], one[2])))
    return [target for target, _, _ in moved], unmoved


def _relative(a: Any, b: Any) -> float:
    if not isinstance(a, int | float):
        return 0.0
    return abs(b - a) / abs(a) if a else math.inf


class Progress:
    """Two lines per commit, on standard error: which it is; then its value, and how many runs remain at most."""

    def __init__(self, bench: Bench, count: int, everything: bool) -> None:
        self.target: Target | None = None
        self._bench = bench
        bench.told = self._begin
        most = count - 1 if everything else math.ceil(math.log2(count))
        _show(f"{show_count(count, 'commit')}: at most {show_count(most, 'run')} after those of GOOD and BAD")

    def _begin(self, one: Commit, known: bool) -> None:
        what = "remembered" if known else f"run {self._bench.runs}"
        _show(f"{what}: {one.short} {one.subject}")

    def tell(self, one: Measured, state: str, remaining: int) -> None:
        """Tells a commit's state for the target."""
        assert self.target is not None
        value = one.value(self.target.cell, self.target.metric)
        left = f"at most {show_count(remaining, 'run')} left" if remaining else "none left"
        what = one.reason(self.target.cell) if value is None else f"{self.target.metric} {show_value(value)}"
        _show(f"  {what}: {state}; {left}")


def _show(words: str) -> None:
    print(printable(words), file=sys.stderr, flush=True)
