"""Substitutes for everything that runs differently on a GPU, one row each.

A torch without CUDA has no fake tensors on "cuda", so fake tensors on "cpu" act as GPU tensors. Only GPU code paths run
(collectives, streams, norms, tiles), and memory is what a GPU would use.

Streams impose no order. The current stream is torch.cpu's placeholder, so that FSDP2, which uses these placeholders,
and the engine share it: an allocation belongs to the stream that is current when it is made. An event is complete when
it is recorded, so waits return immediately.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.nn import functional as F

from ...zero import low_bit, precision, writes
from ...zero.activations import offload as offloaded_activations
from ...zero.comm import quantize, simulated
from ...zero.comm.backends import CommStream
from ...zero.offload import cpu as host_memory
from ...zero.offload import placement
from ...zero.optim import one_pass, step_by_tiles
from ...zero.parameters import access
from .. import observers
from . import kernels
from .device_memory import Allocations
from .kernels import KERNELS, attend


class NullEvent:
    """An event that is already complete."""

    def wait(self) -> None:
        """Goes on."""

    def synchronize(self) -> None:
        """Goes on."""


class NullStream(torch.cpu.Stream):
    """A stream with events, as on a GPU, so that memory kept until an event is kept here too."""

    def record_event(self) -> NullEvent:  # type: ignore[override]
        """Returns an event."""
        return NullEvent()

    def synchronize(self) -> None:
        """Returns immediately."""


class NullCuda:
    """Replaces the module torch.cuda."""

    Stream = NullStream
    stream = staticmethod(torch.cpu.stream)
    current_stream = staticmethod(torch.cpu.current_stream)


ATTENTION_KERNELS = tuple(KERNELS)
"""CUDA kernels of scaled_dot_product_attention."""

ROWS: dict[str, dict[Any, Any]] = {
    "collectives": {"table": simulated.KINDS, "cpu": partial(simulated.SimulatedNccl, cuda=NullCuda)},
    "copies to host memory": {"table": host_memory.STREAMS, "cpu": NullCuda},
    "blocks of quantization": {"table": quantize.CHUNKS, "cpu": 2**62},
    "words of a fingerprint": {"table": access.CHUNKS, "cpu": access.LARGE_CHUNK},
    "results of comparisons": {"table": writes.HOST_MAY_COMPARE, "cpu": False},
    "masters compared with parameters": {"table": placement.COMPARED, "cpu": placement.COMPARED["cuda"]},
    "decoded states of 8 bits": {"table": low_bit.CHUNK_NUMEL, "cpu": low_bit.CHUNK_NUMEL["cuda"]},
    "tiles of an update": {"table": step_by_tiles.TILE_BYTES, "cpu": step_by_tiles.TILE_BYTES["cuda"]},
    "kernels of an update": {"table": one_pass.KERNELS, "cpu": kernels.UpdateKernels},
}
"""Tables by device whose CPU entry is replaced."""

NAMES: dict[str, tuple[Any, str, Any]] = {
    "norms": (precision, "_norms_by_chunk", precision._norms_at_once),
    "copies of activations": (offloaded_activations, "Threads", partial(CommStream, NullCuda)),
    "dropout": (F, "dropout", kernels.dropout),
    "layer norm": (F, "layer_norm", kernels.layer_norm),
    "rms norm": (F, "rms_norm", kernels.rms_norm),
    "copies by collectives": (observers, "COPIED", {}),
}
"""Replaced names: (module or class, name, replacement)."""


@contextmanager
def as_gpu(attention: str | None, workspace_bytes: int) -> Iterator[Allocations]:
    """Makes fake CPU tensors act as GPU tensors, and logs their allocations. `attention`: the attention kernel; None:
    torch's own choice. `workspace_bytes`: of a cuBLAS handle.
    """
    allocations = Allocations(workspace_bytes)

    def attention_here(*arguments: Any, **named: Any) -> torch.Tensor:  # torch.compile traces functions, no partial
        return attend(attention, *arguments, **named)

    with ExitStack() as stack:
        stack.enter_context(observers.listening(allocations.record))
        for row in ROWS.values():
            stack.enter_context(mock.patch.dict(row["table"], {"cpu": row["cpu"]}))
        for module, name, replacement in NAMES.values():
            stack.enter_context(mock.patch.object(module, name, replacement))
        stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", attention_here))
        yield allocations
