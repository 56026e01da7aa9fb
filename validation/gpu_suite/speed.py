"""Section 3: the time of a step at N = 1 if nothing is communicated and each strategy's own cost remains.

Launches are interleaved (measure.repeats), so that a drift of the clocks affects all alike. The large model has one of
each, because time is short; its interval is that of its steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd

from zerobench import strategies
from zerobench.config.cell import Cell
from zerobench.records import RunRow
from zerobench.results.frames import frame_of
from zerobench.results.summary import summarize
from zerobench.sizes import show_bytes

from .section import NONE, SuiteLaunch, SuiteSection, SuiteSetup, SuiteTable, by_name, padded

STRATEGIES = "ddp,zero1,zero2,zero3,fsdp2"
SMALL_STRATEGIES = "ddp,zero3"
SAME = ("precision=bf16", "data=synthetic", "world_size=1", "measure.passes=timed")


@dataclass(frozen=True)
class SpeedWorkload:
    """A model, its batch and its steps."""

    overrides: tuple[str, ...]


WORKLOADS = (
    SpeedWorkload(("model=gpt2_124m", "sequence=1024", "micro_batch=8", "measure.steps=20", "measure.warmup=5",
         "measure.repeats=2", "draw_on=device")),
    SpeedWorkload(("model=gpt2_1_5b", "sequence=1024", "micro_batch=8", "measure.steps=10", "measure.warmup=2",
         "draw_on=device")),
)  # fmt: skip
SMALL_WORKLOADS = (
    SpeedWorkload(("model=gpt", "model.layers=2", "model.hidden=32", "model.heads=2", "sequence=32", "micro_batch=2",
         "measure.steps=6", "measure.warmup=2", "measure.repeats=2", "draw_on=device", "launch.threads=1")),
)  # fmt: skip


def _cells(setup: SuiteSetup) -> list[Cell]:
    strategies = SMALL_STRATEGIES if setup.small else STRATEGIES
    workloads = SMALL_WORKLOADS if setup.small else WORKLOADS
    return [
        c for workload in workloads for c in setup.cells("speed", f"strategy={strategies}", *SAME, *workload.overrides)
    ]


HEADER = ["cell", "launches", "step ms", "95 %", "tokens/s", "MFU", "over DDP", "allocated", "reserved", "last loss"]


def _table(setup: SuiteSetup, done: list[SuiteLaunch]) -> SuiteTable:
    groups = by_name(done)
    cells = {name: _summary(launches) for name, launches in groups.items()}
    rows = []
    for name, launches in groups.items():
        cell = cells[name]
        if cell is None:
            worst = next((one for one in launches if not one.is_ok), launches[0])
            rows.append(padded([name], worst.words, len(HEADER)))
            continue
        others = (c for c in cells.values() if c and c["model"] == cell["model"])
        ddp = next((c for c in others if c["strategy"] == strategies.reference().name), None)
        rows.append([name, *_show(cell, ddp)])
    notes = ["bf16, N = 1; the loss of the last step tells whether they train the same"]
    if not setup.small:
        notes.append("50257 words, as in GPT-2, are no multiple of 8: the head's products run below what a GPU can do")
    return SuiteTable(HEADER, rows, notes)


def _summary(launches: list[SuiteLaunch]) -> dict[str, Any] | None:
    """One row of a cell's launches so far; None if none is ok."""
    rows = [one.row for one in launches if one.is_ok and one.row is not None]
    if not rows:
        return None
    (row,) = summarize(frame_of(rows, RunRow)).to_dict("records")
    return {str(key): value for key, value in row.items()}


def _show(cell: dict[str, Any], ddp: dict[str, Any] | None) -> list[str]:
    interval = NONE
    if not pd.isna(cell["step_s_low"]):
        interval = f"{1000 * cell['step_s_low']:.1f}–{1000 * cell['step_s_high']:.1f}"
    over = NONE if ddp is None else f"{cell['step_s'] / ddp['step_s']:.3f}"
    mfu = NONE if pd.isna(cell["mfu"]) else f"{100 * cell['mfu']:.1f} %"
    memory = [show_bytes(cell[key]) for key in ("allocated_bytes", "reserved_bytes")]
    step, tokens, loss = f"{1000 * cell['step_s']:.1f}", f"{cell['tokens_per_s']:.0f}", f"{cell['loss_last']:.4f}"
    return [str(cell["launches"]), step, interval, tokens, mfu, over, *memory, loss]


SPEED = SuiteSection(
    name="speed",
    title="Speed at N = 1",
    asks="Step time, tokens/s and MFU of DDP, ZeRO-1, 2, 3 and FSDP2 on GPT-2 124M and 1.5B in bf16.",
    seconds=57,
    cells=_cells,
    table=_table,
)
