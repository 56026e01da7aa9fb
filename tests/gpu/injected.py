"""Updates of gradients that are equal wherever they come to: injected, not computed.

    gradient   (shape,) of a parameter and step: sign · k/16, k in [8, 24), the sign the same in all steps. The loss is
               Σ p·g, so g is the gradient to the last bit, on any device and in any dtype here; a quarter from one of
               two micro-batches and the rest from the other, by turns, for Adam does not see a factor that all steps
               have; a half of that with two ranks
    exact      Adam in fp64, from the same start
    late       every copy and every collective takes its time to start (on CUDA; a CPU has no streams)

[Note: the bound]
Let ε = 2^-24, and p_T the parameter after T steps. Each step rounds p once, by ε·|p|; signs are constant, so |p| is
never above max(|p_0|, |p_T|), and nothing cancels: momentum and variance are sums of terms of one sign, off by 4 and 5
roundings a step (coefficient, two products, sum, the square), of which the root halves the second. Root, ε, bias
corrections, rate and quotient add 7. With Σ|update| = |p_T - p_0|

    |p_T - exact|  <=  ε · (T · max(|p_0|, |p_T|) + (6.5 · T + 7) · |p_T - p_0|)

which is one rounding of each update, and the update's own. Two implementations differ by no more than twice that.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

from zerobench.zero import initialize
from zerobench.zero.checkpoint.contents import saved_tensors
from zerobench.zero.comm import backends
from zerobench.zero.offload import cpu

LATE_CYCLES = 2_000_000
"""About a millisecond: longer than what computes beside it in these models."""

RATE, BETAS, EPS = 1e-2, (0.9, 0.999), 1e-8
ROUNDING = 2.0**-24


class Holder(nn.Module):
    """Two parameters of sizes that divide by nothing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(width, 13))
        self.vector = nn.Parameter(torch.randn(width))

    def forward(self, matrix: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
        pairs = ((self.matrix, matrix), (self.vector, vector))
        return torch.stack([(p.float() * g.float()).sum() for p, g in pairs]).sum()


class Injected(nn.Module):
    """Given a gradient for each parameter, in order, a scalar whose gradients they are."""

    def __init__(self) -> None:
        super().__init__()
        self.root = nn.Parameter(torch.randn(7))
        self.blocks = nn.ModuleList(Holder(width) for width in (37, 5, 61))

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        total = (self.root.float() * gradients[0].float()).sum()
        for number, block in enumerate(self.blocks):
            total = total + block(*gradients[1 + 2 * number : 3 + 2 * number])
        return total


def model_of(device: torch.device, dtype: torch.dtype) -> Injected:
    torch.manual_seed(0)
    return Injected().to(device, dtype)


def gradients_of(step: int, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    """As the note says, of every parameter."""
    signs, sizes = torch.Generator().manual_seed(1), torch.Generator().manual_seed(100 + step)
    made = []
    for parameter in Injected().parameters():
        sign = torch.randint(0, 2, parameter.shape, generator=signs) * 2 - 1
        size = torch.randint(8, 24, parameter.shape, generator=sizes) / 16
        made.append((sign * size).to(device, dtype))
    return made


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=RATE, betas=BETAS, eps=EPS, fused=True)


def engine_of(strategy: str, device: torch.device, dtype: torch.dtype, **options: Any) -> Any:
    module = model_of(device, dtype)
    return initialize(module, adam(module.parameters()), strategy, bucket_bytes=2048, tile_bytes=1024, **options)


def train(engine: Any, steps: range, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    """Two micro-batches a step, with parts of the gradient. Returns losses, which nobody has waited for."""
    losses = []
    for step in steps:
        for part in (0.25, 0.75) if step % 2 else (0.75, 0.25):
            loss = engine(gradients_of(step, device, dtype))
            engine.backward(part * loss)
            losses.append(loss.detach())
        engine.step()
    return losses


def evaluate(engine: Any, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    with torch.no_grad():
        value: torch.Tensor = engine(gradients_of(50, device, dtype))
    return value


def masters(engine: Any) -> dict[str, torch.Tensor]:
    """Parameter -> the master, flat and on the CPU; NaN where it is another rank's."""
    with engine.placement.in_memory(write_back=False):
        flats = saved_tensors(engine, copy=True)
    found = {}
    for name, parameter in zip(engine.names, engine.trainable, strict=True):
        if chunks := flats.get(f"master.{name}"):
            found[name] = whole = torch.full((parameter.numel(),), torch.nan)
            for first, chunk in chunks.items():
                whole[first : first + chunk.numel()] = chunk
    return found


def exact(dtype: torch.dtype, steps: int, ranks: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Parameter -> flat start and flat end, fp64."""
    device, found = torch.device("cpu"), {}
    for number, (name, parameter) in enumerate(model_of(device, dtype).named_parameters()):
        start = parameter.detach().double().flatten()
        p, m, v = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
        for step in range(steps):
            g = gradients_of(step, device, dtype)[number].double().flatten() / ranks
            m, v = BETAS[0] * m + (1 - BETAS[0]) * g, BETAS[1] * v + (1 - BETAS[1]) * g * g
            hats = m / (1 - BETAS[0] ** (step + 1)), v / (1 - BETAS[1] ** (step + 1))
            p = p - RATE * hats[0] / (hats[1].sqrt() + EPS)
        found[name] = start, p
    return found


def bound(start: torch.Tensor, end: torch.Tensor, steps: int) -> torch.Tensor:
    """See the note."""
    moved = (6.5 * steps + 7) * (end - start).abs()
    return ROUNDING * (steps * torch.maximum(start.abs(), end.abs()) + moved)


@contextmanager
def late(cycles: int = LATE_CYCLES) -> Iterator[None]:
    """Starts collectives and copies late, so that a missing wait reads old values."""
    launch, copy = backends.CommStream.launch, cpu.CopyStreams._copy

    def launch_late(stream: backends.CommStream, collective: Any) -> Any:
        def collective_late(async_op: bool) -> Any:
            torch.cuda._sleep(cycles)
            return collective(async_op=async_op)

        return launch(stream, collective_late)

    def copy_late(way_of: cpu.CopyStreams, place: torch.Tensor, source: torch.Tensor, way: str) -> Any:
        if way_of._cuda is not None:
            with way_of._cuda.stream(getattr(way_of, way)):
                torch.cuda._sleep(cycles)
        return copy(way_of, place, source, way)

    with (
        mock.patch.object(backends.CommStream, "launch", launch_late),
        mock.patch.object(cpu.CopyStreams, "_copy", copy_late),
    ):
        yield


def keep_busy(device: torch.device) -> None:
    """Delays later work of the current stream."""
    if device.type == "cuda":
        torch.cuda._sleep(LATE_CYCLES)
