"""Table 1 of the ZeRO paper (arXiv 1910.02054v3): sizes, ranks, stages, and what it prints, in GB of 1e9 bytes.

formula     bytes per parameter of sections 3.1 and 5, at the paper's round sizes
printed     agrees with the formula within one unit of its last digit: columns of 7.5B are rounded, those of 128B and 1T
            are cut off where rounding would have given the next number
"""

from __future__ import annotations

import math

SIZES = {"7.5B": 7.5e9, "128B": 128e9, "1T": 1e12}
"""Size as the paper writes it -> its parameters."""

RANKS = (1, 4, 16, 64, 256, 1024)

STAGES = {"zero1": "P_os", "zero2": "P_os+g", "zero3": "P_os+g+p"}
"""Strategy -> the paper's name."""

BASELINE = "ddp"
"""The strategy of figure 1's first bar."""

_PRINTED = {
    "7.5B": {
        "zero1": ("120", "52.5", "35.6", "31.4", "30.4", "30.1"),
        "zero2": ("120", "41.3", "21.6", "16.6", "15.4", "15.1"),
        "zero3": ("120", "30", "7.5", "1.88", "0.47", "0.12"),
    },
    "128B": {
        "zero1": ("2048", "896", "608", "536", "518", "513"),
        "zero2": ("2048", "704", "368", "284", "263", "257"),
        "zero3": ("2048", "512", "128", "32", "8", "2"),
    },
    "1T": {
        "zero1": ("16000", "7000", "4750", "4187", "4046", "4011"),
        "zero2": ("16000", "5500", "2875", "2218", "2054", "2013"),
        "zero3": ("16000", "4000", "1000", "250", "62.5", "15.6"),
    },
}

_FIGURE_1 = "120"
"""Figure 1's baseline, 7.5B on 64 ranks."""

K = 12
"""Bytes of the optimizer's states per parameter: fp32 weights, momentum, variance."""


def printed(size: str, ranks: int, strategy: str) -> str:
    """Returns what table 1 prints, or figure 1 for the baseline; empty where the paper has no such cell."""
    if strategy == BASELINE:
        return _FIGURE_1 if (size, ranks) == ("7.5B", 64) else ""
    return _PRINTED[size][strategy][RANKS.index(ranks)] if ranks in RANKS else ""


def formula_bytes(psi: float, ranks: int, strategy: str) -> float:
    """Returns bytes of the model states per rank, sections 3.1 and 5.1 to 5.3."""
    whole = {"ddp": 2 + 2 + K, "zero1": 2 + 2, "zero2": 2, "zero3": 0}[strategy]
    return psi * (whole + (2 + 2 + K - whole) / ranks)


def unit_of(text: str) -> float:
    """Returns one unit of the last digit of a printed number."""
    return 10.0 ** -len(text.partition(".")[2])


def agrees(text: str, gigabytes: float) -> bool:
    """Returns True where the printed number is the formula's within one unit of its last digit."""
    return abs(float(text) - gigabytes) < unit_of(text)


def how_printed(text: str, gigabytes: float) -> str:
    """Returns "exact", "rounded", "cut off", or "misprint" for a number that is neither."""
    unit = unit_of(text)
    if math.isclose(float(text), gigabytes, rel_tol=1e-12):
        return "exact"
    if math.isclose(float(text), math.floor(gigabytes / unit + 0.5) * unit, rel_tol=1e-9):
        return "rounded"
    return "cut off" if agrees(text, gigabytes) else "misprint"
