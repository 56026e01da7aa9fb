"""Revisions of a git repository: their names, their order, and each checked out in a worktree of its own.

A *worktree* is a second checkout of the repository, in a folder among the system's temporary files that is removed at
the end, also after an error or an interruption. The user's own checkout, index and stash are not touched, and no hook
of the repository runs.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..host.temporary import temporary_folder

ANOTHER_REPOSITORY = (
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_PREFIX",
    "GIT_OBJECT_DIRECTORY",
    "GIT_COMMON_DIR",
)
"""Variables that git sets for its hooks: with them every git command would be about the repository of the hook."""


class GitError(ValueError):
    """git cannot be run or refuses; the message is what it says."""


@dataclass(frozen=True)
class Commit:
    """A commit. `tree`: hash of its content, which commits of equal content share. `date`: its author's, ISO 8601."""

    hash: str
    tree: str
    subject: str
    date: str

    @property
    def short(self) -> str:
        """The first digits of the hash, enough to name it."""
        return self.hash[:10]


def environment() -> dict[str, str]:
    """Returns this process's environment without what ties git to another repository."""
    return {name: value for name, value in os.environ.items() if name not in ANOTHER_REPOSITORY}


def git(repository: Path, *arguments: str, given: str | None = None) -> str:
    """Returns what git prints in the repository, less the white space around it. Raises GitError."""
    return git_bytes(repository, *arguments, given=given).decode(errors="replace").strip()


def git_bytes(
    repository: Path, *arguments: str, given: str | None = None, variables: dict[str, str] | None = None
) -> bytes:
    """Returns what git prints in the repository, `given` on its standard input; `variables`: instead of `environment`.

    Raises GitError.
    """
    command = ["git", "-C", str(repository), "-c", f"core.hooksPath={os.devnull}", *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, env=variables or environment(), input=(given or "").encode()
        )
    except OSError as error:
        raise GitError(f"git cannot be run: {error}") from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise GitError(f"git says: {next(iter(said), 'it failed').removeprefix('fatal: ')}")
    return done.stdout


def full_hash(repository: Path, revision: str) -> str:
    """Returns the hash of the commit that a revision names. Raises GitError."""
    try:
        return git(repository, "rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}")
    except GitError as error:
        raise GitError(f"{revision}: {error}") from error


def commit(repository: Path, revision: str) -> Commit:
    """Returns the commit that a revision names. Raises GitError."""
    return commits(repository, [full_hash(repository, revision)])[0]


def commits(repository: Path, hashes: list[str]) -> list[Commit]:
    """Returns the commits that these hashes or revisions name, in their order. Raises GitError."""
    if not hashes:
        return []
    style = "--format=%H%x09%T%x09%aI%x09%s"
    shown = git(
        repository, "log", "--no-walk=unsorted", "--no-show-signature", style, "--stdin", given="\n".join(hashes)
    )
    found = []
    for line in shown.splitlines():
        one, tree, date, subject = line.split("\t", 3)
        found.append(Commit(one, tree, subject, date))
    return found


def is_ancestor(repository: Path, old: str, new: str) -> bool:
    """Returns True where `new` comes after `old`, or is it."""
    return not git(repository, "rev-list", "--max-count=1", old, f"^{new}")


@contextmanager
def worktree(repository: Path, revision: str) -> Iterator[Path]:
    """Yields a worktree of a revision, removed at the end; worktrees whose folders are gone are forgotten too."""
    found = full_hash(repository, revision)
    try:
        with temporary_folder() as aside:  # which removes first what a killed command has left
            place = aside / "tree"
            git(repository, "worktree", "prune")
            git(repository, "worktree", "add", "--detach", str(place), found)
            yield place
    finally:
        git(repository, "worktree", "prune")
