"""The part of a run's account that is about host memory and files: what lies there, and what moves between tiers.

Figures of memory are of the rank that has most in the tier, beside the prediction of the states; of host memory there
is the sum of the ranks' peaks on the fullest node, too. Those between tiers are of one step over all ranks, beside the
formula (theory/replay/link_traffic.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from ...config.cell import CellConfig
from ...records import CATEGORIES, LINKS
from ...results.grid import Grid
from ...results.printed_table import ONE_MEMORY
from ...sizes import show_bytes
from ..text_blocks import Passage

Row = dict[str, Any]

ELSEWHERE = {"host": "predicted_host_states_bytes", "nvme": "predicted_nvme_bytes"}
"""Tier -> the column of a run that predicts its states."""

NONE = "–"

LINK_WORDS = {
    "down": "device to host",
    "up": "host to device",
    "read": "files to host",
    "write": "host to files",
}


def passages_of(row: Row, memory: pd.DataFrame) -> Iterator[Passage]:
    """Passages of a table each; none where everything is on the device. `memory`: the run's."""
    note = f"; {ONE_MEMORY}" if row["device"] == "cpu" else ""
    if elsewhere := _memory_elsewhere(row, memory):
        columns = ["tier", "category", "at the peak", "at most", "predicted", "residual"]
        title = f"Memory in other tiers in a step, the fullest rank of each{note}"
        yield Passage(title, [Grid(columns, elsewhere, left=2)])
    if moved := _moved_between(row):
        columns = ["link", "bytes", "by formula", "residual"]
        yield Passage("Bytes between tiers in a step, over all ranks", [Grid(columns, moved)])


def _memory_elsewhere(row: Row, memory: pd.DataFrame) -> list[list[str]]:
    """(tier, category, at the peak, at most, predicted, residual) of what is not on the device."""
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
    """(link, bytes, formula, residual) of each that something moves over."""
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
    if predicted is None or pd.isna(predicted):
        return [NONE, NONE]
    return [show_bytes(predicted), show_bytes(measured - predicted)]
