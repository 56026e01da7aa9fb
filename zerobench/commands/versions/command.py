"""`zerobench versions`: its options, and the releases one after the other."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from ...host.terminal import stdout_console
from ...results import tables
from ...results.options import Parser
from ...sizes import printable
from .environments import Release, measure, parse_packages, parse_python, python_of
from .loops import LOOPS
from .table import MeasuredRelease, as_json, as_markdown, print_text

OUT = Path("results/versions")

DESCRIPTION = """\
Measures the same loops under releases of torch: DDP, FSDP2 and ZeroRedundancyOptimizer around one model, on N gloo
ranks. Prints bytes by category and volume by release, with the release at which each value moved."""

EPILOG = """\
examples:
  zerobench versions --packages torch==2.11.0,2.12.1,2.13.0
  zerobench versions --packages torch==2.12.1,2.13.0 --wheels wheels --keep environments     offline
  zerobench versions --python old/bin/python=before --python new/bin/python=after --loops fsdp2

--packages makes a virtual environment per release and installs there what zerobench requires, with that release; it is
removed at the end unless --keep names a folder. --python takes an environment that is there and holds these
requirements. Releases stand in the order in which they are given. Exit code: 0 all were measured, 1 one was not,
2 refused."""


def versions(arguments: list[str]) -> int:
    """Runs the verb. Returns the exit code: see EPILOG."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser("zerobench versions", description=DESCRIPTION, epilog=EPILOG, formatter_class=raw)
    add = parser.add_argument
    words = "releases of a package, as torch==2.12.1,2.13.0; may be given again"
    add("--packages", action="append", default=[], metavar="PACKAGE==VERSIONS", help=words)
    words = "an existing environment's Python, and its name in the table; may be given again"
    add("--python", action="append", default=[], metavar="PATH=LABEL", help=words)
    add("--wheels", type=Path, metavar="DIR", help="install from the wheels in this folder alone, without a network")
    add("--keep", type=Path, metavar="DIR", help="keep the environments here, and use those that are there")
    add("--loops", default=",".join(LOOPS), help="comma-separated (default: %(default)s)")
    add("--world-size", type=int, default=2, metavar="N", help="ranks (default: %(default)s)")
    words = "of each loop, to tell what moved from what differs by itself (default: %(default)s)"
    add("--launches", type=int, default=3, metavar="K", help=words)
    add("--out", type=Path, default=OUT, metavar="DIR", help="results folders, one per release (default: %(default)s)")
    add("--format", choices=("text", "markdown", "json"), default="text")
    chosen = parser.parse_args(arguments)
    try:
        releases, loops = _releases(chosen), _loops(chosen)
        found = [_measured(release, chosen, loops, place) for place, release in enumerate(releases, 1)]
    except ValueError as error:
        print(printable(f"zerobench versions: {error}"), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    _write(chosen, found, loops)
    return int(any(one.problems for one in found))


def _releases(chosen: argparse.Namespace) -> list[Release]:
    """Returns the releases in the order given. Raises ValueError, a sentence."""
    found = [release for text in chosen.packages for release in parse_packages(text)]
    found += [parse_python(text) for text in chosen.python]
    if not found:
        raise ValueError("name releases, --packages torch==2.12.1,2.13.0, or environments, --python PATH=LABEL")
    folders = [release.folder for release in found]
    if twice := next((one for one in found if folders.count(one.folder) > 1), None):
        raise ValueError(f"{twice.label} is named twice; give each release a label of its own")
    if chosen.wheels is not None and not chosen.wheels.is_dir():
        raise ValueError(f"--wheels {chosen.wheels}: there is no such folder")
    return found


def _loops(chosen: argparse.Namespace) -> list[str]:
    loops: list[str] = list(dict.fromkeys(chosen.loops.split(",")))
    for loop in loops:
        if loop not in LOOPS:
            raise ValueError(f"--loops {loop}: no such loop; there are {', '.join(LOOPS)}")
    for name, value in (("--world-size", chosen.world_size), ("--launches", chosen.launches)):
        if value < 1:
            raise ValueError(f"{name} {value}: must be 1 or more")
    return loops


def _measured(release: Release, chosen: argparse.Namespace, loops: Sequence[str], place: int) -> MeasuredRelease:
    """Measures a release; what fails is told in the result, so that the others are measured all the same."""
    count = len(chosen.python) + sum(text.count(",") + 1 for text in chosen.packages)
    what = "" if release.python else ": making its environment"
    print(printable(f"[{place}/{count}] {release.label}{what}"), file=sys.stderr, flush=True)
    runs = (chosen.out / release.folder).absolute()
    runs.mkdir(parents=True, exist_ok=True)
    for run in tables.run_folders(runs):  # of an earlier command: a release has one measurement
        shutil.rmtree(run)
    try:
        with python_of(release, chosen.wheels, chosen.keep) as python:
            ended = measure(release, python, [*loops] * chosen.launches, chosen.world_size, runs)
    except ValueError as error:
        return MeasuredRelease(release, problems={"": str(error)})
    return _read(release, runs, loops, ended.said or f"exit code {ended.code}")


def _read(release: Release, runs: Path, loops: Sequence[str], said: str) -> MeasuredRelease:
    rows: dict[str, list[dict[str, Any]]] = {}
    for one in tables.load(runs).runs.to_dict("records"):
        row = {str(name): None if pd.isna(value) else value for name, value in one.items()}
        rows.setdefault(str(row["model"]), []).append(row)
    problems = {loop: said for loop in loops if loop not in rows}
    package, _, version = release.requirement.partition("==")
    for loop, launches in rows.items():
        for row in launches:
            if row["status"] != "ok":
                problems[loop] = f"{row['status']}: {row['reason']}"
            elif package == "torch" and not row["torch_version"].startswith(version):
                problems[loop] = f"measured under torch {row['torch_version']}"
    return MeasuredRelease(release, {loop: mine for loop, mine in rows.items() if loop not in problems}, problems)


def _write(chosen: argparse.Namespace, found: list[MeasuredRelease], loops: Sequence[str]) -> None:
    if chosen.format == "text":
        print_text(found, loops, chosen.world_size, stdout_console())
        return
    formatted = as_markdown if chosen.format == "markdown" else as_json
    sys.stdout.write(formatted(found, loops, chosen.world_size))
