"""Mutants: one fault each, as a change of an expression or a statement, with the tests that catch it."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


class Stale(Exception):
    """The sentence for a mutant whose place, or whose test, is no longer what it was."""


@dataclass(frozen=True)
class Change:
    """`old` is once in `function` (dotted; empty for all of it) of `file` (below the package): `new` replaces it.

    Both are Python: an expression or a statement, found by its meaning, whatever its spaces and lines.
    """

    file: str
    function: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutant:
    """A fault that could be written by accident.

    `wrong`: the fault, in one sentence. `changes`: all in one file. `caught_by`: tests (pytest's node ids) of which
    each fails with the fault and passes without.
    """

    name: str
    wrong: str
    changes: tuple[Change, ...]
    caught_by: tuple[str, ...]


def read_mutants(text: str) -> Iterator[Mutant]:
    """Reads a file of the catalog: a comment, then mutants, with empty lines between. 8 spaces continue a line.

    NAME: SENTENCE.
        FILE FUNCTION: OLD => NEW
        TEST
    """
    _, *blocks = text.replace("\n        ", " ").split("\n\n")
    for block in blocks:
        first, *rest = block.splitlines()
        name, _, wrong = first.partition(": ")
        tests = [line.strip() for line in rest if line.startswith("    tests/")]
        changes = tuple(_change(line.strip()) for line in rest if not line.startswith("    tests/"))
        yield Mutant(name, wrong, changes, tuple(tests))


def _change(line: str) -> Change:
    where, _, both = line.partition(": ")
    file, _, function = where.partition(" ")
    old, _, new = both.partition(" => ")
    return Change(file, function, old, new)


def mutated(mutant: Mutant, root: Path) -> tuple[Path, str]:
    """The file below `root` that the fault is in, and its text with the fault. Raises Stale where it cannot be."""
    path = root / "zerobench" / mutant.changes[0].file
    if not path.is_file():
        raise Stale(f"there is no zerobench/{mutant.changes[0].file}: say where the code has gone")
    text = path.read_text()
    for change in mutant.changes:
        begin, end = _find(change, text)
        encoded = text.encode()
        text = (encoded[:begin] + change.new.encode() + encoded[end:]).decode()
    try:
        compile(text, str(path), "exec")
    except SyntaxError as error:
        raise Stale(f"the new text is no Python: {error}") from error
    return path, text


def _find(change: Change, text: str) -> tuple[int, int]:
    """Where the one node with the meaning of `old` begins and ends in `text`, in bytes. Raises Stale."""
    wanted = ast.parse(change.old).body[0]
    wanted = wanted.value if isinstance(wanted, ast.Expr) else wanted
    tree = ast.parse(text)
    scopes = [node for name, node in _named(tree) if name == change.function] if change.function else [tree]
    if not scopes:
        raise Stale(f"{change.file} has no {change.function}: say where the code has gone")
    nodes = (node for scope in scopes for node in ast.walk(scope) if type(node) is type(wanted))
    same = [node for node in nodes if ast.unparse(node) == ast.unparse(wanted)]
    if len(same) != 1:
        where = f"{change.file} {change.function}".strip()
        raise Stale(f"{where} has {change.old!r} {len(same)} times: name it as it stands there once")
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    (node,) = same
    return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset


def _named(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Functions and classes in `node`, by their dotted names."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield f"{prefix}{child.name}", child
            yield from _named(child, f"{prefix}{child.name}.")
        else:
            yield from _named(child, prefix)


def check_tests(mutant: Mutant, root: Path) -> None:
    """Raises Stale where a test of the mutant's is not in the file that its node id names."""
    for test in mutant.caught_by:
        name, _, function = test.partition("::")
        function = function.partition("[")[0]
        if not (root / name).exists() or (function and f"def {function}(" not in (root / name).read_text()):
            raise Stale(f"there is no {name}::{function}: say which test catches the fault now")
