"""Cells for which fake execution is compared with real ranks: every strategy, every option that changes bytes."""

from __future__ import annotations

from typing import Any

import tests.distributed.variants  # registers models of users, which MODELS then has
from tests.cells import MODELS, cell
from zerobench.config import schema, schema_memory, schema_training
from zerobench.config.cell import CellConfig
from zerobench.config.schema import Measure

assert "half_frozen" in MODELS, tests.distributed.variants.__name__
MODELS["transformers"] = schema.HuggingfaceModel()

STEADY = Measure(steps=1, warmup=2, passes="accounted")
ALL_SIZES = (2, 3, 4)


class Variant:
    """A cell but for its world size. `sizes`: world sizes in which it makes sense; `more`: its other choices."""

    def __init__(self, strategy: str, /, model: str = "tiny", sizes: tuple[int, ...] = ALL_SIZES, **more: Any) -> None:
        self.strategy, self.model, self.sizes, self.more = strategy, model, sizes, more

    def config(self, n: int) -> CellConfig:
        """Returns the cell for a real world of `n` ranks."""
        one = cell(self.strategy, n, self.model, **{"measure": STEADY, "micro_batch": 1, **self.more})
        assert not one.problems, (self.strategy, self.more, one.problems)
        return one.config


BF16, FP16 = schema_training.Bf16(), schema_training.Fp16(initial_scale=1024.0)
WIDE = schema_training.Bf16(gradient_dtype="fp32", wire_dtype="bf16")
EARLY, LATE = {"accumulate": "every"}, {"accumulate": "last"}
CPU, NVME = schema_memory.CpuOffload, schema_memory.NvmeOffloadConfig
FOUR = (4,)

VARIANTS: dict[str, Variant] = {
    # every strategy, plain, and peers as tuned
    "ddp": Variant("ddp"),
    "zero1": Variant("zero1"),
    "zero2": Variant("zero2"),
    "zero3": Variant("zero3"),
    "megatron": Variant("megatron"),
    "fsdp2": Variant("fsdp2"),
    "fsdp2, tuned": Variant("fsdp2", tuned=True),
    "fsdp2_no_reshard": Variant("fsdp2_no_reshard"),
    "fsdp2_no_reshard, tuned": Variant("fsdp2_no_reshard", tuned=True),
    "zero_redundancy": Variant("zero_redundancy"),
    "zero_redundancy, tuned": Variant("zero_redundancy", tuned=True),
    # precisions
    "ddp bf16": Variant("ddp", precision=BF16),
    "ddp fp16": Variant("ddp", precision=FP16),
    "zero1 fp16, clipped": Variant("zero1", precision=FP16, clip=1.0),
    "zero1 bf16, gradients fp32": Variant("zero1", "odd", precision=WIDE),
    "zero2 bf16": Variant("zero2", "odd", precision=BF16),
    "zero2 fp16, accumulated": Variant("zero2", precision=FP16, accumulation=2),
    "zero3 bf16": Variant("zero3", "odd", precision=BF16),
    "zero3 fp16": Variant("zero3", precision=FP16),
    "megatron bf16": Variant("megatron", precision=BF16),
    "megatron fp16": Variant("megatron", precision=schema_training.Fp16(gradient_dtype="fp16", initial_scale=1024.0)),
    "fsdp2 bf16": Variant("fsdp2", precision=BF16),
    "fsdp2_no_reshard bf16, tuned": Variant("fsdp2_no_reshard", precision=BF16, tuned=True),
    # accumulation, clipping
    "ddp accumulated, clipped": Variant("ddp", accumulation=2, clip=1.0),
    "ddp, buckets copied": Variant("ddp", strategy={"gradient_as_bucket_view": False}),
    "ddp, unused looked for": Variant("ddp", "half_frozen", strategy={"find_unused_parameters": True}),
    "zero1, every micro-batch": Variant("zero1", precision=WIDE, accumulation=3, strategy=EARLY),
    "zero2, last micro-batch": Variant("zero2", precision=WIDE, accumulation=2, strategy=LATE, clip=0.5),
    "zero3 accumulated, clipped by the largest": Variant("zero3", accumulation=2, clip=0.5, clip_norm="inf"),
    "fsdp2 accumulated, clipped": Variant("fsdp2", accumulation=2, clip=1.0),
    "fsdp2_no_reshard, last micro-batch": Variant("fsdp2_no_reshard", accumulation=2, strategy=LATE),
    "zero_redundancy accumulated, clipped": Variant("zero_redundancy", accumulation=2, clip=1.0),
    # modes and other choices of our stages
    "zero1 vendor": Variant("zero1", strategy={"mode": "vendor"}),
    "zero1 all_reduce": Variant("zero1", strategy={"reduce_with": "all_reduce"}),
    "zero2 vendor, gathers overlap": Variant("zero2", strategy={"mode": "vendor", "overlap_gather": True}),
    "zero3 vendor": Variant("zero3", strategy={"mode": "vendor", "persistence_numel": 600}),
    "zero3 paper, prefetch 2": Variant("zero3", strategy={"mode": "paper", "prefetch": 2}),
    "zero3, kept for backward": Variant("zero3", strategy={"reshard_after_forward": False, "keep_root": True}),
    "zero2 meta": Variant("zero2", strategy={"construct": "meta"}),
    "zero3 meta": Variant("zero3", strategy={"construct": "meta"}),
    # tiers
    "zero1 offload cpu": Variant("zero1", offload=CPU(), precision=BF16),
    "zero2 offload cpu, clipped": Variant("zero2", offload=CPU(), clip=1.0),
    "zero2 offload gradients alone": Variant("zero2", offload=CPU(optimizer=False)),
    "zero2 offload, a part": Variant("zero2", "odd", offload=CPU(fraction=0.4), accumulation=2),
    "zero2 offload, delayed": Variant("zero2", offload=CPU(delayed=True, delayed_after=1)),
    "zero3 offload, parameters too": Variant("zero3", offload=CPU(parameters=True), precision=BF16),
    "zero2 nvme": Variant("zero2", offload=NVME(block_bytes=64 * 1024)),
    "zero3 nvme": Variant("zero3", offload=NVME(block_bytes=64 * 1024), precision=BF16),
    # activations
    "zero1 checkpointing model": Variant("zero1", "checkpointed"),
    "zero2 recomputed": Variant("zero2", activation=schema_memory.CheckpointActivations()),
    "zero3 recomputed": Variant("zero3", activation=schema_memory.CheckpointActivations()),
    "fsdp2 recomputed": Variant("fsdp2", activation=schema_memory.CheckpointActivations()),
    "zero3 activations offloaded": Variant("zero3", activation=schema_memory.OffloadActivations(least_bytes=4096)),
    "zero2 both": Variant("zero2", activation=schema_memory.CheckpointOffloadActivations(least_bytes=1024)),
    # blocks that are graphs of torch.compile
    "ddp compiled": Variant("ddp", compile="blocks"),
    "zero2 compiled, meta": Variant("zero2", compile="blocks", precision=BF16, strategy={"construct": "meta"}),
    "zero3 compiled, recomputed": Variant("zero3", compile="blocks", activation=schema_memory.CheckpointActivations()),
    "zero3 compiled, selective": Variant("zero3", compile="blocks", activation=schema_memory.SelectiveActivations()),
    "fsdp2 compiled": Variant("fsdp2", compile="blocks", accumulation=2),
    # groups and ZeRO++
    "zero2 groups of two": Variant("zero2", sizes=FOUR, shard_group=2, node_size=2),
    "zero3 groups of two": Variant("zero3", sizes=FOUR, shard_group=2),
    "zero1 nodes of two": Variant("zero1", sizes=FOUR, node_size=2),
    "zero3 qwz": Variant("zero3", sizes=FOUR, zeropp=schema_memory.Qwz(), node_size=2),
    "zero3 hpz": Variant("zero3", sizes=FOUR, zeropp=schema_memory.Hpz(), node_size=2),
    "zero3 qgz": Variant("zero3", sizes=FOUR, zeropp=schema_memory.Qgz(), node_size=2),
    "zero3 all of ZeRO++": Variant(
        "zero3", sizes=FOUR, zeropp=schema_memory.AllOfZeropp(), node_size=2, precision=BF16
    ),
    "zero3 qwz, one node": Variant("zero3", zeropp=schema_memory.Qwz()),
    # buffers
    "zero1 arena": Variant("zero1", arena=True, precision=WIDE),
    "zero2 arena, accumulated": Variant("zero2", arena=True, precision=BF16, accumulation=2),
    "zero3 arena, recomputed": Variant("zero3", arena=True, activation=schema_memory.CheckpointActivations()),
    "zero2 fused": Variant("zero2", precision=BF16, buffers=schema_memory.FusedBuffers()),
    "zero3 fused": Variant("zero3", precision=BF16, buffers=schema_memory.FusedBuffers()),
    "zero3 tiled": Variant("zero3", "tiles", strategy={"prefetch": 2}),
    # optimizers
    "zero1 sgd": Variant("zero1", optimizer=schema_training.Sgd(momentum=0.9)),
    "zero2 nadam": Variant("zero2", "odd", optimizer=schema_training.NAdam()),
    "zero3 radam": Variant("zero3", optimizer=schema_training.RAdam()),
    "ddp adagrad": Variant("ddp", optimizer=schema_training.Adagrad()),
    "zero2 rprop, in tiles": Variant(
        "zero2", precision=schema_training.Bf16(tile_bytes=65536), optimizer=schema_training.Rprop()
    ),
    "zero1 adamw, foreach": Variant("zero1", optimizer=schema_training.AdamW(implementation="foreach")),
    "fsdp2 asgd": Variant("fsdp2", optimizer=schema_training.Asgd()),
    "zero_redundancy rmsprop": Variant("zero_redundancy", optimizer=schema_training.RMSprop()),
    "ddp adadelta": Variant("ddp", optimizer=schema_training.Adadelta()),
    "megatron adamax": Variant("megatron", optimizer=schema_training.Adamax()),
    # models
    "zero2 mlp": Variant("zero2", "mlp"),
    "fsdp2 mlp": Variant("fsdp2", "mlp"),
    "zero3 untied, odd": Variant("zero3", "odd"),
    "fsdp2 odd": Variant("fsdp2", "odd"),
    "zero_redundancy odd, tuned": Variant("zero_redundancy", "odd", tuned=True),
    "zero3 frozen parts": Variant("zero3", "half_frozen"),
    "zero1 frozen parts": Variant("zero1", "half_frozen", bucket_bytes=4096),
    "ddp transformers": Variant("ddp", "transformers"),
    "zero2 transformers": Variant("zero2", "transformers"),
    "zero3 transformers": Variant("zero3", "transformers"),
    "fsdp2 transformers": Variant("fsdp2", "transformers"),
    "zero3 large vocabulary": Variant("zero3", "words", micro_batch=2),
    "ddp large vocabulary": Variant("ddp", "words", micro_batch=2),
}
"""Name -> cell. What a name does not say is fp32, AdamW, a GPT of three layers."""
