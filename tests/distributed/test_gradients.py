"""Gradients that are read and changed between backward and step, on real ranks."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests import zoo
from tests.distributed import test_writes as writes
from tests.ranks import on_ranks
from zerobench.zero import LossScaling, initialize
from zerobench.zero.bucket import Heap

LR = 0.1


def kinds(n: int, folder: Path) -> list[tuple[str, str, torch.dtype, dict[str, Any]]]:
    options = {"loss_scaling": LossScaling(initial=256.0)}
    all_kinds = [*writes.kinds(n, folder), *((stage, "tied", torch.float16, options) for stage in ("zero2", "zero3"))]
    return all_kinds if n < 3 else all_kinds[::4]


def means(module: torch.nn.Module, rank: int, n: int, micros: range) -> dict[str, torch.Tensor]:
    """Returns the mean gradients of the sum over the micro-batches, in fp64, by autograd alone, by parameter name."""
    found = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in module.named_parameters()}
    for number in micros:
        for parameter in module.parameters():
            parameter.grad = None
        module(*zoo.tokens(rank, n, number)).float().backward()
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                found[name] += parameter.grad.double() / n
    if n > 1:
        for value in found.values():
            dist.all_reduce(value)
    return {name: value for name, value in found.items() if bool(value.any())}


def backwards(engine: Any, rank: int, n: int, micros: range) -> None:
    for number in micros:
        last = number == micros[-1]
        loss = engine(*zoo.tokens(rank, n, number)).float()
        if last:
            engine.backward(loss)
        else:
            with engine.no_sync():
                engine.backward(loss)
            if n > 1:
                with pytest.raises(RuntimeError, match="the last backward was under no_sync"):
                    engine.full_gradient(engine.names[0])


@on_ranks(3, 1, 2)
def test_gradients_are_the_mean_and_edits_of_them_count(rank: int, n: int, tmp_path: Path) -> None:
    for number, (stage, name, dtype, options) in enumerate(kinds(n, tmp_path)):
        module, plain = (zoo.build(name).to(dtype) for _ in range(2))
        engine = writes.engine_of(stage, module, options)
        micros = range(1 + number % 2 if dtype == torch.float32 else 1)
        expected = means(plain, rank, n, micros)
        backwards(engine, rank, n, micros)
        case = f"{stage} {name} {dtype} {options}"
        tolerance = 1e-5 if dtype == torch.float32 else 3e-2
        found = {name: engine.full_gradient(name) for name in engine.names}
        assert {name for name, value in found.items() if value is not None and value.any()} == set(expected), case
        check_norms(engine, found, case)
        for key, value in expected.items():
            assert found[key].dtype == torch.float32, case
            gap = (found[key].double() - value).norm()
            assert gap <= tolerance * value.norm() + 1e-9, f"{case} {key}: {gap} of {value.norm()}"
        check_edits(engine, found, case)
        check_refusals(engine)


def check_norms(engine: Any, found: dict[str, Any], case: str) -> None:
    for norm_type in (2.0, float("inf")):
        norms = engine.gradient_norms(norm_type)
        assert set(norms) == {name for name, value in found.items() if value is not None}
        for name, norm in norms.items():
            assert norm.dtype == torch.float64
            expected = torch.linalg.vector_norm(found[name].double(), norm_type)
            assert norm.item() == pytest.approx(expected.item(), rel=1e-6, abs=1e-12), f"{case} {name}"


def check_edits(engine: Any, found: dict[str, Any], case: str) -> None:
    """Half of every gradient, a mask of the embedding's, one replaced: the optimizer gets that, to the bit."""
    mask = torch.zeros(zoo.WORDS, zoo.WIDTH)
    mask[::3] = 1
    covered: dict[str, int] = {}
    for segment in engine.gradient_segments():
        segment.gradient.mul_(0.5)
        if segment.name == "embedding.weight":
            segment.gradient.mul_(segment.part_of(mask).to(segment.gradient.dtype))
        covered[segment.name] = covered.get(segment.name, 0) + segment.stop - segment.start
    replaced = torch.linspace(-1, 1, zoo.WIDTH).to(torch.bfloat16).float()
    engine.set_full_gradient("blocks.0.norm.weight", replaced)
    edited = {name: engine.full_gradient(name) for name in engine.names}
    assert torch.equal(edited["blocks.0.norm.weight"], replaced), case
    half = found["embedding.weight"] * 0.5 * mask
    torch.testing.assert_close(edited["embedding.weight"], half, rtol=1e-2, atol=1e-7)
    norm = engine.clip_grad_norm_(0.25)
    whole = torch.stack([v.double().norm() for v in edited.values() if v is not None]).norm()
    assert norm.item() == pytest.approx(whole.item(), rel=1e-5), case
    clipped = {name: engine.full_gradient(name) for name in engine.names}
    before = masters(engine)
    engine.step()
    for name, old, new, start, stop in zip_masters(engine, before):
        if clipped[name] is None:
            assert torch.equal(old, new)
        else:
            gradient = engine.orders[dict(engine.module.named_parameters())[name]].flatten(clipped[name])[start:stop]
            torch.testing.assert_close(new, old - LR * gradient, rtol=1e-6, atol=1e-8)


def masters(engine: Any) -> list[torch.Tensor]:
    with engine.placement.in_memory(write_back=False):
        return [segment.tensor.detach().clone() for segment in engine.segments]


def zip_masters(engine: Any, before: list[torch.Tensor]) -> Any:
    if engine.update.pending_gradients():
        engine.settle()
    for segment, old, new in zip(engine.segments, before, masters(engine), strict=True):
        yield engine.names[segment.span.parameter], old, new, segment.span.start, segment.span.stop


def check_refusals(engine: Any) -> None:
    with pytest.raises(ValueError, match=r"'embedding.weigth': the module has no such parameter; did you mean embed"):
        engine.full_gradient("embedding.weigth")
    with pytest.raises(ValueError, match=r"the value's shape is \(2,\), but the parameter's is \(37, 19\)"):
        engine.set_full_gradient("embedding.weight", torch.ones(2))
    with pytest.raises(RuntimeError, match=r"embedding\.weight has no gradient; run a backward"):
        engine.set_full_gradient("embedding.weight", torch.ones(zoo.WORDS, zoo.WIDTH))
    assert engine.full_gradient("embedding.weight") is None
    assert engine.gradient_norms() == {}
    assert list(engine.gradient_segments()) == []


RATE = 0.5


class Branches(nn.Module):
    """Rank r runs branch r; a third is run by no rank, and a shared layer by all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Linear(15, 15)
        self.branches = nn.ModuleList(nn.Linear(15, 15) for _ in range(3))

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return self.branches[rank](self.shared(x)).square().mean()


def poisoned(make: Any) -> Any:
    def made(heap: Heap, *args: Any) -> Any:
        found = make(heap, *args)
        (args[0] if found is None else found).fill_(torch.nan)
        return found

    return made


def inputs(rank: int) -> torch.Tensor:
    return torch.randn(5, 15, generator=torch.Generator().manual_seed(rank))


def step(rank: int, n: int, stage: str) -> dict[str, torch.Tensor]:
    """The state after a step. Weight decay would move whatever is updated."""
    module = Branches()
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE, weight_decay=0.1)
    with mock.patch.multiple(Heap, take=poisoned(Heap.take), restore=poisoned(Heap.restore)):
        engine = initialize(module, optimizer, stage, bucket_bytes=1024)
        engine.backward(engine(inputs(rank), rank))
        engine.step()
    return engine.full_state_dict()


def expected(n: int) -> dict[str, torch.Tensor]:
    """By hand: the mean of all ranks' gradients; what no rank has used stays as it is."""
    module = Branches()
    sum(module(inputs(rank), rank) for rank in range(n)).backward()
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad /= n
    torch.optim.SGD(module.parameters(), lr=RATE, weight_decay=0.1).step()
    return module.state_dict()


@on_ranks(2)
def test_what_a_rank_did_not_use_counts_as_zero_there_and_what_none_used_stays(rank: int, n: int) -> None:
    for stage in ("zero1", "zero2"):
        torch.testing.assert_close(step(rank, n, stage), dict(expected(n)), msg=stage)
