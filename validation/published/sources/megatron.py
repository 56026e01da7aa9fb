"""Megatron-core's distributed optimizer, docs/source/api-guide/dist_optimizer.md: bytes a parameter over d ranks."""

from __future__ import annotations

from ..figure import AT_ONCE, GPT, WIDE, PublishedFigure, psi, states, states_per_parameter

D = 8

FP16 = "precision=fp16 precision.gradient_dtype=fp16"
KINDS = (
    ("fp16 parameters, fp16 gradients", FP16, AT_ONCE, 2, (20, 4, 16)),
    ("bf16 parameters, fp32 gradients", "precision=bf16", WIDE, 2, (18, 6, 12)),
    ("fp32 parameters, fp32 gradients", "precision=fp32", WIDE, 4, (16, 8, 8)),
)
"""Name, words, dtypes as theory sees them, bytes of a parameter, and the printed whole, constant and divided bytes."""

ROWS = tuple(
    PublishedFigure(
        "table of dist_optimizer.md", f"{name}, {how}", "B per parameter",
        "P + G + K" if ranks == 1 else "P + G' + (G'' + K)/d",
        states_per_parameter("megatron", ranks, precision, size),
        f"{whole}" if ranks == 1 else f"{kept} + {divided}/d", whole if ranks == 1 else kept + divided / ranks,
        f"strategy=megatron world_size={ranks} {words} {GPT}", states, psi,
        digit=1.0 if ranks == 1 else None,
    )
    for name, words, precision, size, (whole, kept, divided) in KINDS
    for ranks, how in ((1, "not distributed"), (D, f"d = {D}"))
)  # fmt: skip
