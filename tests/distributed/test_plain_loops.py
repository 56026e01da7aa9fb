"""Loops of plain torch under an engine: loss.backward() and optimizer.step() train as under DDP, to the bit."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zerobench
from tests import zoo
from tests.distributed.training import adamw, assert_same, loss_of
from tests.ranks import on_ranks
from zerobench.watching.held_tensors import leave_out
from zerobench.zero import STAGES, LossScaling, NvmeOffload, Offload, initialize

STEPS = 3
LOOPED = "lists"
"""The model of the loops: of a tied one DDP sums micro-batches in another order."""

MODELS = ("tied", "unused", "rich", "recomputed_reentrant", "lists")


def wrapped(strategy: str, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
    """What the loop calls: the engine, or DDP."""
    if strategy == "ddp":
        return DistributedDataParallel(model, gradient_as_bucket_view=True, find_unused_parameters=True)
    return initialize(model, optimizer, strategy, bucket_bytes=4096, **options)


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    if isinstance(model, DistributedDataParallel):
        return {name: value.detach().clone() for name, value in model.module.state_dict().items()}
    return model.full_state_dict()


# -- the loops: each trains `model` with `optimizer` and yields losses ----------------------------------------------


def plain(
    model: Any, optimizer: Any, rank: int, n: int, steps: range = range(STEPS), drops: Any = None
) -> Iterator[float]:
    for step in steps:
        (drops or optimizer).zero_grad()
        loss = loss_of(model(*zoo.tokens(rank, n, step)))
        loss.backward()
        optimizer.step()
        yield loss.item()


def accumulating(model: Any, optimizer: Any, rank: int, n: int) -> Iterator[float]:
    """Two micro-batches a step, of which the first is kept by no_sync."""
    for step in range(STEPS):
        for micro in range(2):
            with nullcontext() if micro else model.no_sync():
                loss = model(*zoo.tokens(rank, n, 2 * step + micro)) / 2
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def several_losses(model: Any, optimizer: Any, rank: int, n: int) -> Iterator[float]:
    """torch.autograd.backward of two, one of them weighted by `gradient`; a batch in which the loop does not step."""
    for step in range(STEPS):
        losses = [model(*zoo.tokens(rank, n, 2 * step + one)) for one in range(2)]
        torch.autograd.backward(losses, [torch.tensor(0.5), torch.tensor(2.0)])
        if step == 1:
            optimizer.zero_grad()
            continue
        optimizer.step()
        model.zero_grad(set_to_none=False)
        optimizer.zero_grad()
        yield sum(losses).item()


def with_closure(model: Any, optimizer: Any, rank: int, n: int) -> Iterator[float]:
    for step in range(STEPS):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(*zoo.tokens(rank, n, step))
            loss.backward()
            return loss

        yield optimizer.step(closure).item()


def recovering(model: Any, optimizer: Any, rank: int, n: int) -> Iterator[float]:
    """A hook fails in the middle of a backward, or of a step, on all ranks, and the loop goes on. DDP cannot, and so
    has no such step: what is left of it must change nothing.
    """
    inner, is_ddp = model.module, isinstance(model, DistributedDataParallel)

    def fail(*_: Any) -> None:
        raise ZeroDivisionError("half way")

    for step in range(STEPS):
        if step and not is_ddp:
            hooks = inner.blocks[0][0].up.bias.register_hook, optimizer.register_step_pre_hook
            hook = hooks[step % 2](fail)
            with pytest.raises(ZeroDivisionError, match="half way"):
                next(plain(model, optimizer, rank, n, range(7, 8)))
            hook.remove()
            assert not model.gradients.in_backward
        yield from plain(model, optimizer, rank, n, range(step, step + 1), drops=inner)


def by_parts(model: Any, optimizer: Any, rank: int, n: int) -> Iterator[float]:
    """A backward for the parameters of some blocks alone."""
    for step in range(STEPS):
        loss = model(*zoo.tokens(rank, n, step))
        if not isinstance(model, DistributedDataParallel):  # whose reducer would wait for the others
            loss.backward(inputs=list(model.module.blocks[1].parameters()), retain_graph=True)
            model.module.zero_grad()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def scheduled(model: Any, optimizer: Any, rank: int, n: int) -> Iterator[float]:
    """A scheduler that is made after the engine; the one before is made by `train`."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for step in range(STEPS):
        yield from plain(model, optimizer, rank, n, range(step, step + 1))
        scheduler.step()


LOOPS: dict[str, Callable[..., Iterator[float]]] = {
    one.__name__: one for one in (accumulating, several_losses, with_closure, recovering, by_parts, scheduled)
}


def train(rank: int, n: int, strategy: str, model_name: str, loop: Callable[..., Iterator[float]], **options: Any):
    model = zoo.build(model_name)
    optimizer = adamw(model.parameters())
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0, 10)  # made before the engine
    called = wrapped(strategy, model, optimizer, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as of a scheduler's step before the optimizer's
        losses = list(loop(called, optimizer, rank, n))
        scheduler.step()
    return losses, weights_of(called)


def stages(number: int, thorough: bool) -> list[str]:
    """All, or one by turns."""
    return [*STAGES] if thorough else [[*STAGES][number % 4]]


def all_models(rank: int, n: int, thorough: bool) -> None:
    for number, name in enumerate(MODELS):
        for stage in stages(number, thorough):
            # DDP refuses a block that is used twice in reentrant checkpoints
            wanted = train(rank, n, *((stage, name, as_engine) if "reentrant" in name else ("ddp", name, plain)))
            assert_same(train(rank, n, stage, name, plain), wanted, name, stage)


def all_loops(rank: int, n: int, thorough: bool) -> None:
    for number, (name, loop) in enumerate(LOOPS.items()):
        wanted = train(rank, n, "ddp", LOOPED, loop)
        for stage in stages(number, thorough):
            assert_same(train(rank, n, stage, LOOPED, loop), wanted, name, stage)


def all_tiers(rank: int, n: int, folder: str, thorough: bool) -> None:
    """A late update is one step behind: it is compared with the engine's own two methods."""
    wanted = train(rank, n, "ddp", LOOPED, accumulating)
    parts = {"gradients": True, "optimizer": True}
    files = partial(NvmeOffload, path=folder, block_bytes=8192)
    tiers = (
        ("zero1", Offload(**parts)),
        ("zero2", files(**parts)),
        ("zero3", Offload(**parts, parameters=True)),
        ("zero2", Offload(**parts)),
        ("zero3", files(**parts, parameters=True)),
    )
    for stage, offload in tiers if thorough else tiers[1:3]:
        assert_same(train(rank, n, stage, LOOPED, accumulating, offload=offload), wanted, stage, offload)
    late = Offload(**parts, delayed_after=1)
    ours = train(rank, n, "zero2", "tied", plain, offload=late)
    assert_same(ours, train(rank, n, "zero2", "tied", as_engine, offload=late), "late updates")


def as_engine(engine: Any, _optimizer: Any, rank: int, n: int) -> Iterator[float]:
    for step in range(STEPS):
        loss = engine(*zoo.tokens(rank, n, step))
        engine.backward(loss)
        engine.step()
        yield loss.item()


class Penalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([zoo.Block(), zoo.Block()])
        self.scale = nn.Parameter(torch.ones(3))  # that the penalty alone reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](x)).square().mean()


def weights_penalized(rank: int, n: int, thorough: bool) -> None:
    """A gradient of weights, whose backward does not come through the forward's output or comes before it. Plain torch
    trains on the whole batch: DDP does not know the penalty's parameter.
    """
    batch = torch.randn(n, 2, zoo.WIDTH, generator=torch.Generator().manual_seed(1))

    def trained(strategy: str) -> Any:
        torch.manual_seed(0)
        model = Penalized()
        optimizer = adamw(model.parameters())
        called = model if strategy == "plain" else initialize(model, optimizer, strategy, bucket_bytes=4096)
        for step in range(STEPS):
            for micro in range(2):
                rows = batch if strategy == "plain" else batch[rank : rank + 1]
                penalty = model.scale.square().sum() + model.scale.sum().sin() * step
                loss = called(rows + micro) if step < 2 else torch.zeros(())
                (penalty if micro else loss + penalty).backward()
            optimizer.step()
            optimizer.zero_grad()
        return dict(model.state_dict() if strategy == "plain" else called.full_state_dict())

    wanted = trained("plain")
    for stage in ("zero1", "zero2", "megatron") if thorough else ("zero2",):
        torch.testing.assert_close(trained(stage), wanted, rtol=0, atol=1e-6)


def two_engines(rank: int, n: int, thorough: bool) -> None:
    """One loss of two models in one graph, and a discriminator that a generator's loss goes through."""

    def trained(strategies: tuple[str, str]) -> Any:
        torch.manual_seed(0)
        models = [nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(2)]
        optimizers = [adamw(model.parameters()) for model in models]
        first, second = (wrapped(*one) for one in zip(strategies, models, optimizers, strict=True))
        seen = []
        for step in range(STEPS):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))
            loss = second(first(x)).square().mean()
            loss.backward()
            optimizers[0].step()
            if step == 2:  # the second one's gradients are of this loss
                optimizers[1].step()
            optimizers[0].zero_grad()
            optimizers[1].zero_grad()
            (second(x) - second(first(x).detach())).square().mean().backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
            seen.append(loss.item())
        return seen, weights_of(first) | {f"second {k}": v for k, v in weights_of(second).items()}

    wanted = trained(("ddp", "ddp"))
    for pair in (("zero1", "zero2"), ("zero2", "zero2"), ("megatron", "ddp")) if thorough else (("zero1", "zero2"),):
        assert_same(trained(pair), wanted, pair)
    # under zero3 a forward is gone through once: each engine's two forwards of a discriminator's step are one's each
    assert_same(trained(("zero3", "zero3")), wanted, "zero3")


@on_ranks(2)
def test_plain_loops_train_as_under_ddp(rank: int, n: int, tmp_path: Path, thorough: bool) -> None:
    all_models(rank, n, thorough)
    all_loops(rank, n, thorough)
    all_tiers(rank, n, str(tmp_path), thorough)
    two_engines(rank, n, thorough)
    weights_penalized(rank, n, thorough)


# -- alone: refusals, what a backward leaves, and a watch -------------------------------------------------------------


def alone(strategy: str = "zero2", **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return initialize(model, optimizer, strategy, **options), optimizer


def test_what_differs_from_ddp_is_named() -> None:
    engine, optimizer = alone(loss_scaling=LossScaling())
    with pytest.raises(RuntimeError, match=r"call engine\.backward\(loss\), not loss\.backward\(\): the engine scales"):
        engine(torch.ones(1, 4)).sum().backward()
    engine, optimizer = alone()
    with pytest.warns(UserWarning, match="create_graph"), pytest.raises(RuntimeError, match="gradients have no graph"):
        engine(torch.ones(1, 4)).sum().backward(create_graph=True)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(engine(torch.ones(1, 4)).sum()).backward()
    with pytest.raises(RuntimeError, match=r"a GradScaler finds no gradients here"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"in the engine's shards, not in \.grad; .* engine\.clip_grad_norm_"):
        nn.utils.clip_grad_norm_(engine.parameters(), 1.0)
    with pytest.raises(RuntimeError, match=r"in the engine's shards, not in \.grad"):
        engine.module.weight.grad.add_(1.0)
    with pytest.raises(RuntimeError, match=r"call engine\.step\(\), or optimizer\.step\(\) of the optimizer that"):
        torch.optim.AdamW.step(optimizer)
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    before = engine.full_state_dict()
    disabled.step(optimizer)
    assert not torch.equal(engine.full_state_dict()["weight"], before["weight"])


@pytest.mark.parametrize("strategy", STAGES)
def test_grad_of_torch_begins_no_backward(strategy: str) -> None:
    engine, optimizer = alone(strategy)
    moved = torch.ones(1, 4, requires_grad=True)
    torch.autograd.grad(engine(moved).sum(), moved)
    loss = engine(moved).sum()
    loss.backward(inputs=[moved])  # as torch.autograd.grad, into .grad
    assert not engine.gradients.in_backward
    assert not engine.update.used
    assert engine.module.weight.grad is None
    engine(moved).sum().backward()
    assert not engine.gradients.in_backward
    assert engine.update.used == {0, 1}
    optimizer.zero_grad()
    assert not engine.update.used


def test_torch_has_the_private_names_of_graph_tasks() -> None:
    assert callable(torch._C._will_engine_execute_node)
    assert callable(torch._C._current_graph_task_id)
    assert callable(torch.autograd.Variable._execution_engine.queue_callback)


def watched(is_plain: bool, strategy: str) -> Any:
    engine, optimizer = alone(strategy)
    with leave_out(), zerobench.watch(engine, optimizer if is_plain else None, verify=True, steps=2) as watch:
        for _ in range(4):
            loss = engine(torch.ones(3, 4)).square().mean()
            if is_plain:
                loss.backward()
                optimizer.step()
            else:
                engine.backward(loss)
                engine.step()
            del loss
    return watch


@pytest.mark.parametrize("strategy", [pytest.param("zero1", marks=pytest.mark.thorough), "zero3"])
def test_a_watched_plain_loop_has_the_bytes_of_the_engines_methods(strategy: str) -> None:
    plainly, by_engine = (watched(is_plain, strategy) for is_plain in (True, False))
    for table in ("memory", "traffic"):
        ours, engines = (
            getattr(watch.results, table).drop(columns="run_id", errors="ignore") for watch in (plainly, by_engine)
        )
        assert ours.equals(engines), table
    assert plainly.certificate.rows == by_engine.certificate.rows
    assert not plainly.certificate.different
