"""DeepSpeed's estimators of model states, deepspeed/runtime/zero: their outputs, and those of docs/code-docs/source/
memory.rst, for T5-3B on a node of eight GPUs. Their GB are 2^30 bytes.
"""

from __future__ import annotations

from ..figure import BF16, BUCKETS, PARAMETERS, WIDE, PublishedFigure, psi, states, states_per_parameter

N = 8
PSI = 2.851e9
GIB = PSI / 2**30
"""ψ bytes."""

FP32 = "precision.gradient_dtype=fp32"
LAYER = "4 bytes an element of the largest layer, 32e6 of them, which is in flight here"
ZERO2 = f"strategy=zero2 world_size={N} {BF16} {BUCKETS}"
ZERO3 = f"strategy=zero3 {PARAMETERS} world_size={N} {BF16}"
QUANTITY = f"ψ = 2.851e9, N = {N}"

ROWS = (
    PublishedFigure(
        "estimate_zero2_model_states_mem_needs", f"model states of a rank, ZeRO-2, {QUANTITY}", "GiB",
        "2ψ + (2 + K)ψ/N", GIB * states_per_parameter("zero2", N), "11.28", 11.28, ZERO2, states, psi,
        digit=0.01, scale=GIB,
        note="it counts 2ψ + 18ψ/N where ours is 2ψ + 14ψ/N: gradients in fp32, and a shard of fp16 parameters beside "
        "the whole ones",
    ),
    PublishedFigure(
        "memory.rst", f"model states of a rank, ZeRO-2, {QUANTITY}", "GiB",
        "2ψ + (2 + K)ψ/N", GIB * states_per_parameter("zero2", N), "15.93", 15.93, ZERO2, states, psi,
        digit=0.01, scale=GIB,
        note="the page counts 4ψ + 16ψ/N, gradients whole on every rank; the code of today 2ψ + 18ψ/N, the row above",
    ),
    PublishedFigure(
        "estimate_zero3_model_states_mem_needs", f"model states of a rank, ZeRO-3, {QUANTITY}", "GiB",
        "(2 + 2 + K)ψ/N", GIB * states_per_parameter("zero3", N), "6.09", 6.09, ZERO3, states, psi,
        digit=0.01, scale=GIB,
        note=f"it counts 18ψ/N where ours is 16ψ/N, for gradients in fp32; and {LAYER}",
    ),
    PublishedFigure(
        "estimate_zero3_model_states_mem_needs", f"the same with {FP32}", "GiB",
        "(2 + 4 + K)ψ/N", GIB * states_per_parameter("zero3", N, WIDE), "6.09", 6.09, f"{ZERO3} {FP32}", states, psi,
        digit=0.01, scale=GIB,
        note=f"18ψ/N in both; it adds {LAYER}",
    ),
)  # fmt: skip
