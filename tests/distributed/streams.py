"""Streams of a GPU, modeled on a CPU: which stream may touch memory when, whatever order the hardware takes.

The engine runs its GPU way over a simulated world. Operators run at once, but each is written down with the stream that
it was given to. A stream's clock says what of every stream has happened before its next operator::

    an operator           counts on in its own stream, and knows all that the host did before it was launched
    wait_stream, events   bring the other stream's clock along
    the host              has a clock as well: operators over memory that a label or a tier says is the host's, outside
                          of streams, count on in it; only what it waits for, and a copy that is not asynchronous,
                          bring a stream's clock to it

Two accesses to the same bytes, one of them a write, of which neither happened before the other, are a *race*. So is
memory that is given back before the stream that it belongs to, the one that computes, knows all accesses to be over:
it would be handed out again in that stream's order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zerobench.zero import labels

Clock = dict[int, int]

HOST = -1
"""The number of the host's clock."""


class Event(dict[int, int]):
    """Events of a stream so far."""

    def __init__(self, cuda: ModeledCuda, clock: Clock) -> None:
        super().__init__(clock)
        self._cuda = cuda

    def wait(self) -> None:
        self._cuda.current_stream().wait_event(self)

    def synchronize(self) -> None:
        self._cuda.host.wait_event(self)


class Stream:
    """A stream as torch.cuda's, but that its clock is all it has."""

    def __init__(self, cuda: ModeledCuda, number: int) -> None:
        self._cuda = cuda
        self.number = number
        self.clock: Clock = {}

    def synchronize(self) -> None:
        self.record_event().synchronize()

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


class ModeledCuda:
    """The part of torch.cuda that comm/backends.py uses. Stream 0 computes."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.host = Stream(self, HOST)
        self._current = self.Stream()

    def Stream(self, priority: int = 0) -> Stream:
        self.streams.append(Stream(self, len(self.streams)))
        return self.streams[-1]

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
class RaceDetector(TorchDispatchMode, labels.Observer):
    """Inside, every operator's accesses are held against those before. `races`: a line each."""

    cuda: ModeledCuda
    races: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._accesses: dict[int, list[Access]] = {}
        self._on_host: set[int] = set()
        self._named: set[int] = set()

    def on_tensor(self, tensor: torch.Tensor, category: str, name: str, tier: str | None) -> None:
        if tier == labels.HOST:
            self._note_host(tensor)
        else:
            self._named.add(self._watch(tensor.untyped_storage()))

    def __enter__(self) -> RaceDetector:
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            if size == 0:
                named = storage._cdata in self._named
                self._free(storage._cdata)
                self._named |= {storage._cdata} if named else set()  # what it is called is for life
            return resize(storage, size)

        self._patch = mock.patch.object(torch.UntypedStorage, "resize_", resize_)
        self._patch.start()
        labels.listen(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        labels.unlisten(self)
        self._patch.stop()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        named = named or {}
        result = function(*arguments, **named)
        if _is_view(function) or function._schema.name in ("aten::empty", "aten::set_"):
            return result
        written = self._written(function, arguments, named)
        given = [one for one in tree_leaves((arguments, named)) if isinstance(one, torch.Tensor)]
        tensors = [*given, *(one for one in tree_leaves(result) if isinstance(one, torch.Tensor))]
        stream = self._stream_of(given, tensors)
        stream.wait_event(self.cuda.host.record_event())  # what the host did before it launched this
        count = stream.tick()
        for tensor in tensors:
            if tensor.numel():
                self._touch(tensor, any(tensor is one for one in written), stream, count, str(function))
        if (
            stream is self.cuda.streams[0]
            and not _is_asynchronous(function, arguments, named)
            and any(self._is_hosts(tensor) for tensor in tensors)
        ):
            self.cuda.host.wait_event(stream.record_event())  # a copy that the host waits for
        return result

    def _stream_of(self, given: list[torch.Tensor], tensors: list[torch.Tensor]) -> Stream:
        """The host, where nothing else is `given` than its memory; what it makes is its own, too."""
        stream = self.cuda.current_stream()
        is_hosts = any(map(self._is_hosts, given)) and all(self._is_hosts(one) or self._is_new(one) for one in given)
        is_hosts = is_hosts if given else labels.current_tier() == labels.HOST
        if stream is not self.cuda.streams[0] or not is_hosts:
            return stream
        for tensor in tensors:
            self._note_host(tensor)
        return self.cuda.host

    def _is_hosts(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._on_host

    def _is_new(self, tensor: torch.Tensor) -> bool:
        """True while it has no label and was not touched."""
        storage = tensor.untyped_storage()._cdata
        return storage not in self._named and not self._accesses.get(storage)

    def _note_host(self, tensor: torch.Tensor) -> None:
        self._on_host.add(self._watch(tensor.untyped_storage()))

    def _watch(self, storage: torch.UntypedStorage) -> int:
        if storage._cdata not in self._accesses:
            self._accesses[storage._cdata] = []
            weakref.finalize(storage, self._free, storage._cdata)
        return storage._cdata

    def _written(self, function: Any, arguments: Any, named: Any) -> list[Any]:
        """A collective may write to all that it is given; others say what they write to."""
        if function.namespace == "c10d":
            return list(tree_leaves((arguments, named)))
        given = [*zip(function._schema.arguments, arguments, strict=False)]
        given += [(a, named[a.name]) for a in function._schema.arguments if a.name in named]
        return [leaf for a, value in given if a.alias_info and a.alias_info.is_write for leaf in tree_leaves(value)]

    def _touch(self, tensor: torch.Tensor, writes: bool, stream: Stream, count: int, operator: str) -> None:
        storage = tensor.untyped_storage()
        self._watch(storage)
        start = tensor.storage_offset() * tensor.element_size()
        span = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        new = Access(start, start + span * tensor.element_size(), writes, stream.number, count, operator)
        before = self._accesses[storage._cdata]
        for old in before:
            if old.start < new.stop and new.start < old.stop and (old.writes or writes) and not _over(old, stream):
                self.races.append(f"{new.operator} in stream {new.stream} beside {old.operator} in {old.stream}")
        covered = [old for old in before if new.start <= old.start and old.stop <= new.stop and _over(old, stream)]
        self._accesses[storage._cdata] = [old for old in before if old not in covered or (old.writes and not writes)]
        self._accesses[storage._cdata].append(new)

    def _free(self, storage: int) -> None:
        accesses = self._accesses.pop(storage, [])
        self._named.discard(storage)
        if storage in self._on_host:
            self._on_host.discard(storage)
            return  # torch keeps pinned memory until the streams that use it are through
        computes = self.cuda.streams[0]
        for old in accesses:
            if old.stream != HOST and not _over(old, computes):
                self.races.append(f"memory given back beside {old.operator} in stream {old.stream}")


def _is_view(function: Any) -> bool:
    """True where it touches no memory."""
    returns = function._schema.returns
    return bool(returns) and all(r.alias_info and not r.alias_info.is_write for r in returns)


def _is_asynchronous(function: Any, arguments: Any, named: Any) -> bool:
    """Whether the host does not wait for it, be it pinned memory of its own that is copied."""
    asked = arguments[2] if len(arguments) > 2 else named.get("non_blocking")
    return function is torch.ops.aten.copy_.default and bool(asked)


def _over(access: Access, stream: Stream) -> bool:
    """Whether it happened before the stream's next operator."""
    return stream.clock.get(access.stream, 0) >= access.count


class AtOnce:
    """A thread that does all it has to when it is started: operators in other threads are not seen."""

    def __init__(self, target: Callable[..., None], args: tuple[Any, ...], name: str) -> None:
        self.start = partial(target, *args)

    def join(self) -> None:
        """It is over."""
