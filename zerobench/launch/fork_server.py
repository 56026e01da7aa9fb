"""The fork server that ranks come from: a process that has torch loaded and has never touched CUDA.

It loads for two seconds, on a core of its own. A command that will launch ranks starts it first of all, and composes
its cells meanwhile.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from typing import Any

PRELOAD = ["torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo", "zerobench.worker"]
"""What ranks need not import themselves; torch's optimizers import dynamo, which takes a second."""


def context() -> ForkServerContext:
    """What starts a process from the server; the first one starts the server too."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # to ask for GPUs is not to touch CUDA
    found = mp.get_context("forkserver")
    found.set_forkserver_preload(PRELOAD)
    return found


def start() -> None:
    """Starts the server, if it does not run, and does not wait until it has loaded."""
    context()
    forkserver.ensure_running()


def end() -> None:
    """Ends the server with the command, in the midst of its imports too: by itself it would first finish them."""
    server: Any = forkserver._forkserver
    if server._forkserver_pid is not None:
        os.kill(server._forkserver_pid, signal.SIGKILL)
        server._stop()


def let_go() -> None:
    """Closes, in a process that came from the server, its copy of the pipe whose end tells the server to end.

    The server then ends with its parent, and the kernel ends us with it, even where we are stopped by a signal.
    """
    server: Any = forkserver._forkserver
    os.close(server._forkserver_alive_fd)
    server._forkserver_alive_fd = None
