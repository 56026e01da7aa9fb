"""The fork server that ranks are forked from: a process that has loaded torch and has never used CUDA.

It loads for two seconds, on a core of its own. A command that will launch ranks starts it first, and composes its cells
meanwhile.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from typing import Any

PRELOAD = [
    "torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo", "zerobench.worker", "zerobench.launch.frozen",
]  # fmt: skip
"""Modules that ranks get preloaded; torch's optimizers import dynamo, which takes a second."""


def context() -> ForkServerContext:
    """Returns the context that forks processes from the server; the first process starts the server too."""
    # GPUs are counted without initializing CUDA, which a fork would break.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    found = mp.get_context("forkserver")
    found.set_forkserver_preload(PRELOAD)
    return found


def start() -> None:
    """Starts the server, if it does not run, and does not wait until it has loaded."""
    context()
    forkserver.ensure_running()


def end() -> None:
    """Ends the server with the command, even during its imports, which it would otherwise complete first."""
    server: Any = forkserver._forkserver
    if server._forkserver_pid is not None:
        os.kill(server._forkserver_pid, signal.SIGKILL)
        server._stop()


def let_go() -> None:
    """Closes, in a process from the server, its copy of the pipe whose end makes the server exit.

    The server then ends with its parent, and the kernel ends this process with it, even while a signal has it stopped.
    """
    server: Any = forkserver._forkserver
    os.close(server._forkserver_alive_fd)
    server._forkserver_alive_fd = None
