"""Trains a zoo model under a strategy on this rank; the functions that the parity tests run on ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests import zoo
from zerobench.strategies.ddp import DdpEngine
from zerobench.zero import initialize

STEPS = 5


class OracleDdp(DdpEngine):
    """DDP with the part of our engines' face that the harness does not ask of a peer."""

    def train(self, mode: bool = True) -> OracleDdp:
        self.module.train(mode)
        return self

    def eval(self) -> OracleDdp:
        return self.train(False)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.module.state_dict().items()}


class PlainEngine:
    """Whole parameters under an engine's interface: each backward's gradients are averaged and added."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.module, self.optimizer, self._synchronizes = module, optimizer, True
        self._total: dict[nn.Parameter, torch.Tensor] = {}

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self.module(*inputs, **named)

    def register_forward_method(self, module: nn.Module, name: str) -> None:
        """Nothing: all of its methods find their parameters."""

    @contextmanager
    def full_parameters(self) -> Iterator[nn.Module]:
        yield self.module

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self._synchronizes = False
        yield
        self._synchronizes = True

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        for p in self.module.parameters() if self._synchronizes else ():
            gradient, p.grad = p.grad, None
            if gradient is not None:
                if dist.is_initialized():
                    dist.all_reduce(gradient.div_(dist.get_world_size()))
                self._total[p] = self._total[p] + gradient if p in self._total else gradient

    def step(self) -> None:
        for p in self._total:
            p.grad = self._total[p]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._total.clear()

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.module.state_dict().items()}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def engine_of(strategy: str, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: Any) -> Any:
    """With AdamW unless an `optimizer` is given."""
    optimizer = optimizer or adamw(model.parameters())
    if strategy == "ddp":
        return OracleDdp(model, optimizer, gradient_as_bucket_view=True, find_unused_parameters=True)
    return initialize(model, optimizer, strategy, bucket_bytes=4096, **options)


def loss_of(output: Any) -> torch.Tensor:
    return output.loss if isinstance(output, zoo.Output) else output


def whole(engine: Any) -> AbstractContextManager[Any]:
    """The engine's parameters to be read; under torch DDP they always are."""
    return engine.full_parameters() if hasattr(engine, "full_parameters") else nullcontext()


def assert_equal(state: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], *about: Any) -> None:
    """All that is expected is there, to the bit."""
    assert [name for name, value in expected.items() if not torch.equal(state[name], value)] == [], about


def assert_same(found: Any, expected: Any, *about: Any) -> None:
    """Losses and states are equal to the bit."""
    assert found[0] == expected[0], about
    assert_equal(found[1], expected[1], *about)


def assert_close(found: Any, expected: Any, losses_within: float, weights_within: float, *about: Any) -> None:
    """Losses are near enough, relatively or, if they are below 1, absolutely; and weights, absolutely."""
    near = {"rtol": losses_within, "atol": losses_within}
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(expected[0]), **near, msg=f"{about}: {found[0]}")
    assert found[1].keys() == expected[1].keys(), about
    off = {name: (found[1][name].float() - value.float()).abs() for name, value in expected[1].items() if value.numel()}
    assert {name: by.max().item() for name, by in off.items() if not by.max() <= weights_within} == {}, about


def assert_alike(engine: Any, plain: nn.Module, *about: Any) -> None:
    assert_equal(engine.full_state_dict(), plain.state_dict(), *about)


def take_steps(engine: Any, rank: int, n: int, steps: Iterable[int]) -> list[float]:
    """Trains on the batches of these numbers; returns the losses."""
    return train_on(engine, (zoo.tokens(rank, n, step) for step in steps))


def train_on(engine: Any, batches: Iterable[Iterable[torch.Tensor]], clip: float | None = None) -> list[float]:
    losses = []
    for inputs in batches:
        loss = loss_of(engine(*inputs)).float()
        engine.backward(loss)
        if clip is not None:
            engine.clip_grad_norm_(clip)
        engine.step()
        losses.append(loss.item())
    return losses


def train(rank: int, n: int, strategy: str, model_name: str, optimizer_name: str, steps: int = STEPS, **options: Any):
    """(losses, the full state at the end) of this rank."""
    model = zoo.build(model_name)
    if rank > 0:  # the model must become rank 0's
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
    engine = engine_of(strategy, model, zoo.OPTIMIZERS[optimizer_name](model.parameters()), **options)
    return take_steps(engine, rank, n, range(steps)), engine.full_state_dict()


def train_each(rank: int, n: int, cases: list[tuple[str, str, list[str]]]) -> list[dict[str, Any]]:
    """Several (model, optimizer, stages) in one launch, each under DDP and its stages."""
    return [by_strategy(rank, n, train, ("ddp", *stages), model, optimizer, 3) for model, optimizer, stages in cases]


def evaluate_between(rank: int, n: int, strategy: str) -> Any:
    """Training with evaluation between steps, and between a forward and its backward."""
    model = zoo.build("tied")
    engine = engine_of(strategy, model)
    losses = []
    for step in range(3):
        loss = engine(*zoo.tokens(rank, n, step))
        engine.eval()
        with torch.no_grad():
            losses.append(engine(*zoo.tokens(rank, n, 100 + step)).item())
        engine.train()
        engine.backward(loss)
        engine.step()
        with torch.inference_mode():
            losses.append(engine(*zoo.tokens(rank, n, 200 + step)).item())
    return losses, engine.full_state_dict()


def schedule_and_groups(rank: int, n: int, strategy: str) -> Any:
    """Two parameter groups, a scheduler that holds the optimizer, and two forwards before one backward."""
    model = zoo.build("tied")
    plain = [p for p in model.parameters() if p.dim() < 2]
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0, "lr": 3e-3}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[1e-2, 3e-3], total_steps=10)
    engine = engine_of(strategy, model, optimizer)
    assert engine.optimizer is optimizer
    losses = []
    for step in range(3):
        loss = engine(*zoo.tokens(rank, n, step)) + engine(*zoo.tokens(rank, n, 50 + step))
        engine.backward(loss)
        engine.step()
        scheduler.step()
        losses.append(loss.item())
    return losses, engine.full_state_dict()


def resume(rank: int, n: int, strategy: str) -> tuple[list[float], list[float]]:
    """Losses of the last steps of five straight, and of these steps under a fresh engine with the state before them."""
    first, second = (engine_of(strategy, zoo.build("tied")) for _ in range(2))
    take_steps(first, rank, n, range(2))
    saved = first.state_dict()
    straight = take_steps(first, rank, n, range(2, 5))  # must not change what was saved
    second.load_state_dict(saved)
    return straight, take_steps(second, rank, n, range(2, 5))


def by_strategy(
    rank: int, n: int, outcome: Callable[..., Any], strategies: Iterable[str], *more: Any
) -> dict[str, Any]:
    """Strategy -> what `outcome` returns under it."""
    return {strategy: outcome(rank, n, strategy, *more) for strategy in strategies}


def start_under_ddp(rank: int, n: int) -> dict[str, Any]:
    """Values that a model of each rank's seed holds under DDP: row-major, channels-last, with gaps, buffers, none."""
    torch.manual_seed(rank)
    model = torch.nn.BatchNorm2d(3)
    model.columns = torch.nn.Parameter(torch.randn(4, 5).t())
    model.pixels = torch.nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
    model.gaps = torch.nn.Parameter(torch.randn(4, 6)[:, ::2])
    model.empty = torch.nn.Parameter(torch.randn(0, 3))
    torch.nn.init.normal_(model.weight)
    torch.nn.init.normal_(model.running_mean)
    strides = {name: p.stride() for name, p in model.named_parameters()}
    DdpEngine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert strides == {name: p.stride() for name, p in model.named_parameters()}
    kept = {name: value.tolist() for name, value in model.state_dict().items()}
    other = torch.nn.Linear(2 + rank, 1)
    try:
        DdpEngine(other, torch.optim.SGD(other.parameters(), lr=0.1))
    except RuntimeError as error:
        kept["refused"] = str(error)
    return kept
