"""Honest loops of two ranks. The honest loops of one process are their references."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

from .honest import ActorCritic, Experts, Lora, Target, accelerated, autocast, ours, trainer
from .loops import OUT, STEPS, WIDTH, Job, Loop, adamw, error, train

HONEST: dict[str, Loop] = {}
"""Name -> loop."""


def honest(reference: str = "", **expected: Any) -> Callable[[Callable[[Job], Any]], Callable[[Job], Any]]:
    """Puts a function into the table under its name."""

    def put(function: Callable[[Job], Any]) -> Callable[[Job], Any]:
        HONEST[function.__name__.replace("_", " ")] = Loop(function, 2, reference, expected)
        return function

    return put


# -- DDP -----------------------------------------------------------------------------------------------------------


def ddp(
    job: Job, kind: Callable[..., Any] = adamw, wrap: dict[str, Any] | None = None, prepare: Callable[[Any], Any] = lambda _: None,
    each: bool = False, **how: Any,
) -> None:  # fmt: skip
    """Trains under DDP. `wrap`: options of DDP; `prepare`: acts on the wrapper; `each`: micro-batches are all reduced."""
    model = DDP(job.net(), **(wrap or {}))
    prepare(model)
    delay = {"delay": lambda *_: nullcontext()} if each else {}
    train(job, model, kind(model), **delay, **how)


HONEST |= {
    "ddp": Loop(ddp, 2, "plain", {"accumulation": 1, "reductions": 1}),
    "ddp that accumulates": Loop(partial(ddp, micro=2), 2, "plain", {"accumulation": 2, "reductions": 1}),
    "ddp that reduces each micro-batch": Loop(partial(ddp, micro=2, each=True), 2, "plain"),
    "ddp, gradients in buckets": Loop(partial(ddp, wrap={"gradient_as_bucket_view": True}), 2, "plain"),
    "ddp, static graph": Loop(partial(ddp, wrap={"static_graph": True}), 2, "plain"),
    "ddp that looks for unused parameters": Loop(partial(ddp, wrap={"find_unused_parameters": True}), 2, "plain"),
    "ddp in small buckets": Loop(partial(ddp, wrap={"bucket_cap_mb": 0.001}), 2, "plain"),
    "ddp that clips": Loop(partial(ddp, clip=0.05), 2, "clipped", {"clip": 0.05}),
    "ddp in autocast": Loop(partial(ddp, loss=autocast), 2, "plain", {"computes": "bfloat16"}),
    "ddp, sums in bf16": Loop(partial(ddp, prepare=lambda m: m.register_comm_hook(None, default_hooks.bf16_compress_hook)), 2, "plain"),
    "ddp with adafactor": Loop(partial(ddp, kind=lambda m: optim.Adafactor(m.parameters(), lr=1e-2)), 2),
    "ddp with sgd": Loop(partial(ddp, kind=lambda m: optim.SGD(m.parameters(), lr=0.1)), 2, "sgd"),
    "ddp with rprop": Loop(partial(ddp, kind=lambda m: optim.Rprop(m.parameters(), lr=1e-3)), 2),
    "zero redundancy": Loop(
        partial(ddp, kind=lambda m: ZeroRedundancyOptimizer(m.parameters(), optim.AdamW, lr=1e-2)), 2, "plain"
    ),
    "zero redundancy, clipped": Loop(
        partial(ddp, clip=0.05, micro=2, kind=lambda m: ZeroRedundancyOptimizer(m.parameters(), optim.AdamW, lr=1e-2)),
        2, "clipped", {"clip": 0.05},
    ),
}  # fmt: skip


@honest(reference="plain")
def ddp_whose_inner_model_is_watched(job: Job) -> None:
    """The watch gets the model that DDP has wrapped."""
    model = job.net()
    called = DDP(model)
    train(job, called, adamw(called), watched=model)


@honest(reference="lora")
def ddp_of_an_adapter(job: Job) -> None:
    """A frozen base and its adapter; the optimizer gets all parameters."""
    model = DDP(Lora(job.seed))
    train(job, model, adamw(model))


@honest()
def ddp_of_an_adapter_on_bf16(job: Job) -> None:
    """A frozen base in bf16 in the optimizer."""
    model = DDP(Lora(job.seed, torch.bfloat16))
    train(job, model, adamw(model))


@honest()
def ddp_with_muon(job: Job) -> None:
    """Matrices have Muon, the rest AdamW."""
    model = DDP(job.net())
    sides = [[p for p in model.parameters() if (p.dim() == 2) is is_matrix] for is_matrix in (True, False)]
    both = [optim.Muon(sides[0], lr=1e-2), optim.AdamW(sides[1], lr=1e-2)]
    with job.watch(model, both):
        for step in range(STEPS):
            error(model, *job.batch(step)).backward()
            for one in both:
                one.step()
                one.zero_grad()


def ddp_normalized(job: Job, broadcasts: bool) -> None:
    """BatchNorm's statistics are each rank's after a step; by default rank 0's are sent before the next."""
    torch.manual_seed(job.seed)
    inner = nn.Sequential(nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, OUT))
    model = DDP(inner, broadcast_buffers=broadcasts)
    train(job, model, adamw(model))


HONEST |= {
    "ddp with batch normalization": Loop(partial(ddp_normalized, broadcasts=True), 2),
    "ddp with statistics of each rank": Loop(partial(ddp_normalized, broadcasts=False), 2),
}


@honest()
def ddp_with_dropout_of_each_rank(job: Job) -> None:
    """Each rank draws its own masks."""
    model = job.net()
    model.insert(2, nn.Dropout(0.3))
    called = DDP(model)
    torch.manual_seed(job.seed + job.rank)
    train(job, called, adamw(called))


@honest()
def ddp_that_leaves_out_an_expert(job: Job) -> None:
    """Each rank has an expert of its own, which DDP ignores."""
    torch.manual_seed(job.seed)
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, OUT))
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["0.weight", "0.bias"])
    called = DDP(model)
    train(job, called, adamw(called))


@honest()
def ddp_whose_unused_experts_are_found(job: Job) -> None:
    """Ranks use different experts in a step, and all gradients are reduced."""
    model = DDP(Experts(job.seed, lambda x: int(x[0, 0] > 0)), find_unused_parameters=True)
    train(job, model, adamw(model))


@honest()
def ddp_with_uneven_inputs(job: Job) -> None:
    """Rank 0 has one batch more than rank 1 (join)."""
    model = DDP(job.net())
    optimizer = adamw(model)
    with job.watch(model, optimizer), model.join():
        for step in range(STEPS + (job.rank == 0)):
            error(model, *job.batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()


@honest(reference="plain")
def ddp_with_metrics(job: Job) -> None:
    """Losses and counts are reduced after each update, for a log."""
    model = DDP(job.net())
    train(job, model, adamw(model), after=lambda step: (dist.all_reduce(torch.ones(200)), dist.barrier()))


@honest(reference="plain")
def ddp_with_an_average_of_weights(job: Job) -> None:
    """Rank 0 alone keeps an average."""
    model = DDP(job.net())
    average = copy.deepcopy(model.module)

    def follow(_: int) -> None:
        for own, other in zip(average.parameters(), model.module.parameters(), strict=True):
            own.data.lerp_(other.detach(), 0.1)

    train(job, model, adamw(model), after=follow if job.rank == 0 else lambda _: None)


@honest(reference="plain")
def ddp_with_a_checkpoint(job: Job) -> None:
    """Activations are recomputed."""
    inner = job.net()
    first, rest = inner[:2], inner[2:]
    inner.forward = lambda x: rest(checkpoint(first, x, use_reentrant=False))
    model = DDP(inner)
    train(job, model, adamw(model))


@honest(reference="plain")
def ddp_compiled(job: Job) -> None:
    """The model is compiled before it is wrapped."""
    torch.compiler.reset()
    model = DDP(torch.compile(job.net(), backend="eager"))
    train(job, model, adamw(model))


@honest()
def ddp_with_a_scaler_that_calibrates(job: Job) -> None:
    """fp16 from a factor of 2**32."""
    model = DDP(job.net())
    optimizer, scaler = adamw(model), torch.amp.GradScaler("cpu", init_scale=2.0**32)
    with job.watch(model, optimizer):
        for step in range(STEPS):
            scaler.scale(autocast(model, *job.batch(step), dtype=torch.float16)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


@honest()
def ddp_of_a_target_network(job: Job) -> None:
    """A target lies beside the wrapped network, and follows it."""
    both = Target(job.net())
    both.target.requires_grad_(False)
    model = DDP(both)
    train(
        job,
        model,
        optim.Adam(both.online.parameters(), lr=1e-3),
        loss=lambda model, x: model(x),
        after=lambda _: both.follow(0.05),
    )


@honest()
def ddp_of_a_gan(job: Job) -> None:
    """Two wrappers; the generator's step uses the critic."""
    torch.manual_seed(job.seed)
    generator, critic = DDP(nn.Linear(4, WIDTH)), DDP(nn.Linear(WIDTH, 1))
    ours_, other = adamw(critic, 1e-3), adamw(generator, 1e-3)
    with job.watch(critic, ours_):
        for step in range(STEPS):
            (x,) = job.batch(step)
            z = job.draw(100 * job.rank + step, len(x), 4)
            ours_.zero_grad()
            (
                critic(generator(z).detach()).mean() - critic.module(x).mean() + critic.module.weight.square().sum()
            ).backward()
            ours_.step()
            other.zero_grad()
            critic.requires_grad_(False)
            (-critic.module(generator(z))).mean().backward()
            critic.requires_grad_(True)
            other.step()


@honest()
def ddp_that_averages_later(job: Job) -> None:
    """Local updates between averages of the parameters (PostLocalSGDOptimizer)."""
    model = DDP(job.net())
    own = [dist.new_group([rank]) for rank in range(job.ranks)][job.rank]
    model.register_comm_hook(PostLocalSGDState(None, own, start_localSGD_iter=1), post_localSGD_hook)
    inner = optim.SGD(model.parameters(), lr=0.1)
    train(job, model, PostLocalSGDOptimizer(inner, PeriodicModelAverager(period=4, warmup_steps=1)))


@honest(reference="plain")
def replicated(job: Job) -> None:
    """DDP without a wrapper (replicate)."""
    model = replicate(job.net())
    train(job, model, adamw(model))


# -- data parallelism by hand ----------------------------------------------------------------------------------


def averaged(parameters: Any) -> None:
    """Averages gradients over the ranks."""
    for parameter in parameters:
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def by_hand(job: Job, micro: int = 1, clip: float | None = None) -> None:
    """A plain loop reduces its gradients itself."""
    model = job.net()
    train(job, model, adamw(model), micro=micro, clip=clip, before=lambda _: averaged(model.parameters()))


HONEST |= {
    "reduced by hand": Loop(by_hand, 2, "plain"),
    "reduced by hand, clipped": Loop(partial(by_hand, micro=2, clip=0.05), 2, "clipped", {"clip": 0.05}),
}


@honest(reference="plain")
def reduced_as_one_tensor(job: Job) -> None:
    """All gradients are reduced as one flat tensor."""
    model = job.net()

    def reduce(_: int) -> None:
        flat = nn.utils.parameters_to_vector([p.grad for p in model.parameters()])
        dist.all_reduce(flat)
        for parameter, gradient in zip(
            model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True
        ):
            parameter.grad = gradient.view_as(parameter) / job.ranks

    train(job, model, adamw(model), before=reduce)


@honest(reference="plain")
def partitioned_by_hand(job: Job) -> None:
    """Each rank updates half of the parameters and sends them (ZeRO-1)."""
    model = job.net()
    all_of = list(model.parameters())
    owners = {p: number % job.ranks for number, p in enumerate(all_of)}
    optimizer = optim.AdamW([p for p in all_of if owners[p] == job.rank], lr=1e-2)

    def send(_: int) -> None:
        for parameter, owner in owners.items():
            dist.broadcast(parameter.data, owner)
        model.zero_grad()

    train(job, model, optimizer, before=lambda _: averaged(all_of), after=send)


@honest()
def averaged_now_and_then(job: Job) -> None:
    """Each rank trains alone, and every three updates the parameters are averaged (local SGD)."""
    model = job.net()

    def average(step: int) -> None:
        for parameter in model.parameters() if step % 3 == 2 else ():
            dist.all_reduce(parameter.data)
            parameter.data /= job.ranks

    train(job, model, adamw(model), after=average)


@honest()
def two_trainings(job: Job) -> None:
    """Each rank trains a model of its own, with its own learning rate."""
    torch.manual_seed(job.rank)
    model = nn.Sequential(nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, OUT))
    train(job, model, adamw(model, 1e-3 * (1 + job.rank)))


# -- shards ------------------------------------------------------------------------------------------------------


def sharded(
    job: Job, policy: MixedPrecisionPolicy | None = None, prepare: Callable[[Any], Any] = lambda _: None, **how: Any
) -> None:
    """Trains under FSDP2."""
    model: Any = job.net()
    prepare(model)
    mesh = init_device_mesh("cpu", (job.ranks,))
    for one in (model[0], model[3], model):
        fully_shard(one, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())
    train(job, model, adamw(model), **how)


MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
HONEST |= {
    "fsdp2": Loop(sharded, 2, "plain", {"copies": 1}),
    "fsdp2 that accumulates": Loop(partial(sharded, micro=2), 2, "plain", {"accumulation": 2, "reductions": 1}),
    "fsdp2 that clips": Loop(partial(sharded, clip=0.05), 2, "clipped", {"clip": 0.05}),
    "fsdp2 in bf16": Loop(partial(sharded, policy=MIXED), 2, "plain", {"computes": "bfloat16", "masters": "float32"}),
    "fsdp2 of a frozen backbone": Loop(
        partial(sharded, prepare=lambda model: model[:3].requires_grad_(False)), 2, "frozen backbone"
    ),
}


@honest()
def fsdp2_of_an_adapter(job: Job) -> None:
    """A frozen bf16 base is sharded with its adapter; the optimizer gets all parameters."""
    model: Any = Lora(job.seed, torch.bfloat16)
    mesh = init_device_mesh("cpu", (job.ranks,))
    fully_shard(model.base, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(job, model, adamw(model))


HONEST |= {
    f"ours, {name}": Loop(partial(ours, strategy=name), 2, "plain") for name in ("zero1", "zero2", "zero3", "megatron")
}
HONEST |= {
    f"ours, {name}, micro-batches, clipped": Loop(
        partial(ours, strategy=name, micro=2, clip=0.05), 2, "clipped", {"clip": 0.05, "accumulation": 2}
    )
    for name in ("zero2", "zero3")
}
HONEST["ours, zero3 in bf16"] = Loop(
    partial(ours, strategy="zero3", precision="bf16"), 2, "plain", {"masters": "float32"}
)


# -- models over several ranks ---------------------------------------------------------------------------------


@honest()
def pipeline_by_hand(job: Job) -> None:
    """Each rank has one of two stages."""
    torch.manual_seed(job.seed)
    model = nn.Linear(WIDTH, 8) if job.rank == 0 else nn.Linear(8, 4)
    optimizer = adamw(model)
    with job.watch(model, optimizer):
        for step in range(STEPS):
            if job.rank == 0:
                y = model(job.draw(step, 8, WIDTH))
                dist.send(y.detach(), 1)
                gradient = torch.empty_like(y)
                dist.recv(gradient, 1)
                y.backward(gradient)
            else:
                y = torch.empty(8, 8)
                dist.recv(y, 0)
                model(y.requires_grad_()).square().mean().backward()
                dist.send(y.grad, 0)
            optimizer.step()
            optimizer.zero_grad()


@honest()
def tensor_parallel(job: Job) -> None:
    """Matrices are split over the ranks (parallelize_module), and each rank sees the whole batch."""
    torch.manual_seed(job.seed)
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, OUT), nn.Linear(OUT, OUT))
    parallelize_module(model, init_device_mesh("cpu", (job.ranks,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = adamw(model)
    with job.watch(model, optimizer):
        for step in range(STEPS):
            error(model, job.draw(step, 16, WIDTH)).backward()
            optimizer.step()
            optimizer.zero_grad()


class Sum(torch.autograd.Function):
    """Sums over the ranks in forward."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum."""
        y = x.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Returns the gradient as it is: each rank has it whole."""
        return gradient


@honest()
def tensor_parallel_by_hand(job: Job) -> None:
    """Each rank has half of the columns, then of the rows."""
    torch.manual_seed(job.seed + job.rank)
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, OUT, bias=False))
    optimizer = adamw(model)
    with job.watch(model, optimizer):
        for step in range(STEPS):
            x = job.draw(step, 16, WIDTH)
            (Sum.apply(model(x)) - x[:, :OUT]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


@honest()
def experts_of_each_rank(job: Job) -> None:
    """A shared layer is reduced by hand, and each rank has an expert of its own."""
    torch.manual_seed(job.seed)
    model = nn.ModuleDict({"shared": nn.Linear(WIDTH, WIDTH), "expert": nn.Linear(WIDTH, OUT)})
    model.forward = lambda x: model["expert"](model["shared"](x).tanh())
    train(job, model, adamw(model), before=lambda _: averaged(model["shared"].parameters()))


@honest()
def actor_critic_by_hand(job: Job) -> None:
    """Two optimizers, one batch; gradients are reduced before each update."""
    model = ActorCritic(job.seed)
    both = [adamw(model.critic, 1e-3), adamw(model.actor, 1e-3)]
    with job.watch(model, both):
        for step in range(STEPS):
            (x,) = job.batch(step)
            for optimizer, part, sign in zip(both, (model.critic, model.actor), (1, -1), strict=True):
                model.zero_grad()
                (sign * model(x)).mean().backward()
                averaged(part.parameters())
                clip_grad_norm_(part.parameters(), 1.0)
                optimizer.step()


HONEST |= {
    "accelerate on two ranks": Loop(partial(accelerated, micro=2), 2, "plain", {"accumulation": 2}),
    "trainer on two ranks": Loop(trainer, 2),
}
