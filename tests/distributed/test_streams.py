"""The engine's streams on a GPU, without one: no race in a modeled GPU (host/pipes.py), and planted races are seen; the
same of copies between the GPU and host memory, in streams of their own.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
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
from tests.distributed.test_races import RUNS
from tests.distributed.training import take_steps
from zerobench.zero import NvmeOffload, Offload, Zeropp, initialize
from zerobench.zero.comm import backends, hierarchical, simulated
from zerobench.zero.comm.base import FAKE
from zerobench.zero.offload import cpu, nvme
from zerobench.zero.optim import delayed_update

STEPS = 2

IN_GROUPS: list[tuple[str, dict[str, Any]]] = [
    ("zero1", {"node_size": 2, "overlap_gather": True}),
    ("zero2", {"shard_group": 2}),
    ("zero3", {"shard_group": 2, "prefetch": 2}),
    ("zero3", {"node_size": 2}),
    ("zero3", {"node_size": 2, "zeropp": Zeropp(True, True, True), "prefetch": 2}),
]


@pytest.fixture(params=[2, pytest.param(4, marks=pytest.mark.thorough)])
def cuda(request: pytest.FixtureRequest) -> Iterator[ModeledCuda]:
    with world(request.param, 1) as modeled:
        yield modeled


@contextmanager
def world(size: int, rank: int) -> Iterator[ModeledCuda]:
    """A simulated world on a modeled GPU."""
    dist.init_process_group(FAKE, rank=rank, world_size=size)
    modeled = ModeledCuda()
    on_gpu = {"cpu": partial(simulated.SimulatedNccl, cuda=modeled)}
    try:
        with mock.patch.object(simulated, "KINDS", on_gpu):
            yield modeled
    finally:
        dist.destroy_process_group()


def races_of(cuda: ModeledCuda, strategy: str, options: dict[str, Any], model: str = "tied", mistake: Any = None):
    module = zoo.build(model)
    optimizer = zoo.OPTIMIZERS["adamw"](module.parameters())
    with RaceDetector(cuda) as detector:
        engine = initialize(module, optimizer, strategy, bucket_bytes=4096, **options)
        assert engine.comm.on_streams
        with (mistake or nullcontext)():
            for step in range(STEPS):
                for micro in range(2):
                    engine.backward(engine(*zoo.tokens(1, 2, 2 * step + micro)))
                engine.clip_grad_norm_(1.0)
                engine.step()
                with torch.no_grad():
                    engine(*zoo.tokens(1, 2, 50))
            engine.settle()
        lanes_used = [stream for stream in cuda.streams[1:] if stream.clock.get(stream.number)]
        assert len(lanes_used) >= 2
        if not options.keys() & {"node_size", "shard_group", "zeropp"}:
            assert len(lanes_used) == 2
    return detector.races


def repeated(rows: list[Any], shown: tuple[int, ...]) -> list[Any]:
    """Parameters of a test, of which all but those `shown` wait for `make test-all`."""
    return [pytest.param(*row, marks=() if n in shown else pytest.mark.thorough) for n, row in enumerate(rows)]


@pytest.mark.parametrize(("strategy", "options"), repeated(RUNS, (4, 9)))
def test_no_race(cuda: ModeledCuda, strategy: str, options: dict[str, Any]) -> None:
    assert races_of(cuda, strategy, options) == []


@pytest.mark.parametrize(("strategy", "options"), repeated(IN_GROUPS, (0, 4)))
def test_no_race_in_groups(cuda: ModeledCuda, strategy: str, options: dict[str, Any]) -> None:
    assert races_of(cuda, strategy, options) == []


@pytest.mark.parametrize(
    "strategy", ["zero3", *(pytest.param(s, marks=pytest.mark.thorough) for s in ("zero1", "zero2"))]
)
def test_no_race_with_unused_parameters(cuda: ModeledCuda, strategy: str) -> None:
    assert races_of(cuda, strategy, {}, "unused") == []


@contextmanager
def unawaited() -> Iterator[None]:
    """The current stream goes on before the collective has ended."""
    with mock.patch.object(backends.StreamWork, "wait", return_value=None):
        yield


@contextmanager
def launched_too_early() -> Iterator[None]:
    """The stream does not wait for what is to be sent."""

    def launch(stream: backends.CommStream, collective: Callable[..., Any]) -> backends.StreamWork:
        with stream._cuda.stream(stream._stream):
            collective(async_op=False)
        return backends.StreamWork(stream._cuda, stream._stream.record_event())

    with mock.patch.object(backends.CommStream, "launch", launch):
        yield


@contextmanager
def ended_too_early() -> Iterator[None]:
    """The event that is waited for was recorded before the collective."""

    def launch(stream: backends.CommStream, collective: Callable[..., Any]) -> backends.StreamWork:
        stream._stream.wait_stream(stream._cuda.current_stream())
        end = stream._stream.record_event()
        with stream._cuda.stream(stream._stream):
            collective(async_op=False)
        return backends.StreamWork(stream._cuda, end)

    with mock.patch.object(backends.CommStream, "launch", launch):
        yield


@pytest.mark.shown(3)
@pytest.mark.parametrize("mistake", [unawaited, launched_too_early, ended_too_early])
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_planted_races_are_seen(cuda: ModeledCuda, strategy: str, mistake: Any) -> None:
    assert races_of(cuda, strategy, {}, mistake=mistake)


def test_a_collective_that_is_dropped_is_waited_for() -> None:
    cuda = ModeledCuda()
    stream = backends.CommStream(cuda)
    ticket = stream.launch(lambda async_op: cuda.current_stream().tick())
    assert cuda.current_stream().clock == {}
    del ticket
    assert cuda.current_stream().clock == {1: 1}


def test_seams_by_backend_and_device() -> None:
    assert hierarchical.kinds()["nccl", "cuda"] is backends.NcclComm
    assert hierarchical.kinds()["gloo", "cuda"] is backends.StagedComm
    assert hierarchical.kinds()[FAKE, "cuda"] is simulated.SimulatedNccl


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
def copying() -> Iterator[ModeledCuda]:
    """A simulated world on a modeled GPU, with copy streams."""
    with (
        world(2, 1) as modeled,
        mock.patch.object(cpu, "STREAMS", {"cpu": modeled}),
        mock.patch.object(delayed_update, "Thread", AtOnce),
    ):
        yield modeled


def races_of_copies(
    copying: ModeledCuda,
    strategy: str,
    offload: Offload,
    mistake: Any = nullcontext,
    dtype: torch.dtype = torch.bfloat16,
) -> list[str]:
    module = zoo.build("tied").to(dtype)
    optimizer = zoo.OPTIMIZERS["adamw"](module.parameters())
    with ExitStack() as stack:
        if isinstance(offload, NvmeOffload):
            offload = replace(offload, path=stack.enter_context(TemporaryDirectory()))
        detector = stack.enter_context(RaceDetector(copying))
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
    assert len(copying.streams) == 5
    return detector.races


STAGES_THAT_SHOW_IT = {"half": "zero1", "parameters": "zero3", "delayed": "zero2"}
"""What leaves -> the stage with which every run of the tests has it; the others wait for `make test-all`."""


@pytest.mark.parametrize(
    ("strategy", "parts"),
    [
        pytest.param(s, p, marks=() if STAGES_THAT_SHOW_IT.get(p) == s else pytest.mark.thorough)
        for s in ("zero1", "zero2", "zero3")
        for p in PARTS
        if s == "zero3" or p != "parameters"
    ],
)
def test_no_race_of_copies(copying: ModeledCuda, strategy: str, parts: str) -> None:
    assert races_of_copies(copying, strategy, PARTS[parts]) == []


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


@pytest.mark.shown(1)
@pytest.mark.parametrize("mistake", list(MISTAKES)[:3])
def test_planted_races_of_copies_are_seen(copying: ModeledCuda, mistake: str) -> None:
    assert races_of_copies(copying, "zero2", Offload(), MISTAKES[mistake])


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.thorough)])
def test_a_planted_race_with_what_is_fetched_is_seen(copying: ModeledCuda, dtype: torch.dtype) -> None:
    mistake = MISTAKES["shards are updated while an evaluation fetches them"]
    assert races_of_copies(copying, "zero3", PARTS["parameters"], mistake, dtype)


@pytest.mark.shown(1)
@pytest.mark.parametrize(
    ("parts", "mistake"),
    [
        ("all", "masters are updated or loaded while they go up"),
        ("delayed", "masters are updated or loaded while they go up"),
        ("files", "a buffer is another cut's while it goes up"),
    ],
)
def test_planted_races_with_what_goes_up_are_seen(copying: ModeledCuda, parts: str, mistake: str) -> None:
    assert races_of_copies(copying, "zero2", PARTS[parts], MISTAKES[mistake], torch.float32)


@pytest.mark.parametrize("way", ["checkpoint", "state dict"])
def test_a_load_waits_for_what_goes_up_before_it_writes_to_masters(way: str, tmp_path: Path) -> None:
    module = zoo.build("tied")
    engine = initialize(module, zoo.OPTIMIZERS["adamw"](module.parameters()), "zero2", offload=Offload())
    take_steps(engine, 0, 1, [0])
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
