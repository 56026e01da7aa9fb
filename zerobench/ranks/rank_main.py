"""A rank's process, from fork to end: its output, its result or error, and the parent processes that it ends with.

Errors are sent through its pipe, with their kind and notes, not through torch's error files (`record`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing as mp
import os
import pickle
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ..host.signals import end_with_parent
from . import fork_server

Worker = Callable[[Any, Callable[[Any], None]], Any]

GoesOn = Callable[[Any], bool]
"""Takes a job's result: whether its process is fit for another job."""


def once(result: Any) -> bool:
    """Ends a process after its first job."""
    return False


OUT_OF_MEMORY = ("can't allocate memory", "Cannot allocate memory", "out of memory", "ALLOC_FAILED", "bad_alloc")
"""Messages of other allocators than torch's: the system, CUDA, cuBLAS, NCCL, C++."""

NO_THREAD = ("can't start new thread", "Resource temporarily unavailable")
"""Messages of Python and C++ for a thread that cannot be started. Under a limit of memory its stack does not fit."""


def rank_main(worker: Worker, job: Any, pipe: Connection, log: str, goes_on: GoesOn = once) -> None:
    """Runs `worker` and sends its result or error through `pipe`; continues with further jobs from `pipe` as long as
    `goes_on` returns True for a result. Then ends the process.
    """
    try:
        _detach(log)
    except OSError as error:  # it has no log; where the launch has ended meanwhile, its folder is gone, and its pipe
        with contextlib.suppress(OSError):
            _send(pipe, "error", _classify(error))
        os._exit(1)
    try:
        while job is not None:
            result = worker(job, lambda value: _send(pipe, "progress", value))
            # Collecting a process group while holding the GIL waits for a thread that waits for the GIL.
            gc.disable()
            _send(pipe, "result", result)
            job = None
            if goes_on(result):
                with contextlib.suppress(EOFError):  # the parent has closed the pipe: there is no other job
                    job = pickle.loads(pipe.recv_bytes())
    except BaseException as error:
        traceback.print_exc()
        _send(pipe, "error", _classify(error))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        pipe.close()
    os._exit(0)  # nothing of the cell needs cleaning up, and a hung library thread would keep the process alive


def _send(pipe: Connection, kind: str, value: Any) -> None:
    """Sends a plain pickle: multiprocessing's own would pass tensors as handles that end with this process."""
    pipe.send_bytes(pickle.dumps((kind, value)))


def _detach(log: str) -> None:
    """Makes this process end with its parents, leaves Ctrl-C to them, and redirects output to `log`."""
    fork_server.let_go()
    end_with_parent()
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # if memory runs out, the kernel should kill a rank and not the sweep
            Path("/proc/self/oom_score_adj").write_text("1000")

    def leave_with_parent() -> None:  # in case the kernel cannot signal the fork server's end
        if (parent := mp.parent_process()) is not None:
            wait([parent.sentinel])
            os._exit(1)

    threading.Thread(target=leave_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def _place_of(error: BaseException) -> list[str]:
    """Returns "at FILE:LINE in FUNCTION" for the innermost call in the user's code; empty if there is none."""
    from ..probes.source_lines import INSTALLED, PACKAGE, shown_path  # loads torch, as _classify does

    for call in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(call.filename)
        if path.is_relative_to(PACKAGE) or INSTALLED in path.parts:
            continue
        with contextlib.suppress(OSError):  # the working directory is gone
            if shown := shown_path(call.filename):
                return [f"at {shown}:{call.lineno} in {call.name}"]
    return []


def _classify(error: BaseException) -> tuple[str, str]:
    import torch

    text = f"raised {type(error).__name__}: {str(error).strip() or 'no message'}"
    out_of_memory = isinstance(error, torch.OutOfMemoryError | MemoryError) or any(w in text for w in OUT_OF_MEMORY)
    parts = [text.splitlines()[0], *_place_of(error), *getattr(error, "__notes__", ())]
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and any(w in text for w in NO_THREAD):
        out_of_memory = True
        parts.append(f"a thread's stack does not fit in the memory limit of {limit // 1024:,} KiB (ulimit -v)")
    return ("oom" if out_of_memory else "crash"), "; ".join(parts)
