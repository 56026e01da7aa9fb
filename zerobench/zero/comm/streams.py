"""Streams of their own for what travels between GPUs. [Note: lanes]

A *lane* is a stream for one kind of collective, gathers or reductions. A collective in it has a life of three steps::

    launch   the lane waits for all that the current stream has been given so far: what is sent has been written then,
             and who had the memory before that it is received into is done with it
    wait     the current stream waits for the event at the collective's end; the host waits for nothing
    free     what was sent or received is given back in the current stream's order, after `wait`

Every buffer belongs to the stream that computes: made there before `launch`, given back there after `wait`. Its memory
can so be used again at once, in stream order, and needs no record_stream, which holds memory until the host happens to
find that the other stream is through.

torch runs a collective that is not asynchronous in the current stream, the lane here, and keeps no tensor of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

HIGH = -1
"""Priority of what others wait for: its few kernels start as soon as there is room beside those that compute."""

Collective = Callable[..., Any]
"""Takes `async_op`, as those of torch.distributed do."""


class Waitable(Protocol):
    """A collective that was launched."""

    def wait(self) -> object:
        """It is done for whoever comes after in the current stream (on a CPU: for the caller)."""


class Threads:
    """No lane: a process group whose own threads carry the bytes, as gloo's do."""

    def launch(self, collective: Collective) -> Waitable:
        """Starts `collective`."""
        work: Waitable = collective(async_op=True)
        return work


class CommStream:
    """See the note. `cuda`: torch.cuda, or what stands in for it in a test."""

    def __init__(self, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        self._stream = cuda.Stream(priority=HIGH)

    def launch(self, collective: Collective) -> Waitable:
        """Starts `collective` in the lane, behind what the current stream has been given."""
        self._stream.wait_stream(self._cuda.current_stream())
        with self._cuda.stream(self._stream):
            collective(async_op=False)
        return StreamWork(self._cuda, self._stream.record_event())


class StreamWork:
    """A collective in a lane. Dropped before anyone has waited for it, it is waited for: its memory may go with it."""

    def __init__(self, cuda: Any, end: Any) -> None:
        self._cuda = cuda
        self._end: Any = end

    def wait(self) -> None:
        """The current stream goes on when the collective has ended."""
        end, self._end = self._end, None
        if end is not None:
            self._cuda.current_stream().wait_event(end)

    def __del__(self) -> None:
        self.wait()
