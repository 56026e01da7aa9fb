"""Uses that go beside the plain loop: right results, or one clear sentence."""

import pytest
import torch
from torch import nn

from tests import zoo
from tests.distributed import training
from tests.ranks import run_ranks
from zerobench.zero import STAGES, initialize


def engine_for(strategy: str, model: nn.Module | None = None, **options):
    model = model or zoo.build("tied")
    return training.engine_of(strategy, model, zoo.OPTIMIZERS["adamw"](model.parameters()), **options)


def step(engine, rank: int, n: int, number: int) -> float:
    loss = training.loss_of(engine(*zoo.tokens(rank, n, number)))
    engine.backward(loss)
    engine.step()
    return loss.item()


def forward_left_over(rank: int, n: int) -> dict[str, list[float]]:
    """A forward with gradients that no backward follows must not leave old parameters behind."""
    losses = {}
    for strategy in ("ddp", *STAGES):
        engine = engine_for(strategy)
        losses[strategy] = []
        for number in range(4):
            loss = engine(*zoo.tokens(rank, n, number))
            engine.backward(loss)
            with torch.no_grad() if strategy == "ddp" else torch.enable_grad():
                losses[strategy].append(engine(*zoo.tokens(rank, n, 90)).item())
            engine.step()
    return losses


@pytest.mark.parametrize("n", [1, 2])
def test_a_forward_left_over(n: int) -> None:
    for losses in run_ranks(n, forward_left_over):
        assert all(losses[stage] == losses["ddp"] for stage in STAGES)


def failing_backward(rank: int, n: int) -> dict[str, list[float]]:
    losses = {}
    for stage in STAGES:
        engine = engine_for(stage)
        step(engine, rank, n, 0)
        engine.backward(engine(*zoo.tokens(rank, n, 1)))
        with pytest.raises(ZeroDivisionError):
            engine.backward(Fails.apply(engine(*zoo.tokens(rank, n, 2))))
        engine.zero_grad()
        losses[stage] = [step(engine, rank, n, number) for number in range(3, 6)]
    return losses


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ZeroDivisionError


def test_going_on_after_a_backward_that_failed() -> None:
    for losses in run_ranks(2, failing_backward):
        assert losses["zero1"] == losses["zero2"] == losses["zero3"]


def refusals(rank: int, n: int) -> list[str]:
    """The message of each misuse, under every stage."""
    said = []
    for stage in STAGES:
        engine = engine_for(stage)
        with engine.no_sync():
            engine.backward(engine(*zoo.tokens(rank, n, 0)))
        with pytest.raises(RuntimeError, match="under no_sync"):
            engine.step()
        engine.zero_grad()
        assert n == 1 or stage in ("zero1", "megatron") or all(unit.gradients.full is None for unit in engine.units)
        with pytest.raises(RuntimeError, match=r"call engine\.step"):
            engine.optimizer.step()
        loss = engine(*zoo.tokens(rank, n, 0))
        engine.backward(engine(*zoo.tokens(rank, n, 1)) if stage != "zero3" else loss)
        stale = engine(*zoo.tokens(rank, n, 2))
        engine.step()
        with pytest.raises(RuntimeError, match=r"modified by an inplace|has gone through, or a step"):
            engine.backward(stale)
        with pytest.raises(ValueError, match="under an engine already"):
            initialize(engine.module, torch.optim.SGD(engine.module.parameters(), lr=0.1), stage)
        said.append(stage)
    return said


def test_misuse_is_answered() -> None:
    assert run_ranks(2, refusals) == [list(STAGES)] * 2


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


def nested_units(rank: int, n: int) -> list[list[float]]:
    results = []
    for strategy in ("zero1", "zero3"):
        torch.manual_seed(0)
        model = zoo.Tied()
        model.blocks = nn.ModuleList([Group(), Group()])
        model.forward = zoo.Tied.forward.__get__(model)
        units = tuple(m for group in model.blocks for m in (group, group.a, group.b))
        engine = engine_for(strategy, model, **({"units": units} if strategy == "zero3" else {}))
        results.append([step(engine, rank, n, number) for number in range(6)])
    return results


def test_units_inside_units() -> None:
    for first, second in run_ranks(2, nested_units):
        assert first == second


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
    return [step(engine, rank - 1, 2, number) for number in range(5)]


def whole_world(rank: int, n: int) -> list[float]:
    return [step(engine, rank, n, number) for engine in [engine_for("zero3")] for number in range(5)]


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


def units_whole_at_once(rank: int, n: int) -> int:
    """The largest number of units gathered at any time while backward recomputes in spans."""
    model = zoo.build("adapted_spans")
    engine = initialize(model, zoo.OPTIMIZERS["adamw"](model.parameters()), "zero3")
    most = 0

    def count(_gradient) -> None:
        nonlocal most
        most = max(most, len({u.name.split(" part")[0] for u in engine._all_units if u.is_whole}))

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(count)
    for number in range(3):
        step(engine, rank, n, number)
    return most


def test_recomputation_in_spans_keeps_no_more_units_than_it_needs() -> None:
    """Root, the span's two blocks, and one ahead."""
    assert max(run_ranks(2, units_whole_at_once)) <= 4
