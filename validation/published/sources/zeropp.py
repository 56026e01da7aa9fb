"""ZeRO++, arXiv 2306.10209, section 3: bytes between nodes in units of M, 2-byte elements of all parameters.

A node's ranks send (Z - 1)/Z of M each time, of Z nodes; the paper counts M. Scales of quantized blocks are in no
formula of it: 4 bytes per 2048 elements here.
"""

from __future__ import annotations

from zerobench.theory.closed_forms import INT4, INT8

from ..figure import HALF_BYTES, PublishedFigure, between_nodes, crossing_per_element, most_of, psi

RANKS, NODE, BLOCK = 16, 4, 2048

GPT = "model=gpt model.hidden=512 model.heads=8 model.vocabulary=1024 data=synthetic backend=simulated precision=bf16"
ZERO3 = f"strategy=zero3 world_size={RANKS} node_size={NODE} {GPT}"
ALL = f"zeropp=all zeropp.weight_block={BLOCK} zeropp.gradient_block={BLOCK} {ZERO3}"

FORWARD, BACKWARD = ("forward", "all_gather"), ("backward", "all_gather")
REDUCTION = ("backward", "reduce_scatter")
QUANTIZED = crossing_per_element(RANKS, NODE, weight_block=BLOCK, gradient_block=BLOCK, secondary=True)

COUNTED = (
    ("ZeRO-3: forward all-gather", ZERO3, (FORWARD,), 1.0, "M", 1.0, 1.0),
    ("ZeRO-3: backward all-gather", ZERO3, (BACKWARD,), 1.0, "M", 1.0, 1.0),
    ("ZeRO-3: reduce-scatter", ZERO3, (REDUCTION,), 1.0, "M", 1.0, 1.0),
    ("ZeRO-3: total", ZERO3, (FORWARD, BACKWARD, REDUCTION), crossing_per_element(RANKS, NODE), "3M", 3.0, 1.0),
    ("ZeRO++: forward all-gather (qwZ)", ALL, (FORWARD,), INT8 / HALF_BYTES, "0.5M", 0.5, 0.1),
    ("ZeRO++: backward all-gather (hpZ)", ALL, (BACKWARD,), 0.0, "0", 0.0, 0.01),
    ("ZeRO++: reduce-scatter (qgZ)", ALL, (REDUCTION,), INT4 / HALF_BYTES, "0.25M", 0.25, 0.01),
    ("ZeRO++: total", ALL, (FORWARD, BACKWARD, REDUCTION), QUANTIZED, "0.75M", 0.75, 0.01),
)
"""Quantity, cell, what is counted, the formula's value, what is printed, its value and a unit of its last digit."""

ROWS = (
    *(
        PublishedFigure(
            "section 3", f"between nodes, {quantity}", "M", f"{formula:g}M", formula, printed, value, cell,
            between_nodes(*where), psi, digit=digit,
        )
        for quantity, cell, where, formula, printed, value, digit in COUNTED
    ),
    PublishedFigure(
        "section 3", f"hpZ: secondary shards of S = {NODE} ranks", "B per parameter", "2ψ/S", HALF_BYTES / NODE,
        "2ψ/S", HALF_BYTES / NODE, f"zeropp=hpz {ZERO3}", most_of("parameters"), psi, less=ZERO3,
    ),
)  # fmt: skip
