"""The fork server that ranks are forked from: a process that has loaded torch but never used CUDA.

Loading takes two seconds on its own core. A command that will launch ranks starts it first, and composes its cells
meanwhile.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import tempfile
from contextlib import ExitStack, suppress
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.context import ForkServerContext
from typing import Any

from ..host.temporary import TEMPORARY, temporary_folder

PRELOAD = ["zerobench.ranks.frozen"]
"""Modules preloaded for ranks."""

LONGEST_FOLDER = 85
"""Maximum bytes of a folder's path, so that the server's socket path, 18 bytes longer, fits a socket address (Linux
107, macOS 103).
"""

SHORT_PARENTS = ("/tmp", "/var/tmp", "/dev/shm")
"""Directories for the server's folder if TMPDIR is too long, in the order in which they are tried."""


class NoFolderError(OSError):
    """Raised if no directory can hold the server's socket."""


def context() -> ForkServerContext:
    """Returns the context that forks processes from the server; starting the first process also starts the server."""
    # GPUs are counted without initializing CUDA, which a fork would break.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    _use_own_folder()
    forking = mp.get_context("forkserver")
    forking.set_forkserver_preload(PRELOAD)
    return forking


def _use_own_folder() -> None:
    """Gives multiprocessing a folder for the server's socket that the next command removes if this one is killed, with
    a path that is short enough. multiprocessing's own folder would stay, and is in TMPDIR whatever its length. Either
    is removed when the interpreter exits normally.
    """
    settings: dict[str, Any] = mp.current_process()._config  # type: ignore[attr-defined]
    if settings.get("tempdir") is not None:
        return
    usual = tempfile.gettempdir()
    for parent in filter(os.path.isdir, (usual, *SHORT_PARENTS)):
        with suppress(OSError), ExitStack() as held:
            folder = str(held.enter_context(temporary_folder(parent)))
            if len(os.fsencode(folder)) <= LONGEST_FOLDER:
                settings["tempdir"] = folder
                util.Finalize(None, held.pop_all().close, exitpriority=-100)
                return
    most = LONGEST_FOLDER - len(f"/{TEMPORARY}4194304-01234567")  # a process id, and claim's number
    raise NoFolderError(
        f"TMPDIR={usual}: the socket of the ranks' server cannot be made in it, nor in {', '.join(SHORT_PARENTS)};"
        f" name a directory that can be written to, with a path of at most {most} bytes"
    )


def start() -> ForkServerContext:
    """Starts the server if it is not running, without waiting until it has loaded. Returns the context.

    A terminal sends Ctrl-C to all processes of a command. The server inherits a mask that blocks it: during its imports
    it would end with a traceback, and the command decides when ranks end.
    """
    forking = context()
    resource_tracker.ensure_running()  # which would unblock it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return forking


def process_id() -> int | None:
    """Returns the server's process id; None if none was started."""
    server: Any = forkserver._forkserver
    pid: int | None = server._forkserver_pid
    return pid


def end() -> None:
    """Kills the server when the command ends, even during its imports, which it would otherwise complete first."""
    server: Any = forkserver._forkserver
    if server._forkserver_pid is not None:
        os.kill(server._forkserver_pid, signal.SIGKILL)
        server._stop()


def let_go() -> None:
    """Closes, in a process forked from the server, its copy of the pipe whose closing makes the server exit.

    The server then ends with its parent, and the kernel ends this process with the server, even if a signal stopped it.
    """
    server: Any = forkserver._forkserver
    os.close(server._forkserver_alive_fd)
    server._forkserver_alive_fd = None
