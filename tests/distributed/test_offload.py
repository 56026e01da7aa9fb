"""ZeRO-Offload and ZeRO-Infinity: the papers' rows, the bound of host memory, updates that are late, bytes on links."""

import os
import threading
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests import zoo
from tests.cells import MODELS, sound
from tests.distributed.streams import AtOnce
from tests.distributed.training import assert_equal, take_steps
from tests.distributed.variants import account
from tests.ranks import on_ranks
from zerobench.config.cell import Cell
from zerobench.config.schema import Gpt, Measure
from zerobench.config.schema_memory import (
    CheckpointOffloadActivations,
    CpuOffload,
    NvmeOffloadConfig,
    OffloadActivations,
)
from zerobench.config.schema_training import Adagrad, Bf16, Fp16
from zerobench.records import LINKS, RunRow
from zerobench.sweep.aggregate import join
from zerobench.sweep.cell import new_row
from zerobench.zero import NvmeOffload, Offload, initialize
from zerobench.zero.optim import delayed_update, step_by_tiles
from zerobench.zero.optim.step_by_tiles import raw_step
from zerobench.zero.precision import clip_coefficient

DELAYED_AFTER, STEPS, MOST, RATE = 2, 5, 0.1, 1e-2


def rate(step: int) -> float:
    return RATE * 0.9**step


def late(rank: int, n: int, strategy: str) -> list[float]:
    """Losses under the engine, with clipping and a scheduler."""
    model = zoo.build("tied")
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    engine = initialize(
        model, optimizer, strategy, bucket_bytes=4096, tile_bytes=4096,
        offload=Offload(delayed_after=DELAYED_AFTER),
    )  # fmt: skip
    losses = []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = rate(step)
        loss = engine(*zoo.tokens(rank, n, step))
        engine.backward(loss)
        engine.clip_grad_norm_(MOST)
        engine.step()
        losses.append(loss.item())
    return losses


def late_by_hand(rank: int, n: int, delayed_after: int = DELAYED_AFTER) -> list[float]:
    """Trains in plain torch: from `delayed_after` steps on the gradients of one step are used after the next."""
    model = zoo.build("tied")
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    parameters, waiting, losses = list(model.parameters()), None, []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(*zoo.tokens(rank, n, step))
        loss.backward()
        losses.append(loss.item())
        gradients = [p.grad / n for p in parameters]
        for gradient in gradients:
            dist.all_reduce(gradient)
        norm = sum(g.double().square().sum() for g in gradients).sqrt().float()
        present = [g.mul_(clip_coefficient(norm, MOST)) for g in gradients], rate(step)
        if step < delayed_after:
            due = present
        else:
            due, waiting = waiting, present
        if due is not None:
            for parameter, gradient in zip(parameters, due[0], strict=True):
                parameter.grad = gradient
            optimizer.param_groups[0]["lr"] = due[1]
            optimizer.step()
    return losses


@on_ranks(2)
def test_a_late_update_is_that_of_a_loop_by_hand(rank: int, n: int) -> None:
    by_hand = late_by_hand(rank, n)
    assert by_hand != late_by_hand(rank, n, delayed_after=STEPS), "never late"
    for strategy in ("zero1", "zero2", "zero3"):
        assert late(rank, n, strategy) == by_hand, strategy


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
            take_steps(engine, 0, 1, range(3))
        return engine.full_state_dict()

    plain, disturbed = train(False), train(True)
    assert_equal(disturbed, plain)
    assert not torch.equal(plain["embedding.weight"], zoo.build("tied").state_dict()["embedding.weight"])


@pytest.mark.parametrize("gradients", [True, False])
def test_gradients_of_a_step_that_raised_are_not_those_of_the_next(tmp_path: Path, gradients: bool) -> None:
    """A hook of the optimizer skips a step, whose chunks have been read from the file."""

    def train(offload: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = zoo.Chain(nn.Identity(), width=4)  # of one chunk
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine = initialize(model, optimizer, "zero2", offload=offload)
        take_steps(engine, 0, 1, range(1))
        hook = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            take_steps(engine, 0, 1, range(1, 2))
        hook.remove()
        engine.zero_grad()
        take_steps(engine, 0, 1, range(2, 4))
        return engine.full_state_dict()

    files = NvmeOffload(path=str(tmp_path), block_bytes=4096, buffers=12, gradients=gradients)
    assert_equal(train(files), train(None))


def test_a_pending_update_keeps_its_options_and_takes_groups_that_were_added(tmp_path: Path) -> None:
    """It is loaded without delay, so that it is made at once: with the rate of its own step, and without hooks."""

    def engine_of(**options: Any) -> Any:
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1).requires_grad_(False))
        return initialize(model, torch.optim.SGD(model[0].parameters(), lr=1.0), "zero2", **options)

    first = engine_of(offload=Offload(delayed_after=0))
    before = first.full_state_dict()
    first.backward(first(torch.ones(1, 3)).sum())
    first.step()
    first.optimizer.param_groups[0]["lr"] = 0.1  # the schedule's next
    first.optimizer.add_param_group({"params": list(first.module[1].parameters())})
    first.save(tmp_path / "saved")
    second = engine_of()
    second.optimizer.add_param_group({"params": list(second.module[1].parameters())})
    second.optimizer.register_step_post_hook(lambda *_: pytest.fail("a hook ran in a load"))
    second.load(tmp_path / "saved")
    moved = before["0.bias"] - second.full_state_dict()["0.bias"]
    torch.testing.assert_close(moved, before["1.weight"][0])  # a rate of 1 times the gradient
    assert second.optimizer.param_groups[0]["lr"] == 0.1


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
    take_steps(engine, 0, 1, [0])
    loss = engine(*zoo.tokens(0, 1, 1))
    assert engine.update.is_running
    with monkeypatch.context() as patch:
        patch.setattr(engine.update, "segments", [NotToBeRead()])
        for touch in (engine.gradients.stand_ins.follow_edits, engine.gradients.stand_ins.take_away):
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
        take_steps(engine, 0, 1, [step])
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


BF16, WIDE, TILED = Bf16(), Bf16(gradient_dtype="bf16", wire_dtype="fp32"), Bf16(tile_bytes=16 * 1024)
ALL, PART, SHARDS = CpuOffload(), CpuOffload(fraction=0.3), CpuOffload(parameters=True)
SHARDS_ONLY = replace(SHARDS, optimizer=False, gradients=False)
INPUTS, SAVED = CheckpointOffloadActivations(least_bytes=64), OffloadActivations(least_bytes=256)


def files(**more: Any) -> NvmeOffloadConfig:
    """Files of many cuts, through the page cache, which every file system has."""
    return NvmeOffloadConfig(block_bytes=4096, **{"direct": False, **more})


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "zero1 fp32": ("zero1", {"offload": ALL}),
    "zero2 fp32": ("zero2", {"offload": ALL}),
    "zero2 bf16, wide wire, clipped": ("zero2", {"offload": ALL, "precision": WIDE, "clip": 0.1}),
    "zero2 bf16, a part": ("zero2", {"offload": PART, "precision": BF16, "accumulation": 2}),
    "zero1 bf16, gradients": ("zero1", {"offload": CpuOffload(optimizer=False), "precision": TILED}),
    "zero1 bf16, optimizer": ("zero1", {"offload": CpuOffload(gradients=False), "precision": TILED}),
    "zero2 bf16": ("zero2", {"offload": ALL, "precision": TILED}),
    "zero2 bf16, optimizer": ("zero2", {"offload": CpuOffload(gradients=False), "precision": BF16}),
    "zero2 bf16, gradients": ("zero2", {"offload": CpuOffload(optimizer=False), "precision": BF16}),
    "zero3 fp32": ("zero3", {"offload": ALL}),
    "zero3 fp32, shards": ("zero3", {"offload": SHARDS, "strategy": {"persistence_numel": 600}}),
    "zero3 bf16, shards alone": ("zero3", {"offload": SHARDS_ONLY, "precision": BF16, "model": "half_frozen"}),
    "zero2 bf16, delayed": (
        "zero2", {"offload": CpuOffload(delayed=True, delayed_after=0), "precision": BF16}
    ),
    "zero2 fp32, files": ("zero2", {"offload": files()}),
    "zero2 bf16, files, fp16 clipped": ("zero2", {"offload": files(), "precision": Fp16(), "clip": 0.1}),
    "zero1 bf16, files, optimizer": ("zero1", {"offload": files(gradients=False), "optimizer": Adagrad()}),
    "zero3 fp32, files": ("zero3", {"offload": files(), "strategy": {"persistence_numel": 600}}),
    "zero3 bf16, files": ("zero3", {"offload": files(), "precision": WIDE, "accumulation": 2, "clip": 0.1}),
    "zero3 bf16, a part in files": ("zero3", {"offload": files(fraction=0.3), "precision": BF16}),
    "zero2 fp32, blocks' inputs alone": ("zero2", {"activation": INPUTS, "accumulation": 2}),
    "zero3 bf16, and all that blocks save": ("zero3", {"offload": SHARDS, "activation": SAVED, "precision": BF16}),
    "zero3 bf16, past the page cache": ("zero3", {"offload": files(direct=True), "precision": BF16}),
}  # fmt: skip


SHOWN = ("zero2 bf16", "zero2 bf16, a part", "zero3 fp32, files", "zero3 bf16, and all that blocks save")
"""Cases of every run: host memory and files, parts, shards and activations. The others move the same
under another stage or in another dtype.
"""


def goes_past_the_page_cache(folder: Path) -> bool:
    try:
        os.close(os.open(folder / "tried", os.O_CREAT | os.O_RDWR | os.O_DIRECT))
    except OSError:
        return False
    return True


@pytest.fixture(scope="module")
def rows(thorough: bool, tmp_path_factory) -> dict[str, RunRow]:
    folder = tmp_path_factory.mktemp("tiers")
    cells = {}
    for name, (strategy, more) in CASES.items():
        if name not in SHOWN and not thorough:
            continue
        options = {"micro_batch": 1, **more}
        one = sound(strategy, 2, **options)
        one = one.changed(measure=Measure(1, 2))
        if one.config.offload.name == "nvme":
            one = one.changed(offload=replace(one.config.offload, path=str(folder)))
        cells[name] = one
    return dict(zip(cells, joined(list(cells.values()), folder), strict=True))


def joined(cells: list[Cell], folder: Path) -> list[RunRow]:
    """The rows of accounted passes, in one launch of ranks."""
    found = [new_row(one) for one in cells]
    for row, one, records in zip(found, cells, account([one.config for one in cells], folder), strict=True):
        join(row, one.config, records)
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=() if one in SHOWN else pytest.mark.thorough) for one in CASES]
)
def test_bytes_in_tiers_and_between_them_are_those_of_the_theory(rows, name: str, tmp_path) -> None:
    if "past the page cache" in name and not goes_past_the_page_cache(tmp_path):
        pytest.skip("this file system reads and writes through the page cache alone")
    row = rows[name]
    columns = ["states_bytes", "host_states_bytes", "nvme_bytes", *(f"{link}_bytes" for link in LINKS)]
    measured = {column: getattr(row, column) for column in columns}
    predicted = {column: getattr(row, f"predicted_{column}") for column in columns}
    assert measured == predicted
    assert row.down_bytes or row.up_bytes


PAPERS_ROWS = {"zero1 bf16, gradients": 2 + 12 / 2, "zero1 bf16, optimizer": 4, "zero2 bf16": 2}
"""Cases and the bytes a parameter that stay on two ranks; ZeRO-Offload, table 1."""


def test_the_papers_rows(rows) -> None:
    """What is beyond them is on its way."""
    for name in PAPERS_ROWS.keys() & rows.keys():
        row, stays = rows[name], PAPERS_ROWS[name] * rows[name].psi
        assert row.floor_states_bytes == pytest.approx(stays, rel=1e-3), name
        assert 0 <= row.states_bytes - stays <= 3 * 64 * 1024, name


@pytest.mark.thorough
def test_host_memory_does_not_grow_with_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it in files, of two models: what grows in host memory is the optimizer's counts, 4 bytes a segment."""
    monkeypatch.setitem(MODELS, "small", Gpt(layers=1, hidden=48, heads=4))
    monkeypatch.setitem(MODELS, "large", Gpt(layers=12, hidden=48, heads=4))
    for strategy, precision in (("zero2", {"precision": TILED}), ("zero3", {})):
        of_files = {"offload": NvmeOffloadConfig(block_bytes=8192, path=str(tmp_path)), "micro_batch": 1, **precision}
        cells = [sound(strategy, 2, model, measure=Measure(1, 2), **of_files) for model in ("small", "large")]
        small, large = joined(cells, tmp_path / strategy)
        assert large.psi > 8 * small.psi
        assert large.nvme_bytes > 7.5 * small.nvme_bytes
        assert 0 < large.host_states_bytes - small.host_states_bytes < 1e-3 * large.nvme_bytes


def test_in_half_precision_it_is_two_bytes_a_parameter_each_way(rows) -> None:
    """ZeRO-Offload, arXiv 2101.06840, section 4.1: 2ψ down and 2ψ up; files take all that is kept."""
    row = rows["zero2 bf16, a part"]
    assert row.down_bytes == pytest.approx(0.3 * 2 * 2 * row.psi, rel=0.02)  # both micro-batches are reduced
    assert row.up_bytes == pytest.approx(0.3 * 2 * row.psi, rel=0.02)
    row = rows["zero3 fp32, files"]
    assert row.write_bytes == pytest.approx((12 + 4 + 4) * row.psi, rel=0.05)
