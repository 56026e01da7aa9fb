"""Random models under random options, as cells: what a property of every run is held against."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import zerobench
from tests.cells import MODELS, cell
from zerobench.config import schema_memory, schema_training
from zerobench.config.cell import CellConfig
from zerobench.config.schema import Measure, Model
from zerobench.launch.start_ranks import launch
from zerobench.predict.estimate import simulated_rank
from zerobench.registry import MODELS as REGISTRY
from zerobench.worker import RankJob, RankRecord, run_rank

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "megatron")


class RandomBlock(nn.Module):
    """One to three layers of odd widths, some without a bias, and maybe a norm; `inner`: a block inside of it."""

    def __init__(self, width: int, draw: random.Random, inner: nn.Module | None = None) -> None:
        super().__init__()
        widths = [width, *(draw.choice((3, 17, 40, 65)) for _ in range(draw.randrange(3))), width]
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=draw.random() < 0.7) for a, b in pairwise(widths))
        self.norm = nn.LayerNorm(width) if draw.random() < 0.5 else None
        self.inner = inner

    def forward(self, x):
        h = x if self.norm is None else self.norm(x)
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return x + (h if self.inner is None else self.inner(h))


class RandomNetwork(nn.Module):
    """Blocks in a list, of which one may run twice; a tied head, a scalar, frozen and idle parameters, as they fall."""

    def __init__(self, vocabulary: int, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        width = draw.choice((5, 16, 31, 48))
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            RandomBlock(width, draw, RandomBlock(width, draw) if draw.random() < 0.2 else None)
            for _ in range(draw.randint(1, 4))
        )
        self.head = nn.Linear(width, vocabulary, bias=draw.random() < 0.5)
        if draw.random() < 0.4:
            self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(1.5)) if draw.random() < 0.5 else 1.5
        self.idle = nn.Linear(width, 7) if draw.random() < 0.3 else None
        self.again = draw.randrange(len(self.blocks)) if draw.random() < 0.3 else None
        for parameter in self.blocks.parameters():
            parameter.requires_grad_(draw.random() > 0.15)

    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        for block in [*self.blocks, *([] if self.again is None else [self.blocks[self.again]])]:
            x = block(x)
        return F.cross_entropy(self.head(x * self.scale).flatten(0, 1), targets.flatten())


def random_network(vocabulary: int = 256, seed: int = 0) -> nn.Module:
    return RandomNetwork(vocabulary, seed)


@contextmanager
def registered() -> Iterator[None]:
    """The model is known in here, and not to other tests of this process, which list all that is known."""
    zerobench.register_model("random_network", random_network)
    yield
    del REGISTRY.builders["random_network"]


@registered()
def random_config(seed: int, strategy: str, n: int, backend: str = "simulated") -> CellConfig:
    """A cell that makes sense, of one accounted step; the same for the same seed. Raises where none is found."""
    draw = random.Random(f"{seed} {strategy} {n}")
    name = f"random {seed}"
    MODELS[name] = REGISTRY.schema_of("random_network", random_network, Model)(seed=draw.randrange(2**31))
    for _ in range(50):
        options = _options(draw, strategy, n)
        one = cell(strategy, n, name, backend=backend, bucket_bytes=draw.choice((1024, 4096, 16384)), **options)
        if not one.problems:
            return one.changed(measure=Measure(1, 2 if options.get("arena") else 1)).config
    raise AssertionError(one.problems)


def _options(draw: random.Random, strategy: str, n: int) -> dict[str, Any]:
    options: dict[str, Any] = {
        "precision": schema_training.Fp32() if draw.random() < 0.5 else _half(draw, strategy),
        "accumulation": draw.randint(1, 3),
        "optimizer": draw.choice((schema_training.AdamW(), schema_training.Sgd(momentum=0.9), schema_training.Rprop())),
        "micro_batch": 1,
        "sequence": 4,
    }
    if strategy == "ddp":
        return options | {"strategy": {"find_unused_parameters": True}}
    if strategy != "megatron":
        section: dict[str, Any] = {
            "accumulate": draw.choice(("last", "every")),
            "mode": draw.choice(("own", "paper", "vendor")),
        }
        if strategy == "zero3":
            section |= {"prefetch": draw.randrange(3), "persistence_numel": draw.choice((0, 0, 20, 600))}
            section |= {"reshard_after_forward": draw.random() < 0.8, "keep_root": draw.choice((None, True, False))}
        else:
            section |= {"reduce_with": draw.choice((None, "all_reduce")), "overlap_gather": draw.random() < 0.3}
        options |= {"strategy": section} | _features(draw, strategy, n)
    return options


def _half(draw: random.Random, strategy: str) -> schema_training.Precision:
    """bf16 or fp16, with a loss scale that overflows nothing."""
    options: dict[str, Any] = {"tile_bytes": draw.choice((256, 65536))}
    if strategy != "ddp":
        options |= draw.choice(({}, {"gradient_dtype": "fp32"}, {"wire_dtype": "fp32"}))
    if draw.random() < 0.5:
        return schema_training.Bf16(**options)
    return schema_training.Fp16(initial_scale=16.0, **options)


def _features(draw: random.Random, strategy: str, n: int) -> dict[str, Any]:
    """At most one of the features that compose with our stages."""
    kind = draw.choice(("none", "none", "arena", "fused", "groups", "nodes", "nodes", "offload"))
    if kind == "arena":
        return {"arena": True}
    if kind == "fused":
        return {"buffers": schema_memory.FusedBuffers()}
    if kind in ("groups", "nodes") and n % 2 == 0 and n > 2:
        nodes: dict[str, Any] = {"shard_group": 2} if kind == "groups" else {"node_size": 2}
        return nodes | ({"zeropp": schema_memory.AllOfZeropp()} if strategy == "zero3" and kind == "nodes" else {})
    if kind == "offload":
        both = {"optimizer": draw.random() < 0.7, "gradients": draw.random() < 0.7}
        return (
            {"offload": schema_memory.CpuOffload(**both, fraction=draw.choice((1.0, 0.4)))}
            if any(both.values())
            else {}
        )
    return {}


def account_each(configs: list[dict[str, Any]], folder: Path, ranks: int | None = None) -> list[list[RankRecord]]:
    """The accounted pass of each config, one after the other in one launch: of so many real ranks, or of the fullest
    rank of each simulated world.
    """
    jobs = [(configs, rank, str(folder)) for rank in (range(ranks) if ranks else [None])]
    outcome = launch(_run_each, jobs, folder / "logs", timeout_s=300)
    assert outcome.status == "ok", outcome.reason
    return [list(records) for records in zip(*outcome.results, strict=True)]


@registered()
def _run_each(job: tuple[list[dict[str, Any]], int | None, str], tell: Any) -> list[RankRecord]:
    configs, rank, folder = job
    where = [simulated_rank(config) if rank is None else rank for config in configs]
    return [
        run_rank(RankJob(config, "accounted", which, f"{folder}/rendezvous-{number}", folder), tell)
        for number, (config, which) in enumerate(zip(configs, where, strict=True))
    ]
