"""The locks of requirements/: all that CI installs, by its hash, at the versions of constraints.txt."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import zerobench
from requirements.lock import BUILD, CUDA, HERE, Lock, read
from zerobench.host.installed import DISTRIBUTION

ROOT = Path(__file__).parents[2]
FILES = {"build.txt": "", "ci.txt": "dev", "docs.txt": "docs", "browser.txt": "browser"}
"""Lock -> the extra whose packages it holds."""


LINUX = {"sys_platform": "linux", "platform_system": "Linux", "implementation_name": "cpython",
         "platform_python_implementation": "CPython", "os_name": "posix"}  # fmt: skip


def lock(name: str) -> Lock:
    return read((HERE / name).read_text())


def constraints() -> dict[str, str]:
    lines = [line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    return {canonicalize_name(name): version for name, version in lines}


def required(extra: str) -> set[str]:
    """Names of what an extra asks for, by way of our other extras too, and of the project's dependencies."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    open_, names = [*project["dependencies"], *project["optional-dependencies"][extra]], set()
    while open_:
        one = Requirement(open_.pop())
        if one.name == project["name"]:
            open_ += [more for of in one.extras for more in project["optional-dependencies"][of]]
        else:
            names.add(canonicalize_name(one.name))
    return names


@pytest.mark.parametrize("name", [*FILES, "torch.txt", "cuda.txt", "triton.txt"])
def test_each_package_has_a_version_and_the_hashes_of_its_files(name: str) -> None:
    text = (HERE / name).read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert lines
    assert all(re.fullmatch(r"[a-z0-9-]+==\S+( ; .+)? \\|    --hash=sha256:[0-9a-f]{64}( \\)?", line) for line in lines)
    assert not re.search(r"://|/opt|/home|find-links|index-url", text)  # nothing of the place where it was written
    pinned = constraints()
    for package, pins in lock(name).items():
        for pin in pins:
            assert pin.hashes, package
            assert package not in pinned or pin.version == pinned[package], f"{package}: make lock"


@pytest.mark.parametrize("name", [name for name, extra in FILES.items() if extra])
def test_a_lock_covers_its_extra(name: str) -> None:
    held = lock(name).keys() | lock("ci.txt").keys() | lock("torch.txt").keys()
    missing = required(FILES[name]) - held
    assert not missing, f"requirements/{name} lacks {missing}: make lock"


def test_the_locks_and_the_constraints_are_one_choice() -> None:
    """A package of a Linux machine that only the lock knows would have any version where it is installed without."""
    loose = {
        name: pin.marker
        for name, pins in lock("ci.txt").items()
        for pin in pins
        if name not in constraints() and (pin.marker is None or Marker(pin.marker).evaluate(LINUX))
    }
    assert loose.keys() <= {"setuptools"}, loose


def test_what_builds_from_source_is_locked() -> None:
    """setuptools and the like would be downloaded without a hash, were a build isolated."""
    backend = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    asked = {canonicalize_name(Requirement(one).name) for one in [*BUILD.split(), *backend]}
    assert asked <= lock("build.txt").keys()
    assert not [name for name in lock("ci.txt") if CUDA.match(name)]
    assert lock("torch.txt").keys() == {"torch"}
    assert "torch" not in lock("ci.txt")


def test_the_makefile_installs_by_hash_alone() -> None:
    text = (ROOT / "Makefile").read_text()
    lines = [line for line in text.splitlines() if "pip install" in line]
    of_ci = [
        line
        for line in lines
        if "deepspeed" not in line and "setuptools wheel" not in line and "uv==" not in line and "RELEASES" not in line
    ]
    assert of_ci
    assert all("--require-hashes" in line or "--no-deps --no-build-isolation -e ." in line for line in of_ci), of_ci


def test_the_distribution_has_a_name_and_a_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (project["name"], project["version"]) == (DISTRIBUTION, zerobench.__version__)
    assert list(project["scripts"]) == ["zerobench"]
