"""Korthikanti et al., Reducing Activation Recomputation, arXiv 2205.05198: bytes of a transformer layer.

The first is a GPT-2 of transformers as on a GPU, whose dropout keeps a mask of one byte an element; ours has no
dropout, and a fused attention kernel, which keeps 4 bytes a head and token in place of 5as/h.
"""

from __future__ import annotations

from zerobench.simulation.execute import Target

from ..figure import PublishedFigure, most_of, per_size

A, S, H = 8, 512, 1024

COMMON = f"sequence={S} micro_batch=2 data=synthetic backend=simulated precision=bf16 strategy=ddp world_size=1"
GPT2 = f"model=huggingface huggingface.architecture=gpt2 huggingface.hidden={H} huggingface.heads={A} {COMMON}"
GPT2 += " huggingface.vocabulary=1024 huggingface.options.activation_function=gelu"
OURS = f"model=gpt model.hidden={H} model.heads={A} model.vocabulary=1024 {COMMON}"
LAYERS = ("huggingface.layers=2", "huggingface.layers=4")
MATH, FLASH = Target("cuda", "math"), Target("cuda", "flash")

KEPT, SIZE = most_of("activations"), per_size("b", "s", "h", "L")
UNIT = "B per s·b·h"

ROWS = (
    PublishedFigure(
        "section 4, equation 1", f"a layer, attention in plain torch, a = {A}, s = {S}, h = {H}", UNIT, "34 + 5as/h",
        34 + 5 * A * S / H, "sbh(34 + 5as/h)", 34 + 5 * A * S / H,
        f"{GPT2} huggingface.options.attn_implementation=eager", KEPT, SIZE, digit=0.1, sizes=LAYERS, target=MATH,
    ),
    PublishedFigure(
        "section 5", "a layer, fused attention (our GPT: without the two dropout masks of 34)", UNIT,
        "34 - 2 + 4a/h", 34 - 2 + 4 * A / H, "34 sbh", 34.0, OURS, KEPT, SIZE, digit=1.0, target=FLASH,
        note="our GPT has no dropout, whose masks are 2 of the 34",
    ),
    PublishedFigure(
        "section 5", "a layer that is recomputed", UNIT, "2", 2.0, "2sbh", 2.0,
        f"{OURS} model.checkpointing=true", KEPT, SIZE, digit=0.1,
    ),
)  # fmt: skip
