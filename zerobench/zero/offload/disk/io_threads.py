"""Requests to a file, and the threads that run them.

request   the read or write of one block, usually one system call
handle    the requests of one read or write of a region: launched, then waited for, then dropped
carriers  threads that take requests as they come; requests to one block run one after the other, in order
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
    """`count` pending requests. `keep`: the object that they read from or write into, released when all are done."""

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
        """True if all requests have ended, successfully or not."""
        return self._over.is_set()

    @property
    def failed(self) -> bool:
        """True if a request failed and its error has not been raised yet."""
        return self._error is not None and not self._heard

    def settle(self) -> None:
        """Returns when all requests have ended, successfully or not."""
        self._over.wait()

    def wait(self) -> None:
        """Returns when all requests have ended. Raises the error of the first that failed: DiskError."""
        self.settle()
        self._heard = True
        if self._error is not None:
            raise self._error

    def then(self, act: Act) -> None:
        """Calls `act` when all requests have ended, successfully or not, in the last one's thread; now if they have."""
        with self._lock:
            if not self._over.is_set():
                self._after.append(act)
                return
        act()

    def carry(self, request: Act) -> None:
        """Runs one of the requests; an error is kept for `wait`, and the remaining requests are then skipped."""
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
    """`count` threads that run requests."""

    def __init__(self, count: int, name: str) -> None:
        self._ready: SimpleQueue[tuple[Hashable, Act] | None] = SimpleQueue()
        self._behind: dict[Hashable, deque[Act]] = {}
        self._lock = threading.Lock()
        self._threads = [EngineThread(target=self._run, name=f"{name}-{n}", daemon=True) for n in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, block: Hashable, act: Act) -> None:
        """Lets a thread call `act`, which must not raise, once all earlier requests for `block` have ended."""
        with self._lock:
            if block in self._behind:
                self._behind[block].append(act)
                return
            self._behind[block] = deque()
        self._ready.put((block, act))

    def end(self) -> None:
        """Ends the threads; no requests may be pending."""
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
