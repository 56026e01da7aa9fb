"""Tiers, activation policies, the arena and ZeRO++ on a GPU, with copies that are late; the same on a CPU, without, in
`make test-all`: equal to the bit.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.test_streams import MISTAKES, PARTS
from tests.faults.disk import opened
from tests.gpu.injected import (
    RATE,
    adam,
    bound,
    engine_of,
    evaluate,
    exact,
    gradients_of,
    keep_busy,
    late,
    masters,
    model_of,
    train,
)
from tests.ranks import one_thread
from zerobench.probes import allocator as probe
from zerobench.zero import NvmeOffload, Offload, Zeropp, initialize
from zerobench.zero.activations import policies
from zerobench.zero.activations.policies import POLICIES
from zerobench.zero.comm.base import FAKE
from zerobench.zero.comm.quantize import Codec
from zerobench.zero.offload.disk import ALIGN_BYTES, Pool

ON_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
STEPS = 3

KINDS = {
    **{kind: PARTS[kind] for kind in ("all", "optimizer", "gradients", "half", "parameters")},
    "files": NvmeOffload(path="(a folder)", block_bytes=4096, buffers=8),
    "files, gradients stay": NvmeOffload(path="(a folder)", gradients=False, block_bytes=4096, buffers=8),
    "files, parameters": NvmeOffload(path="(a folder)", parameters=True, block_bytes=4096, buffers=8),
}
STAGES = ("zero1", "zero2", "zero3")
CASES = [(s, k) for s in STAGES for k in KINDS if s == "zero3" or not KINDS[k].parameters]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(params=[pytest.param("cpu", marks=pytest.mark.thorough), pytest.param("cuda", marks=ON_A_GPU)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(params=[1, 2])
def ranks(request: pytest.FixtureRequest, device: torch.device, dtype: torch.dtype) -> Iterator[int]:
    """Alone, and as rank 1 of a simulated world, whose collectives have lanes on a GPU."""
    if device.type == "cpu" and (request.param == 2) != (dtype == torch.bfloat16):
        pytest.skip("on a CPU each dtype in one world, for the time")
    if request.param > 1:
        dist.init_process_group(FAKE, rank=1, world_size=request.param)
    yield request.param
    if dist.is_initialized():
        dist.destroy_process_group()


def offload_of(kind: str, folder: Path) -> Offload:
    chosen = KINDS[kind]
    return replace(chosen, path=str(folder)) if isinstance(chosen, NvmeOffload) else chosen


def parameters_are_rounded(engine: Any) -> bool:
    with engine.placement.in_memory(write_back=False):
        return all(
            torch.equal(run.parameters.cpu(), run.master.to(run.parameters.dtype).cpu())
            for run in engine.placement.all_ranges()
        )


@pytest.mark.shown(24)
@pytest.mark.parametrize(("strategy", "kind"), CASES)
def test_an_update_elsewhere_is_the_same_within_a_rounding(
    strategy: str, kind: str, dtype: torch.dtype, ranks: int, device: torch.device, tmp_path: Path
) -> None:
    """Given equal gradients; each within its half of the bound of injected.py from the exact one."""
    plain = engine_of(strategy, device, dtype)
    losses = torch.stack(train(plain, range(STEPS), device, dtype))
    with late():
        away = engine_of(strategy, device, dtype, offload=offload_of(kind, tmp_path))
        lost = torch.stack(train(away, range(STEPS), device, dtype))
    wanted = exact(dtype, STEPS, ranks)
    for engine in (plain, away):
        for name, master in masters(engine).items():
            (start, end), mine = wanted[name], master.isfinite()
            off = (master.double() - end).abs()[mine]
            assert (off <= bound(start, end, STEPS)[mine]).all(), (name, off.max())
            assert (end - start).abs().min() > 2 * RATE
        assert parameters_are_rounded(engine)
    if device.type == "cpu":
        assert torch.equal(losses, lost)
        there = masters(away)
        assert all(torch.equal(one.nan_to_num(), there[name].nan_to_num()) for name, one in masters(plain).items())
    else:
        assert torch.allclose(losses, lost, rtol=2**-7 if dtype == torch.bfloat16 else 2**-20, atol=1e-2)


@pytest.mark.shown(24)
@pytest.mark.parametrize(("strategy", "kind"), CASES)
def test_what_is_loaded_is_what_the_next_forward_reads(
    strategy: str, kind: str, dtype: torch.dtype, ranks: int, device: torch.device, tmp_path: Path
) -> None:
    """And what an evaluation before it reads is what was there then, also with the device far behind the host."""
    engine = engine_of(strategy, device, dtype, offload=offload_of(kind, tmp_path))
    train(engine, range(1), device, dtype)
    first, saved = evaluate(engine, device, dtype).item(), engine.state_dict()
    train(engine, range(1, STEPS), device, dtype)
    second = evaluate(engine, device, dtype).item()
    with late():
        keep_busy(device)
        before = evaluate(engine, device, dtype)
        engine.load_state_dict(saved)
        after = evaluate(engine, device, dtype)
        engine.backward(engine(gradients_of(1, device, dtype)))
        keep_busy(device)
        between = evaluate(engine, device, dtype)
        engine.step()
        updated = evaluate(engine, device, dtype)
    assert first != second
    assert [before.item(), after.item(), between.item()] == [second, first, first]
    engine.load_state_dict(saved)
    engine.backward(engine(gradients_of(1, device, dtype)))
    engine.step()
    assert updated.item() == evaluate(engine, device, dtype).item() != first


@pytest.mark.parametrize("strategy", STAGES)
def test_a_delayed_update_is_that_of_a_late_loop(strategy: str, device: torch.device) -> None:
    """By hand: masters on the host, from the second step on the gradients of one step are used after the next."""
    steps, after, dtype = 6, 2, torch.float32
    with late():
        engine = engine_of(strategy, device, dtype, offload=Offload(delayed_after=after))
        mine = [loss.item() for loss in train(engine, range(steps), device, dtype)[::2]]
    model, masters_ = model_of(device, dtype), model_of(torch.device("cpu"), dtype)
    optimizer, waiting, losses = adam(masters_.parameters()), None, []
    for step in range(steps):
        gradients = gradients_of(step, device, dtype)
        losses.append(model(gradients).item())
        due, waiting = (gradients, None) if step < after else (waiting, gradients)
        if due is not None:
            for parameter, gradient in zip(masters_.parameters(), due, strict=True):
                parameter.grad = gradient.cpu()
            optimizer.step()
            model.load_state_dict(masters_.state_dict())
    assert mine == losses
    assert len(set(losses[: after + 2])) == after + 1 + (losses[after] != losses[after + 1])


# -- activations, arena ------------------------------------------------------------------------------------

WIDTH, ROWS = 64, 48


class Block(nn.Module):
    """Random numbers, and kernels whose sums have one order."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.linear(x).sin())


def trained(device: torch.device, strategy: str, policy: str, slabs: bool = False, **options: Any) -> list[Any]:
    """Losses and weights after three steps of two micro-batches."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(5)))
    chosen = replace(POLICIES[policy], least_bytes=4 * WIDTH * ROWS)
    policies.apply(model, replace(chosen, keep="slab") if slabs else chosen)
    model.to(device)
    engine = initialize(model, adam(model.parameters()), strategy, bucket_bytes=16 * 1024, **options)
    losses = []
    with late():
        for step in range(STEPS):
            for micro in range(2):
                x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(2 * step + micro)).to(device)
                loss = engine(x).square().mean()
                engine.backward(loss)
                losses.append(loss.detach())
            engine.step()
    return [torch.stack(losses), *engine.full_state_dict().values()]


@pytest.mark.parametrize("strategy", STAGES)
def test_activation_policies_and_the_arena_change_nothing(strategy: str, device: torch.device) -> None:
    plain = trained(device, strategy, "none")
    assert len(set(plain[0].tolist())) == 2 * STEPS
    ways: list[dict[str, Any]] = [{"policy": name} for name in POLICIES if name != "none"]
    ways += [{"policy": "none", "arena": True}, {"policy": "checkpoint", "slabs": True, "arena": True}]
    ways += [{"policy": "checkpoint_offload", "arena": True, "offload": Offload(optimizer=False)}]
    for way in ways:
        found = trained(device, strategy, **way)
        assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True)), way


# -- ZeRO++ -------------------------------------------------------------------------------------------------


def test_zeropp_alone_is_plain(device: torch.device) -> None:
    plain = trained(device, "zero3", "none")
    found = trained(device, "zero3", "none", zeropp=Zeropp(True, True, True, 64, 64))
    assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))


@pytest.mark.parametrize("bits", [8, 4])
def test_codes_are_the_same_everywhere(bits: int, dtype: torch.dtype, device: torch.device) -> None:
    """To the bit, coded there and decoded there, numbers that are none and blocks of next to nothing included."""
    generator = torch.Generator().manual_seed(bits)
    for numel, block in ((1, 8), (33, 8), (1000, 17), (4099, 256), (100_000, 256)):
        codec, slices = Codec(bits, block), torch.randn(2, numel, generator=generator).to(dtype)
        slices[0, 0], slices[1, numel // 2 :] = torch.nan, slices[1, numel // 2 :] * 1e-38
        places = (device, torch.device("cpu"))
        size = codec.payload_bytes(numel)
        payloads = [torch.full((2, size), 0xAA, dtype=torch.uint8, device=place) for place in places]
        decoded = [torch.empty(2, numel, dtype=dtype, device=place) for place in places]
        for payload, back in zip(payloads, decoded, strict=True):
            codec.encode(slices.to(back.device), payload)
            codec.decode(payload, back)
        assert torch.equal(payloads[0].cpu(), payloads[1])
        bytes_of = [back.cpu().nan_to_num(nan=7.0).view(torch.uint8) for back in decoded]
        assert torch.equal(*bytes_of)
        assert decoded[1].isnan().sum() == min(block, numel)


# -- what only a GPU has ---------------------------------------------------------------------------------


@ON_A_GPU
@pytest.mark.parametrize("mistake", ["gradients are read on their way", "parameters are sent on before they are up"])
def test_a_planted_mistake_is_seen(mistake: str) -> None:
    here, dtype = torch.device("cuda"), torch.bfloat16
    right = engine_of("zero2", here, dtype, offload=Offload())
    wanted = torch.stack(train(right, range(STEPS), here, dtype))
    with late(), MISTAKES[mistake]():
        wrong = engine_of("zero2", here, dtype, offload=Offload())
        found = torch.stack(train(wrong, range(STEPS), here, dtype))
        torch.cuda.synchronize()
    assert not torch.equal(wanted, found)


@ON_A_GPU
def test_pinned_memory_is_requested_and_held() -> None:
    here, dtype = torch.device("cuda"), torch.bfloat16
    torch.cuda.synchronize()
    probe.reset_peaks()
    before = probe.process_memory(probe.take_peaks())["pinned_requested_bytes"]
    engine = engine_of("zero2", here, dtype, offload=Offload())
    train(engine, range(1), here, dtype)
    told = probe.process_memory(probe.take_peaks())
    kept = sum(run.master.nbytes + 2 * run.master.numel() for run in engine.placement.all_ranges())
    if torch.__version__ >= probe.COUNTS_FREED:
        assert told["pinned_bytes"] >= told["pinned_requested_bytes"] >= before + kept
    else:
        assert told["pinned_requested_bytes"] is None
    assert all(run.master.is_pinned() for run in engine.placement.all_ranges())


@ON_A_GPU
def test_a_pinned_pool_between_a_gpu_and_a_file(tmp_path: Path) -> None:
    size = 2**20
    pool = Pool(size, 3, pinned=True)
    values = torch.arange(size // 4, dtype=torch.int32, device="cuda")
    with opened(tmp_path) as store:
        region, there, back = store.allocate(size), pool.take(), pool.take()
        assert there.is_pinned()
        assert there.data_ptr() % ALIGN_BYTES == 0
        there.view(torch.int32).copy_(values, non_blocking=True)
        torch.cuda.synchronize()
        pool.give(there, after=region.write(there))
        region.read(back).wait()
        assert torch.equal(back.view(torch.int32).to("cuda", non_blocking=True), values)
        pool.give(back)
        store.drain()
        assert pool.taken == 0
