"""ZeRO++ against the exact collectives: every element within the bound that the codec states."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests import zoo
from tests.distributed import training
from tests.distributed.test_comm import random_full
from tests.ranks import on_ranks, run_ranks
from zerobench.zero import Zeropp, initialize
from zerobench.zero.comm.base import Handle
from zerobench.zero.comm.quantize import LEVELS
from zerobench.zero.comm.zeropp import ZeroppComm, connect_zeropp

CPU = torch.device("cpu")
SLACK = 1 + 2**-14
QWZ, HPZ, QGZ = (Zeropp(**{part: True}, weight_block=24, gradient_block=24)
                 for part in ("quantize_weights", "secondary_shards", "quantize_gradients"))  # fmt: skip
ALL = Zeropp(True, True, True, 64, 64)
SDP4BIT = Zeropp(False, True, True, 64, 64, bits_within=8, differences=True)


def steps_of(rows: torch.Tensor, block: int, levels: int) -> torch.Tensor:
    """Half a step for each element of (..., numel), whose blocks begin again in every row."""
    found = torch.zeros_like(rows)
    for start in range(0, rows.shape[-1], block):
        part = rows[..., start : start + block]
        found[..., start : start + block] = part.abs().amax(-1, keepdim=True) / (2 * levels) * SLACK
    return found


def roundings(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bounds the error of a last rounding to `dtype` for each value, and the sums in fp32 before it."""
    return values.abs() * (torch.finfo(dtype).eps + 1e-5) + 1e-7


def bound_of(brought: torch.Tensor, inner: int) -> torch.Tensor:
    """Bounds the error of each element of a sum over ranks' contributions, (n, n · numel) fp64, in nodes of `inner`."""
    n = len(brought)
    fulls = brought.view(n // inner, inner, -1)
    blocks = fulls.view(n // inner, inner, inner, -1)  # node, who brings it, whose block it is
    off = steps_of(blocks, 24, LEVELS[4])
    mine = torch.eye(inner, dtype=torch.bool)[None, :, :, None]  # nobody codes for himself
    within = off.masked_fill(mine, 0).sum(1).reshape(n // inner, -1)  # of each node's sums
    sums = fulls.sum(1).abs() + within
    between = steps_of(sums.view(n // inner, n, -1), 24, LEVELS[4]).view(n // inner, -1)
    return within.sum(0) + (between.sum(0) if inner < n else 0)


def gradients_within_the_bound(rank: int, n: int, node_size: int | None) -> None:
    """qgZ's sum against the exact one in fp64, on odd sizes: first within nodes, then between."""
    inner = node_size or n
    comm = connect_zeropp(None, CPU, node_size, None, QGZ)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for numel in (16, 16 * 33, 16 * 7 * 5 + 8):
            brought = torch.stack([random_full(r, n, dtype, numel) for r in range(n)]).double()
            exact, allowed = brought.sum(0), bound_of(brought, inner)
            for into in (None, torch.empty(numel, dtype=dtype)):
                full = random_full(rank, n, dtype, numel)
                comm.reduce_scatter(full, "u", into).wait()
                own = slice(comm.rank * numel, (comm.rank + 1) * numel)
                found = (full[own] if into is None else into).double()
                bound = allowed[own] + roundings(exact[own].abs() + allowed[own], dtype)
                assert ((found - exact[own]).abs() <= bound).all(), (dtype, numel)
                assert (found - exact[own]).abs().max() > 0  # it was coded indeed
    weights_within_the_bound(rank, n, node_size)


def weights_within_the_bound(rank: int, n: int, node_size: int | None) -> None:
    """qwZ's gather: every rank gets the same, its own slice too."""
    comm = connect_zeropp(None, CPU, node_size, None, QWZ)
    for dtype in (torch.float32, torch.bfloat16):
        numel = 16 * 33
        owners: list[Any] = [None] * n
        dist.all_gather_object(owners, comm.rank)
        slices = torch.stack([random_full(owners.index(j), 1, dtype, numel) for j in range(n)])
        full = torch.zeros(n * numel, dtype=dtype)
        full.view(n, -1)[comm.rank] = slices[comm.rank]
        comm.all_gather(full, "u").wait()
        exact = slices.double()
        bound = steps_of(exact, 24, LEVELS[8]) + roundings(exact, dtype)
        off = (full.view(n, -1).double() - exact).abs()
        assert (off <= bound).all()
        assert (off[comm.rank] > 0).any()
        everyones: list[Any] = [None] * n
        dist.all_gather_object(everyones, full)
        assert all(torch.equal(one, full) for one in everyones)
        comm.exact.all_gather(full, "u").wait()
    double = torch.full((n * 16,), float(rank), dtype=torch.float64) / 3
    comm.all_gather(double, "u").wait()  # not coded
    assert double.view(n, -1)[comm.rank, 0].item() == rank / 3


def differences_arrive(rank: int, n: int) -> None:
    """A gather after an update brings all ranks the same, within half a step of the difference, or else exactly."""
    comm = connect_zeropp(None, CPU, 2, None, Zeropp(secondary_shards=True, differences=True, weight_block=24))
    source, slots = comm.new_source(), [None] * n
    dist.all_gather_object(slots, comm.rank)
    weights = torch.randn(n, 16 * 33, generator=torch.Generator().manual_seed(3))
    bound = torch.zeros(())
    for step in range(4):
        full = torch.zeros(n, 16 * 33)
        full[comm.rank] = weights[comm.rank]
        source.launch(full.view(-1), "u").wait()
        everyones: list[Any] = [None] * n
        dist.all_gather_object(everyones, full)
        assert all(torch.equal(one, full) for one in everyones)
        off = (full - weights).abs()
        assert (off <= bound * (step in (1, 2))).all()
        assert off.max() > 0 or step in (0, 3)
        source.before_release(full.view(-1), "u")
        change = 1e-2 * torch.randn(weights.shape, generator=torch.Generator().manual_seed(step))
        weights = weights + change
        bound = (weights - full).abs().max() / (2 * LEVELS[4]) * SLACK + 1e-6
        source.after_update()
        if step == 2:
            comm.forget()


def test_every_element_is_within_the_bound() -> None:
    run_ranks(4, in_nodes)
    run_ranks(3, gradients_within_the_bound, None)


def in_nodes(rank: int, n: int) -> None:
    differences_arrive(rank, n)
    gradients_within_the_bound(rank, n, 2)


def train(rank: int, n: int, model: str, **options: Any) -> Any:
    return training.train(rank, n, "zero3", model, "sgd", 4, **options)


def mean_gradients(rank: int, n: int, policy: Zeropp | None, dtype: torch.dtype, node_size: int) -> dict[str, Any]:
    """The mean over the ranks of every parameter's gradient, as SGD with lr 1 sees it; whole."""
    model = zoo.build("tied").to(dtype)
    engine = initialize(
        model, torch.optim.SGD(model.parameters(), lr=1.0), "zero3", zeropp=policy, node_size=node_size,
        gradient_dtype=torch.float32,
    )  # fmt: skip
    engine.backward(engine(*zoo.tokens(rank, n, 0)))
    engine.update.agree()
    found = {}
    for segment in engine.segments:
        gradient = segment.gradient()
        found[engine.names[segment.span.parameter], segment.span.start] = (
            None if gradient is None else gradient.detach().float().clone()
        )
    return found


def gradients(rank: int, n: int) -> None:
    """Means of a whole model are means, 1-D and uneven parameters too, and errors are of the codec's size."""
    for dtype in (torch.float32, torch.bfloat16):
        exact = mean_gradients(rank, n, None, dtype, 2)
        coded = mean_gradients(rank, n, QGZ, dtype, 2)
        assert exact.keys() == coded.keys()
        wanted, found = (torch.cat([g.flatten() for g in one.values()]) for one in (exact, coded))
        ratio = (found @ wanted) / (wanted @ wanted)
        assert abs(ratio.item() - 1) < 0.02, ratio  # neither node_size times too large nor too small
        assert 0.01 < ((found - wanted).norm() / wanted.norm()).item() < 0.2
        for model in ("tied", "lists"):
            models_gradients_within_the_bound(rank, n, model, dtype)


def models_gradients_within_the_bound(rank: int, n: int, model: str, dtype: torch.dtype) -> None:
    """In a backward, of each unit that is sent, in the gradients' own dtype: every element, by its own blocks."""
    sent: list[tuple[torch.Tensor, torch.Tensor]] = []
    real = ZeroppComm.reduce_scatter

    def spied(comm: ZeroppComm, full: torch.Tensor, unit: str, into: Any, *sizes: Any) -> Handle:
        brought, own = full.clone(), full.view(n, -1)[comm.rank] if into is None else into
        return Handle([real(comm, full, unit, into, *sizes)], lambda: sent.append((brought, own.clone())))

    module = zoo.build(model).to(dtype)
    engine = initialize(module, torch.optim.SGD(module.parameters(), lr=1.0), "zero3", zeropp=QGZ, node_size=2)
    with mock.patch.object(ZeroppComm, "reduce_scatter", spied):
        engine.backward(engine(*zoo.tokens(rank, n, 0)))
    assert len(sent) > 3
    for mine, found in sent:
        assert mine.dtype == found.dtype == dtype
        brought = torch.stack([torch.empty_like(mine) for _ in range(n)])
        dist.all_gather(list(brought), mine)
        exact, allowed = brought.double().sum(0), bound_of(brought.double(), 2)
        own = slice(engine.comm.rank * found.numel(), (engine.comm.rank + 1) * found.numel())
        bound = allowed[own] + roundings(exact[own].abs() + allowed[own], dtype)
        assert ((found.double() - exact[own]).abs() <= bound).all()


def whole_runs(rank: int, n: int) -> dict[str, Any]:
    gradients(rank, n)
    found: dict[str, Any] = {}
    for model in ("tied", "rich", "adapted"):
        for name, options in {
            "plain": {}, "hpz": {"zeropp": HPZ}, "qwz": {"zeropp": QWZ}, "qgz": {"zeropp": QGZ}, "all": {"zeropp": ALL},
            "all, kept": {"zeropp": ALL, "persistence_numel": 60, "prefetch": 0},
            "sdp4bit": {"zeropp": SDP4BIT},
            "all, one node": {"zeropp": ALL, "node_size": 4}, "all, no nodes": {"zeropp": ALL, "node_size": 1},
        }.items():  # fmt: skip
            found[f"{model} {name}"] = train(rank, n, model, **{"node_size": 2, **options})
    return found


@on_ranks(2)
def test_ranks_gather_alike_after_writes_that_one_rank_alone_holds(rank: int, n: int) -> None:
    """Secondary shards change no loss of a model whose frozen parts are 0 on one rank alone."""
    found = []
    for options in ({}, {"zeropp": HPZ, "node_size": 1}):
        model = zoo.build("unused")
        engine = initialize(model, zoo.OPTIMIZERS["adamw"](model.parameters()), "zero3", **options)
        losses = training.take_steps(engine, rank, n, range(1))
        with engine.full_parameters() as module:
            for parameter in module.parameters():
                parameter.data.mul_(0.9)
        found.append(losses + training.take_steps(engine, rank, n, range(1, 3)))
    assert found[0] == found[1]


@pytest.mark.thorough
def test_models_train_near_enough_and_all_ranks_alike() -> None:
    found = run_ranks(4, whole_runs)
    for name, (losses, state) in found[0].items():
        model, how = name.split(" ", 1)
        plain_losses, plain = found[0][f"{model} plain"]
        for mine in found:
            assert all(torch.equal(mine[name][1][key], state[key]) for key in state), name
        if how == "hpz":  # secondary shards are the same bits
            assert losses == plain_losses
            assert all(torch.equal(state[key], plain[key]) for key in plain)
        elif how != "plain":
            assert losses != plain_losses, name
            assert max(abs(a - b) for a, b in zip(losses, plain_losses, strict=True)) < 0.3, name
