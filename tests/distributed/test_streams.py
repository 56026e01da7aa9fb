"""The engine's streams on a GPU, without one: in a modeled GPU (streams.py) is no race, and planted ones are seen; the
same of copies between the GPU and host memory, in streams of their own. No step makes the host wait for the GPU.
"""

from __future__ import annotations

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
from torch.utils._python_dispatch import TorchDispatchMode

from tests import zoo
from tests.distributed.streams import AtOnce, ModeledCuda, RaceDetector
from tests.distributed.test_races import RUNS
from tests.distributed.training import take_steps
from tests.plain_kernels import PlainKernels
from zerobench.strategies import wrap
from zerobench.zero import NvmeOffload, Offload, Zeropp, initialize
from zerobench.zero.comm import backends, hierarchical, simulated
from zerobench.zero.comm.base import FAKE
from zerobench.zero.offload import cpu, nvme
from zerobench.zero.optim import delayed_update, one_pass
from zerobench.zero.optim.step_by_tiles import ONE_PASS
from zerobench.zero.precision import LossScaling

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


def races_of(
    cuda: ModeledCuda, strategy: str, options: dict[str, Any], model: str = "tied", mistake: Any = nullcontext
) -> list[str]:
    module = zoo.build(model)
    optimizer = zoo.OPTIMIZERS["adamw"](module.parameters())
    with RaceDetector(cuda) as detector:
        engine = initialize(module, optimizer, strategy, bucket_bytes=4096, **options)
        assert engine.comm.on_streams
        with mistake():
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


@pytest.mark.parametrize(
    ("strategy", "options", "model"),
    [
        *repeated([(*run, "tied") for run in RUNS], (4, 9)),
        *repeated([(*run, "tied") for run in IN_GROUPS], (0, 4)),
        *repeated([(strategy, {}, "unused") for strategy in ("zero3", "zero1", "zero2")], (0,)),
    ],
)
def test_no_race(cuda: ModeledCuda, strategy: str, options: dict[str, Any], model: str) -> None:
    assert races_of(cuda, strategy, options, model) == []


def instead(owner: Any, name: str, act: Any = lambda *_, **__: None) -> Any:
    """Another method, or one that does nothing, in the place of one."""
    return lambda: mock.patch.object(owner, name, act)


def launches(waits: bool, ends: bool) -> Any:
    """Launches that may not wait for what is to be sent, or whose event may be recorded before the collective."""

    def launch(stream: backends.CommStream, collective: Callable[..., Any]) -> backends.StreamWork:
        if waits:
            stream._stream.wait_stream(stream._cuda.current_stream())
        begin = stream._stream.record_event()
        with stream._cuda.stream(stream._stream):
            collective(async_op=False)
        return backends.StreamWork(stream._cuda, stream._stream.record_event() if ends else begin)

    return instead(backends.CommStream, "launch", launch)


LAUNCH_MISTAKES = {
    "never waited for": instead(backends.StreamWork, "wait"),
    "launched too early": launches(waits=False, ends=True),
    "ended too early": launches(waits=True, ends=False),
}


@pytest.mark.shown(3)
@pytest.mark.parametrize("mistake", LAUNCH_MISTAKES)
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_planted_races_are_seen(cuda: ModeledCuda, strategy: str, mistake: str) -> None:
    assert races_of(cuda, strategy, {}, mistake=LAUNCH_MISTAKES[mistake])


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


STAGES_THAT_SHOW_IT = {"parameters": "zero3", "delayed": "zero2"}
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


MISTAKES = {
    "a buffer is given back while gradients leave it": instead(cpu.HostGradients, "release", lambda _, give: give()),
    "gradients are read on their way": instead(cpu, "wait_for"),
    "parameters are sent on before they are up": instead(cpu.CopyStreams, "join"),
    "masters are updated or loaded while they go up": instead(cpu.CopyStreams, "wait"),
    "a buffer is another cut's while it goes up": instead(nvme, "wait_for"),
    "shards are updated while an evaluation fetches them": instead(cpu.CopyStreams, "wait_for_fetches"),
}


IN_UPDATES, IN_BUFFERS, IN_EVALUATIONS = list(MISTAKES)[3:]


@pytest.mark.parametrize(
    ("strategy", "parts", "mistake", "dtype"),
    repeated(
        [
            *(("zero2", "all", mistake, torch.bfloat16) for mistake in list(MISTAKES)[:3]),
            *(("zero3", "parameters", IN_EVALUATIONS, dtype) for dtype in (torch.float32, torch.bfloat16)),
            *(("zero2", parts, IN_UPDATES, torch.float32) for parts in ("all", "delayed")),
            ("zero2", "files", IN_BUFFERS, torch.float32),
        ],
        (3, 5),
    ),
)
def test_planted_races_of_copies_are_seen(
    copying: ModeledCuda, strategy: str, parts: str, mistake: str, dtype: torch.dtype
) -> None:
    assert races_of_copies(copying, strategy, PARTS[parts], MISTAKES[mistake], dtype)


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


# -- a step makes the host wait for nothing --------------------------------------------------------------------

ASKING = (
    "aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.equal", "aten.is_nonzero", "aten.unique"
)  # fmt: skip
"""Operators whose result is a value or a shape that depends on values: on a GPU the host waits for it."""

VARIANTS: list[tuple[str, dict[str, Any], torch.dtype]] = [
    ("zero1", {}, torch.float32),
    ("zero2", {}, torch.bfloat16),
    ("zero3", {"prefetch": 2}, torch.bfloat16),
    ("megatron", {}, torch.bfloat16),
    *((f"zero{stage}", {"loss_scaling": LossScaling(initial=1024.0)}, torch.float16) for stage in (1, 2, 3)),
    ("zero2", {"loss_scaling": LossScaling(initial=1024.0), "tile_bytes": 1024}, torch.float16),
    *((f"zero{stage}", {"tile_bytes": ONE_PASS}, torch.bfloat16) for stage in (1, 2, 3)),
    ("zero2", {"loss_scaling": LossScaling(initial=1024.0), "tile_bytes": ONE_PASS}, torch.float16),
]


class NoKernels(PlainKernels):
    """Updates nothing: a kernel does not wait."""

    def update(self, *_: Any) -> None:
        pass


METHODS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")
"""Methods of a tensor that, on a CPU, read memory and dispatch nothing."""


class Questions(TorchDispatchMode):
    """Counts reads of tensors' values, by operator. `flags`: a tensor in host memory, which may be read."""

    def __init__(self, flags: torch.Tensor | None = None) -> None:
        super().__init__()
        self.asked: list[str] = []
        self._flags = flags
        self._patches = [mock.patch.object(torch.Tensor, name, self._noting(name)) for name in METHODS]

    def _noting(self, name: str) -> Callable[..., Any]:
        method = getattr(torch.Tensor, name)

        def note(tensor: torch.Tensor, *arguments: Any) -> Any:
            if tensor is not self._flags:
                self.asked.append(name)
            return method(tensor, *arguments)

        return note

    def __enter__(self) -> Questions:
        for patch in self._patches:
            patch.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for patch in self._patches:
            patch.stop()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        if str(function).startswith(ASKING):
            self.asked.append(str(function))
        return function(*arguments, **(named or {}))


def step(engine: Any, number: int) -> torch.Tensor:
    loss: torch.Tensor = engine(*zoo.tokens(1, 2, number))
    engine.backward(loss)
    engine.clip_grad_norm_(1.0)
    engine.step()
    return loss.detach()


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(("strategy", "options", "dtype"), VARIANTS)
def test_a_step_asks_for_nothing(strategy: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    module = zoo.build("tied").to(dtype)
    with mock.patch.dict(one_pass.KERNELS, {"cpu": NoKernels}):
        engine = initialize(
            module, zoo.OPTIMIZERS["adamw"](module.parameters()), strategy, bucket_bytes=4096, **options
        )
    assert (engine.update.one_pass is not None) == (options.get("tile_bytes") == ONE_PASS)
    step(engine, 0)
    with Questions(engine.update._used_flags) as questions:
        for number in range(1, 3):
            step(engine, number)
    assert questions.asked == []


@pytest.mark.usefixtures("cuda")
def test_the_baseline_asks_for_nothing_either() -> None:
    module = zoo.build("tied").to(torch.float16)
    section = {"name": "ddp", "bucket_bytes": 2**20, "broadcast_buffers": True}
    scaling = {"tile_bytes": 2**20, "loss_scaling": LossScaling(initial=1024.0)}
    engine = wrap(section, module, zoo.OPTIMIZERS["adamw"](module.parameters()), **scaling)
    step(engine, 0)
    with Questions() as questions:
        step(engine, 1)
    assert questions.asked == []


@pytest.mark.usefixtures("cuda")
def test_a_question_is_seen() -> None:
    for question in (float, bool, int, lambda t: t.tolist(), lambda t: t.cpu(), lambda t: t.nonzero()):
        with Questions() as questions:
            question(torch.ones(1) * 2)
        assert questions.asked
