"""Records a step's events that change no storage in the ledger: collectives, modules, units, updates.

A log exists only if the table `events` is requested, or predicted times.

Waits for collectives that Python launches and waits for itself: a process group's method returns a *work*, whose
`wait` returns when the collective is done.

Our engine's collectives are reported by its handles (zero/comm/streams.py), of which one may wait for many works.
Collectives that C++ launches or waits for by itself, as DDP's reducer does, are not seen here.

FSDP2's units come from its marks for torch's profiler: "FSDP::all_gather (blocks.0)"; the root has no name. A mark
begins and ends with an operator of the namespace `profiler`, which a dispatch mode sees, with or without a profiler::

    FSDP::all_gather, FSDP::post_backward_reduce        collectives inside are the unit's
    FSDP::all_gather_copy_out                           the unit's full parameters are present at its end
    FSDP::post_forward, FSDP::post_backward_reshard     the unit is freed if parameter memory was freed inside
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, NamedTuple
from unittest import mock
from weakref import WeakKeyDictionary

import torch
from torch.autograd.graph import register_multi_grad_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..records.long_rows import LAUNCH, MODULE, MODULE_END, MOVE, UPDATE, WAIT
from ..zero import labels
from ..zero.modules.wrapping import tensors_that_require_grad
from .intervals import Event, Interval
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
    """Calls `waited(operation)` when the first wait for each work has returned.

    `launched`: returns the number of the operation launched last on this thread, or None.
    """
    c10d: Any = torch._C._distributed_c10d
    works: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # weak: a work that lives on may keep its tensors alive
    launches = [name for name in LAUNCHES if hasattr(c10d.ProcessGroup, name)]
    with ExitStack() as stack:
        for kind in _kinds(c10d.Work):
            if "wait" in vars(kind):
                stack.enter_context(mock.patch.object(kind, "wait", _told(kind.wait, waited, works)))
        for name in launches:
            followed = _followed(getattr(c10d.ProcessGroup, name), launched, works)
            stack.enter_context(mock.patch.object(c10d.ProcessGroup, name, followed))
        yield


def _kinds(work: Any) -> list[Any]:
    """Returns a class of works and its subclasses: some override `wait`."""
    return [work, *(one for below in work.__subclasses__() for one in _kinds(below))]


def _told(wait: Callable[..., Any], waited: Callable[[int], None], works: WeakKeyDictionary[Any, int]) -> Any:
    @wraps(wait)
    def wait_and_tell(work: Any, *args: Any, **kwargs: Any) -> Any:
        result = wait(work, *args, **kwargs)
        operation = works.pop(work, None)
        if operation is not None:
            waited(operation)
        return result

    return wait_and_tell


def _followed(
    method: Callable[..., Any], launched: Callable[[], int | None], works: WeakKeyDictionary[Any, int]
) -> Callable[..., Any]:
    @wraps(method)
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        before = launched()
        work = method(group, *args, **kwargs)
        operation = launched()
        if work is not None and operation not in (None, before) and labels.current_collective()[0] in BY_NO_HANDLE:
            works[work] = operation
        return work

    return call


class EventLog(labels.Observer):
    """Records events in a ledger; an observer of labels. `step`: the last interval that ended. `of_storages`: whether
    its rows have the events of storages, too.
    """

    def __init__(self, ledger: Ledger, of_storages: bool = True) -> None:
        self.ledger, self.of_storages = ledger, of_storages
        self.step: Interval | None = None
        self._unlabeled = 0
        self._launched: int | None = None
        self._unit_of: dict[int | None, str] = {}  # of what has been launched in any step and not been waited for
        self._engine_updates = False
        self._marks = FsdpMarks(ledger.since, self.on_unit)
        self.stream: Callable[[], int] = lambda: 0
        """Returns the number of the current stream, if operators are recorded as well (operator_stream.py)."""

    def end(self, interval: Interval) -> None:
        """Ends the interval, which becomes `step`."""
        self.step = interval

    def note(self, kind: str, source: str = "", **facts: Any) -> None:
        """Records an event of `kind`; `facts`: values of columns."""
        self.ledger.note(kind, source, facts)

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
            self.note(MOVE, source, name=operation.unit, collective=kind, tier=LINK_ENDS[kind], **facts)
            return
        if operation.collective:
            self._launched = labels.current_operation()
        else:
            self._launched = self._unlabeled = self._unlabeled - 1
        unit = self._marks.unit or ("" if operation.unit.startswith(THREAD) else operation.unit)
        self._unit_of[self._launched] = unit
        self.note(
            LAUNCH, source, operation=self._launched, unit=unit, calls=times, collective=operation.collective or kind,
            group_size=operation.group_size, group=operation.group, wire_bytes=operation.wire_bytes * times,
            between_bytes=operation.between_bytes * times, stride=operation.stride, stream=self.stream(),
            **facts,
        )  # fmt: skip

    def launched(self) -> int | None:
        """Returns the number of the operation launched last, in any thread; None before the first."""
        return self._launched

    def marked(self, operator: str, args: Sequence[object]) -> None:
        """Processes a mark for torch's profiler, which FSDP2 makes for its units."""
        self._marks.see(operator, args, self.ledger.count())

    def module_begins(self, name: str) -> None:
        """Records that a module's forward begins, also in a recomputation."""
        self.note(MODULE, name=name, operator="forward")

    def module_ends(self, name: str, output: object) -> None:
        """Records that a module's forward has ended; its backward begins with the first gradient of its output."""
        self.note(MODULE_END, name=name, operator="forward")
        tensors = [one for one in tensors_that_require_grad(output) if one.grad_fn is not None]
        if tensors and torch.is_grad_enabled():
            register_multi_grad_hook(tensors, lambda _: self.backward_begins(name), mode="any")

    def backward_begins(self, name: str) -> None:
        """Records that a gradient has come to a module's output."""
        self.note(MODULE, name=name, operator="backward")

    def optimizer_steps(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Records that an optimizer is about to update parameters with gradients, if no engine reports it."""
        if self._engine_updates:
            return
        sizes: Counter[tuple[str, str]] = Counter()
        for parameter in (one for group in optimizer.param_groups for one in group["params"]):
            for part in parts_of(parameter.detach()) if parameter.grad is not None else ():
                stored = self.ledger.record_of(part)
                sizes[stored.first_name if stored is not None else "", self.ledger.tier_of(part)] += part.nbytes
        self.note(UPDATE, self.ledger.lines.here(), by_label=sizes)

    # -- events from the engine ------------------------------------------------------------------------

    def on_unit(self, kind: str, unit: str, size: int) -> None:
        """Records that a unit's full parameters are present, or freed."""
        self.note(kind, self.ledger.lines.here(), unit=unit, bytes=size)

    def on_update(self, parts: Sequence[labels.Updated]) -> None:
        """Records that the engine's optimizer is about to update `parts`."""
        self._engine_updates = True
        sizes: Counter[tuple[str, str]] = Counter()
        for one in parts:
            sizes[one.unit_name, one.tier] += one.tensor.nbytes
        self.note(UPDATE, self.ledger.lines.here(), by_unit=sizes)

    def on_wait(self, operation: int) -> None:
        """Records that a wait for a collective has returned."""
        unit = self._unit_of.pop(operation, "")
        self.note(WAIT, self.ledger.lines.here(), operation=operation, unit=unit, stream=self.stream())


@contextmanager
def listening(log: EventLog, meter: TrafficMeter) -> Iterator[None]:
    """Makes the instruments and the engine report their events to `log`."""
    log.ledger.log, meter.tell = log, log.issued
    labels.listen(log)
    hook = register_optimizer_step_pre_hook(log.optimizer_steps)
    try:
        with works_watched(log.launched, log.on_wait):
            yield
    finally:
        hook.remove()
        labels.unlisten(log)


LINK_ENDS = {"down": labels.HOST, "up": labels.DEVICE, labels.READ: labels.HOST, labels.WRITE: labels.NVME}
"""Kind of traffic between tiers -> the tier that receives the bytes."""


# -- units of FSDP2 --------------------------------------------------------------------------------


ENTER, EXIT = "_record_function_enter_new", "_record_function_exit"
MARKED_COLLECTIVES = ("all_gather", "post_backward_reduce")
GATHERS, RESHARDS = ("all_gather_copy_out",), ("post_forward", "post_backward_reshard")
ROOT = "(root)"
"""Unit of the parameters that are in no other, with the engine's name for its own."""

_MARK = re.compile(r"FSDP::(\w+)(?: \(([^)]*)\))?")


class Mark(NamedTuple):
    """A mark that has begun: its event, its unit, and the number of the ledger's events before it."""

    what: str
    unit: str
    number: int


class FsdpMarks:
    """Follows the marks. `tell(kind, unit, bytes)` is called when a unit is gathered or freed."""

    def __init__(self, events: Callable[[int], Sequence[Event]], tell: Callable[[str, str, int], None]) -> None:
        self._events, self._tell = events, tell
        self._open: list[Mark] = []

    @property
    def unit(self) -> str:
        """The unit whose collective is being launched, or empty."""
        return next((mark.unit for mark in reversed(self._open) if mark.what in MARKED_COLLECTIVES), "")

    def see(self, operator: str, args: Sequence[object], number: int) -> None:
        """Processes an operator of the namespace `profiler`, before event number `number`."""
        if operator == ENTER:
            said = _MARK.match(str(args[0]))
            self._open.append(Mark(said[1], said[2] or ROOT, number) if said else Mark("", "", number))
        elif self._open:
            self._end(self._open.pop())

    def _end(self, mark: Mark) -> None:
        if mark.what in GATHERS:
            size = sum(event.grown for event in self._events(mark.number) if event.grown > 0)
            self._tell(labels.GATHERED, mark.unit, size)
        elif mark.what in RESHARDS:
            sizes = ((event.stored, event.grown) for event in self._events(mark.number) if event.grown < 0)
            size = -sum(grown for stored, grown in sizes if stored and stored.category == labels.PARAMETERS)
            if size:
                self._tell(labels.FREED, mark.unit, size)
