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


@dataclass
class Collective:
    """A collective: the unit that it is for, its lane, and the second at which it ends."""

    unit: str
    lane: str
    end_s: float
    awaited: bool = False
    by_reducer: bool = False
    """Launched by DDP's reducer, whose C++ code waits for it at the end of a backward."""


def lay_out(events: Sequence[EventRow], costs: GpuCosts, declared: Declared = PLAIN) -> Timeline:
    """Lays out the events of one simulated step in time, in the steady state: collectives that the previous step left
    in flight run during this one.
    """
    first = _Layout(costs, declared, {})
    first.run(events)
    over_s = first.timeline.step_s
    carried = {
        collective.unit: Collective(collective.unit, collective.lane, collective.end_s - over_s)
        for collective in first.carried()
        if collective.end_s > over_s
    }
    if not carried:
        return first.timeline
    steady = _Layout(costs, declared, carried)
    steady.run(events)
    return steady.timeline


class _Layout:
    """One step, laid out by one call of `run`. `carried`: unit -> its collective that the previous step left in flight.

    The state is the second until which the host, each stream and each lane are taken.
    """

    def __init__(self, costs: GpuCosts, declared: Declared, carried: dict[str, Collective]) -> None:
        self.costs, self.declared, self.from_last_step = costs, declared, carried
        self.timeline, self.phase, self.phase_began = Timeline(), "", 0.0
        self.host = 0.0
        self.streams: defaultdict[int, float] = defaultdict(float)
        self.lanes: defaultdict[str, float] = defaultdict(float)
        self.collectives: dict[int, Collective] = {}
        """By operation."""
        self.busy = [(0.0, collective.end_s) for collective in carried.values()]
        """Intervals in which collectives run."""
        self.recorded: dict[int, float] = {}
        """Event of a stream -> the second at which it was recorded."""
        self.deferred: list[EventRow] = []
        """Reductions to launch after backward, as `declared`."""
        self.carries: set[str] = set()
        """Units whose collective the next step waits for."""
        for collective in carried.values():
            self.lanes[collective.lane] = max(self.lanes[collective.lane], collective.end_s)

    def run(self, events: Sequence[EventRow]) -> None:
        timeline = self.timeline
        for event in events:
            began = None
            if event.kind == COMPUTE:
                began = self._compute(event)
            elif event.kind in (LAUNCH, MOVE):
                is_reduction = event.collective in REDUCTIONS and self.phase == "backward"
                if is_reduction and self.declared.reduces_after_backward:
                    self.deferred.append(event)
                else:
                    began = self._launch(event)
            elif event.kind == WAIT:
                collective = self.collectives.get(event.operation) if event.operation is not None else None
                if collective is not None:
                    collective.awaited = True
                    self._await(event.stream, collective.end_s)
                    if event.stream == 0:
                        collective.by_reducer = False
            elif event.kind == ORDER:
                self._order(event)
            elif event.kind == PHASE:
                self._enter(event)
            timeline.at.append(self.streams[0] if began is None else began)
        self._end_phase()
        carrying = {collective.lane for collective in self.carried()}
        timeline.step_s = max(self.streams[0], *(end for lane, end in self.lanes.items() if lane not in carrying), 0.0)

    def carried(self) -> list[Collective]:
        """Returns the collectives that the next step waits for."""
        running = (collective for collective in self.collectives.values() if not collective.awaited)
        return [collective for collective in running if collective.unit in self.carries]

    @property
    def times(self) -> PhaseTime:
        """The times of the current phase."""
        return self.timeline.phases[self.phase or "data"]

    # -- events that the host issues -------------------------------------------------------------------

    def _issue(self, seconds: float) -> None:
        self.timeline.issued_s += seconds
        if not self.costs.one_stream:
            self.host += seconds

    def _compute(self, event: EventRow) -> float:
        """Runs an operator, and returns the second at which it begins."""
        seconds, stream = self.costs.compute(event), 0 if self.costs.one_stream else event.stream
        self._issue(self.costs.host_s)
        begin = max(self.host, self.streams[stream])
        end = begin + self._slowed(begin, seconds)
        if stream == 0:  # copies on FSDP2's other streams run at the same time as the model
            self.times.host_s += max(0.0, self.host - self.streams[0])
            self.timeline.compute_s += end - begin
        self.streams[stream] = end
        return begin

    def _slowed(self, begin: float, seconds: float) -> float:
        """Returns the time of compute from `begin` on: `contention` times as long while collectives run."""
        contention = self.costs.contention
        if contention == 1.0:
            return seconds
        now, left = begin, seconds
        self.busy = [(first, last) for first, last in self.busy if last > begin]
        for first, last in self.busy:
            if last <= now or left <= 0:
                continue
            free = min(left, max(0.0, first - now))
            now, left = now + free, left - free
            shared = min(left, (last - now) / contention) if left > 0 and now >= first else 0.0
            now, left = now + shared * contention, left - shared
        return now + left - begin

    def _launch(self, event: EventRow) -> float:
        """Runs a collective or a transfer, and returns the second at which it begins."""
        cost, lane = self.costs.transfer(event), event.group or event.tier
        factor = self.declared.gradient_factor if event.collective in REDUCTIONS else 1.0
        self._issue(cost.host_s)
        begin = max(self.host, self.streams[event.stream], self.lanes[lane])
        end = begin + cost.wire_s * factor
        self.lanes[lane] = end
        if event.stream:
            self.streams[event.stream] = end
        if event.operation is not None:
            collective = Collective(event.unit, lane, end)
            collective.by_reducer = event.operator == "allreduce_" and not event.unit and not event.stream
            if (before := self.collectives.get(event.operation)) is not None:  # an operation may have several hops
                collective.end_s = max(end, before.end_s)
                collective.by_reducer |= before.by_reducer
                if before.awaited:  # among the carried ones, the last that was launched for a unit counts
                    del self.collectives[event.operation]
            self.collectives[event.operation] = collective
        if end > begin:
            self.busy.append((begin, end))
        self.timeline.communication_s += end - begin
        return begin

    def _order(self, event: EventRow) -> None:
        """Plays an order between streams."""
        self._issue(self.costs.order_s)
        if event.operator == LATE:
            self.carries.add(event.unit)
            if event.unit in self.from_last_step:
                self._await(event.stream, self.from_last_step[event.unit].end_s)
        elif event.operator == "record":
            self.recorded[event.elements] = self.streams[event.stream]
        else:  # of a recorded event, or of all that the other stream has been given
            self._await(event.stream, self.recorded.get(event.elements, self.streams[event.elements]))

    def _await(self, stream: int, until: float) -> None:
        """Lets a stream wait."""
        if stream == 0:
            self.times.exposed_s += max(0.0, until - self.streams[0])
        self.streams[stream] = max(self.streams[stream], until)

    # -- phases ----------------------------------------------------------------------------------------

    def _enter(self, event: EventRow) -> None:
        if self.phase == "backward":
            deferred, self.deferred = self.deferred, []
            for reduction in deferred:
                self.streams[reduction.stream] = max(self.streams[reduction.stream], self.streams[0])
                self._launch(reduction)
            for reduction in deferred:
                if reduction.operation is not None:
                    self._await(0, self.collectives[reduction.operation].end_s)
            by_reducer = [number for number, collective in self.collectives.items() if collective.by_reducer]
            for number in sorted(by_reducer):
                self._await(0, self.collectives[number].end_s)
                self.collectives[number].by_reducer = False
        self._end_phase()
        self.phase, self.phase_began = event.name, self.streams[0]
        if event.name == "forward":
            self.timeline.step_s = self.phase_began
            self.timeline.marks.append(self.timeline.totals())

    def _end_phase(self) -> None:
        if self.phase:
            self.times.total_s += self.streams[0] - self.phase_began
