"""Section 3: the engine's own tests on this GPU (tests/gpu), a task per file, each in a process of its own.

They need pytest. Without a GPU they skip themselves.
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from zerobench.host.environment import nccl_version
from zerobench.results.provenance import versions
from zerobench.sizes import show_bytes

from .suite import SuiteLaunch, SuiteSection, SuiteSetup, SuiteTable, SuiteTask, rows_of

ROOT = Path(__file__).parents[2]

FILES, SMALL_FILES = ("engine", "tiers", "runs", "files"), ("files",)
"""Names in tests/gpu, the most wanted first; on a CPU only the second."""

LIMIT_S = 90.0


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
    result: dict[str, Any] = {"counts": counts, "failed": failed}
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        nccl = ".".join(map(str, nccl_version() or ())) or "unknown"
        memory = f"{show_bytes(total)}, {show_bytes(free)} of it free"
        result["facts"] = f"{torch.cuda.get_device_name()}, {memory}; CUDA {torch.version.cuda}, NCCL {nccl}"
    return result


def _table(setup: SuiteSetup, done: list[SuiteLaunch]) -> SuiteTable:
    def show(one: SuiteLaunch) -> list[list[str]]:
        counts = ", ".join(f"{number} {how}" for how, number in one.result["counts"].items())
        return [[one.name, counts, f"{one.seconds:.1f}"]]

    packages = versions(("torch", "zerobench", "hydra-core", "transformers"))
    notes = [", ".join([f"Python {platform.python_version()}", *(f"{name} {of}" for name, of in packages.items())])]
    notes += list(dict.fromkeys(one.result["facts"] for one in done if one.is_ok and "facts" in one.result))
    failed = [f"{one.name}: {line}" for one in done if one.is_ok for line in one.result["failed"]]
    return SuiteTable(["tests", "passed", "s"], rows_of(done, show), notes, failed)


ENGINE = SuiteSection(
    name="engine",
    title="The engine's tests on this GPU",
    asks="Do the tests pass that need a GPU: streams, waits, tiers, NCCL, whole runs beside DDP's?",
    about_s=56,
    tasks=lambda setup: [
        SuiteTask(f"tests/gpu/test_{name}.py", run_tests, name, LIMIT_S)
        for name in (SMALL_FILES if setup.small else FILES)
    ],
    table=_table,
)
