"""Every variant of our stages as a cell, and accounted passes of many cells in one launch of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn import functional as F

import zerobench
from tests.cells import MODELS, cell
from zerobench.config.cell import CellConfig
from zerobench.config.schema import Gpt, Model
from zerobench.config.schema_memory import CheckpointActivations, FusedBuffers
from zerobench.config.schema_training import AdamW, Adamw8bit, AdamwBf16, Bf16, Fp16, Fp32, Muon, Rprop
from zerobench.launch.start_ranks import launch
from zerobench.registry import MODELS as REGISTRY
from zerobench.worker import RankJob, RankRecord, run_rank

BUCKET_BYTES = 256 * 1024


class HalfFrozen(nn.Module):
    """Nothing of the first two blocks and of what lies before them is trained: backward never comes to them."""

    def __init__(self, vocabulary: int, width: int = 40) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)) for _ in range(4))
        self.head = nn.Linear(width, vocabulary)
        for part in (self.embedding, *self.blocks[:2], self.blocks[2][1]):
            part.requires_grad_(False)

    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        for block in (*self.blocks, self.blocks[2]):
            x = x + block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def half_frozen(vocabulary: int = 256) -> nn.Module:
    return HalfFrozen(vocabulary)


zerobench.register_model("half_frozen", half_frozen)
MODELS["half_frozen"] = REGISTRY.schema_of("half_frozen", half_frozen, Model)()

MODELS["tiled"] = Gpt(layers=3, hidden=48, heads=4, tiles=3)


@dataclass(frozen=True)
class Variant:
    """`floor`: bytes a parameter at N ranks, where a document has a row for it. `volume`: in ψ, where that is round."""

    name: str
    floor: Callable[[int], float] | None = None
    volume: float | None = None
    more: dict[str, Any] = field(default_factory=dict)

    def config(self, n: int) -> CellConfig:
        options = {"model": "million", "bucket_bytes": BUCKET_BYTES, "micro_batch": 1, **self.more}
        one = cell(self.name, n, **options)
        assert not one.problems, one.problems
        return one.config


def _of(name: str, floor: Callable[[int], float] | None = None, volume: float | None = None, **more: Any) -> Variant:
    return Variant(name, floor, volume, more)


WIDE = Bf16(gradient_dtype="fp32", wire_dtype="bf16")
SMALL_TILE = Bf16(tile_bytes=64 * 1024)
LATE, EARLY = {"accumulate": "last"}, {"accumulate": "every"}

VARIANTS: dict[str, Variant] = {
    # the paper's rows: ZeRO, arXiv 1910.02054, figure 1 and section 3.1
    "zero1 fp32": _of("zero1", lambda n: 8 + 8 / n, 2),
    "zero2 fp32": _of("zero2", lambda n: 4 + 12 / n, 2),
    "zero3 fp32": _of("zero3", lambda n: 16 / n),
    "zero1 bf16": _of("zero1", lambda n: 4 + 12 / n, 2, precision=SMALL_TILE),
    "zero2 bf16": _of("zero2", lambda n: 2 + 14 / n, 2, precision=Bf16()),
    "zero3 bf16": _of("zero3", lambda n: 16 / n, precision=Bf16()),
    # Megatron-core's rows: dist_optimizer.md
    "megatron fp16, gradients fp16": _of(
        "megatron", lambda n: 4 + 16 / n, 2, precision=Fp16(gradient_dtype="fp16", initial_scale=1024.0)
    ),
    "megatron bf16, gradients fp32": _of("megatron", lambda n: 6 + 12 / n, 2, precision=Bf16()),
    "megatron fp32": _of("megatron", lambda n: 8 + 8 / n, 2),
    # gradients in another dtype, another wire, micro-batches reduced late or every time
    "zero1, every": _of("zero1", lambda n: 6 + 12 / n, 4, precision=WIDE, accumulation=3, strategy=EARLY),
    "zero2, last": _of("zero2", lambda n: 2 + 16 / n, 2, precision=WIDE, accumulation=2, strategy=LATE),
    "zero3, last": _of("zero3", precision=Bf16(wire_dtype="fp32"), accumulation=2, strategy=LATE),
    # others' choices
    "zero1 vendor": _of("zero1", None, 3, precision=Fp32(wire_dtype="bf16"), strategy={"mode": "vendor"}),
    "zero2 vendor": _of("zero2", None, 3, strategy={"mode": "vendor", "overlap_gather": True}),
    "zero3 vendor": _of("zero3", strategy={"mode": "vendor", "persistence_numel": 600}),
    "zero3 paper": _of("zero3", strategy={"mode": "paper", "prefetch": 2}),
    # tiles: units inside of units
    "zero3 tiled": _of("zero3", model="tiled", strategy={"prefetch": 2}),
    "zero3 tiled, recomputed": _of("zero3", model="tiled", precision=Bf16(), activation=CheckpointActivations()),
    "zero3 tiled, paper": _of("zero3", model="tiled", accumulation=2, strategy={"mode": "paper", "prefetch": 0}),
    # fused buffers, and an arena
    "zero2 fused": _of("zero2", None, 2, precision=Bf16(wire_dtype="fp32"), buffers=FusedBuffers()),
    "zero3 fused": _of("zero3", precision=Bf16(), buffers=FusedBuffers()),
    "zero1 arena": _of("zero1", None, 2, precision=WIDE, arena=True),
    "zero2 arena": _of("zero2", None, 3, accumulation=2, precision=Bf16(), arena=True),
    "zero2 arena, last": _of("zero2", None, 2, accumulation=2, precision=WIDE, strategy=LATE, arena=True),
    "zero3 arena": _of("zero3", arena=True, activation=CheckpointActivations()),
    # blocks that are graphs of torch.compile, whose gradients come together
    "zero1 compiled": _of("zero1", None, 2, compile="blocks"),
    "zero2 compiled": _of("zero2", None, 4, compile="blocks", accumulation=2, precision=Bf16()),
    "zero3 compiled": _of("zero3", compile="blocks", activation=CheckpointActivations()),
    "megatron compiled": _of("megatron", None, 2, compile="blocks"),
    # optimizers that are not fused go in tiles
    "zero2 rprop": _of("zero2", lambda n: 2 + 14 / n, 2, precision=SMALL_TILE, optimizer=Rprop()),
    "zero1 foreach": _of("zero1", lambda n: 8 + 8 / n, 2, optimizer=AdamW(implementation="foreach")),
    # matrices that one rank owns: as many elements on the wire, and 4 bytes a parameter less than Adam keeps
    "zero1 muon": _of("zero1", None, 2, optimizer=Muon()),
    "zero2 muon": _of("zero2", None, 2, optimizer=Muon(), precision=SMALL_TILE, strategy=LATE, accumulation=2),
    "zero3 muon": _of("zero3", optimizer=Muon()),
    "megatron muon": _of("megatron", None, 2, optimizer=Muon(), precision=Bf16()),
    # states of fewer bits: blocks of 256 elements, which nothing cuts
    "zero1 adamw8bit": _of("zero1", lambda n: 8 + (2 + 8 / 256) / n, optimizer=Adamw8bit()),
    "zero2 adamw8bit bf16": _of(
        "zero2", lambda n: 2 + (6 + 2 + 8 / 256) / n, precision=SMALL_TILE, optimizer=Adamw8bit()
    ),
    "zero3 adamw8bit": _of("zero3", lambda n: (8 + 2 + 8 / 256) / n, optimizer=Adamw8bit()),
    "zero3 adamw_bf16": _of("zero3", lambda n: 12 / n, optimizer=AdamwBf16()),
    # frozen parts, modules called twice
    "zero1 frozen": _of("zero1", model="half_frozen", bucket_bytes=4096),
    "zero3 frozen": _of("zero3", model="half_frozen", accumulation=2),
    "zero3 frozen, kept": _of("zero3", model="half_frozen", strategy={"persistence_numel": 100, "prefetch": 2}),
}


def account(configs: list[CellConfig], folder: Path) -> list[list[RankRecord]]:
    """The accounted pass of each config on all ranks, one after the other in one launch; the configs share N."""
    jobs = [(configs, rank, str(folder)) for rank in range(configs[0].world_size)]
    outcome = launch(_run_all, jobs, folder / "logs", timeout_s=200)
    assert outcome.status == "ok", outcome.reason
    return [list(records) for records in zip(*outcome.results, strict=True)]


def _run_all(job: tuple[list[CellConfig], int, str], tell: Any) -> list[RankRecord]:
    configs, rank, folder = job
    return [
        run_rank(RankJob(config, "accounted", rank, f"{folder}/rendezvous-{number}", folder), tell)
        for number, config in enumerate(configs)
    ]
