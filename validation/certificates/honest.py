"""Honest loops, of one process and then of two ranks: training as it is usually written, with no failure to name.

The honest loops of one process are the references of those of two ranks.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import zerobench

from .loops import OUT, STEPS, WIDTH, Job, Loop, adamw, at_once, autocast, error, nothing, of, sgd, train, usual

HONEST: dict[str, Loop] = {}
"""Name -> loop."""

# -- optimizers and their calls ----------------------------------------------------------------------------------


def both_kinds(model: nn.Module) -> list[Any]:
    """Returns two optimizers: of the matrices, and of the rest."""
    sides = [[p for p in model.parameters() if (p.dim() == 2) is is_matrix] for is_matrix in (True, False)]
    return [optim.Muon(sides[0], lr=1e-2), optim.AdamW(sides[1], lr=1e-2)]


def of_layers(*layers: Callable[[], nn.Module]) -> Callable[[Job], Any]:
    """Returns a function that makes a network, with the seed's values."""

    def make(job: Job) -> Any:
        torch.manual_seed(job.seed)
        return nn.Sequential(*(layer() for layer in layers))

    return make


matrix, linear = partial(partial, nn.Linear, bias=False), partial(partial, nn.Linear)
wide = of_layers(matrix(WIDTH, 128), nn.Tanh, matrix(128, 128), nn.Tanh, matrix(128, OUT))
large = of_layers(matrix(WIDTH, 1024), nn.Tanh, matrix(1024, 1024))
without_biases = of_layers(matrix(WIDTH, 64), nn.SiLU, partial(nn.RMSNorm, 64), matrix(64, OUT))
"""All parameters are matrices, or begin at 1."""


def with_buffer(job: Job, drawn: int = 0) -> Any:
    """Returns a network that adds a fixed table to its inputs."""
    model = job.net()
    model[0].register_buffer("table", Job(job.seed).draw(950 + drawn, WIDTH))
    model[0].register_forward_pre_hook(lambda layer, inputs: inputs[0] + layer.table)
    return model


MUON = of(optim.Muon, lr=1e-2)

HONEST |= {
    "plain": Loop(usual(), accumulation=1),
    "plain again": Loop(usual(), "plain"),
    "without biases": Loop(usual(of(optim.AdamW, lr=3e-4), without_biases)),
    "large": Loop(usual(of(optim.AdamW, lr=1e-3), large, loss=lambda model, x: model(x).square().mean())),
    "with a buffer": Loop(usual(make=with_buffer)),
    "fused": Loop(usual(of(optim.AdamW, lr=1e-2, fused=True)), "plain"),
    "four micro-batches": Loop(usual(micro=4), "plain", accumulation=4),
    "sgd": Loop(usual(sgd)),
    "sgd, micro-batches": Loop(usual(sgd, micro=2), "sgd"),
    "sgd with momentum": Loop(usual(of(optim.SGD, lr=0.1, momentum=0.9, nesterov=True))),
    "adafactor": Loop(usual(of(optim.Adafactor, lr=1e-2))),
    "rprop": Loop(usual(of(optim.Rprop, lr=1e-3))),
    "muon": Loop(usual(MUON, wide)),
    "muon, micro-batches": Loop(usual(MUON, wide, micro=4), "muon", accumulation=4, optimizer="Muon"),
    "muon beside adamw": Loop(usual(both_kinds), optimizer={"2.weight": "AdamW", "*.weight": "Muon", "*": "AdamW"}),
}


def by_closure(job: Job, kind: Callable[[Any], Any] = adamw, returns_loss: bool = False) -> None:
    """Gives the optimizer's step a function. `returns_loss`: it only returns the loss of a backward before."""
    optimizer = kind(model := job.net())
    with job.watch(model, optimizer):
        for step in range(STEPS):

            def closure(step: int = step) -> Any:
                optimizer.zero_grad()
                loss = error(model, *job.batch(step))
                loss.backward()
                return loss

            optimizer.step(partial(torch.clone, closure()) if returns_loss else closure)


def update_by_hand(job: Job) -> None:
    model = job.net()
    with job.watch(model, None, ends="step") as watch:
        for step in range(STEPS):
            error(model, *job.batch(step)).backward()
            for parameter in model.parameters():
                parameter.data.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None
            watch.step()


HONEST |= {
    "closure that returns a loss": Loop(partial(by_closure, returns_loss=True), "plain", accumulation=1),
    "closure": Loop(by_closure, "plain"),
    "lbfgs": Loop(partial(by_closure, kind=of(optim.LBFGS, max_iter=4))),
    "update by hand": Loop(update_by_hand),
}


# -- learning rates, groups, gradients, micro-batches ----------------------------------------------------------------


def scheduled(job: Job, schedule: Callable[[Any], Any], lr: float = 1e-2) -> None:
    optimizer = of(optim.AdamW, lr=lr)(model := job.net())
    scheduler = schedule(optimizer)
    train(job, model, optimizer, after=lambda *_: scheduler.step())


def rates(factor: Callable[[int], float]) -> Callable[[Any], Any]:
    return lambda optimizer: LambdaLR(optimizer, factor)


def groups(model: Any) -> Any:
    """Returns an optimizer whose matrices decay; the head has another learning rate."""
    rest = list(model[:3].parameters())
    decays = {"params": [p for p in rest if p.dim() > 1], "weight_decay": 0.1}
    others = {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0}
    return optim.AdamW([decays, others, {"params": model[3].parameters(), "lr": 1e-3}], lr=1e-2)


def evaluated(model: Any, _optimizer: Any, step: int) -> None:
    model.eval()
    with torch.inference_mode():
        error(model, Job(1).draw(step, 4, WIDTH))
    model.train()


def bad_batches_are_left_out(job: Job) -> None:
    """An update whose norm is not finite is left out, as a guard of large runs does."""
    optimizer = adamw(model := job.net())
    with job.watch(model, optimizer):
        for step in range(STEPS + 1):
            (error(model, *job.batch(step)) * (math.inf if step == 1 else 1)).backward()
            if math.isfinite(float(clip_grad_norm_(model.parameters(), 50.0))):
                optimizer.step()
            optimizer.zero_grad()


HONEST |= {
    "warm-up from zero": Loop(partial(scheduled, schedule=rates(lambda step: step / 3))),
    "long warm-up": Loop(partial(scheduled, schedule=rates(lambda step: (step + 1) / 10_000), lr=3e-4)),
    "learning rate that halves": Loop(partial(scheduled, schedule=rates(lambda step: 0.5**step))),
    "groups": Loop(usual(groups)),
    "clipped": Loop(usual(clip=0.05), clip=0.05),
    "never clipped": Loop(usual(clip=50.0), "plain", clip=50.0),
    "epochs of six micro-batches": Loop(usual(micro=(4, 2, 4, 2, 4)), accumulation=4),
    "evaluated": Loop(usual(after=evaluated), "plain"),
    "gradients zeroed in place": Loop(usual(after=lambda model, *_: model.zero_grad(set_to_none=False)), "plain"),
    "bad batches are left out": Loop(bad_batches_are_left_out),
}


# -- parts of a model ------------------------------------------------------------------------------------------------


class Lora(nn.Module):
    """A frozen layer and its adapter, whose second matrix begins at zero."""

    def __init__(self, job: Job, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(job.seed)
        self.base = nn.Linear(WIDTH, OUT).to(dtype).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(4, WIDTH) / 4), nn.Parameter(torch.zeros(OUT, 4))

    def forward(self, x: torch.Tensor) -> Any:
        """Returns the layer's output plus the adapter's."""
        return self.base(x.to(self.base.weight.dtype)).float() + x @ self.a.T @ self.b.T


def trainable(model: nn.Module) -> Any:
    return optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def language(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Returns the loss of a text of 40 tokens that is made from a batch."""
    tokens = (x.abs() * 1000).long() % 40
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def language_model(job: Job, is_tied: bool = True, sparse: bool = False) -> Any:
    """Returns an embedding, and a head that has the same matrix."""
    torch.manual_seed(job.seed)
    model: Any = nn.Sequential(
        nn.Embedding(40, WIDTH, sparse=sparse), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 40, bias=False)
    )
    if not sparse:
        model[2].weight = model[0].weight if is_tied else nn.Parameter(model[0].weight.detach().clone())
    return model


class Experts(nn.Module):
    """Rows go to one of three experts, of which one is never picked."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        torch.manual_seed(job.seed)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, OUT) for _ in range(3))

    def forward(self, x: torch.Tensor) -> Any:
        return self.experts[int(x[0, 0] > 0)](x)


normalized = of_layers(linear(WIDTH, 32), partial(nn.BatchNorm1d, 32), nn.ReLU, linear(32, OUT))
convolution = of_layers(
    partial(nn.Unflatten, 1, (1, 4, 4)), partial(nn.Conv2d, 1, 8, 3), partial(nn.BatchNorm2d, 8), nn.ReLU, nn.Flatten,
    linear(32, OUT),
)  # fmt: skip
"""BatchNorm comes after a bias, whose gradients are of rounding alone."""


def freeze(model: Any) -> None:
    model[:3].requires_grad_(False)


def probe(model: Any) -> None:
    """Runs the backbone without gradients; its parameters still ask for them."""

    def forward(x: torch.Tensor) -> Any:
        with torch.no_grad():
            features = model[:3](x)
        return model[3](features)

    model.forward = forward


MOMENTUM = of(optim.SGD, lr=0.05, momentum=0.9)
HONEST |= {
    "lora": Loop(usual(trainable, Lora)),
    "lora, all parameters in the optimizer": Loop(usual(adamw, Lora), "lora"),
    "lora on a bf16 base": Loop(usual(trainable, partial(Lora, dtype=torch.bfloat16))),
    "frozen backbone": Loop(usual(change=freeze)),
    "linear probe": Loop(usual(lambda model: adamw(model[3]), change=probe)),
    "biases alone": Loop(usual(change=lambda m: [p.requires_grad_(p.dim() == 1) for p in m.parameters()])),
    "tied": Loop(usual(make=language_model, loss=language)),
    "sparse embedding": Loop(
        usual(
            lambda m: [of(optim.SparseAdam, lr=1e-2)(m[0]), adamw(m[1:])], partial(language_model, sparse=True),
            loss=language,
        )
    ),
    "an expert that is never used": Loop(usual(make=Experts)),
    "batch normalization": Loop(usual(make=normalized)),
    "frozen statistics": Loop(usual(make=normalized, change=lambda model: model[1].eval())),
    "convolution": Loop(usual(MOMENTUM, convolution)),
    "convolution in a warm-up": Loop(usual(of(optim.SGD, lr=2e-5, momentum=0.9), convolution)),
    "dropout": Loop(usual(change=lambda model: model.insert(2, nn.Dropout(0.5)))),
}  # fmt: skip


# -- copies of a model, several losses, several models ---------------------------------------------------------------


class Target(nn.Module):
    """Two copies of a network in one module; the second is the target, whose parameters still ask for gradients."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.online, self.target = job.net(), job.net()

    def forward(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            goal = x[:, 0] + 0.9 * self.target(x).amax(-1)
        return (self.online(x)[:, 0] - goal).square().mean()


def follow(model: Any, *_: Any) -> None:
    for own, other in zip(model.target.parameters(), model.online.parameters(), strict=True):
        own.data.lerp_(other.detach(), 0.05)


class ActorCritic(nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        torch.manual_seed(job.seed)
        self.actor, self.critic = nn.Linear(WIDTH, 2), nn.Linear(WIDTH + 2, 1)

    def forward(self, x: torch.Tensor, action: torch.Tensor | None = None) -> Any:
        """Returns the value of an action, by default the policy's."""
        return self.critic(torch.cat([x, self.actor(x).tanh() if action is None else action], -1))


def td3(job: Job) -> None:
    """Updates the policy once in four steps."""
    model = ActorCritic(job)
    of_critic, of_actor = (optim.Adam(one.parameters(), lr=1e-3) for one in (model.critic, model.actor))
    with job.watch(model, [of_actor, of_critic]):
        for step in range(2 * STEPS):
            (x,) = job.batch(step)
            of_critic.zero_grad()
            (model(x, x[:, :2]) - x.sum(-1, True)).square().mean().backward()
            of_critic.step()
            if step % 4 == 3:
                of_actor.zero_grad()
                (-model(x)).mean().backward()
                of_actor.step()


def gan(job: Job, critics: int, watches: str) -> None:
    """Trains two networks; real and generated rows have a backward each. `watches`: which of them."""
    torch.manual_seed(job.seed)
    generator, critic = nn.Linear(4, WIDTH), nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 1))
    of_generator, of_critic = (optim.Adam(one.parameters(), lr=1e-3) for one in (generator, critic))
    with job.watch(*((critic, of_critic) if watches == "critic" else (generator, of_generator))):
        for step in range(STEPS * critics):
            (x,) = job.batch(step)
            made = generator(job.draw(step + 300, len(x), 4))
            of_critic.zero_grad()
            F.softplus(-critic(x)).mean().backward()
            F.softplus(critic(made.detach())).mean().backward()
            of_critic.step()
            if step % critics == critics - 1:
                of_generator.zero_grad()
                F.softplus(-critic(made)).mean().backward()
                of_generator.step()


def average_of_weights(job: Job) -> None:
    average = AveragedModel(model := job.net(), multi_avg_fn=get_ema_multi_avg_fn(0.9))
    train(job, model, adamw(model), after=lambda *_: average.update_parameters(model))


def two(model: Any, x: torch.Tensor) -> Any:
    """Runs the backward of a first loss, and returns the second: one forward for both."""
    y = model(x)
    y[:, 0].square().mean().backward(retain_graph=True)
    return y[:, 1:].square().mean()


online = partial(usual, lambda model: of(optim.Adam, lr=1e-3)(model.online), Target, loss=lambda model, x: model(x))
HONEST |= {
    "dqn": Loop(online()),
    "target that follows": Loop(online(after=follow)),
    "td3": Loop(td3),
    "gan, its critic watched": Loop(partial(gan, critics=1, watches="critic"), accumulation=1),
    "gan, its generator watched": Loop(partial(gan, critics=1, watches="generator")),
    "wgan, five critic steps": Loop(partial(gan, critics=5, watches="generator")),
    "teacher beside": Loop(
        usual(loss=lambda model, x: error(model, x) + 0 * error(Job(1).net().requires_grad_(False), x)), "plain"
    ),
    "average of weights": Loop(average_of_weights, "plain"),
    "two losses": Loop(usual(loss=two), accumulation=1),
}

# -- precision -------------------------------------------------------------------------------------------------------


def masters(job: Job, dtype: torch.dtype = torch.bfloat16, are_copied_back: bool = True) -> None:
    """Updates fp32 copies of the parameters."""
    model = job.net().to(dtype)
    forward = model.forward
    model.forward = lambda x: forward(x.to(dtype))
    copies = [p.detach().float().clone().requires_grad_() for p in model.parameters()]

    def hand_over(*_: Any) -> None:
        for master, parameter in zip(copies, model.parameters(), strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None

    def round_down(*_: Any) -> None:
        for master, parameter in zip(copies, model.parameters(), strict=True):
            parameter.data.copy_(master)

    after = round_down if are_copied_back else nothing
    train(job, model, optim.AdamW(copies, lr=1e-2), before=hand_over, after=after)


class StochasticRounding(optim.Optimizer):
    """SGD on bf16 parameters, whose new values are rounded up or down by chance."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            bits = (p.float() - 0.1 * p.grad.float()).view(torch.int32)
            p.copy_(((bits + torch.randint(1 << 16, bits.shape, dtype=torch.int32)) & -65536).view(torch.float32))


def of_low(model: Any, x: torch.Tensor) -> Any:
    return error(lambda y: model(y.bfloat16()), x)


half = partial(usual, loss=partial(autocast, dtype=torch.float16))
HONEST |= {
    "autocast": Loop(usual(loss=autocast), "plain", computes="bfloat16", masters="float32"),
    "scaler": Loop(half(scale=256.0), "plain"),
    "scaler with clipping": Loop(half(scale=256.0, clip=0.05), "clipped", clip=0.05),
    "scaler that calibrates": Loop(half(scale=2.0**32)),
    "scaler that skips two updates": Loop(half(scale=2.0**19), "plain"),
    "masters": Loop(masters, "plain", masters="float32", computes="bfloat16"),
    "stochastic rounding": Loop(usual(of(StochasticRounding), change=nn.Module.bfloat16, loss=of_low)),
}

# -- libraries and compilers -----------------------------------------------------------------------------------------


def recompute(model: Any, reentrant: bool = False) -> None:
    first, rest = model[:2], model[2:]
    model.forward = lambda x: rest(checkpoint(first, x.clone().requires_grad_(), use_reentrant=reentrant))


def compiled(job: Job, of_step: bool = False) -> None:
    torch.compiler.reset()
    optimizer: Any = adamw(model := job.net())
    if of_step:
        optimizer.step = torch.compile(optimizer.step, backend="eager")
    train(job, model if of_step else torch.compile(model, backend="eager"), optimizer)


def ours(job: Job, strategy: str, change: Callable[[Any], Any] = nothing, **how: Any) -> None:
    model = job.net()
    change(model)
    engine = zerobench.initialize(model, adamw(model), strategy=strategy)
    train(job, engine, engine, **how)


def see_world(job: Job) -> None:
    """Lets accelerate see the ranks of this loop, as under torchrun; it keeps what it saw first."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    if job.ranks > 1:
        os.environ.update(RANK=str(job.rank), LOCAL_RANK=str(job.rank), MASTER_ADDR="localhost", OMP_NUM_THREADS="1")
        os.environ.update(WORLD_SIZE=str(job.ranks), LOCAL_WORLD_SIZE=str(job.ranks))


def trainer(job: Job, **options: Any) -> None:
    import transformers

    see_world(job)
    torch.manual_seed(job.seed)
    sizes: dict[str, Any] = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(bos_token_id=0, eos_token_id=0, **sizes))
    rows = [dict.fromkeys(("input_ids", "labels"), (torch.arange(16) + i) % 64) for i in range(64)]
    with TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder, use_cpu=True, max_steps=STEPS, report_to=[], per_device_train_batch_size=2,
            save_strategy="no", logging_strategy="no", disable_tqdm=True, **options,
        )  # fmt: skip
        callback = zerobench.trainer_callback(verify=zerobench.ExpectedTraining(**job.expected), timeout_s=30)
        try:
            transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[callback]).train()
        except Exception as error:
            if callback.watch is not None:
                callback.watch.stop(error)  # a Trainer calls no callback when it fails
            raise
    job.certificate = callback.watch.certificate


def accelerated(job: Job, micro: int) -> None:
    import accelerate

    see_world(job)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=micro)
    model = job.net()
    model, optimizer = accelerator.prepare(model, adamw(model))
    with job.watch(model, optimizer):
        for step in range(STEPS):
            for x in job.batch(step, micro):
                with accelerator.accumulate(model):
                    accelerator.backward(error(model, x))
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 50.0)
                    optimizer.step()
                    optimizer.zero_grad()


HONEST |= {
    "checkpoint": Loop(usual(change=recompute), "plain", accumulation=1),
    "reentrant checkpoint": Loop(usual(change=partial(recompute, reentrant=True)), "plain", accumulation=1),
    "compiled model": Loop(compiled, "plain"),
    "compiled step": Loop(partial(compiled, of_step=True), "plain"),
    **{name: Loop(partial(ours, strategy=name), "plain") for name in ("zero1", "zero2", "zero3")},
    "trainer": Loop(trainer),
    "trainer that accumulates": Loop(partial(trainer, gradient_accumulation_steps=2), accumulation=2, clip=1.0),
    "trainer with adafactor": Loop(partial(trainer, optim="adafactor", learning_rate=1e-3)),
    "trainer in bf16": Loop(partial(trainer, bf16=True, warmup_steps=3)),
    "accelerate": Loop(partial(accelerated, micro=1), "plain"),
    "accelerate that accumulates": Loop(partial(accelerated, micro=2), "plain", accumulation=2),
}


two_ranks = partial(Loop, ranks=2)

# -- DDP -------------------------------------------------------------------------------------------------------------


def log(*_: Any) -> None:
    dist.all_reduce(torch.ones(200))
    dist.barrier()


def ddp_whose_inner_model_is_watched(job: Job) -> None:
    model = DDP(inner := job.net())
    train(job, model, adamw(model), watched=inner)


def ddp_with_uneven_inputs(job: Job) -> None:
    """Rank 0 has one batch more than rank 1 (join)."""
    optimizer = adamw(model := DDP(job.net()))
    with job.watch(model, optimizer), model.join():
        for step in range(STEPS + (job.rank == 0)):
            error(model, *job.batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()


def ddp_that_averages_later(job: Job) -> None:
    """Updates of each rank between averages of the parameters (PostLocalSGDOptimizer)."""
    model = DDP(job.net())
    own = [dist.new_group([rank]) for rank in range(job.ranks)][job.rank]
    model.register_comm_hook(PostLocalSGDState(None, own, start_localSGD_iter=1), post_localSGD_hook)
    train(job, model, PostLocalSGDOptimizer(sgd(model), PeriodicModelAverager(period=4, warmup_steps=1)))


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
    "ddp, sums in fp16": two_ranks(
        ddp(prepare=lambda m: m.register_comm_hook(None, default_hooks.fp16_compress_hook)), "plain"
    ),
    "ddp with rprop": two_ranks(ddp(of(optim.Rprop, lr=1e-3)), "rprop"),
    "ddp with muon": two_ranks(ddp(both_kinds), "muon beside adamw"),
    "zero redundancy": two_ranks(ddp(zero), "plain"),
    "ddp of an adapter": two_ranks(ddp(adamw, Lora), "lora"),
    "ddp with batch normalization": two_ranks(ddp(adamw, normalized)),
    "ddp with statistics of each rank": two_ranks(usual(make=normalized, wrap=partial(DDP, broadcast_buffers=False))),
    "ddp with dropout of each rank": two_ranks(
        ddp(
            change=lambda m: m.insert(2, nn.Dropout(0.3)),
            prepare=lambda _: torch.manual_seed(dist.get_rank()),  # other masks on each rank
        )
    ),
    "ddp that leaves out an expert": two_ranks(
        ddp(change=lambda m: DDP._set_params_and_buffers_to_ignore_for_model(m, ["0.weight", "0.bias"]))
    ),
    "ddp whose unused experts are found": two_ranks(usual(make=Experts, wrap=unused)),
    "ddp with metrics": two_ranks(ddp(after=log), "plain"),
    "ddp with a checkpoint": two_ranks(ddp(change=recompute), "plain"),
    "ddp whose inner model is watched": two_ranks(ddp_whose_inner_model_is_watched, "plain"),
    "ddp with uneven inputs": two_ranks(ddp_with_uneven_inputs),
    "ddp that averages later": two_ranks(ddp_that_averages_later),
}


# -- data parallelism by hand ----------------------------------------------------------------------------------------


def average_gradients(model: Any, *_: Any) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def average_now_and_then(model: Any, _optimizer: Any, step: int) -> None:
    """Averages parameters after each third update (local SGD)."""
    for parameter in model.parameters() if step % 3 == 2 else ():
        dist.all_reduce(parameter.data)
        parameter.data /= dist.get_world_size()


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


def two_trainings(job: Job) -> None:
    """Each rank trains a model of its own, with another learning rate."""
    model = Job(job.rank).net()
    train(job, model, of(optim.AdamW, lr=1e-3 * (1 + job.rank))(model))


HONEST |= {
    "reduced by hand": two_ranks(usual(before=average_gradients), "plain"),
    "averaged now and then": two_ranks(usual(after=average_now_and_then)),
    "partitioned by hand": two_ranks(partitioned_by_hand, "plain"),
    "two trainings": two_ranks(two_trainings),
}

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
    styles = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), styles)


HONEST |= {
    "tensor parallel": two_ranks(
        usual(
            make=of_layers(linear(WIDTH, 32), nn.Tanh, linear(32, OUT), linear(OUT, OUT)), wrap=split,
            batch=lambda job, step, _: [job.draw(step, 16, WIDTH)],
        )
    ),
    "experts of each rank": two_ranks(
        usual(
            make=of_layers(linear(WIDTH, WIDTH), nn.Tanh, linear(WIDTH, OUT)),
            before=lambda model, *_: average_gradients(model[0]),
        )
    ),
}  # fmt: skip
