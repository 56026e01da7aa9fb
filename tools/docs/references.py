"""The references of the pages: commands, columns, fields of an estimate, packages and modules.

They are made of schemas, help texts and docstrings, as keys.py makes that of keys.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
from dataclasses import fields
from functools import cache
from pathlib import Path
from unittest import mock

from zerobench import cli
from zerobench.commands.columns import as_markdown
from zerobench.commands.estimate.row import EstimateRow, LargeTensor
from zerobench.records.describe import ROWS, columns_of, meanings_of

HERE = Path(__file__).resolve().parents[2]
PACKAGE = HERE / "zerobench"

ACTIONS = {"noise": ("record",), "budget": ("record", "check")}
"""Commands that have others below them."""


def commands() -> str:
    """The help of runs and sweeps, and of each command."""
    usage = cli.HELP.split("\n\nGroups (")[0]
    sections = [f"## zerobench\n\n```text\n{usage}\n```"]
    for verb in cli.VERBS:
        sections.append(f"## zerobench {verb}\n\n```text\n{help_of(verb)}\n```")
        for action in ACTIONS.get(verb, ()):
            sections.append(f"### zerobench {verb} {action}\n\n```text\n{help_of(verb, action)}\n```")
    return "\n\n".join(sections)


def help_of(*words: str) -> str:
    """The output of `zerobench WORDS --help` in lines of at most 110 characters where argparse folds them."""
    said = io.StringIO()
    width = mock.patch.dict(os.environ, COLUMNS="110")
    with width, contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        cli.run([*words, "--help"])
    return said.getvalue().strip()


def columns() -> str:
    """Every column of every table."""
    return as_markdown([column for row in ROWS for column in columns_of(row)])


def estimates() -> str:
    """Tables of the fields of an estimate and of its tensors."""
    return "\n\n".join(
        f"{words}\n\n| field | meaning |\n| --- | --- |\n"
        + "\n".join(f"| `{field.name}` | {meanings_of(row)[field.name]} |" for field in fields(row))
        for words, row in (("An estimate:", EstimateRow), ("One of its `tensors`:", LargeTensor))
    )


# -- packages and modules --------------------------------------------------------------------------


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
    names = {path: path.relative_to(HERE) for path in entries(PACKAGE)}
    lines = [row(path, f"[{name}]({name})") for path, name in names.items()]
    return "\n".join(["| where | what |", "| --- | --- |", *lines])


def where(folder: Path = PACKAGE) -> str:
    """The reference page: a heading and a table for each package, down to the last module."""
    below = entries(folder)
    modules = [path for path in below if path.suffix == ".py"]
    lines = [row(path, f"[{path.name}](../../{path.relative_to(HERE)})") for path in modules]
    lines = ["", "| file | what |", "| --- | --- |", *lines] if modules else []
    section = "\n".join([f"## {folder.relative_to(HERE)}/\n\n{said_of(folder)}.", *lines])
    return "\n\n".join([section, *(where(path) for path in below if path.is_dir())])
