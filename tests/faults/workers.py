"""Ranks that go wrong, for the launcher's tests."""

import os
import resource
import signal
import sys
import threading
import time
from functools import partial
from typing import Any

import psutil
import torch


def fine(job: int, tell: Any) -> int:
    tell({"rank": job})
    return job * job


def give_up() -> None:
    raise ValueError("this rank does not like its job\nand says more on a second line")


ENDS = {
    "raises": (1, give_up),
    "killed": (1, lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "killed_without_a_name": (1, lambda: os.kill(os.getpid(), signal.SIGRTMIN + 2)),
    "leaves": (0, lambda: os._exit(7)),
    "leaves_content": (0, lambda: os._exit(0)),
    "exits_content": (0, lambda: sys.exit(0)),
    "stops": (1, lambda: os.kill(os.getpid(), signal.SIGSTOP)),
    "kills_server": (1, lambda: os.kill(os.getppid(), signal.SIGKILL)),
}
"""Name -> the rank that ends, and how; the other one sleeps."""


def ends(name: str, job: int, tell: Any) -> None:
    rank, end = ENDS[name]
    if job == rank:
        end()
    time.sleep(600)


raises, killed, killed_without_a_name, leaves, leaves_content, exits_content, stops, kills_server = (
    partial(ends, name) for name in ENDS
)


def hangs(job: int, tell: Any) -> int:
    if job == 1:
        print("about to hang", flush=True)
        time.sleep(600)
    return job


def out_of_memory(job: int, tell: Any) -> None:
    torch.empty(2**50)


def starts_a_thread_in_limited_memory(job: int, tell: Any) -> None:
    """Limits memory so that a thread's stack alone does not fit: a thread that starts and then finds no memory would
    leave `Thread.start` waiting for it.
    """
    limit = psutil.Process().memory_info().vms + 2**29
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    threading.stack_size(2**30)
    threading.Thread(target=time.sleep, args=[600], daemon=True).start()


def says_pid_and_sleeps(job: Any, tell: Any) -> None:
    with open(job, "w") as file:
        file.write(str(os.getpid()))
    time.sleep(600)
