"""CUDA streams for communication, so that collectives overlap with compute. [Note: communication streams]

Each kind of collective (gathers, reductions) has a stream. A collective on it has three steps::

    1. launch   the communication stream waits for all work queued so far on the current stream: the data to send has
                then been written, and earlier users of the receive buffer's memory have finished
    2. wait     the current stream waits for the event at the collective's end; the host does not wait
    3. free     send and receive buffers are freed in the current stream's order, after `wait`

Every buffer belongs to the compute stream: allocated there before `launch`, freed there after `wait`. So the caching
allocator can reuse its memory immediately, in stream order, without record_stream, which would keep memory until the
host sees, by polling, that the other stream has finished.

torch runs a synchronous collective on the current stream, here the communication stream, and keeps none of its tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

HIGH = -1
"""Stream priority: compute waits for collectives, so their few kernels start as soon as the GPU has room for them."""

Collective = Callable[..., Any]
"""A callable that takes `async_op`, as the collectives of torch.distributed do."""


class Waitable(Protocol):
    """A launched collective."""

    def wait(self) -> object:
        """Makes later work of the current stream (on a CPU: the caller) wait until the collective is done."""


class Threads:
    """A process group whose own threads transfer the bytes, as in gloo: no stream is needed."""

    def launch(self, collective: Collective) -> Waitable:
        """Starts `collective`."""
        work: Waitable = collective(async_op=True)
        return work


class CommStream:
    """A CUDA stream for one kind of collective (see the note). `cuda`: torch.cuda, or a test double."""

    def __init__(self, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        self._stream = cuda.Stream(priority=HIGH)

    def launch(self, collective: Collective) -> Waitable:
        """Queues `collective` on this stream, behind all work queued so far on the current stream."""
        self._stream.wait_stream(self._cuda.current_stream())  # what is sent must have been written: step 1 of the note
        with self._cuda.stream(self._stream):
            collective(async_op=False)
        return StreamWork(self._cuda, self._stream.record_event())


class StreamWork:
    """A collective on a communication stream. Deleting it waits too: its buffers are still in use."""

    def __init__(self, cuda: Any, end: Any) -> None:
        self._cuda = cuda
        self._end: Any = end

    def wait(self) -> None:
        """Makes the current stream wait for the collective's end, once; the host does not block."""
        end, self._end = self._end, None
        if end is not None:
            self._cuda.current_stream().wait_event(end)

    def __del__(self) -> None:
        self.wait()
