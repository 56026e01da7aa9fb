"""Rounds of a job under torchrun, whose agents start their processes again once one has failed.

round        what is started between two failures: one process per rank. torchrun counts restarts per agent, and counts
             of agents differ, so the processes agree on their round here, in the agents' store, which outlives them
number       of a round: rank 0's process draws it as it comes; all keys of the job lie below it
hello/r      the name that rank r's newest process has drawn, in place of the name of an earlier round's
welcome/n    the number of the round into which rank 0 takes the process of name n, until that has read it
"""

from __future__ import annotations

import secrets
import threading
import time

from .store import JOIN_S, JobStore, LostError

POLL_S = 0.1


class Greeter:
    """Rank 0's side: a new round, into which a thread takes the others until it is stopped. `number`: the round's."""

    def __init__(self, store: JobStore, world_size: int) -> None:
        self._store, self._world_size, self._over = store, world_size, threading.Event()
        self.number = store.increment("rounds", 1)
        self._thread = threading.Thread(target=self._greet, name="greeter", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, once all have come or the command is over."""
        self._over.set()
        self._thread.join()

    def _greet(self) -> None:
        """Takes in whichever process says hello; one of an earlier round will not hear it."""
        greeted: set[str] = set()
        try:
            while not self._over.wait(POLL_S):
                for rank in range(1, self._world_size):
                    name = self._store.read(f"hello/{rank}")
                    if isinstance(name, str) and name not in greeted:
                        greeted.add(name)
                        self._store.post(f"welcome/{name}", self.number)
        except LostError:
            return  # the thread that uses the store gets the error there


def enter(store: JobStore, rank: int) -> int:
    """Returns the number of the round into which rank 0 takes this process. Raises LostError where it does not."""
    name, deadline = secrets.token_hex(8), time.monotonic() + JOIN_S
    store.post(f"hello/{rank}", name)
    while (number := store.take(f"welcome/{name}")) is None:
        if time.monotonic() > deadline:
            raise LostError(f"rank 0 of the job did not come within {JOIN_S:.0f} s")
        time.sleep(POLL_S)
    return int(number)
