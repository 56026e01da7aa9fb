"""Sends the ranks' records to rank 0 through the job's store: no collective, so a rank that has left blocks no other.

A record travels as JSON: no data from another process is unpickled.
"""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

PROBLEM = "problem"
"""Key of the error message that a rank posts instead of its record."""

_exchanges = 0


class WatchError(RuntimeError):
    """A loop cannot be watched, made no step, or a rank's record is missing."""


def next_place() -> str:
    """Returns a prefix of keys in the store, the same on every rank that creates its watches in the same order."""
    global _exchanges
    _exchanges += 1
    return f"zerobench/watching/{_exchanges}"


def gather(place: str, mine: dict[str, Any], rank: int, world_size: int, timeout_s: float) -> list[dict[str, Any]]:
    """Returns the records of all ranks on rank 0, and only the own record on others.

    Raises WatchError, which names the ranks that posted none within `timeout_s` seconds, or a rank with its problem.
    """
    if world_size == 1:
        return [mine]
    if rank:
        _post(place, rank, mine)
        return [mine]
    store, found = _store(), [mine]
    missing: list[int] = []
    for other in range(1, world_size):
        key = f"{place}/{other}"
        try:
            store.wait([key], timedelta(seconds=timeout_s if not missing else 0.05))
        except RuntimeError:  # a file store raises no DistError
            missing.append(other)
            continue
        found.append(json.loads(store.get(key)))
        store.delete_key(key)
    for other, record in enumerate(found):
        if PROBLEM in record:  # of ranks that are not there it says why, maybe
            raise WatchError(f"watch: rank {other}: {record[PROBLEM].removeprefix('watch: ')}")
    if missing:
        ranks = ", ".join(map(str, missing))
        words = f"watch: no record came from rank {ranks} within {timeout_s:g} s"
        raise WatchError(f"{words}; every rank must watch its loop to the end")
    return found


def post_problem(place: str, problem: str, rank: int, world_size: int) -> None:
    """Sends rank 0 an error message instead of this rank's record; rank 0 tells the others that there is no folder."""
    if world_size == 1:
        return
    with suppress(WatchError):  # the sentence is raised here as well
        if rank:
            _post(place, rank, {PROBLEM: problem})
        else:
            _store().set(f"{place}/folder", "")


def _post(place: str, rank: int, record: dict[str, Any]) -> None:
    try:
        _store().set(f"{place}/{rank}", json.dumps(record))
    except RuntimeError as error:  # a file store raises no DistError
        raise WatchError("watch: rank 0, which brings the records together, is gone") from error


def share_folder(place: str, folder: Path | None, rank: int, world_size: int, timeout_s: float) -> Path | None:
    """Returns rank 0's `folder` on every rank. Raises WatchError if rank 0 names none within `timeout_s` seconds."""
    if world_size == 1:
        return folder
    store, key = _store(), f"{place}/folder"
    if rank == 0:
        store.set(key, str(folder.resolve()) if folder is not None else "")
        return folder
    try:
        store.wait([key], timedelta(seconds=timeout_s))
    except RuntimeError as error:  # a file store raises no DistError
        raise WatchError(f"watch: rank 0 named no folder for snapshots within {timeout_s:g} s") from error
    named = store.get(key).decode()
    return Path(named) if named else None


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()  # torch-private, pinned by a test
