"""The recorded step of every rank as one trace in Chrome's format, which https://ui.perfetto.dev opens.

process     a rank of a run
thread      a track of a process: phases, modules in forward and in backward, collectives, units, updates and moves;
            spans that overlap in a track are spread over lanes, such as "collectives 2"
counter     live bytes of a tier and category, from the storages' events
time        microseconds since the rank's step began: ranks have no common clock

    phase         to the beginning of the next phase
    forward       of a module: from its beginning to its end
    backward      of a module: from a gradient at its output until backward reaches a module that is not inside it
    collective    from its first launch until a wait for it has returned; if C++ waits, to the end of its phase
    unit          while its full parameters exist
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd

from ..records import CATEGORIES, TIERS
from ..results.options import refuse_folders
from ..results.tables import Results

Entry = dict[str, Any]

TRACKS = ("phases", "forward", "backward", "collectives", "units", "updates and moves")
LANES = 100
"""Most lanes of a track: a lane's thread has the number track · LANES + lane."""

NO_EVENTS = (
    "no run here has a table of events; run with measure.events=true, as in: zerobench strategy=zero3 world_size=2"
    " measure.events=true"
)


@dataclass
class TraceSpan:
    """A stretch of one track, from `begin` to `end`, in seconds."""

    track: str
    name: str
    begin: float
    end: float
    facts: Entry = field(default_factory=dict)


def write_perfetto(results: Results, out: Path) -> str:
    """Writes one trace of all ranks of all runs; gzipped if `out` ends in .gz. Raises ValueError without any events."""
    refuse_folders(out=out)
    with_events = set(results.events["run_id"])
    recorded = [run for run in results.runs.query("status == 'ok'")["run_id"] if run in with_events]
    if not recorded:
        raise ValueError(f"--format perfetto: {NO_EVENTS}")
    entries: list[Entry] = []
    ranks = 0
    for run in recorded:
        for rank, stream in streams_by_rank(results.events[results.events["run_id"] == run]).items():
            ranks += 1
            entries += process(ranks, f"{run} rank {rank}", stream)
    trace = {"traceEvents": entries, "displayTimeUnit": "ms"}
    text = json.dumps(trace, allow_nan=False, default=lambda number: number.item())  # a table's numbers are numpy's
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}")
    partial.write_bytes(gzip.compress(text.encode(), mtime=0) if out.suffix == ".gz" else text.encode())
    partial.replace(out)
    return f"{out}: {len(entries)} entries, {ranks} ranks, {len(recorded)} of {len(results.runs)} runs; open it at https://ui.perfetto.dev"


def streams_by_rank(events: pd.DataFrame) -> dict[int, pd.DataFrame]:
    """Returns rank -> its stream, from the events of one run."""
    return {
        int(str(rank)): stream.sort_values("index", ignore_index=True)
        for rank, stream in events.groupby("rank", sort=True)
    }


def process(number: int, name: str, events: pd.DataFrame) -> list[Entry]:
    """Returns the entries of one rank: its names, spans and counters. `events`: of one run and rank, in order."""
    all_of_rank = all_spans(list(events.itertuples(index=False)))
    entries = [_told("process_name", number, 0, name=name), _told("process_sort_index", number, 0, sort_index=number)]
    for index, track in enumerate(TRACKS):
        spans = [span for span in all_of_rank if span.track == track]
        spans.sort(key=lambda span: (span.begin, -span.end))
        nested = track in ("forward", "backward")
        for lane, lane_spans in enumerate([spans] if nested else lanes(spans)):
            thread = (index + 1) * LANES + min(lane, LANES - 1)
            entries.append(_told("thread_name", number, thread, name=track if not lane else f"{track} {lane + 1}"))
            entries.append(_told("thread_sort_index", number, thread, sort_index=thread))
            for span in lane_spans:
                begin = _us(span.begin)
                entry = {"ph": "X", "pid": number, "tid": thread, "name": span.name, "ts": begin}
                duration = max(0.0, _us(span.end) - begin)
                entries.append(entry | {"dur": duration, "cat": span.track, "args": span.facts})
    return entries + list(counters(number, events))


def all_spans(rows: list[Any]) -> list[TraceSpan]:
    """Returns the spans of all tracks."""
    end = rows[-1].seconds
    phases = [row for row in rows if row.kind == "phase"]
    ends = [row.seconds for row in phases[1:]] + [end]
    spans = [TraceSpan("phases", row.name, row.seconds, last) for row, last in zip(phases, ends, strict=True)]
    spans += [*_forwards(rows), *_backwards(rows, spans), *_collectives(rows, spans), *_units(rows, end)]
    for row in rows:
        if row.kind in ("update", "move"):
            what = row.unit or "all" if row.kind == "update" else row.name or "unnamed"
            title = f"update of {what}" if row.kind == "update" else f"{row.collective}: {what}"
            facts = {"bytes": row.bytes, "tier": row.tier, "source": row.source}
            spans.append(TraceSpan("updates and moves", title, row.seconds, row.seconds, facts))
    return spans


def _forwards(rows: list[Any]) -> Iterator[TraceSpan]:
    running: list[Any] = []
    for row in rows:
        if row.kind == "module" and row.operator == "forward":
            running.append(row)
        elif row.kind == "module_end" and running:
            begun = running.pop()
            yield TraceSpan("forward", begun.name or "model", begun.seconds, row.seconds, {"phase": begun.phase})


def _backwards(rows: list[Any], phases: list[TraceSpan]) -> Iterator[TraceSpan]:
    running: list[Any] = []

    def over(at: float, name: str | None) -> Iterator[TraceSpan]:
        while running:
            module = running[-1].name  # empty for the whole model
            if name is not None and name != module and (not module or name.startswith(f"{module}.")):
                return  # the module `name` is inside it
            begun = running.pop()
            yield TraceSpan("backward", begun.name or "model", begun.seconds, at)

    for row in rows:
        if row.kind == "phase":
            yield from over(row.seconds, None)
        elif row.kind == "module" and row.operator == "backward":
            yield from over(row.seconds, row.name)
            running.append(row)
    yield from over(phases[-1].end if phases else 0.0, None)


def _collectives(rows: list[Any], phases: list[TraceSpan]) -> Iterator[TraceSpan]:
    waits: dict[Any, float] = {}
    launches: dict[int, list[Any]] = {}
    for row in rows:
        if row.kind == "wait":
            waits.setdefault(row.operation, row.seconds)
        elif row.kind == "launch":
            launches.setdefault(int(row.operation), []).append(row)
    for operation, launched in launches.items():
        first, end = launched[0], waits.get(operation)
        if end is None:
            end = next((phase.end for phase in reversed(phases) if phase.begin <= first.seconds), first.seconds)
        sums = {
            "payload_bytes": "bytes", "wire_bytes": "wire_bytes", "between_nodes_bytes": "between_bytes",
            "operations": "calls",
        }  # fmt: skip
        facts = {name: sum(getattr(row, column) for row in launched) for name, column in sums.items()}
        facts |= {"operator": first.operator, "dtype": first.dtype, "ranks": first.group_size, "source": first.source}
        yield TraceSpan("collectives", f"{first.collective} {first.unit}".strip(), first.seconds, end, facts)


def _units(rows: list[Any], end: float) -> Iterator[TraceSpan]:
    there: dict[str, Any] = {}
    for row in rows:
        if row.kind == "unit_gathered":
            there[row.unit] = row
        elif row.kind == "unit_freed" and row.unit in there:
            begun = there.pop(row.unit)
            yield TraceSpan("units", row.unit, begun.seconds, row.seconds, {"bytes": begun.bytes})
    for unit, begun in there.items():
        yield TraceSpan("units", unit, begun.seconds, end, {"bytes": begun.bytes})


def lanes(spans: Iterable[TraceSpan]) -> list[list[TraceSpan]]:
    """Spreads spans, ordered by their beginning, over lanes without overlap."""
    filled: list[list[TraceSpan]] = []
    for span in spans:
        free = next((lane for lane in filled if lane[-1].end <= span.begin), None)
        if free is None:
            filled.append(free := [])
        free.append(span)
    return filled


SIGNS = {"live": 1, "birth": 1, "free": -1, "label": 1}
"""Kind of an event -> sign of its bytes in the sum of its own category."""


def live_bytes(events: pd.DataFrame) -> pd.DataFrame:
    """Returns the sums after each event of one run and rank: index as `events`, columns (tier, category), int64, bytes.

    A tier without live bytes has columns of zeros.
    """
    signs = events["kind"].astype("object").map(SIGNS).fillna(0).astype("int64")
    changes = events["bytes"].astype("int64") * signs
    relabeled = events["bytes"].where(events["kind"] == "label", 0).astype("int64")
    sums = {
        (tier, category): (
            changes.where((events["tier"] == tier) & (events["category"] == category), 0)
            - relabeled.where((events["tier"] == tier) & (events["previous"] == category), 0)
        ).cumsum()
        for tier in TIERS
        for category in CATEGORIES
    }
    return pd.DataFrame(sums, index=events.index).astype("int64")


def counters(number: int, events: pd.DataFrame) -> Iterator[Entry]:
    """Yields live bytes by tier and category at each change, except where they are always zero."""
    times = [_us(at) for at in events["seconds"]]
    live = live_bytes(events)
    for tier, category in product(TIERS, CATEGORIES):
        sums, last = live[tier, category], 0
        for at, value in zip(times, sums, strict=True):
            if value != last:
                yield {"ph": "C", "pid": number, "name": f"{tier} {category}", "ts": at, "args": {"bytes": int(value)}}
                last = value


def _told(what: str, number: int, thread: int, **facts: str | int) -> Entry:
    return {"ph": "M", "pid": number, "tid": thread, "name": what, "args": facts}


def _us(seconds: float) -> float:
    return round(float(seconds) * 1e6, 3)
