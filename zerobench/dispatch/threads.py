"""Long-lived threads: a launcher's plugin may start servers that the kernel ends with the thread that started them.

Ray does (PR_SET_PDEATHSIG applies to the thread, not the process): its cluster would end with the first job.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

Work = Callable[[], None]


class StayingThreads:
    """Runs work in reused threads that end with the process, which does not wait for them."""

    def __init__(self) -> None:
        self._free: list[SimpleQueue[Work]] = []

    def run(self, work: Work) -> None:
        """Runs `work`, which must not raise, in a free thread or a new one."""
        if not self._free:
            self._free.append(SimpleQueue())
            threading.Thread(target=self._serve, args=(self._free[-1],), name="launcher", daemon=True).start()
        self._free.pop().put(work)

    def _serve(self, inbox: SimpleQueue[Work]) -> None:
        while True:
            inbox.get()()
            self._free.append(inbox)


THREADS = StayingThreads()
"""Threads of this process."""
