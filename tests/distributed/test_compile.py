"""torch.compile: models and blocks train as under DDP without it, and the ledger sees all that graphs allocate."""

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.cells import sound
from tests.distributed import training
from tests.ranks import on_ranks
from zerobench.config.cell import CellConfig
from zerobench.models.compiled import compile_blocks
from zerobench.rank_record import RankRecord
from zerobench.ranks.start_ranks import launch
from zerobench.worker import RankJob, run_rank
from zerobench.zero import STAGES

STEPS = 3
"""Under zero3 the root's parameters are listened to in the first two forwards."""

BACKEND = "eager"
"""Graphs are captured and broken as with any backend; their operators run as they are, so that bits can be equal."""


class Model(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 16, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x):
        h = self.embedding(x)
        for block in self.blocks:
            h = torch.tanh(block(h))
        return nn.functional.cross_entropy(self.head(h), x)


Way = Callable[[str, nn.Module], tuple[Any, Callable[..., Any]]]
"""Given a strategy and a model: the engine, and the object that a loop calls for a loss."""


def uncompiled(strategy: str, model: nn.Module) -> tuple[Any, Callable[..., Any]]:
    engine = training.engine_of(strategy, model)
    return engine, engine


def module_compile(strategy: str, model: nn.Module) -> tuple[Any, Callable[..., Any]]:
    engine = training.engine_of(strategy, model)
    model.compile(backend=BACKEND)
    return engine, engine


def blocks_before(strategy: str, model: nn.Module) -> tuple[Any, Callable[..., Any]]:
    model.blocks = nn.ModuleList(map(compiled, model.blocks))
    return uncompiled(strategy, model)


compiled = partial(torch.compile, backend=BACKEND)
WAYS: dict[str, Way] = {
    "after": lambda strategy, model: (training.engine_of(strategy, model), compiled(model)),
    "module_compile": module_compile,
    "before": lambda strategy, model: uncompiled(strategy, compiled(model)),
    "blocks_before": blocks_before,
    "engine_itself": lambda strategy, model: ((engine := training.engine_of(strategy, model)), compiled(engine)),
}
"""`after` is first: it alone traces a hook that no call of the engine has come to."""


def train(rank: int, strategy: str, tied: bool, way: Way) -> list[float]:
    torch.compiler.reset()
    torch.manual_seed(0)
    engine, forward = way(strategy, Model(tied))
    losses = []
    for step in range(STEPS):
        loss = forward(torch.arange(4) + rank + step)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses + [one for value in engine.full_state_dict().values() for one in value.flatten().tolist()]


Row = tuple[str, str, bool]
"""The name of a way, a strategy, whether the head is tied."""

ROWS: list[Row] = [(way, strategy, tied) for way in WAYS for strategy in STAGES for tied in (True, False)]
QUICK: list[Row] = [("after", "zero3", True), ("module_compile", "zero2", True), ("engine_itself", "zero3", False)]
"""One takes a second."""


def compare(rank: int, rows: list[Row]) -> None:
    oracles = {tied: train(rank, "ddp", tied, uncompiled) for tied in (True, False)}
    for way, strategy, tied in rows:
        assert train(rank, strategy, tied, WAYS[way]) == oracles[tied], (way, strategy, tied)


@on_ranks(2)
def test_a_compiled_model_trains_as_under_ddp(rank: int, n: int) -> None:
    compare(rank, QUICK)


@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_a_compiled_model_trains_as_under_ddp_under_every_strategy(rank: int, n: int, way: str) -> None:
    compare(rank, [row for row in ROWS if row[0] == way])


STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "megatron", "fsdp2", "zero_redundancy")
SCALAR = 8
"""Bytes of the run before that go only in the next, beneath the ledger."""


def run_all(job: tuple[list[CellConfig], int, str], tell: Any) -> tuple[list[RankRecord], int]:
    """Runs the accounted pass of each config on a rank; returns also how many graphs were compiled."""
    configs, rank, folder = job
    records = []
    for number, config in enumerate(configs):
        records.append(run_rank(RankJob(config, "accounted", rank, f"{folder}/rendezvous-{number}", folder), tell))
        gc.collect()  # else the allocator sees in the next run how the tensors of this one go
    from torch._dynamo.utils import counters

    return records, counters["stats"]["unique_graphs"]


def of_step(record: RankRecord, category: str) -> int:
    return next(m.max_bytes for m in record.memory if (m.phase, m.category, m.tier) == ("step", category, "device"))


@pytest.mark.thorough
def test_every_strategy_trains_the_same_graphs_and_all_their_memory_is_seen(tmp_path: Path) -> None:
    """By the allocator beneath; activations are those of the model's graphs alone, run on fake tensors; one graph per
    strategy, so that no step after the first compiles.
    """
    configs = [sound(name, 2, compile="blocks").config for name in STRATEGIES] + [sound("ddp", 2).config]
    jobs = [(configs, rank, str(tmp_path)) for rank in range(2)]
    for records, graphs in launch(run_all, jobs, tmp_path / "logs", 400):
        *compiled, eager = records
        losses = {name: [step.loss for step in one.steps] for name, one in zip(STRATEGIES, compiled, strict=True)}
        assert all(one == losses["ddp"] for one in losses.values()), losses
        assert losses["ddp"] == pytest.approx([step.loss for step in eager.steps], abs=1e-5)
        assert graphs <= len(STRATEGIES) + 1  # the prediction's, on fake tensors, is one more
        for name, one in zip(STRATEGIES, compiled, strict=True):
            assert one.own_activation_bytes in (None, of_step(one, "activations")), name
            beyond = of_step(one, "allocated") - of_step(one, "total")
            assert abs(beyond) <= SCALAR, name
    assert of_step(compiled[0], "activations") <= of_step(eager, "activations")


class Breaks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum().item() > 0 else -x


def test_a_block_that_is_no_single_graph_ends_in_an_error_message() -> None:
    model = nn.Sequential(Breaks())
    compile_blocks(model)
    with pytest.raises(RuntimeError, match=r"^compile=blocks: 0: torch\.compile cannot make one graph of this block"):
        model(torch.ones(2))
