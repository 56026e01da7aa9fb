"""ZeRO-Offload and ZeRO-Infinity: the papers' rows, the bound of host memory, updates that are late.

What links carry: test_links.py.
"""

import threading
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import zoo
from tests.cells import MODELS
from tests.distributed import offloaded
from tests.distributed.offloaded import CELLS, Measured, N
from tests.distributed.streams import AtOnce
from tests.ranks import run_ranks
from zerobench.config.schema import Gpt
from zerobench.config.schema_memory import NvmeOffloadConfig
from zerobench.zero import Offload, initialize
from zerobench.zero.optim import delayed_update, step_by_tiles
from zerobench.zero.optim.step_by_tiles import raw_step

PAPERS_ROWS = {"zero1 gradients alone": 2 + 12 / N, "zero1 gradients stay": 4, "zero1 cpu": 2, "zero2 cpu": 2}
"""Cells and the bytes a parameter that stay."""


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> dict[str, Measured]:
    return offloaded.measure(tmp_path_factory.mktemp("ranks"), CELLS)


def test_the_papers_rows(measured: dict[str, Measured]) -> None:
    """Bytes a parameter of model states that stay, with N ranks; ZeRO-Offload, table 1. The rest is on its way."""
    for name, each in PAPERS_ROWS.items():
        one = measured[name]
        assert one.floor_bytes == pytest.approx(each * one.psi, rel=1e-3), name
        assert 0 <= one.most("device", "states") - each * one.psi <= 3 * one.config.strategy.bucket_bytes, name


@pytest.mark.thorough
def test_host_memory_does_not_grow_with_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it in files, of two models: what grows in host memory is the optimizer's counts, 4 bytes a segment."""
    monkeypatch.setitem(MODELS, "small", Gpt(layers=1, hidden=48, heads=4))
    monkeypatch.setitem(MODELS, "large", Gpt(layers=12, hidden=48, heads=4))
    ways = {"zero2 bf16": offloaded.HALF, "zero3 fp32": None}
    found = offloaded.measure(
        tmp_path,
        {
            f"{way} {model}": {"offload": NvmeOffloadConfig(block_bytes=8192), "model": model, "precision": precision}
            for way, precision in ways.items()
            for model in ("small", "large")
        },
    )
    for way in ways:
        small, large = found[f"{way} small"], found[f"{way} large"]
        assert large.psi > 8 * small.psi
        assert large.most("nvme", "total") > 7.5 * small.most("nvme", "total")
        grown = large.most("host", "total") - small.most("host", "total")
        assert grown == large.prediction.host_bytes - small.prediction.host_bytes
        assert 0 < grown < 1e-3 * large.most("nvme", "total")


def test_a_late_update_is_that_of_a_loop_by_hand() -> None:
    for mine in run_ranks(N, offloaded.compare_late):
        by_hand, never_late = mine.pop("by hand"), mine.pop("never late")
        assert by_hand != never_late
        for strategy, losses in mine.items():
            assert losses == by_hand, strategy


def test_gradients_dropped_after_the_forward_are_not_those_of_the_late_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """`zero_grad` between forward and backward, while the update that began with the forward is at its gradients."""
    monkeypatch.setattr(delayed_update, "Thread", AtOnce)

    def step_disturbed(engine: Any, optimizer: torch.optim.Optimizer) -> None:
        if engine:
            engine.zero_grad()
        raw_step(optimizer)

    def train(disturbed: bool) -> dict[str, torch.Tensor]:
        model = zoo.build("tied")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        engine = initialize(model, optimizer, "zero2", offload=Offload(delayed_after=0))
        with monkeypatch.context() as patch:
            patch.setattr(step_by_tiles, "raw_step", partial(step_disturbed, engine if disturbed else None))
            for step in range(3):
                engine.backward(engine(*zoo.tokens(0, 1, step)))
                engine.step()
        return engine.full_state_dict()

    plain, disturbed = train(False), train(True)
    assert all(torch.equal(plain[name], disturbed[name]) for name in plain)
    assert not torch.equal(plain["embedding.weight"], zoo.build("tied").state_dict()["embedding.weight"])


class NotToBeRead:
    """A segment whose tensor belongs to another thread."""

    @property
    def tensor(self) -> torch.Tensor:
        raise AssertionError("the update's thread sets and drops gradients here")


def test_a_backward_leaves_the_gradients_of_a_late_update_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading `.grad` while another thread assigns it reads freed memory."""
    blocked, run = threading.Event(), delayed_update.Pending.run

    def run_late(pending: Any, begin: Any) -> None:
        blocked.wait(60)
        run(pending, begin)

    monkeypatch.setattr(delayed_update.Pending, "run", run_late)
    model = zoo.build("tied")
    engine = initialize(model, torch.optim.AdamW(model.parameters()), "zero2", offload=Offload(delayed_after=0))
    engine.backward(engine(*zoo.tokens(0, 1, 0)))
    engine.step()
    loss = engine(*zoo.tokens(0, 1, 1))
    assert engine.update.is_running
    with monkeypatch.context() as patch:
        patch.setattr(engine.update, "segments", [NotToBeRead()])
        for touch in (engine.gradients.stand_ins.heed, engine.gradients.stand_ins.take_away):
            touch()
    engine.backward(loss)
    blocked.set()
    engine.step()
    engine.settle()
    assert not engine.update.is_running


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("how", ["load_state_dict", "in place", "full_parameters"])
def test_a_write_before_the_forward_in_which_a_delayed_update_starts_is_followed_once(strategy: str, how: str) -> None:
    """The update of the step after ends without an error: the write was followed before the update started."""
    model = zoo.build("tied").bfloat16()
    engine = initialize(model, torch.optim.AdamW(model.parameters()), strategy, offload=Offload(delayed_after=1))
    for step in range(5):
        loss = engine(*zoo.tokens(0, 1, step))
        engine.backward(loss)
        engine.step()
        before = engine.full_state_dict()
        if how == "load_state_dict":
            engine.module.load_state_dict({name: 0.5 * value for name, value in before.items()})
        else:
            in_parts = strategy == "zero3" or how == "full_parameters"
            with engine.full_parameters() if in_parts else nullcontext(), torch.no_grad():
                next(iter(engine.module.parameters())).mul_(0.5)
        name = next(name for name, _ in model.named_parameters())
        assert torch.equal(engine.full_state_dict()[name], 0.5 * before[name])
    assert engine.steps == 5
