"""Section 3: the engine's own tests on this GPU (tests/gpu), a task per file, each in a process of its own.

They need pytest. Without a GPU they skip themselves. The collectives that they check, value by value:

full    (N · NUMEL,) fp32 on the device; slice j is rank j's
base    our own, same shape: 0, 1, 2, .... Rank r sends (r + 1) · base
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from zerobench.host.environment import nccl_version
from zerobench.probes.energy import name_of
from zerobench.results.provenance import versions
from zerobench.sizes import show_bytes
from zerobench.zero.comm.base import Comm

from .suite import SuiteLaunch, SuiteSection, SuiteSetup, SuiteTable, SuiteTask

ROOT = Path(__file__).parents[2]

FILES, SMALL_FILES = ("engine", "tiers", "runs", "files"), ("files",)
"""Names in tests/gpu, the most wanted first; on a CPU only the second."""

LIMIT_S = 90.0

NUMEL = 4096


def check_comm(comm: Comm, device: torch.device) -> None:
    """Every collective of a seam: in place, into another place, and the small ones. Raises ValueError if a value is not
    what it must be.
    """
    n, rank = comm.size, comm.rank
    base = torch.arange(float(n * NUMEL), device=device)
    total, mine = n * (n + 1) / 2 * base, slice(rank * NUMEL, (rank + 1) * NUMEL)

    full = (rank + 1) * base
    comm.reduce_scatter(full, "unit").wait()
    check_equal("reduce_scatter", full[mine], total[mine])
    full, into = (rank + 1) * base, torch.zeros_like(base[mine])
    comm.reduce_scatter(full, "unit", into).wait()
    check_equal("reduce_scatter into another place", into, total[mine])
    full = (rank + 1) * base
    comm.all_gather(full, "unit").wait()
    factors = torch.arange(1.0, n + 1, device=device).repeat_interleave(NUMEL)
    check_equal("all_gather", full, factors * base)
    full = (rank + 1) * base
    comm.all_reduce(full, "unit").wait()
    check_equal("all_reduce", full, total)
    _check_small(comm, device)


def _check_small(comm: Comm, device: torch.device) -> None:
    """Checks collectives outside of the volume: norms on the device, flags on the Comm's flags_device."""
    n, rank = comm.size, comm.rank
    values = torch.full((3,), rank + 1.0, dtype=torch.float64, device=device)
    comm.sum(values)
    check_equal("sum", values, torch.full_like(values, n * (n + 1) / 2))
    flags = torch.tensor([rank, -rank, 7], dtype=torch.int32, device=comm.flags_device or device)
    comm.maximum(flags)
    check_equal("maximum", flags, torch.tensor([n - 1, 0, 7], dtype=torch.int32, device=flags.device))
    values = torch.full((3,), rank + 1.0, device=device)
    comm.broadcast(values)
    check_equal("broadcast", values, torch.ones_like(values))


def check_equal(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Raises ValueError with the number of wrong values in `found`."""
    if not torch.equal(found, expected):
        wrong = int((found != expected).sum())
        raise ValueError(f"{name}: {wrong} of {found.numel()} values are wrong")


FIELDS = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.draw,temperature.gpu"
"""Fields that nvidia-smi is asked for."""


def run_tests(name: str, tell: Callable[[Any], None]) -> dict[str, Any]:
    """Runs a file of tests/gpu. Returns how many tests ended how, those that failed, and facts on the device. Raises
    RuntimeError with pytest's last line if it ran none.
    """
    command = [sys.executable, "-m", "pytest", f"tests/gpu/test_{name}.py", "-q", "-rfE", "-o", "addopts="]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    lines = (done.stdout + done.stderr).strip().splitlines()
    counts = {how: int(number) for number, how in re.findall(r"(\d+) (passed|failed|errors?|skipped)", lines[-1])}
    if not counts:
        raise RuntimeError(lines[-1])
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    found: dict[str, Any] = {"counts": counts, "failed": failed}
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        nccl = ".".join(map(str, nccl_version() or ())) or "unknown"
        memory = f"{show_bytes(total)}, {show_bytes(free)} of it free"
        found["facts"] = f"{torch.cuda.get_device_name()}, {memory}; CUDA {torch.version.cuda}, NCCL {nccl}"
    return found


def _tasks(setup: SuiteSetup) -> list[SuiteTask]:
    files = SMALL_FILES if setup.small else FILES
    return [SuiteTask(f"tests/gpu/test_{one}.py", run_tests, [one], LIMIT_S) for one in files]


def _table(setup: SuiteSetup, done: list[SuiteLaunch]) -> SuiteTable:
    rows = []
    for one in done:
        words = (
            ", ".join(f"{number} {how}" for how, number in one.result["counts"].items()) if one.is_ok else one.message
        )
        rows.append([one.name, words, f"{one.seconds:.1f}"])
    known = versions(("torch", "zerobench", "hydra-core", "transformers"))
    notes = [", ".join([f"Python {platform.python_version()}", *(f"{name} {of}" for name, of in known.items())])]
    notes += list(dict.fromkeys(one.result["facts"] for one in done if one.is_ok and "facts" in one.result))
    if setup.device == "cuda" and shutil.which("nvidia-smi"):
        command = ["nvidia-smi", f"--id={name_of(0)}", f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits"]
        state = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        notes += [f"nvidia-smi, {FIELDS}: {state.stdout.strip()}"] if state.returncode == 0 else []
    failed = [f"{one.name}: {line}" for one in done if one.is_ok for line in one.result["failed"]]
    return SuiteTable(["tests", "passed", "s"], rows, notes, failed)


ENGINE = SuiteSection(
    name="engine",
    title="The engine's tests on this GPU",
    asks="Do the tests pass that need a GPU: streams, waits, tiers, NCCL, whole runs beside DDP's?",
    like=(("probe", "NCCL, 1 rank", 1.0), ("parity", "", 1.0)),
    tasks=_tasks,
    table=_table,
)
