"""An update on a GPU: its kernels and memory traffic, counted; writes that it finds; hooks that write to masters."""

import gc
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zerobench
from tests import cached_memory, zoo
from tests.cells import cell
from tests.plain_kernels import acts_as_gpu
from zerobench.config import schema_training
from zerobench.simulation.execute import CUDA, execute
from zerobench.zero import STAGES
from zerobench.zero.optim.step_by_tiles import ONE_PASS

ALONE = {"shards": "masters"}


@pytest.fixture
def on_gpu() -> Iterator[None]:
    with acts_as_gpu():
        yield


LARGEST = {"zero3": 26, "ddp": 28, "zero1": 30, "zero2": 30, "megatron": 32}
"""Strategy -> bytes per parameter that an update moves without any cache; megatron's gradients are fp32."""


CLIPS: dict[str, Any] = {"clip": 1.0}
SCALES: dict[str, Any] = {"precision": schema_training.Fp16()}


@pytest.mark.slow
@pytest.mark.shown(3)
@pytest.mark.parametrize(
    ("strategy", "options", "most"),
    [("zero1", CLIPS | SCALES, 17), *((strategy, {}, 3) for strategy in LARGEST), ("zero2", CLIPS, 11),
     ("zero3", SCALES, 12), ("megatron", CLIPS | SCALES, 17)],
)  # fmt: skip
def test_update_and_clipping_take_few_kernels(strategy: str, options: dict[str, Any], most: int) -> None:
    """Each value is read once and written once; the norm reads gradients again. The host does not wait."""
    bucketed = {"bucket_bytes": 2**20} if strategy != "zero3" else {}
    config = cell(strategy, 1, "million", "cuda", **{"precision": schema_training.Bf16()} | bucketed | options).config
    with cached_memory.counted() as updates:
        shapes = execute(config, target=CUDA, operators=True).result.schedule.shapes
    last, norm = updates[-1], 0 if not options else 4 if strategy == "megatron" else 2
    assert last.touched / sum(shape.numel for shape in shapes) == pytest.approx(LARGEST[strategy] + norm, abs=0.1)
    assert last.kernels <= most
    assert last.waits == 0


def engine_of(stage: str, **options: Any) -> Any:
    model = zoo.build("tied").bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    shards = {"shards": "parameters"} if stage == "zero3" else {}  # beside masters, so that there is a comparison
    return zerobench.initialize(model, optimizer, stage, **{"tile_bytes": ONE_PASS} | shards | options)


def step(engine: Any, number: int = 0, clips: bool = False) -> None:
    for micro in range(2):
        with engine.no_sync() if not micro else mock.MagicMock():
            engine.backward(engine(*zoo.tokens(0, 1, 2 * number + micro)))
    if clips:
        engine.clip_grad_norm_(0.5)
    engine.step()


def weight_of(engine: Any) -> nn.Parameter:
    return engine.module.embedding.weight


def masters(engine: Any) -> list[torch.Tensor]:
    return [segment.tensor.detach().clone() for segment in engine.segments]


def rounded(engine: Any) -> bool:
    """Whether parameters are the rounded masters, bit by bit."""
    pairs = [(one.parameters, one.master.bfloat16()) for one in engine.placement.all_ranges() if not one.is_parameters]
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in pairs)


@pytest.mark.parametrize(("stage", "options"), [*((stage, {}) for stage in STAGES), ("zero3", ALONE)])
def test_bits_are_those_of_a_cpu(stage: str, options: dict[str, str]) -> None:
    """A loop with clipping and accumulation, in one pass and in tiles; nothing was written, and no error is raised."""
    found = []
    for world, tile_bytes in ((nullcontext, 1024), (nullcontext, 2**30), (acts_as_gpu, 1024), (acts_as_gpu, ONE_PASS)):
        with world():
            engine = engine_of(stage, tile_bytes=tile_bytes, **options)
            assert (engine.update.one_pass is not None) == (tile_bytes == ONE_PASS)
            for number in range(4):
                step(engine, number, clips=True)
            assert rounded(engine)
            found.append(torch.cat([one.flatten() for one in masters(engine)]))
            engine.full_state_dict()
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("stage", STAGES)
def test_write_that_an_update_has_replaced_is_an_error_at_the_next_step(stage: str) -> None:
    engine = engine_of(stage)
    step(engine)
    weight_of(engine).data[0, 0] += 1
    step(engine)
    before = masters(engine)
    with pytest.raises(RuntimeError, match=r"^embedding\.weight: it was written to between steps .* they are lost; wr"):
        step(engine)
    assert all(torch.equal(a, b) for a, b in zip(before, masters(engine), strict=True))
    engine.zero_grad()
    for number in range(3):
        step(engine, number)
    weight_of(engine).data.mul_(2)
    step(engine)
    with pytest.raises(RuntimeError, match=r"^embedding\.weight"):
        engine.full_state_dict()
    engine.full_state_dict()  # it was said once


@pytest.mark.usefixtures("on_gpu")
def test_replaced_write_before_the_last_step_is_printed_at_the_end(capfd: pytest.CaptureFixture[str]) -> None:
    engine = engine_of("zero2")
    step(engine)
    weight_of(engine).data[0, 0] += 1
    step(engine)
    del engine
    gc.collect()
    assert capfd.readouterr().err.startswith("embedding.weight: it was written to between steps")


@pytest.mark.usefixtures("on_gpu")
def test_writes_that_are_found_in_time_are_followed() -> None:
    """Before a checkpoint, or if versions show them; and NaN in training is no write."""
    engine = engine_of("zero2")
    step(engine)
    weight_of(engine).data.fill_(0.25)
    assert bool((engine.full_state_dict()["embedding.weight"] == 0.25).all())
    with torch.no_grad():
        weight_of(engine).fill_(0.5)
    step(engine)
    step(engine)
    engine.backward(engine(*zoo.tokens(0, 1, 0)) * float("nan"))
    engine.step()
    step(engine)
    step(engine)
    assert weight_of(engine).isnan().all()


@pytest.mark.parametrize("world", [nullcontext, acts_as_gpu])
@pytest.mark.parametrize("tile_bytes", [1024, 2**30, ONE_PASS])
def test_parameters_are_the_masters_that_hooks_have_written(world: Any, tile_bytes: int) -> None:
    """Before a step or after it, without an error for parameters that differ from them."""
    with world():
        engine = engine_of("zero2", tile_bytes=tile_bytes)
        step(engine)

        @torch.no_grad()
        def halve(*_: Any) -> None:
            for one in engine.segments:
                one.tensor.mul_(0.5)

        for register in (engine.optimizer.register_step_post_hook, engine.optimizer.register_step_pre_hook):
            hook = register(halve)
            step(engine)
            assert rounded(engine)
            step(engine)
            hook.remove()
        step(engine)
        assert rounded(engine)
