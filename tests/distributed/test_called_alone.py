"""Parts of a model used outside of its forward, and trained: chunked losses, other methods, penalties on weights."""

import copy
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.distributed.training import PlainEngine, assert_equal
from tests.ranks import on_ranks
from zerobench.zero import initialize


class Model(nn.Module):
    """Blocks between an embedding and a head; `scale` belongs to the root itself, `frozen` is not trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.scale = nn.Parameter(torch.full((8,), 1.5))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens) * self.scale
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return hidden

    def generate(self, tokens: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], 1)
        return tokens + 0 * self.scale.sum().long()

    def forward(self, tokens: torch.Tensor, with_head: bool = True) -> torch.Tensor:
        hidden = self.encode(tokens)
        return self.head(hidden) if with_head else hidden


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def chunked(engine: Any, tokens: torch.Tensor, how: str) -> None:
    """The head by chunks, each with its backward: the logits of all tokens never exist at once."""
    hidden = engine(tokens, with_head=False)
    apart = hidden.detach().requires_grad_()
    head: Callable[..., torch.Tensor] = engine.module.head
    for number, chunk in enumerate(apart.chunk(3, dim=1)):
        logits = checkpoint(head, chunk, use_reentrant=how == "reentrant") if "reentrant" in how else head(chunk)
        with engine.no_sync() if how == "no_sync" and number < 2 else nullcontext():
            engine.backward(logits.square().mean())
    engine.backward((hidden * apart.grad).sum())


def blocks_alone(engine: Any, tokens: torch.Tensor, how: str) -> None:
    """Everything by itself, a block twice, in one backward; evaluations in between."""
    module = engine.module
    hidden = module.embedding(tokens)
    with torch.no_grad():
        assert module.blocks[1](module.embedding(tokens)).isfinite().all()
    for block in (*module.blocks, module.blocks[0]):
        hidden = checkpoint(block, hidden, use_reentrant=False) if how == "checkpoint" else block(hidden)
    engine.backward(module.head(hidden).square().mean())


def beside_the_forward(engine: Any, tokens: torch.Tensor, how: str) -> None:
    """A block alone in one backward with a forward that runs it too, before it or after it."""

    def alone() -> torch.Tensor:
        return engine.module.blocks[1](torch.ones(2, 8)).square().mean()

    first = alone() if how == "before" else 0
    loss = engine(tokens).square().mean()
    engine.backward(loss + (first if how == "before" else alone()))


def methods(engine: Any, tokens: torch.Tensor, how: str) -> None:
    engine.backward(engine.module.encode(tokens).square().mean())
    assert engine.module.generate(tokens[:, :2]).shape == (2, 5)
    engine.backward(engine(tokens).square().mean())


PENALTIES: dict[str, Callable[[Any], torch.Tensor]] = {
    "sum": lambda m: sum(p.square().sum() for p in m.parameters() if p.requires_grad),
    "norms": lambda m: sum(p.norm() + p.abs().mean() for p in m.parameters() if p.requires_grad),
    "views": lambda m: (m.blocks[0][0].weight.T @ m.blocks[1][0].weight[:4].T).square().sum(),
    "flat": lambda m: torch.cat([p.view(-1) for p in m.blocks.parameters()]).square().sum(),
    "frozen": lambda m: (m.frozen.weight * m.blocks[2][0].weight).square().sum(),
}


def penalty(engine: Any, tokens: torch.Tensor, how: str) -> None:
    name, _, when = how.partition(" ")
    with engine.full_parameters() as whole:
        first = PENALTIES[name](whole) * 0.1
    loss = engine(tokens).square().mean()
    with engine.full_parameters() as whole:
        last = PENALTIES[name](whole) * 0.1
        assert type(whole.scale.detach()) is torch.Tensor
    if when == "alone":
        engine.backward(loss)
        engine.backward(last)
    else:
        engine.backward(loss + (first if when == "before" else last))


SCENARIOS: list[tuple[Callable[..., None], str]] = [
    *((chunked, how) for how in ("plain", "no_sync", "reentrant", "not reentrant")),
    *((blocks_alone, how) for how in ("plain", "checkpoint")),
    *((beside_the_forward, how) for how in ("before", "after")),
    (methods, ""),
    *((penalty, f"{name} {when}") for name in PENALTIES for when in ("before", "after", "alone")),
]


class Plainly:
    """An engine whose loops call loss.backward() and optimizer.step()."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self._engine(*inputs, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self._engine.optimizer.step()


SHOWN = [one for number, one in enumerate(SCENARIOS) if one[0] is not penalty or number % 4 == 0]
"""Of the penalties each has another moment."""


def train(rank: int, engine: Any, scenario: Callable[..., None], how: str) -> dict[str, torch.Tensor]:
    if scenario is methods:
        engine.register_forward_method(engine.module, "encode")
        engine.register_forward_method(engine.module, "generate")
    for step in range(2):
        torch.manual_seed(10 * step + rank)
        scenario(engine, torch.randint(11, (2, 6)), how)
        engine.step()
    return {name: value.clone() for name, value in engine.full_state_dict().items()}


@on_ranks(2)
def test_parts_used_outside_of_the_forward_train_as_plain_ones(rank: int, n: int, thorough: bool) -> None:
    for scenario, how in SCENARIOS if thorough else SHOWN:
        model = Model()
        expected = train(rank, PlainEngine(model, sgd(model)), scenario, how)
        others: list[tuple[str, dict[str, Any]]] = [("zero2", {}), ("zero3", {"units": "head"})]
        if scenario is chunked:
            others.append(("zero3", {"reshard_after_forward": False}))
        others = others[1:2] if scenario is penalty else others
        for strategy, options in (("zero3", {}), *(others if thorough or how in ("plain", "") else ())):
            model = Model()
            units = {"units": (*model.blocks, model.head)} if "units" in options else options
            state = train(rank, initialize(model, sgd(model), strategy, **units), scenario, how)
            if not options and (thorough or how in ("plain", "", "norms before")):
                model = Model()
                plainly = train(rank, Plainly(initialize(model, sgd(model), strategy)), scenario, how)
                assert_equal(plainly, state, scenario.__name__, how, strategy)
            for name, value in expected.items():
                where = (scenario.__name__, how, strategy, options, name, (state[name] - value).abs().max())
                if scenario in (chunked, methods) and how != "no_sync":
                    assert torch.equal(state[name], value), where
                else:
                    assert torch.allclose(state[name], value, rtol=1e-5, atol=1e-6), where


def unfrozen(rank: int, n: int) -> None:
    """A registered method of the whole model trains what was unfrozen since; one of a part leaves it to the step."""
    tokens = torch.ones(2, 6, dtype=torch.long)
    states = []
    for strategy in ("plain", "zero2", "zero3"):
        model: Any = Model()
        model.blocks[0].requires_grad_(False)
        model.blocks[2].requires_grad_(False)
        optimizer = sgd(model)
        engine: Any = PlainEngine(model, optimizer)
        if strategy != "plain":
            engine = Plainly(initialize(model, optimizer, strategy))
        engine.register_forward_method(model, "encode")
        for step in range(3):
            model.blocks[0].requires_grad_(step > 0)
            engine.backward(model.encode(tokens).square().mean())
            engine.step()
        states.append({name: value.clone() for name, value in engine.full_state_dict().items()})
        assert_equal(states[-1], states[0], strategy)
    model.blocks[2].requires_grad_(True)
    late = model.blocks[2](torch.ones(2, 8)).square().mean()
    engine(tokens)
    with pytest.raises(RuntimeError, match="were unfrozen between a call of it and its backward; unfreeze them"):
        late.backward()
    model.blocks[2](torch.ones(2, 8)).square().mean().backward()
    before = engine.full_state_dict()["blocks.2.0.weight"]
    engine.step()
    assert not torch.equal(engine.full_state_dict()["blocks.2.0.weight"], before)


def forces_of_a_block(_called: Any, model: Any) -> torch.Tensor:
    moved = torch.ones(2, 8, requires_grad=True)
    return torch.autograd.grad(model.blocks[0](moved).sum(), moved)[0]


def forces_without_gradients(called: Any, model: Any) -> torch.Tensor:
    """As models of forces have them in an evaluation: a part of its forward has gradients."""
    moved: list[torch.Tensor] = []

    def enable(_module: nn.Module, inputs: Any) -> torch.Tensor:
        torch.set_grad_enabled(True)
        moved.append(inputs[0].detach().requires_grad_())
        return moved[0]

    hook = model.blocks[1].register_forward_pre_hook(enable)
    with torch.no_grad():
        (gradient,) = torch.autograd.grad(called(torch.ones(2, 6, dtype=torch.long)).sum(), moved)
    hook.remove()
    return gradient


@on_ranks(2)
def test_registered_methods_and_double_backward_are_named(rank: int, n: int) -> None:
    unfrozen(rank, n)
    model: Any = Model()
    engine = initialize(model, sgd(model), "zero3")
    for module, name, words in (
        (nn.Linear(1, 1), "forward", "register_forward_method: the Linear is neither engine.module nor a part of it"),
        (model, "decode", "register_forward_method: Model has no method 'decode'"),
        (model, "scale", "register_forward_method: Model has no method 'scale'"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            engine.register_forward_method(module, name)
    tokens = torch.ones(2, 6, dtype=torch.long)
    with pytest.raises(RuntimeError, match=r"scale: it is read outside of the forward of \(root\)"):
        model.encode(tokens)
    engine.register_forward_method(model, "encode")
    hidden = model.encode(tokens).detach()
    with engine.full_parameters() as whole:
        assert type(whole.scale).__mro__[0].__name__ == "Parameter"
        copied: Any = copy.deepcopy(whole)
    assert type(copied.scale) is nn.Parameter
    assert torch.equal(copied.encode(tokens), hidden)  # a plain module's own method
    with torch.no_grad():
        copied.scale.zero_()
    assert not torch.equal(copied.encode(tokens), hidden)
    with torch.no_grad(), engine.full_parameters() as whole:
        assert type(whole.scale) is nn.Parameter  # as they are: no backward comes
    inputs = torch.ones(2, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"blocks\.0: backward goes .* does not support double backward; use zero1"):
        torch.autograd.grad(model.blocks[0](inputs).sum(), inputs, create_graph=True)
    with engine.full_parameters():  # where all stay whole
        (gradient,) = torch.autograd.grad(model.blocks[0](inputs).sum(), inputs, create_graph=True)
        (second,) = torch.autograd.grad(gradient.square().sum(), inputs)
    plain: Any = Model()
    for forces in (forces_of_a_block, forces_without_gradients):
        assert torch.equal(forces(engine, model), forces(plain, plain))
    plain = plain.blocks[0]
    (gradient,) = torch.autograd.grad(plain(inputs).sum(), inputs, create_graph=True)
    assert torch.equal(second, torch.autograd.grad(gradient.square().sum(), inputs)[0])
