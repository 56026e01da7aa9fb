"""ZeRO-Offload, arXiv 2101.06840: section 3 and table 1, in units of M, the number of parameters; one GPU."""

from __future__ import annotations

from collections.abc import Callable

from zerobench.theory.shapes import TierShape

from ..figure import BF16, BUCKETS, PublishedFigure, moved, psi, states, states_per_parameter

CELL = f"strategy=zero2 world_size=1 {BF16} {BUCKETS}"

PLACED: tuple[tuple[str, str, TierShape, str, str], ...] = (
    ("nothing leaves the GPU", "none", TierShape(), "16M", ""),
    ("gradients leave", "cpu_gradients", TierShape("host", gradients=True), "14M", ""),
    ("fp32 parameters and optimizer states leave", "cpu_optimizer", TierShape("host", optimizer=True), "4M", ""),
    (
        "these and gradients leave", "cpu", TierShape("host", optimizer=True, gradients=True), "4M",
        "2M: fp16 parameters alone stay, as the text says",
    ),
)  # fmt: skip
"""Rows of Table 1: what leaves, the choice of `offload`, its tiers, the printed bytes, and what is wrong with these."""


def _table(number: int, what: str, choice: str, tiers: TierShape, printed: str, misprint: str) -> PublishedFigure:
    right = states_per_parameter("zero2", 1, tiers=tiers)
    return PublishedFigure(
        f"table 1, row {number}", f"GPU memory: {what}", "B per parameter", f"{right:g}M", right,
        printed, float(printed[:-1]), f"offload={choice} {CELL}", states, psi, digit=1.0, misprint=misprint,
    )  # fmt: skip


def _bus(quantity: str, printed: float, *links: str) -> PublishedFigure:
    what: Callable[..., dict[str, float]] = moved(*links)
    return PublishedFigure(
        "section 3", quantity, "B per parameter and step", f"{printed:g}M", printed, f"{printed:g}M", printed,
        f"offload=cpu {CELL}", what, psi, digit=1.0,
    )  # fmt: skip


ROWS = (
    *(_table(number, *placed) for number, placed in enumerate(PLACED, 1)),
    PublishedFigure(
        "section 3", "GPU memory of model states falls from 16M to", "B per parameter", "2M",
        states_per_parameter("zero2", 1, tiers=PLACED[-1][2]), "2M", 2.0, f"offload=cpu {CELL}", states, psi, digit=1.0,
    ),
    _bus("gradients to host memory", 2.0, "down"),
    _bus("parameters back", 2.0, "up"),
    _bus("the bus in all", 4.0, "down", "up"),
)  # fmt: skip
