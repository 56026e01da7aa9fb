"""The watches of a test, and the verdict: their tables compared with recorded and manual limits, and a failure's text.

test_step: 1 of 2 limits does not hold (zero2, 2 ranks on gloo)
  peak_bytes is 3,150,848 B (3.0 MiB): 53,248 B (52.0 KiB), 1.72% above its ceiling of 3,097,600 B (3.0 MiB)
    written as peak="<= 24 psi"; most of it are activations, 1,048,576 B (1.0 MiB)
    train.py:31 in forward: 1.0 MiB (head, logits)

Recorded limits are a budget file next to the test's file, with the same name and the suffix `.zerobench.yaml`.

It is written by `pytest --zerobench-record`, with a cell per watch of a test, named like the test within its file, and
budgets per environment like any budget file. Measured values travel as plain values: from a rank to the test's process,
and from a worker of pytest-xdist to its controller, which writes everything at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
from torch import nn

from ..records import COLLECTIVES
from ..results.frames import to_records
from ..results.tables import Results
from ..sizes import show_count
from ..watching import Watch
from ..watching.watch import NEW, STOPPED
from ..zero.modules.wrapping import default_units, unit_of_parameters
from . import lines, reports
from .budget_file import BudgetFile, CellBudget, Wanted, environment_of, read_budget, record_cell, write_budget
from .judge import MAXIMA, PARTS, Finding, Limit, beyond_psi, judge_cell, show_value
from .limits import GateError, HandLimit, Request, Sizes, hand_limits

MEMORY = ("peak_bytes", "growth_bytes", "states_bytes", *MAXIMA)
TRAFFIC = ("volume_psi", *PARTS, "wire_bytes", "control_bytes")
"""Metrics that are recorded: they repeat to the byte; traffic only if there are several ranks."""


@dataclass(frozen=True)
class Home:
    """Location of a test's record. `nodeid`: the test, in pytest's notation."""

    path: Path
    nodeid: str

    @property
    def how(self) -> str:
        """Explains how to record the test."""
        return f"record it with: pytest '{self.nodeid}' --zerobench-record, and commit {self.path.name}"


def measured(results: Results, name: str) -> dict[str, Any]:
    """Returns the row of a watch as plain values, under the name of its cell."""
    row = to_records(results.runs.iloc[:1])[0]
    metrics = (*MEMORY, *(TRAFFIC if row["world_size"] > 1 else ()))
    about = ("status", "reason", "data", "commit", "source_hash", "torch_version", "processor", "cores")
    plain = {key: row[key] for key in (*metrics, *about)}
    environment = environment_of(row["device_class"], row["torch_version"])
    by_line = lines.plain(lines.line_tables(results.lines))
    return plain | {"name": name, "work": None, "environment": environment, "lines": by_line}


def recorded_budget(home: Home, name: str, environment: str) -> CellBudget:
    """Returns a watch's recorded limits, including those for any environment. Raises GateError with the command to
    record.
    """
    if not home.path.is_file():
        raise GateError(f"zerobench: {name} has no limit and no record; give its marker a limit, or {home.how}")
    file = read_budget(home.path)
    cells = [cell for cell_name, cell in file.of(environment) if cell_name == name]
    if cells:
        limits = {metric: limit for cell in cells for metric, limit in cell.limits.items()}
        return CellBudget(None, limits, lines=cells[-1].lines)
    others = [other for other, budgets in file.environments.items() if name in budgets.cells]
    where = f"for {environment}; there is one for: {', '.join(others)}" if others else f"in {home.path.name}"
    raise GateError(f"zerobench: {name} has no record {where}; {home.how}")


def write(recorded: Iterable[tuple[str, dict[str, Any]]]) -> list[str]:
    """Writes rows to the budget files at their paths, keeping manual ceilings and tolerances. Returns messages."""
    messages: list[str] = []
    by_path: dict[str, list[dict[str, Any]]] = {}
    for path, row in recorded:
        by_path.setdefault(path, []).append(row | {"lines": lines.parse_lines(row["lines"])})
    for path, rows in sorted(by_path.items()):
        file = read_budget(Path(path)) if Path(path).is_file() else BudgetFile(Path(path))
        names = {str(row["name"]) for row in rows}
        for row in sorted(rows, key=lambda row: str(row["name"])):
            changes, _ = record_cell(file, row, Wanted((*MEMORY, *TRAFFIC)), names)
            for cell, metric, before, now, by, *cause in (change.row for change in changes if change.metric):
                moved = "; ".join(filter(None, cause))
                messages.append(f"{cell}: {metric}: {before} before, {now} now: {by}{f' ({moved})' if moved else ''}")
        write_budget(file)
        messages.append(f"{path}: {show_count(len(rows), 'record')} written")
    return messages


MOST_LINES = 4
"""Most lines of code that a failure names per limit."""


@dataclass(frozen=True)
class WatchedByTest:
    """A watch of a test."""

    name: str
    """The name of its cell."""
    watch: Watch
    unit: int
    """Bytes of the model's largest unit."""
    limits: tuple[HandLimit, ...] | None
    """None for the marker's."""


class Watches:
    """Makes the watches of a test: `zerobench.watch` with the test's name. Called once, or several times by name."""

    def __init__(self, test: str, prefix: str, to: Path | None) -> None:
        self._test, self._prefix, self._to = test, prefix, to
        self.made: dict[str, WatchedByTest] = {}

    def __call__(
        self, model: Any, optimizer: Any = None, *, name: str = "", limits: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Watch:  # fmt: skip
        """Returns a watch; `options` are those of `zerobench.watch`.

        name     distinguishes several watches of a test
        limits   of this watch, instead of the marker's, such as {"peak": "<= 24 GiB"}

        Raises GateError if the name is taken, and the errors of Watch.
        """
        cell = f"{self._test} {name}".strip()
        if cell in self.made:
            raise GateError(f"zerobench_watch: {cell} has been watched; give each watch of a test a name= of its own")
        hand = None if limits is None else hand_limits(limits)
        watch = Watch(model, optimizer, name=f"{self._prefix}{cell}", **({"to": self._to} | options))
        self.made[cell] = WatchedByTest(cell, watch, largest_unit_bytes(watch.model), hand)
        return watch

    def end(self) -> None:
        """Removes the hooks of watches that the test left running."""
        for watched in self.made.values():
            if watched.watch.state not in (NEW, STOPPED):
                watched.watch.stop(GateError("the test has ended"))


def largest_unit_bytes(model: nn.Module) -> int:
    """Returns the bytes of the largest group of parameters that FSDP2 gathers at a time; for other models, of the
    largest unit of stage 3: a block, or all parameters outside of blocks.
    """
    modules = [(name, m, [kind.__name__ for kind in type(m).__mro__]) for name, m in model.named_modules()]
    grouped = [(name, m) for name, m, kinds in modules if "FSDPModule" in kinds]
    units = [(name, m) for name, m in grouped if m is not model] if grouped else default_units(model)
    sums: dict[str, int] = {}
    for parameter, unit in unit_of_parameters(model, units).items():
        numel = getattr(parameter, "ds_numel", None) or parameter.numel()
        sums[unit] = sums.get(unit, 0) + numel * parameter.element_size()
    return max(sums.values(), default=0)


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
    for watched in made:
        watch = watched.watch
        if watch.state != STOPPED:
            raise GateError(
                f"zerobench: the watch of {watched.name} is {watch.state}; leave it: write it as a with statement"
            )
        if watch.results is not None:
            _judge_watch(watched, watch.results, request, home, record, verdict)
    return verdict


def _judge_watch(
    watched: WatchedByTest, results: Results, request: Request, home: Home, record: bool, verdict: GateVerdict
) -> None:
    row, name = measured(results, watched.name), watched.name
    if row["status"] != "ok":
        done = "recorded" if record else "judged"
        raise GateError(f"zerobench: {name}: {row['status']}: {row['reason']}; nothing was {done}")
    sections = _Sections(results, lines.line_tables(results.lines))
    total = sections.check_hand(watched, request.limits if watched.limits is None else watched.limits)
    if request.recorded and watched.limits is None:
        if record:
            verdict.recorded.append(row)
        else:
            total += sections.check_recorded(name, recorded_budget(home, name, row["environment"]), verdict)
    if sections.texts:
        failed = ", ".join(finding.metric for finding in sections.findings)
        world, broken = sections.row["world_size"], f"{len(sections.texts)} of {total} limits broken"
        where = f"{world} ranks on {sections.row['backend']}" if world > 1 else f"one rank on {sections.row['device']}"
        head = f"{name}: {failed}: {broken} ({sections.row['strategy']}, {where})"
        verdict.failures.append("\n".join([head, *sections.texts]))
        if reports.is_github():
            verdict.notes += reports.commands_of(sections.findings, reports.repository_root())


class _Sections:
    """The messages on one watch's broken limits."""

    def __init__(self, results: Results, now: lines.Lines) -> None:
        self.results, self.now = results, now
        self.row: dict[Any, Any] = results.runs.iloc[0].to_dict()
        self.texts: list[str] = []
        self.findings: list[Finding] = []

    def check_hand(self, watched: WatchedByTest, limits: Iterable[HandLimit]) -> int:
        """Checks manual limits; returns their number."""
        limits, sizes = tuple(limits), Sizes(int(self.row["psi"] or 0), watched.unit)
        for hand in limits:
            limit = hand.of(sizes)
            for finding in judge_cell(watched.name, {hand.metric: limit}, self.row):
                if finding.kind != "improvement" or not hand.bound:
                    self._add(finding, [f"written as {hand.written}"], {}, limit)
        return len(limits)

    def check_recorded(self, name: str, budget: CellBudget, verdict: GateVerdict) -> int:
        """Checks recorded limits; values below them become notes. Returns the number of limits."""
        for finding in judge_cell(name, budget.limits, self.row):
            if finding.kind == "improvement":
                verdict.notes.append(finding.sentence)
            else:
                self._add(finding, [], budget.lines, budget.limits[finding.metric])
        return len(budget.limits)

    def _add(self, finding: Finding, about: list[str], before: lines.Lines, limit: Limit) -> None:
        """Adds a broken limit, with the lines of code that changed since the record, or else those with the most bytes
        of the categories that exceed it.
        """
        metric, code_lines = finding.metric, list[lines.CodeLine]()
        # lines that have grown, without those that only replace others, such as rebuilt buckets
        growth, net = self.now.get("growth", lines.LineTable()), Counter[tuple[str, str]]()
        for line in growth.lines:
            net[line.category, line.name] += line.bytes
        growth = replace(growth, lines=tuple(line for line in growth.lines if net[line.category, line.name] > 0))
        if metric == "growth_bytes":
            sizes = Counter[str]()
            for line in growth.lines:
                sizes[line.category] += line.bytes
            about += [
                f"of the growth most is {n}: {show_value('peak_bytes', size)}" for n, size in sizes.most_common(1)
            ]
        if not pd.isna(self.row[metric]):
            by = float(self.row[metric]) - limit.value
            code_lines = [line.code_line for line in lines.lines_behind(metric, by, before, self.now, MOST_LINES)]
            code_lines = code_lines or lines.largest_lines(
                metric, self.now | {"growth": growth}, beyond_psi(metric, by, self.row), MOST_LINES
            )
        details = ["; ".join(about)] if about else []
        details += [*(line.sentence for line in code_lines), *self._traffic(metric)]
        self.findings.append(replace(finding, code_lines=tuple(code_lines)))
        sentence = finding.sentence.removeprefix(f"{finding.cell}: ")
        self.texts.append("\n".join([f"  {sentence}", *(f"    {detail}" for detail in details)]))

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
        messages = []
        for row in largest.itertuples():
            psi = row.volume_elements / self.row["psi"] if self.row["psi"] else 0.0
            title = f"{row.by} in {row.phase}" + (f" of {row.unit}" if row.unit else "")
            payload = f"{show_value('payload_bytes', row.payload_bytes)} of {row.dtype}"
            calls = f"{show_count(int(row.calls), 'call')} in a group of {row.group_size}"
            messages.append(f"{title}: {psi:.4g} ψ, {payload}, {calls}")
        return messages
