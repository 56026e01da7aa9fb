"""Ranks that go wrong, for the launcher's tests."""

import os
import signal
import time
from typing import Any

import torch


def fine(job: int, tell: Any) -> int:
    tell({"rank": job})
    return job * job


def raises(job: int, tell: Any) -> None:
    if job == 1:
        raise ValueError("this rank does not like its job\nand says more on a second line")
    time.sleep(600)


def killed(job: int, tell: Any) -> None:
    if job == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def killed_without_a_name(job: int, tell: Any) -> None:
    if job == 1:
        os.kill(os.getpid(), signal.SIGRTMIN + 2)
    time.sleep(600)


def leaves(job: int, tell: Any) -> None:
    if job == 0:
        os._exit(7)
    time.sleep(600)


def leaves_content(job: int, tell: Any) -> None:
    if job == 0:
        os._exit(0)
    time.sleep(600)


def exits_content(job: int, tell: Any) -> None:
    if job == 0:
        raise SystemExit(0)
    time.sleep(600)


def stops(job: int, tell: Any) -> int:
    if job == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)
    return job


def kills_server(job: int, tell: Any) -> None:
    if job == 1:
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def hangs(job: int, tell: Any) -> int:
    if job == 1:
        print("about to hang", flush=True)
        time.sleep(600)
    return job


def out_of_memory(job: int, tell: Any) -> None:
    torch.empty(2**50)


def says_pid_and_sleeps(job: Any, tell: Any) -> None:
    with open(job, "w") as file:
        file.write(str(os.getpid()))
    time.sleep(600)
