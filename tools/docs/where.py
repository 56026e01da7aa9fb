"""Tables of what is where, from the first sentence of each package's and module's docstring."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parents[2]
PACKAGE = HERE / "zerobench"


@cache
def said_of(path: Path) -> str:
    """The first sentence of the docstring of a module or, for a folder, of its __init__.py; empty without one."""
    file = path / "__init__.py" if path.is_dir() else path
    paragraph = (ast.get_docstring(ast.parse(file.read_text())) or "").split("\n\n")[0]
    return " ".join(paragraph.split()).split(". ")[0].rstrip(".:")


def entries(folder: Path) -> list[Path]:
    """Sub-packages of a package, then its modules, each in the order of their names."""
    found = [path for path in folder.iterdir() if not path.name.startswith(("_", "."))]
    packages = [path for path in found if (path / "__init__.py").is_file()]
    return [*sorted(packages), *sorted(path for path in found if path.suffix == ".py")]


def row(path: Path, cell: str) -> str:
    """A row of a Markdown table."""
    return f"| {cell} | {said_of(path).replace('|', chr(92) + '|')} |"


def packages() -> str:
    """The block of CONTRIBUTING: sub-packages and modules of zerobench."""
    cells = [f"[{path.relative_to(HERE)}]({path.relative_to(HERE)})" for path in entries(PACKAGE)]
    lines = [row(path, cell) for path, cell in zip(entries(PACKAGE), cells, strict=True)]
    return "\n".join(["| where | what |", "| --- | --- |", *lines])


def everything() -> str:
    """The reference page: a heading and a table for each package, down to the last module."""
    return "\n\n".join(_section(folder) for folder in _folders(PACKAGE))


def _folders(folder: Path) -> list[Path]:
    below = [path for path in entries(folder) if path.is_dir()]
    return [folder, *(one for path in below for one in _folders(path))]


def _section(folder: Path) -> str:
    title = f"## {folder.relative_to(HERE)}/\n\n{said_of(folder)}."
    modules = [path for path in entries(folder) if path.suffix == ".py"]
    if not modules:
        return title
    lines = [row(path, f"[{path.name}](../../{path.relative_to(HERE)})") for path in modules]
    return "\n".join([title, "", "| file | what |", "| --- | --- |", *lines])
