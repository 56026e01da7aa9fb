"""Uses that go beside the plain loop, forwards in other places among them: right results, or one clear sentence."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests import zoo
from tests.distributed.training import engine_of, take_steps
from tests.ranks import on_ranks, run_ranks
from zerobench.zero import STAGES, initialize


@on_ranks(2, 1)
def test_a_forward_left_over(rank: int, n: int) -> None:
    """A forward with gradients that no backward follows leaves no old parameters, and units as they come and go."""
    losses: dict[str, list[float]] = {}
    whole: list[int] = []
    for strategy in ("ddp", *STAGES):
        engine = engine_of(strategy, zoo.build("tied"))
        losses[strategy] = []
        unfollowed = torch.no_grad if strategy == "ddp" else torch.enable_grad
        if strategy == "zero3":
            first = engine.module.blocks[0].up.weight
            first.register_hook(lambda _, e=engine: whole.append(sum(unit.is_whole for unit in e.units)))
        for number in range(3):
            with unfollowed():
                engine(*zoo.tokens(rank, n, 91))
            loss = engine(*zoo.tokens(rank, n, number))
            engine.backward(loss)
            with unfollowed():
                losses[strategy].append(engine(*zoo.tokens(rank, n, 90)).item())
            engine.step()
        assert losses[strategy] == losses["ddp"], strategy
    assert max(whole) <= 2, whole


class Repeated(zoo.Chain):
    """A block that reentrant checkpoints use twice, and a part that rank 0 alone uses."""

    def run(self, h):
        for _ in range(2):
            h = checkpoint(self.blocks[0], h, use_reentrant=True)
        return h + (self.extra(h) if torch.distributed.get_rank() == 0 else 0)


@on_ranks(2)
def test_gradients_that_come_twice_are_sent_alike_beside_those_of_one_rank(rank: int, n: int) -> None:
    losses = []
    for stage in STAGES:
        torch.manual_seed(0)
        model = Repeated(zoo.Block())
        model.extra = nn.Linear(zoo.WIDTH, zoo.WIDTH)
        losses.append(take_steps(engine_of(stage, model), rank, n, range(3)))
    assert all(loss == pytest.approx(losses[0], rel=1e-5) for loss in losses)


@on_ranks(2)
def test_misuse_is_answered(rank: int, n: int) -> None:
    for stage in STAGES:
        engine = engine_of(stage, zoo.build("tied"))
        with engine.no_sync():
            engine.backward(engine(*zoo.tokens(rank, n, 0)))
        with pytest.raises(RuntimeError, match="under no_sync"):
            engine.step()
        engine.zero_grad()
        assert n == 1 or stage in ("zero1", "megatron") or all(unit.gradients.full is None for unit in engine.units)
        with pytest.raises(RuntimeError, match=r"call engine\.step"):
            type(engine.optimizer).step(engine.optimizer)
        loss = engine(*zoo.tokens(rank, n, 0))
        engine.backward(engine(*zoo.tokens(rank, n, 1)) if stage != "zero3" else loss)
        stale = engine(*zoo.tokens(rank, n, 2))
        engine.step()
        with pytest.raises(RuntimeError, match=r"modified by an inplace|has gone through, or a step"):
            engine.backward(stale)
        with pytest.raises(ValueError, match="under an engine already"):
            initialize(engine.module, torch.optim.SGD(engine.module.parameters(), lr=0.1), stage)


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Silent()])

    def forward(self, x):
        return self.blocks[0](x).hidden.sum()


class Silent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        output = type("Opaque", (), {})()
        output.hidden = self.linear(x)
        return output


def test_an_output_that_hides_its_tensors_is_refused_by_name() -> None:
    model = Hidden()
    engine = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "zero3")
    with pytest.raises(ValueError, match=r"blocks\.0: no tensor that requires a gradient was found in its output"):
        engine(torch.ones(2, 4))


class Group(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.a, self.b = nn.Linear(19, 19), zoo.Block(), zoo.Block()

    def forward(self, x):
        return self.b(self.a(self.own(x)))


@on_ranks(2)
def test_units_inside_units(rank: int, n: int) -> None:
    results = []
    for strategy in ("zero1", "zero3"):
        torch.manual_seed(0)
        model = zoo.Tied()
        model.blocks = nn.ModuleList([Group(), Group()])
        model.forward = zoo.Tied.forward.__get__(model)
        units = tuple(m for group in model.blocks for m in (group, group.a, group.b))
        engine = engine_of(strategy, model, **({"units": units} if strategy == "zero3" else {}))
        results.append(take_steps(engine, rank, n, range(6)))
    assert results[0] == results[1]


def subgroup(rank: int, n: int) -> list[float]:
    """Ranks 1 and 2 of three train together."""
    group = torch.distributed.new_group([1, 2])
    if rank == 0:
        model = nn.Linear(2, 2)
        with pytest.raises(ValueError, match="not a member"):
            initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), group=group)
        return []
    model = zoo.build("tied")
    engine = initialize(model, zoo.OPTIMIZERS["adamw"](model.parameters()), "zero3", group=group)
    return take_steps(engine, rank - 1, 2, range(5))


def whole_world(rank: int, n: int) -> list[float]:
    return take_steps(engine_of("zero3", zoo.build("tied")), rank, n, range(5))


def test_a_group_of_some_ranks() -> None:
    assert run_ranks(3, subgroup)[1:] == run_ranks(2, whole_world)


def test_a_module_called_root_is_not_the_root() -> None:
    model = nn.Sequential()
    for name in ("first", "root", "last"):
        model.add_module(name, nn.Linear(4, 4))
    model.register_parameter("own", nn.Parameter(torch.ones(3)))
    engine = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "zero3")
    names = {name for name in engine.state_dict()["tensors"] if name.startswith("unit")}
    assert names == {"unit (root)", "unit first", "unit root", "unit last"}


@on_ranks(2)
def test_recomputation_in_spans_keeps_no_more_units_than_it_needs(rank: int, n: int) -> None:
    """Root, the span's two blocks, and one ahead."""
    model = zoo.build("adapted_spans")
    engine = initialize(model, zoo.OPTIMIZERS["adamw"](model.parameters()), "zero3")
    most = 0

    def count(_gradient) -> None:
        nonlocal most
        most = max(most, len({u.name.split(" part")[0] for u in engine._all_units if u.is_whole}))

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(count)
    take_steps(engine, rank, n, range(3))
    assert most <= 4


STEPS = 3


class Stack(nn.Module):
    """A root of its own parameters around blocks of unequal size."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 12)
        self.blocks = nn.ModuleList([nn.Linear(12, 20), nn.Linear(20, 12), nn.Linear(12, 12)])
        self.head = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.first(x))
        for block in self.blocks:
            h = torch.tanh(block(h))
        return self.head(h)


def data(rank: int, number: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * rank + number))


def stack_engine(strategy: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model = Stack().to(dtype)
    return initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), strategy, bucket_bytes=1024)


def half() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


def distil(strategy: str, rank: int, around: Callable[[], Any], inside: Callable[[], Any]) -> list[torch.Tensor]:
    """A pass without gradients, then one with, `inside` each; `around` it all."""
    engine, losses = stack_engine(strategy), []
    with around():
        for step in range(STEPS):
            x = data(rank, step)
            with inside(), torch.no_grad():
                target = engine(x)
            with inside():
                loss = (engine(x) - 0.5 * target).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
    return [*losses, *engine.full_state_dict().values()]


@on_ranks(2)
def test_whole_loops_in_one_autocast_train_as_with_one_for_each_forward(rank: int, n: int) -> None:
    for strategy in STAGES:
        mine = distil(strategy, rank, half, nullcontext)
        expected = distil(strategy, rank, nullcontext, half)
        assert all(map(torch.equal, mine, expected)), strategy


def several(strategy: str, rank: int, backwards: str) -> list[torch.Tensor]:
    """Two forwards before backwards: one for each, in their order or the other, through their sum, or one by one.

    In fp64: a gradient of the sum is rounded elsewhere, and Adam makes of one rounding of a small gradient 1e-5.
    """
    engine, losses = stack_engine(strategy, torch.float64), []
    for step in range(STEPS):
        inputs = [data(rank, 2 * step + micro).double() for micro in range(2)]
        if backwards == "one by one":
            for x in inputs:
                losses.append(engine(x).square().mean())
                engine.backward(losses[-1])
        else:
            pair = [engine(x).square().mean() for x in inputs]
            losses += pair
            order = {"in order": pair, "the last first": pair[::-1], "sum": [pair[0] + pair[1]]}[backwards]
            for loss in order:
                engine.backward(loss)
        engine.clip_grad_norm_(1.0)
        engine.step()
    return [*(loss.detach() for loss in losses), *engine.full_state_dict().values()]


@on_ranks(2)
def test_two_forwards_before_two_backwards_train_as_one_after_the_other(rank: int, n: int) -> None:
    for strategy in ("zero1", "zero3"):
        expected = several(strategy, rank, "one by one")
        for backwards in ("in order", "the last first", "sum"):
            for mine, other in zip(several(strategy, rank, backwards), expected, strict=True):
                assert torch.allclose(mine, other, rtol=1e-12, atol=0.0), (strategy, backwards)


@on_ranks(2)
def test_a_forward_is_gone_through_once_and_before_a_step(rank: int, n: int) -> None:
    """A second backward through a forward is refused by torch itself, one after a step by the engine."""
    again = "backward through the graph a second time"
    late = "^backward through a forward that a backward has gone through, or a step: zero3"
    for before, message in (("backward", again), ("step", late)):
        engine = stack_engine("zero3")
        first, second = (engine(data(rank, number)).square().mean() for number in range(2))
        engine.backward(second + (first if before == "backward" else 0))
        if before == "step":
            engine.step()
        with pytest.raises(RuntimeError, match=message):
            engine.backward(first)
