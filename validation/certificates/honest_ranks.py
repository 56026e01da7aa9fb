"""Honest loops of two ranks. The honest loops of one process are their references."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP

from .honest import (
    Experts,
    Lora,
    accelerated,
    both_kinds,
    freeze,
    normalized,
    of_low,
    ours,
    recompute,
    trainer,
)  # fmt: skip
from .loops import (
    OUT,
    STEPS,
    WIDTH,
    Job,
    Loop,
    adamw,
    at_once,
    autocast,
    error,
    loop,
    of,
    row_of,
    sgd,
    train,
    usual,
)

HONEST: dict[str, Loop] = {}
"""Name -> loop."""

two_ranks = partial(loop, ranks=2)
honest = partial(row_of, HONEST, two_ranks)

# -- DDP -------------------------------------------------------------------------------------------------------------


def leave_out(model: Any) -> None:
    """Leaves the first layer to each rank, as an expert."""
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["0.weight", "0.bias"])


def in_fp16(model: Any) -> None:
    """Reduces in fp16."""
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)


def masks_of_each_rank(model: Any) -> None:
    """Draws other masks of dropout on each rank."""
    torch.manual_seed(dist.get_rank())


def log(*_: Any) -> None:
    """Reduces metrics after an update."""
    dist.all_reduce(torch.ones(200))
    dist.barrier()


ddp = partial(usual, wrap=DDP)
unused = partial(DDP, find_unused_parameters=True)
zero = of(ZeroRedundancyOptimizer, optimizer_class=optim.AdamW, lr=1e-2)
HONEST |= {
    "ddp": two_ranks(ddp(), "plain", accumulation=1, reductions=1),
    "ddp that accumulates": two_ranks(ddp(micro=2), "plain", accumulation=2, reductions=1),
    "ddp that reduces each micro-batch": two_ranks(ddp(micro=2, delay=at_once), "plain"),
    "ddp that looks for unused parameters": two_ranks(usual(wrap=unused), "plain"),
    "ddp that clips": two_ranks(ddp(clip=0.05), "clipped", clip=0.05),
    "ddp in autocast": two_ranks(ddp(loss=autocast), "plain", computes="bfloat16"),
    "ddp, sums in fp16": two_ranks(ddp(prepare=in_fp16), "plain"),
    "ddp with rprop": two_ranks(ddp(of(optim.Rprop, lr=1e-3)), "rprop"),
    "ddp with muon": two_ranks(ddp(both_kinds), "muon beside adamw"),
    "zero redundancy": two_ranks(ddp(zero), "plain"),
    "ddp of an adapter": two_ranks(ddp(adamw, Lora), "lora"),
    "ddp with batch normalization": two_ranks(ddp(adamw, normalized)),
    "ddp with statistics of each rank": two_ranks(
        usual(make=normalized, wrap=partial(DDP, broadcast_buffers=False))
    ),
    "ddp with dropout of each rank": two_ranks(
        ddp(change=lambda m: m.insert(2, nn.Dropout(0.3)), prepare=masks_of_each_rank)
    ),
    "ddp that leaves out an expert": two_ranks(ddp(change=leave_out)),
    "ddp whose unused experts are found": two_ranks(usual(make=Experts, wrap=unused)),
    "ddp with metrics": two_ranks(ddp(after=log), "plain"),
    "ddp with a checkpoint": two_ranks(ddp(change=recompute), "plain"),
}  # fmt: skip


@honest("plain")
def ddp_whose_inner_model_is_watched(job: Job) -> None:
    model = DDP(inner := job.net())
    train(job, model, adamw(model), watched=inner)


@honest()
def ddp_with_uneven_inputs(job: Job) -> None:
    """Rank 0 has one batch more than rank 1 (join)."""
    optimizer = adamw(model := DDP(job.net()))
    with job.watch(model, optimizer), model.join():
        for step in range(STEPS + (job.rank == 0)):
            error(model, *job.batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()


@honest()
def ddp_that_averages_later(job: Job) -> None:
    """Updates of each rank between averages of the parameters (PostLocalSGDOptimizer)."""
    model = DDP(job.net())
    own = [dist.new_group([rank]) for rank in range(job.ranks)][job.rank]
    model.register_comm_hook(PostLocalSGDState(None, own, start_localSGD_iter=1), post_localSGD_hook)
    train(job, model, PostLocalSGDOptimizer(sgd(model), PeriodicModelAverager(period=4, warmup_steps=1)))


# -- data parallelism by hand ----------------------------------------------------------------------------------------


def average_gradients(model: Any, *_: Any) -> None:
    """Averages gradients over the ranks."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def average_now_and_then(model: Any, _optimizer: Any, step: int) -> None:
    """Averages parameters after each third update (local SGD)."""
    for parameter in model.parameters() if step % 3 == 2 else ():
        dist.all_reduce(parameter.data)
        parameter.data /= dist.get_world_size()


by_hand = partial(usual, before=average_gradients)
HONEST |= {
    "reduced by hand": two_ranks(by_hand(), "plain"),
    "averaged now and then": two_ranks(usual(after=average_now_and_then)),
}


@honest("plain")
def partitioned_by_hand(job: Job) -> None:
    """Each rank updates half of the parameters and sends them (ZeRO-1)."""
    model = job.net()
    owners = {p: number % job.ranks for number, p in enumerate(model.parameters())}

    def send(*_: Any) -> None:
        for parameter, owner in owners.items():
            dist.broadcast(parameter.data, owner)
        model.zero_grad()

    optimizer = optim.AdamW([p for p, owner in owners.items() if owner == job.rank], lr=1e-2)
    train(job, model, optimizer, before=average_gradients, after=send)


@honest()
def two_trainings(job: Job) -> None:
    """Each rank trains a model of its own, with another learning rate."""
    model = Job(job.rank).net()
    train(job, model, of(optim.AdamW, lr=1e-3 * (1 + job.rank))(model))


# -- shards ----------------------------------------------------------------------------------------------------------


def shard(model: Any, policy: MixedPrecisionPolicy | None = None) -> Any:
    """Shards a model and its layers (FSDP2)."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for one in (*(m for m in model.children() if isinstance(m, nn.Linear)), model):
        fully_shard(one, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())
    return model


fsdp2 = partial(usual, wrap=shard)
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
HONEST |= {
    "fsdp2": two_ranks(fsdp2(), "plain", copies=1),
    "fsdp2 that accumulates": two_ranks(fsdp2(micro=2), "plain", accumulation=2, reductions=1),
    "fsdp2 that clips": two_ranks(fsdp2(clip=0.05), "clipped", clip=0.05),
    "fsdp2 in bf16": two_ranks(
        usual(wrap=partial(shard, policy=MIXED)), "plain", computes="bfloat16", masters="float32"
    ),
    "fsdp2 of a frozen backbone": two_ranks(fsdp2(change=freeze), "frozen backbone"),
    **{f"ours, {name}": two_ranks(partial(ours, strategy=name), "plain") for name in ("zero1", "zero2", "zero3")},
    "ours, zero3, in bf16": two_ranks(partial(ours, strategy="zero3", change=nn.Module.bfloat16, loss=of_low), "plain"),
    **{
        f"ours, {name}, accumulated and clipped": two_ranks(
            partial(ours, strategy=name, micro=2, clip=0.05), "clipped", clip=0.05, accumulation=2
        )
        for name in ("zero2", "zero3")
    },
    "accelerate on two ranks": two_ranks(partial(accelerated, micro=2), "plain", accumulation=2),
    "trainer on two ranks": two_ranks(trainer),
}

# -- models over several ranks ---------------------------------------------------------------------------------------


def split(model: Any) -> Any:
    """Splits two matrices over the ranks (parallelize_module)."""
    styles = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), styles)


def experts_of_each_rank(job: Job) -> nn.Module:
    """Returns a shared layer, and an expert that this rank has alone."""
    torch.manual_seed(job.seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, OUT))


def whole_batch(job: Job, step: int, _: int) -> list[torch.Tensor]:
    """Returns the batch of all ranks."""
    return [job.draw(step, 16, WIDTH)]


def three_layers(job: Job) -> nn.Module:
    """Returns a network whose first two matrices are split."""
    torch.manual_seed(job.seed)
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, OUT), nn.Linear(OUT, OUT))


HONEST |= {
    "tensor parallel": two_ranks(usual(make=three_layers, wrap=split, batch=whole_batch)),
    "experts of each rank": two_ranks(
        usual(make=experts_of_each_rank, before=lambda model, *_: average_gradients(model[0]))
    ),
}
