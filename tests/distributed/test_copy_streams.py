"""Copies between a GPU and host memory in streams of their own: no race in a modeled GPU (host/pipes.py)."""

from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests import zoo
from tests.distributed.streams import AtOnce, ModeledCuda, RaceDetector
from zerobench.zero import NvmeOffload, Offload, initialize
from zerobench.zero.comm import simulated
from zerobench.zero.comm.backends import FAKE
from zerobench.zero.offload import cpu, nvme
from zerobench.zero.optim import delayed_update

PARTS = {
    "all": Offload(),
    "optimizer": Offload(gradients=False),
    "gradients": Offload(optimizer=False),
    "half": Offload(fraction=0.5),
    "parameters": Offload(parameters=True),
    "delayed": Offload(delayed_after=1),
    "files": NvmeOffload(block_bytes=4096, buffers=8),
}


@pytest.fixture
def cuda() -> Iterator[ModeledCuda]:
    """A simulated world on a modeled GPU, with copy streams."""
    dist.init_process_group(FAKE, rank=1, world_size=2)
    modeled = ModeledCuda()
    on_gpu = {"cpu": partial(simulated.SimulatedNccl, cuda=modeled)}
    with (
        mock.patch.object(simulated, "KINDS", on_gpu),
        mock.patch.object(cpu, "STREAMS", {"cpu": modeled}),
        mock.patch.object(delayed_update, "Thread", AtOnce),
    ):
        yield modeled
    dist.destroy_process_group()


def races_of(
    cuda: ModeledCuda, strategy: str, offload: Offload, mistake: Any = nullcontext, dtype: torch.dtype = torch.bfloat16
) -> list[str]:
    module = zoo.build("tied").to(dtype)
    optimizer = zoo.OPTIMIZERS["adamw"](module.parameters())
    with ExitStack() as stack:
        if isinstance(offload, NvmeOffload):
            offload = replace(offload, path=stack.enter_context(TemporaryDirectory()))
        detector = stack.enter_context(RaceDetector(cuda))
        stack.enter_context(mistake())
        engine = initialize(module, optimizer, strategy, bucket_bytes=4096, tile_bytes=4096, offload=offload)
        for step in range(4):
            for micro in range(2):
                engine.backward(engine(*zoo.tokens(1, 2, 2 * step + micro)))
            if step < 3:
                engine.clip_grad_norm_(1.0)
            else:  # an evaluation that the host runs ahead of: to clip it would wait
                with torch.no_grad():
                    engine(*zoo.tokens(1, 2, 50))
            engine.step()
        engine.load_state_dict(engine.state_dict())
        with torch.no_grad():
            engine(*zoo.tokens(1, 2, 50))
        engine.settle()
    assert len(cuda.streams) == 5
    return detector.races


STAGES_THAT_SHOW_IT = {"all": "zero1", "optimizer": "zero2", "gradients": "zero3", "half": "zero2",
                       "parameters": "zero3", "delayed": "zero2", "files": "zero3"}  # fmt: skip
"""What leaves -> the stage with which every run of the tests has it; the others wait for `make test-all`."""


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    ("strategy", "parts"),
    [
        pytest.param(s, p, marks=() if STAGES_THAT_SHOW_IT[p] == s else pytest.mark.thorough)
        for s in ("zero1", "zero2", "zero3")
        for p in PARTS
        if s == "zero3" or p != "parameters"
    ],
)
def test_no_race(cuda: ModeledCuda, strategy: str, parts: str, dtype: torch.dtype) -> None:
    assert races_of(cuda, strategy, PARTS[parts], dtype=dtype) == []


def instead(owner: Any, name: str, act: Any = lambda *_, **__: None) -> Any:
    """Another method, or one that does nothing, in the place of one."""
    return lambda: mock.patch.object(owner, name, act)


MISTAKES = {
    "a buffer is given back while gradients leave it": instead(cpu.HostGradients, "release", lambda _, give: give()),
    "gradients are read on their way": instead(cpu, "wait_for"),
    "parameters are sent on before they are up": instead(cpu.CopyStreams, "join"),
    "masters are updated or loaded while they go up": instead(cpu.CopyStreams, "wait"),
    "a buffer is another cut's while it goes up": instead(nvme, "wait_for"),
    "shards are updated while an evaluation fetches them": instead(cpu.CopyStreams, "wait_for_fetches"),
}


@pytest.mark.parametrize("mistake", list(MISTAKES)[:3])
def test_planted_races_are_seen(cuda: ModeledCuda, mistake: str) -> None:
    assert races_of(cuda, "zero2", Offload(), MISTAKES[mistake])


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.thorough)])
def test_a_planted_race_with_what_is_fetched_is_seen(cuda: ModeledCuda, dtype: torch.dtype) -> None:
    mistake = MISTAKES["shards are updated while an evaluation fetches them"]
    assert races_of(cuda, "zero3", PARTS["parameters"], mistake, dtype)


@pytest.mark.parametrize(
    ("parts", "mistake"),
    [
        ("all", "masters are updated or loaded while they go up"),
        ("delayed", "masters are updated or loaded while they go up"),
        ("files", "a buffer is another cut's while it goes up"),
    ],
)
def test_planted_races_with_what_goes_up_are_seen(cuda: ModeledCuda, parts: str, mistake: str) -> None:
    assert races_of(cuda, "zero2", PARTS[parts], MISTAKES[mistake], torch.float32)


@pytest.mark.parametrize("way", ["checkpoint", "state dict"])
def test_a_load_waits_for_what_goes_up_before_it_writes_to_masters(way: str, tmp_path: Path) -> None:
    module = zoo.build("tied")
    engine = initialize(module, zoo.OPTIMIZERS["adamw"](module.parameters()), "zero2", offload=Offload())
    engine.backward(engine(*zoo.tokens(0, 1, 0)))
    engine.step()
    engine.save(tmp_path / "kept")
    kept, master = engine.state_dict(), engine.placement.all_ranges()[0].master
    with torch.no_grad():
        master.fill_(7.0)
    untouched: list[bool] = []
    look = mock.Mock(side_effect=lambda: untouched.append(bool((master == 7.0).all())))
    with mock.patch.object(engine.placement, "wait", look):
        engine.load(tmp_path / "kept") if way == "checkpoint" else engine.load_state_dict(kept)
    assert untouched == [True]
    assert master[0] != 7.0
