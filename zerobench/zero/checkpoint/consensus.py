"""Agreement of an engine's ranks on a checkpoint operation, before anything is changed.

They use a gloo group of their own, so that a save can run in a thread beside the training's collectives. One thread at
a time uses it: a second operation waits for the save in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from .. import labels
from ..comm.base import Comm
from .engine_view import CheckpointEngine

T = TypeVar("T")


class SaveHandle:
    """A save that runs in a thread."""

    def __init__(self, write: Callable[[], None]) -> None:
        self._error: Exception | None = None
        self._seen = False
        self._thread = Thread(target=self._run, args=(write,), name="checkpoint")
        self._thread.start()

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:
            self._error = error

    def done(self) -> bool:
        """Returns True once the save has ended, successfully or not."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Returns when the checkpoint is complete and on the disk. Raises RuntimeError where it was not written."""
        self._thread.join()
        self._seen = True
        if self._error is not None:
            raise self._error

    def wait_unless_seen(self) -> None:
        """Waits; an error that `wait` has raised before is not raised again."""
        seen = self._seen
        try:
            self.wait()
        except RuntimeError:
            if not seen:
                raise


class Ranks:
    """The ranks that save and load together, and the save in flight."""

    def __init__(self, engine: CheckpointEngine) -> None:
        self.in_flight: SaveHandle | None = None
        self._comm = engine.comm
        self.group = _group_beside(engine.comm)
        self.rank, self.size = (0, 1) if self.group is None else (dist.get_rank(self.group), engine.comm.ranks)

    def agree(self, what: Callable[[], T]) -> T:
        """Runs `what` on each rank; where it raises on one, all raise its sentence, as RuntimeError or ValueError."""
        refusal: Exception | None = None
        done: Any = None
        try:
            self._land()
            done = what()
        except RuntimeError as error:
            refusal = RuntimeError(str(error))
        except (ValueError, OSError) as error:
            refusal = ValueError(str(error))
        except Exception as error:  # of any kind: without the message the other ranks would wait for ever
            refusal = ValueError(repr(error))
        for one in self._gather(refusal):
            if one is not None:
                raise one
        return done

    def _gather(self, mine: Exception | None) -> list[Exception | None]:
        if self.group is None:
            return [mine]
        errors: list[Exception | None] = [None] * self.size
        with labels.collective("control"):
            self._comm.call("checkpoint", lambda: dist.all_gather_object(errors, mine, group=self.group), self.group)
        return errors

    def _land(self) -> None:
        handle, self.in_flight = self.in_flight, None
        if handle is not None:
            handle.wait_unless_seen()


_ranks: WeakKeyDictionary[Any, Ranks] = WeakKeyDictionary()
_groups: WeakKeyDictionary[Any, dist.ProcessGroup] = WeakKeyDictionary()


def ranks_of(engine: CheckpointEngine) -> Ranks:
    """Returns the engine's ranks; the first call creates their group and is collective."""
    if engine not in _ranks:
        _ranks[engine] = Ranks(engine)
    return _ranks[engine]


def _group_beside(comm: Comm) -> dist.ProcessGroup | None:
    """Returns a gloo group of the same ranks, created once by them alone; None in a world of one rank.

    torch names such a group after its ranks and the number of groups that each is in (torch-private, tested). Where
    these numbers differ, the ranks would wait for each other under different names: groups of one rank make them equal.
    """
    if comm.group is None:
        return None
    if comm.group not in _groups:
        members = dist.get_process_group_ranks(comm.group)
        known = dist.distributed_c10d._world.pg_names
        comm.meet("first checkpoint")
        most = torch.tensor([len(known)], dtype=torch.int32, device=_device(comm.group))
        comm.maximum(most)
        while len(known) < most.item():
            dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
        _groups[comm.group] = dist.new_group(members, backend="gloo", use_local_synchronization=True)
    return _groups[comm.group]


def _device(group: dist.ProcessGroup) -> str:
    return "cuda" if "nccl" in str(dist.get_backend_config(group)) else "cpu"
