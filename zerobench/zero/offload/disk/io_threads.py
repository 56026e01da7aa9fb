"""Requests to a file, and the threads that carry them.

request   the read or the write of one block, one system call as a rule
handle    the requests of one read or write of a region: launched, then waited for, then dropped
carriers  threads that take requests as they come, but those to one block one after the other, in their order
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from queue import SimpleQueue
from typing import Any

from ...labels import EngineThread

Act = Callable[[], None]


class IoHandle:
    """`count` requests under way. `keep` is what they read from or write into; it is let go of when all are done."""

    def __init__(self, count: int, keep: Any = None) -> None:
        self._left, self._keep = count, keep
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._after: list[Act] = []
        self._heard = False
        if not count:
            self._over.set()

    @property
    def done(self) -> bool:
        """All requests are over, well or not."""
        return self._over.is_set()

    @property
    def failed(self) -> bool:
        """True if a request failed and its error was not raised yet."""
        return self._error is not None and not self._heard

    def settle(self) -> None:
        """Returns when all requests are over, well or not."""
        self._over.wait()

    def wait(self) -> None:
        """Returns when all requests are over. Raises what the first that went wrong did: DiskError."""
        self.settle()
        self._heard = True
        if self._error is not None:
            raise self._error

    def then(self, act: Act) -> None:
        """Calls `act` when all requests are over, well or not, in the thread of the last; now if they are."""
        with self._lock:
            if not self._over.is_set():
                self._after.append(act)
                return
        act()

    def carry(self, request: Act) -> None:
        """Carries out one of the requests; what goes wrong is kept for `wait`, and spares those still to come."""
        error = None
        if self._error is None:
            try:
                request()
            except Exception as caught:
                error = caught
        with self._lock:
            self._error = self._error or error
            self._left -= 1
            if self._left:
                return
            self._keep = None
            self._over.set()
        for act in self._after:
            act()


class Carriers:
    """`count` threads."""

    def __init__(self, count: int, name: str) -> None:
        self._ready: SimpleQueue[tuple[Hashable, Act] | None] = SimpleQueue()
        self._behind: dict[Hashable, deque[Act]] = {}
        self._lock = threading.Lock()
        self._threads = [EngineThread(target=self._run, name=f"{name}-{n}", daemon=True) for n in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, block: Hashable, act: Act) -> None:
        """`act`, which raises nothing, is called by a thread once all that came earlier for `block` is over."""
        with self._lock:
            if block in self._behind:
                self._behind[block].append(act)
                return
            self._behind[block] = deque()
        self._ready.put((block, act))

    def end(self) -> None:
        """The threads leave; nothing may be under way any more."""
        for _ in self._threads:
            self._ready.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (request := self._ready.get()) is not None:
            block, act = request
            act()
            del act, request
            with self._lock:
                behind = self._behind[block]
                if behind:
                    self._ready.put((block, behind.popleft()))
                else:
                    del self._behind[block]
