"""Agreement of an engine's ranks on a checkpoint operation, before anything is changed.

The ranks use their own gloo group, so that a save can run in a thread during the training's collectives. Only one
thread at a time uses it: a second operation waits for the save in flight.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from .. import labels
from ..comm.base import Comm
from ..comm.hierarchical import new_group_of_hosts
from ..engine import ShardedEngine
from .safetensors import bytes_of

T = TypeVar("T")


class SaveHandle:
    """A save that runs in a thread."""

    def __init__(self, write: Callable[[], None]) -> None:
        self.seen = False
        self.ended = 0.0
        """`time.perf_counter()` at which the save ended, successfully or not; 0 while it runs."""
        threads = ThreadPoolExecutor(1, "checkpoint")
        self._written = threads.submit(self._run, write)
        threads.shutdown(wait=False)  # the thread ends with this save

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        finally:
            self.ended = time.perf_counter()

    def done(self) -> bool:
        """Returns True once the save has ended, successfully or not."""
        return self._written.done()

    def wait(self) -> None:
        """Returns when the checkpoint is complete and on the disk. Raises RuntimeError if it was not written."""
        error = self._written.exception()
        self.seen = True
        if error is not None:
            raise error


class Ranks:
    """The ranks that save and load together, and the save in flight."""

    def __init__(self, engine: ShardedEngine) -> None:
        self.in_flight: SaveHandle | None = None
        self._comm = engine.comm
        self.group = _group_beside(engine.comm)
        self.rank, self.size = (0, 1) if self.group is None else (dist.get_rank(self.group), engine.comm.ranks)

    def agree(self, what: Callable[[], T], files: Callable[[T], Sequence[str]] = lambda value: ()) -> T:
        """Runs `what` on each rank. If it raises on one, all raise its message, as RuntimeError or ValueError.

        `files`: names of the files that a rank's value was read from. If the ranks' names differ, all raise ValueError.
        """
        error_type, text, done, names = "", "", None, []
        try:
            handle, self.in_flight = self.in_flight, None
            if handle is not None and not handle.seen:
                handle.wait()
            done = what()
            names = list(files(done))
        except Exception as error:  # of any kind: without the message the other ranks would wait for ever
            error_type = "runtime" if isinstance(error, RuntimeError) else "value"
            text = str(error) if isinstance(error, RuntimeError | ValueError | OSError) else repr(error)
        request = json.dumps([error_type, text, names])
        with labels.collective("control"):
            answers = self._comm.call("checkpoint", lambda: self._exchange(request), self.group)
        for error_type, text, _ in answers:
            if error_type:
                raise (RuntimeError if error_type == "runtime" else ValueError)(text)
        if any(others != names for _, _, others in answers):
            raise ValueError(
                "load: the ranks read different saves; was the checkpoint replaced meanwhile? Load it again"
            )
        return cast(T, done)

    def each(self, what: Callable[[], Any]) -> list[Any]:
        """Runs `what` on each rank; returns all ranks' values, which must be JSON values. If it raises on some ranks,
        all raise the first one's message with its rank, as RuntimeError.
        """
        why = None
        try:
            text = json.dumps([what(), None])
        except BaseException as error:  # of any kind: without the message the other ranks would wait for ever
            why = error
            text = json.dumps([None, str(error) or repr(error)])
        answers = self._exchange(text)
        for rank, (_, sentence) in enumerate(answers):
            if sentence is not None:
                raise RuntimeError(f"rank {rank}: {sentence}") from (why if rank == self.rank else None)
        return [value for value, _ in answers]

    def _exchange(self, value: str) -> list[Any]:
        """Returns the values of all ranks, which send JSON, in rank order. Nothing is unpickled."""
        text = value.encode()
        if self.group is None:
            return [json.loads(text)]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(text)]), group=self.group)
        most = max(int(size) for size in sizes)
        texts = [torch.zeros(most, dtype=torch.uint8) for _ in range(self.size)]
        padded = torch.frombuffer(bytearray(text.ljust(most)), dtype=torch.uint8)
        dist.all_gather(texts, padded, group=self.group)
        return [json.loads(bytes(bytes_of(text))) for text in texts]  # JSON may end with spaces


_ranks: WeakKeyDictionary[Any, Ranks] = WeakKeyDictionary()
_groups: WeakKeyDictionary[Any, dist.ProcessGroup] = WeakKeyDictionary()


def ranks_of(engine: ShardedEngine) -> Ranks:
    """Returns the engine's ranks; the first call creates their group and is collective."""
    if engine not in _ranks:
        _ranks[engine] = Ranks(engine)
    return _ranks[engine]


def _group_beside(comm: Comm) -> dist.ProcessGroup | None:
    """Returns a group of hosts for checkpoints, created once; None in a world of one rank."""
    if comm.group is not None and comm.group not in _groups:
        comm.meet("first checkpoint")
        _groups[comm.group] = new_group_of_hosts(comm)
    return None if comm.group is None else _groups[comm.group]
