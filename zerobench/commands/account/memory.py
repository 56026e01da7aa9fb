"""Memory passages of a run's account: on the device, in host memory and files, and moved between tiers.

The *largest rank* is the one whose peak is the run's peak_bytes. A *residual* is measured minus predicted bytes.
Figures of the other tiers are for the rank that has the most in that tier, next to the prediction for the states; for
host memory the sum of the ranks' peaks on the fullest node is added. Bytes moved between tiers are for one step over
all ranks, next to the formula (theory/replay/link_traffic.py).

A formula of the paper has no schedule. The replay's prediction knows the schedule and must be met to the byte; its
bytes beyond the formula are *in flight* and are listed by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from ...config.cell import CellConfig
from ...records import ALLOCATOR, CATEGORIES, LINKS, PHASES
from ...results.grid import Grid
from ...results.printed_table import ONE_MEMORY
from ...results.tables import Results
from ...sizes import show_bytes
from ...theory.closed_forms import Formula, from_json
from ..text_blocks import Passage

Row = dict[str, Any]

TENSORS = 10
NONE = "–"

PROCESS = {
    "allocator_peak": "torch's allocator at its peak",
    "timed_allocator_peak": "the same in the timed pass",
    "outside_ledger": "outside the ledger",
    "heap": "the heap beyond torch",
    "kept": "kept from step to step",
    "resident": "resident set",
    "allocated": "allocated on the GPU",
    "reserved": "reserved on the GPU",
    "fragmentation": "reserved beyond allocated",
    "largest_free_block": "largest free block",
    "device_used": "in use on the device",
    "pinned_requested": "pinned host memory in use",
    "pinned": "pinned host memory held",
}
"""Columns of a run without the suffix `_bytes` -> their description."""

A_LINE = 3

BESIDE = {
    "allocated": "allocated",
    "reserved": "reserved",
    "outside_ledger": "outside the ledger",
    "fragmentation": "fragmentation",
    "pinned": "pinned",
    "device_used": "device used",
}
"""The allocator's rows of the memory table, shown as columns next to the ledger's."""


def passages_of_memory(row: Row, results: Results) -> Iterator[Passage]:
    """Yields passages on the categories, formulas, phases, ranks and largest tensors; none without a memory table."""
    everywhere = results.memory
    memory = everywhere[everywhere["tier"] == "device"]
    totals = memory[(memory["phase"] == "step") & (memory["category"] == "total")]
    if totals.empty:
        return
    fullest = totals["rank"].to_list()[int(totals["max_bytes"].astype("int64").argmax())]
    mine = memory[memory["rank"] == fullest]
    header = ["category", "at the peak", "at most", "predicted", "residual"]
    yield Passage(f"Memory in a step, rank {fullest}, the largest of {len(totals)}", [Grid(header, _categories(mine))])
    yield from _formulas(row, everywhere)
    beside = [name for name in ALLOCATOR if (mine["category"] == name).any()]
    words = [BESIDE[name] for name in beside]
    phases = Grid(["phase", "peak", "states at most", *words], _phases(mine, beside))
    yield Passage("Memory by phase, the same rank", [phases])
    ranks = [_rank(memory, rank) for rank in totals["rank"]]
    yield Passage("Memory by rank", [Grid(["rank", "peak", "states at most", "predicted", "residual"], ranks)])
    if lines := process_lines(row):
        yield Passage("Memory by the system and the allocators, the most of all ranks", [*lines])
    tensors = results.tensors[results.tensors["rank"] == fullest].nlargest(TENSORS, "bytes")
    columns = ["category", "name", "module", "phase", "bytes"]
    rows = [[*map(str, t[:4]), show_bytes(t[4])] for t in tensors[columns].itertuples(index=False)]
    largest = Grid(["category", "name", "made in module", "phase", "size"], rows, left=4)
    yield Passage(f"Largest tensors at the peak, rank {fullest}", [largest])


def process_lines(row: Row) -> list[str]:
    """Lines on a process's memory from all available sources, the maximum over the ranks."""
    seen = [f"{words} {show_bytes(row[f'{name}_bytes'])}" for name, words in PROCESS.items()
            if pd.notna(row[f"{name}_bytes"])]  # fmt: skip
    if pd.notna(row["alloc_retries"]):
        seen.append(f"retries of the allocator {row['alloc_retries']}")
    if pd.notna(row["allocator_witness"]) and row["allocator_witness"] in ("profiler", "none"):
        seen.append(f"the allocator's witness: {row['allocator_witness']}")
    return ["; ".join(seen[place : place + A_LINE]) for place in range(0, len(seen), A_LINE)]


def _formulas(row: Row, memory: pd.DataFrame) -> Iterator[Passage]:
    table, lines = table_of_formulas(row, memory)
    if table is not None:
        yield Passage("The states by the paper's formula; for each category the rank with the most", [table, *lines])
    elif lines:
        yield Passage("The states by the paper's formula", [*lines])


def _categories(mine: pd.DataFrame) -> list[list[str]]:
    whole = _whole_step(mine)
    return [[c, show_bytes(whole[c]["at_peak_bytes"]), *_against(whole[c])] for c in (*CATEGORIES, "states", "total")]


SAID = {"data": "data and rest"}
"""Phase -> its label. The rest of a step counts as data, including the instant between forward and backward, when the
activations are alive.
"""


def _phases(mine: pd.DataFrame, beside: list[str]) -> list[list[str]]:
    most: dict[Any, int] = mine.set_index(["phase", "category"])["max_bytes"].to_dict()
    there = [phase for phase in PHASES if (phase, "total") in most]
    names = ("total", "states", *beside)  # a profiler tells of the whole step alone
    sizes = {phase: [most.get((phase, name)) for name in names] for phase in there}
    return [
        [SAID.get(phase, phase), *(NONE if size is None else show_bytes(size) for size in sizes[phase])]
        for phase in there
    ]


def _rank(memory: pd.DataFrame, rank: int) -> list[str]:
    whole = _whole_step(memory[memory["rank"] == rank])
    return [str(rank), show_bytes(whole["total"]["max_bytes"]), *_against(whole["states"])]


def _whole_step(mine: pd.DataFrame) -> dict[str, Row]:
    """Category -> its row over the whole step, for one rank."""
    rows: list[Any] = mine[mine["phase"] == "step"].to_dict("records")
    return {row["category"]: row for row in rows}


def _against(one: Row) -> list[str]:
    """At most, predicted, residual."""
    return [show_bytes(one["max_bytes"]), *_beside(one["max_bytes"], one["predicted_bytes"])]


ELSEWHERE = {"host": "predicted_host_states_bytes", "nvme": "predicted_nvme_bytes"}
"""Tier -> the column of a run that predicts its states."""


LINK_WORDS = {
    "down": "device to host",
    "up": "host to device",
    "read": "files to host",
    "write": "host to files",
}


def passages_of_tiers(row: Row, memory: pd.DataFrame) -> Iterator[Passage]:
    """Yields passages of one table each; none if everything is on the device. `memory`: the run's table."""
    note = f"; {ONE_MEMORY}" if row["device"] == "cpu" else ""
    if elsewhere := _memory_elsewhere(row, memory):
        columns = ["tier", "category", "at the peak", "at most", "predicted", "residual"]
        title = f"Memory in other tiers in a step, on the rank with the most in each{note}"
        yield Passage(title, [Grid(columns, elsewhere, left=2)])
    if moved := _moved_between(row):
        columns = ["link", "bytes", "by formula", "residual"]
        yield Passage("Bytes between tiers in a step, over all ranks", [Grid(columns, moved)])


def _memory_elsewhere(row: Row, memory: pd.DataFrame) -> list[list[str]]:
    """(tier, category, at the peak, at most, predicted, residual) for bytes outside the device."""
    rows: list[list[str]] = []
    whole = memory[(memory["phase"] == "step") & (memory["max_bytes"] > 0)]
    for tier, column in ELSEWHERE.items():
        mine = whole[whole["tier"] == tier]
        if mine.empty:
            continue
        totals = mine[mine["category"] == "total"]
        fullest = totals["rank"].to_list()[int(totals["max_bytes"].astype("int64").argmax())]
        by_category = {one["category"]: one for one in mine[mine["rank"] == fullest].to_dict("records")}
        states = mine[mine["category"] == "states"]["max_bytes"].max()  # over the ranks, as the prediction is
        for category in (*CATEGORIES, "states", "total"):
            if category in by_category:
                one = by_category[category]
                most = states if category == "states" else one["max_bytes"]
                beside = _beside(most, row[column] if category == "states" else None)
                rows.append([tier, category, show_bytes(one["at_peak_bytes"]), show_bytes(most), *beside])
        if tier == "host" and pd.notna(row["host_peak_all_bytes"]):
            size = CellConfig.from_json(row["config"]).topology.ranks_per_node
            rows.append([tier, f"a node of {size}", NONE, show_bytes(row["host_peak_all_bytes"]), NONE, NONE])
    return rows


def _moved_between(row: Row) -> list[list[str]]:
    """(link, bytes, formula, residual) of each link that carried bytes."""
    return [
        [
            LINK_WORDS[link],
            show_bytes(row[f"{link}_bytes"]),
            *_beside(row[f"{link}_bytes"], row[f"predicted_{link}_bytes"]),
        ]
        for link in LINKS
        if pd.notna(row[f"{link}_bytes"]) and row[f"{link}_bytes"]
    ]


def _beside(measured: int, predicted: Any) -> list[str]:
    """Predicted, residual."""
    if predicted is None or pd.isna(predicted):
        return [NONE, NONE]
    return [show_bytes(predicted), show_bytes(measured - predicted)]


# -- the paper's formulas ---------------------------------------------------------------------------


SYMBOLS = {
    "ψ": "trained parameters",
    "φ": "frozen parameters",
    "N": "ranks that share the states",
    "k": "ranks that share a shard",
    "K": "bytes of the optimizer per parameter, masters included",
    "P": "bytes of parameters",
    "G": "bytes of gradients",
    "O": "bytes of the optimizer",
    "f": "of it leaves the device",
    "r": "reductions of a gradient",
    "m": "micro-batches",
}
"""Symbol of an equation -> its meaning."""

FORMULA_COLUMNS = ["category", "formula", "in bytes", "in flight", "replayed", "measured"]


def table_of_formulas(row: Row, memory: pd.DataFrame) -> tuple[Grid | None, list[str]]:
    """The table, and lines below it; no table if theory does not cover the run or an older zerobench made it."""
    try:
        formulas = formulas_of(row)
    except ValueError as error:
        return None, [str(error)]
    whole = memory[(memory["phase"] == "step") & (memory["tier"] == "device")]
    most = whole.groupby("category")["max_bytes"].max()
    predicted = whole.groupby("category")["predicted_bytes"].max()
    states = {name: formula for name, formula in formulas.items() if name in most}
    if not states:
        return None, []
    rows = [
        [name, one.equation, show_bytes(one.value), _size(predicted[name] - one.value), _size(predicted[name]),
         show_bytes(int(most[name]))]
        for name, one in states.items()
    ]  # fmt: skip
    lines = [numbers_in(states), *(_in_flight(name, one) for name, one in states.items() if name != "states")]
    return Grid(FORMULA_COLUMNS, rows, left=2), [line for line in lines if line]


def formulas_of(row: Row) -> dict[str, Formula]:
    """A run's formulas by category; none if the run has no theory or was made by an older zerobench. Raises ValueError
    if they are damaged.
    """
    text = row["formulas"]
    return from_json(text) if isinstance(text, str) else {}


def numbers_in(formulas: dict[str, Formula], without: tuple[str, ...] = ()) -> str:
    """Lists the numbers in these formulas, each with its symbol and meaning."""
    numbers = {symbol: value for one in formulas.values() for symbol, value in one.numbers.items()}
    known = [f"{s} = {value:,.10g} {SYMBOLS.get(s, '')}".rstrip() for s, value in numbers.items() if s not in without]
    return ", ".join(known)


def _in_flight(name: str, formula: Formula) -> str:
    terms = [f"{term.name} {show_bytes(term.size)}" for term in formula.beyond]
    return f"in flight, {name}: {', '.join(terms)}" if terms else ""


def _size(size: Any) -> str:
    return NONE if pd.isna(size) else show_bytes(int(size))
