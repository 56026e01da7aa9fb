"""Ranks that train wrongly, which bytes and volumes do not show; and what each strategy's gradients add to a norm."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import torch

from tests.cells import cell
from zerobench import data, strategies, worker
from zerobench.config import combinations as systems
from zerobench.predict import build
from zerobench.probes import step_values
from zerobench.probes.step_values import scale_of
from zerobench.zero.gradients.bucket_base import GradientBucket

fill = GradientBucket.fill


def zeroed_on_rank_1(job: worker.RankJob, tell: Any) -> worker.RankRecord:
    """run_rank whose rank 1 contributes nothing to any gradient."""
    return _planted(job, tell, lambda gradient: torch.zeros_like(gradient) if job.rank == 1 else gradient)


def doubled(job: worker.RankJob, tell: Any) -> worker.RankRecord:
    """run_rank that sums gradients over two ranks where the mean belongs; Adam does not see the factor."""
    return _planted(job, tell, lambda gradient: gradient * 2)


def doubled_of_one(job: worker.RankJob, tell: Any) -> worker.RankRecord:
    """run_rank that doubles the gradients of parameters as large as the first that comes."""
    first: list[int] = []

    def change(gradient: torch.Tensor) -> torch.Tensor:
        first.append(gradient.numel())
        return gradient * 2 if gradient.numel() == first[0] else gradient

    return _planted(job, tell, change)


def _planted(job: worker.RankJob, tell: Any, change: Any) -> worker.RankRecord:
    def changed(bucket: GradientBucket, piece: Any, gradient: torch.Tensor, sends: bool) -> None:
        fill(bucket, piece, change(gradient), sends)

    with mock.patch.object(GradientBucket, "fill", changed):
        return worker.run_rank(job, tell)


def not_a_number(job: worker.RankJob, tell: Any) -> worker.RankRecord:
    """run_rank of which rank 1's loss is lost in the third step."""
    here: list[int] = []
    loss, draw = torch.nn.functional.cross_entropy, data.Batches.batch

    def batch(batches: data.Batches, step: int, micro: int = 0) -> Any:
        here[:] = [step]
        return draw(batches, step, micro)

    def lose(*inputs: Any, **named: Any) -> torch.Tensor:
        return loss(*inputs, **named) * (math.nan if job.rank == 1 and here == [2] else 1)

    patched = mock.patch.object(data.Batches, "batch", batch)
    with patched, mock.patch.object(torch.nn.functional, "cross_entropy", lose):
        return worker.run_rank(job, tell)


STEPS = 3


def norms(rank: int, n: int, cases: list[tuple[str, dict[str, Any]]], folder: str) -> list[list[tuple[float, float]]]:
    """Of each case and step, on this rank: what it adds to the squared norm over how many hold the same, and the norm
    that the engine's own clipping tells afterwards.
    """
    found = []
    for name, more in cases:
        config = cell(name, n, **more).config
        torch.manual_seed(0)
        model = build.build_model(config)
        optimizer = config.optimizer.build(model.parameters())
        options = config.precision.options_of(name) | systems.engine_options(config, folder)
        engine = strategies.wrap(config.strategy.values(), model, optimizer, **options)
        batches = data.build_batches(config.batching, rank, torch.device("cpu"))
        steps = []
        for step in range(STEPS):
            scale = scale_of(engine)
            for micro in range(config.accumulation):
                last = micro == config.accumulation - 1
                with strategies.synchronizing(engine, config.strategy.reduces, last):
                    engine.backward(engine(*batches.batch(step, micro)) / config.accumulation)
            squares = step_values.squares(engine.reduced_gradients(), scale)
            assert squares is not None
            told = engine.clip_grad_norm_(1e9)
            engine.step()
            steps.append((float(squares) / engine.gradient_holders, float(told)))
        found.append(steps)
    return found
