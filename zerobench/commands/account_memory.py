"""Memory passages of a run's account: on the device, in host memory and files, and moved between tiers.

The *largest rank* is the one whose peak is the run's peak_bytes. A *residual* is measured minus predicted bytes.
Figures of the other tiers are for the rank that has the most in that tier, next to the prediction for the states; for
host memory the sum of the ranks' peaks on the fullest node is added. Bytes moved between tiers are for one step over
all ranks, next to the formula (theory/replay/traffic.py).

A formula of the paper has no schedule. The replay's prediction knows the schedule and must be met to the byte; its
bytes beyond the formula are *in flight* and are listed by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from ..config.cell import CellConfig
from ..records import CATEGORIES, LINKS, PHASES
from ..results.frames import table_of
from ..results.grid import Grid
from ..results.printed_table import ONE_MEMORY
from ..sizes import show_bytes
from ..theory.closed_forms import Formula, from_json
from .passages import Passage

Row = dict[str, Any]

TENSORS = 10
"""Number of tensors that are listed."""

PROCESS = {
    "allocator_peak": "torch's allocator at its peak",
    "timed_allocator_peak": "the same in the timed pass",
    "outside_ledger": "outside the ledger",
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

IN_A_PHASE = {
    "total": "peak",
    "states": "states at most",
    "allocated": "allocated",
    "reserved": "reserved",
    "outside_ledger": "outside the ledger",
    "fragmentation": "fragmentation",
    "pinned": "pinned",
    "device_used": "device used",
}
"""Rows of the memory table that are the columns of the phases: the ledger's, then the allocator's if there are any."""

PHASE_NAMES = {"data": "data and rest"}
"""Phase -> its label. The rest of a step counts as data, including the instant between forward and backward, when the
activations are alive.
"""

RESIDUAL = {"max_bytes": "at most", "predicted_bytes": "predicted", "residual_bytes": "residual"}
"""Columns of bytes beside a prediction."""


def memory_passages(row: Row, everywhere: pd.DataFrame, tensors: pd.DataFrame) -> Iterator[Passage]:
    """Yields passages on the categories, formulas, phases, ranks and largest tensors; none without a memory table.
    `everywhere`, `tensors`: the run's tables.
    """
    memory = everywhere[everywhere["tier"] == "device"]
    step = _with_residual(memory[memory["phase"] == "step"])
    peaks = step[step["category"] == "total"].set_index("rank")["max_bytes"].astype("int64")
    if peaks.empty:
        return
    fullest = peaks.idxmax()
    categories = table_of(
        _by_category(step, fullest), {"category": "category", "at_peak_bytes": "at the peak"} | RESIDUAL
    )
    yield Passage(f"Memory in a step, rank {fullest}, the largest of {len(peaks)}", [categories])
    formulas, lines = table_of_formulas(row, everywhere)
    if formulas is not None:
        yield Passage("The states by the paper's formula; for each category the rank with the most", [formulas, *lines])
    elif lines:
        yield Passage("The states by the paper's formula", [*lines])
    yield Passage("Memory by phase, the same rank", [_by_phase(memory[memory["rank"] == fullest])])
    ranks = step[step["category"] == "states"].set_index("rank").assign(peak_bytes=peaks).reset_index()
    headings = {"rank": "rank", "peak_bytes": "peak", **RESIDUAL, "max_bytes": "states at most"}
    yield Passage("Memory by rank", [table_of(ranks, headings)])
    sizes = {description: row[f"{name}_bytes"] for name, description in PROCESS.items()}
    process = [[description, show_bytes(size)] for description, size in sizes.items() if pd.notna(size)]
    if pd.notna(row["alloc_retries"]):
        process.append(["retries of the allocator", str(row["alloc_retries"])])
    if pd.notna(row["allocator_witness"]) and row["allocator_witness"] in ("profiler", "none"):
        process.append(["the allocator's witness", row["allocator_witness"]])
    if process:
        yield Passage("Memory by the system and the allocators, the most of all ranks", [Grid(["source", ""], process)])
    largest = tensors[tensors["rank"] == fullest].nlargest(TENSORS, "bytes")
    headings = {"category": "category", "name": "name", "module": "made in module", "phase": "phase", "bytes": "size"}
    yield Passage(f"Largest tensors at the peak, rank {fullest}", [table_of(largest, headings, left=4)])


def _with_residual(memory: pd.DataFrame) -> pd.DataFrame:
    sizes = memory[["max_bytes", "predicted_bytes"]].astype("Float64")
    return memory.assign(residual_bytes=sizes["max_bytes"] - sizes["predicted_bytes"])


def _by_category(memory: pd.DataFrame, rank: Any) -> pd.DataFrame:
    """Returns a rank's rows in the order of the ledger, without the allocator's."""
    rows = memory[memory["rank"] == rank].astype({"category": "object"}).set_index("category")
    ordered: pd.DataFrame = rows.loc[[name for name in (*CATEGORIES, "states", "total") if name in rows.index]]
    return ordered.reset_index()


def _by_phase(memory: pd.DataFrame) -> Grid:
    named = memory.astype({"phase": "object", "category": "object"})
    sizes = named.pivot_table("max_bytes", "phase", "category", "max")  # a profiler tells of the whole step alone
    shown = {name: heading for name, heading in IN_A_PHASE.items() if name in sizes}
    phases = sizes.loc[[phase for phase in PHASES if phase in sizes.index], list(shown)].rename(index=PHASE_NAMES)
    headings = {"phase": "phase", **{f"{name}_bytes": heading for name, heading in shown.items()}}
    return table_of(phases.add_suffix("_bytes").reset_index(), headings)


# -- other tiers -------------------------------------------------------------------------------------


ELSEWHERE = {"host": "predicted_host_states_bytes", "nvme": "predicted_nvme_bytes"}
"""Tier -> the column of a run that predicts its states."""

LINK_WORDS = {"down": "device to host", "up": "host to device", "read": "files to host", "write": "host to files"}


def tier_passages(row: Row, memory: pd.DataFrame) -> Iterator[Passage]:
    """Yields passages of one table each; none if everything is on the device. `memory`: the run's table."""
    note = f"; {ONE_MEMORY}" if row["device"] == "cpu" else ""
    step = memory[(memory["phase"] == "step") & (memory["max_bytes"] > 0)]
    tiers = [_in_tier(row, tier, step[step["tier"] == tier]) for tier in ELSEWHERE if (step["tier"] == tier).any()]
    if tiers:
        title = f"Memory in other tiers in a step, on the rank with the most in each{note}"
        headings = {"tier": "tier", "category": "category", "at_peak_bytes": "at the peak"} | RESIDUAL
        yield Passage(title, [table_of(_with_residual(pd.concat(tiers)), headings, left=2)])
    moved = [
        {"link": LINK_WORDS[link], "max_bytes": row[f"{link}_bytes"], "predicted_bytes": row[f"predicted_{link}_bytes"]}
        for link in LINKS
        if pd.notna(row[f"{link}_bytes"]) and row[f"{link}_bytes"]
    ]
    if moved:
        headings = {"link": "link", **RESIDUAL, "max_bytes": "bytes", "predicted_bytes": "by formula"}
        title = "Bytes between tiers in a step, over all ranks"
        yield Passage(title, [table_of(_with_residual(pd.DataFrame(moved)), headings)])


def _in_tier(row: Row, tier: str, memory: pd.DataFrame) -> pd.DataFrame:
    """Returns the categories of the rank with the most in a tier, and for host memory a row for the fullest node."""
    fullest = memory[memory["category"] == "total"].set_index("rank")["max_bytes"].astype("int64").idxmax()
    rows = _by_category(memory, fullest)[["category", "at_peak_bytes", "max_bytes"]].to_dict("records")
    states = memory[memory["category"] == "states"]["max_bytes"].max()  # over the ranks, as the prediction is
    for entry in rows:
        if entry["category"] == "states":
            entry |= {"max_bytes": states, "predicted_bytes": row[ELSEWHERE[tier]]}
    if tier == "host" and pd.notna(row["host_peak_all_bytes"]):
        size = CellConfig.from_json(row["config"]).topology.ranks_per_node
        rows.append({"category": f"a node of {size}", "max_bytes": row["host_peak_all_bytes"]})
    columns = ["category", "at_peak_bytes", "max_bytes", "predicted_bytes"]
    return pd.DataFrame(rows, columns=columns, dtype="object").assign(tier=tier)


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


def table_of_formulas(row: Row, memory: pd.DataFrame) -> tuple[Grid | None, list[str]]:
    """The table, and lines below it; no table if theory does not cover the run."""
    try:
        formulas = formulas_of(row)
    except ValueError as error:
        return None, [str(error)]
    step = memory[(memory["phase"] == "step") & (memory["tier"] == "device")].astype({"category": "object"})
    most = step.groupby("category")[["max_bytes", "predicted_bytes"]].max()
    states = {name: formula for name, formula in formulas.items() if name in most.index}
    if not states:
        return None, []
    rows = most.loc[list(states)].assign(
        formula=[formula.equation for formula in states.values()],
        formula_bytes=[formula.value for formula in states.values()],
    )
    rows["in_flight_bytes"] = rows["predicted_bytes"] - rows["formula_bytes"]
    headings = {
        "category": "category", "formula": "formula", "formula_bytes": "in bytes", "in_flight_bytes": "in flight",
        "predicted_bytes": "replayed", "max_bytes": "measured",
    }  # fmt: skip
    beyond = {
        name: ", ".join(f"{term.name} {show_bytes(term.size)}" for term in formula.beyond)
        for name, formula in states.items()
        if name != "states"
    }
    lines = [numbers_in(states), *(f"in flight, {name}: {terms}" for name, terms in beyond.items() if terms)]
    return table_of(rows.reset_index(), headings, left=2), [line for line in lines if line]


def formulas_of(row: Row) -> dict[str, Formula]:
    """A run's formulas by category; none if the run has no theory. Raises ValueError if they are damaged."""
    text = row["formulas"]
    return from_json(text) if isinstance(text, str) else {}


def numbers_in(formulas: dict[str, Formula], without: tuple[str, ...] = ()) -> str:
    """Lists the numbers in these formulas, each with its symbol and meaning."""
    numbers = {symbol: value for formula in formulas.values() for symbol, value in formula.numbers.items()}
    shown = {symbol: value for symbol, value in numbers.items() if symbol not in without}
    return ", ".join(f"{symbol} = {value:,.10g} {SYMBOLS.get(symbol, '')}".rstrip() for symbol, value in shown.items())
