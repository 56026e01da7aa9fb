"""The replay predicts every category of model states to the byte, over random models and options."""

import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zerobench
from tests.cells import MODELS, cell
from zerobench.config import schema_memory, schema_training
from zerobench.config.cell import CellConfig
from zerobench.config.schema import Measure, Model
from zerobench.predict.estimate import formulas_of, simulated_ranks, training_shapes
from zerobench.ranks.start_ranks import launch
from zerobench.registry import MODELS as REGISTRY
from zerobench.strategies import shape_of
from zerobench.theory.replay.states import predict_states
from zerobench.worker import RankJob, RankRecord, run_rank

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "megatron")

SHOWN, THOROUGH = range(5, 10), range(400)
"""Seeds of runs of one rank of a simulated world of 1 to 8, in every run of the tests and with --thorough."""

MORE = (45, 67, 118)
"""Seeds of runs that hold what none of the first ones does: a large tile, a part that leaves, secondary shards."""

IDLE_SHARE = 0.03
"""If a model has parameters that no step uses, the executed rank may hold fewer of the others than the fullest rank."""


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


zerobench.register_model("random_network", random_network)


def random_config(seed: int, strategy: str, n: int) -> CellConfig:
    """A cell that makes sense, of one accounted step; the same for the same seed. Raises where none is found."""
    draw = random.Random(f"{seed} {strategy} {n}")
    name = f"random {seed}"
    MODELS[name] = REGISTRY.schema_of("random_network", random_network, Model)(seed=draw.randrange(2**31))
    for _ in range(50):
        options = _options(draw, strategy, n)
        one = cell(strategy, n, name, backend="simulated", bucket_bytes=draw.choice((1024, 4096, 16384)), **options)
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
        if any(both.values()):
            return {"offload": schema_memory.CpuOffload(**both, fraction=draw.choice((1.0, 0.4)))}
    return {}


def account_each(configs: list[CellConfig], folder: Path) -> list[RankRecord]:
    """The accounted pass of the fullest rank of each simulated world, one after the other in one launch."""
    return launch(_run_each, [(configs, str(folder))], folder / "logs", timeout_s=300)[0]


def _run_each(job: tuple[list[CellConfig], str], tell: Any) -> list[RankRecord]:
    configs, folder = job
    return [
        run_rank(RankJob(config, "accounted", simulated_ranks(config)[0], f"{folder}/rendezvous-{n}", folder), tell)
        for n, config in enumerate(configs)
    ]


def off(config: CellConfig, record: RankRecord) -> Iterator[str]:
    """Yields the categories whose largest bytes are not those of the replay, nor formula and terms."""
    schedule, groups, tiers = record.schedule, config.groups, config.offload.theory_shape()
    strategy = shape_of(config.strategy.values())
    found = predict_states(strategy, schedule, groups, *training_shapes(config), tiers)
    rows = [m for m in record.memory if (m.phase, m.tier) == ("step", "device")]
    idle = {i for i, shape in enumerate(schedule.shapes) if shape.trainable} - {*schedule.arrivals}
    share = IDLE_SHARE if idle and config.world_size > 1 else 0
    for name, formula in formulas_of(config, schedule, found).items():
        if name not in ("volume", "between nodes"):
            measured, predicted = max(m.max_bytes for m in rows if m.category == name), found.of_category(name)
            if not (1 - share) * predicted <= measured <= predicted:
                yield f"{name}: {measured:,} B, and {predicted:,} B are replayed"
            if formula.value + sum(term.size for term in formula.beyond) != predicted:
                yield f"{name}: {formula} is not {predicted:,} B"


@pytest.fixture(scope="module")
def simulated(thorough, tmp_path_factory) -> dict[str, tuple[CellConfig, RankRecord]]:
    seeds, kinds = sorted({*(THOROUGH if thorough else SHOWN), *MORE}), len(STRATEGIES)
    drawn = [(seed, STRATEGIES[seed % kinds], 1 + seed // kinds % 8) for seed in seeds]
    configs = [random_config(*one) for one in drawn]
    records = account_each(configs, tmp_path_factory.mktemp("simulated"))
    return {str(one): both for one, *both in zip(drawn, configs, records, strict=True)}


def test_a_simulated_rank_holds_what_is_replayed(simulated) -> None:
    assert {name: found for name, run in simulated.items() if (found := [*off(*run)])} == {}


PRECISIONS = (schema_training.Fp32(), schema_training.Fp16(initial_scale=16.0), schema_training.Bf16())


def test_any_number_of_micro_batches_holds_what_is_replayed(thorough, tmp_path) -> None:
    """Theory plays at most three micro-batches: the first, one like all others, the last. In every run zero2 and
    zero3 have one precision each, and one micro-batch more than are played.
    """
    cells = [
        cell(
            strategy, 2, "mlp", backend="simulated", precision=precision, accumulation=count, bucket_bytes=16384,
            micro_batch=1, sequence=1, measure=Measure(1, 2), strategy={"accumulate": accumulate},
        )
        for number, strategy in enumerate(STRATEGIES) if thorough or number in (2, 3)
        for precision in (PRECISIONS if thorough else [PRECISIONS[number % 3]])
        for count in ((1, 2, 3, 4, 5, 8) if thorough else (4,))
        for accumulate in (("last", "every") if thorough else ("last",))
    ]  # fmt: skip
    assert [one.problems for one in cells if one.problems] == []
    configs = [one.config for one in cells]
    runs = zip(configs, account_each(configs, tmp_path), strict=True)
    wrong = {(c.strategy.name, c.precision.name, c.accumulation): found for c, one in runs if (found := [*off(c, one)])}
    assert wrong == {}
