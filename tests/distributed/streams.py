"""Streams of a GPU, modelled on a CPU: who may touch memory when, whatever order the hardware takes.

The engine runs its GPU way over a simulated world. Operators run at once, but each is written down with the stream that
it was given to. A stream's clock says what of every stream has happened before its next operator::

    an operator           counts on in its own stream
    wait_stream, events   bring the other stream's clock along

Two accesses to the same bytes, one of them a write, of which neither happened before the other, are a *race*. So is
memory that is given back before the stream that it belongs to, the one that computes, knows all accesses to be over:
it would be handed out again in that stream's order.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Clock = dict[int, int]


class Event(dict[int, int]):
    """What has happened in a stream so far. The host's own operators are counted in the stream that computes."""

    def __init__(self, cuda: ModelledCuda, clock: Clock) -> None:
        super().__init__(clock)
        self._cuda = cuda

    def wait(self) -> None:
        self._cuda.current_stream().wait_event(self)

    def synchronize(self) -> None:
        self._cuda.streams[0].wait_event(self)


class Stream:
    """A stream as torch.cuda's, but that its clock is all it has."""

    def __init__(self, cuda: ModelledCuda) -> None:
        self._cuda = cuda
        self.number = len(cuda.streams)
        self.clock: Clock = {}
        cuda.streams.append(self)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        for number, count in event.items():
            self.clock[number] = max(self.clock.get(number, 0), count)

    def record_event(self) -> Event:
        return Event(self._cuda, self.clock)

    def tick(self) -> int:
        self.clock[self.number] = self.clock.get(self.number, 0) + 1
        return self.clock[self.number]


class ModelledCuda:
    """What lanes.py uses of torch.cuda. Stream 0 computes."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self._current = Stream(self)

    def Stream(self, priority: int = 0) -> Stream:
        return Stream(self)

    def current_stream(self) -> Stream:
        return self._current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before


@dataclass
class Access:
    """Bytes [start, stop) of a storage, touched by operator number `count` of a stream."""

    start: int
    stop: int
    writes: bool
    stream: int
    count: int
    operator: str


@dataclass
class RaceDetector(TorchDispatchMode):
    """Inside, every operator's accesses are held against those before. `races`: a line each."""

    cuda: ModelledCuda
    races: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._accesses: dict[int, list[Access]] = {}

    def __enter__(self) -> RaceDetector:
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            if size == 0:
                self._free(storage._cdata)
            return resize(storage, size)

        self._patch = mock.patch.object(torch.UntypedStorage, "resize_", resize_)
        self._patch.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.stop()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        named = named or {}
        result = function(*arguments, **named)
        if _is_view(function):
            return result
        written = self._written(function, arguments, named)
        count = self.cuda.current_stream().tick()
        for tensor in tree_leaves((arguments, named, result)):
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                self._touch(tensor, any(tensor is one for one in written), count, str(function))
        return result

    def _written(self, function: Any, arguments: Any, named: Any) -> list[Any]:
        """A collective may write to all that it is given; others say what they write to."""
        if function.namespace == "c10d":
            return list(tree_leaves((arguments, named)))
        given = [*zip(function._schema.arguments, arguments, strict=False)]
        given += [(a, named[a.name]) for a in function._schema.arguments if a.name in named]
        return [leaf for a, value in given if a.alias_info and a.alias_info.is_write for leaf in tree_leaves(value)]

    def _touch(self, tensor: torch.Tensor, writes: bool, count: int, operator: str) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._accesses:
            self._accesses[storage._cdata] = []
            weakref.finalize(storage, self._free, storage._cdata)
        start = tensor.storage_offset() * tensor.element_size()
        span = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        stream = self.cuda.current_stream()
        new = Access(start, start + span * tensor.element_size(), writes, stream.number, count, operator)
        before = self._accesses[storage._cdata]
        for old in before:
            if old.start < new.stop and new.start < old.stop and (old.writes or writes) and not _over(old, stream):
                self.races.append(f"{new.operator} in stream {new.stream} beside {old.operator} in {old.stream}")
        covered = [old for old in before if new.start <= old.start and old.stop <= new.stop and _over(old, stream)]
        self._accesses[storage._cdata] = [old for old in before if old not in covered or (old.writes and not writes)]
        self._accesses[storage._cdata].append(new)

    def _free(self, storage: int) -> None:
        computes = self.cuda.streams[0]
        for old in self._accesses.pop(storage, []):
            if not _over(old, computes):
                self.races.append(f"memory given back beside {old.operator} in stream {old.stream}")


def _is_view(function: Any) -> bool:
    """Whether it touches no memory."""
    returns = function._schema.returns
    return bool(returns) and all(r.alias_info and not r.alias_info.is_write for r in returns)


def _over(access: Access, stream: Stream) -> bool:
    """Whether it happened before the stream's next operator."""
    return stream.clock.get(access.stream, 0) >= access.count
