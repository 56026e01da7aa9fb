"""Ranks that go wrong, for the launcher's tests."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path
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


def loses_its_peer(job: int, tell: Any) -> None:
    """Rank 0 fails once rank 1 is gone, of which the end of their pipe tells it."""
    meeting = Path(tempfile.gettempdir()) / f"peers of {os.getppid()}"
    with suppress(FileExistsError):
        os.mkfifo(meeting)
    with meeting.open("w" if job == 1 else "r") as pipe:
        if job == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        pipe.read()
    meeting.unlink()
    raise RuntimeError("Connection closed by peer")


def says_pid_in_the_folder(job: int, tell: Any) -> None:
    says_pid_and_sleeps(f"{os.environ['SAYS_PID_IN']}/pid{job}", tell)
