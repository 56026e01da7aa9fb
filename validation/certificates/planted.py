"""Loops with one planted failure each: mistakes that raise no error. A reference is the honest loop of one process that
was meant.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn, optim
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

from .honest import Lora, autocast, language
from .loops import OUT, STEPS, Job, Plant, adamw, error, train

PLANTED: dict[str, Plant] = {}
"""Name -> loop."""

PARAMETERS = r"reference: (parameters|losses)"
NO_ROW = r"(?!)"


def planted(
    causes: str, about: str = NO_ROW, reference: str = "plain", ranks: int = 1, **expected: Any
) -> Callable[[Callable[[Job], Any]], Callable[[Job], Any]]:
    """Puts a function into the table under its name."""

    def put(function: Callable[[Job], Any]) -> Callable[[Job], Any]:
        PLANTED[function.__name__.replace("_", " ")] = Plant(function, ranks, reference, expected, causes, about)
        return function

    return put


def updates_of(*names: str) -> str:
    """Returns the pattern of rows on the updates of some parameters, alone or among others."""
    return rf"update: updates of (all |.*\b({'|'.join(map(str, names))}))"


# -- gradients that do not arrive --------------------------------------------------------------------------------


def zeroed(job: Job, to_none: bool) -> None:
    """Gradients are zeroed between backward and the update."""
    model = job.net()
    optimizer = adamw(model)
    train(job, model, optimizer, before=lambda _: optimizer.zero_grad(set_to_none=to_none))


ARRIVES_NOT = r"(no gradient|gets? none|never changed|not reach|lost|missing|zeroed|→ 0\b)"
PLANTED |= {
    "gradients set to none before the update": Plant(
        partial(zeroed, to_none=True), 1, "plain", {}, rf"(update|norm|gradient).*{ARRIVES_NOT}", updates_of(0)
    ),
    "gradients zeroed before the update": Plant(
        partial(zeroed, to_none=False), 1, "plain", {}, rf"(update|norm|gradient).*{ARRIVES_NOT}", updates_of(0)
    ),
}


@planted(rf"3\.(weight|bias).*(in no optimizer|{ARRIVES_NOT})|in no optimizer", updates_of(3))
def head_replaced_after_the_optimizer_was_made(job: Job) -> None:
    """The head is another object than the optimizer has."""
    model = job.net()
    optimizer = adamw(model)
    model[3] = copy.deepcopy(model[3])
    train(job, model, optimizer)


@planted(r"0\.weight.*(in no optimizer|no gradient)|in no optimizer", updates_of("0.weight"))
def parameter_replaced_after_the_optimizer_was_made(job: Job) -> None:
    """A re-initialization makes a new parameter."""
    model = job.net()
    optimizer = adamw(model)
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    train(job, model, optimizer)


@planted(r"no gradient in the optimizer|another tensor|in no optimizer|gets? no", updates_of(0))
def optimizer_of_a_copy(job: Job) -> None:
    """The optimizer has the parameters of a copy."""
    model = job.net()
    train(job, model, adamw(copy.deepcopy(model)))


@planted(r"3\.(weight|bias).*in no optimizer|in no optimizer", updates_of(3))
def head_in_no_optimizer(job: Job) -> None:
    """The optimizer gets the backbone alone."""
    model = job.net()
    train(job, model, adamw(model[:3]))


@planted(r"3\.(weight|bias).*([23] times|two|several|more than one)", updates_of(3))
def head_in_two_optimizers(job: Job) -> None:
    """Two optimizers update the head."""
    model = job.net()
    both = [optim.SGD(model[3].parameters(), lr=1e-2), adamw(model)]
    with job.watch(model, both):
        for step in range(STEPS):
            error(model, *job.batch(step)).backward()
            for one in both:
                one.step()
            model.zero_grad()


@planted(rf"(0\.weight|0\.bias).*({ARRIVES_NOT}|no gradient)", updates_of(0))
def activation_detached(job: Job) -> None:
    """The graph is cut after the first layer."""
    model = job.net()
    model[1].register_forward_hook(lambda _module, _inputs, output: output.detach())
    train(job, model, adamw(model))


@planted(rf"(0\.weight|0\.bias).*({ARRIVES_NOT}|no gradient)", updates_of(0))
def no_grad_around_a_part(job: Job) -> None:
    """The first layers run under no_grad."""
    model = job.net()

    def forward(x: torch.Tensor) -> Any:
        with torch.no_grad():
            y = model[1](model[0](x))
        return model[3](model[2](y))

    model.forward = forward
    train(job, model, adamw(model))


@planted(r"(does not train|not trained|frozen|no gradient|trainable).*\b(a|b)\b|\b(a|b)\b.*(does not train|not trained|frozen|not trainable)",
         reference="lora")  # fmt: skip
def adapters_frozen_by_mistake(job: Job) -> None:
    """All of a model is frozen but a part of its base, which is trained in place of the adapters."""
    model = Lora(job.seed)
    model.requires_grad_(False)
    model.base.bias.requires_grad_(True)
    train(job, model, optim.AdamW([model.base.bias], lr=1e-2))


@planted(r"base.*(trains|train|reference)", r"update: trainable|parameters: trained|names", reference="lora")
def base_that_trains(job: Job) -> None:
    """The base of an adapter was not frozen."""
    model = Lora(job.seed).requires_grad_(True)
    train(job, model, adamw(model))


@planted(r"0\.weight.*(trains|reference)|3\.weight.*(trains|reference)|tied", reference="tied")
def weights_untied(job: Job) -> None:
    """The head's matrix begins equal to the embedding's, and is another parameter."""
    torch.manual_seed(job.seed)
    model = nn.Sequential(nn.Embedding(40, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 40, bias=False))
    model[3].weight = nn.Parameter(model[0].weight.detach().clone())
    train(job, model, adamw(model), loss=language)


@planted(
    r"(frozen|0\.(weight|bias)|requires no gradient).*(chang|differ|update)|values.*0\.",
    r"frozen",
    reference="frozen backbone",
)
def frozen_parameters_that_change(job: Job) -> None:
    """The backbone is frozen, and decayed by hand."""
    model = job.net()
    model[:3].requires_grad_(False)

    def decay(_: int) -> None:
        for parameter in model[:3].parameters():
            parameter.mul_(0.9)

    train(job, model, adamw(model), after=decay)


# -- accumulation and updates ------------------------------------------------------------------------------------


@planted(rf"accumulation: micro-batches|{PARAMETERS}|reference: norms", reference="sgd")
def loss_not_divided(job: Job) -> None:
    """The loss of each of four micro-batches is that of a batch of its own."""
    model = job.net()
    train(job, model, optim.SGD(model.parameters(), lr=0.1), micro=4, loss=lambda model, x: 4 * error(model, x))


@planted(r"accumulation: micro-batches", r"accumulation: micro-batches", accumulation=4)
def update_in_each_micro_batch(job: Job) -> None:
    """The update is indented by one level too much."""
    model = job.net()
    optimizer = adamw(model)
    with job.watch(model, optimizer):
        for step in range(STEPS):
            for x in job.batch(step, 4):
                (error(model, x) / 4).backward()
                optimizer.step()
                optimizer.zero_grad()


@planted(r"accumulation: micro-batches", r"accumulation: micro-batches", accumulation=4)
def accumulation_off_by_one(job: Job) -> None:
    """`step % 4 == 0` in place of `(step + 1) % 4 == 0`: the first update has one micro-batch."""
    model = job.net()
    optimizer = adamw(model)
    with job.watch(model, optimizer):
        for number in range(17):
            (error(model, job.batch(number // 4, 4)[number % 4]) / 4).backward()
            if number % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()


@planted(r"accumulation: micro-batches", r"accumulation: micro-batches", accumulation=4)
def three_micro_batches_of_four(job: Job) -> None:
    """A micro-batch is dropped."""
    model = job.net()
    optimizer = adamw(model)
    with job.watch(model, optimizer):
        for step in range(STEPS):
            for x in job.batch(step, 4)[:3]:
                (error(model, x) / 4).backward()
            optimizer.step()
            optimizer.zero_grad()


@planted(r"(stale|zeroed|accumulat|add|left|norm)", reference="sgd")
def gradients_never_zeroed(job: Job) -> None:
    """There is no zero_grad, so that all gradients since the beginning add up."""
    model = job.net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with job.watch(model, optimizer):
        for step in range(STEPS):
            error(model, *job.batch(step)).backward()
            optimizer.step()


@planted(r"2 times per step|second update|same gradient", updates_of(0))
def two_updates_of_one_gradient(job: Job) -> None:
    """The optimizer steps twice."""
    model = job.net()
    optimizer = adamw(model)
    with job.watch(model, optimizer, ends="step") as watch:
        for step in range(STEPS):
            error(model, *job.batch(step)).backward()
            optimizer.step()
            optimizer.step()
            optimizer.zero_grad()
            watch.step()


@planted(r"(same gradient|without a backward|no backward|2 times|micro-batches.*\b0\b)", updates_of(0))
def update_without_a_backward(job: Job) -> None:
    """A second update after each one uses its gradient again."""
    model = job.net()
    optimizer = adamw(model)
    with job.watch(model, optimizer):
        for step in range(STEPS):
            error(model, *job.batch(step)).backward()
            optimizer.step()
            model(*job.batch(step))
            optimizer.step()
            optimizer.zero_grad()


@planted(r"(never changed|learning rate|lr).*0|no change", updates_of(0))
def learning_rate_of_zero(job: Job) -> None:
    """The learning rate is 0 in every step."""
    model = job.net()
    train(job, model, adamw(model, 0.0, weight_decay=0))


def schedule_at(job: Job, after: bool) -> None:
    """A schedule steps in each of four micro-batches, or before the optimizer."""
    model = job.net()
    optimizer = adamw(model)
    schedule = LambdaLR(optimizer, lambda step: 0.5**step)
    with job.watch(model, optimizer):
        for step in range(STEPS):
            for x in job.batch(step, 4):
                (error(model, x) / 4).backward()
                if after:
                    schedule.step()
            if not after:
                schedule.step()
            optimizer.step()
            optimizer.zero_grad()


PLANTED |= {
    "schedule stepped in each micro-batch": Plant(
        partial(schedule_at, after=True),
        1,
        "learning rate that halves",
        {},
        r"learning rate|\blr\b|schedul",
        r"learning rate|\blr\b",
    ),
    "schedule stepped before the optimizer": Plant(
        partial(schedule_at, after=False),
        1,
        "learning rate that halves",
        {},
        r"learning rate|\blr\b|schedul",
        r"learning rate|\blr\b",
    ),
}


@planted(r"class of the optimizer", r"update: class", optimizer="AdamW")
def another_optimizer(job: Job) -> None:
    """A misspelled option fell back to SGD."""
    model = job.net()
    train(job, model, optim.SGD(model.parameters(), lr=1e-2))


@planted(PARAMETERS, reference="groups")
def decay_of_everything(job: Job) -> None:
    """Weight decay of vectors, too, and one learning rate."""
    model = job.net()
    train(job, model, adamw(model, weight_decay=0.1))


@planted(rf"{PARAMETERS}|learning rate|\blr\b")
def learning_rate_ten_times_too_high(job: Job) -> None:
    """A digit of the learning rate is missing."""
    model = job.net()
    train(job, model, adamw(model, 0.1))


@planted(rf"{PARAMETERS}|moments|betas")
def other_betas(job: Job) -> None:
    """Adam's second beta is not the reference's."""
    model = job.net()
    train(job, model, adamw(model, betas=(0.5, 0.5)))


@planted(PARAMETERS)
def update_whose_sign_is_wrong_in_one_layer(job: Job) -> None:
    """A layer's gradient is negated by a hook."""
    model = job.net()
    model[3].weight.register_hook(torch.neg)
    train(job, model, adamw(model))


@planted(r"states?|moments|reference: parameters after update [23]")
def states_lost_after_each_update(job: Job) -> None:
    """The optimizer is made anew in each step, as after a resume without its states."""
    model = job.net()
    optimizer = adamw(model)
    train(job, model, optimizer, after=lambda _: optimizer.state.clear())


@planted(r"initial values", r"reference: initial")
def another_initialization(job: Job) -> None:
    """The initial values are drawn again."""
    model = job.net()
    torch.manual_seed(job.seed + 1)
    model[0].reset_parameters()
    train(job, model, adamw(model))


@planted(r"reference: losses", r"reference: losses")
def other_data(job: Job) -> None:
    """Batches come in another order."""
    model = job.net()
    shifted = Job(job.seed + 1)
    train(job, model, adamw(model), loss=lambda model, x: error(model, shifted.batch(int(x.sum().abs() * 100))[0]))


# -- clipping ----------------------------------------------------------------------------------------------------

NORM = r"norm: .*(→|clip|at the update)"


@planted(NORM, r"norm: after", reference="clipped", clip=0.05)
def clipping_left_out(job: Job) -> None:
    """Nothing clips."""
    model = job.net()
    train(job, model, adamw(model))


@planted(NORM, r"norm: after", reference="clipped", clip=0.05)
def clipping_after_the_update(job: Job) -> None:
    """Gradients are clipped when they have been used."""
    model = job.net()
    train(job, model, adamw(model), after=lambda _: clip_grad_norm_(model.parameters(), 0.05))


@planted(NORM + r"|norm.*micro-batch", r"norm: after", reference="clipped", clip=0.05)
def clipping_of_each_parameter(job: Job) -> None:
    """Each parameter's gradient is clipped by its own norm."""
    model = job.net()
    train(job, model, adamw(model), before=lambda _: [clip_grad_norm_([p], 0.05) for p in model.parameters()])


@planted(NORM + r"|norm.*(each|every) micro-batch|reference: norms", r"norm: after", reference="clipped", clip=0.05)
def clipping_in_each_micro_batch(job: Job) -> None:
    """The running sum is clipped after each backward."""
    model = job.net()
    optimizer = adamw(model)
    with job.watch(model, optimizer):
        for step in range(STEPS):
            for x in job.batch(step, 4):
                (error(model, x) / 4).backward()
                clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()


@planted(NORM + r"|reference: (norms|parameters)", r"norm: after", reference="clipped", clip=0.05)
def clipping_of_scaled_gradients(job: Job) -> None:
    """A scaler's gradients are clipped before they are unscaled."""
    model = job.net()
    optimizer, scaler = adamw(model), torch.amp.GradScaler("cpu", init_scale=256.0)
    with job.watch(model, optimizer):
        for step in range(STEPS):
            scaler.scale(autocast(model, *job.batch(step), dtype=torch.float16)).backward()
            clip_grad_norm_(model.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


# -- numbers -------------------------------------------------------------------------------------------------------

FINITE = r"finite|\bnan\b|\binf\b"


@planted(FINITE, r"(update: updates of all)|finite")
def loss_that_is_not_a_number(job: Job) -> None:
    """The loss is the root of something negative."""
    model = job.net()
    train(job, model, adamw(model), loss=lambda model, x: (model(x) - 5).sqrt().mean())


@planted(FINITE, r"finite")
def gradients_that_are_infinite(job: Job) -> None:
    """The gradient of a root at 0 is infinite, and the loss is finite."""
    model = job.net()
    model[3].weight.data.zero_()
    model[3].bias.data.zero_()
    train(job, model, optim.SGD(model.parameters(), lr=1e-2), loss=lambda model, x: (model(x) ** 2).sqrt().mean())


@planted(FINITE, r"finite")
def one_weight_is_not_a_number(job: Job) -> None:
    """A gradient of one bias becomes NaN."""
    model = job.net()
    model[0].bias.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor(3), math.nan))
    train(job, model, adamw(model))


@planted(r"scaling|skipped|finite", r"scaling")
def updates_that_are_skipped_forever(job: Job) -> None:
    """Gradients of each step are infinite, and the scaler's factor cannot shrink."""
    model = job.net()
    optimizer, scaler = adamw(model), torch.amp.GradScaler("cpu", init_scale=256.0, backoff_factor=0.9999)
    with job.watch(model, optimizer):
        for step in range(STEPS):
            scaler.scale(error(model, *job.batch(step)) * 1e38).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


def low(job: Job, first: int = 0, kind: Any = None) -> None:
    """The parameters from a layer on are bf16, and nothing keeps them wider."""
    model = job.net()
    model[first:].bfloat16()
    model[first].register_forward_pre_hook(lambda _module, inputs: inputs[0].bfloat16())
    train(job, model, kind(model.parameters()) if kind else adamw(model, 1e-3))


MASTERS = r"dtypes: (masters|moments|values).*bfloat16"
PLANTED |= {
    "masters in bf16": Plant(low, 1, "plain", {}, MASTERS, r"dtypes: masters"),
    "some masters in bf16": Plant(partial(low, first=3), 1, "plain", {}, MASTERS, r"dtypes: masters of .*3\."),
    "masters in bf16, declared": Plant(low, 1, "plain", {"masters": "float32"}, MASTERS, r"dtypes: masters"),
}


@planted(r"dtypes: moments.*bfloat16", r"dtypes: moments", reference="sgd with momentum")
def moments_in_bf16(job: Job) -> None:
    """The optimizer's states are cast after each update."""
    model = job.net()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)

    def cast(*_: object) -> None:
        for state in optimizer.state.values():
            state["momentum_buffer"] = state["momentum_buffer"].bfloat16()

    optimizer.register_step_post_hook(cast)
    train(job, model, optimizer)


@planted(r"dtypes: modules.*(float32|bfloat16)", r"dtypes: modules compute", computes="bfloat16")
def autocast_of_the_head_alone(job: Job) -> None:
    """The block of autocast ends too early."""
    model = job.net()

    def forward(x: torch.Tensor) -> Any:
        y = model[2](model[1](model[0](x)))
        with torch.autocast("cpu", torch.bfloat16):
            return model[3](y)

    model.forward = forward
    train(job, model, adamw(model))


@planted(r"dtypes: modules compute", r"dtypes: modules compute", computes="bfloat16")
def autocast_that_does_nothing(job: Job) -> None:
    """Autocast is disabled by an option."""
    model = job.net()
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        train(job, model, adamw(model))


@planted(
    r"(never changed|no change|never rounded|masters|in the model|copied|once per step|reference: (losses|norms))",
    updates_of(0),
)
def masters_that_are_not_copied_back(job: Job) -> None:
    """fp32 copies are updated, and the model keeps its initial values."""
    model = job.net()
    copies = [p.detach().clone().requires_grad_() for p in model.parameters()]
    optimizer = optim.AdamW(copies, lr=1e-2)

    def hand_over(_: int) -> None:
        for master, parameter in zip(copies, model.parameters(), strict=True):
            master.grad, parameter.grad = parameter.grad, None

    train(job, model, optimizer, before=hand_over)


@planted(r"reference: (losses|norms|parameters)")
def dropout_that_should_be_off(job: Job) -> None:
    """Dropout was configured to 0 and is 0.5."""
    model = job.net()
    model[1].register_forward_hook(lambda _module, _inputs, output: nn.functional.dropout(output, 0.5))
    train(job, model, adamw(model))


@planted(r"reference: (losses|parameters)|buffer", reference="batch normalization")
def evaluation_mode_in_training(job: Job) -> None:
    """model.eval() after a validation is never undone, so that BatchNorm has the initial statistics."""
    torch.manual_seed(job.seed)
    layers = [nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(32, OUT)).eval()
    train(job, model, optim.SGD(model.parameters(), lr=0.05, momentum=0.9))


@planted(r"this option changed nothing", r"knob")
def option_without_effect(job: Job) -> None:
    """An option is read by nothing: compared with a run without it."""
    first = Job(job.seed)
    train(first, m := job.net(), adamw(m))
    job.expected = {"unlike": first.certificate}
    train(job, m := job.net(), adamw(m))
