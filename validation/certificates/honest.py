"""Honest loops of one process: training as it is usually written. None of them has a failure to name."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import zerobench

from .loops import OUT, STEPS, WIDTH, Job, Loop, adamw, autocast, error, loop, nothing, of, row_of, sgd, train, usual

HONEST: dict[str, Loop] = {}
"""Name -> loop."""

honest = partial(row_of, HONEST, loop)

# -- optimizers and their calls ----------------------------------------------------------------------------------


def halves(model: nn.Module, first: Any, second: Any) -> list[Any]:
    """Returns two optimizers: of the matrices, and of the rest."""
    sides = [[p for p in model.parameters() if (p.dim() == 2) is is_matrix] for is_matrix in (True, False)]
    return [first(sides[0]), second(sides[1])]


def wide(job: Job) -> nn.Module:
    """Returns a network of matrices alone."""
    torch.manual_seed(job.seed)
    middle = [nn.Tanh(), nn.Linear(128, 128, bias=False), nn.Tanh()]
    return nn.Sequential(nn.Linear(WIDTH, 128, bias=False), *middle, nn.Linear(128, OUT, bias=False))


def square(model: Any, x: torch.Tensor) -> Any:
    """Returns the mean square of the outputs."""
    return model(x).square().mean()


def without_biases(job: Job) -> nn.Module:
    """Returns a network whose parameters are all matrices, or begin at 1."""
    torch.manual_seed(job.seed)
    return nn.Sequential(nn.Linear(WIDTH, 64, bias=False), nn.SiLU(), nn.RMSNorm(64), nn.Linear(64, OUT, bias=False))


def large(job: Job) -> nn.Module:
    """Returns a network of a large matrix."""
    torch.manual_seed(job.seed)
    return nn.Sequential(nn.Linear(WIDTH, 1024, bias=False), nn.Tanh(), nn.Linear(1024, 1024, bias=False))


def with_buffer(job: Job, drawn: int = 0) -> Any:
    """Returns a network that adds a fixed table to its inputs."""
    model = job.net()
    model[0].register_buffer("table", Job(job.seed).draw(950 + drawn, WIDTH))
    model[0].register_forward_pre_hook(lambda layer, inputs: inputs[0] + layer.table)
    return model


MUON = of(optim.Muon, lr=1e-2)
both_kinds = partial(halves, first=partial(optim.Muon, lr=1e-2), second=partial(optim.AdamW, lr=1e-2))

HONEST |= {
    "plain": loop(usual(), accumulation=1),
    "plain again": loop(usual(), "plain"),
    "without biases": loop(usual(of(optim.AdamW, lr=3e-4), without_biases)),
    "large": loop(usual(of(optim.AdamW, lr=1e-3), large, loss=square)),
    "with a buffer": loop(usual(make=with_buffer)),
    "fused": loop(usual(of(optim.AdamW, lr=1e-2, fused=True)), "plain"),
    "for each parameter": loop(usual(of(optim.AdamW, lr=1e-2, foreach=False)), "plain"),
    "four micro-batches": loop(usual(micro=4), "plain", accumulation=4),
    "sgd": loop(usual(sgd)),
    "sgd, micro-batches": loop(usual(sgd, micro=2), "sgd"),
    "sgd, default rate of a trainer": loop(usual(of(optim.SGD, lr=5e-5))),
    "sgd with momentum": loop(usual(of(optim.SGD, lr=0.1, momentum=0.9, nesterov=True))),
    "rmsprop": loop(usual(of(optim.RMSprop, lr=1e-3, centered=True))),
    "adadelta": loop(usual(of(optim.Adadelta, lr=1.0))),
    "adafactor": loop(usual(of(optim.Adafactor, lr=1e-2))),
    "rprop": loop(usual(of(optim.Rprop, lr=1e-3))),
    "muon": loop(usual(MUON, wide)),
    "muon, micro-batches": loop(usual(MUON, wide, micro=4), "muon", accumulation=4, optimizer="Muon"),
    "muon beside adamw": loop(usual(both_kinds), optimizer={"2.weight": "AdamW", "*.weight": "Muon", "*": "AdamW"}),
}


def by_closure(job: Job, kind: str, gradients: str = "") -> None:
    """Gives the optimizer's step a function."""
    model = job.net()
    options: dict[str, Any] = {"line_search_fn": "strong_wolfe"} if kind == "line search" else {}
    optimizer = adamw(model) if kind == "adamw" else optim.LBFGS(model.parameters(), max_iter=4, **options)
    with job.watch(model, optimizer):
        for step in range(STEPS):

            def closure(step: int = step) -> Any:
                optimizer.zero_grad()
                loss = error(model, *job.batch(step))
                if gradients != "grad":
                    loss.backward()
                    return loss
                all_of = list(model.parameters())
                for parameter, gradient in zip(all_of, torch.autograd.grad(loss, all_of), strict=True):
                    parameter.grad = gradient
                return loss

            loss = closure() if gradients == "before" else None
            optimizer.step(closure if loss is None else partial(torch.clone, loss))


HONEST |= {
    "closure that returns a loss": loop(partial(by_closure, kind="adamw", gradients="before"), "plain", accumulation=1),
    "closure": loop(partial(by_closure, kind="adamw"), "plain"),
    "closure with autograd.grad": loop(partial(by_closure, kind="adamw", gradients="grad")),
    "lbfgs": loop(partial(by_closure, kind="lbfgs")),
    "lbfgs with line search": loop(partial(by_closure, kind="line search")),
    "lbfgs with autograd.grad": loop(partial(by_closure, kind="lbfgs", gradients="grad")),
}


@honest()
def sharpness_aware(job: Job) -> None:
    """The gradient is that of a point nearby (SAM)."""
    model = job.net()
    optimizer = sgd(model)
    with job.watch(model, optimizer):
        for step in range(STEPS):
            error(model, *job.batch(step)).backward()
            moves = [0.05 * p.grad / (p.grad.norm() + 1e-12) for p in model.parameters()]
            with torch.no_grad():
                torch._foreach_add_(list(model.parameters()), moves)
            optimizer.zero_grad()
            error(model, *job.batch(step)).backward()
            with torch.no_grad():
                torch._foreach_sub_(list(model.parameters()), moves)
            optimizer.step()
            optimizer.zero_grad()


@honest()
def update_by_hand(job: Job) -> None:
    """There is no optimizer."""
    model = job.net()
    with job.watch(model, None, ends="step") as watch:
        for step in range(STEPS):
            error(model, *job.batch(step)).backward()
            for parameter in model.parameters():
                parameter.data.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None
            watch.step()


@honest()
def update_in_backward(job: Job) -> None:
    """Each parameter has an optimizer, which steps in backward, as in torch's tutorial."""
    model = job.net()
    optimizers = {p: optim.AdamW([p], lr=1e-2) for p in model.parameters()}

    def update(parameter: Any) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    with job.watch(model, list(reversed(optimizers.values()))):
        for step in range(STEPS):
            error(model, *job.batch(step)).backward()


# -- learning rates, groups, gradients, micro-batches ----------------------------------------------------------------


def scheduled(job: Job, schedule: Callable[[Any], Any], lr: float = 1e-2) -> None:
    """Steps a schedule after each update."""
    optimizer = of(optim.AdamW, lr=lr)(model := job.net())
    scheduler = schedule(optimizer)
    train(job, model, optimizer, after=lambda *_: scheduler.step())


def rates(factor: Callable[[int], float]) -> Callable[[Any], Any]:
    """Returns a schedule of factors."""
    return lambda optimizer: LambdaLR(optimizer, factor)


def groups(model: Any) -> Any:
    """Returns an optimizer whose matrices decay; the head has another learning rate."""
    rest = list(model[:3].parameters())
    decays = {"params": [p for p in rest if p.dim() > 1], "weight_decay": 0.1}
    others = {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0}
    return optim.AdamW([decays, others, {"params": model[3].parameters(), "lr": 1e-3}], lr=1e-2)


def by_value(model: Any, *_: Any) -> None:
    """Clips values."""
    clip_grad_value_(model.parameters(), 0.01)


def adaptively(model: Any, *_: Any) -> None:
    """Clips each gradient by the norm of its parameter."""
    for parameter in model.parameters():
        limit = 0.01 * parameter.detach().norm().clamp_min(1e-3)
        parameter.grad.mul_((limit / (parameter.grad.norm() + 1e-6)).clamp(max=1))


def with_noise(model: Any, *_: Any) -> None:
    """Adds noise to gradients."""
    for parameter in model.parameters():
        parameter.grad.add_(1e-3 * torch.randn_like(parameter))


def by_tokens(model: Any, *_: Any) -> None:
    """Divides gradients of sums by the tokens of a batch."""
    for parameter in model.parameters():
        parameter.grad /= 16 * OUT


def sums(model: Any, x: torch.Tensor, micro: int = 1) -> Any:
    """Returns a sum over tokens, which the number of micro-batches does not divide."""
    return micro * (model(x) - x[:, :OUT]).square().sum()


def evaluated(model: Any, _optimizer: Any, step: int) -> None:
    """Evaluates the model."""
    model.eval()
    with torch.inference_mode():
        error(model, Job(1).draw(step, 4, WIDTH))
    model.train()


def unequal(job: Job, step: int, _: int) -> list[torch.Tensor]:
    """Returns micro-batches of 4 and 12 rows."""
    return list(job.batch(step)[0].split([4, 12]))


HONEST |= {
    "warm-up from zero": loop(partial(scheduled, schedule=rates(lambda step: step / 3))),
    "long warm-up": loop(partial(scheduled, schedule=rates(lambda step: (step + 1) / 10_000), lr=3e-4)),
    "learning rate that halves": loop(partial(scheduled, schedule=rates(lambda step: 0.5**step))),
    "cosine": loop(partial(scheduled, schedule=lambda optimizer: CosineAnnealingLR(optimizer, 100))),
    "one cycle": loop(partial(scheduled, schedule=lambda optimizer: OneCycleLR(optimizer, 1e-2, total_steps=100))),
    "groups": loop(usual(groups)),
    "clipped": loop(usual(clip=0.05), clip=0.05),
    "never clipped": loop(usual(clip=50.0), "plain", clip=50.0),
    "clipped by value": loop(usual(before=by_value)),
    "clipped adaptively": loop(usual(before=adaptively)),
    "noise on gradients": loop(usual(before=with_noise)),
    "divided by tokens": loop(
        usual(before=by_tokens, clip=5.0, loss=partial(sums, micro=2), micro=2), "never clipped", clip=5.0
    ),
    "micro-batches of other sizes": loop(
        usual(batch=unequal, micro=2, loss=lambda model, x: 2 * sums(model, x) / 128), "plain", accumulation=2
    ),
    "epochs of six micro-batches": loop(usual(micro=(4, 2, 4, 2, 4)), accumulation=4),
    "epochs of six, from a short one": loop(usual(micro=(2, 4, 2, 4, 2)), "plain", accumulation=4),
    "epochs of five micro-batches": loop(usual(micro=(4, 1, 4, 1)), "plain", accumulation=4),
    "evaluated": loop(usual(after=evaluated), "plain"),
    "gradients zeroed in place": loop(
        usual(after=lambda model, *_: model.zero_grad(set_to_none=False)), "plain"
    ),
}  # fmt: skip


@honest()
def bad_batches_are_left_out(job: Job) -> None:
    """An update whose norm is not finite is left out, as a guard of large runs does."""
    optimizer = adamw(model := job.net())
    with job.watch(model, optimizer):
        for step in range(STEPS + 1):
            (error(model, *job.batch(step)) * (math.inf if step == 1 else 1)).backward()
            if math.isfinite(float(clip_grad_norm_(model.parameters(), 50.0))):
                optimizer.step()
            optimizer.zero_grad()


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
    """Returns an optimizer of the trainable parameters."""
    return optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


LOW_LORA = partial(Lora, dtype=torch.bfloat16)


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
    """Rows go to one of three experts; `route` picks it."""

    def __init__(self, job: Job, route: Callable[[torch.Tensor], int] = lambda x: int(x[0, 0] > 0)) -> None:
        super().__init__()
        torch.manual_seed(job.seed)
        self.experts, self.route = nn.ModuleList(nn.Linear(WIDTH, OUT) for _ in range(3)), route

    def forward(self, x: torch.Tensor) -> Any:
        """Returns the output of one expert."""
        return self.experts[self.route(x)](x)


class Gate(nn.Module):
    """A wrapper with a weight of its own, whose inner layer is called `module`."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self.my_module = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.weight, self.bias = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> Any:
        """Returns the gated output."""
        return x + self.bias + self.weight * self.my_module(self.module(x).tanh())


def convolution(job: Job, wrap: Callable[..., Any] = lambda layer: layer) -> nn.Module:
    """Returns a convolution before BatchNorm, whose bias has gradients of rounding alone."""
    torch.manual_seed(job.seed)
    layers = [nn.Unflatten(1, (1, 4, 4)), wrap(nn.Conv2d(1, 8, 3)), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(32, OUT))


def normalized(job: Job) -> nn.Module:
    """Returns a linear layer before BatchNorm."""
    torch.manual_seed(job.seed)
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, OUT))


class Pairs(nn.Module):
    """A loss of pairs with a temperature, and a bias of -10 that a small learning rate does not move (SigLIP)."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        torch.manual_seed(job.seed)
        self.a, self.t = nn.Linear(WIDTH, 8), nn.Parameter(torch.tensor(2.3))
        self.b = nn.Parameter(torch.tensor(-10.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the loss."""
        z = F.normalize(self.a(x))
        return -F.logsigmoid((2 * torch.eye(len(x)) - 1) * (z @ z.T * self.t.exp() + self.b)).mean()


def prune(model: Any) -> None:
    """Keeps half of the first layer at zero."""
    mask = (Job(1).draw(900, *model[0].weight.shape) > 0).float()
    model[0].weight.data *= mask
    model[0].weight.register_hook(lambda gradient: gradient * mask)


def probe(model: Any) -> None:
    """Runs the backbone without gradients; its parameters still ask for them."""

    def forward(x: torch.Tensor) -> Any:
        with torch.no_grad():
            features = model[:3](x)
        return model[3](features)

    model.forward = forward


def output(model: Any, x: torch.Tensor) -> Any:
    """Returns the loss of a model that returns it."""
    return model(x)


def freeze(model: Any) -> None:
    """Freezes all but the head."""
    model[:3].requires_grad_(False)


MOMENTUM = of(optim.SGD, lr=0.05, momentum=0.9)
HONEST |= {
    "lora": loop(usual(trainable, Lora)),
    "lora, all parameters in the optimizer": loop(usual(adamw, Lora), "lora"),
    "lora on a bf16 base": loop(usual(trainable, LOW_LORA)),
    "lora on a bf16 base in the optimizer": loop(usual(adamw, LOW_LORA)),
    "frozen backbone": loop(usual(change=freeze)),
    "linear probe": loop(usual(lambda model: adamw(model[3]), change=probe)),
    "gradual unfreezing": loop(
        usual(change=freeze, after=lambda model, _, step: model[:3].requires_grad_(step >= 1))
    ),
    "biases alone": loop(
        usual(change=lambda m: [p.requires_grad_(p.dim() == 1) for p in m.parameters()])
    ),
    "tied": loop(usual(make=language_model, loss=language)),
    "sparse embedding": loop(
        usual(lambda m: [of(optim.SparseAdam, lr=1e-2)(m[0]), adamw(m[1:])], partial(language_model, sparse=True),
                loss=language)
    ),
    "an expert that is never used": loop(usual(make=Experts)),
    "experts of single steps": loop(
        usual(make=partial(Experts, route=lambda x: int(x[0, 0] > 0) + int(x[1, 0] > 0)))
    ),
    "names that collide": loop(
        usual(make=lambda job: nn.Sequential(Gate(), Gate(), nn.Linear(WIDTH, OUT)))
    ),
    "batch normalization": loop(usual(make=normalized)),
    "frozen statistics": loop(usual(make=normalized, change=lambda model: model[1].eval())),
    "convolution": loop(usual(MOMENTUM, convolution)),
    "convolution in a warm-up": loop(usual(of(optim.SGD, lr=2e-5, momentum=0.9), convolution)),
    "spectral normalization": loop(usual(MOMENTUM, partial(convolution, wrap=spectral_norm))),
    "weight normalization": loop(usual(MOMENTUM, partial(convolution, wrap=weight_norm))),
    "large bias in a warm-up": loop(usual(of(optim.AdamW, lr=2e-7, weight_decay=0), Pairs, loss=output)),
    "dropout": loop(usual(change=lambda model: model.insert(2, nn.Dropout(0.5)))),
    "pruned": loop(usual(of(optim.AdamW, lr=1e-2, weight_decay=0), change=prune)),
    "double precision": loop(
        usual(change=nn.Module.double, loss=lambda model, x: error(model, x.double()))
    ),
}  # fmt: skip


@honest()
def recurrent(job: Job) -> None:
    """Backward through time is cut after two positions, each part with its own backward."""
    torch.manual_seed(job.seed)
    model: Any = nn.LSTM(4, OUT, batch_first=True)
    optimizer = adamw(model)
    with job.watch(model, optimizer):
        for step in range(STEPS):
            state = None
            for x in job.batch(step)[0].unflatten(1, (4, 4)).chunk(2, 1):
                out, state = model(x, state)
                out.square().mean().backward()
                state = tuple(one.detach() for one in state)
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


# -- copies of a model, several losses, several models ---------------------------------------------------------------


class Target(nn.Module):
    """Two copies of a network in one module; the second is the target, whose parameters still ask for gradients."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.online, self.target = job.net(), job.net()

    def forward(self, x: torch.Tensor) -> Any:
        """Returns the error of temporal differences."""
        with torch.no_grad():
            goal = x[:, 0] + 0.9 * self.target(x).amax(-1)
        return (self.online(x)[:, 0] - goal).square().mean()


def follow(model: Any, _optimizer: Any, step: int, every: int = 1, share: float = 0.05) -> None:
    """Moves a target."""
    both = getattr(model, "module", model)
    if step % every == every - 1:
        for own, other in zip(both.target.parameters(), both.online.parameters(), strict=True):
            own.data.lerp_(other.detach(), share)


class ActorCritic(nn.Module):
    """A policy and its critic."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        torch.manual_seed(job.seed)
        self.actor, self.critic = nn.Linear(WIDTH, 2), nn.Linear(WIDTH + 2, 1)

    def forward(self, x: torch.Tensor, action: torch.Tensor | None = None) -> Any:
        """Returns the value of an action, by default the policy's."""
        return self.critic(torch.cat([x, self.actor(x).tanh() if action is None else action], -1))

    def evaluate(self, x: torch.Tensor) -> Any:
        """Returns the policy's log probabilities of the first action, as policies of libraries do."""
        return self.actor(x).log_softmax(-1)[:, 0]


def actor_critic(job: Job, delay: int, actor_last: bool) -> None:
    """Updates the policy once in `delay` steps (TD3); with 1 in each (DDPG)."""
    model = ActorCritic(job)
    of_critic, of_actor = (optim.Adam(one.parameters(), lr=1e-3) for one in (model.critic, model.actor))
    with job.watch(model, [of_critic, of_actor] if actor_last else [of_actor, of_critic]):
        for step in range(2 * STEPS):
            (x,) = job.batch(step)
            of_critic.zero_grad()
            (model(x, x[:, :2]) - x.sum(-1, True)).square().mean().backward()
            of_critic.step()
            if step % delay == delay - 1:
                of_actor.zero_grad()
                (-model(x)).mean().backward()
                of_actor.step()


def gan(job: Job, critics: int, watches: str, penalty: bool = False) -> None:
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
            if penalty:
                between = (x + made.detach()).requires_grad_()
                (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
                (slope.norm(2, 1) - 1).square().mean().backward()
            of_critic.step()
            if step % critics == critics - 1:
                of_generator.zero_grad()
                F.softplus(-critic(made)).mean().backward()
                of_generator.step()


def preferences(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Returns a loss of two calls of a policy and of a frozen one (DPO)."""
    frozen = Job(1).net().requires_grad_(False)
    both = [model(y).log_softmax(-1)[:, 0] - frozen(y).log_softmax(-1)[:, 0] for y in (x, -x)]
    return -F.logsigmoid(both[0] - both[1]).mean()


def inner_loop(model: Any, x: torch.Tensor) -> Any:
    """Returns the loss after an inner update (MAML)."""
    named = dict(model.named_parameters())
    slopes = torch.autograd.grad(error(model, x), list(named.values()), create_graph=True)
    moved = {name: p - 0.1 * slope for (name, p), slope in zip(named.items(), slopes, strict=True)}
    return (torch.func.functional_call(model, moved, x) - x[:, :OUT]).square().mean()


def by_teacher(model: Any, x: torch.Tensor) -> Any:
    """Returns the usual loss; a frozen teacher is called beside."""
    return error(model, x) + 0 * error(Job(1).net().requires_grad_(False), x)


ADAM = of(optim.Adam, lr=1e-3)
online = partial(usual, lambda model: ADAM(model.online), Target, loss=output)
HONEST |= {
    "dqn": loop(online()),
    "dqn that copies its target": loop(online(after=partial(follow, every=2, share=1.0))),
    "target that follows": loop(online(after=follow)),
    "frozen target that follows": loop(online(after=follow, change=lambda m: m.target.requires_grad_(False))),
    "ddpg": loop(partial(actor_critic, delay=1, actor_last=True)),
    "td3": loop(partial(actor_critic, delay=4, actor_last=False)),
    "td3, the actor ends a step": loop(partial(actor_critic, delay=2, actor_last=True)),
    "policy that is evaluated": loop(
        usual(lambda m: ADAM(m.actor), ActorCritic, loss=lambda m, x: -(m.evaluate(x) * x.sum(-1)).mean())
    ),
    "gan, its critic watched": loop(partial(gan, critics=1, watches="critic"), accumulation=1),
    "gan, its generator watched": loop(partial(gan, critics=1, watches="generator")),
    "wgan, five critic steps": loop(partial(gan, critics=5, watches="generator")),
    "wgan with a gradient penalty": loop(partial(gan, critics=1, watches="critic", penalty=True)),
    "preferences": loop(usual(loss=preferences)),
    "inner loop": loop(usual(loss=inner_loop)),
    "teacher beside": loop(usual(loss=by_teacher), "plain"),
}


@honest("plain")
def average_of_weights(job: Job) -> None:
    average = AveragedModel(model := job.net(), multi_avg_fn=get_ema_multi_avg_fn(0.9))
    train(job, model, adamw(model), after=lambda *_: average.update_parameters(model))


@honest()
def ppo(job: Job) -> None:
    """Two epochs over one rollout, in minibatches."""
    optimizer = ADAM(model := ActorCritic(job))
    with job.watch(model, optimizer):
        for step in range(2):
            with torch.no_grad():
                before = model.evaluate(*job.batch(step))
            for x, old in 2 * list(zip(job.batch(step, 2), before.chunk(2), strict=True)):
                ratio = (model.evaluate(x) - old).exp()
                loss = -torch.min(ratio * x[:, 0], ratio.clamp(0.8, 1.2) * x[:, 0]).mean()
                (loss + model(x).square().mean()).backward()
                clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()


@honest(accumulation=1)
def two_losses(job: Job) -> None:
    """One forward, and a backward for each of two losses."""
    optimizer = adamw(model := job.net())
    with job.watch(model, optimizer):
        for step in range(STEPS):
            y = model(*job.batch(step))
            y[:, 0].square().mean().backward(retain_graph=True)
            y[:, 1:].square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


@honest()
def unwatched_model_beside(job: Job) -> None:
    """A probe in bf16 learns from the model's outputs, with an optimizer of its own."""
    optimizer, other = adamw(model := job.net()), sgd(beside := nn.Linear(OUT, 1).bfloat16())
    with job.watch(model, optimizer):
        for step in range(STEPS):
            y = model(*job.batch(step))
            beside(y.detach().bfloat16()).float().square().mean().backward()
            other.step()
            other.zero_grad()
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


# -- precision -------------------------------------------------------------------------------------------------------


def masters(job: Job, of_all: bool) -> None:
    """Updates fp32 copies of bf16 parameters; not `of_all`: the norm is fp32 itself, and updated in place (Apex)."""
    model = job.net()
    for layer in model if of_all else (model[0], model[3]):
        layer.bfloat16()
    model.forward = lambda x: model[3](model[2](model[1](model[0](x.bfloat16())).to(model[2].weight.dtype)).bfloat16())
    low = [p for p in model.parameters() if p.dtype == torch.bfloat16]
    copies = [p.detach().float().requires_grad_() for p in low]

    def hand_over(*_: Any) -> None:
        for master, parameter in zip(copies, low, strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None

    def round_down(*_: Any) -> None:
        for master, parameter in zip(copies, low, strict=True):
            parameter.data.copy_(master)

    optimizer = optim.AdamW([*copies, *(p for p in model.parameters() if p.dtype == torch.float32)], lr=1e-2)
    train(job, model, optimizer, before=hand_over, after=round_down)


class Kahan(optim.Optimizer):
    """SGD on bf16 parameters, with the rounding error of each update kept for the next one."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates all parameters."""
        for p in self.param_groups[0]["params"]:
            lost = self.state[p].setdefault("compensation", torch.zeros_like(p))
            lost.add_(p.grad, alpha=-0.1)
            before = p.clone()
            p.add_(lost)
            lost.add_(before - p)


class StochasticRounding(optim.Optimizer):
    """SGD on bf16 parameters, whose new values are rounded up or down by chance."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates all parameters."""
        for p in self.param_groups[0]["params"]:
            bits = (p.float() - 0.1 * p.grad.float()).view(torch.int32)
            p.copy_(((bits + torch.randint(1 << 16, bits.shape, dtype=torch.int32)) & -65536).view(torch.float32))


def of_low(model: Any, x: torch.Tensor) -> Any:
    """Returns the loss of a model in bf16."""
    return error(lambda y: model(y.bfloat16()), x)


half = partial(usual, loss=partial(autocast, dtype=torch.float16))
low = partial(usual, change=nn.Module.bfloat16, loss=of_low)
HONEST |= {
    "autocast": loop(usual(loss=autocast), "plain", computes="bfloat16", masters="float32"),
    "autocast, micro-batches": loop(usual(loss=autocast, micro=2), "plain"),
    "scaler": loop(half(scale=256.0), "plain"),
    "scaler with clipping": loop(half(scale=256.0, clip=0.05), "clipped", clip=0.05),
    "scaler that calibrates": loop(half(scale=2.0**32)),
    "scaler that calibrates, fused": loop(half(of(optim.AdamW, lr=1e-2, fused=True), scale=2.0**32)),
    "scaler that skips two updates": loop(half(scale=2.0**19), "plain"),
    "masters": loop(partial(masters, of_all=True), "plain", masters="float32", computes="bfloat16"),
    "masters of some": loop(partial(masters, of_all=False)),
    "compensated bf16": loop(low(of(Kahan))),
    "stochastic rounding": loop(low(of(StochasticRounding))),
}

# -- libraries and compilers -----------------------------------------------------------------------------------------


def recompute(model: Any, reentrant: bool = False) -> None:
    """Recomputes activations of the first layers."""
    first, rest = model[:2], model[2:]
    model.forward = lambda x: rest(checkpoint(first, x.clone().requires_grad_(), use_reentrant=reentrant))


def compiled(job: Job, of_step: bool = False, backend: str = "eager") -> None:
    """Compiles the model or the optimizer's step."""
    torch.compiler.reset()
    optimizer: Any = adamw(model := job.net())
    if of_step:
        optimizer.step = torch.compile(optimizer.step, backend=backend)
    train(job, model if of_step else torch.compile(model, backend=backend), optimizer)


def ours(
    job: Job,
    strategy: str,
    change: Callable[[Any], Any] = nothing,
    options: Mapping[str, Any] | None = None,
    **how: Any,
) -> None:
    """Trains under our engine."""
    model = job.net()
    change(model)
    engine = zerobench.initialize(model, adamw(model), strategy=strategy, **(options or {}))
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
    """Trains in transformers' Trainer."""
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
    """Trains with accelerate."""
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
    "checkpoint": loop(usual(change=recompute), "plain", accumulation=1),
    "reentrant checkpoint": loop(usual(change=partial(recompute, reentrant=True)), "plain", accumulation=1),
    "compiled model": loop(compiled, "plain"),
    "compiled graphs": loop(partial(compiled, backend="aot_eager"), "plain"),
    "compiled step": loop(partial(compiled, of_step=True), "plain"),
    **{name: loop(partial(ours, strategy=name), "plain") for name in ("zero1", "zero2", "zero3")},
    "trainer": loop(trainer),
    "trainer that accumulates": loop(partial(trainer, gradient_accumulation_steps=2), accumulation=2, clip=1.0),
    "trainer with sgd": loop(partial(trainer, optim="sgd")),
    "trainer with adafactor": loop(partial(trainer, optim="adafactor", learning_rate=1e-3)),
    "trainer in bf16": loop(partial(trainer, bf16=True, warmup_steps=3)),
    "accelerate": loop(partial(accelerated, micro=1), "plain"),
    "accelerate that accumulates": loop(partial(accelerated, micro=2), "plain", accumulation=2),
}
