"""ZeRO-Infinity, arXiv 2104.07857: sections 3 and 4, figure 2a. One checkpoint per layer, ci = 1; its fp32 gradients
are a switch here, so that 20 bytes a parameter are 16 (neither), 18 (fp32 in place of fp16) or 20 (fp16, and cast all
at once). Its TB are 2^40 bytes, its K are 1024.
"""

from __future__ import annotations

from zerobench.simulation.execute import CUDA

from ..figure import (
    AT_ONCE,
    PARAMETERS,
    WIDE,
    PublishedFigure,
    flops,
    most_of,
    moved,
    per_size,
    psi,
    states,
    states_per_parameter,
    sum_of,
)

GPT = "model=gpt model.heads=8 model.vocabulary=256 data=synthetic backend=simulated precision=bf16"
# On a CPU every update compares the parameters with the masters, which takes hours at 100T.
WIDE_GPT = f"strategy=zero3 {PARAMETERS} world_size=1 {GPT} model.hidden=4096"
WIDER = ("model.hidden=4096", "model.hidden=8192")
B, S, H = 4, 256, 4096
TRAINED = f"{WIDE_GPT} model.checkpointing=true micro_batch={B} sequence={S}"
WORKING = f"offload=cpu offload.parameters=true strategy=zero3 world_size=1 strategy.prefetch=0 {GPT} model.layers=2"
FP32 = "precision.gradient_dtype=fp32"
MATH = "model=huggingface huggingface.architecture=gpt2 huggingface.hidden=1024 huggingface.heads=8"
MATH += " huggingface.vocabulary=1024 huggingface.options.attn_implementation=eager"
MATH += " huggingface.options.activation_function=gelu huggingface.options.attn_pdrop=0.0"
MATH += " huggingface.options.resid_pdrop=0.0 sequence=512 micro_batch=2 data=synthetic backend=simulated"
MATH += " precision=bf16 strategy=ddp world_size=1"
HF_LAYERS = ("huggingface.layers=2", "huggingface.layers=4")
MEMORY = (
    PublishedFigure(
        "section 3", "model states, fp16 gradients cast to fp32 all at once", "B per parameter", "20ψ",
        states_per_parameter("zero3", 1, AT_ONCE), "20", 20.0, f"{WIDE_GPT} buffers=fused", states, psi, digit=1.0,
        target=CUDA,
    ),
    PublishedFigure(
        "section 3", f"model states, gradients in fp32 alone ({FP32})", "B per parameter", "18ψ",
        states_per_parameter("zero3", 1, WIDE), "20", 20.0, f"{WIDE_GPT} {FP32}", states, psi, digit=1.0,
        target=CUDA,
        note="20 counts fp16 and fp32 gradients at once; with fp32 ones alone it is 18, without them 16",
    ),
    PublishedFigure(
        "section 3", "model states over nl·hd²", "B per nl·hd²", "20 · 12 nl·hd²", 240.0, "240 nl·hd²",
        240.0, f"{WIDE_GPT} buffers=fused", states, per_size("L", "h", "h"), digit=1.0, target=CUDA,
    ),
    PublishedFigure(
        "section 3", "activation checkpoints, ci = 1", "B per b·s·hd·nl", "2", 2.0, "2·b·s·hd·nl/ci", 2.0,
        TRAINED, most_of("activations"), per_size("b", "s", "h", "L"), target=CUDA,
    ),
    PublishedFigure(
        "section 3", "working memory of model states, a block a unit", "B per hd²", "16 hd²", 16.0,
        "16 hd²", 16.0, WORKING, states, per_size("h", "h"), sizes=WIDER,
        note="16 hd² is the largest Linear with its gradient; ours gathers a block, 24 hd² bytes, and holds the "
        "gradients of two, one filling and one leaving, and the last that autograd made, 8 hd²",
    ),
    PublishedFigure(
        "section 3", "the same with the MLP in tiles of 1/8", "B per hd²", "16 hd²", 16.0,
        "16 hd²", 16.0, f"{WORKING} model.tiles=8", states, per_size("h", "h"), sizes=WIDER,
        note="attention, 4 hd², is a unit that stays whole while tiles of 0.5 hd² come and go",
    ),
    PublishedFigure(
        "section 3", "activations between checkpoints, a = 8, s = 512, hd = 1024", "B per b·s·hd·nl",
        "2 · 16 + 2as/hd", 2 * 16 + 2 * 8 * 512 / 1024, "b·s·ci·(16 hd + 2as)",
        16 + 2 * 8 * 512 / 1024, MATH, most_of("activations"), per_size("b", "s", "h", "L"), sizes=HF_LAYERS,
        note="16 hd are elements, of 2 bytes each; 2as are the bytes of one fp16 matrix, kept without dropout",
    ),
)  # fmt: skip

SIZED = f"{GPT} model.hidden={H} micro_batch={B} sequence={S}"

EARLY = (
    "recomputing ends before a block's last product, which is 1/12 of what is counted, and attention's are not counted"
)

INTENSITIES = (
    PublishedFigure(
        "section 4", f"arithmetic intensity: parameters and gradients, b = {B}, s = {S}", "FLOPs per B",
        "s·b", float(S * B), "s·b", float(S * B),
        f"strategy=zero3 world_size=64 model.checkpointing=true {SIZED}", flops,
        sum_of(moved("all_gather", "reduce_scatter")),
        note=f"printed for 8ψ bytes a step; ours moves 6ψ, as recomputing and backward share a gather; {EARLY}",
    ),
    PublishedFigure(
        "section 4", f"arithmetic intensity: optimizer states, b = {B}, s = {S}", "FLOPs per B",
        "s·b/4", S * B / 4, "s·b/4", S * B / 4, f"offload=nvme offload.parameters=false {FP32} {TRAINED}", flops,
        sum_of(moved("read", "write")), note=EARLY,
    ),
    PublishedFigure(
        "section 4", f"arithmetic intensity: activation checkpoints, hd = {H}, ci = 1", "FLOPs per B",
        "24·hd·ci", 24.0 * H, "24·hd·ci", 24.0 * H,
        f"activation=checkpoint_offload strategy=zero3 world_size=1 {SIZED}", flops, sum_of(moved("down", "up")),
        note=EARLY,
    ),
)  # fmt: skip

MODELS = (
    ("0.1T", 80, 10, 128, "1.83", "0.05"),
    ("0.5T", 100, 20, 160, "9.16", "0.12"),
    ("1T", 128, 25, 256, "18.31", "0.20"),
    ("10T", 195, 64, 512, "182.81", "0.76"),
    ("100T", 315, 160, 1024, "1845.70", "3.08"),
)
"""Models of figure 2a: parameters, layers, hidden in 1024, heads, TB of model states, TB of checkpoints in a node."""

NODE, TOKENS = 32, 1024
"""Sequences of a node, and tokens of a sequence, of the checkpoints in figure 2a."""


def _figure_2a(
    name: str, layers: int, hidden: int, heads: int, states_tb: str, checkpoints_tb: str
) -> tuple[PublishedFigure, PublishedFigure]:
    """Returns a model's rows: both are of the same two cells, as wide as the model."""
    numbers = f"{name}: nl = {layers}, hd = {hidden}K"
    cell = f"{TRAINED} buffers=fused model.hidden={hidden * 1024} model.heads={heads}"
    squares, stream = layers * (hidden * 1024) ** 2 / 2**40, NODE * TOKENS * layers * hidden * 1024 / 2**40
    return (
        PublishedFigure(
            "figure 2a", f"model states, {numbers}", "TiB", "240 nl·hd²", 240 * squares, states_tb, float(states_tb),
            cell, states, per_size("L", "h", "h"), digit=0.01, scale=squares, target=CUDA,
            note="biases and norms, 13 hd of a layer, are simulated as well",
        ),
        PublishedFigure(
            "figure 2a", f"activation checkpoints of a node, b = {NODE}, s = {TOKENS}, {numbers}", "TiB",
            "2·b·s·hd·nl", 2 * stream, checkpoints_tb, float(checkpoints_tb), cell, most_of("activations"),
            per_size("b", "s", "h", "L"), digit=0.01, scale=stream, target=CUDA,
        ),
    )  # fmt: skip


FIGURE_2A = tuple(row for model in MODELS for row in _figure_2a(*model))

ROWS = (*MEMORY, *FIGURE_2A, *INTENSITIES)
