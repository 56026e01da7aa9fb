"""Loops with one planted failure each, of one process and then of two ranks: mistakes that raise no error.

A reference is the honest loop of one process that was meant.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_

from .honest import (
    MOMENTUM,
    Lora,
    average_gradients,
    convolution,
    ddp,
    freeze,
    fsdp2,
    language,
    language_model,
    masters,
    of_low,
    ours,
    rates,
    shard,
    trainable,
    wide,
    with_buffer,
    without_biases,
)
from .loops import STEPS, Job, Plant, adamw, at_once, error, nothing, of, sgd, train, usual

PLANTED: dict[str, Plant] = {}
"""Name -> loop."""

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


@contextmanager
def after_backward(act: Callable[..., Any], *arguments: Any) -> Iterator[None]:
    """Acts after the backward of a micro-batch."""
    yield
    act(*arguments)


def updates_of(*names: int | str) -> str:
    """Returns the pattern of the rows on updates of some parameters, alone or among others."""
    return rf"update: updates of (all |.*\b({'|'.join(map(str, names))}))"


def named(names: str, words: str) -> str:
    """Returns the pattern of a row with a parameter and a finding."""
    return rf"({names}|all \d+ parameters).*({words})"


# -- gradients that do not arrive, parameters that are not trained ---------------------------------------------------


def replace_head(job: Job) -> None:
    optimizer = adamw(model := job.net())
    model[3] = copy.deepcopy(model[3])
    train(job, model, optimizer)


HEAD, FIRST = r"3\.(weight|bias)", r"0\.(weight|bias)"
PLANTED |= {
    "gradients set to none before the update": Plant(
        usual(before=lambda _model, optimizer, _step: optimizer.zero_grad()), NO_GRADIENT, updates_of(0)
    ),
    "head replaced after the optimizer was made": Plant(
        replace_head, named(HEAD, f"{OPTIMIZERS}|{NO_GRADIENT}"), updates_of(3)
    ),
    "optimizer of a copy": Plant(
        usual(lambda model: adamw(copy.deepcopy(model))), f"{OPTIMIZERS}|{NO_GRADIENT}", updates_of(0)
    ),
    "head in no optimizer": Plant(usual(lambda model: adamw(model[:3])), named(HEAD, OPTIMIZERS), updates_of(3)),
    "activation detached": Plant(
        usual(change=lambda model: model[1].register_forward_hook(lambda _module, _inputs, output: output.detach())),
        named(FIRST, NO_GRADIENT), updates_of(0),
    ),
    "adapters frozen by mistake": Plant(
        usual(trainable, Lora, change=lambda m: [p.requires_grad_(p is m.base.bias) for p in m.parameters()]),
        r"training of a, b", NEVER, "lora",
    ),
    "base that trains": Plant(
        usual(adamw, Lora, change=lambda model: model.requires_grad_(True)), r"base.*(train|reference)",
        r"reference: parameters that|updates of .*base", "lora",
    ),
    "weights untied": Plant(
        usual(make=partial(language_model, is_tied=False), loss=language), r"2\.weight.*(train|reference)|tied",
        NEVER, "tied",
    ),
    "frozen parameters that change": Plant(
        usual(change=freeze, after=lambda model, *_: [p.mul_(0.9) for p in model[:3].parameters()]),
        r"(frozen|0\.(weight|bias)|requires? no gradient).*(chang|differ)", r"frozen", "frozen backbone",
    ),
    "head frozen by mistake": Plant(
        usual(trainable, change=lambda model: model[3].requires_grad_(False)),
        r"3\..*(train|frozen|reference)|train.*3\.", NEVER,
    ),
}  # fmt: skip

# -- accumulation and updates ----------------------------------------------------------------------------------------


def never_zeroed(model: Any) -> Any:
    """Returns an optimizer under which all gradients since the beginning add up."""
    optimizer = sgd(model)
    optimizer.zero_grad = nothing
    return optimizer


PLANTED |= {
    "update in each micro batch": Plant(  # indented by one level too much
        usual(
            micro=[1] * 4 * STEPS,
            batch=lambda job, number, _: job.batch(number // 4, 4)[number % 4 : number % 4 + 1],
            loss=lambda model, x: error(model, x) / 4,
        ),
        MICRO, MICRO, accumulation=4,
    ),
    "gradients never zeroed": Plant(
        usual(never_zeroed), r"stale|zeroed|accumulat|left|add up|reference: norms", NEVER, "sgd"
    ),
}  # fmt: skip


def twice(job: Job) -> None:
    optimizer = adamw(model := job.net())
    with job.watch(model, optimizer, ends="step") as watch:
        for step in range(STEPS):
            error(model, *job.batch(step)).backward()
            optimizer.step()
            model(*job.batch(step))
            optimizer.step()
            optimizer.zero_grad()
            watch.step()


def schedule_in_each_micro_batch(job: Job) -> None:
    optimizer = adamw(model := job.net())
    schedule = rates(lambda step: 0.5**step)(optimizer)
    train(job, model, optimizer, micro=4, delay=lambda *_: after_backward(schedule.step))


AGAIN = r"same gradient|micro-batches.*\b0\b"


def drawn_again(model: Any) -> None:
    torch.manual_seed(123)
    model[0].reset_parameters()


PLANTED |= {
    "loss not divided": Plant(
        usual(sgd, micro=4, loss=lambda model, x: 4 * error(model, x)), VALUES, r"reference: (losses|norms)", "sgd"
    ),
    "two updates of one gradient": Plant(twice, AGAIN, updates_of(0)),
    "learning rate of zero": Plant(usual(of(optim.AdamW, lr=0.0)), f"{RATE}|no change|never changed", updates_of(0)),
    "learning rate ten times too high": Plant(usual(of(optim.AdamW, lr=0.1)), f"{RATE}|{VALUES}", RATE),
    "schedule stepped in each micro-batch": Plant(
        schedule_in_each_micro_batch, RATE, RATE, "learning rate that halves"
    ),
    "another optimizer": Plant(
        usual(of(optim.SGD, lr=1e-2)), r"class of the optimizer", r"update: class", optimizer="AdamW"
    ),
    "adamw in place of muon": Plant(
        usual(adamw, wide), r"class of the optimizer", r"update: class", "muon", optimizer="Muon"
    ),
    "decay of everything": Plant(
        usual(of(optim.AdamW, lr=1e-2, weight_decay=0.1)), rf"{VALUES}|{RATE}|decay", r"decay", "groups"
    ),
    "gradient of one layer negated": Plant(
        usual(change=lambda model: model[3].weight.register_hook(torch.neg)), VALUES, NEVER
    ),
    "another initialization": Plant(usual(change=drawn_again), r"initial values", r"reference: initial"),
    "other data": Plant(
        usual(batch=lambda job, step, micro: job.batch(step + 77, micro)), r"reference: losses", r"reference: losses"
    ),
    "dropout that should be off": Plant(
        usual(
            change=lambda model: model[1].register_forward_hook(lambda _module, _inputs, y: nn.functional.dropout(y))
        ),
        VALUES, r"reference: losses",
    ),
    "evaluation mode in training": Plant(
        usual(MOMENTUM, convolution, change=nn.Module.eval), rf"{VALUES}|buffer|eval", NEVER, "convolution"
    ),
}  # fmt: skip

# -- clipping --------------------------------------------------------------------------------------------------------


PLANTED |= {
    "clipping in each micro batch": Plant(
        usual(micro=4, delay=lambda model, _: after_backward(clip_grad_norm_, model.parameters(), 0.05)),
        NORM + r"|between the micro-batches", AFTER, "clipped", clip=0.05,
    ),
    "clipping left out": Plant(usual(), NORM, AFTER, "clipped", clip=0.05),
    "clipping of each parameter": Plant(
        usual(before=lambda model, *_: [clip_grad_norm_([p], 0.05) for p in model.parameters()]), NORM, AFTER,
        "clipped", clip=0.05,
    ),
}  # fmt: skip

# -- numbers ---------------------------------------------------------------------------------------------------------


def low_from(model: Any, first: int = 0) -> None:
    """Makes the parameters from a layer on bf16, and keeps none of them wider."""
    model[first:].bfloat16()
    model[first].register_forward_pre_hook(lambda _module, inputs: inputs[0].bfloat16())


def low_moments(model: Any) -> Any:
    optimizer = of(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=False)(model)

    def cast(*_: Any) -> None:
        for state in optimizer.state.values():
            state["momentum_buffer"] = state["momentum_buffer"].bfloat16()

    optimizer.register_step_post_hook(cast)
    return optimizer


def autocast_disabled(model: Any, x: torch.Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        return error(model, x)


def stubborn(job: Job) -> None:
    """Skips all updates: gradients are infinite, and the scaler's factor does not shrink."""
    optimizer, scaler = adamw(model := job.net()), torch.amp.GradScaler("cpu", init_scale=256.0, backoff_factor=0.9999)
    train(job, model, optimizer, scaler=scaler, loss=lambda model, x: error(model, x) * 1e38)


def option_without_effect(job: Job) -> None:
    """An option is read by nothing: the loop is compared with one without it."""
    usual()(first := Job(job.seed))
    job.expected = {"unlike": first.certificate}
    usual()(job)


MASTERS, MODULES = r"dtypes: (masters|moments|values).*bfloat16", r"dtypes: modules"
PLANTED |= {
    "masters that are not copied back": Plant(
        partial(masters, dtype=torch.float32, are_copied_back=False), r"no change of the model", updates_of(0)
    ),
    "option without effect": Plant(option_without_effect, r"this option changed nothing", r"knob"),
    "loss that is not a number": Plant(
        usual(loss=lambda model, x: (model(x) - 5).sqrt().mean()), FINITE, f"{updates_of(0)}|{FINITE}"
    ),
    "one weight that is not a number": Plant(
        usual(change=lambda model: model[0].bias.register_hook(lambda g: g.index_fill(0, torch.tensor(3), math.nan))),
        FINITE, FINITE,
    ),
    "updates that are skipped forever": Plant(stubborn, f"scaling|skipped|{FINITE}", r"scaling"),
    "masters in bf16": Plant(usual(of(optim.AdamW, lr=1e-3), change=low_from), MASTERS, r"dtypes: masters"),
    "some masters in bf16": Plant(usual(change=partial(low_from, first=3)), MASTERS, r"dtypes: masters of (all|.*3\.)"),
    "moments in bf16": Plant(usual(low_moments), r"moments.*bfloat16", r"dtypes: moments", "sgd with momentum"),
    "everything in bf16": Plant(usual(change=nn.Module.bfloat16, loss=of_low), MASTERS, r"dtypes: masters"),
    "autocast that does nothing": Plant(usual(loss=autocast_disabled), MODULES, MODULES, computes="bfloat16"),
}  # fmt: skip


between = partial(Plant, ranks=2)

DIVERGE = r"(values|parameters|checksum|bits).*(differ|not equal|other)|: 0 times|(not|never) reduced|not synchron"
WRAPPER = DIVERGE + r"|wrapper|was not called|bypass"
COPIES = r"partition: (values|bits|checksum)"
FACTOR = r"reference: (norms|parameters)|sum over 2 ranks|second division"
REDUCED = r"reduced over the ranks"
SAME_DATA = r"same data|(equal|same).*loss|loss.*(equal|same)|reference: losses"

# -- ranks that diverge ----------------------------------------------------------------------------------------------


def head_added(model: Any) -> Any:
    head = model.pop(3)
    called = DDP(model)
    model.append(head)
    return called


def zeroed_on_one(model: Any, _optimizer: Any, step: int, at: int | None = None) -> None:
    """Zeroes gradients of rank 1; with `at` in one step alone, as a guard on the loss of a rank does."""
    if dist.get_rank() and at in (None, step):
        model.zero_grad(set_to_none=at is not None)


def wrapped_model_that_is_called_itself(job: Job) -> None:
    """The loop calls and watches the model that DDP has wrapped."""
    called = DDP(model := job.net())
    train(job, model, adamw(called))


def schedule_of_one_rank(job: Job) -> None:
    """Rank 0 alone steps the schedule."""
    optimizer = adamw(model := DDP(job.net()))
    schedule = rates(lambda step: 0.5**step)(optimizer)
    train(job, model, optimizer, after=nothing if job.rank else lambda *_: schedule.step())


PLANTED |= {
    "wrapper that is not called": between(ddp(loss=lambda model, x: error(model.module, x)), WRAPPER, COPIES),
    "wrapped model that is called itself": between(wrapped_model_that_is_called_itself, WRAPPER, COPIES),
    "schedule of one rank": between(schedule_of_one_rank, f"{DIVERGE}|{RATE}", COPIES),
    "ddp that never synchronizes": between(
        ddp(of(optim.AdamW, lr=3e-4), without_biases, delay=lambda model, _: model.no_sync()), DIVERGE, COPIES,
        "without biases",
    ),
    "ddp that reduces the first micro-batch": between(
        ddp(micro=2, delay=lambda model, is_last: model.no_sync() if is_last else at_once()), DIVERGE, COPIES
    ),
    "head added after wrapping": between(usual(wrap=head_added), f"{DIVERGE}|{HEAD}", COPIES + r" of (all|.*3\.)"),
    "parameter that ddp ignores by mistake": between(
        ddp(change=lambda model: DDP._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])),
        f"{DIVERGE}|{FIRST}", COPIES + r" of (all|.*0\.weight)",
    ),
    "gradients of one rank zeroed": between(ddp(before=zeroed_on_one), DIVERGE, COPIES),
    "update of one rank skipped": between(ddp(before=partial(zeroed_on_one, at=2)), DIVERGE, COPIES),
    "learning rate of one rank": between(
        ddp(lambda model: optim.AdamW(model.parameters(), lr=1e-2 * (1 + dist.get_rank()))), f"{DIVERGE}|{RATE}", COPIES
    ),
    "clipping on one rank": between(
        ddp(before=lambda model, *_: dist.get_rank() or clip_grad_norm_(model.parameters(), 0.05)),
        f"{DIVERGE}|norm: ", COPIES, "clipped",
    ),
    "reduction by hand that is missing": between(usual(), f"{DIVERGE}|and the reduction", COPIES),
    "reduction by hand of all but the head": between(
        usual(before=lambda model, *_: average_gradients(model[:3])), f"{DIVERGE}|{HEAD}", COPIES + r" of (all|.*3\.)"
    ),
    "seeds of ranks that differ": between(
        usual(make=lambda job: Job(job.seed + 1 + job.rank).net(), before=average_gradients), f"{DIVERGE}|initial",
        COPIES,
    ),
    "buffer of each rank": between(
        usual(make=lambda job: with_buffer(job, job.rank), before=average_gradients), r"buffer", r"buffer",
        "with a buffer",
    ),
}  # fmt: skip

# -- reductions and clipping -----------------------------------------------------------------------------------------


def sum_hook(model: Any) -> None:
    reduced = partial(dist.all_reduce, async_op=True)
    model.register_comm_hook(
        None, lambda _, bucket: reduced(bucket.buffer()).get_future().then(lambda done: done.value()[0])
    )


def by_local_norm(model: Any, *_: Any) -> None:
    """Clips by the norm of the rank's own shards."""
    own = [p.grad.to_local() for p in model.parameters()]
    torch._foreach_mul_(own, float(0.05 / torch.cat([one.flatten() for one in own]).norm().clamp_min(0.05)))


PLANTED |= {
    "sum over the ranks": between(ddp(sgd, prepare=sum_hook), FACTOR, r"reference: (norms|parameters after)", "sgd"),
    "gradients averaged twice": between(
        ddp(sgd, before=lambda model, *_: [p.grad.mul_(0.5) for p in model.parameters()]), FACTOR,
        r"reference: parameters after", "sgd",
    ),
    "gradients reduced twice": between(ddp(sgd, before=average_gradients), REDUCED, REDUCED, "sgd", reductions=1),
    "accumulation without no_sync": between(ddp(micro=2, delay=at_once), REDUCED, REDUCED, reductions=1),
    "fsdp2 that reduces each micro-batch": between(fsdp2(micro=2, delay=at_once), REDUCED, REDUCED, reductions=1),
    "clipping of local norms": between(fsdp2(before=by_local_norm), r"norm: ", AFTER, "clipped", clip=0.05),
}  # fmt: skip

# -- data, dtypes, parts ---------------------------------------------------------------------------------------------


def one_rank_drops_a_micro_batch(job: Job) -> None:
    model = DDP(job.net())
    batch = lambda job, step, _: job.batch(step, 2)[: 2 - job.rank]  # noqa: E731
    train(job, model, adamw(model), micro=2 - job.rank, batch=batch)


def same_rows(job: Job, step: int, micro: int) -> list[torch.Tensor]:
    """Returns the rows of rank 0 on all ranks: there is no DistributedSampler."""
    return Job(job.seed, 0, job.ranks).batch(step, micro)


IN_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
PLANTED |= {
    "one rank drops a micro batch": between(
        one_rank_drops_a_micro_batch, rf"{MICRO}|reference: losses", MICRO, accumulation=2
    ),
    "all ranks have the same data": between(ddp(batch=same_rows), SAME_DATA, r"reference: losses|data"),
    "all ranks of fsdp2 have the same data": between(fsdp2(batch=same_rows), SAME_DATA, r"reference: losses|data"),
    "all ranks of zero2 have the same data": between(
        partial(ours, strategy="zero2", batch=same_rows), SAME_DATA, r"reference: losses|data"
    ),
    "fsdp2 with masters in bf16": between(
        fsdp2(of(optim.AdamW, lr=1e-3), change=nn.Module.bfloat16, loss=of_low), MASTERS, r"dtypes: masters"
    ),
    "fsdp2 that ignores a dtype of the wire": between(
        fsdp2(), r"dtypes: all_gather", r"dtypes: all_gather", wire={"all_gather": "bfloat16"}
    ),
    "fsdp2 that reduces in bf16": between(
        usual(wrap=partial(shard, policy=IN_BF16)), r"dtypes: reduce_scatter", r"dtypes: reduce_scatter",
        wire={"reduce_scatter": "float32"},
    ),
    "states that are not partitioned": between(ddp(), r"partition: copies", r"partition: copies", copies=1),
    "batch of one rank that is not finite": between(
        ddp(loss=lambda model, x: error(model, x / (1.0 - dist.get_rank()))), FINITE, FINITE
    ),
}  # fmt: skip
