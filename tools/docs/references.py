"""The references of the pages: commands, columns, fields of an estimate, packages and modules, groups and keys.

They are made of schemas, help texts and docstrings.
"""

from __future__ import annotations

import ast
import contextlib
import csv
import inspect
import io
import os
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints
from unittest import mock

from tools.docs.render import table
from zerobench import cli
from zerobench.commands.simulated import FIGURES, SETTING, LargeTensor, SimulatedCell
from zerobench.config import help
from zerobench.config.compose import make_composer
from zerobench.config.composer import Composer
from zerobench.config.keys import AUTO, GROUPS, KEYS
from zerobench.config.schema import SCHEMAS
from zerobench.records.describe import ROWS, column_meanings, columns_of
from zerobench.results.grid import Grid
from zerobench.sizes import show_bytes

HERE = Path(__file__).resolve().parents[2]
PACKAGE = HERE / "zerobench"

ACTIONS = {"noise": ("record",), "budget": ("record", "check")}
"""Commands that have others below them."""


def commands() -> str:
    """The help of runs and sweeps, and of each command."""
    usage = (PACKAGE / "help.txt").read_text().split("\n\nGroups (")[0]
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
    """Every column of every table: a heading and a pipe table each."""
    parts = []
    for name, row in ROWS.items():
        rows = [
            [f"`{column.name}`", column.kind + (" or none" if column.optional else ""), column.unit, column.meaning]
            for column in columns_of(name)
        ]
        about = " ".join((inspect.getdoc(row) or "").split()).split(". ")[0].rstrip(".")
        grid = Grid(["column", "type", "unit", "meaning"], rows, left=4)
        parts += [f"## {name}", "", f"{about}.", "", grid.markdown(is_markdown=True)]
    return "\n".join(parts)


def estimates() -> str:
    """Tables of the fields of an estimate and of its tensors."""
    meanings = column_meanings(SimulatedCell)
    derived = {name: str(getattr(SimulatedCell, name).__doc__) for name in (*FIGURES, "config") if name not in meanings}
    own = {
        "name": meanings["name"], **{name: meaning for name, (_, meaning) in SETTING.items()},
        "device": "Device that it was executed for: cpu or cuda.",
        "attention": "Kernel of attention that was asked for.", "problem": meanings["problem"],
    }  # fmt: skip
    estimate = own | {name: (meanings | derived)[name] for name in (*FIGURES, "config")}
    return "\n\n".join(
        f"{words}\n\n" + table(["field", "meaning"], [[f"`{name}`", meaning] for name, meaning in rows.items()], 2)
        for words, rows in (("An estimate:", estimate), ("One of its `tensors`:", column_meanings(LargeTensor)))
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


def packages() -> str:
    """The block of CONTRIBUTING: sub-packages and modules of zerobench."""
    names = {path: path.relative_to(HERE) for path in entries(PACKAGE)}
    return table(["where", "what"], [[f"[{name}]({name})", said_of(path)] for path, name in names.items()], 2)


def where(folder: Path = PACKAGE) -> str:
    """The reference page: a heading and a table for each package, down to the last module."""
    below = entries(folder)
    modules = {path: f"[{path.name}](../../{path.relative_to(HERE)})" for path in below if path.suffix == ".py"}
    rows = [[link, said_of(path)] for path, link in modules.items()]
    parts = [f"## {folder.relative_to(HERE)}/", f"{said_of(folder)}.", *[table(["file", "what"], rows, 2)] * bool(rows)]
    return "\n\n".join([*parts, *(where(path) for path in below if path.is_dir())])


# -- groups and keys -------------------------------------------------------------------------------

SYSTEMS = ("DeepSpeed", "torch", "transformers")
OTHER_SYSTEMS = HERE / "docs/reference/other_systems.csv"
"""Key or group -> its names there, in Markdown. A key of DeepSpeed's config without a dot is in `zero_optimization`
or at the top level; names for transformers are from TrainingArguments.
"""
HEAD = ("key", "default", "range", "meaning", *SYSTEMS)
LARGE = 2**60


def keys() -> str:
    """Groups and keys: default, range, unit, meaning, and names elsewhere. Keys of their own, then each group with its
    choices and keys, then other sections.
    """
    composer = make_composer([])
    usual = {key: value for key, value, _ in help._leaves(composer.config_of([]))}
    defaults = _defaults(composer)
    sections = [
        "## Keys of a run",
        "Those that belong to no group.",
        _table({key: {(): usual[key]} for key in KEYS if "." not in key}),
    ]
    for group, choices in composer.choices.items():
        said = {name: help.first_sentence(group, name, composer).replace("|", "\\|") for name in choices}
        lines = [f"| `{group}={name}` | {line} |" for name, line in said.items()]
        sections += [f"## {group}", _introduction(group), "\n".join(["| choice | |", "| --- | --- |", *lines])]
        if mine := defaults.get(group):
            sections.append(_table({key: _shared(values, len(choices)) for key, values in mine.items()}))
    for section in dict.fromkeys(key.split(".")[0] for key in KEYS if "." in key):
        if section not in composer.choices:
            mine = {key: {(): usual[key]} for key in KEYS if key.startswith(f"{section}.") and key in usual}
            sections += [f"## {section}", _introduction(section), _table(mine)]
    return "\n\n".join(sections)


def _introduction(group: str) -> str:
    """Formats the meaning of a group as a sentence, and its names elsewhere."""
    line = GROUPS[group].meaning
    said = [f"{system} {name}" for system, name in zip(SYSTEMS, names_elsewhere(group), strict=True) if name]
    return f"{line[:1].upper()}{line[1:]}." + (f" Elsewhere: {'; '.join(said)}." if said else "")


@cache
def names_elsewhere(key: str) -> list[str]:
    """Returns the names of a key or group in SYSTEMS, empty if it has none there."""
    with OTHER_SYSTEMS.open(newline="") as file:
        rows = {row["key"]: row for row in csv.DictReader(file)}
    return [rows[key][system] if key in rows else "" for system in SYSTEMS]


def _defaults(composer: Composer) -> dict[str, dict[str, dict[str, Any]]]:
    """Group -> key -> choice -> default. One choice of each group is composed at a time, of all groups at once."""
    groups = {group: choices for group, choices in composer.choices.items() if group != "experiment"}
    found: dict[str, dict[str, dict[str, Any]]] = {group: {} for group in groups}
    for number in range(max(map(len, groups.values()))):
        chosen = {group: choices[number] for group, choices in groups.items() if number < len(choices)}
        config = composer.config_of([f"{group}={choice}" for group, choice in chosen.items()])
        for key, value, _ in help._leaves(config):
            if (group := key.split(".")[0]) in chosen and "." in key:
                found[group].setdefault(key, {})[chosen[group]] = value
    return found


def _shared(values: dict[str, Any], number: int) -> dict[tuple[str, ...], Any]:
    shown = {choice: repr(value) for choice, value in values.items()}
    alike = {text: tuple(c for c, other in shown.items() if other == text) for text in shown.values()}
    if len(alike) == 1 and len(values) == number:
        return {(): next(iter(values.values()))}
    return {choices: values[choices[0]] for choices in alike.values()}


def _table(defaults: dict[str, dict[tuple[str, ...], Any]]) -> str:
    return table(HEAD, [_row(key, values) for key, values in defaults.items()], len(HEAD))


def _row(key: str, values: dict[tuple[str, ...], Any]) -> list[str]:
    declared = KEYS.get(key, help.OF_A_BUILDER)
    said = declared.meaning + f" [{declared.unit}]" * bool(declared.unit)
    shown = "; ".join(f"`{show(key, value)}`" + f" ({', '.join(of)})" * bool(of) for of, value in values.items())
    names = (name or "–" for name in names_elsewhere(key))
    return [f"`{key}`", shown, range_of(key, next(iter(values.values()))), said, *names]


def show(key: str, value: Any) -> str:
    """A default as a command line has it, of bytes also in words."""
    if value is None:
        return "null"
    sized = isinstance(value, int) and key.endswith("_bytes") and value >= 1024
    return f"{value} ({show_bytes(value)})" if sized else help._show(value)


def range_of(key: str, default: Any) -> str:
    """Least and greatest value, or the words; empty if only the meaning says what is right."""
    declared = KEYS.get(key, help.OF_A_BUILDER)
    if declared.words and declared.limits is None:
        return ", ".join(f"`{help._show(one)}`" for one in declared.words)
    if isinstance(default, bool) or key in _flags():
        return "`false`, `true`"
    if declared.limits is None:
        return declared.rule
    least, most = (_number(one, key.endswith("_bytes")) for one in declared.limits)
    return f"{least} to {most}" + f", or `{AUTO}`" * (AUTO in declared.words)


@cache
def _flags() -> set[str]:
    """Keys of true and false that may be null."""
    schemas = [(group, schema) for group, choices in SCHEMAS.items() for schema in choices.values()]
    hints = {f"{group}.{name}": kind for group, one in schemas for name, kind in get_type_hints(one).items()}
    return {key for key, kind in hints.items() if set(get_args(kind)) == {bool, type(None)}}


def _number(value: float, is_size: bool) -> str:
    if is_size:
        return show_bytes(value) if value else "0"
    return f"{value:,.0f}".replace(",", " ") if value >= 1 and value == int(value) and value < LARGE else f"{value:g}"
