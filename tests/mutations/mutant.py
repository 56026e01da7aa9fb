"""Mutants: one fault each, as a change of text, with the tests that catch it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


class Stale(Exception):
    """The sentence for a mutant whose text, or whose test, is no longer what it was."""


@dataclass(frozen=True)
class Mutant:
    """A fault that could be written by accident.

    `wrong`: the fault, in one sentence. `old`: a text that the package has once, in whichever file. `new`: the text in
    its place. `caught_by`: tests (pytest's node ids) of which each fails with the fault and passes without. `where`:
    the file or folder of the project with the text.
    """

    name: str
    wrong: str
    old: str
    new: str
    caught_by: tuple[str, ...]
    where: str = "zerobench"


@dataclass(frozen=True)
class PlantedByTest:
    """A fault that a test plants by itself: the fault is caught where the test passes."""

    name: str
    test: str


def place_of(mutant: Mutant, root: Path) -> Path:
    """Finds the one file below `root` with the mutant's text, once. Raises Stale where it is in none or in several."""
    place = root / mutant.where
    files = sorted(place.rglob("*.py")) if place.is_dir() else [place] if place.is_file() else []
    if not files:
        raise Stale(f"there is no {mutant.where}: say where the text has gone")
    found = {path: count for path in files if (count := path.read_text().count(mutant.old))}
    if not found:
        raise Stale(f"{mutant.where} no longer has the text {_short(mutant.old)}: plant the fault in what replaced it")
    if sum(found.values()) > 1:
        names = ", ".join(str(path.relative_to(root)) for path in found)
        raise Stale(f"the text {_short(mutant.old)} is there {sum(found.values())} times ({names}): say more of it")
    return next(iter(found))


def mutated(mutant: Mutant, path: Path) -> str:
    """The text of `path` with the fault. Raises Stale where it is Python no longer, or unchanged."""
    text = path.read_text()
    changed = text.replace(mutant.old, mutant.new)
    if changed == text:
        raise Stale("the new text is the old text")
    if path.suffix == ".py":
        try:
            compile(changed, str(path), "exec")
        except SyntaxError as error:
            raise Stale(f"the new text is no Python: {error}") from error
    return changed


def check_tests(mutant: Mutant, root: Path) -> None:
    """Raises Stale where a test of the mutant's is not in the file that its node id names."""
    for test in mutant.caught_by:
        name, _, function = test.partition("::")
        if not (root / name).exists():
            raise Stale(f"there is no {name}: say which test catches the fault now")
        if function and f"def {function.partition('[')[0]}(" not in (root / name).read_text():
            raise Stale(f"{name} has no {function.partition('[')[0]}: say which test catches the fault now")


def _short(text: str) -> str:
    first, *rest = text.strip().splitlines()
    return repr(first + " ..." if rest else first)
