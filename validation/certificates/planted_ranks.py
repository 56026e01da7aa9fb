"""Planted failures between two ranks. A reference is the honest loop of one process that was meant."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel as DDP

import zerobench

from .honest import of_low, rates, with_buffer, without_biases
from .honest_ranks import average_gradients, ddp, fsdp2, shard
from .loops import Job, Plant, adamw, at_once, error, nothing, of, plant, row_of, sgd, train, usual
from .planted import (
    AFTER,
    FINITE,
    FIRST,
    HEAD,
    MASTERS,
    MICRO,
    RATE,
)

PLANTED: dict[str, Plant] = {}
"""Name -> loop."""

between = partial(plant, ranks=2)
planted = partial(row_of, PLANTED, between)

DIVERGE = r"(values|parameters|checksum|bits).*(differ|not equal|other)|: 0 times|(not|never) reduced|not synchron"
WRAPPER = DIVERGE + r"|wrapper|was not called|bypass"
COPIES = r"partition: (values|bits|checksum)"
FACTOR = r"reference: (norms|parameters)|sum over 2 ranks|second division"
REDUCED = r"reduced over the ranks"
SAME_DATA = r"same data|(equal|same).*loss|loss.*(equal|same)|reference: losses"

# -- ranks that diverge ----------------------------------------------------------------------------------------------


def never(model: Any, _: bool) -> AbstractContextManager[Any]:
    """Reduces no micro-batch."""
    context: AbstractContextManager[Any] = model.no_sync()
    return context


def first_alone(model: Any, is_last: bool) -> AbstractContextManager[Any]:
    """Reduces the first micro-batch in place of the last."""
    return never(model, is_last) if is_last else at_once()


def head_added(model: Any) -> Any:
    """Wraps a model before its head is added."""
    head = model.pop(3)
    called = DDP(model)
    model.append(head)
    return called


def ignored_by_mistake(model: Any) -> None:
    """Matches one name too many."""
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])


def zeroed_on_one(model: Any, _optimizer: Any, step: int, at: int | None = None) -> None:
    """Zeroes gradients of rank 1; with `at` in one step alone, as a guard on the loss of a rank does."""
    if dist.get_rank() and at in (None, step):
        model.zero_grad(set_to_none=at is not None)


def clip_on_one(model: Any, *_: Any) -> None:
    """Clips on rank 0 alone."""
    if dist.get_rank() == 0:
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def average_all_but_the_head(model: Any, *_: Any) -> None:
    """Forgets a layer."""
    average_gradients(model[:3])


def own_values(job: Job) -> Any:
    """Returns a network with other values on each rank."""
    return Job(job.seed + 1 + job.rank).net()


def own_buffer(job: Job) -> Any:
    """Returns a network with a buffer that each rank has drawn."""
    return with_buffer(job, job.rank)


def own_rate(model: Any) -> Any:
    """Returns an optimizer with another learning rate on each rank."""
    return of(optim.AdamW, lr=1e-2 * (1 + dist.get_rank()))(model)


@planted(WRAPPER, COPIES)
def wrapper_that_is_not_called(job: Job) -> None:
    """The loop calls ddp.module."""
    model = DDP(job.net())
    train(job, model, adamw(model), loss=lambda model, x: error(model.module, x))


@planted(WRAPPER, COPIES)
def wrapped_model_that_is_called_itself(job: Job) -> None:
    """The loop calls and watches the model that DDP has wrapped."""
    called = DDP(model := job.net())
    train(job, model, adamw(called))


@planted(f"{DIVERGE}|{RATE}", COPIES)
def schedule_of_one_rank(job: Job) -> None:
    """Rank 0 alone steps the schedule."""
    optimizer = adamw(model := DDP(job.net()))
    schedule = rates(lambda step: 0.5**step)(optimizer)
    train(job, model, optimizer, after=nothing if job.rank else lambda *_: schedule.step())


PLANTED |= {
    "ddp that never synchronizes": between(
        ddp(of(optim.AdamW, lr=3e-4), without_biases, delay=never), DIVERGE, COPIES, "without biases"
    ),
    "ddp that reduces the first micro-batch": between(ddp(micro=2, delay=first_alone), DIVERGE, COPIES),
    "head added after wrapping": between(
        usual(wrap=head_added), f"{DIVERGE}|{HEAD}", COPIES + r" of (all|.*3\.)"
    ),
    "parameter that ddp ignores by mistake": between(
        ddp(change=ignored_by_mistake), f"{DIVERGE}|{FIRST}", COPIES + r" of (all|.*0\.weight)"
    ),
    "gradients of one rank zeroed": between(ddp(before=zeroed_on_one), DIVERGE, COPIES),
    "update of one rank skipped": between(ddp(before=partial(zeroed_on_one, at=2)), DIVERGE, COPIES),
    "learning rate of one rank": between(ddp(own_rate), f"{DIVERGE}|{RATE}", COPIES),
    "clipping on one rank": between(ddp(before=clip_on_one), f"{DIVERGE}|norm: ", COPIES, "clipped"),
    "reduction by hand that is missing": between(usual(), f"{DIVERGE}|and the reduction", COPIES),
    "reduction by hand of all but the head": between(
        usual(before=average_all_but_the_head), f"{DIVERGE}|{HEAD}", COPIES + r" of (all|.*3\.)"
    ),
    "seeds of ranks that differ": between(
        usual(make=own_values, before=average_gradients), f"{DIVERGE}|initial", COPIES
    ),
    "buffer of each rank": between(
        usual(make=own_buffer, before=average_gradients), r"buffer", r"buffer", "with a buffer"
    ),
}  # fmt: skip

# -- reductions and clipping -----------------------------------------------------------------------------------------


def sum_hook(model: Any) -> None:
    """Sums and does not divide."""
    reduced = partial(dist.all_reduce, async_op=True)
    model.register_comm_hook(
        None, lambda _, bucket: reduced(bucket.buffer()).get_future().then(lambda done: done.value()[0])
    )


def multiplied(model: Any, *_: Any, factor: float) -> None:
    """Multiplies gradients after DDP's mean."""
    for parameter in model.parameters():
        parameter.grad.mul_(factor)


def by_local_norm(model: Any, *_: Any) -> None:
    """Clips by the norm of the rank's own shards."""
    own = [p.grad.to_local() for p in model.parameters()]
    torch._foreach_mul_(own, float(0.05 / torch.cat([one.flatten() for one in own]).norm().clamp_min(0.05)))


PLANTED |= {
    "sum over the ranks": between(ddp(sgd, prepare=sum_hook), FACTOR, r"reference: (norms|parameters after)", "sgd"),
    "gradients averaged twice": between(
        ddp(sgd, before=partial(multiplied, factor=0.5)), FACTOR, r"reference: parameters after", "sgd"
    ),
    "gradients reduced twice": between(
        ddp(sgd, before=average_gradients), REDUCED, REDUCED, "sgd", reductions=1
    ),
    "accumulation without no_sync": between(
        ddp(micro=2, delay=at_once), REDUCED, REDUCED, reductions=1
    ),
    "fsdp2 that reduces each micro-batch": between(
        fsdp2(micro=2, delay=at_once), REDUCED, REDUCED, reductions=1
    ),
    "clipping of local norms": between(fsdp2(before=by_local_norm), r"norm: ", AFTER, "clipped", clip=0.05),
}  # fmt: skip

# -- data, dtypes, parts ---------------------------------------------------------------------------------------------


def data_of_rank_0(job: Job, step: int, micro: int) -> list[torch.Tensor]:
    """Returns the same rows on all ranks: there is no DistributedSampler."""
    return Job(job.seed, 0, job.ranks).batch(step, micro)


def zero2(job: Job, batch: Callable[..., Any]) -> None:
    """Trains under our engine."""
    model = job.net()
    engine = zerobench.initialize(model, adamw(model), strategy="zero2")
    train(job, engine, engine, batch=batch)


def infinite_on_one(model: Any, x: torch.Tensor) -> Any:
    """Returns the loss of a batch that has infinite values on rank 1."""
    return error(model, x / (1.0 - dist.get_rank()))


def less_on_one(job: Job, step: int, _: int) -> list[torch.Tensor]:
    """Returns both micro-batches on rank 0, and the first on rank 1."""
    return job.batch(step, 2)[: 2 - job.rank]


@planted(rf"{MICRO}|reference: losses", MICRO, accumulation=2)
def one_rank_drops_a_micro_batch(job: Job) -> None:
    model = DDP(job.net())
    train(job, model, adamw(model), micro=2 - job.rank, batch=less_on_one)


IN_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
PLANTED |= {
    "all ranks have the same data": between(ddp(batch=data_of_rank_0), SAME_DATA, r"reference: losses|data"),
    "all ranks of fsdp2 have the same data": between(
        fsdp2(batch=data_of_rank_0), SAME_DATA, r"reference: losses|data"
    ),
    "all ranks of zero2 have the same data": between(
        partial(zero2, batch=data_of_rank_0), SAME_DATA, r"reference: losses|data"
    ),
    "fsdp2 with masters in bf16": between(
        fsdp2(of(optim.AdamW, lr=1e-3), change=nn.Module.bfloat16, loss=of_low), MASTERS, r"dtypes: masters"),
    "fsdp2 that ignores a dtype of the wire": between(
        fsdp2(), r"dtypes: all_gather", r"dtypes: all_gather", wire={"all_gather": "bfloat16"}
    ),
    "fsdp2 that reduces in bf16": between(
        usual(wrap=partial(shard, policy=IN_BF16)), r"dtypes: reduce_scatter", r"dtypes: reduce_scatter",
        wire={"reduce_scatter": "float32"},
    ),
    "states that are not partitioned": between(ddp(), r"partition: copies", r"partition: copies", copies=1),
    "batch of one rank that is not finite": between(ddp(loss=infinite_on_one), FINITE, FINITE),
}  # fmt: skip
