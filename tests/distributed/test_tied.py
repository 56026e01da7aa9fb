"""Tied parameters: each use delivers its gradient separately, transparently to the user. Against plain torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from tests.distributed import training
from tests.ranks import on_ranks
from zerobench.zero import STAGES, initialize
from zerobench.zero.gradients.flow import ArrivalHook

WIDTH = 6


class Scaled(nn.Linear):
    """As muP has it: the multiplier is the weight's."""

    def forward(self, x):
        return super().forward(x) * getattr(self.weight, "multiplier", 1.0)


class Tied(nn.Module):
    """One weight in three modules, of which one is called twice, recomputed if asked; `reads`: beside them, too."""

    def __init__(self, recompute: bool | None = None, reads: bool = False) -> None:
        super().__init__()
        self.first, self.middle, self.last = (Scaled(WIDTH, WIDTH) for _ in range(3))
        self.middle.weight = self.last.weight = self.first.weight
        self.first.weight.multiplier = 1.5
        self.recompute, self.reads = recompute, reads

    def forward(self, x):
        h = torch.tanh(self.first(x))
        for _ in range(2):
            h = self.middle(h) if self.recompute is None else checkpoint(self.middle, h, use_reentrant=self.recompute)
        beside = F.linear(h, self.first.weight) if self.reads else 0.0
        return (self.last(torch.tanh(h)) + beside).square().mean()


def batch(step: int, rank: int = 0) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def built(kind: Callable[[], nn.Module] = Tied) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def engine_of(strategy: str, module: nn.Module) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    if strategy == "plain":
        return training.PlainEngine(module, optimizer)
    return training.engine_of(strategy, module, optimizer)


def train(engine: Any, steps: range | list[int], rank: int = 0) -> list[float]:
    return training.train_on(engine, ((batch(step, rank),) for step in steps))


def frozen_midway(engine: Any, rank: int = 0) -> Any:
    weight = engine.module.first.weight
    seen = train(engine, range(2), rank)
    weight.requires_grad_(False)
    seen += train(engine, range(2, 4), rank)
    loss = engine(batch(4, rank))  # with a frozen weight, which is thawed before the backward
    weight.requires_grad_(True)
    engine.backward(loss)
    engine.step()
    loss = engine(batch(5, rank))
    weight.requires_grad_(False)
    engine.backward(loss)
    engine.step()
    weight.requires_grad_(True)
    return seen + train(engine, range(6, 8), rank)


def hooked(engine: Any, rank: int = 0) -> Any:
    """Registers each kind of hook for a while: one between forward and backward, one on an untied parameter."""
    weight = engine.module.first.weight
    seen: list[Any] = []
    losses = train(engine, range(1), rank)
    mine = weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    own = engine.module.middle.bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    losses += train(engine, range(1, 2), rank)
    own.remove()
    halves = weight.register_hook(lambda gradient: gradient / 2)
    losses += train(engine, range(2, 3), rank)
    mine.remove()
    halves.remove()
    loss = engine(batch(3, rank))
    doubles = weight.register_post_accumulate_grad_hook(double)
    engine.backward(loss)
    engine.step()
    doubles.remove()
    return losses, [gradient.tolist() for gradient in seen], train(engine, range(4, 6), rank)


def double(parameter: torch.Tensor) -> None:
    parameter.grad.mul_(2)


def differentiated(engine: Any, rank: int = 0) -> Any:
    """torch.autograd.grad by the weight, and by it twice, between steps."""
    weight = engine.module.first.weight
    (gradient,) = torch.autograd.grad(engine(batch(0, rank)), weight)
    losses = train(engine, range(2), rank)
    (along,) = torch.autograd.grad(engine(batch(2, rank)), weight, create_graph=True)
    (twice,) = torch.autograd.grad(along.square().sum(), weight)
    return gradient.tolist(), twice.tolist(), losses, train(engine, range(2, 4), rank)


def replaced(engine: Any, rank: int = 0) -> Any:
    """functional_call with weights of its own, which alone get gradients, also in a batch of models."""
    module = engine.module
    with training.whole(engine):
        given = {name: (p.detach() / 2).requires_grad_() for name, p in module.named_parameters()}
    functional_call(module, given, (batch(0),)).backward()
    seen = [given[name].grad.tolist() for name in given]
    stacked = {name: torch.stack([p.detach(), p.detach() * 2]) for name, p in given.items()}
    each = torch.func.vmap(torch.func.grad(lambda g, x: functional_call(module, g, (x,))), (0, None))
    seen += [gradient.tolist() for gradient in each(stacked, batch(0)).values()]
    seen += torch.func.vmap(module)(torch.stack([batch(0), batch(1)])).tolist()
    return seen, train(engine, range(2), rank)


LOOPS: dict[str, tuple[Callable[..., Any], Callable[[], nn.Module]]] = {
    "plain": (lambda engine, rank=0: train(engine, range(4), rank), Tied),
    "frozen midway": (frozen_midway, Tied),
    "hooks of the user's": (hooked, Tied),
    "autograd.grad": (differentiated, Tied),
    "functional_call": (replaced, Tied),
    "recomputed": (lambda engine, rank=0: train(engine, range(4), rank), lambda: Tied(False)),
    "recomputed, reentrant": (lambda engine, rank=0: train(engine, range(4), rank), lambda: Tied(True)),
}


def parametrized() -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    model[2].weight = model[0].weight
    for linear in (model[0], model[2]):
        parametrize.register_parametrization(linear, "weight", Symmetric())
    model[2].parametrizations.weight.original = model[0].parametrizations.weight.original
    return Mean(model)


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).T


class Mean(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x).square().mean()


LOOPS["parametrized"] = (LOOPS["plain"][0], parametrized)
LOOPS["read beside"] = (LOOPS["plain"][0], lambda: Tied(reads=True))
ADDED_OTHERWISE = ("recomputed, reentrant", "parametrized", "read beside")
"""Where a parameter's gradients come in another order than autograd's own."""


class Sometimes(torch.autograd.Function):
    """x + Σ weight, whose backward may have no gradient for the weight, and says so by None."""

    @staticmethod
    def forward(ctx, x, weight, has_gradient):
        ctx.shape, ctx.has_gradient = weight.shape, has_gradient
        return x + weight.sum()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, gradient.sum().expand(ctx.shape) if ctx.has_gradient else None, None


class Adding(nn.Linear):
    has_gradient = False

    def forward(self, x):
        return Sometimes.apply(x, self.weight, self.has_gradient)


class WithoutGradient(nn.Module):
    """Beside a layer that learns: a weight tied in two places and one that is alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.a, self.b, self.alone = (Adding(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.alone(self.b(self.a(self.linear(x)))).square().mean()


def without_gradient(engine: Any, rank: int = 0) -> Any:
    """On no rank, on one of two, on all: momentum moves a weight only where it had a gradient somewhere."""
    losses = []
    for step, ranks in enumerate(((), (1,), (0, 1), (0,), ())):
        for module in (engine.module.a, engine.module.alone):
            module.has_gradient = rank in ranks
        losses += train(engine, [step], rank)
    return losses


LOOPS["None for a gradient"] = (without_gradient, WithoutGradient)


def train_loops(rank: int, n: int, thorough: bool, oracle: str = "ddp") -> None:
    """Each loop under one stage by turns, unless all are asked for."""
    for number, (name, (loop, kind)) in enumerate(LOOPS.items()):
        if n > 1 and name in ("autograd.grad", "recomputed, reentrant"):
            continue  # what DDP does not do
        outcomes = {}
        for strategy in (oracle, *(STAGES if thorough else [[*STAGES][number % 4]])):
            engine = engine_of(strategy, built(kind))
            outcomes[strategy] = loop(engine, rank), engine.full_state_dict()
            check = training.assert_same if name not in ADDED_OTHERWISE else assert_near
            check(outcomes[strategy], outcomes[oracle], name, strategy)


def assert_near(found: Any, expected: Any, *about: Any) -> None:
    training.assert_close(found, expected, 1e-6, 1e-6, *about)


def test_tied_parameters_train_as_under_plain_torch() -> None:
    train_loops(0, 1, True, "plain")


@on_ranks(2)
def test_tied_parameters_train_as_under_ddp(rank: int, n: int, thorough: bool) -> None:
    train_loops(rank, n, thorough)


@pytest.mark.parametrize("strategy", STAGES)
def test_a_frozen_tied_critic_judges(strategy: str) -> None:
    """The generator learns to please a critic whose tied weight is frozen for its step, and is no longer afterwards."""
    outcomes = []
    for kind in ("plain", strategy):
        torch.manual_seed(0)
        generator, critic = engine_of(kind, nn.Linear(WIDTH, WIDTH)), engine_of(kind, Tied())
        losses = []
        for step in range(3):
            critic.module.requires_grad_(True)
            losses += train(critic, [step])
            critic.module.requires_grad_(False)
            loss = critic(generator(batch(step)))
            generator.backward(loss)
            generator.step()
            losses.append(loss.item())
        outcomes.append((losses, generator.full_state_dict() | critic.full_state_dict()))
    training.assert_same(outcomes[1], outcomes[0])


class Looking(Scaled):
    def forward(self, x):
        self.seen = [self.weight]
        self.weight.calls = getattr(self.weight, "calls", 0) + 1
        return super().forward(x)


class OwnParameter(nn.Parameter):
    pass


@pytest.mark.parametrize("strategy", STAGES)
def test_an_alias_has_the_parameters_class_and_attributes(strategy: str) -> None:
    model = built()
    model.first.weight = OwnParameter(model.first.weight.detach())
    model.middle.weight = model.first.weight
    model.last = Looking(WIDTH, WIDTH)
    model.last.weight = weight = model.first.weight
    weight.multiplier = 2.0
    expected = model(batch(0)).item()
    engine = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
    loss = engine(batch(0))
    assert loss.item() == expected
    assert type(model.last.seen[0]) is OwnParameter
    assert model.last.seen[0].multiplier == 2.0
    assert weight.calls == 2  # an attribute that a forward has written is the parameter's
    assert model.first.weight is model.middle.weight is model.last.weight is weight
    assert weight.is_leaf
    engine.backward(loss)
    engine.step()


def test_autograd_holds_one_gradient_of_several_uses() -> None:
    """To the parameter itself comes none, unless somebody has a hook on it."""
    model = built()
    weight = model.first.weight
    engine = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "zero2")
    sums: list[torch.Tensor | None] = []
    accumulates = torch.autograd.graph.get_gradient_edge(weight).node
    accumulates.register_prehook(lambda given: sums.append(given[0]))
    model.forward = lambda x: model.last(model.middle(model.first(x))).square().mean()
    engine.backward(engine(batch(0)))
    weight.register_hook(lambda gradient: None)
    engine.backward(engine(batch(0)))
    assert sums[0] is None
    assert sums[1] is not None


def test_torch_has_the_private_names_of_hooks() -> None:
    parameter = nn.Parameter(torch.ones(2))
    called: list[str] = []
    hook = ArrivalHook(parameter, lambda p: called.append("engine"))
    assert hook.is_only_hook
    first = parameter.register_hook(lambda g: called.append("gradient"))
    assert not hook.is_only_hook
    first.remove()
    assert hook.is_only_hook
    parameter.register_post_accumulate_grad_hook(lambda p: called.append("user"))
    assert not hook.is_only_hook
    hook.go_last()
    parameter.sum().backward()
    assert called == ["user", "engine"]
