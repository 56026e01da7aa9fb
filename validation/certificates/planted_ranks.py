"""Planted failures between two ranks. A reference is the honest loop of one process that was meant."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import LambdaLR

import zerobench

from .honest_ranks import averaged
from .loops import OUT, WIDTH, Job, Plant, adamw, error, train

PLANTED: dict[str, Plant] = {}
"""Name -> loop."""

DIVERGE = r"(partition: .*(values|parameters).*(differ|not equal|other)|reduced over the ranks: 0|0 times|(not|never) reduced)"
VALUES = r"partition: values"
REFERENCE = r"reference: (norms|parameters|losses)"


def planted(
    causes: str, about: str = r"(?!)", reference: str = "plain", **expected: Any
) -> Callable[[Callable[[Job], Any]], Callable[[Job], Any]]:
    """Puts a function into the table under its name."""

    def put(function: Callable[[Job], Any]) -> Callable[[Job], Any]:
        PLANTED[function.__name__.replace("_", " ")] = Plant(function, 2, reference, expected, causes, about)
        return function

    return put


# -- gradients that are not reduced ------------------------------------------------------------------------------


@planted(DIVERGE, VALUES)
def ddp_that_never_synchronizes(job: Job) -> None:
    """Each micro-batch is under no_sync."""
    model = DDP(job.net())
    train(job, model, adamw(model, 3e-4), delay=lambda model, _: model.no_sync())


@planted(DIVERGE, VALUES)
def ddp_that_synchronizes_the_first_micro_batch(job: Job) -> None:
    """no_sync covers the last micro-batch in place of the others."""
    model = DDP(job.net())
    train(job, model, adamw(model), micro=2, delay=lambda model, is_last: model.no_sync() if is_last else nullcontext())


@planted(DIVERGE + r"|extra|head|Linear.*3", VALUES + r" of (all|.*3\.)")
def head_added_after_wrapping(job: Job) -> None:
    """DDP does not know the head."""
    whole = job.net()
    model = DDP(whole[:3])
    model.module.append(whole[3])
    train(job, model, adamw(model))


@planted(DIVERGE + r"|wrapper|not called|bypass", VALUES)
def wrapper_that_is_not_called(job: Job) -> None:
    """The loop calls ddp.module."""
    model = DDP(job.net())
    train(job, model, adamw(model), loss=lambda model, x: error(model.module, x))


@planted(DIVERGE + r"|wrapper|not called|bypass", VALUES)
def wrapper_that_is_not_called_whose_module_is_watched(job: Job) -> None:
    """The loop calls the model that DDP has wrapped, and watches it."""
    model = job.net()
    called = DDP(model)
    train(job, model, adamw(called))


@planted(DIVERGE, VALUES)
def gradients_of_one_rank_zeroed(job: Job) -> None:
    """Rank 1 zeroes its gradients after they were reduced."""
    model = DDP(job.net())
    train(job, model, adamw(model), before=lambda _: [p.grad.zero_() for p in model.parameters() if job.rank])


@planted(DIVERGE + r"|values.*differ", r"partition: values")
def reduction_by_hand_that_is_missing(job: Job) -> None:
    """A plain loop on two ranks forgets to reduce."""
    model = job.net()
    train(job, model, adamw(model))


@planted(DIVERGE + r"|values.*differ", r"partition: values of (all|.*3\.)")
def reduction_by_hand_of_some(job: Job) -> None:
    """The head's gradients are not reduced."""
    model = job.net()
    train(job, model, adamw(model), before=lambda _: averaged(model[:3].parameters()))


@planted(DIVERGE, VALUES + r" of (all|.*0\.)")
def parameter_that_ddp_ignores_by_mistake(job: Job) -> None:
    """A pattern of ignored names matches too much."""
    model = job.net()
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
    called = DDP(model)
    torch.manual_seed(job.rank)
    train(job, called, adamw(called))


@planted(DIVERGE, VALUES)
def noise_that_differs_between_ranks(job: Job) -> None:
    """Each rank adds its own noise to reduced gradients."""
    model = DDP(job.net())
    torch.manual_seed(job.rank)
    train(
        job, model, adamw(model), before=lambda _: [p.grad.add_(1e-3 * torch.randn_like(p)) for p in model.parameters()]
    )


@planted(DIVERGE, VALUES)
def seeds_of_ranks_differ_without_ddp(job: Job) -> None:
    """Gradients are averaged by hand, and each rank has drawn its own initial values."""
    model = Job(job.seed + job.rank).net()
    train(job, model, adamw(model), before=lambda _: averaged(model.parameters()))


@planted(DIVERGE + r"|learning rate|\blr\b", VALUES)
def learning_rate_of_one_rank(job: Job) -> None:
    """Rank 1 has another learning rate."""
    model = DDP(job.net())
    train(job, model, adamw(model, 1e-2 * (1 + job.rank)))


@planted(DIVERGE + r"|learning rate|\blr\b", VALUES)
def schedule_of_one_rank(job: Job) -> None:
    """Rank 0 alone steps the schedule."""
    model = DDP(job.net())
    optimizer = adamw(model)
    schedule = LambdaLR(optimizer, lambda step: 0.5**step)
    train(job, model, optimizer, after=lambda _: schedule.step() if job.rank == 0 else None)


@planted(DIVERGE + r"|norm: ", VALUES, reference="clipped")
def clipping_on_one_rank(job: Job) -> None:
    """Rank 0 alone clips."""
    model = DDP(job.net())
    train(job, model, adamw(model), clip=0.05 if job.rank == 0 else None)


@planted(DIVERGE, VALUES)
def update_skipped_on_one_rank(job: Job) -> None:
    """A guard on the rank's own loss skips the update there."""
    model = DDP(job.net())

    def guard(step: int) -> None:
        if job.rank and step == 2:
            model.zero_grad()

    train(job, model, adamw(model), before=guard)


@planted(r"buffer", r"partition: .*buffer", reference="batch normalization of a layer")
def buffers_that_differ(job: Job) -> None:
    """Statistics of BatchNorm are each rank's own, and the wrapper was told not to send them."""
    torch.manual_seed(job.seed)
    inner = nn.Sequential(nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, OUT))
    model = DDP(inner, broadcast_buffers=False)
    train(job, model, adamw(model))


# -- gradients that are reduced wrongly --------------------------------------------------------------------------


def scaled_gradients(
    job: Job, factor: float, optimizer: Callable[[Any], Any] = lambda m: optim.SGD(m.parameters(), lr=0.1)
) -> None:
    """Multiplies gradients after DDP's mean."""
    model = DDP(job.net())
    train(job, model, optimizer(model), before=lambda _: [p.grad.mul_(factor) for p in model.parameters()])


FACTOR = r"reference: (norms|parameters).*|sum over 2 ranks|second division"


@planted(FACTOR, r"reference: (norms|parameters)", reference="sgd")
def sum_over_ranks(job: Job) -> None:
    """A hook of DDP sums and does not divide."""
    model = DDP(job.net())

    def hook(_: object, bucket: Any) -> Any:
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0])

    model.register_comm_hook(None, hook)
    train(job, model, optim.SGD(model.parameters(), lr=0.1))


PLANTED |= {
    "gradients averaged twice": Plant(
        partial(scaled_gradients, factor=0.5), 2, "sgd", {}, FACTOR, r"reference: parameters"
    ),
    "gradients multiplied by the ranks": Plant(
        partial(scaled_gradients, factor=2.0), 2, "sgd", {}, FACTOR, r"reference: parameters"
    ),
}


@planted(
    r"reduced over the ranks: (1\.\d+|2|3)|twice|reference",
    r"accumulation: each gradient",
    reference="sgd",
    reductions=1,
)
def gradients_reduced_twice(job: Job) -> None:
    """The loop averages gradients that DDP has averaged."""
    model = DDP(job.net())
    train(job, model, optim.SGD(model.parameters(), lr=0.1), before=lambda _: averaged(model.parameters()))


@planted(r"reduced over the ranks", r"accumulation: each gradient", reductions=1)
def accumulation_without_no_sync(job: Job) -> None:
    """Each micro-batch is reduced."""
    model = DDP(job.net())
    train(job, model, adamw(model), micro=2, delay=lambda *_: nullcontext())


@planted(r"reduced over the ranks", r"accumulation: each gradient", reductions=1)
def fsdp2_that_reduces_each_micro_batch(job: Job) -> None:
    """set_requires_gradient_sync is not called."""
    model: Any = job.net()
    fully_shard(model, mesh=init_device_mesh("cpu", (job.ranks,)))
    train(job, model, adamw(model), micro=2, delay=lambda *_: nullcontext())


@planted(r"norm: ", r"norm: after", reference="clipped", clip=0.05)
def clipping_of_local_norms(job: Job) -> None:
    """Each rank clips by the norm of its own shards."""
    model: Any = job.net()
    fully_shard(model, mesh=init_device_mesh("cpu", (job.ranks,)))

    def clip(_: int) -> None:
        own = [p.grad.to_local() for p in model.parameters()]
        norm = torch.cat([one.flatten() for one in own]).norm()
        torch._foreach_mul_(own, float(0.05 / norm.clamp_min(0.05)))

    train(job, model, adamw(model), before=clip)


@planted(r"norm: |" + DIVERGE, r"norm: after", reference="clipped", clip=0.05)
def clipping_before_the_reduction(job: Job) -> None:
    """Gradients are clipped on each rank, and then averaged."""
    model = job.net()

    def clip(_: int) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        averaged(model.parameters())
        for parameter in model.parameters():
            parameter.grad *= 0.5

    train(job, model, adamw(model), before=clip)


# -- data ------------------------------------------------------------------------------------------------------------

SAME_DATA = r"same data|equal.*loss|loss.*equal|loss.*(each|every|all) rank|reference: losses"


@planted(SAME_DATA, r"reference: losses|data")
def all_ranks_get_the_same_data(job: Job) -> None:
    """There is no DistributedSampler."""
    model = DDP(job.net())
    train_on(job, Job(job.seed, 0, job.ranks), model)


def train_on(job: Job, data: Job, model: Any) -> None:
    """Trains on the batches of another job."""
    optimizer = adamw(model)
    with job.watch(model, optimizer):
        for step in range(6):
            error(model, *data.batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()


@planted(SAME_DATA, r"reference: losses|data")
def all_ranks_of_fsdp2_get_the_same_data(job: Job) -> None:
    """There is no DistributedSampler."""
    model: Any = job.net()
    fully_shard(model, mesh=init_device_mesh("cpu", (job.ranks,)))
    train_on(job, Job(job.seed, 0, job.ranks), model)


@planted(SAME_DATA, r"reference: losses|data")
def all_ranks_of_zero2_get_the_same_data(job: Job) -> None:
    """There is no DistributedSampler."""
    model: Any = job.net()
    engine: Any = zerobench.initialize(model, adamw(model), strategy="zero2")
    first = Job(job.seed, 0, job.ranks)
    with job.watch(engine, engine):
        for step in range(6):
            engine.backward(error(engine, *first.batch(step)))
            engine.step()
            engine.zero_grad()


@planted(r"reference: losses", r"reference: losses")
def data_of_one_rank_is_repeated(job: Job) -> None:
    """The sampler is never told of the next epoch: each step has the first one's batch."""
    model = DDP(job.net())
    optimizer = adamw(model)
    with job.watch(model, optimizer):
        for _ in range(6):
            error(model, *job.batch(0)).backward()
            optimizer.step()
            optimizer.zero_grad()


# -- numbers and parts -------------------------------------------------------------------------------------------------


def sharded(
    job: Job, dtype: torch.dtype = torch.float32, policy: MixedPrecisionPolicy | None = None, **how: Any
) -> None:
    """Trains under FSDP2."""
    model: Any = job.net().to(dtype)
    fully_shard(model, mesh=init_device_mesh("cpu", (job.ranks,)), mp_policy=policy or MixedPrecisionPolicy())
    train(job, model, adamw(model, 1e-3), loss=lambda model, x: error(model, x.to(dtype)), **how)


WIRE = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
PLANTED |= {
    "fsdp2 with masters in bf16": Plant(
        partial(sharded, dtype=torch.bfloat16),
        2,
        "plain",
        {},
        r"dtypes: (masters|moments).*bfloat16",
        r"dtypes: masters",
    ),
    "fsdp2 that ignores a dtype of the wire": Plant(
        sharded, 2, "plain", {"wire": {"all_gather": "bfloat16"}}, r"dtypes: all_gather", r"dtypes: all_gather"
    ),
    "fsdp2 that reduces in bf16": Plant(
        partial(sharded, policy=WIRE),
        2,
        "plain",
        {"wire": {"reduce_scatter": "float32"}},
        r"dtypes: reduce_scatter",
        r"dtypes: reduce_scatter",
    ),
}


@planted(r"copies|partition: ", r"partition: copies", copies=1)
def states_that_are_not_partitioned(job: Job) -> None:
    """The option of a ZeRO stage is read by nothing: DDP keeps all states on each rank."""
    model = DDP(job.net())
    train(job, model, adamw(model))


@planted(r"finite|\bnan\b|\binf\b", r"finite")
def gradients_of_one_rank_are_not_finite(job: Job) -> None:
    """Rank 1's batch has a value that is infinite, which the reduction sends to all."""
    model = DDP(job.net())
    train(job, model, adamw(model), loss=lambda model, x: error(model, x / (0.0 if job.rank else 1.0)))


@planted(r"(0\.weight|0\.bias).*(no gradient|never changed)|no gradient", r"update: updates of (all|.*0\.)")
def activation_detached_under_ddp(job: Job) -> None:
    """The graph is cut, and unused parameters are looked for, so that nothing raises."""
    inner = job.net()
    inner[1].register_forward_hook(lambda _module, _inputs, output: output.detach())
    model = DDP(inner, find_unused_parameters=True)
    train(job, model, adamw(model))


@planted(r"in no optimizer", r"update: updates of (all|.*3\.)")
def head_in_no_optimizer_under_ddp(job: Job) -> None:
    """The optimizer gets the backbone alone."""
    model = DDP(job.net())
    train(job, model, adamw(model.module[:3]))


@planted(r"accumulation: micro-batches", r"accumulation: micro-batches", accumulation=2)
def one_rank_accumulates_less(job: Job) -> None:
    """Rank 1 has one micro-batch, whose loss is not divided, and rank 0 two."""
    model = DDP(job.net())
    optimizer = adamw(model)
    with job.watch(model, optimizer):
        for step in range(6):
            pieces = job.batch(step, 2 - job.rank)
            for number, x in enumerate(pieces, 1):
                with nullcontext() if number == len(pieces) else model.no_sync():
                    (error(model, x) / len(pieces)).backward()
            optimizer.step()
            optimizer.zero_grad()
