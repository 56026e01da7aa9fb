"""A step laid out in time: the simulated schedule of one rank, event by event, on streams, lanes and the host.

host      issues one event after the other, in the simulated order
stream    runs its events in order; 0 is the model's. Its waits are in the schedule
lane      of a process group: its collectives run one after the other, on whichever streams they are
busy      compute that runs concurrently with a collective takes `contention` times as long for that part

An operator starts when it is issued and its stream is free, a collective when, in addition, its lane is free.

On one GPU the host delays no kernel here, and kernels of all streams run one after the other. A step then takes as long
as the slower of device and host (prediction.py).

All ranks do the same at the same time: one is laid out. Waits for collectives are exposed communication, and a stream's
waits for the host are the host's share.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
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
        return whole | {(name, part): value for name, one in self.phases.items() for part, value in vars(one).items()}

    @property
    def exposed_s(self) -> float:
        """Seconds in which the model's stream waits for collectives."""
        return sum(one.exposed_s for one in self.phases.values())

    @property
    def host_s(self) -> float:
        """Seconds in which the model's stream waits for the host."""
        return sum(one.host_s for one in self.phases.values())


def lay_out(events: Sequence[EventRow], costs: GpuCosts, declared: Declared = PLAIN) -> Timeline:
    """Lays out the events of one simulated step in time, in the steady state: collectives that the previous step left
    in flight run during this one.
    """
    first = _Layout(costs, declared)
    alone = first.run(events)
    left = first.left_in_flight()
    return _Layout(costs, declared, left).run(events) if left else alone


@dataclass(frozen=True)
class InFlight:
    """A collective that outlives its step: its lane, and the seconds that it still takes when the next step starts."""

    lane: str
    seconds: float


class _Layout:
    """One step. `left`: unit -> the collective that the previous step left in flight."""

    def __init__(self, costs: GpuCosts, declared: Declared, left: dict[str, InFlight] | None = None) -> None:
        self._costs, self._declared = costs, declared
        self._host = 0.0
        self._streams: defaultdict[int, float] = defaultdict(float)
        self._lanes: defaultdict[str, float] = defaultdict(float)
        self._recorded: dict[int, float] = {}
        self._ends: dict[int, float] = {}
        self._unwaited: set[int] = set()
        self._busy: list[tuple[float, float]] = []
        self._late: list[EventRow] = []
        self._left = left or {}
        for one in self._left.values():
            self._lanes[one.lane] = max(self._lanes[one.lane], one.seconds)
        self._busy += [(0.0, one.seconds) for one in self._left.values()]
        self._launched: dict[int, tuple[str, str]] = {}  # not waited for yet: unit and lane
        self._waits_late: set[str] = set()
        self._phase, self._entered = "", 0.0
        self._begun: float | None = None
        self._made = Timeline()

    def run(self, events: Sequence[EventRow]) -> Timeline:
        """Returns the step laid out in time; to be called once."""
        take = {COMPUTE: self._compute, LAUNCH: self._launch, MOVE: self._launch, WAIT: self._wait, ORDER: self._order,
                PHASE: self._enter}  # fmt: skip
        for event in events:
            self._begun = None
            if event.kind in take:
                take[event.kind](event)
            self._made.at.append(self._now() if self._begun is None else self._begun)
        self._leave()
        stays = {lane for unit, lane in self._launched.values() if unit in self._waits_late}
        self._made.step_s = max(self._now(), *(end for lane, end in self._lanes.items() if lane not in stays), 0.0)
        return self._made

    def left_in_flight(self) -> dict[str, InFlight]:
        """Returns, by unit, the collectives that the next step waits for."""
        over = self._made.step_s
        return {
            unit: InFlight(lane, self._ends[operation] - over)
            for operation, (unit, lane) in self._launched.items()
            if unit in self._waits_late and self._ends[operation] > over
        }

    # -- events that the host issues -------------------------------------------------------------------

    def _compute(self, event: EventRow) -> None:
        seconds, stream = self._costs.compute(event), 0 if self._costs.one_stream else event.stream
        self._issue(self._costs.host_s)
        begin = max(self._host, self._streams[stream])
        end = begin + self._slowed(begin, seconds)
        if stream == 0:  # copies on FSDP2's other streams run at the same time as the model
            self._here.host_s += max(0.0, self._host - self._streams[0])
            self._made.compute_s += end - begin
        self._streams[stream] = end
        self._begun = begin

    def _issue(self, seconds: float) -> None:
        self._made.issued_s += seconds
        if not self._costs.one_stream:
            self._host += seconds

    def _launch(self, event: EventRow) -> None:
        if self._declared.reduces_after_backward and event.collective in REDUCTIONS and self._phase == "backward":
            self._late.append(event)
            return
        self._start(event)

    def _start(self, event: EventRow) -> None:
        cost = self._costs.transfer(event)
        stretch = self._declared.gradient_factor if event.collective in REDUCTIONS else 1.0
        self._issue(cost.host_s)
        lane = event.group or event.tier
        begin = max(self._host, self._streams[event.stream], self._lanes[lane])
        end = begin + cost.wire_s * stretch
        self._lanes[lane] = end
        if event.stream:
            self._streams[event.stream] = end
        if event.operation is not None:
            self._ends[event.operation] = max(end, self._ends.get(event.operation, 0.0))
            self._launched[event.operation] = event.unit, lane
            if event.operator == "allreduce_" and not event.unit and not event.stream:
                self._unwaited.add(event.operation)
        if end > begin:
            self._busy.append((begin, end))
        self._made.communication_s += end - begin
        self._begun = begin

    def _wait(self, event: EventRow) -> None:
        if event.operation in self._ends and event.operation is not None:
            self._launched.pop(event.operation, None)
            self._await(event.stream, self._ends[event.operation])
            if event.stream == 0:
                self._unwaited.discard(event.operation)

    def _order(self, event: EventRow) -> None:
        self._issue(self._costs.order_s)
        if event.operator == LATE:
            self._waits_late.add(event.unit)
            if event.unit in self._left:
                self._await(event.stream, self._left[event.unit].seconds)
        elif event.operator == "record":
            self._recorded[event.elements] = self._streams[event.stream]
        elif event.elements in self._recorded:
            self._await(event.stream, self._recorded[event.elements])
        else:
            self._await(event.stream, self._streams[event.elements])

    def _await(self, stream: int, until: float) -> None:
        """Lets a stream wait."""
        if stream == 0:
            self._here.exposed_s += max(0.0, until - self._streams[0])
        self._streams[stream] = max(self._streams[stream], until)

    # -- phases ----------------------------------------------------------------------------------------

    @property
    def _here(self) -> PhaseTime:
        return self._made.phases[self._phase or "data"]

    def _enter(self, event: EventRow) -> None:
        if self._phase == "backward":
            late, self._late = self._late, []
            for deferred in late:  # reductions that an engine launches when its backward is over
                self._streams[deferred.stream] = max(self._streams[deferred.stream], self._streams[0])
                self._start(deferred)
            for deferred in late:
                if deferred.operation is not None:
                    self._await(0, self._ends[deferred.operation])
            # waits for collectives that C++ code launches and awaits at the end of a backward, as DDP's reducer does
            for operation in sorted(self._unwaited):
                self._await(0, self._ends[operation])
            self._unwaited.clear()
        self._leave()
        self._phase, self._entered = event.name, self._now()
        if event.name == "forward":
            self._made.step_s = self._entered
            self._made.marks.append(self._made.totals())

    def _leave(self) -> None:
        if self._phase:
            self._here.total_s += self._now() - self._entered

    def _now(self) -> float:
        return self._streams[0]

    def _slowed(self, begin: float, seconds: float) -> float:
        """Returns the time of compute from `begin` on: `contention` times as long while collectives run."""
        if self._costs.contention == 1.0:
            return seconds
        at, left = begin, seconds
        self._busy = [(first, last) for first, last in self._busy if last > begin]
        for first, last in self._busy:
            if last <= at or left <= 0:
                continue
            free = min(left, max(0.0, first - at))
            at, left = at + free, left - free
            beside = min(left, (last - at) / self._costs.contention) if left > 0 and at >= first else 0.0
            at, left = at + beside * self._costs.contention, left - beside
        return at + left - begin
