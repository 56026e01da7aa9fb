"""Releases and their environments.

An environment is made by `python -m venv` and pip, from an index or, offline, from a folder of wheels. zerobench itself
is not installed there: its package is found through a link, so that every release is measured by this code.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from ...host.installed import DISTRIBUTION
from ...host.revisions import environment
from ...host.temporary import temporary_folder
from ...results.provenance import PACKAGE
from ...watching.watch import WATCH_TO
from ..run_to_end import Ended, run_to_end

INSTALL_S, RUN_S = 3600.0, 900.0
_RELEASES = re.compile(r"([A-Za-z0-9][\w.-]*)==([\w.+!-]+(?:,[\w.+!-]+)*)")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Release:
    """A release. `requirement`: what pip installs, "torch==2.12.1"; empty for a Python that is there."""

    label: str
    requirement: str = ""
    python: Path | None = None

    @property
    def folder(self) -> str:
        """Name of the folder for its runs."""
        return re.sub(r"[^\w.+-]+", "-", self.label).strip("-.") or "release"


def parse_packages(text: str) -> list[Release]:
    """Parses "torch==2.11,2.12" to a release each. Raises ValueError, a sentence."""
    found = _RELEASES.fullmatch(text)
    if found is None:
        raise ValueError(f"--packages {text}: write PACKAGE==VERSION,VERSION, as torch==2.12.1,2.13.0")
    return [Release(f"{found[1]} {version}", f"{found[1]}=={version}") for version in found[2].split(",")]


def parse_python(text: str) -> Release:
    """Parses "PATH=LABEL" to a release. Raises ValueError, a sentence."""
    path, _, label = text.partition("=")
    program = shutil.which(path)
    if program is None:
        raise ValueError(f"--python {text}: {path} is no program that can be run; write PATH=LABEL")
    return Release(label or path, python=Path(program).absolute())


def required(release: Release) -> list[str]:
    """Returns what an environment needs: the release, and this zerobench's own requirements but the release's package.

    Raises ValueError where zerobench is not installed, and so has none to be read.
    """
    try:
        own = [one for one in requires(DISTRIBUTION) or [] if "extra ==" not in one]
    except PackageNotFoundError as error:
        raise ValueError("--packages: zerobench is not installed, so its requirements are not known") from error
    package = release.requirement.partition("==")[0].lower()
    return [release.requirement, *(one for one in own if _name_of(one) != package)]


def _name_of(requirement: str) -> str:
    found = _NAME.match(requirement)
    return found[0].lower() if found else ""


@contextmanager
def python_of(release: Release, wheels: Path | None, keep: Path | None) -> Iterator[Path]:
    """Yields a release's Python, installed if need be: below `keep`, or for as long as it is used.

    Raises ValueError, a sentence, where it cannot be installed.
    """
    if release.python is not None:
        yield release.python
        return
    with temporary_folder() as aside:
        place = (keep.absolute() if keep else aside) / release.folder
        python = place / "bin" / "python"
        if not (place / "installed").is_file():
            _install(release, place, python, wheels)
            (place / "installed").write_text(release.requirement + "\n")
        yield python


def _install(release: Release, place: Path, python: Path, wheels: Path | None) -> None:
    source = ["--no-index", "--find-links", str(wheels.absolute())] if wheels else []
    for words in (
        [sys.executable, "-m", "venv", "--clear", str(place)],
        [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *source, *required(release)],
    ):
        ended = run_to_end(words, Path.cwd(), environment(), INSTALL_S)
        if ended.code != 0:
            raise ValueError(f"{release.label} cannot be installed: {ended.said or f'exit code {ended.code}'}")


def measure(release: Release, python: Path, loops: Sequence[str], world_size: int, runs: Path) -> Ended:
    """Runs the loops with a release's Python; their runs go to the folder `runs`."""
    with temporary_folder() as aside:
        (aside / "zerobench").symlink_to(PACKAGE)
        variables = environment() | {"PYTHONPATH": str(aside), "PYTHONNOUSERSITE": "1", WATCH_TO: str(runs)}
        variables.pop("PYTHONHOME", None)
        variables["PATH"] = os.pathsep.join([str(python.parent), variables.get("PATH", "")])
        words = [str(python), "-P", "-m", "zerobench.commands.versions.loops", str(world_size), *loops]
        return run_to_end(words, Path.cwd(), variables, RUN_S)
