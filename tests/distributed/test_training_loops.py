"""Training loops beyond plain steps: overflow, closures, sums in fp32 and of two losses, clipping."""

import math
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests import zoo
from tests.distributed.training import adamw, assert_alike, assert_equal, engine_of
from tests.ranks import on_ranks
from zerobench.zero import STAGES, LossScaling


def overflow(rank: int, n: int, strategy: str) -> None:
    """One rank's loss overflows in the second of four steps: all skip it, the scale halves, then grows."""
    model = zoo.build("tied").half()
    engine = engine_of(strategy, model, loss_scaling=LossScaling(initial=256.0, interval=2))
    scales, skipped, before = [], [], None
    for step in range(4):
        scales.append(engine.loss_scale)
        loss = engine(*zoo.tokens(rank, n, step))
        engine.backward(loss * (float("inf") if step == 1 and rank == n - 1 else 1))
        if step == 1:
            before = engine.full_state_dict()
        if step != 2:
            engine.clip_grad_norm_(1.0)
        engine.step()
        skipped.append(engine.skipped)
        if step == 1:
            assert_equal(engine.full_state_dict(), before)
            steps = {s["step"].item() for s in engine.optimizer.state.values()}
            assert steps <= {1.0}
    assert skipped == [False, True, False, False]
    assert scales == [256.0, 256.0, 128.0, 128.0]
    assert engine.loss_scale == 256.0
    assert all(value.isfinite().all() for value in engine.full_state_dict().values())


def sums_in_fp32(rank: int, n: int, strategy: str) -> None:
    """16 times the same micro-batch in bf16: in fp32 their mean is the gradient of one, in bf16 it has drifted."""

    def gradient(micro_batches: int, dtype: torch.dtype) -> torch.Tensor:
        model = zoo.build("lists").bfloat16()
        engine = engine_of(strategy, model, gradient_dtype=dtype)
        for micro in range(micro_batches):
            loss = engine(*zoo.tokens(rank, n, 0)) / micro_batches
            if micro < micro_batches - 1:
                with engine.no_sync():
                    engine.backward(loss)
            else:
                engine.backward(loss)
        own = [(unit.gradients.shard, segment) for unit in engine.units for segment in unit.layout.segments(rank)]
        return torch.cat([shard.narrow(0, s.offset, s.numel).float() for shard, s in own])  # without the padding

    one, wide, narrow = gradient(1, torch.float32), gradient(16, torch.float32), gradient(16, torch.bfloat16)
    assert (wide - one).norm() <= 1e-6 * one.norm()
    assert (narrow - one).norm() > 1e-3 * one.norm()


def two_losses(rank: int, n: int, strategy: str) -> None:
    """Two backwards a step sum two means; if the first was `kept` by no_sync, the mean is of the sum, as DDP's then."""

    def mean(gradients: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        for gradient in gradients:
            dist.all_reduce(gradient)
        return [gradient / n for gradient in gradients]

    plain = zoo.build("lists")
    optimizer, engine = adamw(plain.parameters()), engine_of(strategy, zoo.build("lists"))
    for step, kept in ((0, False), (2, True), (4, False)):
        first, second = (
            torch.autograd.grad(plain(*zoo.tokens(rank, n, step + one)), plain.parameters()) for one in (0, 1)
        )
        if kept:
            found = mean(tuple(a + b for a, b in zip(first, second, strict=True)))
        else:
            found = [a + b for a, b in zip(mean(first), mean(second), strict=True)]
        for parameter, gradient in zip(plain.parameters(), found, strict=True):
            parameter.grad = gradient
        optimizer.step()
        with engine.no_sync() if kept else nullcontext():
            engine.backward(engine(*zoo.tokens(rank, n, step)))
        engine.backward(engine(*zoo.tokens(rank, n, step + 1)))
        engine.step()
    assert_alike(engine, plain, strategy)


def clips(rank: int, n: int, strategy: str) -> None:
    """A second clip clips what the first has left; one without gradients, or with a backward to follow, is no trap."""

    def trained(*norms: float) -> tuple[list[float], dict[str, torch.Tensor]]:
        engine = engine_of(strategy, zoo.build("tied"))
        assert engine.clip_grad_norm_(1.0) == 0
        engine.backward(engine(*zoo.tokens(rank, n, 0)))
        found = [engine.clip_grad_norm_(norm).item() for norm in norms]
        with pytest.raises(RuntimeError, match="clip_grad_norm_ has clipped the present gradients"):
            engine.backward(engine(*zoo.tokens(rank, n, 1)))
        engine.step()
        engine.backward(engine(*zoo.tokens(rank, n, 2)))
        engine.step()
        return found, engine.full_state_dict()

    (_, once), (norms, twice) = trained(0.1), trained(0.1, 10.0)
    assert norms[0] > 0.1
    assert norms[1] == pytest.approx(0.1, rel=1e-4)
    assert_equal(twice, once)


def norms_that_are_not_finite(rank: int, n: int, strategy: str) -> None:
    """One rank's shard has gradients that are infinite, or NaN: norms and refusals are those of torch."""
    engine = engine_of(strategy, zoo.build("tied"))
    name = "blocks.1.up.weight"
    for strange in ((math.inf,), (math.nan,), (math.nan, math.inf)):
        engine.backward(engine(*zoo.tokens(rank, n, 0)))
        edited = engine.full_gradient(name)
        edited.view(-1)[: len(strange)] = torch.tensor(strange)
        engine.set_full_gradient(name, edited)
        for norm_type in (2.0, math.inf):
            wanted = nn.utils.get_total_norm([edited], norm_type)
            with pytest.raises(RuntimeError, match=rf"the gradients is {wanted.item()}, and error_if_nonfinite=True"):
                engine.clip_grad_norm_(1.0, norm_type, error_if_nonfinite=True)
            torch.testing.assert_close(engine.full_gradient(name), edited, rtol=0, atol=0, equal_nan=True)
            norm = engine.gradient_norms(norm_type)[name].float()
            torch.testing.assert_close(norm, wanted, equal_nan=True)
        torch.testing.assert_close(engine.clip_grad_norm_(1.0, math.inf), wanted, equal_nan=True)
        engine.zero_grad()


LOOPS = (overflow, sums_in_fp32, clips, norms_that_are_not_finite)


@on_ranks(2, 1, 3)
def test_training_loops(rank: int, n: int, thorough: bool) -> None:
    """Under the stages that keep most and least whole by turns, and two losses under each, or all if asked for."""
    for number, loop in enumerate(LOOPS):
        for strategy in STAGES if thorough else ("megatron", "zero3")[number % 2 :][:1]:
            loop(rank, n, strategy)
    for strategy in STAGES if n == 2 else ():  # a sum of two losses has one order on two ranks
        two_losses(rank, n, strategy)
