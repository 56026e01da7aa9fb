"""ZeRO, arXiv 1910.02054v3: figure 1, section 7 and the residual states of sections 3 and 6. GB are 1e9 bytes."""

from __future__ import annotations

from ..figure import (
    BF16,
    BUCKETS,
    PARAMETERS,
    PublishedFigure,
    most_of,
    per_size,
    psi,
    states,
    states_per_parameter,
    volume,
    volume_per_parameter,
)

N = 64
BILLIONS = 7.5
"""ψ of figure 1, in 1e9."""

STAGES = (
    ("ddp", "(2 + 2 + K)ψ", "120", 0),
    ("zero1", "(2 + 2)ψ + Kψ/N", "31.4", 1),
    ("zero2", "2ψ + (2 + K)ψ/N", "16.6", 1),
    ("zero3", "(2 + 2 + K)ψ/N", "1.9", 1),
)
"""Strategy, its states, GB of them in figure 1, and digits behind the point."""


def _cell(strategy: str, words: str = BF16) -> str:
    return f"strategy={strategy} world_size={N} {words} {PARAMETERS if strategy == 'zero3' else BUCKETS}"


STATES = tuple(
    PublishedFigure(
        "figure 1", f"model states of a rank, {strategy}, ψ = 7.5e9, N = {N}", "GB", equation,
        BILLIONS * states_per_parameter(strategy, N), printed, float(printed), _cell(strategy), states, psi,
        digit=10.0**-digits, scale=BILLIONS,
    )
    for strategy, equation, printed, digits in STAGES
)  # fmt: skip

VOLUMES = tuple(
    PublishedFigure(
        f"section 7.{section}", f"volume of a step, {strategy}", "elements per parameter",
        f"{volume_per_parameter(strategy):g}ψ", volume_per_parameter(strategy), f"{printed}ψ", printed,
        _cell(strategy), volume, psi, digit=1.0,
    )
    for strategy, printed, section in (
        ("ddp", 2, "1"), ("zero1", 2, "2.1"), ("zero2", 2, "2.1"), ("zero3", 3, "2.2"),
    )
)  # fmt: skip

GPT2 = "model=gpt model.hidden=1600 model.heads=16 model.vocabulary=1024 sequence=1024 micro_batch=32"
GPT2 += " data=synthetic backend=simulated precision=bf16 strategy=ddp world_size=1"
GPT2_LAYERS = 48
STREAM = 32 * 1024 * 1600
"""Elements of the residual stream of GPT-2 1.5B: bsh."""

FUSED = f"strategy=zero2 world_size=4 {BF16} precision.wire_dtype=fp32 buffers=fused"
HUNDRED = 125 * 32 * 1024 * 8192
"""bshL of the 100B model."""

ACTIVATIONS = most_of("activations")
KERNEL = "our GPT has a fused attention and no dropout, and keeps 16bsh of a layer; materialized it is 17 + 2.5as/h"

RESIDUAL = (
    PublishedFigure(
        "section 3.2", "activations of a GPT-2-like model", "elements per bshL", "12bshL",
        12.0, "12", 12.0, GPT2, ACTIVATIONS, per_size("b", "s", "h", "L"), digit=1.0, scale=0.5, note=KERNEL,
    ),
    PublishedFigure(
        "section 3.2", "activations of 1.5B GPT-2, b = 32, s = 1024", "GB", "2 · 12bshL",
        2 * 12 * STREAM * GPT2_LAYERS / 1e9, "60", 60.0, GPT2, ACTIVATIONS, per_size("L"), digit=1.0,
        scale=GPT2_LAYERS / 1e9, note=f"see the row above: 2 · 16bshL; {KERNEL}",
    ),
    PublishedFigure(
        "section 3.2", "the same with checkpoints, without what is computed again", "GB", "2bshL",
        2 * STREAM * GPT2_LAYERS / 1e9, "8", 8.0, f"{GPT2} model.checkpointing=true", ACTIVATIONS, per_size("L"),
        digit=1.0, scale=GPT2_LAYERS / 1e9,
        note="the rest of the printed 8 GB is what backward holds of one layer: see in flight",
    ),
    PublishedFigure(
        "section 6.1", "checkpoints of 100B, 125 layers, b = 32, s = 1024", "1e9 elements", "bshL",
        HUNDRED / 1e9, "33 GB", 33.0, f"{GPT2} model.checkpointing=true", ACTIVATIONS, per_size("b", "s", "h", "L"),
        digit=1.0, scale=HUNDRED / 2e9, misprint="33.55e9 elements, not bytes: 67.1 GB in fp16",
    ),
    PublishedFigure(
        "section 3.2", "a fused fp32 buffer of all gradients", "B per parameter", "4ψ",
        4.0, "4", 4.0, FUSED, most_of("communication"), psi, digit=1.0,
    ),
    PublishedFigure(
        "section 3.2", "the same for 1.5B parameters", "GB", "4ψ",
        6.0, "6", 6.0, FUSED, most_of("communication"), psi, digit=1.0,
        scale=1.5,
    ),
)  # fmt: skip

ROWS = (*STATES, *VOLUMES, *RESIDUAL)
