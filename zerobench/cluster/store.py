"""Communication between the processes of a job: JSON values under keys in the job's store, and heartbeats.

store        torch's TCPStore at MASTER_ADDR:MASTER_PORT, below a prefix of ours
value        JSON, compressed, in pieces within the store's size limit
heartbeat    a counter in the store that a thread of each process increments; one that stops marks a lost process
"""

from __future__ import annotations

import json
import threading
import time
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from typing import Any

PIECE_CHARS = 4 * 2**20
"""Size of a piece: the store refuses values of more than 8 MiB."""

JOIN_S = 300.0
"""Time, in seconds, for all processes of a job to join."""

BEAT_S = 2.0
SILENCE_S = 30.0
"""Time, in seconds, without a heartbeat after which a process counts as lost."""

_TRY_S = 10.0


class LostError(RuntimeError):
    """Raised where the job, or a part of it, cannot be reached; the message is the sentence."""


class JobStore:
    """A connection to the job's store. `host`: this process hosts the store. Every method raises LostError."""

    def __init__(self, address: str, port: int, prefix: str, host: bool = False, patience_s: float = JOIN_S) -> None:
        from torch.distributed import PrefixStore

        self.address = f"{address}:{port}"
        self._store = PrefixStore(prefix, _connect(address, port, host, patience_s))

    def post(self, key: str, value: Any) -> None:
        """Stores a value under `key`, readable once it is complete: by all processes when this returns."""
        data = b64encode(zlib.compress(json.dumps(value).encode(), 1)).decode()
        pieces = [data[at : at + PIECE_CHARS] for at in range(0, len(data), PIECE_CHARS)]
        with self._asking():
            for number, piece in enumerate(pieces):
                self._store.set(f"{key}/{number}", piece)
            self._store.set(key, str(len(pieces)))
            # The store does not acknowledge `set`: an answer to a later request proves that it was handled.
            self._store.check([key])

    def has(self, key: str) -> bool:
        """Returns True where there is a value under `key`."""
        with self._asking():
            return bool(self._store.check([key]))

    def read(self, key: str) -> Any:
        """Returns the value under `key`, or None."""
        if not self.has(key):
            return None
        with self._asking():
            pieces = [self._store.get(f"{key}/{number}") for number in range(int(self._store.get(key)))]
        return json.loads(zlib.decompress(b64decode(b"".join(pieces))))

    def take(self, key: str) -> Any:
        """Returns the value under `key`, or None, and removes it: for a key that a single process reads."""
        if not self.has(key):
            return None
        value = self.read(key)
        self.drop(key)
        return value

    def drop(self, key: str) -> None:
        """Removes the value or the number under `key`, which no process reads any more."""
        with self._asking():
            self._store.delete_key(key)
            for number in count():
                if not self._store.delete_key(f"{key}/{number}"):
                    return

    def increment(self, key: str, more: int) -> int:
        """Adds to the number under `key`, 0 at first; the sum."""
        with self._asking():
            return int(self._store.add(key, more))

    @contextmanager
    def _asking(self) -> Iterator[None]:
        from torch.distributed import DistError

        try:
            yield
        except DistError as error:
            raise LostError(f"the job's store at {self.address} does not answer") from error


def _connect(address: str, port: int, host: bool, patience_s: float) -> Any:
    """Connects with many short attempts, because torch's own does not return before its timeout, and would hold up
    signals.
    """
    from torch.distributed import DistError, TCPStore

    deadline = time.monotonic() + patience_s
    while True:
        try:
            patience = timedelta(seconds=min(_TRY_S, patience_s))
            return TCPStore(address, port, is_master=host, timeout=patience, wait_for_workers=False)
        except DistError as error:
            first = str(error).strip().splitlines()[0]
            if host:
                raise LostError(f"MASTER_PORT={port}: rank 0 cannot keep the job's store there: {first}") from error
            if time.monotonic() > deadline:
                words = f"there is no store at {address}:{port}; do all processes have rank 0's MASTER_ADDR and port?"
                raise LostError(words) from error


class Heartbeat:
    """Increments one rank's counter from a thread, on a connection of its own, until it is stopped."""

    def __init__(self, store: JobStore, rank: int) -> None:
        self._store, self._key, self._over = store, f"heartbeat/{rank}", threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, which must not be inside torch's code when the interpreter shuts down."""
        self._over.set()
        self._thread.join(2 * BEAT_S)

    def _beat(self) -> None:
        try:
            while not self._over.wait(BEAT_S):
                self._store.increment(self._key, 1)
        except LostError:
            return  # the thread that uses the store gets the error there


class HeartbeatMonitor:
    """Finds ranks whose heartbeat has stopped."""

    def __init__(self, store: JobStore, silence_s: float = SILENCE_S) -> None:
        self._store, self._silence_s = store, silence_s
        self._heard: dict[int, tuple[int, float]] = {}

    def silent(self, rank: int) -> bool:
        """Returns True where a rank's heartbeat has not changed for too long, as far as it was observed."""
        beats, now = self._store.increment(f"heartbeat/{rank}", 0), time.monotonic()
        if rank not in self._heard or self._heard[rank][0] != beats:
            self._heard[rank] = beats, now
        return now - self._heard[rank][1] > self._silence_s
