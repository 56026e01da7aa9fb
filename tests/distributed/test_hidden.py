"""Parameters whose values are away are brought when somebody reads them, or say so; nothing else is changed by it."""

import copy
import gc
import pickle
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector
from torch.optim.swa_utils import AveragedModel

from tests.distributed.training import assert_equal
from tests.ranks import on_ranks, run_ranks
from zerobench.zero import STAGES, initialize
from zerobench.zero.parameters.access import Hiding, placeholder

WIDTH = 16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.reads_beside = False

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return F.linear(x, self.blocks[0].weight) if self.reads_beside else x


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def engine_of(strategy: str, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Net()
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    return initialize(model, optimizer, strategy, bucket_bytes=1024, **options)


READERS: dict[str, Any] = {
    "data": lambda m: [p.data.clone() for p in m.parameters()],
    "operations": lambda m: [p * 1 for p in m.parameters()],
    "several at once": lambda m: [parameters_to_vector(m.parameters())],
    "foreach": lambda m: torch._foreach_mul(list(m.parameters()), 1.0),
    "state_dict": lambda m: list(m.state_dict().values()),
    "pickle": lambda m: list(pickle.loads(pickle.dumps(m)).parameters()),
    "a copy": lambda m: list(copy.deepcopy(m).parameters()),
    "numpy": lambda m: [torch.from_numpy(p.detach().numpy().copy()) for p in m.parameters()],
    "numbers": lambda m: [torch.tensor(p.tolist()) for p in m.parameters()],
}


def read_late(rank: int, n: int) -> None:
    """An average by `p.data` after every step, and each reader, with gathers that overlap and with none."""
    for strategy in ("zero1", "zero2"):
        seen: list[list[torch.Tensor]] = []
        for overlaps in (False, True):
            engine = engine_of(strategy, overlap_gather=overlaps)
            average = [torch.zeros_like(p) for p in engine.parameters()]
            found: list[torch.Tensor] = []
            for step, read in enumerate(READERS.values()):
                engine.module.reads_beside = step % 2 == 1
                engine.backward(engine(batch(step, rank)).square().mean())
                engine.step()
                late = [p for p in engine.parameters() if type(p) is not nn.Parameter]
                assert bool(late) is overlaps
                assert all(p.shape and p.requires_grad and p.numel() and isinstance(p, nn.Parameter) for p in late)
                assert all(type(p) is not nn.Parameter for p in late), "shapes are no values: nothing was waited for"
                found += [one.detach().clone().flatten() for one in read(engine.module)]
                assert all(type(p) is nn.Parameter for p in engine.parameters())
                engine.backward(engine(batch(step, rank)).square().mean())
                engine.step()
                for mean, p in zip(average, engine.parameters(), strict=True):
                    mean.lerp_(p.data, 0.5)
            seen.append([*found, *average, *engine.full_state_dict().values()])
        assert all(map(torch.equal, *seen)), strategy


def read_in_parts(rank: int, n: int) -> None:
    """zero3: in the first forward, in the sixth, and between steps; and what is no reading."""
    engine = engine_of("zero3")
    sentence = r"blocks\.0\.weight: it is read outside of the forward of blocks\.0, where zero3 holds a part of it only"
    for step in range(6):
        engine.module.reads_beside = step in (0, 5)
        if engine.module.reads_beside:
            with pytest.raises(RuntimeError, match=sentence):
                engine(batch(step, rank))
            continue
        engine.backward(engine(batch(step, rank)).square().mean())
        engine.step()
        weight = engine.module.blocks[0].weight
        with pytest.raises(RuntimeError, match=f"{sentence}.*read it inside `with engine.full_parameters"):
            weight.norm()
        assert weight.shape == (WIDTH, WIDTH)
        for read in (torch.Tensor.detach, lambda p: p.data, lambda p: p.data.zero_(), copy.deepcopy, AveragedModel):
            with pytest.raises(RuntimeError, match=sentence):
                read(weight)
        assert torch.zeros_like(weight).sum() == 0
        assert "nan" in repr(weight)
        with pytest.raises(RuntimeError, match=r"state_dict: .* is in parts, one on each rank; on every"):
            engine.module.state_dict()
        with pytest.raises(RuntimeError, match="it is read outside of the forward"):
            pickle.dumps(engine.module)
        assert engine.module.state_dict(keep_vars=True)["blocks.0.weight"] is weight
        with engine.full_parameters():
            fresh = copy.deepcopy(engine.module)
        assert all(type(p) is nn.Parameter for p in fresh.parameters())
        fresh.load_state_dict(engine.full_state_dict())
        with engine.full_parameters():
            assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), engine.parameters(), strict=True))
    engine.module.reads_beside = False
    for transform in (transformed_forward, lambda run, x: torch.func.grad(lambda x: run(x).sum())(x)):
        with pytest.raises(RuntimeError, match=r"blocks\.0: zero3 cannot gather it inside of a transform of torch"):
            transform(engine, batch(6, rank))
        with engine.full_parameters():
            transform(engine.module, batch(6, rank))
    engine.backward(engine(batch(6, rank)).square().mean())
    engine.step()


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


def read_in_hooks(rank: int, n: int) -> None:
    """A hook on a gradient reads its own parameter: a block's is there, the embedding's with keep_root=True alone."""
    found = []
    for strategy, options in (("zero2", {}), ("zero3", {"keep_root": True}), ("zero3", {})):
        torch.manual_seed(0)
        model = Language()
        engine = initialize(model, optim.SGD(model.parameters(), lr=0.1), strategy, **options)
        for p in model.parameters():
            p.register_hook(lambda gradient, p=p: gradient + 0.1 * p.detach())
        loss = engine(torch.arange(4) + rank)
        if not options and strategy == "zero3":
            with pytest.raises(RuntimeError, match=r"embedding\.weight: .* a hook .* in backward needs keep_root=True"):
                engine.backward(loss)
            continue
        engine.backward(loss)
        engine.step()
        found.append(engine.full_state_dict())
    assert_equal(*found)


def transformed_forward(run: Any, x: torch.Tensor) -> Any:
    return torch.func.jvp(lambda x: run(x), (x,), (torch.ones_like(x),))


@on_ranks(2)
def test_values_that_are_away_are_brought_or_refused(rank: int, n: int) -> None:
    for reads in (read_late, read_in_parts, read_in_hooks):
        reads(rank, n)


class Encoder(nn.Module):
    """torch's own layers, which take a shorter way in an evaluation, with padding left out."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        padding[:, -2:] = True
        return self.head(self.encoder(x, src_key_padding_mask=padding))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@on_ranks(2, 1)
def test_evaluations_go_torchs_own_ways(rank: int, n: int) -> None:
    """The first evaluation, before any training, and one between; then training over a frozen encoder in eval mode."""
    x = torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(1))
    for strategy in STAGES:
        torch.manual_seed(0)
        plain = Encoder()
        model = copy.deepcopy(plain)
        model.encoder.requires_grad_(False)
        engine = initialize(model, optim.SGD(model.parameters(), lr=0.1), strategy)
        for step in range(2):
            engine.eval()
            plain.eval()
            with torch.no_grad():
                assert torch.equal(engine(x), plain(x)), (strategy, step)
            model.head.train()
            plain.encoder.requires_grad_(False)
            losses = [one(x).square().mean() for one in (engine, plain)]
            assert torch.equal(*losses), (strategy, step)
            if step == 0:
                engine.backward(losses[0])
                engine.step()
                plain.load_state_dict(engine.full_state_dict())


def test_what_is_asked_and_what_passes() -> None:
    """torch's `DisableTorchFunctionSubclass`, and assignments to a parameter's class."""
    owner = Owner()
    hiding = Hiding(owner.show)
    owner.hiding = hiding
    p = nn.Parameter(torch.ones(2, 3))
    values = p.data
    for passes in (
        lambda: p.shape, lambda: p.dtype, lambda: p.requires_grad_(True), lambda: p.grad, lambda: p.numel(),
        lambda: torch.empty_like(p), lambda: p.new_zeros(1), lambda: p.register_hook(print), lambda: hash(p),
    ):  # fmt: skip
        hiding.hide(p, placeholder(p))
        passes()
        assert owner.asked == 0
        hiding.show(p, values)
    for asks in (lambda: p + 1, lambda: p.data, lambda: p.T, lambda: repr(p), lambda: p.detach(), lambda: p.stride()):
        hiding.hide(p, placeholder(p))
        owner.values = values
        asks()
        assert owner.asked == 1
        assert type(p) is nn.Parameter
        owner.asked = 0
    hiding.hide(p, placeholder(p))
    del owner
    with pytest.raises(RuntimeError, match="the engine is gone"):
        p.sum()


class Owner:
    asked = 0
    hiding: Hiding
    values: torch.Tensor

    def show(self, parameter: nn.Parameter) -> None:
        self.asked += 1
        self.hiding.show(parameter, self.values)


def one_after_the_other(rank: int, n: int) -> list[float]:
    """Rank 0 launches the last gather of each engine when rank 1 has already dropped its own."""
    losses = []
    for _ in range(3):
        engine = engine_of("zero1", overlap_gather=True)
        loss = engine(batch(0, 0)).square().mean()
        engine.backward(loss)
        engine.optimizer.register_step_pre_hook(lambda *_: time.sleep(0.3 * (rank == 0)))
        engine.step()
        losses.append(loss.item())
        del engine, loss
        gc.collect()
    dist.barrier()  # a process that ends cuts its connections
    return losses


def test_an_engine_that_is_dropped_leaves_no_message_to_the_next() -> None:
    (first, *others), other_rank = run_ranks(2, one_after_the_other)
    assert [first, *others] == [first] * 3 == other_rank
