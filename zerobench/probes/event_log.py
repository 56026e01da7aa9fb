"""A step event by event: what changes no storage (collectives, modules, units, updates) is recorded in the ledger, and
rows of the table `events` are made from its log.

A log exists only if the table is requested, or predicted times.

Waits for collectives that Python launches and waits for itself: a process group's method returns a *work*, whose
`wait` returns when the collective is done. Our engine's collectives are reported by its handles (zero/comm/base.py),
of which one may wait for many works. Collectives that C++ launches or waits for by itself, as DDP's reducer does, are
not seen here.

FSDP2's units come from its marks for torch's profiler: "FSDP::all_gather (blocks.0)"; the root has no name. A mark
begins and ends with an operator of the namespace `profiler`, which a dispatch mode sees, with or without a profiler::

    FSDP::all_gather, FSDP::post_backward_reduce        collectives inside are the unit's
    FSDP::all_gather_copy_out                           the unit's full parameters are present at its end
    FSDP::post_forward, FSDP::post_backward_reshard     the unit is freed if parameter memory was freed inside

Rows are in the order of the events; storages and operations are numbered from 0. The harness's own work within a step
is left out: its changes of storages are written where the next phase begins, frees before births, so that no sum in
between exceeds the ledger's.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any, NamedTuple
from unittest import mock
from weakref import WeakKeyDictionary

import torch
from torch.autograd.graph import register_multi_grad_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..records import STATES, EventRow, long_rows
from ..zero import labels
from ..zero.modules.wrapping import tensors_that_require_grad
from .intervals import ASIDE, Event, Interval, IntervalReplay, StorageRecord
from .labeling import parts_of
from .ledger import Ledger
from .traffic import THREAD, Operation, TrafficMeter, is_of_step

BY_NO_HANDLE = ("", "control")
"""Logical collectives that no handle of the engine waits for."""

LAUNCHES = (
    "_allgather_base", "_reduce_scatter_base", "all_gather_single", "all_gather_single_coalesced", "all_to_all_single",
    "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce", "allreduce_coalesced",
    "alltoall", "alltoall_base", "broadcast", "gather", "reduce", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "scatter", "send",
)  # fmt: skip
"""Methods of a process group that launch a collective; for each torch version those that exist."""


@contextmanager
def works_watched(launched: Callable[[], int | None], waited: Callable[[int], None]) -> Iterator[None]:
    """Calls `waited(operation)` after each work's first wait. `launched()`: this thread's last operation."""
    c10d: Any = torch._C._distributed_c10d
    works: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # weak: a work that lives on may keep its tensors alive

    def watched(wait: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(wait)
        def call(work: Any, *args: Any, **kwargs: Any) -> Any:
            result = wait(work, *args, **kwargs)
            operation = works.pop(work, None)
            if operation is not None:
                waited(operation)
            return result

        return call

    def followed(launch: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(launch)
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            before = launched()
            work = launch(group, *args, **kwargs)
            operation = launched()
            if work is not None and operation not in (None, before) and labels.current_collective()[0] in BY_NO_HANDLE:
                works[work] = operation
            return work

        return call

    kinds = [c10d.Work]  # and its subclasses, of which some override `wait`
    for kind in kinds:
        kinds += kind.__subclasses__()
    with ExitStack() as stack:
        for kind in kinds:
            if "wait" in vars(kind):
                stack.enter_context(mock.patch.object(kind, "wait", watched(kind.wait)))
        for name in filter(partial(hasattr, c10d.ProcessGroup), LAUNCHES):
            launch = getattr(c10d.ProcessGroup, name)
            stack.enter_context(mock.patch.object(c10d.ProcessGroup, name, followed(launch)))
        yield


ENTER = "_record_function_enter_new"
MARKED_COLLECTIVES = ("all_gather", "post_backward_reduce")
GATHERS, RESHARDS = ("all_gather_copy_out",), ("post_forward", "post_backward_reshard")
ROOT = "(root)"
"""Unit of the parameters that are in no other, with the engine's name for its own."""

_MARK = re.compile(r"FSDP::(\w+)(?: \(([^)]*)\))?")


class Mark(NamedTuple):
    """A mark of FSDP2's that has begun: its event, its unit, and the number of the ledger's events before it."""

    what: str
    unit: str
    number: int


LINK_ENDS = {"down": labels.HOST, "up": labels.DEVICE, labels.READ: labels.HOST, labels.WRITE: labels.NVME}
"""Kind of traffic between tiers -> the tier that receives the bytes."""


class EventLog(labels.Observer):
    """Records events in a ledger; an observer of labels. `of_storages`: whether rows have those of storages, too."""

    def __init__(self, ledger: Ledger, of_storages: bool = True) -> None:
        self.ledger, self.of_storages = ledger, of_storages
        self.note = ledger.note
        self._unlabeled = 0
        self._launched: int | None = None
        self._unit_of: dict[int | None, str] = {}  # of what has been launched in any step and not been waited for
        self._engine_updates = False
        self._marks: list[Mark] = []  # those that have begun and not ended
        self.stream: Callable[[], int] = lambda: 0
        """Returns the number of the current stream, if operators are recorded as well (operator_stream.py)."""

    # -- events from the instruments -------------------------------------------------------------------

    def issued(self, operation: Operation, times: int) -> None:
        """Records `times` operations that the traffic meter has counted."""
        if not is_of_step(operation):
            return
        source, kind = self.ledger.lines.here(), operation.kind
        facts = {
            "dtype": operation.dtype, "operator": operation.operator, "bytes": operation.payload_bytes * times,
            "elements": operation.elements * times, "control": operation.control,
        }  # fmt: skip
        if kind in LINK_ENDS:
            self.note(long_rows.MOVE, source, name=operation.unit, collective=kind, tier=LINK_ENDS[kind], **facts)
            return
        if operation.collective:
            self._launched = labels.current_operation()
        else:
            self._launched = self._unlabeled = self._unlabeled - 1
        unit = next((mark.unit for mark in reversed(self._marks) if mark.what in MARKED_COLLECTIVES), "")
        unit = unit or ("" if operation.unit.startswith(THREAD) else operation.unit)
        self._unit_of[self._launched] = unit
        self.note(
            long_rows.LAUNCH, source, operation=self._launched, unit=unit, calls=times,
            collective=operation.collective or kind,
            group_size=operation.group_size, group=operation.group, wire_bytes=operation.wire_bytes * times,
            between_bytes=operation.between_bytes * times, stride=operation.stride, stream=self.stream(),
            **facts,
        )  # fmt: skip

    def launched(self) -> int | None:
        """Returns the number of the operation launched last, in any thread; None before the first."""
        return self._launched

    def marked(self, operator: str, args: Sequence[object]) -> None:
        """Processes an operator of the namespace `profiler`: FSDP2's units are gathered or freed at a mark's end."""
        if operator == ENTER:
            match = _MARK.match(str(args[0]))
            what, unit = (match[1], match[2] or ROOT) if match else ("", "")
            self._marks.append(Mark(what, unit, len(self.ledger.events)))
        elif self._marks:
            mark = self._marks.pop()
            if mark.what in GATHERS:
                size = sum(event.grown for event in self.ledger.events[mark.number :] if event.grown > 0)
                self.on_unit(labels.GATHERED, mark.unit, size)
            elif mark.what in RESHARDS:
                freed = (event for event in self.ledger.events[mark.number :] if event.grown < 0)
                size = -sum(e.grown for e in freed if e.stored and e.stored.category == labels.PARAMETERS)
                if size:
                    self.on_unit(labels.FREED, mark.unit, size)

    def module_begins(self, name: str, operator: str = "forward") -> None:
        """Records that a module's forward begins, also in a recomputation, or its backward."""
        self.note(long_rows.MODULE, name=name, operator=operator)

    def module_ends(self, name: str, output: object) -> None:
        """Records that a module's forward has ended; its backward begins with the first gradient of its output."""
        self.note(long_rows.MODULE_END, name=name, operator="forward")
        tensors = [tensor for tensor in tensors_that_require_grad(output) if tensor.grad_fn is not None]
        if tensors and torch.is_grad_enabled():
            register_multi_grad_hook(tensors, lambda _: self.module_begins(name, "backward"), mode="any")

    def optimizer_steps(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Records that an optimizer is about to update parameters with gradients, if no engine reports it."""
        if self._engine_updates:
            return
        sizes: Counter[tuple[str, str]] = Counter()
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            for part in parts_of(parameter.detach()) if parameter.grad is not None else ():
                stored = self.ledger.record_of(part)
                sizes[stored.first_name if stored is not None else "", self.ledger.tier_of(part)] += part.nbytes
        self.note(long_rows.UPDATE, self.ledger.lines.here(), by_label=sizes)

    # -- events from the engine ------------------------------------------------------------------------

    def on_unit(self, kind: str, unit: str, size: int) -> None:
        self.note(kind, self.ledger.lines.here(), unit=unit, bytes=size)

    def on_update(self, parts: Sequence[labels.Updated]) -> None:
        self._engine_updates = True
        sizes: Counter[tuple[str, str]] = Counter()
        for part in parts:
            sizes[part.unit_name, part.tier] += part.tensor.nbytes
        self.note(long_rows.UPDATE, self.ledger.lines.here(), by_unit=sizes)

    def on_wait(self, operation: int) -> None:
        unit = self._unit_of.pop(operation, "")
        self.note(long_rows.WAIT, self.ledger.lines.here(), operation=operation, unit=unit, stream=self.stream())


@contextmanager
def listening(log: EventLog, meter: TrafficMeter) -> Iterator[None]:
    """Makes the instruments and the engine report their events to `log`."""
    log.ledger.log, meter.on_operation = log, log.issued
    labels.listen(log)
    hook = register_optimizer_step_pre_hook(log.optimizer_steps)
    try:
        with works_watched(log.launched, log.on_wait):
            yield
    finally:
        hook.remove()
        labels.unlisten(log)


# -- rows ------------------------------------------------------------------------------------------

FIRST_PHASE = "data"

SAME = ("operation", "collective", "unit", "operator", "group_size", "group", "control")
"""Columns that a wait copies from its launch."""


def event_rows(rank: int, interval: Interval, of_storages: bool = True) -> list[EventRow]:
    """Returns a rank's rows, in order. `of_storages`: with events of storages."""
    rows = list(_EventWriter(rank, interval, of_storages).rows())
    # numbers the micro-batches: rows of the phase "data" belong to the next forward, all others to the previous one
    number = -1
    waiting: list[EventRow] = []
    for row in rows:
        if row.kind == long_rows.PHASE and row.name == "forward":
            number += 1
            for earlier in waiting:
                earlier.micro_batch = number
        if row.kind == long_rows.PHASE:
            waiting = []
        row.micro_batch = max(number, 0)
        waiting += [row] if row.phase == FIRST_PHASE else []
    return rows


class _EventWriter:
    """Replays a step. `_shown`: size and category of each storage after the last row."""

    def __init__(self, rank: int, interval: Interval, of_storages: bool) -> None:
        self._rank, self._interval, self._of_storages = rank, interval, of_storages
        self._numbers: dict[StorageRecord, int] = {}
        self._operations: dict[int, int] = {}
        self._replay = IntervalReplay(interval)
        self._shown: dict[StorageRecord, tuple[int, str]] = {}
        self._aside: dict[StorageRecord, None] = {}
        self._phase = ""
        self._index, self._seconds = 0, 0.0
        self._launches: dict[int, dict[str, Any]] = {}
        self._orders = any(event.kind == long_rows.COMPUTE for event in interval.log)
        units = {name for event in interval.log for name, _ in event.facts.get("by_unit", ())}
        units |= {event.facts.get("unit", "") for event in interval.log if not event.facts.get("control")}
        self._units = sorted(units - {"", ROOT}, key=len, reverse=True)
        self._rest = ROOT if ROOT in units else ""

    def rows(self) -> Iterator[EventRow]:
        """Yields the rows, the storages at the step's begin first; to be called once."""
        self._phase = FIRST_PHASE
        for stored, size in self._interval.sizes.items() if self._of_storages else ():
            self._shown[stored] = size, self._interval.categories[stored]
            if size:
                yield self._of_storage(long_rows.LIVE, stored, self._interval.began, *self._shown[stored])
        self._phase = ""
        for event in self._interval.log:
            yield from self._without_storage(event) if event.kind else self._change(event)

    def _change(self, event: Event) -> Iterator[EventRow]:
        stored = event.stored if self._of_storages else None
        if stored is not None:
            self._replay.take(event)
        if event.phase == ASIDE:
            if stored is not None:
                self._aside[stored] = None
            return
        if event.phase != self._phase:  # its row comes after the changes that the harness made
            self._phase = event.phase
            for changed in sorted(self._aside, key=self._growth):
                yield from self._settle(changed, event.at, "")
            self._aside.clear()
            yield self._row(long_rows.PHASE, event.at, name=event.phase)
        if stored is not None:
            yield from self._settle(stored, event.at, event.source)

    def _growth(self, stored: StorageRecord) -> int:
        return self._replay.now(stored)[0] - self._shown.get(stored, (0, ""))[0]

    def _settle(self, stored: StorageRecord, at: float, source: str) -> Iterator[EventRow]:
        """Yields a storage's change of category, then of size."""
        now, then = self._replay.now(stored), self._shown.get(stored)
        size, category = then or (0, now[1])
        if category != now[1]:
            yield self._of_storage(long_rows.LABEL, stored, at, size, now[1], previous=category)
        if now[0] > size:
            yield self._of_storage(long_rows.BIRTH, stored, at, now[0] - size, now[1], source)
        elif now[0] < size:
            yield self._of_storage(long_rows.FREE, stored, at, size - now[0], now[1], source)
        self._shown[stored] = now

    def _without_storage(self, event: Event) -> Iterator[EventRow]:
        """Yields an event without a storage; during the harness's own work only the traffic of the step's threads."""
        if event.phase == ASIDE and event.kind not in (long_rows.LAUNCH, long_rows.MOVE):
            return
        phase = self._phase if event.phase == ASIDE else event.phase
        common = {"module": event.module, "source": event.source, "phase": phase}
        if event.kind == long_rows.UPDATE:  # one per unit and tier, and one for parameters in no unit
            sums = Counter(event.facts.get("by_unit", {}))
            for (name, tier), size in event.facts.get("by_label", {}).items():
                sums[self._unit_of(name) or self._rest, tier] += size
            for (unit, tier), size in sums.items():
                yield self._row(
                    long_rows.UPDATE, event.at, event.phase, source=event.source, unit=unit, tier=tier, bytes=size
                )
        elif event.kind != long_rows.WAIT:
            facts = dict(event.facts)
            if event.kind == long_rows.LAUNCH:
                facts["operation"] = self._operations.setdefault(facts["operation"], len(self._operations))
                self._launches[event.facts["operation"]] = {key: facts[key] for key in SAME}
            yield self._row(event.kind, event.at, **common, **facts)
        elif (same := self._launches.pop(event.facts["operation"], None)) is not None:
            yield self._row(long_rows.WAIT, event.at, **common, **same, stream=event.facts.get("stream", 0))
        elif self._orders:  # of the step before, which only predictions of time ask for
            stream, unit = event.facts.get("stream", 0), event.facts.get("unit", "")
            yield self._row(long_rows.ORDER, event.at, **common, operator=long_rows.LATE, unit=unit, stream=stream)

    def _of_storage(
        self, kind: str, stored: StorageRecord, at: float, size: int, category: str, source: str = "",
        previous: str = "",
    ) -> EventRow:  # fmt: skip
        number = self._numbers.setdefault(stored, len(self._numbers))
        unit = self._unit_of(stored.first_name) or self._unit_of(stored.name)
        unit = unit or (self._rest if category in STATES and stored.labeled else self._unit_of(stored.module))
        return self._row(
            kind, at, storage=number, bytes=size, category=category, previous=previous, name=stored.name, unit=unit,
            module=stored.module, source=source or stored.source, tier=stored.tier,
        )  # fmt: skip

    def _unit_of(self, name: str) -> str:
        """Returns the unit of a label or a module's path: the longest unit that it equals or begins with."""
        if name == self._rest:
            return name
        return next((unit for unit in self._units if name == unit or name.startswith((f"{unit}.", f"{unit} "))), "")

    def _row(self, kind: str, at: float, phase: str = "", **facts: Any) -> EventRow:
        self._index += 1
        self._seconds = max(self._seconds, at - self._interval.began)  # threads' clocks are read before they append
        return EventRow(self._rank, self._index - 1, self._seconds, phase or self._phase, kind, 0, **facts)
