"""The step that an execution measures: the first that every later one is like."""

from __future__ import annotations

from dataclasses import replace

from .. import strategies
from ..config.cell import CellConfig
from ..config.schema import Measure
from ..config.schema_memory import CpuOffload


def settled(config: CellConfig) -> CellConfig:
    """Returns the cell with one measured step, after as many as the strategy takes to settle. Updates that a run would
    delay after some steps are delayed from the second on.
    """
    if isinstance(config.offload, CpuOffload) and config.offload.delayed:
        config = replace(config, offload=replace(config.offload, delayed_after=1))
    warmup = max(strategies.spec_of(config.strategy.name).settles_after, config.offload.settles_after)
    return replace(config, measure=Measure(steps=1, warmup=warmup, passes="both", events=config.measure.events))


def steps_of(config: CellConfig) -> int:
    """Returns how many steps an execution of the cell takes."""
    measure = settled(config).measure
    return measure.warmup + measure.steps
