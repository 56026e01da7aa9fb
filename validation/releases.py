"""Bytes and volume of the same loops under releases of torch: DDP, FSDP2 and ZeroRedundancyOptimizer around one model.

A *release* is a Python with zerobench's requirements and its own torch; `make versions` makes environments of releases
by pip. Every release is measured by the code of this checkout. A *value* is the range over the launches of a loop,
nearly always a single number: a metric that differs from launch to launch is *unsteady* (a buffer may be freed a moment
later, in another thread). A *step* is a value whose range has nothing in common with that of the release before; the
table marks it.

    make versions TORCH="2.11.0 2.12.1 2.13.0"
    python -m validation versions --python old/bin/python=before --python new/bin/python=after --loops fsdp2
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from zerobench.records import CATEGORIES, COLLECTIVES
from zerobench.results import tables
from zerobench.results.provenance import PACKAGE
from zerobench.sizes import printable, show_bytes
from zerobench.watching.watch import WATCH_TO

from .release_loops import LOOPS

OUT = Path("results/versions")

METRICS = (
    "peak_bytes", *(f"peak_{name}_bytes" for name in CATEGORIES), "growth_bytes", "states_bytes",
    *(f"max_{name}_bytes" for name in CATEGORIES), "volume_psi", *(f"volume_{name}_psi" for name in COLLECTIVES),
    "wire_bytes", "control_bytes",
)  # fmt: skip
"""Metrics of the table; a row that is 0 in every release is left out."""

ALWAYS = ("peak_bytes", "growth_bytes", "volume_psi")

RUN_S = 900.0


@dataclass(frozen=True)
class Release:
    """A Python and its name in the tables, "torch 2.12.1"."""

    label: str
    python: Path

    @property
    def folder(self) -> str:
        """Name of the folder for its runs."""
        return re.sub(r"[^\w.+-]+", "-", self.label).strip("-.") or "release"


@dataclass(frozen=True)
class Value:
    """A metric of a loop over its launches: the least and the largest."""

    low: float
    high: float

    @property
    def steady(self) -> bool:
        """True if all launches agree."""
        return _same(self.low, self.high)

    def step_from(self, before: Value) -> float | None:
        """Returns how far it lies from an earlier value at least; None if they have a number in common."""
        if self.low > before.high and not _same(self.low, before.high):
            return self.low - before.high
        if self.high < before.low and not _same(self.high, before.low):
            return self.high - before.low
        return None

    def __str__(self) -> str:
        return _show(self.low) if self.steady else f"{_show(self.low)} to {_show(self.high)}"


@dataclass(frozen=True)
class MeasuredRelease:
    """A release, and a row per launch of each loop. `problems`: loop -> why it has none."""

    release: Release
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The label, and the torch that was measured where the label does not say it."""
        versions = sorted({row["torch_version"] for rows in self.rows.values() for row in rows})
        unsaid = [one for one in versions if one.partition("+")[0] not in self.release.label]
        return ", ".join([self.release.label, *(f"torch {one}" for one in unsaid)])

    def value(self, loop: str, metric: str) -> Value | None:
        """Returns a metric of a loop; None if it was not measured."""
        numbers = [row[metric] for row in self.rows.get(loop, ()) if row[metric] is not None]
        return Value(min(numbers), max(numbers)) if numbers else None


def rows_of(found: Sequence[MeasuredRelease], loop: str) -> list[list[str]]:
    """Returns a row per metric: its name, and its value in each release, bold and with the step where it has moved."""
    rows = []
    for metric in METRICS:
        values = [one.value(loop, metric) for one in found]
        if any(one is not None and one.high for one in values) or metric in ALWAYS:
            rows.append([metric, *(_cell(metric, value, values[:place]) for place, value in enumerate(values))])
    return rows


def _cell(metric: str, value: Value | None, earlier: Sequence[Value | None]) -> str:
    before = next((one for one in reversed(earlier) if one is not None), None)
    by = None if value is None or before is None else value.step_from(before)
    if value is None or before is None or by is None:
        return "–" if value is None else str(value)
    size = show_bytes(abs(by)) if metric.endswith("_bytes") else _show(abs(by))
    least = "" if value.steady and before.steady else "at least "
    return f"**{value} ({least}{'+' if by > 0 else '−'}{size})**"


def page(found: Sequence[MeasuredRelease], loops: Sequence[str], world_size: int) -> str:
    """Formats the tables, and a sentence per release or loop that could not be measured."""
    parts = []
    for loop in loops:
        lines = ["| | " + " | ".join(one.title for one in found) + " |", "| --- |" + " --: |" * len(found)]
        lines += [f"| {' | '.join(row)} |" for row in rows_of(found, loop)]
        parts.append(f"## {loop}, N = {world_size}\n\n" + "\n".join(lines) + "\n")
    parts += [f"{one.release.label}, {loop}: {why}\n" for one in found for loop, why in one.problems.items()]
    return "\n".join(parts)


def _same(one: float, other: float) -> bool:
    """Returns True for equal values, but for a quotient's last digit."""
    return one == other if isinstance(one, int) and isinstance(other, int) else math.isclose(one, other, rel_tol=1e-9)


def _show(value: float) -> str:
    """Formats bytes in full, quotients with six digits."""
    return f"{value:.6g}" if value % 1 else f"{value:,.0f}"


def parse_python(text: str) -> Release:
    """Parses "PATH=LABEL" to a release. Raises ValueError."""
    path, _, label = text.partition("=")
    program = shutil.which(path)
    if program is None:
        raise ValueError(f"--python {text}: {path} is no program that can be run; write PATH=LABEL")
    return Release(label or path, Path(program).absolute())


def measure(release: Release, loops: Sequence[str], world_size: int, runs: Path) -> ProgramEnd:
    """Runs the loops with a release's Python; their runs go to the folder `runs`."""
    variables = os.environ | {"PYTHONPATH": str(PACKAGE.parent), "PYTHONNOUSERSITE": "1", WATCH_TO: str(runs)}
    variables.pop("PYTHONHOME", None)
    variables["PATH"] = os.pathsep.join([str(release.python.parent), variables.get("PATH", "")])
    words = [str(release.python), "-P", "-m", "validation.release_loops", str(world_size), *loops]
    return run_to_end(words, variables, RUN_S)


@dataclass(frozen=True)
class ProgramEnd:
    """How a program has ended: its exit code, None if it took too long, and the last line of its output."""

    code: int | None
    said: str


def run_to_end(words: Sequence[str], variables: dict[str, str], timeout_s: float) -> ProgramEnd:
    """Runs a program; no process of its group is left when it has ended, or has been ended."""
    with subprocess.Popen(
        words, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True, text=True, errors="replace",
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return ProgramEnd(None, f"it took more than {timeout_s:g} s")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    lines = [line for line in output.splitlines() if line.strip()]
    return ProgramEnd(process.returncode, lines[-1].strip() if lines else "")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add = parser.add_argument
    words = "an environment's Python, and its name in the table; once for each release"
    add("--python", action="append", default=[], metavar="PATH=LABEL", help=words)
    add("--loops", default=",".join(LOOPS), help="comma-separated (default: %(default)s)")
    add("--world-size", type=int, default=2, metavar="N", help="ranks (default: %(default)s)")
    words = "of each loop, to tell what moved from what differs by itself (default: %(default)s)"
    add("--launches", type=int, default=3, metavar="K", help=words)
    add("--out", type=Path, default=OUT, metavar="DIR", help="results folders, one per release (default: %(default)s)")


def run(chosen: argparse.Namespace) -> int:
    """Measures the releases, one after the other, and prints the tables. Returns 1 if one could not be measured."""
    releases = [parse_python(text) for text in chosen.python]
    loops: list[str] = list(dict.fromkeys(chosen.loops.split(",")))
    _check(chosen, releases, loops)
    found = [_measured(release, chosen, loops, place) for place, release in enumerate(releases, 1)]
    print(page(found, loops, chosen.world_size), end="")
    return int(any(one.problems for one in found))


def _check(chosen: argparse.Namespace, releases: Sequence[Release], loops: Sequence[str]) -> None:
    """Raises ValueError, an error message, for a command line that makes no sense."""
    if not releases:
        raise ValueError("name environments: --python PATH=LABEL, once for each release")
    folders = [release.folder for release in releases]
    if twice := next((one for one in releases if folders.count(one.folder) > 1), None):
        raise ValueError(f"{twice.label} is named twice; give each release a label of its own")
    for loop in loops:
        if loop not in LOOPS:
            raise ValueError(f"--loops {loop}: no such loop; there are {', '.join(LOOPS)}")
    for name, value in (("--world-size", chosen.world_size), ("--launches", chosen.launches)):
        if value < 1:
            raise ValueError(f"{name} {value}: must be 1 or more")


def _measured(release: Release, chosen: argparse.Namespace, loops: Sequence[str], place: int) -> MeasuredRelease:
    """Measures a release; what fails is told in the result, so that the others are measured all the same."""
    print(printable(f"[{place}/{len(chosen.python)}] {release.label}"), file=sys.stderr, flush=True)
    runs = (chosen.out / release.folder).absolute()
    runs.mkdir(parents=True, exist_ok=True)
    for run in tables.run_folders(runs):  # of an earlier command: a release has one measurement
        shutil.rmtree(run)
    ended = measure(release, [*loops] * chosen.launches, chosen.world_size, runs)
    return read_release(release, runs, loops, ended.said or f"exit code {ended.code}")


def read_release(release: Release, runs: Path, loops: Sequence[str] = (), said: str = "") -> MeasuredRelease:
    """Reads the runs of a release; `said`: why one of the `loops` is not there."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for one in tables.load(runs).runs.to_dict("records"):
        row = {str(name): None if pd.isna(value) else value for name, value in one.items()}
        rows.setdefault(str(row["model"]), []).append(row)
    problems = {loop: said for loop in loops if loop not in rows}
    package, _, version = release.label.partition(" ")
    for loop, launches in rows.items():
        for row in launches:
            if row["status"] != "ok":
                problems[loop] = f"{row['status']}: {row['reason']}"
            elif package == "torch" and not row["torch_version"].startswith(version):
                problems[loop] = f"measured under torch {row['torch_version']}"
    return MeasuredRelease(release, {loop: mine for loop, mine in rows.items() if loop not in problems}, problems)
