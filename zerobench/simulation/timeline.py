"""A step laid out in time: the simulated schedule of one rank, event by event, on streams, lanes and the host.

issue     the host issues one event after the other, in the simulated order, and waits for nothing. Each becomes an item
          of its stream: an operator, a collective, or a wait for items of other streams
run       in the order of time. A stream runs its items in order; 0 is the model's. A lane, of a process group, runs its
          collectives one after the other as they were issued, on whichever streams they are. Compute takes `contention`
          times as long while a collective runs, whichever of the two was issued first
account   waits of the model's stream for collectives are exposed communication, and its waits for the host are the
          host's share, phase by phase

On one GPU the host delays no kernel here, and kernels of all streams run one after the other. A step then takes as long
as the slower of device and host (prediction.py).

All ranks do the same at the same time: one is laid out.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..records import EventRow
from ..records.long_rows import COMPUTE, LATE, LAUNCH, MOVE, ORDER, PHASE, WAIT
from .costs import GpuCosts

REDUCTIONS = ("reduce_scatter", "all_reduce")


@dataclass(frozen=True)
class Declared:
    """How an engine that cannot be executed here differs from the one whose schedule is simulated in its place.

    `reduces_after_backward`: gradients are reduced when the last backward is over. `gradient_factor`: bytes of its
    reductions over the simulated ones, 2 if it reduces fp32 gradients of a bf16 model.
    """

    reduces_after_backward: bool = False
    gradient_factor: float = 1.0


PLAIN = Declared()


@dataclass
class PhaseTime:
    """Seconds of a phase: from its start to the next phase, waiting for collectives, and waiting for the host."""

    total_s: float = 0.0
    exposed_s: float = 0.0
    host_s: float = 0.0

    @property
    def binds(self) -> str:
        """The part that takes most of the phase: compute, communication or host."""
        parts = {"communication": self.exposed_s, "host": self.host_s}
        parts["compute"] = self.total_s - sum(parts.values())
        return max(parts, key=lambda name: parts[name])


@dataclass
class Timeline:
    """A step in time. `at`: when each event starts. `marks`: the totals at the start of each micro-batch's forward.
    `compute_s`: on the model's stream; with exposed and host time it adds up to the step. `issued_s`: of the host.
    """

    step_s: float = 0.0
    phases: dict[str, PhaseTime] = field(default_factory=lambda: defaultdict(PhaseTime))
    at: list[float] = field(default_factory=list)
    marks: list[dict[tuple[str, str], float]] = field(default_factory=list)
    compute_s: float = 0.0
    communication_s: float = 0.0
    issued_s: float = 0.0

    def totals(self) -> dict[tuple[str, str], float]:
        """Returns (phase, part of a PhaseTime) -> seconds so far; for the whole step the phase is empty."""
        names = ("step_s", "compute_s", "communication_s", "issued_s")
        whole = {("", name): getattr(self, name) for name in names}
        of_phases = {(name, part): value for name, phase in self.phases.items() for part, value in vars(phase).items()}
        return whole | of_phases

    @property
    def exposed_s(self) -> float:
        """Seconds in which the model's stream waits for collectives."""
        return sum(phase.exposed_s for phase in self.phases.values())

    @property
    def host_s(self) -> float:
        """Seconds in which the model's stream waits for the host."""
        return sum(phase.host_s for phase in self.phases.values())


@dataclass(slots=True, eq=False)
class Item:
    """Work in a stream; a collective if it has a lane. It begins at `issued_s` at the earliest, after the stream's
    earlier items and all items that it `awaits`; a wait takes no time itself.
    """

    stream: int = 0
    seconds: float = 0.0
    issued_s: float = 0.0
    awaits: Sequence[Item] = ()
    lane: str = ""
    is_reached: bool = False
    """True if its stream has reached this collective, which then begins in its lane's turn."""
    begin_s: float = 0.0
    end_s: float | None = None
    """None until it is over."""

    def left_after(self, second: float) -> float:
        """Returns the seconds of a collective that are left at a second."""
        assert self.end_s is not None
        return self.end_s - max(self.begin_s, second)


@dataclass
class Collective:
    """A collective as the engine asked for it: the unit that it is for, and an item for each hop."""

    unit: str
    hops: list[Item]
    awaited: bool = False
    by_reducer: bool = False
    """Launched by DDP's reducer, whose C++ code waits for it at the end of a backward."""


@dataclass(frozen=True)
class Issued:
    """An event with its item, if it has one; the number of the model's items so far, and totals of the host."""

    event: EventRow
    item: Item | None
    items: int
    issued_s: float
    communication_s: float


def lay_out(events: Sequence[EventRow], costs: GpuCosts, declared: Declared = PLAIN) -> Timeline:
    """Lays out the events of one simulated step in time, in the steady state: collectives that the previous step left
    in flight run during this one.
    """
    first = _Layout(events, costs, declared, {})
    over_s = first.timeline.step_s
    carried = {
        operation.unit: [
            Item(seconds=left, lane=hop.lane) for hop in operation.hops if (left := hop.left_after(over_s)) > 0
        ]
        for operation in first.carried()
    }
    return _Layout(events, costs, declared, carried).timeline if any(carried.values()) else first.timeline


class _Layout:
    """One step. `from_last_step`: unit -> its collective that the step before left in flight, as items."""

    def __init__(
        self, events: Sequence[EventRow], costs: GpuCosts, declared: Declared, from_last_step: dict[str, list[Item]]
    ) -> None:
        self.costs, self.declared, self.from_last_step = costs, declared, from_last_step
        self.phase, self.host_s, self.issued_s, self.communication_s = "", 0.0, 0.0, 0.0
        self.streams: defaultdict[int, list[Item]] = defaultdict(list)
        self.lanes: defaultdict[str, list[Item]] = defaultdict(list)
        self.operations: dict[int, Collective] = {}
        self.seconds: dict[tuple[str | int, ...], float] = {}
        """All that an operator's time depends on -> its seconds; most operators run once per block."""
        self.recorded: dict[int, list[Item]] = {}
        """Event of a stream -> the item after which it was recorded."""
        self.deferred: list[EventRow] = []
        """Reductions to launch after backward, as `declared`."""
        self.carries: set[str] = set()
        """Units whose collective the next step waits for."""
        for hop in (hop for hops in from_last_step.values() for hop in hops):
            hop.is_reached = True
            self.lanes[hop.lane].append(hop)
        issued = []
        for event in events:
            item = self._issue(event)
            issued.append(Issued(event, item, len(self.streams[0]), self.issued_s, self.communication_s))
        run(self.streams, self.lanes, costs.contention)
        self.timeline = self._account(issued)

    def carried(self) -> list[Collective]:
        """Returns the collectives that the next step waits for."""
        running = (operation for operation in self.operations.values() if not operation.awaited)
        return [operation for operation in running if operation.unit in self.carries]

    # -- issue -----------------------------------------------------------------------------------------

    def _issue(self, event: EventRow) -> Item | None:
        """Appends an event's item to its stream. Returns it if it is an operator or a collective, otherwise None."""
        if event.kind == COMPUTE:
            self._take_host(self.costs.host_s)
            key = event.operator, event.dtype, event.bytes, event.flops, event.sizes, event.elements
            if key not in self.seconds:
                self.seconds[key] = self.costs.compute(event)
            return self._give(Item(0 if self.costs.one_stream else event.stream, self.seconds[key], self.host_s))
        if event.kind in (LAUNCH, MOVE):
            is_reduction = event.collective in REDUCTIONS and self.phase == "backward"
            if not (is_reduction and self.declared.reduces_after_backward):
                return self._launch(event)
            self.deferred.append(event)
        elif event.kind == WAIT and event.operation in self.operations:
            operation = self.operations[event.operation]
            operation.awaited = True
            operation.by_reducer &= event.stream != 0
            self._await(event.stream, operation.hops)
        elif event.kind == ORDER:
            self._order(event)
        elif event.kind == PHASE:
            self._end_phase()
            self.phase = event.name
        return None

    def _take_host(self, seconds: float) -> None:
        self.issued_s += seconds
        if not self.costs.one_stream:
            self.host_s += seconds

    def _give(self, item: Item) -> Item:
        self.streams[item.stream].append(item)
        return item

    def _await(self, stream: int, items: Sequence[Item]) -> None:
        self._give(Item(stream, awaits=list(items)))

    def _launch(self, event: EventRow) -> Item:
        cost, factor = self.costs.transfer(event), 1.0
        if event.collective in REDUCTIONS:
            factor = self.declared.gradient_factor
        self._take_host(cost.host_s)
        item = self._give(Item(event.stream, cost.wire_s * factor, self.host_s, lane=event.group or event.tier))
        self.lanes[item.lane].append(item)
        self.communication_s += item.seconds
        if event.operation is not None:
            by_reducer = event.operator == "allreduce_" and not event.unit and not event.stream
            operation = Collective(event.unit, [item], by_reducer=by_reducer)
            if (before := self.operations.get(event.operation)) is not None:  # an operation may have several hops
                operation.hops[:0] = before.hops
                operation.by_reducer |= before.by_reducer
                if before.awaited:  # among the carried ones, the last that was launched for a unit counts
                    del self.operations[event.operation]
            self.operations[event.operation] = operation
        return item

    def _order(self, event: EventRow) -> None:
        """Issues an order between streams."""
        self._take_host(self.costs.order_s)
        if event.operator == LATE:
            self.carries.add(event.unit)
            if event.unit in self.from_last_step:
                self._await(event.stream, self.from_last_step[event.unit])
        elif event.operator == "record":
            self.recorded[event.elements] = self._last(event.stream)
        else:  # of a recorded event, or of all that the other stream has been given
            self._await(event.stream, self.recorded.get(event.elements) or self._last(event.elements))

    def _last(self, stream: int) -> list[Item]:
        """Returns the last item of a stream. The model's stream does not wait for collectives that it launches."""
        items = self.streams[stream]
        return next(([item] for item in reversed(items) if stream or not item.lane), [])

    def _end_phase(self) -> None:
        if self.phase != "backward":
            return
        deferred, self.deferred = self.deferred, []
        for reduction in deferred:
            self._await(reduction.stream, self._last(0))
        launched = [self._launch(reduction) for reduction in deferred]
        by_reducer = [operation for _, operation in sorted(self.operations.items()) if operation.by_reducer]
        for operation in by_reducer:
            operation.by_reducer = False
        self._await(0, [*launched, *(hop for operation in by_reducer for hop in operation.hops)])

    # -- account ---------------------------------------------------------------------------------------

    def _account(self, issued: Sequence[Issued]) -> Timeline:
        """Returns the step's times. A gap in the model's stream is host time until `issued_s`, then exposed time."""
        timeline, now, began_s, done = Timeline(), 0.0, 0.0, 0
        times = timeline.phases["data"]
        for step in issued:
            for item in self.streams[0][done : step.items]:
                if item.lane:
                    continue
                assert item.end_s is not None
                times.host_s += max(0.0, item.issued_s - now)
                times.exposed_s += item.begin_s - max(now, item.issued_s)
                timeline.compute_s += item.end_s - item.begin_s
                now = item.end_s
            done = step.items
            timeline.issued_s, timeline.communication_s = step.issued_s, step.communication_s
            timeline.at.append(step.item.begin_s if step.item else now)
            if step.event.kind == PHASE:
                times.total_s += now - began_s
                times, began_s = timeline.phases[step.event.name], now
                if step.event.name == "forward":
                    timeline.step_s = now
                    timeline.marks.append(timeline.totals())
        times.total_s += now - began_s
        carrying = {hop.lane for operation in self.carried() for hop in operation.hops[-1:]}
        ends = (item.end_s or 0.0 for name, lane in self.lanes.items() if name not in carrying for item in lane[-1:])
        timeline.step_s = max(now, *ends, 0.0)
        return timeline


def run(streams: Mapping[int, Sequence[Item]], lanes: Mapping[str, Sequence[Item]], contention: float) -> None:
    """Gives the items of streams and of lanes their begin and end, in the order of time."""
    waiting = {stream: deque(items) for stream, items in streams.items()}
    turns = {lane: deque(items) for lane, items in lanes.items()}
    running: dict[int, Item] = {}
    """Stream -> its operator, or the collective that it waits for."""
    work: dict[int, float] = {}
    """Stream -> seconds left of its operator."""
    in_flight: dict[str, Item] = {}
    ends: dict[str, float] = {}
    """Lane -> its collective, and the second at which that is over."""
    now = 0.0
    while True:
        begins = True
        while begins:
            begins = False
            for stream, items in waiting.items():
                while items and stream not in running and items[0].issued_s <= now:
                    item = items[0]
                    if any(other.end_s is None for other in item.awaits):
                        break
                    items.popleft()
                    begins = True
                    item.begin_s, item.is_reached = now, True
                    if item.lane:
                        if stream:
                            running[stream] = item
                    elif item.seconds:
                        running[stream], work[stream] = item, item.seconds
                    else:
                        item.end_s = now
            for lane, items in turns.items():
                while items and lane not in in_flight and items[0].is_reached:
                    item = items.popleft()
                    item.begin_s, in_flight[lane] = now, item
                    ends[lane] = now + item.seconds
        slower = contention if in_flight else 1.0
        times = [now + seconds * slower for seconds in work.values()] + list(ends.values())
        times += [
            items[0].issued_s
            for stream, items in waiting.items()
            if items and stream not in running and items[0].issued_s > now
        ]
        if not times:
            return
        then = min(times)
        for stream, seconds in [*work.items()]:
            if now + seconds * slower <= then:
                del work[stream]
                running.pop(stream).end_s = then
            else:
                work[stream] = seconds - (then - now) / slower
        for lane in [lane for lane, end in ends.items() if end <= then]:
            del ends[lane]
            item = in_flight.pop(lane)
            item.end_s = then
            if running.get(item.stream) is item:
                del running[item.stream]
        now = then
