"""Section 3: the engine's own tests on this GPU (tests/gpu), a task per file, each in a process of its own.

They need pytest. Without a GPU they skip themselves.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .suite import SuiteLaunch, SuiteSection, SuiteSetup, SuiteTable, SuiteTask, rows_of

ROOT = Path(__file__).parents[2]

FILES, SMALL_FILES = ("engine", "tiers", "runs", "files"), ("files",)
"""Names in tests/gpu, the most wanted first; on a CPU only the second."""

LIMIT_S = 90.0


def run_tests(name: str, tell: Callable[[Any], None]) -> dict[str, Any]:
    """Runs a file of tests/gpu. Returns how many tests ended how, and those that failed. Raises RuntimeError with
    pytest's last line if it ran none.
    """
    command = [sys.executable, "-m", "pytest", f"tests/gpu/test_{name}.py", "-q", "-rfE", "-o", "addopts="]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    lines = (done.stdout + done.stderr).strip().splitlines()
    counts = {how: int(number) for number, how in re.findall(r"(\d+) (passed|failed|errors?|skipped)", lines[-1])}
    if not counts:
        raise RuntimeError(lines[-1])
    return {"counts": counts, "failed": [line for line in lines if line.startswith(("FAILED", "ERROR"))]}


def _table(setup: SuiteSetup, done: list[SuiteLaunch]) -> SuiteTable:
    def show(one: SuiteLaunch) -> list[list[str]]:
        counts = ", ".join(f"{number} {how}" for how, number in one.result["counts"].items())
        return [[one.name, counts, f"{one.seconds:.1f}"]]

    failed = [f"{one.name}: {line}" for one in done if one.is_ok for line in one.result["failed"]]
    return SuiteTable(["tests", "passed", "s"], rows_of(done, show), differs=failed)


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
