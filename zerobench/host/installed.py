"""Versions of installed packages, and the name under which zerobench itself is distributed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "zerobench-zero"
"""Name of the distribution: `zerobench` on the package index is another project."""


def installed_version(package: str) -> str | None:
    """Returns the version of a package (zerobench by its import name); None if it is not installed."""
    try:
        return version(DISTRIBUTION if package == "zerobench" else package)
    except PackageNotFoundError:  # zerobench itself may run from a checkout
        return None
