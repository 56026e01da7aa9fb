"""Git repositories made up for tests, a commit for each version of their files."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


def git(place: Path, *arguments: str) -> str:
    """Runs git with an author of its own; returns what it prints."""
    who = ["-c", "user.name=Ada", "-c", "user.email=ada@example.org", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(place), *who, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def repository(place: Path, versions: Sequence[Mapping[str, str]]) -> list[str]:
    """Makes a repository with a commit per version, whose files are NAME -> text; returns their hashes."""
    place.mkdir(parents=True)
    git(place, "init", "-q", "-b", "main")
    hashes = []
    for number, files in enumerate(versions):
        for name, text in files.items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text(text)
        git(place, "add", "--all")
        git(place, "commit", "-q", "-m", f"change {number}")
        hashes.append(git(place, "rev-parse", "HEAD"))
    return hashes
