"""The record that one rank of one pass returns, assembled from its steps and its probe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .probes.probe import EventOrder, PassRecords, Saves, StepResult
from .records import StepRow
from .theory.shapes import ROOT, ParameterShape, Schedule


@dataclass(kw_only=True)
class RankRecord(PassRecords):
    """Everything recorded on one rank in one pass, once its steps are done."""

    rank: int
    mode: str
    steps: list[StepRow]
    schedule: Schedule
    checkpoint_bytes: int | None = None
    """Size of a saved checkpoint's files, on rank 0."""
    buffer_bytes: int = 0
    """Bytes of the module's buffers."""
    own_activation_bytes: int | None = None
    """Activations of the model without an engine (predict/estimate.py), if they can be predicted."""
    gradient_holders: int = 1
    """Number of ranks that have the same part of the gradients, and add the same amount to their norm."""


def step_records(
    rank: int, mode: str, warmup: int, results: Sequence[StepResult], times: Sequence[Mapping[str, float]],
    saves: Saves | None = None,
) -> list[StepRow]:  # fmt: skip
    """Returns a row per step. `times`: seconds of each phase, per step; empty in a pass without times."""
    rows = [
        StepRow(
            rank, mode, number, number < warmup, result.loss,
            t.get("step"), t.get("forward"), t.get("backward"), t.get("update"),
            None, result.loss_scale, result.skipped, t.get("communication"), t.get("exposed"),
            result.grad_squares, result.clip_norm,
        )
        for number, (result, t) in enumerate(zip(results, times or [{}] * len(results), strict=True))
    ]  # fmt: skip
    if saves is None:
        return rows
    for row, spent in zip(rows, times, strict=False):  # no times: no row
        row.save_in_flight = row.step in saves.in_flight
        if row.step in saves.begun:
            row.save_s = spent["save"]
            row.save_done_s = row.save_s + saves.written_s(row.step)
    return rows


def schedule_of(
    order: EventOrder | None, shapes: list[ParameterShape], accumulation: int, options: Mapping[str, Any]
) -> Schedule:
    """Returns the schedule of a pass's last step, or the expected one. `options`: further fields of the Schedule."""
    if order is None:
        return replace(Schedule.sequential(shapes, accumulation), **options)
    units = {shape.unit for shape in shapes if shape.unit != ROOT}
    runs = [(name, returns) for name, returns in order.modules_run if name in units]
    uses, returns = tuple(name for name, _ in runs), tuple(returns for _, returns in runs)
    return Schedule(tuple(shapes), order.arrivals, uses, accumulation, returns, **options)
