"""Scenarios of the peers' own suites (DeepSpeed's for ZeRO, torch's for FSDP2 and ZeroRedundancyOptimizer), with torch
DDP as the oracle: each row of the table trains as DDP does, under each strategy, or is refused in a sentence.

Exact rows are bit-equal at N <= 2, in losses and in weights. Others, and all at N >= 3, are close (CONTRIBUTING.md).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests import zoo
from tests.distributed import training
from tests.distributed.training import take_steps
from tests.ranks import on_ranks
from tests.zoo import WIDTH, WORDS, Block, Chain
from zerobench.zero import STAGES, initialize


class Plain(Chain):
    """Blocks on an embedding that the caller may move; `states`: return the last hidden states instead of the loss."""

    def forward(self, x, y, moved=0.0, states=False):
        h = self.run(self.embedding(x) + moved)
        if states:
            return h
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


class Tiny(nn.Module):
    """Fewer elements than ranks, and no element at all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, bias=False))
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.none_frozen = nn.Parameter(torch.empty(0), requires_grad=False)

    def forward(self, x, y):
        h = self.layers(x[:, :1].float() / WORDS) * self.scale
        return (h - y[:, :1].float() / WORDS).square().mean() + self.nothing.sum()


class OnlyRoot(nn.Module):
    """No container, so that stage 3 has the root's unit alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH, padding_idx=0), nn.Linear(WIDTH, WORDS)
        self.bag = nn.EmbeddingBag(WORDS, WIDTH, mode="sum")

    def forward(self, x, y):
        h = self.embedding(x) + self.bag(x).unsqueeze(1)
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


class EmptyRoot(nn.Module):
    """A root without parameters of its own, whose blocks are of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList([nn.Embedding(WORDS, WIDTH), Block(), nn.ReLU(), nn.Linear(WIDTH, WORDS)])

    def forward(self, x, y):
        for step in self.steps:
            x = step(x)
        return F.cross_entropy(x.flatten(0, 1), y.flatten())


class InPlace(Chain):
    """Outputs of blocks that the model writes to."""

    def run(self, h):
        for block in self.blocks:
            h = block(h)
            h.mul_(1.1).add_(0.1)
            h[..., 0] = 0
        return h


class NestedCheckpoints(Chain):
    """Recomputation inside recomputation. `reentrant`: None for none."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__(*(Block() for _ in range(4)))
        self.reentrant = reentrant

    def again(self, function, h):
        return function(h) if self.reentrant is None else checkpoint(function, h, use_reentrant=self.reentrant)

    def inner(self, first):
        return lambda h: self.blocks[first + 1](self.again(self.blocks[first], h))

    def run(self, h):
        def outer(h):
            return self.again(self.inner(2), self.again(self.inner(0), h))

        return self.again(outer, h)


class Hooked(Chain):
    """Hooks of the user's: on parameters, a tied one among them, on modules, and on their backward."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = nn.Linear(WIDTH, WORDS, bias=False)
        self.tied.weight = self.embedding.weight
        self.embedding.weight.register_hook(lambda gradient: gradient.clamp(-1e-2, 1e-2))
        self.blocks[0].up.weight.register_hook(lambda gradient: 3 * gradient)
        self.blocks[1].register_forward_pre_hook(lambda module, inputs: (inputs[0] * module.norm.weight,))
        self.blocks[1].register_forward_hook(lambda module, inputs, output: output * module.norm.weight.sum())
        self.blocks[2].register_full_backward_hook(
            lambda module, gradients, _: tuple(g * module.up.weight.detach().mean() for g in gradients)
        )

    def forward(self, x, y):
        h = self.run(self.embedding(x))
        return F.cross_entropy((self.head(h) + self.tied(h)).flatten(0, 1), y.flatten())


class Attention(Chain):
    """torch's own layers, which read their children's weights without calling them."""

    def __init__(self, dropout: float = 0.1) -> None:
        layer = nn.TransformerEncoderLayer(WIDTH, 1, 40, dropout, batch_first=True, norm_first=True)
        super().__init__(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
        self.attention = nn.MultiheadAttention(WIDTH, 1, dropout, batch_first=True, kdim=WIDTH, vdim=WIDTH)

    def run(self, h):
        mask = nn.Transformer.generate_square_subsequent_mask(h.shape[1])
        h = self.blocks[0](h, mask=mask, is_causal=True)
        return h + self.attention(query=h, key=h, value=h, need_weights=False)[0]


class Recurrent(Chain):
    """LSTM and GRU keep their parameters in a flat list of their own."""

    class Cell(nn.Module):
        def __init__(self, kind: type[nn.RNNBase]) -> None:
            super().__init__()
            self.cell, self.out = kind(WIDTH, 7, 2, batch_first=True, bidirectional=True), nn.Linear(14, WIDTH)

        def forward(self, x):
            return x + self.out(self.cell(x)[0])

    def __init__(self) -> None:
        super().__init__(Recurrent.Cell(nn.LSTM), Recurrent.Cell(nn.GRU))


class Parametrized(Chain):
    """Weights that are computed from others at each use; buffers that a forward writes."""

    def __init__(self) -> None:
        super().__init__(Block(), Block(), parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)))
        parametrizations.weight_norm(self.blocks[0].up)
        parametrizations.spectral_norm(self.blocks[1].down)
        parametrizations.orthogonal(self.blocks[1].up, orthogonal_map="householder")
        self.old = nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))

    def run(self, h):
        return self.old(super().run(h))


class Lists(Chain):
    """Parameters in lists and dicts, which are modules that nobody calls."""

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList([torch.randn(WIDTH, WIDTH) / 9 for _ in range(3)])
            self.biases = nn.ParameterDict({"a": torch.zeros(WIDTH), "b": torch.ones(())})

        def forward(self, h):
            for weight in self.weights:
                h = torch.tanh(h @ weight + self.biases["a"] * self.biases["b"])
            return h

    def __init__(self) -> None:
        super().__init__(Lists.Mixture(), Lists.Mixture())
        self.own = nn.ParameterList([torch.ones(WIDTH)])

    def run(self, h):
        return super().run(h) * self.own[0]


STEPS = 3
TOLERANCE = 1e-5
"""On losses, and where SGD trains on weights too. Adam makes steps of what rounding leaves: a share of its rate."""

# -- loops: what scripts do beside stepping -----------------------------------------------------------------

Loop = Callable[[Any, int, int], list[float]]


def plain(engine: Any, rank: int, n: int) -> list[float]:
    """Dropout draws each rank's own numbers; an evaluation at the end, on weights that may still be on their way."""
    torch.manual_seed(100 + rank)
    losses = take_steps(engine, rank, n, range(STEPS))
    engine.eval()
    with torch.no_grad():
        losses.append(engine(*zoo.tokens(rank, n, 9)).item())
    return losses


def nothing_to_step(engine: Any, rank: int, n: int) -> list[float]:
    """A step without a backward, one whose loss is 0 × loss, one whose gradients were dropped in either way."""
    losses = take_steps(engine, rank, n, range(2))
    engine.step()
    engine.backward(0 * engine(*zoo.tokens(rank, n, 2)))
    engine.step()
    for drop in (engine.zero_grad, engine.optimizer.zero_grad):
        engine.backward(engine(*zoo.tokens(rank, n, 3)))
        drop()
        engine.step()
    return losses + take_steps(engine, rank, n, range(4, 6))


def failing_forward(engine: Any, rank: int, n: int) -> list[float]:
    """A forward that fails in the middle of the blocks, on every rank, is caught, before a step; training goes on."""
    losses = take_steps(engine, rank, n, range(2))
    engine.backward(engine(*zoo.tokens(rank, n, 2)))
    hook = engine.module.blocks[1].register_forward_hook(fail)
    for number in range(2):
        try:
            engine(*zoo.tokens(rank, n, 2 + number))
        except ZeroDivisionError:
            continue
        raise AssertionError("the hook was not called")
    hook.remove()
    engine.step()
    return losses + take_steps(engine, rank, n, range(3, 6))


def fail(*_: Any) -> None:
    raise ZeroDivisionError


def captured(engine: Any, rank: int, n: int) -> list[float]:
    """A loss on what hooks inside and on blocks have seen (distillation, deep supervision)."""
    seen: list[torch.Tensor] = []
    for module in (engine.module.blocks[0].down, engine.module.blocks[1], engine.module.blocks[2].up):
        module.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    losses = []
    for step in range(STEPS):
        seen.clear()
        loss = engine(*zoo.tokens(rank, n, step))
        loss = 0.1 * loss + sum(h.square().mean() for h in seen)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


# -- scenarios ----------------------------------------------------------------------------------------------


def sgd(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
    return optim.SGD(parameters, lr=0.01, momentum=0.9)


@dataclass(frozen=True)
class Scenario:
    """One row. `oracle`: the model under DDP where DDP cannot train `model` itself; the row is close, not exact."""

    model: Callable[[], nn.Module]
    loop: Loop = plain
    optimizer: Callable[[Any], optim.Optimizer] = training.adamw
    oracle: Callable[[], nn.Module] | None = None


SCENARIOS: dict[str, Scenario] = {
    "fewer elements than ranks": Scenario(Tiny),
    "a root alone": Scenario(OnlyRoot),
    "a root without parameters": Scenario(EmptyRoot),
    "attention": Scenario(Attention, optimizer=sgd),
    "recurrent cells": Scenario(Recurrent),
    "parametrized weights": Scenario(Parametrized),
    "outputs written to": Scenario(InPlace),
    "nested recomputation": Scenario(lambda: NestedCheckpoints(False)),
    "nested reentrant recomputation": Scenario(lambda: NestedCheckpoints(True), oracle=lambda: NestedCheckpoints(None)),
    "lists of parameters": Scenario(Lists),
    "hooks of the user's": Scenario(Hooked, optimizer=sgd),
    "steps with nothing to do": Scenario(Plain, nothing_to_step),
    "a forward that fails": Scenario(Plain, failing_forward),
    "losses on captured states": Scenario(Plain, captured),
    "a rate in a tensor": Scenario(Plain, optimizer=partial(optim.AdamW, lr=torch.tensor(1e-2), fused=True)),
}


def train(rank: int, n: int, scenario: Scenario, strategy: str) -> tuple[list[float], dict[str, Any]]:
    torch.manual_seed(0)
    model = (scenario.oracle if scenario.oracle and strategy == "ddp" else scenario.model)()
    engine = training.engine_of(strategy, model, scenario.optimizer(model.parameters()))
    return scenario.loop(engine, rank, n), engine.full_state_dict()


@pytest.mark.thorough
@on_ranks(1, 2, 3, timeout_s=400)
def test_scenarios_train_as_under_ddp(rank: int, n: int) -> None:
    for name, scenario in SCENARIOS.items():
        oracle = train(rank, n, scenario, "ddp")
        within = TOLERANCE if scenario.optimizer is sgd else 0.02 * 1e-2
        for strategy in STAGES:
            trained = train(rank, n, scenario, strategy)
            training.assert_close(trained, oracle, TOLERANCE, within, name, strategy)
            if not scenario.oracle and n <= 2:
                training.assert_same(trained, oracle, name, strategy)


def lose_the_loss(engine: Any, inside: str) -> None:
    """The loss is made inside of a block, out of sight, and the block's own output has no part in it."""
    seen: list[torch.Tensor] = []
    engine.module.blocks[1].get_submodule(inside).register_forward_hook(lambda _m, _i, output: seen.append(output))
    engine(*zoo.tokens(0, 1, 0))
    engine.backward(seen[0].square().mean())


def differentiate_twice(engine: Any) -> None:
    moved = torch.zeros(zoo.WIDTH, requires_grad=True)
    (along,) = torch.autograd.grad(engine(*zoo.tokens(0, 1, 0), moved), moved, create_graph=True)
    engine.backward(along.square().sum())


def reach_from_another(engine: Any) -> None:
    model = Plain()
    other = initialize(model, optim.SGD(model.parameters(), lr=0.1), "zero2")
    other.backward(other(*zoo.tokens(0, 1, 0)) + engine(*zoo.tokens(0, 1, 0)))


REFUSED: list[tuple[type[nn.Module], Callable[[Any], None], str]] = [
    (Plain, lambda engine: lose_the_loss(engine, "up"), r"backward: it came to parameters .* not gathered"),
    (Plain, lambda engine: lose_the_loss(engine, "norm"), r"blocks\.1: backward came to parameters"),
    (Plain, differentiate_twice, r"backward: it goes through gradients of torch\.autograd\.grad\(create_graph=True\)"),
    (Plain, reach_from_another, r"backward of another engine came .* call loss\.backward\(\), which trains both"),
]  # fmt: skip


@on_ranks(2)
def test_what_stage_3_cannot_do_is_answered(rank: int, n: int) -> None:
    for build, misuse, sentence in REFUSED:
        model = build()
        engine = initialize(model, optim.SGD(model.parameters(), lr=0.1), "zero3")
        with pytest.raises((RuntimeError, ValueError), match=sentence):
            misuse(engine)


# -- stage 3's root: given back while backward is at other units, and there whenever it is read ------------------


class Tied(Chain):
    """A head that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight


class Functional(Tied):
    """The embedding's matrix is read at the end without a module."""

    def __init__(self) -> None:
        super().__init__()
        del self.head

    def forward(self, x, y):
        return F.cross_entropy(F.linear(self.run(self.embedding(x)), self.embedding.weight).flatten(0, 1), y.flatten())


class Front(Tied):
    """A layer before the blocks, whose backward reads what the root has given back."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(WIDTH, WIDTH)

    def run(self, h):
        return super().run(self.front(h))


class Recomputed(Front):
    """The layer is computed again in backward."""

    def run(self, h):
        return Chain.run(self, checkpoint(self.front, h, use_reentrant=False))


class Beside(Front):
    """A model whose layer feeds the last block alone, so backward comes to it between blocks."""

    def run(self, h):
        beside = self.front(h)
        h = self.blocks[1](self.blocks[0](h))
        return self.blocks[2](h + beside)


class Between(Front):
    """The layer's matrix is read between blocks, and in no module."""

    def run(self, h):
        h = F.linear(self.blocks[0](h), self.front.weight, self.front.bias)
        return self.blocks[2](self.blocks[1](h))


class Late(Front):
    """The layer's matrix is read between blocks as well, from the third forward on."""

    forwards = 0

    def run(self, h):
        self.forwards += 1
        return Between.run(self, self.front(h)) if self.forwards > 2 else super().run(h)


class OutOfSight(nn.Linear):
    """Its output is in an object that torch cannot look into."""

    def forward(self, h):
        return SimpleNamespace(value=super().forward(h))


class Hidden(Front):
    """The layer returns no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.front = OutOfSight(WIDTH, WIDTH)

    def run(self, h):
        return Chain.run(self, self.front(h).value)


class Own(Tied):
    """A parameter of the root module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def run(self, h):
        return super().run(h * self.scale)


GATHERS = {Tied: 1, Functional: 1, Front: 2, Recomputed: 2, Beside: 2, Between: 1, Late: 1, Hidden: 1, Own: 1}
"""Gathers of the root in a step, and whether it is given back: never where it might be read unseen."""
KEPT = (Between, Late, Hidden, Own)


@on_ranks(2)
def test_the_root_is_there_when_it_is_read_and_given_back_in_between(rank: int, n: int, thorough: bool) -> None:
    for build, gathers in GATHERS.items():
        expected = train_root(build, "ddp", rank, n)
        for keep in ("auto", False, True) if thorough else ("auto",):
            found = train_root(build, "zero3", rank, n, keep_root=keep)
            training.assert_same(found, expected, build, keep)
            assert keep != "auto" or found[2] == (gathers, build in KEPT), (build, found[2])


def train_root(
    build: type[Chain], strategy: str, rank: int, n: int, **options: Any
) -> tuple[Any, Any, tuple[int, bool]]:
    """Losses, weights, and of the last step: how often the root was gathered, and whether it stayed to the end."""
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if strategy == "ddp":
        engine: Any = training.engine_of("ddp", model, optimizer)
        root = None
    else:
        engine = initialize(model, optimizer, strategy, **options)
        root = engine._root.units[0]
    losses, gathers, stays = [], [], []
    for step in range(4):
        x, y = zoo.tokens(rank, n, step)
        before = 0 if root is None else count(root)
        loss = engine(x, y)
        handle = model.blocks[1].up.weight.register_hook(lambda _g: stays.append(root is not None and root.is_whole))
        engine.backward(loss)
        handle.remove()
        engine.step()
        gathers.append(0 if root is None else count(root) - before)
        losses.append(loss.item())
    return losses, engine.full_state_dict(), (gathers[-1], stays[-1])


def count(unit: Any) -> int:
    """How often the unit was gathered so far; counts from the first call on."""
    if not hasattr(unit, "gathers"):
        unit.gathers, launch = 0, unit.source.launch

        def counted(*arguments: Any) -> Any:
            unit.gathers += 1
            return launch(*arguments)

        unit.source.launch = counted
    return unit.gathers
