"""A training loop of the corpus, its data and its watch, and the model and steps that most loops share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn, optim

import zerobench
from zerobench.watching import Certificate

STEPS = 6
ROWS, WIDTH, OUT = 16, 16, 8
"""Rows of a global batch, and the sizes of the network."""


@dataclass
class Job:
    """One run of a loop on one rank. `reference`: the folder of a certificate; `to`: that of its own, if it is kept."""

    seed: int
    rank: int = 0
    ranks: int = 1
    expected: Mapping[str, Any] = field(default_factory=dict)
    reference: Path | None = None
    to: Path | None = None
    certificate: Certificate | None = None

    @contextmanager
    def watch(self, model: Any, optimizer: Any, **how: Any) -> Iterator[zerobench.Watch]:
        """Watches the block, and keeps its certificate."""
        verify = zerobench.ExpectedTraining(reference=self.reference, **self.expected)
        with zerobench.watch(model, optimizer, verify=verify, to=self.to, timeout_s=30, **how) as watch:
            yield watch
        self.certificate = watch.certificate

    def draw(self, step: int, *shape: int) -> torch.Tensor:
        """Returns normal numbers that are the same on every rank and in the reference."""
        return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * self.seed + step))

    def batch(self, step: int, micro: int = 1) -> list[torch.Tensor]:
        """Returns this rank's part of a global batch in micro-batches."""
        return list(self.draw(step, ROWS, WIDTH).chunk(self.ranks)[self.rank].chunk(micro))

    def net(self) -> Any:
        """Returns the network of most loops, with the seed's values."""
        torch.manual_seed(self.seed)
        return nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.LayerNorm(32), nn.Linear(32, OUT))


class Loop:
    """An honest loop. `reference`: the honest loop of one process that does the same training; `expected`: the fields
    of ExpectedTraining that its user declares.
    """

    def __init__(self, function: Callable[[Job], Any], reference: str = "", ranks: int = 1, **expected: Any) -> None:
        self.function, self.reference, self.ranks, self.expected = function, reference, ranks, expected


class Plant(Loop):
    """A loop with one failure. `causes`: a pattern of the rows that name it; `about`: a pattern of the checks and
    subjects that must not be `same`.
    """

    def __init__(
        self, function: Callable[[Job], Any], causes: str, about: str, reference: str = "plain", **more: Any
    ) -> None:
        super().__init__(function, reference, **more)
        self.causes, self.about = causes, about


def of(kind: Callable[..., Any], **options: Any) -> Callable[[nn.Module], Any]:
    return lambda model: kind(model.parameters(), **options)


adamw = of(optim.AdamW, lr=1e-2)
sgd = of(optim.SGD, lr=0.1)


def error(model: Any, x: torch.Tensor) -> Any:
    return (model(x).float() - x[:, :OUT]).square().mean()


def autocast(model: Any, x: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Returns the loss of a forward in a narrow dtype."""
    with torch.autocast("cpu", dtype):
        y = model(x)
    return (y.float() - x[:, :OUT]).square().mean()


def nothing(*_: Any) -> None:
    """Leaves a model, or a phase of a step, as it is."""


def delayed(model: Any, is_last: bool) -> AbstractContextManager[Any]:
    """Reduces gradients of the last micro-batch alone."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(is_last)
    return model.no_sync() if hasattr(model, "no_sync") and not is_last else nullcontext()


def at_once(*_: Any) -> AbstractContextManager[Any]:
    """Reduces gradients of each micro-batch."""
    return nullcontext()


Act = Callable[[Any, Any, int], Any]
"""Acts on model and optimizer in a step."""


def train(
    job: Job, model: Any, optimizer: Any, *, micro: int | Sequence[int] = 1, clip: float | None = None,
    scaler: Any = None, loss: Callable[..., Any] = error, before: Act = nothing, after: Act = nothing,
    watched: Any = None, delay: Callable[..., Any] = delayed, batch: Callable[..., Any] = Job.batch,
) -> None:  # fmt: skip
    """Watches a loop. `micro`: micro-batches, of each step or of all; `before`: acts between backward and clipping;
    `after`: after the update; `watched`: the model for the watch, if it is another object than the loop calls.
    """
    is_engine, all_of = model is optimizer, optimizer if isinstance(optimizer, list) else [optimizer]
    counts = [micro] * STEPS if isinstance(micro, int) else micro
    with job.watch(model if watched is None else watched, optimizer):
        for step, count in enumerate(counts):
            for number, x in enumerate(batch(job, step, count), 1):
                with delay(model, number == count):
                    value = loss(model, x) / count
                    model.backward(value) if is_engine else (scaler.scale(value) if scaler else value).backward()
            before(model, optimizer, step)
            if clip is not None:
                if scaler:
                    scaler.unscale_(optimizer)
                model.clip_grad_norm_(clip) if is_engine else nn.utils.clip_grad_norm_(model.parameters(), clip)
            for one in all_of:
                scaler.step(one) if scaler else one.step()
            if scaler:
                scaler.update()
            after(model, optimizer, step)
            for one in all_of:
                one.zero_grad()


def usual(
    kind: Callable[[Any], Any] = adamw, make: Callable[[Job], Any] = Job.net, change: Callable[[Any], Any] = nothing,
    wrap: Callable[[Any], Any] = lambda model: model, prepare: Callable[[Any], Any] = nothing,
    scale: float | None = None, **how: Any,
) -> Callable[[Job], None]:  # fmt: skip
    """Returns a loop. `make`: makes the model; `change`: acts on it; `wrap`: returns the object that the loop calls;
    `prepare`: acts on that; `kind`: makes its optimizer; `scale`: the first factor of a GradScaler; the rest: train's.
    """

    def run(job: Job) -> None:
        model = make(job)
        change(model)
        model = wrap(model)
        prepare(model)
        scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
        train(job, model, kind(model), scaler=scaler, **how)

    return run
