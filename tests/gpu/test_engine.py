"""The engine on a GPU: no step waits for it, memory does not grow, and late streams change nothing.

One process is rank 1 of a simulated world (real streams and tensors), so that one GPU is enough.
"""

import copy
import functools
import gc
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests import zoo
from tests.distributed.test_comm import check_comm
from tests.distributed.test_races import RUNS
from tests.distributed.test_streams import VARIANTS
from tests.gpu.injected import LATE_CYCLES, late
from zerobench.host.environment import rank_environment
from zerobench.zero import initialize
from zerobench.zero.comm import backends
from zerobench.zero.comm.backends import NcclComm
from zerobench.zero.comm.base import FAKE
from zerobench.zero.comm.simulated import SimulatedNccl
from zerobench.zero.optim import one_pass
from zerobench.zero.optim.step_by_tiles import ONE_PASS
from zerobench.zero.precision import LossScaling

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)


@pytest.fixture(params=[2, 4], autouse=True)
def world(request: pytest.FixtureRequest) -> Iterator[None]:
    dist.init_process_group(FAKE, rank=1, world_size=request.param)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def engine_for(strategy: str, options: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    module = zoo.build("tied").to("cuda", dtype)
    engine = initialize(module, zoo.OPTIMIZERS["adamw"](module.parameters()), strategy, bucket_bytes=4096, **options)
    assert isinstance(engine.comm, SimulatedNccl)
    return engine


def batch(number: int) -> list[torch.Tensor]:
    return [tensor.pin_memory().to("cuda", non_blocking=True) for tensor in zoo.tokens(1, 2, number)]


def step(engine: Any, number: int) -> torch.Tensor:
    loss: torch.Tensor = engine(*batch(number))
    engine.backward(loss)
    engine.clip_grad_norm_(1.0)
    engine.step()
    return loss.detach()


@pytest.mark.parametrize(("strategy", "options", "dtype"), VARIANTS)
def test_no_step_waits_for_the_gpu(strategy: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    engine = engine_for(strategy, options, dtype)
    for number in range(3):
        step(engine, number)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("error")
        losses = [step(engine, number) for number in range(3, 6)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.stack(losses).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "megatron"])
def test_kernel_of_the_update_trains_as_tiles_do(strategy: str, dtype: torch.dtype) -> None:
    """Several buckets, clipping, in fp16 loss scaling; the comparison at the first use finds no difference."""
    assert one_pass.triton_kernels(torch.device("cuda", torch.cuda.current_device())) is not None
    scaling = {"loss_scaling": LossScaling(initial=1024.0)} if dtype == torch.float16 else {}
    losses = []
    for tile_bytes in (ONE_PASS, 2**28):
        engine = engine_for(strategy, {"tile_bytes": tile_bytes} | scaling, dtype)
        assert (engine.update.one_pass is not None) == (tile_bytes == ONE_PASS)
        losses.append(torch.stack([step(engine, number) for number in range(6)]).tolist())
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)


class Wide(nn.Module):
    """Units larger than what the allocator hands out in one piece for small tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(6))

    def forward(self, x):
        return functools.reduce(lambda h, block: torch.relu(block(h)), self.blocks, x).sum()


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_memory_does_not_grow_when_the_host_runs_ahead(strategy: str) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    module = Wide().cuda()
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    engine = initialize(module, optimizer, strategy, bucket_bytes=4 * 2**20)
    inputs = torch.ones(8, 1024, device="cuda")
    peaks = []
    with late():
        for number in range(40):
            if number in (5, 20):
                torch.cuda.reset_peak_memory_stats()
            engine.backward(engine(inputs))
            engine.step()
            if number in (19, 39):
                peaks.append((torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))
    assert peaks[0] == peaks[1]


@contextmanager
def in_series() -> Iterator[None]:
    """The device is idle whenever a collective is launched or waited for."""
    launch = backends.CommStream.launch

    def launch_alone(stream: backends.CommStream, collective: Any) -> Any:
        torch.cuda.synchronize()
        ticket = launch(stream, collective)
        torch.cuda.synchronize()
        return ticket

    with mock.patch.object(backends.CommStream, "launch", launch_alone):
        yield


def trained(strategy: str, options: dict[str, Any]) -> list[torch.Tensor]:
    engine = engine_for(strategy, options)
    losses = [step(engine, number) for number in range(4)]
    state = copy.copy(engine.state_dict()["tensors"])
    return [torch.stack(losses).cpu(), *(tensor.cpu() for tensor in state.values())]


@pytest.mark.parametrize(("strategy", "options"), RUNS)
def test_late_collectives_change_nothing(strategy: str, options: dict[str, Any]) -> None:
    with in_series():
        expected = trained(strategy, options)
    with late():
        got = trained(strategy, options)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


@contextmanager
def unawaited() -> Iterator[None]:
    """A mistake: nobody waits for a collective. No storage is given back, so that what comes late hits nobody else."""
    resize, forgotten = torch.UntypedStorage.resize_, []

    def keep(storage: torch.UntypedStorage, size: int) -> Any:
        return storage if size in (0, storage.nbytes()) else resize(storage, size)

    with (
        mock.patch.object(backends.StreamWork, "wait", lambda ticket: forgotten.append(ticket)),
        mock.patch.object(torch.UntypedStorage, "resize_", keep),
    ):
        yield
        torch.cuda.synchronize()
    for ticket in forgotten:
        ticket.wait()


def test_a_planted_race_is_seen() -> None:
    """A gather brings zeros for the other ranks' parts; who does not wait finds what was there before."""
    with in_series():
        expected = trained("zero3", {"prefetch": 2})
    with late(20 * LATE_CYCLES), unawaited():  # also if other processes use the GPU, which delays what reads too early
        got = trained("zero3", {"prefetch": 2})
    assert any(not torch.equal(one, other) for one, other in zip(got, expected, strict=True))


def test_collectives_over_nccl_itself() -> None:
    """A world of one, but NCCL's: in place, into another place, in lanes."""
    dist.destroy_process_group()
    with (
        tempfile.TemporaryDirectory() as folder,
        rank_environment(0, 1, "cuda", "nccl", f"{folder}/rendezvous", torch.get_num_threads(), 60.0) as here,
    ):
        comm = NcclComm(dist.group.WORLD)
        assert comm.flags_device == torch.device("cpu")
        check_comm(comm, here)
