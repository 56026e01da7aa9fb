"""Versions of installed packages; revisions of a git repository, which are checked out in worktrees.

A *worktree* is a second checkout of the repository, in a temporary folder that is removed at the end, even after an
error or an interruption. The user's own checkout, index and stash are not touched, and no hook of the repository runs.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .temporary import temporary_folder

ANOTHER_REPOSITORY = (
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_PREFIX",
    "GIT_OBJECT_DIRECTORY",
    "GIT_COMMON_DIR",
)
"""Variables that git sets for its hooks: with them every git command would apply to the hook's repository."""


class GitError(ValueError):
    """git cannot be run or reports an error; the message is git's."""


def git(repository: Path, *arguments: str, timeout_s: float | None = None) -> str:
    """Returns the output of git in the repository, stripped. Raises GitError."""
    command = ["git", "-C", str(repository), "-c", f"core.hooksPath={os.devnull}", *arguments]
    environment = {name: value for name, value in os.environ.items() if name not in ANOTHER_REPOSITORY}
    try:
        done = subprocess.run(
            command, capture_output=True, env=environment, stdin=subprocess.DEVNULL, timeout=timeout_s
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GitError(f"git cannot be run: {error}") from error
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise GitError(f"git says: {next(iter(lines), 'it failed').removeprefix('fatal: ')}")
    return done.stdout.decode(errors="replace").strip()


def full_hash(repository: Path, revision: str) -> str:
    """Returns the hash of the commit that a revision names. Raises GitError."""
    try:
        return git(repository, "rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}")
    except GitError as error:
        raise GitError(f"{revision}: {error}") from error


@contextmanager
def worktree(repository: Path, revision: str) -> Iterator[Path]:
    """Yields a worktree of a revision, removed at the end; also prunes worktrees whose folders are gone."""
    commit = full_hash(repository, revision)
    try:
        with temporary_folder() as aside:  # which removes first what a killed command has left
            tree = aside / "tree"
            git(repository, "worktree", "prune")
            git(repository, "worktree", "add", "--detach", str(tree), commit)
            yield tree
    finally:
        git(repository, "worktree", "prune")


DISTRIBUTION = "zerobench-zero"
"""Name of the distribution: `zerobench` on the package index is another project."""


def installed_version(package: str) -> str | None:
    """Returns the version of a package (zerobench by its import name); None if it is not installed."""
    try:
        return version(DISTRIBUTION if package == "zerobench" else package)
    except PackageNotFoundError:  # zerobench itself may run from a checkout
        return None
