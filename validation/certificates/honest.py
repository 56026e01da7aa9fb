"""Honest loops of one process: training as it is usually written. None of them has a failure to name."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import zerobench

from .loops import OUT, STEPS, WIDTH, Job, Loop, adamw, error, train

HONEST: dict[str, Loop] = {}
"""Name -> loop."""


def honest(
    reference: str = "", ranks: int = 1, **expected: Any
) -> Callable[[Callable[[Job], Any]], Callable[[Job], Any]]:
    """Puts a function into the table under its name."""

    def put(function: Callable[[Job], Any]) -> Callable[[Job], Any]:
        HONEST[function.__name__.replace("_", " ")] = Loop(function, ranks, reference, expected)
        return function

    return put


# -- optimizers and their calls ------------------------------------------------------------------------------


def of_kind(kind: Callable[..., Any], lr: float, job: Job, micro: int = 1, **options: Any) -> None:
    """Trains with an optimizer."""
    model = job.net()
    train(job, model, kind(model.parameters(), lr=lr, **options), micro=micro)


HONEST |= {
    "plain": Loop(partial(of_kind, optim.AdamW, 1e-2), expected={"accumulation": 1}),
    "plain again": Loop(partial(of_kind, optim.AdamW, 1e-2), reference="plain"),
    "fused": Loop(partial(of_kind, optim.AdamW, 1e-2, fused=True), reference="plain"),
    "for each parameter": Loop(partial(of_kind, optim.AdamW, 1e-2, foreach=False), reference="plain"),
    "four micro-batches": Loop(partial(of_kind, optim.AdamW, 1e-2, micro=4), 1, "plain", {"accumulation": 4}),
    "sgd": Loop(partial(of_kind, optim.SGD, 0.1)),
    "sgd, default rate of a trainer": Loop(partial(of_kind, optim.SGD, 5e-5)),
    "sgd with momentum": Loop(partial(of_kind, optim.SGD, 0.1, momentum=0.9, nesterov=True)),
    "sgd, micro-batches": Loop(partial(of_kind, optim.SGD, 0.1, micro=2), reference="sgd"),
    "rmsprop": Loop(partial(of_kind, optim.RMSprop, 1e-3, centered=True)),
    "adagrad": Loop(partial(of_kind, optim.Adagrad, 1e-2)),
    "adadelta": Loop(partial(of_kind, optim.Adadelta, 1.0)),
    "adafactor": Loop(partial(of_kind, optim.Adafactor, 1e-2)),
    "rprop": Loop(partial(of_kind, optim.Rprop, 1e-3)),
    "amsgrad": Loop(partial(of_kind, optim.Adam, 1e-3, amsgrad=True)),
}


def muon(job: Job, micro: int) -> None:
    """Trains matrices with Muon."""
    torch.manual_seed(job.seed)
    layers = [nn.Linear(WIDTH, 128, bias=False), nn.Tanh(), nn.Linear(128, 128, bias=False), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(128, OUT, bias=False))
    train(job, model, optim.Muon(model.parameters(), lr=1e-2), micro=micro)


HONEST |= {
    "muon": Loop(partial(muon, micro=1)),
    "muon, micro-batches": Loop(partial(muon, micro=4), 1, "muon", {"accumulation": 4, "optimizer": "Muon"}),
}


@honest(optimizer={"2.weight": "AdamW", "*.weight": "Muon", "*": "AdamW"})
def muon_beside_adamw(job: Job) -> None:
    """Matrices have Muon, the rest AdamW; one after the other steps."""
    model = job.net()
    sides = [[p for p in model.parameters() if (p.dim() == 2) is is_matrix] for is_matrix in (True, False)]
    matrices, rest = optim.Muon(sides[0], lr=1e-2), optim.AdamW(sides[1], lr=1e-2)
    with job.watch(model, [matrices, rest]):
        for step in range(STEPS):
            error(model, *job.batch(step)).backward()
            for one in (matrices, rest):
                one.step()
                one.zero_grad()


def by_closure(job: Job, kind: str) -> None:
    """Gives the optimizer's step a function."""
    model = job.net()
    options: dict[str, Any] = {"line_search_fn": "strong_wolfe"} if kind == "line search" else {}
    is_lbfgs = kind in ("lbfgs", "line search", "lbfgs by grad")
    optimizer = optim.LBFGS(model.parameters(), max_iter=4, **options) if is_lbfgs else adamw(model)
    with job.watch(model, optimizer):
        for step in range(STEPS):
            (x,) = job.batch(step)
            if kind == "loss":
                optimizer.zero_grad()
                loss = error(model, x)
                loss.backward()
                optimizer.step(lambda loss=loss: loss)
                continue

            def closure(x: torch.Tensor = x) -> torch.Tensor:
                optimizer.zero_grad()
                loss = error(model, x)
                if "grad" in kind:
                    for parameter, gradient in zip(
                        model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
                    ):
                        parameter.grad = gradient
                else:
                    loss.backward()
                return loss

            optimizer.step(closure)


HONEST |= {
    "closure that returns a loss": Loop(partial(by_closure, kind="loss"), 1, "plain", {"accumulation": 1}),
    "closure": Loop(partial(by_closure, kind="closure"), reference="plain"),
    "closure with autograd.grad": Loop(partial(by_closure, kind="grad")),
    "lbfgs": Loop(partial(by_closure, kind="lbfgs")),
    "lbfgs with line search": Loop(partial(by_closure, kind="line search")),
    "lbfgs with autograd.grad": Loop(partial(by_closure, kind="lbfgs by grad")),
}


@honest()
def sharpness_aware(job: Job) -> None:
    """The gradient is that of a point nearby (SAM)."""
    model = job.net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with job.watch(model, optimizer):
        for step in range(STEPS):
            (x,) = job.batch(step)
            error(model, x).backward()
            moves = [0.05 * p.grad / (p.grad.norm() + 1e-12) for p in model.parameters()]
            with torch.no_grad():
                torch._foreach_add_(list(model.parameters()), moves)
            optimizer.zero_grad()
            error(model, x).backward()
            with torch.no_grad():
                torch._foreach_sub_(list(model.parameters()), moves)
            optimizer.step()
            optimizer.zero_grad()


@honest()
def update_in_backward(job: Job) -> None:
    """Each parameter has its own optimizer, which steps in backward, as in torch's tutorial."""
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


# -- learning rates, groups, gradients -----------------------------------------------------------------------


def scheduled(job: Job, schedule: Callable[[Any], Any], lr: float = 1e-2) -> None:
    """Steps a schedule after each update."""
    model = job.net()
    optimizer = adamw(model, lr)
    scheduler = schedule(optimizer)
    train(job, model, optimizer, after=lambda _: scheduler.step())


HONEST |= {
    "warm-up from zero": Loop(partial(scheduled, schedule=lambda o: LambdaLR(o, lambda step: step / 3))),
    "long warm-up": Loop(partial(scheduled, schedule=lambda o: LambdaLR(o, lambda step: (step + 1) / 10_000), lr=3e-4)),
    "learning rate that halves": Loop(partial(scheduled, schedule=lambda o: LambdaLR(o, lambda step: 0.5**step))),
    "cosine": Loop(partial(scheduled, schedule=lambda o: CosineAnnealingLR(o, 100))),
    "one cycle": Loop(partial(scheduled, schedule=lambda o: OneCycleLR(o, 1e-2, total_steps=100))),
}


def clipped(job: Job, clip: float, by: Callable[[Any], Any] | None = None) -> None:
    """Clips gradients."""
    model = job.net()
    before = (lambda _: by(model)) if by else lambda _: None
    train(job, model, adamw(model), clip=None if by else clip, before=before)


def adaptively_clipped(model: nn.Module) -> None:
    """Clips each gradient by the norm of its parameter."""
    for parameter in model.parameters():
        limit = 0.01 * parameter.detach().norm().clamp_min(1e-3)
        parameter.grad.mul_((limit / (parameter.grad.norm() + 1e-6)).clamp(max=1))


HONEST |= {
    "clipped": Loop(partial(clipped, clip=0.05), 1, "", {"clip": 0.05}),
    "never clipped": Loop(partial(clipped, clip=50.0), 1, "plain", {"clip": 50.0}),
    "clipped by value": Loop(
        partial(clipped, clip=0, by=lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01))
    ),
    "clipped adaptively": Loop(partial(clipped, clip=0, by=adaptively_clipped)),
    "noise on gradients": Loop(
        partial(clipped, clip=0, by=lambda model: [p.grad.add_(1e-3 * torch.randn_like(p)) for p in model.parameters()])
    ),
}


def groups(job: Job) -> None:
    """Matrices decay, vectors do not, and the head has another learning rate."""
    model = job.net()
    rest = list(model[:3].parameters())
    groups = [
        {"params": [p for p in rest if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
        {"params": model[3].parameters(), "lr": 1e-3},
    ]
    train(job, model, optim.AdamW(groups, lr=1e-2))


HONEST["groups"] = Loop(groups)


def divided_by_tokens(job: Job, micro: int) -> None:
    """Losses are sums over tokens, and gradients are divided by their number before clipping."""
    model = job.net()
    optimizer = adamw(model)
    with job.watch(model, optimizer):
        for step in range(STEPS):
            for x in job.batch(step, micro):
                (model(x) - x[:, :OUT]).square().sum().backward()
            for parameter in model.parameters():
                parameter.grad /= 16 * OUT
            clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            optimizer.zero_grad()


HONEST["divided by tokens"] = Loop(partial(divided_by_tokens, micro=2), 1, "never clipped", {"clip": 5.0})


@honest(accumulation=2)
def tokens_of_the_whole_batch(job: Job) -> None:
    """Each micro-batch has another number of tokens, and all are divided by that of the batch."""
    model = job.net()
    optimizer = adamw(model)
    with job.watch(model, optimizer):
        for step in range(STEPS):
            (x,) = job.batch(step)
            for part in (x[:4], x[4:]):
                ((model(part) - part[:, :OUT]).square().sum() / (16 * OUT)).backward()
            optimizer.step()
            optimizer.zero_grad()


def uneven(job: Job, counts: tuple[int, ...]) -> None:
    """Each update has its own number of micro-batches, as at the end of an epoch."""
    model = job.net()
    optimizer = adamw(model)
    with job.watch(model, optimizer):
        for step, count in enumerate(counts):
            for x in job.batch(step, count):
                (error(model, x) / count).backward()
            optimizer.step()
            optimizer.zero_grad()


HONEST |= {
    "epochs of six micro-batches": Loop(partial(uneven, counts=(4, 2, 4, 2, 4)), 1, "", {"accumulation": 4}),
    "epochs of six, from a short one": Loop(partial(uneven, counts=(2, 4, 2, 4, 2)), 1, "", {"accumulation": 4}),
    "epochs of five micro-batches": Loop(partial(uneven, counts=(4, 1, 4, 1)), 1, "plain", {"accumulation": 4}),
}


@honest(reference="plain")
def zero_grad_in_the_beginning(job: Job) -> None:
    """Gradients are zeroed before each forward, in place."""
    model = job.net()
    optimizer = adamw(model)
    with job.watch(model, optimizer):
        for step in range(STEPS):
            model.zero_grad(set_to_none=False)
            error(model, *job.batch(step)).backward()
            optimizer.step()


@honest(reference="plain")
def evaluated(job: Job) -> None:
    """After each update the model is evaluated, without gradients."""
    model = job.net()

    def evaluate(step: int) -> None:
        model.eval()
        with torch.inference_mode():
            error(model, job.draw(step + 500, 4, WIDTH))
        model.train()

    train(job, model, adamw(model), after=evaluate)


# -- parts of a model ------------------------------------------------------------------------------------------


class Lora(nn.Module):
    """A frozen layer and its adapter, whose second matrix begins at zero."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(WIDTH, OUT).to(dtype).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(4, WIDTH) / 4), nn.Parameter(torch.zeros(OUT, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the layer's output plus the adapter's."""
        return self.base(x.to(self.base.weight.dtype)).float() + x @ self.a.T @ self.b.T


def lora(job: Job, dtype: torch.dtype = torch.float32, gives_all: bool = False) -> None:
    """Trains the adapter; `gives_all`: the optimizer gets the frozen parameters, too."""
    model = Lora(job.seed, dtype)
    train(job, model, optim.AdamW([p for p in model.parameters() if p.requires_grad or gives_all], lr=1e-2))


HONEST |= {
    "lora": Loop(lora),
    "lora, all parameters in the optimizer": Loop(partial(lora, gives_all=True), reference="lora"),
    "lora on a bf16 base": Loop(partial(lora, dtype=torch.bfloat16)),
    "lora on a bf16 base in the optimizer": Loop(partial(lora, dtype=torch.bfloat16, gives_all=True)),
}


@honest()
def frozen_backbone(job: Job) -> None:
    """Only the head is trained."""
    model = job.net()
    model[:3].requires_grad_(False)
    train(job, model, adamw(model))


@honest()
def linear_probe(job: Job) -> None:
    """The backbone runs without gradients, and its parameters still ask for them."""
    model = job.net()

    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            features = model[:3](x)
        return (model[3](features) - x[:, :OUT]).square().mean()

    model.forward = lambda x: x
    with job.watch(model, optimizer := optim.AdamW(model[3].parameters(), lr=1e-2)):
        for step in range(STEPS):
            (x,) = job.batch(step)
            loss(model, model(x)).backward()
            optimizer.step()
            optimizer.zero_grad()


@honest()
def biases_alone(job: Job) -> None:
    """Only biases are trained."""
    model = job.net()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("bias" in name)
    train(job, model, adamw(model))


@honest()
def gradual_unfreezing(job: Job) -> None:
    """The first layer is trained from the third update on."""
    model = job.net()
    model[0].requires_grad_(False)
    train(job, model, adamw(model), after=lambda step: model[0].requires_grad_(step >= 1))


@honest()
def tied(job: Job) -> None:
    """A language model's head has the matrix of its embedding."""
    torch.manual_seed(job.seed)
    model = nn.Sequential(nn.Embedding(40, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 40, bias=False))
    model[3].weight = model[0].weight
    train(job, model, adamw(model), loss=language)


def language(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Returns the loss of 40 tokens of text that is made from a batch."""
    tokens = (x.abs() * 1000).long() % 40
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


@honest()
def sparse_embedding(job: Job) -> None:
    """An embedding has sparse gradients and an optimizer for them."""
    torch.manual_seed(job.seed)
    model = nn.Sequential(nn.Embedding(200, WIDTH, sparse=True), nn.Linear(WIDTH, 40))
    both = [optim.SparseAdam(model[0].parameters(), lr=1e-2), adamw(model[1])]
    with job.watch(model, both):
        for step in range(STEPS):
            language(model, *job.batch(step)).backward()
            for one in both:
                one.step()
                one.zero_grad()


class Experts(nn.Module):
    """Rows go to one of three experts; `route` picks it."""

    def __init__(self, seed: int, route: Callable[[torch.Tensor], int]) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.experts, self.route = nn.ModuleList(nn.Linear(WIDTH, OUT) for _ in range(3)), route

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the output of one expert."""
        return self.experts[self.route(x)](x)


HONEST |= {
    "an expert that is never used": Loop(
        lambda job: train(job, m := Experts(job.seed, lambda x: int(x[0, 0] > 0)), adamw(m))
    ),
    "layers left out by chance": Loop(
        lambda job: train(job, m := Experts(job.seed, lambda x: int(x[0, 0] > 0) + int(x[1, 0] > 0)), adamw(m))
    ),
}


class Gate(nn.Module):
    """A wrapper with a weight of its own, whose inner layer is called `module`."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self.my_module = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.weight, self.bias = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the gated output."""
        return x + self.bias + self.weight * self.my_module(self.module(x).tanh())


HONEST["names that collide"] = Loop(lambda job: train(job, m := nn.Sequential(Gate(), Gate(), nn.Linear(WIDTH, OUT)), adamw(m)))


def normalized(job: Job, lr: float = 0.05, wrap: Callable[..., Any] = lambda layer: layer) -> None:
    """Trains convolutions before BatchNorm, whose biases have gradients of rounding alone."""
    torch.manual_seed(job.seed)
    layers = [nn.Unflatten(1, (1, 4, 4)), wrap(nn.Conv2d(1, 8, 3)), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(32, OUT))
    train(job, model, optim.SGD(model.parameters(), lr=lr, momentum=0.9))


HONEST |= {
    "batch normalization": Loop(normalized),
    "batch normalization in a warm-up": Loop(partial(normalized, lr=2e-5)),
    "spectral normalization": Loop(partial(normalized, wrap=spectral_norm)),
    "weight normalization": Loop(partial(normalized, wrap=weight_norm)),
}


@honest()
def batch_normalization_of_a_layer(job: Job) -> None:
    """BatchNorm follows a linear layer."""
    torch.manual_seed(job.seed)
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, OUT))
    train(job, model, adamw(model))


@honest()
def large_bias_in_a_warm_up(job: Job) -> None:
    """A loss of pairs has a temperature, and a bias of -10 that a small learning rate does not move."""

    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.t, self.b = (
                nn.Linear(WIDTH, 8),
                nn.Parameter(torch.tensor(2.3)),
                nn.Parameter(torch.tensor(-10.0)),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            z = F.normalize(self.a(x))
            return -F.logsigmoid((2 * torch.eye(len(x)) - 1) * (z @ z.T * self.t.exp() + self.b)).mean()

    torch.manual_seed(job.seed)
    model = Pairs()
    optimizer = adamw(model, 1e-3, weight_decay=0)
    schedule = LambdaLR(optimizer, lambda step: min(1, step / 6500))
    train(job, model, optimizer, loss=lambda model, x: model(x), after=lambda _: schedule.step())


@honest()
def dropout(job: Job) -> None:
    """Half of the activations are left out."""
    model = job.net()
    model.insert(2, nn.Dropout(0.5))
    train(job, model, adamw(model))


@honest()
def recurrent(job: Job) -> None:
    """Backward through time is cut after four positions, each with its own backward."""
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


@honest()
def pruned(job: Job) -> None:
    """Half of the first layer stays at zero: its gradients are masked, and nothing decays."""
    model = job.net()
    mask = (job.draw(900, *model[0].weight.shape) > 0).float()
    model[0].weight.data *= mask
    model[0].weight.register_hook(lambda gradient: gradient * mask)
    train(job, model, adamw(model, weight_decay=0))


@honest()
def double_precision(job: Job) -> None:
    """Everything is float64."""
    model = job.net().double()
    train(job, model, adamw(model), loss=lambda model, x: error(model, x.double()))


# -- copies of a model, several losses, several models ---------------------------------------------------------


@honest(reference="plain")
def average_of_weights(job: Job) -> None:
    """A copy follows the parameters (EMA)."""
    model = job.net()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    train(job, model, adamw(model), after=lambda _: average.update_parameters(model))


class Target(nn.Module):
    """Two copies of a network in one module; the second is the target, whose parameters still ask for gradients."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.online, self.target = net, copy.deepcopy(net)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the error of temporal differences."""
        with torch.no_grad():
            goal = x[:, 0] + 0.9 * self.target(x).amax(-1)
        return (self.online(x)[:, 0] - goal).square().mean()

    def follow(self, share: float) -> None:
        """Moves the target."""
        with torch.no_grad():
            for own, other in zip(self.target.parameters(), self.online.parameters(), strict=True):
                own.lerp_(other, share)


def target_network(job: Job, every: int, share: float, frozen: bool = False) -> None:
    """Trains with a target that moves after some updates."""
    model = Target(job.net())
    model.target.requires_grad_(not frozen)
    optimizer = optim.Adam(model.online.parameters(), lr=1e-3)
    train(
        job, model, optimizer, loss=lambda model, x: model(x),
        after=lambda step: model.follow(share) if step % every == every - 1 else None,
    )  # fmt: skip


HONEST |= {
    "dqn": Loop(partial(target_network, every=100, share=1.0)),
    "dqn that copies its target": Loop(partial(target_network, every=2, share=1.0)),
    "target that follows": Loop(partial(target_network, every=1, share=0.05)),
    "frozen target that follows": Loop(partial(target_network, every=1, share=0.05, frozen=True)),
}


class ActorCritic(nn.Module):
    """A policy and its critic, which are trained by two optimizers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.actor, self.critic = nn.Linear(WIDTH, 2), nn.Linear(WIDTH + 2, 1)

    def forward(self, x: torch.Tensor, action: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the value of an action, by default the policy's."""
        return self.critic(torch.cat([x, self.actor(x).tanh() if action is None else action], -1))

    def evaluate(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the policy's log probabilities of the first action, as policies of libraries do."""
        return self.actor(x).log_softmax(-1)[:, 0]


def actor_critic(job: Job, delay: int, actor_last: bool) -> None:
    """Updates the policy once in `delay` steps (TD3); with 1 in each (DDPG)."""
    model = ActorCritic(job.seed)
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


HONEST |= {
    "ddpg": Loop(partial(actor_critic, delay=1, actor_last=True)),
    "td3": Loop(partial(actor_critic, delay=4, actor_last=False)),
    "td3, the actor ends a step": Loop(partial(actor_critic, delay=2, actor_last=True)),
}


@honest()
def policy_that_is_evaluated(job: Job) -> None:
    """The loss comes from a method of the model; the model itself is never called."""
    model = ActorCritic(job.seed)
    optimizer = optim.Adam(model.actor.parameters(), lr=1e-3)
    train(job, model, optimizer, loss=lambda model, x: -(model.evaluate(x) * x.sum(-1)).mean())


@honest()
def ppo(job: Job) -> None:
    """Several epochs over one rollout, in minibatches."""
    model = ActorCritic(job.seed)
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    with job.watch(model, optimizer):
        for step in range(2):
            with torch.no_grad():
                before = model.evaluate(*job.batch(step))
            for _ in range(2):
                for x, old in zip(job.batch(step, 2), before.chunk(2), strict=True):
                    ratio = (model.evaluate(x) - old).exp()
                    loss = -torch.min(ratio * x[:, 0], ratio.clamp(0.8, 1.2) * x[:, 0]).mean()
                    (loss + model(x).square().mean()).backward()
                    clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()


def gan(job: Job, critics: int, watches: str, penalty: bool = False) -> None:
    """Trains two networks; real and generated rows have a backward each. `watches`: which of them."""
    torch.manual_seed(job.seed)
    generator, critic = nn.Linear(4, WIDTH), nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 1))
    of_generator, of_critic = (optim.Adam(one.parameters(), lr=1e-3) for one in (generator, critic))
    model, optimizer = (critic, of_critic) if watches == "critic" else (generator, of_generator)
    with job.watch(model, optimizer):
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


HONEST |= {
    "gan, its critic watched": Loop(partial(gan, critics=1, watches="critic")),
    "gan, its generator watched": Loop(partial(gan, critics=1, watches="generator")),
    "wgan, five critic steps": Loop(partial(gan, critics=5, watches="generator")),
    "wgan with a gradient penalty": Loop(partial(gan, critics=1, watches="critic", penalty=True)),
}


@honest(accumulation=1)
def two_losses(job: Job) -> None:
    """One forward, and a backward for each of two losses."""
    model = job.net()
    optimizer = adamw(model)
    with job.watch(model, optimizer):
        for step in range(STEPS):
            y = model(*job.batch(step))
            y[:, 0].square().mean().backward(retain_graph=True)
            y[:, 1:].square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


@honest()
def unwatched_model_beside(job: Job) -> None:
    """A probe in bf16 learns from the model's outputs, with its own optimizer."""
    model, probe = job.net(), nn.Linear(OUT, 1).bfloat16()
    optimizer, other = adamw(model), optim.SGD(probe.parameters(), lr=0.1)
    with job.watch(model, optimizer):
        for step in range(STEPS):
            y = model(*job.batch(step))
            probe(y.detach().bfloat16()).float().square().mean().backward()
            other.step()
            other.zero_grad()
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


@honest(reference="plain")
def teacher_beside(job: Job) -> None:
    """The first loss is the usual one, and a frozen teacher adds nothing but its calls."""
    model, teacher = job.net(), job.net().requires_grad_(False)
    train(job, model, adamw(model), loss=lambda model, x: error(model, x) + 0 * teacher(x).mean())


@honest()
def preferences(job: Job) -> None:
    """A policy is called twice in a step, and a frozen copy of it, too (DPO)."""
    model = job.net()
    frozen = copy.deepcopy(model).requires_grad_(False)

    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        both = [model(y).log_softmax(-1)[:, 0] - frozen(y).log_softmax(-1)[:, 0] for y in (x, -x)]
        return -F.logsigmoid(both[0] - both[1]).mean()

    train(job, model, adamw(model), loss=loss)


@honest()
def inner_loop(job: Job) -> None:
    """The loss is that after an inner update (MAML)."""
    model = job.net()

    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        named = dict(model.named_parameters())
        inner = error(model, x)
        slopes = torch.autograd.grad(inner, list(named.values()), create_graph=True)
        moved = {name: p - 0.1 * slope for (name, p), slope in zip(named.items(), slopes, strict=True)}
        return (torch.func.functional_call(model, moved, x) - x[:, :OUT]).square().mean()

    train(job, model, adamw(model), loss=loss)


# -- precision ---------------------------------------------------------------------------------------------------


def autocast(model: Any, x: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Returns the loss of a forward in a narrow dtype."""
    with torch.autocast("cpu", dtype):
        y = model(x)
    return (y.float() - x[:, :OUT]).square().mean()


HONEST |= {
    "autocast": Loop(
        lambda job: train(job, m := job.net(), adamw(m), loss=autocast),
        1,
        "plain",
        {"computes": "bfloat16", "masters": "float32"},
    ),
    "autocast, micro-batches": Loop(
        lambda job: train(job, m := job.net(), adamw(m), loss=autocast, micro=2), 1, "plain"
    ),
}


def scaled(job: Job, scale: float, fused: bool = False, clip: float | None = None, steps: int = STEPS) -> None:
    """Trains in fp16 with a GradScaler; from a high factor it skips its first updates."""
    model = job.net()
    optimizer, scaler = adamw(model, fused=fused), torch.amp.GradScaler("cpu", init_scale=scale)
    with job.watch(model, optimizer):
        for step in range(steps):
            scaler.scale(autocast(model, *job.batch(step), dtype=torch.float16)).backward()
            if clip is not None:
                scaler.unscale_(optimizer)
                clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


HONEST |= {
    "scaler": Loop(partial(scaled, scale=256.0), reference="plain"),
    "scaler with clipping": Loop(partial(scaled, scale=256.0, clip=0.05), 1, "clipped", {"clip": 0.05}),
    "scaler that calibrates": Loop(partial(scaled, scale=2.0**32)),
    "scaler that calibrates, fused": Loop(partial(scaled, scale=2.0**32, fused=True)),
    "scaler that skips two updates": Loop(partial(scaled, scale=2.0**19), reference="plain"),
}


def masters(job: Job, of_all: bool, moments: torch.dtype = torch.float32) -> None:
    """Updates fp32 copies of bf16 parameters; not `of_all`: the norm is fp32 itself, and updated in place (Apex)."""
    model = job.net()
    for layer in model if of_all else (model[0], model[3]):
        layer.bfloat16()
    model.forward = lambda x: model[3](model[2](model[1](model[0](x.bfloat16())).to(model[2].weight.dtype)).bfloat16())
    low = [p for p in model.parameters() if p.dtype == torch.bfloat16]
    copies = [p.detach().float().requires_grad_() for p in low]
    optimizer = optim.AdamW([*copies, *(p for p in model.parameters() if p.dtype == torch.float32)], lr=1e-2)

    def hand_over(_: int) -> None:
        for master, parameter in zip(copies, low, strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None

    def round_down(_: int) -> None:
        for master, parameter in zip(copies, low, strict=True):
            parameter.data.copy_(master)

    train(job, model, optimizer, before=hand_over, after=round_down)


HONEST |= {
    "masters": Loop(partial(masters, of_all=True), 1, "plain", {"masters": "float32", "computes": "bfloat16"}),
    "masters of some": Loop(partial(masters, of_all=False)),
}


class Kahan(optim.Optimizer):
    """SGD on bf16 parameters, with the rounding error of each update kept for the next one."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Updates all parameters."""
        for group in self.param_groups:
            for p in group["params"]:
                lost = self.state[p].setdefault("compensation", torch.zeros_like(p))
                lost.add_(p.grad, alpha=-group["lr"])
                before = p.clone()
                p.add_(lost)
                lost.add_(before - p)


class StochasticRounding(optim.Optimizer):
    """SGD on bf16 parameters, whose new values are rounded up or down by chance."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Updates all parameters."""
        for group in self.param_groups:
            for p in group["params"]:
                bits = (p.float() - group["lr"] * p.grad.float()).view(torch.int32)
                bits += torch.randint(1 << 16, bits.shape, dtype=torch.int32)
                p.copy_((bits & -65536).view(torch.float32))


def low(job: Job, kind: Any) -> None:
    """Trains parameters in bf16 by an optimizer that makes up for it."""
    model = job.net().bfloat16()
    train(job, model, kind(model.parameters(), lr=0.1), loss=lambda model, x: error(model, x.bfloat16()))


HONEST |= {
    "compensated bf16": Loop(partial(low, kind=Kahan)),
    "stochastic rounding": Loop(partial(low, kind=StochasticRounding)),
}


# -- what runs the model -------------------------------------------------------------------------------------------


def checkpointed(job: Job, reentrant: bool) -> None:
    """Recomputes activations."""
    model = job.net()
    first, rest = model[:2], model[2:]
    model.forward = lambda x: rest(checkpoint(first, x.requires_grad_(), use_reentrant=reentrant))
    train(job, model, adamw(model))


HONEST |= {
    "checkpoint": Loop(partial(checkpointed, reentrant=False), 1, "plain", {"accumulation": 1}),
    "reentrant checkpoint": Loop(partial(checkpointed, reentrant=True), 1, "plain", {"accumulation": 1}),
}


def compiled(job: Job, of: str) -> None:
    """Compiles the model or the optimizer's step."""
    torch.compiler.reset()
    model = job.net()
    optimizer = adamw(model)
    if of == "step":
        optimizer.step = torch.compile(optimizer.step, backend="eager")
    called = torch.compile(model, backend="aot_eager" if of == "graphs" else "eager") if of != "step" else model
    train(job, called, optimizer)


HONEST |= {f"compiled {of}": Loop(partial(compiled, of=of), reference="plain") for of in ("model", "graphs", "step")}


def ours(job: Job, strategy: str, micro: int = 1, clip: float | None = None, **options: Any) -> None:
    """Trains under our engine."""
    model = job.net()
    engine = zerobench.initialize(model, adamw(model), strategy=strategy, **options)
    train(job, engine, engine, micro=micro, clip=clip)


HONEST |= {name: Loop(partial(ours, strategy=name), reference="plain") for name in ("zero1", "zero2", "zero3")}


def trainer(job: Job, **options: Any) -> None:
    """Trains in transformers' Trainer."""
    import transformers

    torch.manual_seed(job.seed)
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    rows = [{"input_ids": (torch.arange(16) + i) % 64, "labels": (torch.arange(16) + i) % 64} for i in range(64)]
    with TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder, use_cpu=True, max_steps=STEPS, report_to=[], per_device_train_batch_size=2,
            save_strategy="no", logging_strategy="no", disable_tqdm=True, **options,
        )  # fmt: skip
        callback = zerobench.trainer_callback(verify=zerobench.ExpectedTraining(**job.expected), timeout_s=30)
        transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[callback]).train()
    job.certificate = callback.watch.certificate


HONEST |= {
    "trainer": Loop(trainer),
    "trainer that accumulates": Loop(
        partial(trainer, gradient_accumulation_steps=2), 1, "", {"accumulation": 2, "clip": 1.0}
    ),
    "trainer with sgd": Loop(partial(trainer, optim="sgd")),
    "trainer with adafactor": Loop(partial(trainer, optim="adafactor", learning_rate=1e-3)),
    "trainer in bf16": Loop(partial(trainer, bf16=True, warmup_steps=3)),
}


def accelerated(job: Job, micro: int) -> None:
    """Trains with accelerate."""
    import accelerate

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
    "accelerate": Loop(partial(accelerated, micro=1), reference="plain"),
    "accelerate that accumulates": Loop(partial(accelerated, micro=2), 1, "plain", {"accumulation": 2}),
}


def skipping_bad_batches(job: Job) -> None:
    """An update whose norm is not finite is left out, as a guard of large runs does."""
    model = job.net()
    optimizer = adamw(model)
    with job.watch(model, optimizer):
        for step in range(STEPS + 1):
            loss = error(model, *job.batch(step)) * (math.inf if step == 1 else 1)
            loss.backward()
            if math.isfinite(float(clip_grad_norm_(model.parameters(), 50.0))):
                optimizer.step()
            optimizer.zero_grad()


HONEST["bad batches are left out"] = Loop(skipping_bad_batches)
