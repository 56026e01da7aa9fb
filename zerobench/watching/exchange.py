"""Sends the ranks' records to rank 0 through the job's store: no collective, so a rank that has left blocks no other.

A record travels as JSON: no data from another process is unpickled.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch.distributed as dist

PROBLEM = "problem"
"""Key of the error message that a rank posts instead of its record."""

_exchanges = count(1)


class WatchError(RuntimeError):
    """A loop cannot be watched, made no step, or a rank's record is missing."""


@dataclass(frozen=True)
class WatchedWorld:
    """The ranks of a loop, and the start of its watch: by the wall clock, and in seconds of a monotonic clock."""

    rank: int
    world_size: int
    node_size: int | None
    timeout_s: float
    """How long rank 0 waits for a record."""
    prefix: str = field(default_factory=lambda: f"zerobench/watching/{next(_exchanges)}")
    """Prefix of keys in the store; the same on every rank that starts its watches in the same order."""
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="milliseconds"))
    began: float = field(default_factory=time.monotonic)

    @classmethod
    def here(cls, node_size: int | None, timeout_s: float) -> WatchedWorld:
        """Reads the default process group; without one, a world of one rank."""
        joined = dist.is_initialized()
        return cls(dist.get_rank() if joined else 0, dist.get_world_size() if joined else 1, node_size, timeout_s)

    def gather(self, own: dict[str, Any], kind: str = "record") -> list[dict[str, Any]]:
        """Returns all ranks' records on rank 0, on others the own. Raises WatchError for missing ones, or a problem."""
        if self.rank:
            self._post(kind, own)
        if self.rank or self.world_size == 1:
            return [own]
        store, records = _store(), {0: own}
        missing: list[int] = []
        for other in range(1, self.world_size):
            key = f"{self.prefix}/{kind}/{other}"
            try:
                store.wait([key], timedelta(seconds=self.timeout_s if not missing else 0.05))
            except RuntimeError:  # a file store raises no DistError
                missing.append(other)
                continue
            records[other] = json.loads(store.get(key))
            store.delete_key(key)
        for other, record in records.items():
            if PROBLEM in record:  # it may explain why other ranks are missing
                raise WatchError(f"watch: rank {other}: {record[PROBLEM].removeprefix('watch: ')}")
        if missing:
            ranks = ", ".join(map(str, missing))
            raise WatchError(
                f"watch: no record came from rank {ranks} within {self.timeout_s:g} s;"
                " every rank must watch its loop to the end"
            )
        return [*records.values()]

    def post_problem(self, problem: str) -> None:
        """Sends an error message in place of this rank's record, or of rank 0's folder."""
        with suppress(WatchError):  # the caller raises an error with this message as well
            if self.rank:
                self._post("record", {PROBLEM: problem})
            elif self.world_size > 1:
                _store().set(f"{self.prefix}/folder", "")

    def share_folder(self, folder: Path | None) -> Path | None:
        """Returns rank 0's `folder` on every rank. Raises WatchError if rank 0 names none in `timeout_s` seconds."""
        if self.world_size == 1:
            return folder
        store, key = _store(), f"{self.prefix}/folder"
        if self.rank == 0:
            store.set(key, str(folder.resolve()) if folder is not None else "")
            return folder
        try:
            store.wait([key], timedelta(seconds=self.timeout_s))
        except RuntimeError as error:  # a file store raises no DistError
            raise WatchError(f"watch: rank 0 named no folder for snapshots within {self.timeout_s:g} s") from error
        name = store.get(key).decode()
        return Path(name) if name else None

    def _post(self, kind: str, record: dict[str, Any]) -> None:
        try:
            _store().set(f"{self.prefix}/{kind}/{self.rank}", json.dumps(record))
        except RuntimeError as error:  # a file store raises no DistError
            raise WatchError("watch: rank 0, which brings the records together, is gone") from error


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()  # torch-private, pinned by a test
