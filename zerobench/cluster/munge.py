"""MUNGE credentials, available on SLURM clusters: text that only one user's processes can open, on machines that share
the cluster's key, and that identifies the user who made it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable

SHAPE = re.compile(r"MUNGE:[A-Za-z0-9+/=]{1,4096}:")

REPLAYED = 17
"""Exit code of `unmunge` if another process on this machine has already opened the credential: it is valid."""

WAIT_S = 10

Ask = Callable[..., str]


def credential(payload: str, lifetime_s: float, socket: str | None) -> str | None:
    """Returns a credential of `payload` for this user only; None if munge is not installed or not running."""
    options = [f"--restrict-uid={os.geteuid()}", f"--ttl={lifetime_s:.0f}"]
    done = _run("munge", *options, given=payload, socket=socket)
    made = done.stdout.strip() if done is not None and done.returncode == 0 else ""
    return made if SHAPE.fullmatch(made) else None


def payload_of(made: str, socket: str | None) -> str | None:
    """Returns the payload of a credential made by a process of this user; None for any other credential."""
    if not SHAPE.fullmatch(made):
        return None
    done = _run("unmunge", "--numeric", "--keys=UID", given=made, socket=socket)
    if done is None or done.returncode not in (0, REPLAYED):
        return None
    head, _, payload = done.stdout.partition("\n\n")
    return payload if head.split() == ["UID:", str(os.geteuid())] else None


def socket_of_slurm(ask: Ask) -> str | None:
    """Returns munged's socket if SLURM's configuration names one, else None for munge's default."""
    try:
        lines = ask("scontrol", "show", "config").splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
    found = [re.search(r"socket=([^,\s]+)", line) for line in lines if line.startswith("AuthInfo")]
    return next((one[1] for one in found if one), None)


def _run(name: str, *options: str, given: str, socket: str | None) -> subprocess.CompletedProcess[str] | None:
    """Runs a munge program; `given` is passed on standard input, since other users can see arguments."""
    if shutil.which(name) is None:
        return None
    command = [name, *options, *([f"--socket={socket}"] if socket else [])]
    try:
        return subprocess.run(command, input=given, capture_output=True, text=True, timeout=WAIT_S)
    except (OSError, subprocess.SubprocessError):
        return None
