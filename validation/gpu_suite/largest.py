"""Section 7: the largest GPT that fits on one rank of 64 under each strategy, by prediction, and a run to confirm it.

A family of shapes with one number k: k layers, k heads, hidden = k heads of the same width (GPT-3's 175B is k = 96).
What a rank needs is predicted as states, by theory's replay, and activations, by formula (activation_formula.py), as if
both were at their most at once. The largest k whose need is within the limit is run for three steps.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

from zerobench.config.cell import Cell, CellConfig
from zerobench.config.schema import Gpt
from zerobench.predict.estimate import estimate
from zerobench.sizes import SIZES, show_bytes

from ..activation_formula import activation_bytes, shape_of
from .suite import NONE, SuiteLaunch, SuiteSection, SuiteSetup, SuiteTable, shorter

SHARE = 0.92
"""Usable fraction of the device's memory: the rest is for the context, libraries, rounding and fragmentation."""

SMALL_LIMIT = 2 * SIZES["mib"]
HEAD_WIDTH, SMALL_HEAD_WIDTH = 128, 8
FIRST_GUESS, MOST = 16, 512
WORLD = 64

SAME = (
    "model=gpt", "model.checkpointing=true", "backend=simulated", f"world_size={WORLD}", "precision=bf16",
    "data=synthetic", "draw_on=device", "micro_batch=1", "measure.warmup=2", "measure.steps=1",
)  # fmt: skip
KINDS = (("strategy=ddp",), ("strategy=zero1,zero2,zero3", "strategy.construct=meta"))
"""Our strategies are built without any rank holding the whole model in fp32."""
SMALL_KINDS = (("strategy=ddp",), ("strategy=zero3", "strategy.construct=meta"))

SHAPE = ("model.vocabulary=50257", "sequence=512")
SMALL_SHAPE = ("model.vocabulary=256", "sequence=16", "precision.tile_bytes=65536", "launch.threads=1")


@dataclass(frozen=True)
class PredictedNeed:
    """Predicted bytes of one rank."""

    psi: int
    states_bytes: int
    activation_bytes: int

    @property
    def total_bytes(self) -> int:
        """The sum, as if both were at their peaks at once."""
        return self.states_bytes + self.activation_bytes


def limit_bytes(setup: SuiteSetup) -> int:
    """Returns the memory limit of a rank in bytes."""
    return SMALL_LIMIT if setup.small else int(SHARE * setup.device_bytes)


_NEEDS: dict[str, PredictedNeed] = {}
"""Identity -> what was predicted, for the search comes back to a shape."""


def need_of(config: CellConfig) -> PredictedNeed:
    """The prediction for a resolved cell with a GPT."""
    if config.cell_id not in _NEEDS:
        predicted = estimate(config)
        assert predicted.states_bytes is not None
        _NEEDS[config.cell_id] = PredictedNeed(
            predicted.psi, predicted.states_bytes, activation_bytes(shape_of(config))
        )
    return _NEEDS[config.cell_id]


def gpt_of(config: CellConfig) -> Gpt:
    """The shape of a cell of this section, whose models are our GPT."""
    assert isinstance(config.model, Gpt)
    return config.model


def sized(cell: Cell, k: int, head_width: int) -> Cell:
    """The cell with the family's k-th shape."""
    return cell.changed(model=replace(gpt_of(cell.config), layers=k, heads=k, hidden=k * head_width))


def largest(cell: Cell, limit: int, head_width: int, guess: int = FIRST_GUESS) -> Cell:
    """The cell with the largest shape of the family whose need is within `limit` bytes; the smallest where none is.

    Parameters grow by the cube of k, so the next guess is where the line through the last two needs over k³ meets the
    limit. `guess`: the first k.
    """
    low, high, k = 1, MOST, guess  # low fits, high does not
    before, need_before = 0, 0
    while high - low > 1:
        k = min(max(k, low + 1), high - 1)
        need = need_of(sized(cell, k, head_width).config).total_bytes
        low, high = (k, high) if need <= limit else (low, k)
        slope = (need - need_before) / (k**3 - before**3)
        before, need_before = k, need
        k = int(max(0.0, k**3 + (limit - need) / slope) ** (1 / 3)) if slope > 0 else (low + high) // 2
    return sized(cell, low, head_width)


def _cells(setup: SuiteSetup) -> list[Cell]:
    """Returns one cell per strategy; the search starts at the previous one's size, since the need decreases."""
    shape, width, kinds = (SMALL_SHAPE, SMALL_HEAD_WIDTH, SMALL_KINDS) if setup.small else (SHAPE, HEAD_WIDTH, KINDS)
    found: list[Cell] = []
    guess = FIRST_GUESS
    for cell in [cell for kind in kinds for cell in setup.cells("largest", *kind, *SAME, *shape)]:
        print(f"{cell.config.strategy.name}: looking for the largest that fits, by prediction", file=sys.stderr)
        found.append(largest(cell, limit_bytes(setup), width, guess))
        guess = gpt_of(found[-1].config).layers
    return found


HEADER = ["cell", "layers × hidden", "ψ", "states", "activations", "predicted need", "confirmed", "peak", "allocated"]


def _table(setup: SuiteSetup, done: list[SuiteLaunch]) -> SuiteTable:
    names, notes = shorter(done)
    limit = f"limit {show_bytes(limit_bytes(setup))} a rank"
    notes += [limit if setup.small else f"{limit}, {SHARE:.0%} of the device's memory"]
    return SuiteTable(HEADER, [_line(names[one.name], one) for one in done], notes)


def _line(name: str, one: SuiteLaunch) -> list[str]:
    model, need = gpt_of(one.cell), need_of(one.cell)
    bytes_needed = [show_bytes(size) for size in (need.states_bytes, need.activation_bytes, need.total_bytes)]
    start = [name, f"{model.layers} × {model.hidden}", f"{need.psi:,}", *bytes_needed]
    if not one.is_ok or one.row is None:
        return [*start, one.words, NONE, NONE]
    peak, allocated = one.row["peak_bytes"], one.row["allocated_bytes"]
    how = f"fits, {peak / need.total_bytes:.0%} of the need"
    return [*start, how, show_bytes(peak), show_bytes(allocated)]


LARGEST = SuiteSection(
    name="largest",
    title="The largest GPT that fits on one rank of 64",
    asks="How large may a GPT be under each strategy, by prediction, and does it run?",
    seconds=69,
    cells=_cells,
    table=_table,
    answers=("ok", "oom"),
    limit_s=90.0,
)
