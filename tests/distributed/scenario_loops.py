"""Training loops for the scenarios: what scripts do beside stepping. Each: `loop(engine, rank, n) -> losses`.

A loop uses the face that our engines and `DdpEngine` share; `whole` is for what that does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import AveragedModel

from tests import zoo
from tests.distributed import training
from zerobench.zero import STAGES

Loop = Callable[[Any, int, int], list[float]]
STEPS = 3


def whole(engine: Any) -> AbstractContextManager[Any]:
    """The engine's parameters to be read; under torch DDP they always are."""
    return engine.full_parameters() if hasattr(engine, "full_parameters") else nullcontext()


def train(engine: Any, rank: int, n: int, steps: Iterable[int] = range(STEPS)) -> list[float]:
    return training.take_steps(engine, rank, n, steps)


def plain(engine: Any, rank: int, n: int) -> list[float]:
    """Dropout draws each rank's own numbers; an evaluation at the end, on weights that may still be on their way."""
    torch.manual_seed(100 + rank)
    losses = train(engine, rank, n)
    engine.eval()
    with torch.no_grad():
        losses.append(engine(*zoo.tokens(rank, n, 9)).item())
    return losses


def nothing_to_step(engine: Any, rank: int, n: int) -> list[float]:
    """A step without a backward, one whose loss is 0 × loss, one whose gradients were dropped in either way."""
    losses = train(engine, rank, n, range(2))
    engine.step()
    engine.backward(0 * engine(*zoo.tokens(rank, n, 2)))
    engine.step()
    for drop in (engine.zero_grad, engine.optimizer.zero_grad):
        engine.backward(engine(*zoo.tokens(rank, n, 3)))
        drop()
        engine.step()
    return losses + train(engine, rank, n, range(4, 6))


def thawing(engine: Any, rank: int, n: int) -> list[float]:
    """Parameters frozen and thawed between steps, the first layers first."""
    losses = []
    early = [engine.module.embedding, engine.module.blocks[0], engine.module.blocks[1]]
    for step, frozen in enumerate((early, early[:2], early[1:2], [], early[:1])):
        for module in early:
            module.requires_grad_(module not in frozen)
        losses += train(engine, rank, n, [step])
    return losses


def branches(engine: Any, rank: int, n: int) -> list[float]:
    """Every step another branch; in the second half another on every rank."""
    losses = []
    for step in range(6):
        engine.module.chosen = "abc"[(step + (rank if step > 2 else 0)) % 3]
        losses += train(engine, rank, n, [step])
    return losses


def failing_forward(engine: Any, rank: int, n: int) -> list[float]:
    """A forward that fails in the middle of the blocks, on every rank, is caught; training goes on."""
    losses = train(engine, rank, n, range(2))
    hook = engine.module.blocks[1].register_forward_hook(fail)
    for number in range(2):
        try:
            engine(*zoo.tokens(rank, n, 2 + number))
        except ZeroDivisionError:
            continue
        raise AssertionError("the hook was not called")
    hook.remove()
    return losses + train(engine, rank, n, range(3, 6))


def fail(*_: Any) -> None:
    raise ZeroDivisionError


def adversarial(engine: Any, rank: int, n: int) -> list[float]:
    """The gradient of the input first, by torch.autograd.grad, then a step on the input moved along it."""
    losses = []
    for step in range(STEPS):
        x, y = zoo.tokens(rank, n, step)
        moved = torch.zeros(zoo.WIDTH, requires_grad=True)
        (along,) = torch.autograd.grad(engine(x, y, moved), moved)
        loss = engine(x, y, 0.1 * along.sign())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


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


def autocast(engine: Any, rank: int, n: int) -> list[float]:
    losses = []
    for step in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            loss = engine(*zoo.tokens(rank, n, step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def accumulation(engine: Any, rank: int, n: int) -> list[float]:
    """Micro-batches that use different branches, an evaluation between, and the last outside of no_sync."""
    losses = []
    for step in range(3):
        for micro, branch in enumerate("abca"):
            engine.module.chosen = branch
            if micro == 1:
                with torch.no_grad():
                    losses.append(engine(*zoo.tokens(rank, n, 50)).item())
            if micro < 2:
                with engine.no_sync():
                    loss = engine(*zoo.tokens(rank, n, 4 * step + micro))
                    engine.backward(loss / 4)
            else:
                engine.backward(engine(*zoo.tokens(rank, n, 4 * step + micro)) / 4)
        engine.step()
    return losses


def copies(engine: Any, rank: int, n: int) -> list[float]:
    """Copies of the module under an engine are plain modules: a teacher that learns by itself, an average."""
    losses = train(engine, rank, n, [0])
    with whole(engine):
        averaged, teacher = AveragedModel(engine.module), deepcopy(engine.module)
    losses += train(engine, rank, n, [1, 2])
    with whole(engine):
        averaged.update_parameters(engine.module)
    if rank == 0:  # alone: nothing of a copy may travel
        losses.append(averaged(*zoo.tokens(rank, n, 7)).item())
        loss = teacher(*zoo.tokens(rank, n, 7))
        loss.backward()
        losses += [loss.item(), *(p.grad.norm().item() for p in teacher.parameters() if p.grad is not None)]
    return losses + train(engine, rank, n, [3])


def methods(engine: Any, rank: int, n: int) -> list[float]:
    """Other ways into the module than the engine's forward, on whole parameters: methods, functional_call."""
    losses = train(engine, rank, n, [0])
    x, y = zoo.tokens(rank, n, 5)
    for _ in range(2):
        with whole(engine), torch.no_grad():
            for _ in range(2):
                h = engine.module.run(engine.module.embedding(x))
                losses.append(engine.module.head(h).mean().item())
            losses.append(engine.module(x, y).item())
            halved = {name: p.detach() / 2 for name, p in engine.module.named_parameters()}
            losses.append(functional_call(engine.module, halved, (x, y)).item())
            losses.append(engine.module.blocks[0].up.weight.mean().item())
    return losses + train(engine, rank, n, [1])


def rivals(engine: Any, rank: int, n: int) -> list[float]:
    """Two engines: a judge of the first one's states learns, and is frozen while that one learns to please it."""
    torch.manual_seed(7)
    judge = nn.Sequential(*(zoo.Block() for _ in range(3)), nn.Linear(zoo.WIDTH, 1))
    strategy = next((name for name, stage in STAGES.items() if type(engine) is stage), "ddp")
    other = training.engine_of(strategy, judge, torch.optim.AdamW(judge.parameters(), lr=1e-2, fused=True))
    losses = []
    for step in range(3):
        x, y = zoo.tokens(rank, n, step)
        made = engine(x, y, states=True).detach()
        loss = other(made).square().mean() + (1 - other(torch.ones(2, zoo.WIDTH))).square().mean()
        other.backward(loss)
        other.step()
        judge.requires_grad_(False)
        pleasing = (1 - other(engine(x, y, states=True))).square().mean()
        engine.backward(pleasing)
        engine.step()
        judge.requires_grad_(True)
        losses += [loss.item(), pleasing.item()]
    return losses


def scheduled(make: Callable[[Any], Any], metric: bool = False) -> Loop:
    """A scheduler of torch's on `engine.optimizer`."""

    def loop(engine: Any, rank: int, n: int) -> list[float]:
        scheduler = make(engine.optimizer)
        losses = []
        for step in range(6):
            losses += train(engine, rank, n, [step])
            scheduler.step(*([3.0] if metric else []))
            losses.append(engine.optimizer.param_groups[0]["lr"])
        return losses

    return loop


SCHEDULERS: dict[str, Loop] = {
    "plateau": scheduled(lambda o: schedulers.ReduceLROnPlateau(o, patience=1), metric=True),
    "cyclic": scheduled(lambda o: schedulers.CyclicLR(o, 1e-4, 1e-2, step_size_up=2, cycle_momentum=True)),
    "sequential": scheduled(
        lambda o: schedulers.SequentialLR(
            o, [schedulers.LinearLR(o, 0.1, total_iters=2), schedulers.CosineAnnealingWarmRestarts(o, 2)], [2]
        )
    ),
}


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Three parameter groups that differ in everything that AdamW knows."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return [
        {"params": matrices[1:], "weight_decay": 0.1, "betas": (0.8, 0.99)},
        {"params": matrices[:1], "weight_decay": 0.0, "lr": 3e-3, "amsgrad": True},
        {"params": vectors, "weight_decay": 0.0, "maximize": True, "eps": 1e-6},
    ]
