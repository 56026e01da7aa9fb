"""The verdict on a test: its watches' tables compared with recorded and manual limits, and the text of a failure.

test_step: 1 of 2 limits does not hold (zero2, 2 ranks on gloo)
  peak_bytes is 3,150,848 B (3.0 MiB): 53,248 B (52.0 KiB), 1.72% above its ceiling of 3,097,600 B (3.0 MiB)
    written as peak="<= 24 psi"; most of it are activations, 1,048,576 B (1.0 MiB)
    train.py:31 in forward: 1.0 MiB (head, logits)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd

from ..judging import github, lines
from ..judging.judge import Finding, Limit, beyond_psi, judge_cell, show_value
from ..records import COLLECTIVES
from ..results.tables import Results
from ..sizes import show_count
from ..watching.watch import STOPPED
from .limits import GateError, HandLimit, Request, Sizes
from .records import Home, measured, recorded_budget
from .watches import WatchedByTest

MOST_LINES = 4
"""Most lines of code that a failure names per limit."""


@dataclass
class GateVerdict:
    """The outcome of a test. `failures` and `notes`: messages, in a GitHub workflow with annotations among the notes;
    `recorded`: rows to be written, as plain values.
    """

    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    recorded: list[dict[str, Any]] = field(default_factory=list)


def judge(made: Sequence[WatchedByTest], request: Request, home: Home, record: bool) -> GateVerdict:
    """Judges the watches of a test whose body has passed. Raises GateError if there is nothing to judge.

    `record`: measure recorded limits again instead of checking them. Nothing is judged on a rank that has no tables.
    """
    if not made:
        raise GateError(
            "zerobench: the test did not call zerobench_watch; write: with zerobench_watch(model, optimizer):"
        )
    verdict = GateVerdict()
    for one in made:
        if one.watch.state != STOPPED:
            words = f"zerobench: the watch of {one.name} is {one.watch.state}; leave it: write it as a with statement"
            raise GateError(words)
        if one.watch.results is not None:
            _judge_watch(one, one.watch.results, request, home, record, verdict)
    return verdict


def _judge_watch(
    one: WatchedByTest, results: Results, request: Request, home: Home, record: bool, verdict: GateVerdict
) -> None:  # fmt: skip
    row = measured(results, one.name)
    hand = request.limits if one.limits is None else one.limits
    sections = _Sections(results, lines.lines_of(results.lines))
    total = sections.hold_hand(one, hand)
    if request.recorded and one.limits is None:
        if record:
            if row["status"] != "ok":
                raise GateError(f"zerobench: {one.name}: {row['status']}: {row['reason']}; nothing was recorded")
            verdict.recorded.append(row)
        else:
            total += sections.hold_recorded(one.name, recorded_budget(home, one.name, row["environment"]), verdict)
    if sections.texts:
        failed = ", ".join(finding.metric for finding in sections.findings)
        world = sections.row["world_size"]
        where = f"{world} ranks on {sections.row['backend']}" if world > 1 else f"one rank on {sections.row['device']}"
        words = f"{len(sections.texts)} of {total} limits broken ({sections.row['strategy']}, {where})"
        head = f"{one.name}: {failed}: {words}"
        verdict.failures.append("\n".join([head, *sections.texts]))
        if github.is_github():
            verdict.notes += github.commands_of(sections.findings, github.repository_root())


def _net(growth: lines.LineTable | None) -> lines.LineTable:
    """Returns the lines that have grown, without lines that only replace others, such as rebuilt buckets."""
    sums: Counter[tuple[str, str]] = Counter()
    table = growth or lines.LineTable()
    for one in table.lines:
        sums[one.category, one.name] += one.bytes
    return replace(table, lines=tuple(one for one in table.lines if sums[one.category, one.name] > 0))


class _Sections:
    """The messages on one watch's broken limits."""

    def __init__(self, results: Results, now: lines.Lines) -> None:
        self.results, self.now = results, now
        self.row: dict[Any, Any] = results.runs.iloc[0].to_dict()
        self.texts: list[str] = []
        self.findings: list[Finding] = []

    def hold_hand(self, one: WatchedByTest, limits: Iterable[HandLimit]) -> int:
        """Checks manual limits; returns their number."""
        limits = tuple(limits)
        sizes = Sizes(int(self.row["psi"] or 0), one.unit)
        for limit in limits:
            parsed = limit.of(sizes)
            for finding in judge_cell(one.name, {limit.metric: parsed}, self.row):
                if finding.kind != "improvement" or not limit.bound:
                    self._tell(finding, [f"written as {limit.written}", *self._most_grown(limit.metric)], {}, parsed)
        return len(limits)

    def hold_recorded(self, name: str, budget: Any, verdict: GateVerdict) -> int:
        """Checks recorded limits; values below them become notes. Returns the number of limits."""
        for finding in judge_cell(name, budget.limits, self.row):
            if finding.kind == "improvement":
                verdict.notes.append(finding.sentence)
            else:
                limit = budget.limits[finding.metric]
                self._tell(finding, self._most_grown(finding.metric), budget.lines, limit)
        return len(budget.limits)

    def _tell(self, finding: Finding, about: list[str], before: lines.Lines, limit: Limit) -> None:
        sentence = finding.sentence.removeprefix(f"{finding.cell}: ")
        places = self._places(finding.metric, before, limit)
        details = [
            *["; ".join(about)] * bool(about),
            *(place.sentence for place in places),
            *self._traffic(finding.metric),
        ]
        self.findings.append(replace(finding, places=tuple(places)))
        self.texts.append("\n".join([f"  {sentence}", *(f"    {line}" for line in details)]))

    def _most_grown(self, metric: str) -> list[str]:
        """Names the category that has grown most; for growth alone."""
        sizes = Counter[str]()
        for one in _net(self.now.get("growth")).lines if metric == "growth_bytes" else ():
            sizes[one.category] += one.bytes
        largest = sizes.most_common(1)
        return [f"of the growth most is {name}: {show_value('peak_bytes', size)}" for name, size in largest]

    def _places(self, metric: str, before: lines.Lines, limit: Limit) -> list[lines.Place]:
        """Returns the lines of code that changed since the record, or else those with the most bytes of what exceeds
        the limit.
        """
        if pd.isna(self.row[metric]):
            return []
        by = float(self.row[metric]) - limit.value
        if moved := lines.lines_behind(metric, by, before, self.now, MOST_LINES):
            return [one.place for one in moved]
        beyond = beyond_psi(metric, by, self.row)
        return lines.largest_lines(metric, self.now | {"growth": _net(self.now.get("growth"))}, beyond, MOST_LINES)

    def _traffic(self, metric: str) -> list[str]:
        """Returns the collectives of a step that make up a metric of traffic, the largest first."""
        if not metric.startswith(("volume", "wire", "control")):
            return []
        table = self.results.traffic
        table = table[(table["step"] == table["step"].max()) & (table["control"] == (metric == "control_bytes"))]
        table = table[table["rank"] == 0].assign(by=table["collective"].where(table["collective"] != "", table["kind"]))
        part = metric.removeprefix("volume_").removesuffix("_psi")
        table = table[table["by"] == part] if part in COLLECTIVES[:-1] else table
        keys = ["by", "phase", "unit", "group_size", "dtype"]
        sums = table.groupby(keys)[["calls", "volume_elements", "payload_bytes"]].sum()
        largest: Any = sums.sort_values("payload_bytes", ascending=False).head(MOST_LINES).reset_index()
        lines = []
        for row in largest.itertuples():
            psi = row.volume_elements / self.row["psi"] if self.row["psi"] else 0.0
            what = f"{row.by} in {row.phase}" + (f" of {row.unit}" if row.unit else "")
            payload = f"{show_value('payload_bytes', row.payload_bytes)} of {row.dtype}"
            calls = f"{show_count(int(row.calls), 'call')} in a group of {row.group_size}"
            lines.append(f"{what}: {psi:.4g} ψ, {payload}, {calls}")
        return lines
