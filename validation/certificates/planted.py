"""Loops with one planted failure each, of one process and then of two ranks: mistakes that raise no error.

A reference is the honest loop of one process that was meant.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_

import zerobench

from .honest import (
    MOMENTUM,
    Lora,
    average_gradients,
    convolution,
    ddp,
    fsdp2,
    language,
    language_model,
    of_low,
    rates,
    shard,
    trainable,
    wide,
    with_buffer,
    without_biases,
)
from .loops import STEPS, Job, Plant, adamw, at_once, error, nothing, of, plant, row_of, sgd, train, usual

PLANTED: dict[str, Plant] = {}
"""Name -> loop."""

planted = partial(row_of, PLANTED, plant)

# Patterns of the rows that name a failure, then of the checks and subjects that must not be `same`.
VALUES = r"reference: (losses|parameters|norms)"
NO_GRADIENT = r"no gradient|gets? (none|no)|never changed|not reach|zeroed|replaced|another tensor|→ 0\b"
FINITE = r"finite|\bnan\b|\binf\b"
NORM = r"norm: .*(→|clip|at the update)"
MICRO = r"accumulation: micro-batches"
RATE = r"learning rate|\blr\b|schedul"
OPTIMIZERS = r"in no optimizer"
NEVER = r"(?!)"
AFTER = r"norm: after"


def updates_of(*names: int | str) -> str:
    """Returns the pattern of the rows on updates of some parameters, alone or among others."""
    return rf"update: updates of (all |.*\b({'|'.join(map(str, names))}))"


def named(names: str, words: str) -> str:
    """Returns the pattern of a row with a parameter and a finding."""
    return rf"({names}|all \d+ parameters).*({words})"


# -- gradients that do not arrive, parameters that are not trained ---------------------------------------------------


def clear(model: Any, optimizer: Any, _step: int, to_none: bool = True) -> None:
    """Zeroes gradients between backward and the update."""
    optimizer.zero_grad(set_to_none=to_none)


def detach(model: Any) -> None:
    """Cuts the graph after the first layer."""
    model[1].register_forward_hook(lambda _module, _inputs, output: output.detach())


def replace_head(job: Job, of_weight: bool = False) -> None:
    """Replaces a layer, or a parameter, after the optimizer was made."""
    optimizer = adamw(model := job.net())
    if of_weight:
        model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    else:
        model[3] = copy.deepcopy(model[3])
    train(job, model, optimizer)


def only_a_bias(model: Any) -> None:
    """Freezes all but a bias of the base."""
    model.requires_grad_(False)
    model.base.bias.requires_grad_(True)


def decay_frozen(model: Any, *_: Any) -> None:
    """Changes frozen parameters by hand."""
    for parameter in model[:3].parameters():
        parameter.mul_(0.9)


HEAD, FIRST = r"3\.(weight|bias)", r"0\.(weight|bias)"
PLANTED |= {
    "gradients set to none before the update": plant(usual(before=clear), NO_GRADIENT, updates_of(0)),
    "head replaced after the optimizer was made": plant(
        replace_head, named(HEAD, f"{OPTIMIZERS}|{NO_GRADIENT}"), updates_of(3)
    ),
    "optimizer of a copy": plant(
        usual(lambda model: adamw(copy.deepcopy(model))), f"{OPTIMIZERS}|{NO_GRADIENT}", updates_of(0)
    ),
    "head in no optimizer": plant(
        usual(lambda model: adamw(model[:3])), named(HEAD, OPTIMIZERS), updates_of(3)
    ),
    "activation detached": plant(usual(change=detach), named(FIRST, NO_GRADIENT), updates_of(0)),
    "adapters frozen by mistake": plant(
        usual(trainable, Lora, change=only_a_bias),
        r"training of a, b", NEVER, "lora",
    ),
    "base that trains": plant(
        usual(adamw, Lora, change=lambda model: model.requires_grad_(True)), r"base.*(train|reference)",
        r"reference: parameters that|updates of .*base", "lora",
    ),
    "weights untied": plant(
        usual(make=partial(language_model, is_tied=False), loss=language),
        r"2\.weight.*(train|reference)|tied", NEVER, "tied",
    ),
    "frozen parameters that change": plant(
        usual(change=lambda model: model[:3].requires_grad_(False), after=decay_frozen),
        r"(frozen|0\.(weight|bias)|requires? no gradient).*(chang|differ)", r"frozen", "frozen backbone",
    ),
    "head frozen by mistake": plant(
        usual(trainable, change=lambda model: model[3].requires_grad_(False)),
        r"3\..*(train|frozen|reference)|train.*3\.", NEVER,
    ),
}  # fmt: skip

# -- accumulation and updates ----------------------------------------------------------------------------------------


@planted(MICRO, MICRO, accumulation=4)
def update_in_each_micro_batch(job: Job) -> None:
    """The update is indented by one level too much."""
    optimizer = adamw(model := job.net())
    with job.watch(model, optimizer):
        for number in range(4 * STEPS):
            (error(model, job.batch(number // 4, 4)[number % 4]) / 4).backward()
            optimizer.step()
            optimizer.zero_grad()


@planted(r"stale|zeroed|accumulat|left|add up|reference: norms", NEVER, "sgd")
def gradients_never_zeroed(job: Job) -> None:
    """All gradients since the beginning add up."""
    optimizer = sgd(model := job.net())
    with job.watch(model, optimizer):
        for step in range(STEPS):
            error(model, *job.batch(step)).backward()
            optimizer.step()


def twice(job: Job, ends: str) -> None:
    """Steps twice with one gradient."""
    optimizer = adamw(model := job.net())
    with job.watch(model, optimizer, ends=ends) as watch:
        for step in range(STEPS):
            error(model, *job.batch(step)).backward()
            optimizer.step()
            model(*job.batch(step))
            optimizer.step()
            optimizer.zero_grad()
            if ends == "step":
                watch.step()


def schedule_at(job: Job, each: bool) -> None:
    """Steps a schedule in each of four micro-batches, or before the optimizer."""
    optimizer = adamw(model := job.net())
    schedule = rates(lambda step: 0.5**step)(optimizer)
    with job.watch(model, optimizer):
        for step in range(STEPS):
            for number, x in enumerate(job.batch(step, 4)):
                (error(model, x) / 4).backward()
                if each or number == 0:
                    schedule.step()
            optimizer.step()
            optimizer.zero_grad()


def drawn_again(model: Any) -> None:
    """Draws other initial values."""
    torch.manual_seed(123)
    model[0].reset_parameters()


def other_order(job: Job, step: int, micro: int) -> list[torch.Tensor]:
    """Returns the batches of other steps."""
    return job.batch(step + 77, micro)


def with_dropout(model: Any) -> None:
    """Leaves out half of the activations."""
    model[1].register_forward_hook(lambda _module, _inputs, output: nn.functional.dropout(output, 0.5))


AGAIN = r"same gradient|micro-batches.*\b0\b"
PLANTED |= {
    "loss not divided": plant(
        usual(sgd, micro=4, loss=lambda model, x: 4 * error(model, x)), VALUES,
        r"reference: (losses|norms)", "sgd",
    ),
    "two updates of one gradient": plant(partial(twice, ends="step"), AGAIN, updates_of(0)),
    "learning rate of zero": plant(
        usual(of(optim.AdamW, lr=0.0)), f"{RATE}|no change|never changed", updates_of(0)
    ),
    "learning rate ten times too high": plant(usual(of(optim.AdamW, lr=0.1)), f"{RATE}|{VALUES}", RATE),
    "schedule stepped in each micro-batch": plant(
        partial(schedule_at, each=True), RATE, RATE, "learning rate that halves"
    ),
    "another optimizer": plant(
        usual(of(optim.SGD, lr=1e-2)), r"class of the optimizer", r"update: class", optimizer="AdamW"
    ),
    "adamw in place of muon": plant(
        usual(adamw, wide), r"class of the optimizer", r"update: class", "muon", optimizer="Muon"
    ),
    "decay of everything": plant(
        usual(of(optim.AdamW, lr=1e-2, weight_decay=0.1)), rf"{VALUES}|{RATE}|decay", r"decay", "groups"
    ),
    "gradient of one layer negated": plant(
        usual(change=lambda model: model[3].weight.register_hook(torch.neg) and None), VALUES, NEVER
    ),
    "another initialization": plant(usual(change=drawn_again), r"initial values", r"reference: initial"),
    "other data": plant(usual(batch=other_order), r"reference: losses", r"reference: losses"),
    "dropout that should be off": plant(usual(change=with_dropout), VALUES, r"reference: losses"),
    "evaluation mode in training": plant(
        usual(MOMENTUM, convolution, change=nn.Module.eval), rf"{VALUES}|buffer|eval", NEVER, "convolution"
    ),
}  # fmt: skip

# -- clipping --------------------------------------------------------------------------------------------------------


def clip_each(model: Any, *_: Any) -> None:
    """Clips each parameter's gradient by its own norm."""
    for parameter in model.parameters():
        clip_grad_norm_([parameter], 0.05)


@planted(NORM + r"|between the micro-batches", AFTER, "clipped", clip=0.05)
def clipping_in_each_micro_batch(job: Job) -> None:
    """The running sum is clipped after each backward."""
    optimizer = adamw(model := job.net())
    with job.watch(model, optimizer):
        for step in range(STEPS):
            for x in job.batch(step, 4):
                (error(model, x) / 4).backward()
                clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()


PLANTED |= {
    "clipping left out": plant(usual(), NORM, AFTER, "clipped", clip=0.05),
    "clipping of each parameter": plant(usual(before=clip_each), NORM, AFTER, "clipped", clip=0.05),
}  # fmt: skip

# -- numbers ---------------------------------------------------------------------------------------------------------


def one_is_nan(model: Any) -> None:
    """Makes one element of a gradient NaN."""
    model[0].bias.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor(3), math.nan))


def low_from(model: Any, first: int = 0) -> None:
    """Makes the parameters from a layer on bf16, and keeps none of them wider."""
    model[first:].bfloat16()
    model[first].register_forward_pre_hook(lambda _module, inputs: inputs[0].bfloat16())


def low_moments(model: Any) -> Any:
    """Returns an optimizer whose states are cast after each update."""
    optimizer = of(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=False)(model)

    def cast(*_: Any) -> None:
        for state in optimizer.state.values():
            state["momentum_buffer"] = state["momentum_buffer"].bfloat16()

    optimizer.register_step_post_hook(cast)
    return optimizer


def autocast_disabled(model: Any, x: torch.Tensor) -> Any:
    """Returns the loss under a disabled autocast."""
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        return error(model, x)


def stubborn(job: Job) -> None:
    """Skips all updates: gradients are infinite, and the scaler's factor does not shrink."""
    optimizer, scaler = adamw(model := job.net()), torch.amp.GradScaler("cpu", init_scale=256.0, backoff_factor=0.9999)
    train(job, model, optimizer, scaler=scaler, loss=lambda model, x: error(model, x) * 1e38)


@planted(r"no change of the model", updates_of(0))
def masters_that_are_not_copied_back(job: Job) -> None:
    """fp32 copies are updated, and the model keeps its initial values."""
    model = job.net()
    copies = [p.detach().clone().requires_grad_() for p in model.parameters()]

    def hand_over(*_: Any) -> None:
        for master, parameter in zip(copies, model.parameters(), strict=True):
            master.grad, parameter.grad = parameter.grad, None

    train(job, model, optim.AdamW(copies, lr=1e-2), before=hand_over)


@planted(r"this option changed nothing", r"knob")
def option_without_effect(job: Job) -> None:
    """An option is read by nothing: the loop is compared with one without it."""
    usual()(first := Job(job.seed))
    job.expected = {"unlike": first.certificate}
    usual()(job)


MASTERS, MODULES = r"dtypes: (masters|moments|values).*bfloat16", r"dtypes: modules"
PLANTED |= {
    "loss that is not a number": plant(
        usual(loss=lambda model, x: (model(x) - 5).sqrt().mean()), FINITE, f"{updates_of(0)}|{FINITE}"
    ),
    "one weight that is not a number": plant(usual(change=one_is_nan), FINITE, FINITE),
    "updates that are skipped forever": plant(stubborn, f"scaling|skipped|{FINITE}", r"scaling"),
    "masters in bf16": plant(
        usual(of(optim.AdamW, lr=1e-3), change=low_from), MASTERS, r"dtypes: masters"
    ),
    "some masters in bf16": plant(
        usual(change=partial(low_from, first=3)), MASTERS, r"dtypes: masters of (all|.*3\.)"
    ),
    "moments in bf16": plant(
        usual(low_moments), r"moments.*bfloat16", r"dtypes: moments", "sgd with momentum"
    ),
    "everything in bf16": plant(
        usual(change=nn.Module.bfloat16, loss=of_low), MASTERS, r"dtypes: masters"
    ),
    "autocast that does nothing": plant(
        usual(loss=autocast_disabled), MODULES, MODULES, computes="bfloat16"
    ),
}  # fmt: skip


between = partial(plant, ranks=2)
planted_ranks = partial(row_of, PLANTED, between)

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


@planted_ranks(WRAPPER, COPIES)
def wrapper_that_is_not_called(job: Job) -> None:
    """The loop calls ddp.module."""
    model = DDP(job.net())
    train(job, model, adamw(model), loss=lambda model, x: error(model.module, x))


@planted_ranks(WRAPPER, COPIES)
def wrapped_model_that_is_called_itself(job: Job) -> None:
    """The loop calls and watches the model that DDP has wrapped."""
    called = DDP(model := job.net())
    train(job, model, adamw(called))


@planted_ranks(f"{DIVERGE}|{RATE}", COPIES)
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


@planted_ranks(rf"{MICRO}|reference: losses", MICRO, accumulation=2)
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
