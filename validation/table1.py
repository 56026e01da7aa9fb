"""Table 1 of the ZeRO paper, executed: model states per rank at 7.5B, 128B and 1T parameters on 1 to 1,024 ranks.

Each cell runs the engine's own code on fake tensors, as on a GPU; formula and printed number stand next to it. Twenty
minutes.

cells.csv       formula, executed and printed, with the parts of each
in_flight.csv   the states when their sum is largest, by line of code; the parts add up to `executed_bytes`

    python -m validation table1                           all cells that results/table1 does not have yet
    python -m validation table1 --only 7.5B N=64          figure 1 of the paper
    python -m validation table1 --only 1T N=1024 --rerun  1T parameters under each stage again

model     the paper gives sizes alone: conf/model says where each shape comes from
bucket    a thousandth of the gradients, so that each size is reduced in a thousand pieces: for 1T the 1e9 elements that
          Megatron-core's rule, max(40e6, 1e6·N), gives at N = 1,024
variant   other options for the cell of which most is in flight: smaller units, none ahead of its use, smaller buckets
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from zerobench.config.cell import CellConfig
from zerobench.config.compose import compose_cells
from zerobench.predict.estimate import training_shapes
from zerobench.records import STATES
from zerobench.simulation.execute import CUDA, Execution, Limits
from zerobench.sizes import printable
from zerobench.strategies import shape_of
from zerobench.theory.closed_forms import floor_bytes, state_formulas
from zerobench.theory.replay.states import predict_states

from .published.figure import PARAMETERS, states_per_parameter
from .runner import execute_cells
from .store import Store

FOLDER = Path("results/table1")
CELLS, IN_FLIGHT = "cells.csv", "in_flight.csv"

GB = 1e9

SIZES = {"7.5B": 7.5e9, "128B": 128e9, "1T": 1e12}
"""Column of the table -> parameters."""

MODELS = {"7.5B": "zero_7_5b", "128B": "zero_128b", "1T": "zero_1t"}

RANKS = (1, 4, 16, 64, 256, 1024)

STAGES = {"zero1": "P_os", "zero2": "P_os+g", "zero3": "P_os+g+p"}
"""Strategy -> the paper's name."""

BASELINE = "ddp"
"""The strategy of figure 1's first bar."""

_PRINTED = pd.read_csv(Path(__file__).with_suffix(".csv"), dtype=str, index_col=["size", "strategy"])
"""Printed gigabytes by size and stage, over the ranks."""

PIECES = 1000

COMMON = (
    "backend=simulated", "tensors=fake", "precision=bf16", "activation=checkpoint", "data=synthetic", "sequence=1024",
)  # fmt: skip
"""A micro-batch of one sequence; blocks recompute their activations."""

VARIANTS: dict[str, dict[str, tuple[str, ...]]] = {
    "zero3": {
        "tiles=2": ("model.tiles=2",),
        "tiles=4": ("model.tiles=4",),
        "tiles=4, prefetch=0": ("model.tiles=4", "strategy.prefetch=0"),
    },
    "zero2": {
        "buckets of 1 MiB": ("strategy.bucket_bytes=1MiB",),
        "buckets of 2 GB": ("strategy.bucket_bytes=2GB",),
    },
}
"""Strategy -> name of a variant of its cell at 7.5B and the most ranks -> what it changes."""


@dataclass(frozen=True)
class TableCell:
    """A cell's place in the table. `variant`: empty for the table's own cells."""

    size: str
    ranks: int
    strategy: str
    variant: str = ""

    def __str__(self) -> str:
        return f"{self.size} {self.strategy} N={self.ranks}" + f" {self.variant}" * bool(self.variant)

    @property
    def arguments(self) -> list[str]:
        changed = VARIANTS[self.strategy][self.variant] if self.variant else ()
        words = [
            f"strategy={self.strategy}", f"world_size={self.ranks}", f"batch={self.ranks}",
            f"model={MODELS[self.size]}", *COMMON,
        ]  # fmt: skip
        if self.strategy == "zero3":
            words.append(PARAMETERS)
        elif not any(one.startswith("strategy.bucket_bytes") for one in changed):
            words.append(f"strategy.bucket_bytes={int(2 * SIZES[self.size] / PIECES)}")
        return words + list(changed)

    @property
    def config(self) -> CellConfig:
        return compose_cells(self.arguments, target=CUDA.kind)[0].config


def places() -> list[TableCell]:
    """Returns the 54 cells, figure 1's baseline, DDP at the largest, and the variants; the quick ones first."""
    table = [TableCell(size, ranks, stage) for size in SIZES for ranks in reversed(RANKS) for stage in STAGES]
    baselines = [TableCell("7.5B", 64, BASELINE), TableCell("1T", RANKS[-1], BASELINE)]
    variants = [TableCell("7.5B", RANKS[-1], stage, name) for stage, named in VARIANTS.items() for name in named]
    return [*baselines[:1], *table, *baselines[1:], *variants]


def printed(size: str, ranks: int, strategy: str) -> str:
    """Returns what table 1 prints, or figure 1 for the baseline; empty if the paper has no such cell."""
    if strategy == BASELINE:
        return "120" if (size, ranks) == ("7.5B", 64) else ""
    return str(_PRINTED.at[(size, strategy), str(ranks)]) if ranks in RANKS else ""


def how_printed(text: str, gigabytes: float) -> str:
    """Returns "exact", "rounded", "cut off", or "misprint" for a number that is neither: the columns of 7.5B are
    rounded, those of 128B and 1T are cut off where rounding would have given the next number.
    """
    unit = 10.0 ** -len(text.partition(".")[2])  # of the last printed digit
    if math.isclose(float(text), gigabytes, rel_tol=1e-12):
        return "exact"
    if math.isclose(float(text), math.floor(gigabytes / unit + 0.5) * unit, rel_tol=1e-9):
        return "rounded"
    return "cut off" if abs(float(text) - gigabytes) < unit else "misprint"


@dataclass(frozen=True)
class CellRow:
    """One executed cell. Bytes are of the fullest rank, the states at the instant when their sum is largest."""

    size: str
    ranks: int
    strategy: str
    variant: str
    model: str
    psi: int
    """Parameters of the executed model."""
    printed_gb: str
    """Number that the paper prints, in 1e9 bytes; empty if it has no such cell."""
    paper_formula_bytes: int
    """The paper's formula at its own round size."""
    how_printed: str
    """exact, rounded, cut off, or misprint: the printed number beside the formula at the round size."""
    formula_bytes: int
    """Formula of the paper at `psi`."""
    executed_bytes: int
    """Model states of the execution: parameters, gradients, master weights, optimizer, and buffers on their way."""
    replayed_bytes: int
    """Expectation of theory's replay for `executed_bytes`, from the order that the execution had."""
    parameters_bytes: int
    gradients_bytes: int
    master_bytes: int
    optimizer_bytes: int
    communication_bytes: int
    parameters_formula_bytes: int
    gradients_formula_bytes: int
    master_formula_bytes: int
    optimizer_formula_bytes: int
    peak_bytes: int
    """With activations and all else."""
    bucket_bytes: int
    tile_bytes: int
    rank: int
    execution_s: float
    resident_bytes: int
    """The most memory of this machine's that the process of its execution has had."""


@dataclass(frozen=True)
class StatesRow:
    """Storages of a cell's states that one line of code made, at the instant of `executed_bytes`."""

    size: str
    ranks: int
    strategy: str
    variant: str
    category: str
    source: str
    """The line that made them."""
    name: str
    """Label of the largest of them."""
    storages: int
    bytes: int


def row_of(place: TableCell, found: Execution) -> CellRow:
    config, record = found.config, found.result
    strategy, trained = shape_of(config.strategy.values()), training_shapes(config)
    groups = replace(config.groups, on_gpu=True)
    schedule = record.schedule
    psi = sum(shape.numel for shape in schedule.shapes if shape.trainable)
    formulas = state_formulas(strategy, schedule.shapes, groups, *trained)
    whole = SIZES[place.size] * states_per_parameter(place.strategy, place.ranks)
    text = printed(place.size, place.ranks, place.strategy)
    parts = {f"{category}_bytes": found.at_most_states[category] for category in STATES}
    expected = {
        f"{category}_formula_bytes": formulas[category].value for category in STATES if category != "communication"
    }
    return CellRow(
        place.size, place.ranks, place.strategy, place.variant, config.model_name, psi, text, round(whole),
        how_printed(text, whole / GB) if text else "", floor_bytes(strategy, schedule.shapes, groups, *trained),
        found.states_bytes, predict_states(strategy, schedule, groups, *trained).states_bytes,
        **parts, **expected, peak_bytes=found.peak_bytes,
        bucket_bytes=int(getattr(config.strategy, "bucket_bytes", 0) or 0),
        tile_bytes=trained[1].tile_bytes or 0, rank=found.rank, execution_s=round(found.seconds, 1),
        resident_bytes=found.resident_bytes,
    )  # fmt: skip


def place_of(row: CellRow | StatesRow) -> TableCell:
    return TableCell(row.size, row.ranks, row.strategy, row.variant)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", metavar="WORD", help="cells with all of these: 7.5B, N=64, zero3 ...")
    parser.add_argument("--rerun", action="store_true", help="execute also what the csv has")


def run(chosen: argparse.Namespace) -> int:
    """Executes what is due. Returns 1 if a cell could not be executed."""
    every, words, problems = places(), chosen.only or [], list[str]()
    wanted = [place for place in every if all(word in str(place).split() for word in words)]
    if not wanted:
        sizes, ranks = ", ".join(SIZES), ", ".join(f"N={n}" for n in RANKS)
        raise ValueError(f"--only {' '.join(words)}: no such cell; use words of {sizes}, {ranks}, {', '.join(STAGES)}")
    cells = Store(FOLDER / CELLS, CellRow, place_of, every)
    parts = Store(FOLDER / IN_FLIGHT, StatesRow, place_of, every)
    due = [place for place in wanted if chosen.rerun or place not in cells.found]

    def take(number: int, found: Execution) -> None:
        if found.problem:
            problems.append(f"{due[number]}: {found.problem}")
            return
        place = due[number].size, due[number].ranks, due[number].strategy, due[number].variant
        rows: dict[tuple[str, str], StatesRow] = {}
        for line in found.result.lines:  # the largest first
            if line.at == "states":
                key = line.category, line.source
                row = rows.setdefault(key, StatesRow(*place, *key, line.name, storages=0, bytes=0))
                rows[key] = replace(row, storages=row.storages + line.storages, bytes=row.bytes + line.bytes)
        parts.put(sorted(rows.values(), key=lambda row: -row.bytes))
        cells.put([row_of(due[number], found)])

    # On a CPU an update compares parameters with masters piece by piece, which takes hours at 1T.
    execute_cells("table1", [(place.config, CUDA) for place in due], Limits(seconds=1800), take)
    print(f"{len(due) - len(problems)} cells simulated; in {FOLDER}: {CELLS}, {IN_FLIGHT}")
    for problem in problems:
        print(printable(f"validation table1: {problem}"), file=sys.stderr)
    return int(bool(problems))
