"""Cells for which fake execution is compared with real ranks: every strategy, every option that changes bytes."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import tests.distributed.variants  # registers models of users, which MODELS then has
from tests.cells import MODELS, cell
from zerobench.config import schema, schema_memory, schema_training
from zerobench.config.cell import CellConfig
from zerobench.config.schema import Measure

__all__ = ["VARIANTS", "Cells", "Variant", "random_cells"]

assert "half_frozen" in MODELS, tests.distributed.variants.__name__
MODELS["transformers"] = schema.HuggingfaceModel()

Cells = dict[tuple[str, int], CellConfig]
"""(name, world size) -> a cell."""

STEADY = Measure(steps=1, warmup=2, passes="accounted")
ALL_SIZES = (2, 3, 4)


@dataclass(frozen=True)
class Variant:
    """A cell but for its world size. `sizes`: world sizes in which it makes sense."""

    strategy: str
    model: str = "tiny"
    sizes: tuple[int, ...] = ALL_SIZES
    more: dict[str, Any] = field(default_factory=dict)

    def config(self, n: int) -> CellConfig:
        """Returns the cell for a real world of `n` ranks."""
        options = {"measure": STEADY, "micro_batch": 1, **self.more}
        one = cell(self.strategy, n, self.model, **options)
        assert not one.problems, (self, one.problems)
        return one.config


def _of(name: str, model: str = "tiny", sizes: tuple[int, ...] = ALL_SIZES, **more: Any) -> Variant:
    return Variant(name, model, sizes, more)


BF16, FP16 = schema_training.Bf16(), schema_training.Fp16(initial_scale=1024.0)
WIDE = schema_training.Bf16(gradient_dtype="fp32", wire_dtype="bf16")
EARLY, LATE = {"accumulate": "every"}, {"accumulate": "last"}
CPU, NVME = schema_memory.CpuOffload, schema_memory.NvmeOffloadConfig
PAIRS, FOUR = (2, 4), (4,)

VARIANTS: dict[str, Variant] = {
    # every strategy, plain, and peers as tuned
    "ddp": _of("ddp"),
    "zero1": _of("zero1"),
    "zero2": _of("zero2"),
    "zero3": _of("zero3"),
    "megatron": _of("megatron"),
    "fsdp2": _of("fsdp2"),
    "fsdp2, tuned": _of("fsdp2", tuned=True),
    "fsdp2_no_reshard": _of("fsdp2_no_reshard"),
    "fsdp2_no_reshard, tuned": _of("fsdp2_no_reshard", tuned=True),
    "zero_redundancy": _of("zero_redundancy"),
    "zero_redundancy, tuned": _of("zero_redundancy", tuned=True),
    # precisions
    "ddp bf16": _of("ddp", precision=BF16),
    "ddp fp16": _of("ddp", precision=FP16),
    "zero1 fp16, clipped": _of("zero1", precision=FP16, clip=1.0),
    "zero1 bf16, gradients fp32": _of("zero1", "odd", precision=WIDE),
    "zero2 bf16": _of("zero2", "odd", precision=BF16),
    "zero2 fp16, accumulated": _of("zero2", precision=FP16, accumulation=2),
    "zero3 bf16": _of("zero3", "odd", precision=BF16),
    "zero3 fp16": _of("zero3", precision=FP16),
    "megatron bf16": _of("megatron", precision=BF16),
    "megatron fp16": _of("megatron", precision=schema_training.Fp16(gradient_dtype="fp16", initial_scale=1024.0)),
    "fsdp2 bf16": _of("fsdp2", precision=BF16),
    "fsdp2_no_reshard bf16, tuned": _of("fsdp2_no_reshard", precision=BF16, tuned=True),
    # accumulation, clipping
    "ddp accumulated, clipped": _of("ddp", accumulation=2, clip=1.0),
    "ddp, buckets copied": _of("ddp", strategy={"gradient_as_bucket_view": False}),
    "ddp, unused looked for": _of("ddp", "half_frozen", strategy={"find_unused_parameters": True}),
    "zero1, every micro-batch": _of("zero1", precision=WIDE, accumulation=3, strategy=EARLY),
    "zero2, last micro-batch": _of("zero2", precision=WIDE, accumulation=2, strategy=LATE, clip=0.5),
    "zero3 accumulated, clipped by the largest": _of("zero3", accumulation=2, clip=0.5, clip_norm="inf"),
    "fsdp2 accumulated, clipped": _of("fsdp2", accumulation=2, clip=1.0),
    "fsdp2_no_reshard, last micro-batch": _of("fsdp2_no_reshard", accumulation=2, strategy=LATE),
    "zero_redundancy accumulated, clipped": _of("zero_redundancy", accumulation=2, clip=1.0),
    # modes and other choices of our stages
    "zero1 vendor": _of("zero1", strategy={"mode": "vendor"}),
    "zero1 all_reduce": _of("zero1", strategy={"reduce_with": "all_reduce"}),
    "zero2 vendor, gathers overlap": _of("zero2", strategy={"mode": "vendor", "overlap_gather": True}),
    "zero3 vendor": _of("zero3", strategy={"mode": "vendor", "persistence_numel": 600}),
    "zero3 paper, prefetch 2": _of("zero3", strategy={"mode": "paper", "prefetch": 2}),
    "zero3, kept for backward": _of("zero3", strategy={"reshard_after_forward": False, "keep_root": True}),
    "zero2 meta": _of("zero2", strategy={"construct": "meta"}),
    "zero3 meta": _of("zero3", strategy={"construct": "meta"}),
    # tiers
    "zero1 offload cpu": _of("zero1", offload=CPU(), precision=BF16),
    "zero2 offload cpu, clipped": _of("zero2", offload=CPU(), clip=1.0),
    "zero2 offload gradients alone": _of("zero2", offload=CPU(optimizer=False)),
    "zero2 offload, a part": _of("zero2", "odd", offload=CPU(fraction=0.4), accumulation=2),
    "zero2 offload, delayed": _of("zero2", offload=CPU(delayed=True, delayed_after=1)),
    "zero3 offload, parameters too": _of("zero3", offload=CPU(parameters=True), precision=BF16),
    "zero2 nvme": _of("zero2", offload=NVME(block_bytes=64 * 1024)),
    "zero3 nvme": _of("zero3", offload=NVME(block_bytes=64 * 1024), precision=BF16),
    # activations
    "zero1 checkpointing model": _of("zero1", "checkpointed"),
    "zero2 recomputed": _of("zero2", activation=schema_memory.CheckpointActivations()),
    "zero3 recomputed": _of("zero3", activation=schema_memory.CheckpointActivations()),
    "fsdp2 recomputed": _of("fsdp2", activation=schema_memory.CheckpointActivations()),
    "zero3 activations offloaded": _of("zero3", activation=schema_memory.OffloadActivations(least_bytes=4096)),
    "zero2 both": _of("zero2", activation=schema_memory.CheckpointOffloadActivations(least_bytes=1024)),
    # blocks that are graphs of torch.compile
    "ddp compiled": _of("ddp", compile="blocks"),
    "zero2 compiled, meta": _of("zero2", compile="blocks", precision=BF16, strategy={"construct": "meta"}),
    "zero3 compiled, recomputed": _of("zero3", compile="blocks", activation=schema_memory.CheckpointActivations()),
    "zero3 compiled, selective": _of("zero3", compile="blocks", activation=schema_memory.SelectiveActivations()),
    "fsdp2 compiled": _of("fsdp2", compile="blocks", accumulation=2),
    # groups and ZeRO++
    "zero2 groups of two": _of("zero2", sizes=FOUR, shard_group=2, node_size=2),
    "zero3 groups of two": _of("zero3", sizes=FOUR, shard_group=2),
    "zero1 nodes of two": _of("zero1", sizes=FOUR, node_size=2),
    "zero3 qwz": _of("zero3", sizes=FOUR, zeropp=schema_memory.Qwz(), node_size=2),
    "zero3 hpz": _of("zero3", sizes=FOUR, zeropp=schema_memory.Hpz(), node_size=2),
    "zero3 qgz": _of("zero3", sizes=FOUR, zeropp=schema_memory.Qgz(), node_size=2),
    "zero3 all of ZeRO++": _of("zero3", sizes=FOUR, zeropp=schema_memory.AllOfZeropp(), node_size=2, precision=BF16),
    "zero3 qwz, one node": _of("zero3", zeropp=schema_memory.Qwz()),
    # buffers
    "zero1 arena": _of("zero1", arena=True, precision=WIDE),
    "zero2 arena, accumulated": _of("zero2", arena=True, precision=BF16, accumulation=2),
    "zero3 arena, recomputed": _of("zero3", arena=True, activation=schema_memory.CheckpointActivations()),
    "zero2 fused": _of("zero2", precision=BF16, buffers=schema_memory.FusedBuffers()),
    "zero3 fused": _of("zero3", precision=BF16, buffers=schema_memory.FusedBuffers()),
    "zero3 tiled": _of("zero3", "tiles", strategy={"prefetch": 2}),
    # optimizers
    "zero1 sgd": _of("zero1", optimizer=schema_training.Sgd(momentum=0.9)),
    "zero2 nadam": _of("zero2", "odd", optimizer=schema_training.NAdam()),
    "zero3 radam": _of("zero3", optimizer=schema_training.RAdam()),
    "ddp adagrad": _of("ddp", optimizer=schema_training.Adagrad()),
    "zero2 rprop, in tiles": _of(
        "zero2", precision=schema_training.Bf16(tile_bytes=65536), optimizer=schema_training.Rprop()
    ),
    "zero1 adamw, foreach": _of("zero1", optimizer=schema_training.AdamW(implementation="foreach")),
    "fsdp2 asgd": _of("fsdp2", optimizer=schema_training.Asgd()),
    "zero_redundancy rmsprop": _of("zero_redundancy", optimizer=schema_training.RMSprop()),
    "ddp adadelta": _of("ddp", optimizer=schema_training.Adadelta()),
    "megatron adamax": _of("megatron", optimizer=schema_training.Adamax()),
    # models
    "zero2 mlp": _of("zero2", "mlp"),
    "fsdp2 mlp": _of("fsdp2", "mlp"),
    "zero3 untied, odd": _of("zero3", "odd"),
    "fsdp2 odd": _of("fsdp2", "odd"),
    "zero_redundancy odd, tuned": _of("zero_redundancy", "odd", tuned=True),
    "zero3 frozen parts": _of("zero3", "half_frozen"),
    "zero1 frozen parts": _of("zero1", "half_frozen", bucket_bytes=4096),
    "ddp transformers": _of("ddp", "transformers"),
    "zero2 transformers": _of("zero2", "transformers"),
    "zero3 transformers": _of("zero3", "transformers"),
    "fsdp2 transformers": _of("fsdp2", "transformers"),
    "zero3 large vocabulary": _of("zero3", "words", micro_batch=2),
    "ddp large vocabulary": _of("ddp", "words", micro_batch=2),
}
"""Name -> cell. What a name does not say is fp32, AdamW, a GPT of three layers."""


def random_cells(count: int) -> Cells:
    """Returns random cells, the same in each call: two eager variants of a strategy combined, with random sizes."""
    draw, cells = random.Random(0), Cells()
    eager = {name: one for name, one in VARIANTS.items() if "compile" not in one.more}
    strategies = sorted({one.strategy for one in eager.values()})
    while len(cells) < count:
        strategy = draw.choice(strategies)
        names = draw.choices([name for name, one in eager.items() if one.strategy == strategy], k=2)
        first, second = (eager[name] for name in names)
        sizes: dict[str, Any] = {"layers": draw.randint(1, 4), "hidden": 4 * draw.randint(2, 20)}
        sizes["vocabulary"] = draw.randint(256, 2000)
        MODELS["random"] = schema.Gpt(heads=draw.choice((1, 2, 4)), tied=draw.random() < 0.5, **sizes)
        options: dict[str, Any] = {
            "accumulation": draw.randint(1, 3), "clip": draw.choice((None, 1.0)), "micro_batch": draw.randint(1, 2),
            "sequence": 8 * draw.randint(1, 4), "bucket_bytes": draw.choice((4096, 65536, 1 << 20)),
        }  # fmt: skip
        chosen = " ".join(f"{name}={value}" for name, value in options.items())
        options["strategy"] = first.more.get("strategy", {}) | second.more.get("strategy", {})
        model, n = draw.choice((first.model, second.model, "random", "random")), draw.choice(ALL_SIZES)
        one = cell(strategy, n, model, measure=STEADY, **{**first.more, **second.more, **options})
        if n in first.sizes and n in second.sizes and not one.problems:
            words = " ".join(f"{name}={value}" for name, value in sizes.items()) if model == "random" else model
            cells[f"{len(cells)}: {' + '.join(dict.fromkeys(names))}: {words} {chosen}", n] = one.config
    return cells
