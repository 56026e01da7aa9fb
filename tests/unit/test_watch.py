"""Watching a loop in one process: figures of an instrument that was there from the start, and nothing left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zerobench
from zerobench.loops.holdings import BEFORE
from zerobench.probes import AccountedPass
from zerobench.zero import labels

HIDDEN, BATCH, WARMUP, STEPS = 24, 8, 1, 2
EXACT = ("parameters", "gradients", "master", "optimizer", "communication", "activations", "states", "total")
CPU = torch.device("cpu")

Phase = Callable[[str], AbstractContextManager[Any]]


class Net(nn.Module):
    """Two layers and a buffer. `again`: the second is computed again in backward, reentrant or not."""

    def __init__(self, again: bool | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)
        self.register_buffer("seen", torch.zeros(3))
        self.again = again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).relu()
        return self.tail(h) if self.again is None else checkpoint(self.tail, h, use_reentrant=self.again)

    def tail(self, h: torch.Tensor) -> torch.Tensor:
        return self.second(h).tanh()


@dataclass
class Loop:
    """A training loop of plain torch: how it is built, and one step of it. `phase` says what an oracle is told."""

    again: bool | None = None
    accumulation: int = 1
    set_to_none: bool = True
    autocast: bool = False
    scaled: bool = False
    skips: tuple[int, ...] = ()
    halves: bool = False

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = Net(self.again)
        parts = [self.model.first, self.model.second] if self.halves else [self.model]
        self.optimizers = [torch.optim.AdamW(part.parameters(), lr=1e-3) for part in parts]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=self.scaled)
        self.losses: list[float] = []

    def step(self, number: int, phase: Phase) -> None:
        """Trains on one batch, drawn from the step's number."""
        for micro in range(self.accumulation):
            with phase("data"):
                x = torch.randn(BATCH, HIDDEN, generator=torch.Generator().manual_seed(10 * number + micro))
                labels.label(x, labels.INPUTS, "batch")
            with phase("forward"), torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                loss = self.model(x).square().sum()
                loss = loss * float("inf") if number in self.skips else loss
                loss = self.scaler.scale(loss)
            with phase("backward"):
                loss.backward()
        with phase("update"):
            for optimizer in self.optimizers:
                self.scaler.step(optimizer)
            self.scaler.update()
        self.losses.append(loss.item())
        del loss, x
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=self.set_to_none)


def nothing(_: str) -> AbstractContextManager[None]:
    return nullcontext()


def seen_by_the_oracle(steps: int = WARMUP + STEPS, **how: Any) -> AccountedPass:
    """An instrument that is there before the model, is told every phase, and labels what the harness labels."""
    with AccountedPass(CPU, witness=False) as probe:
        with probe.phase("init"):
            loop = Loop(**how)
            probe.adopt(loop.model)

        @contextmanager
        def phase(name: str) -> Iterator[None]:
            with probe.phase(name):
                yield
                if name == "backward":
                    probe.after_backward(loop.model)
            if name == "update":
                for optimizer in loop.optimizers:
                    probe.after_update(optimizer)

        for number in range(steps):
            with probe.step(number >= steps - STEPS):
                loop.step(number, phase)

    return probe


def watched(loop: Loop, steps: int = WARMUP + STEPS, spare: int = 1, **how: Any) -> zerobench.Results:
    optimizers = loop.optimizers if len(loop.optimizers) > 1 else loop.optimizers[0]
    with zerobench.watch(loop.model, optimizers, **how) as watch:
        for number in range(steps + spare):
            loop.step(number, nothing)
            if how.get("ends") == "step":
                watch.step()
    assert watch.results is not None
    return watch.results


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "kept gradients": {"set_to_none": False},
    "accumulation": {"accumulation": 3},
    "autocast": {"autocast": True},
    "checkpoint": {"again": False},
    "reentrant checkpoint": {"again": True},
    "two optimizers": {"halves": True},
    "scaled": {"scaled": True, "accumulation": 2},
    "a skipped update": {"scaled": True, "skips": (2,)},
}


@pytest.mark.parametrize("name", CASES)
def test_a_late_watch_sees_what_an_instrument_sees_that_was_there_from_the_start(name: str) -> None:
    oracle, results = seen_by_the_oracle(**CASES[name]), watched(Loop(**CASES[name]))
    expected = {row.category: row for row in oracle.memory_rows(0) if row.phase == "step"}
    rows = results.memory.query("phase == 'step'").set_index("category")
    for category in EXACT:
        assert rows.max_bytes[category] == expected[category].max_bytes, category
        assert rows.at_peak_bytes[category] == expected[category].at_peak_bytes, category
    run, lines = results.runs.iloc[0], results.lines
    assert (run.peak_bytes, run.strategy) == (expected["total"].max_bytes, "plain")
    assert lines[lines["at"] == "peak"].bytes.sum() == run.peak_bytes
    assert run.psi == sum(p.numel() for p in Net().parameters())
    assert run.growth_bytes == oracle.memory["growth_bytes"] == 0
    assert not (results.tensors.name == BEFORE).any()
