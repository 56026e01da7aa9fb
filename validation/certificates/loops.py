"""A training loop of the corpus, its data and its watch, and the models and steps that most loops share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zerobench
from zerobench.watching import Certificate

STEPS = 6
ROWS, WIDTH, OUT = 16, 16, 8
"""Rows of a global batch, and the sizes of the network."""


@dataclass
class Job:
    """One run of a loop on one rank. `reference`: a certificate's folder; `to`: the folder of its own run, if it is kept."""

    seed: int
    rank: int = 0
    ranks: int = 1
    expected: Mapping[str, Any] = field(default_factory=dict)
    reference: Path | None = None
    to: Path | None = None
    certificate: Certificate | None = None

    @contextmanager
    def watch(self, model: Any, optimizer: Any, **how: Any) -> Iterator[zerobench.Watch]:
        """Watches the block. On rank 0 its certificate is kept; that of a second block replaces it."""
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

    def net(self, *more: nn.Module) -> nn.Sequential:
        """Returns the network of most loops, with the seed's values."""
        torch.manual_seed(self.seed)
        return nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.LayerNorm(32), nn.Linear(32, OUT), *more)


@dataclass(frozen=True)
class Loop:
    """An honest loop. `reference`: the honest loop of one process that does the same training; `expected`: the fields
    of ExpectedTraining that its user declares.
    """

    function: Callable[[Job], Any]
    ranks: int = 1
    reference: str = ""
    expected: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plant(Loop):
    """A loop with one failure. `causes`: a pattern of the rows that name it; `about`: a pattern of the checks and
    subjects that must not be `same`.
    """

    causes: str = ""
    about: str = ""


def adamw(model: nn.Module, lr: float = 1e-2, **options: Any) -> torch.optim.AdamW:
    """Returns the optimizer of most loops."""
    return torch.optim.AdamW(model.parameters(), lr=lr, **options)


def error(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Returns the loss of most loops."""
    return (model(x).float() - x[:, :OUT]).square().mean()


def nothing(_step: int) -> None:
    """Does nothing between two phases of a step."""


def delayed(model: Any, is_last: bool) -> AbstractContextManager[Any]:
    """Reduces gradients of the last micro-batch alone."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(is_last)
    return model.no_sync() if hasattr(model, "no_sync") and not is_last else nullcontext()


def train(
    job: Job, model: Any, optimizer: Any, *, micro: int = 1, clip: float | None = None, loss: Callable[..., Any] = error,
    before: Callable[[int], Any] = nothing, after: Callable[[int], Any] = nothing, steps: int = STEPS,
    watched: Any = None, delay: Callable[[Any, bool], AbstractContextManager[Any]] = delayed,
) -> None:  # fmt: skip
    """Watches a loop of `steps`. `before`: acts between backward and clipping; `after`: after the update; `watched`: the
    watch's model, if it is another object.
    """
    is_engine = model is optimizer
    with job.watch(model if watched is None else watched, optimizer):
        for step in range(steps):
            for number, x in enumerate(job.batch(step, micro), 1):
                with delay(model, number == micro):
                    value = loss(model, x) / micro
                    model.backward(value) if is_engine else value.backward()
            before(step)
            if clip is not None:
                model.clip_grad_norm_(clip) if is_engine else nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            after(step)
            optimizer.zero_grad()
