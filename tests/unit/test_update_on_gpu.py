"""An update on a GPU: its memory traffic, counted; writes that it finds; hooks that write to masters around it."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zerobench
from tests import cached_memory, zoo
from tests.cells import cell
from tests.distributed.test_writes import clamp, clamp_data
from zerobench.config import schema_training
from zerobench.fake_execution import CUDA, execute
from zerobench.zero import STAGES, writes
from zerobench.zero.optim.step_by_tiles import fused_update
from zerobench.zero.options import TILE_BYTES
from zerobench.zero.parameters import unseen
from zerobench.zero.precision import Share

SMALLER = 16
"""Model, cache and tiles are smaller by this factor than on a GPU."""

ALONE = {"shards": "masters"}


@pytest.fixture
def on_gpu() -> Iterator[None]:
    """The host does not ask for the results of comparisons."""
    with mock.patch.dict(writes.ASKS, {"cpu": False}):
        yield


def traffic(strategy: str, tile_bytes: int, n: int = 1) -> tuple[float, int, int]:
    """Bytes per parameter to and from memory, kernels and waits of the host in one update."""
    precision = schema_training.Bf16(tile_bytes=tile_bytes)
    config = cell(strategy, n, "million", "cuda", precision=precision, bucket_bytes=2**20).config
    smaller = mock.patch.multiple(cached_memory, CACHE_BYTES=cached_memory.CACHE_BYTES // SMALLER, LINE_BYTES=1024)
    with smaller, cached_memory.counted() as updates:
        shapes = execute(config, target=CUDA, operators=True).known.schedule.shapes
    last = updates[-1]
    return n * last.moved / sum(shape.numel for shape in shapes), last.kernels, last.waits


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_an_update_moves_at_most_32_bytes_a_parameter(strategy: str) -> None:
    moved, kernels, waits = traffic(strategy, TILE_BYTES["cuda"] // SMALLER)
    assert 26 <= moved <= 32  # masters alone have no parameters to round
    assert waits == 0
    at_once, fewer, _ = traffic(strategy, 2**30)  # what tiles are for
    assert at_once > moved + 3.9
    assert fewer < kernels <= 60


def engine_of(stage: str, **options: Any) -> Any:
    model = zoo.build("tied").bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    shards = {"shards": "parameters"} if stage == "zero3" else {}  # beside masters, so that there is a comparison
    return zerobench.initialize(model, optimizer, stage, **{"tile_bytes": 1024} | shards | options)


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
    """A loop with clipping and accumulation, in tiles and at once; nothing was written, and no error is raised."""
    found = []
    for asks in (True, False):
        for tile_bytes in (1024, 2**30):
            with mock.patch.dict(writes.ASKS, {"cpu": asks}):
                engine = engine_of(stage, tile_bytes=tile_bytes, **options)
                for number in range(4):
                    step(engine, number, clips=True)
                assert (engine.placement.unseen is None) == asks
                assert rounded(engine)
                found.append(torch.cat([one.flatten() for one in masters(engine)]))
                engine.full_state_dict()
    assert all(torch.equal(found[0], other) for other in found[1:])


class Given(Share):
    def gradient(self) -> torch.Tensor | None:
        return self.tensor.grad


@pytest.mark.parametrize(
    ("kind", "options"), [(torch.optim.Adam, {"maximize": True}), (torch.optim.AdamW, {"amsgrad": True})]
)
def test_a_fused_tile_is_torchs_step(kind: type[torch.optim.Optimizer], options: dict[str, bool]) -> None:
    """A tile at a time by the kernel, of parameters in two groups; with and without an overflow that is found."""
    for overflow in (None, 0.0, 1.0):
        found = []
        for by_tiles in (False, True):
            torch.manual_seed(0)
            shares = [Given(torch.randn(64)) for _ in range(3)]
            groups = [{"params": [shares[0].tensor]}, {"params": [one.tensor for one in shares[1:]], "lr": 0.1}]
            optimizer: Any = kind(groups, lr=0.01, fused=True, **options)  # type: ignore[call-arg]
            for number in range(3):
                for share in shares:
                    share.tensor.grad = torch.randn(64)
                optimizer.found_inf = None if overflow is None or not number else torch.tensor(overflow)
                with torch.no_grad():
                    update = fused_update(optimizer, shares) if by_tiles else None
                    [update(tile) for tile in (shares[:2], shares[2:])] if update else optimizer.step()
                assert (update is not None) == (by_tiles and number > 0)  # the first step makes states
            states = [value for state in optimizer.state.values() for value in state.values()]
            found.append([*states, *(share.tensor.detach() for share in shares)])
        assert all(map(torch.equal, *found))


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("stage", STAGES)
def test_a_write_that_an_update_has_replaced_is_an_error_at_the_next_step(stage: str) -> None:
    engine = engine_of(stage)
    step(engine)
    weight_of(engine).data[0, 0] += 1
    step(engine)
    before = masters(engine)
    with pytest.raises(
        RuntimeError, match=r"one of .*embedding\.weight.*: it was written to between steps .* they are lost; wr"
    ):
        step(engine)
    assert all(torch.equal(a, b) for a, b in zip(before, masters(engine), strict=True))
    engine.zero_grad()
    for number in range(3):
        step(engine, number)
    weight_of(engine).data.mul_(2)
    step(engine)
    with pytest.raises(RuntimeError, match=r"embedding\.weight"):
        engine.full_state_dict()


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("pieces", [2**22, 64])
def test_a_write_in_a_forward_is_an_error_at_the_next_step(monkeypatch: pytest.MonkeyPatch, pieces: int) -> None:
    """The first of two micro-batches writes beside masters alone; later gathers have no such values."""
    monkeypatch.setattr(unseen, "PIECE", pieces)
    engine = engine_of("zero3", **ALONE)
    step(engine)
    hook = engine.module.blocks[2].up.register_forward_pre_hook(clamp_data)
    with engine.no_sync():
        engine.backward(engine(*zoo.tokens(0, 1, 2)))
    hook.remove()
    engine.backward(engine(*zoo.tokens(0, 1, 3)))
    engine.step()
    before = masters(engine)
    with pytest.raises(
        RuntimeError, match=r"one of (.*, )?blocks\.2\.up\.weight.*: it was .* or in a forward by \.data"
    ):
        step(engine, 2)
    assert all(torch.equal(a, b) for a, b in zip(before, masters(engine), strict=True))
    engine.zero_grad()
    for number in range(3, 6):
        step(engine, number)
    hook = engine.module.blocks[2].up.register_forward_pre_hook(clamp_data)
    with torch.inference_mode():
        engine(*zoo.tokens(0, 1, 0))
    with pytest.raises(RuntimeError, match=r"blocks\.2\.up\.weight"):
        engine.full_state_dict()


def test_counted_writes_in_a_forward_are_followed_as_on_a_cpu() -> None:
    """A weight that is clamped under no_grad before each use trains to the same bits."""
    found = []
    for asks in (True, False):
        with mock.patch.dict(writes.ASKS, {"cpu": asks}):
            engine = engine_of("zero3", **ALONE)
            engine.module.blocks[2].up.register_forward_pre_hook(clamp)
            for number in range(4):
                step(engine, number)
            found.append(engine.full_state_dict())
    assert all(torch.equal(value, found[1][key]) for key, value in found[0].items())
    assert found[0]["blocks.2.up.weight"].abs().max() <= 0.13


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


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("tile_bytes", [1024, 2**30])
def test_parameters_are_the_masters_that_hooks_have_written(asks: bool, tile_bytes: int) -> None:
    """Before a step or after it; then writes between steps are followed on a GPU, too."""
    with mock.patch.dict(writes.ASKS, {"cpu": asks}):
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
        if asks or len(engine.update.tiles) > 1:  # a single tile is compared before the hooks
            weight_of(engine).data.fill_(8.0)
            step(engine)
            step(engine)
            assert rounded(engine)
            assert bool((weight_of(engine) > 7).all())
