"""Estimates the remaining time of a sweep from its finished launches: the start of a pass, a step, the end.

A pass's first step comes late: processes start, the model is built. So a launch is divided into the time until the
first step of each pass, the time of a step, which is proportional to its work, and the time after the last step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log
from statistics import median

from ..config.cell import CellConfig
from ..host.environment import SIMULATED
from ..sections import known


@dataclass
class Timing:
    """The timing of one launch. `work`: of a step, in any unit common to all launches; `steps`: of each pass. `begun`,
    `first`,
    `last`, `done`: by pass, seconds of a clock at its begin, first step and last step so far, and steps done. `ended`:
    the launch's end. `took`: seconds of a launch whose steps another machine has counted, once it has ended.
    """

    work: float
    steps: int
    passes: tuple[str, ...]
    name: str = ""
    begun: dict[str, float] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    done: dict[str, int] = field(default_factory=dict)
    ended: float | None = None
    took: float | None = None

    def start(self, now: float) -> None:
        """Starts the launch, and with it its first pass."""
        self.begun[self.passes[0]] = now

    def step(self, mode: str, number: int, now: float) -> None:
        """Records that step `number`, from 1, of a pass is done."""
        self.begun.setdefault(mode, max(self.last.values(), default=now))
        self.first.setdefault(mode, now)
        self.last[mode], self.done[mode] = now, number

    def step_s(self, mode: str) -> float | None:
        """Returns the seconds per step; None before there are two."""
        several = self.done.get(mode, 0) > 1
        return (self.last[mode] - self.first[mode]) / (self.done[mode] - 1) if several else None


def timing_of(config: CellConfig, passes: tuple[str, ...], name: str) -> Timing:
    """Builds the timing of a future launch: the work of a step is tokens times parameters, as far as a config tells
    them.
    """
    found = (config.model_options.get(key) for key in ("hidden", "layers", "vocabulary"))
    hidden, layers, words = (one if isinstance(one, int) and one > 0 else 1 for one in found)
    ranks = 1 if config.backend == SIMULATED else config.world_size or 1
    samples = (config.micro_batch or 1) * (config.accumulation or 1) * ranks
    work = samples * (config.sequence or 1) * (12 * layers * hidden**2 + words * hidden)
    measure = config.measure
    return Timing(float(work), measure.steps + measure.warmup, passes, name)


def seconds_left(launches: Sequence[Timing]) -> float | None:
    """Returns None while no step has been timed. The current pass counts as having begun its next step just now."""
    timed = [one for one in launches if any(one.step_s(mode) is not None for mode in one.passes)]
    if not timed:
        return None
    return sum(_left(one, timed) for one in launches if one.ended is None)


def seconds_left_elsewhere(launches: Sequence[Timing], side_by_side: int, now: float) -> float | None:
    """Returns the seconds left of launches that jobs run, `side_by_side` at a time, of which whole ones are timed: each
    takes as long as the most similar one that has ended. None while none has. Those that have no `begun` wait.
    """
    ended = [one for one in launches if one.took is not None]
    if not ended:
        return None
    left = []
    for launch in launches:
        if launch.took is None:
            like = min(ended, key=lambda one: (one.name != launch.name, abs(log(one.work / launch.work))))
            elapsed = now - min(launch.begun.values(), default=now)
            left.append(max(0.0, known(like.took) - elapsed))
    return max([sum(left) / side_by_side, *left], default=0.0)


def _left(launch: Timing, timed: Sequence[Timing]) -> float:
    """Returns the remaining seconds of one launch."""
    seconds = median(_after(one) for one in timed if one.ended is not None) if any(o.ended for o in timed) else 0.0
    for mode in launch.passes:
        step, done = launch.step_s(mode) or _step_like(launch, mode, timed), launch.done.get(mode, 0)
        if not done:
            seconds += _starting(timed)
        seconds += (launch.steps - done) * step
    return seconds


def _after(launch: Timing) -> float:
    assert launch.ended is not None
    return launch.ended - max(launch.last.values())


def _starting(timed: Sequence[Timing]) -> float:
    """Returns the time until a pass's first step; the very first pass includes one-time costs, and counts only while
    alone.
    """
    spans = [one.first[mode] - one.begun[mode] for one in timed for mode in one.passes if mode in one.first]
    return median(spans[1:] or spans)


def _step_like(launch: Timing, mode: str, timed: Sequence[Timing]) -> float:
    """Returns a step's time from the most similar launch, in the same pass if possible, scaled by the work in it."""

    def unlike(one: Timing, other: str) -> tuple[bool, bool, float]:
        return other != mode, one.name != launch.name, abs(log(one.work / launch.work))

    known = [(one, other, s) for one in timed for other in one.passes if (s := one.step_s(other)) is not None]
    nearest, _, seconds = min(known, key=lambda k: unlike(k[0], k[1]))
    return seconds * launch.work / nearest.work
