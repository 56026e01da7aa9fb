"""Help texts for the whole command line, a group, one choice of a group, and one key."""

from __future__ import annotations

import inspect
import shutil
import textwrap
from dataclasses import is_dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from .. import strategies
from ..registry import GROUPS as USERS
from ..sections import Key
from .keys import GROUPS, KEYS
from .overrides import Overrides
from .schema import SCHEMAS, TUNED
from .unknown_keys import IDENTITY, meant, nearest, type_name

OF_A_BUILDER = Key("an option of its builder")
"""The Key for options of a user's model or data."""

Leaf = tuple[str, Any, str]
"""A key, its default, and its type in words."""

WIDEST = 120
"""Maximum width of a line, and the width if output is not a terminal."""


def of_groups(check: Overrides) -> str:
    """Returns a line for each group, followed by its choices."""
    lines = []
    for group, choices in check.choices.items():
        lines += [f"  {group:<11}{GROUPS[group].meaning}", _folded(", ".join(choices), 13)]
    return "\n".join(lines)


def of_keys(check: Overrides) -> str:
    """Returns a line for each key of the default config."""
    return _table(_leaves(check.config_of([])))


def of_word(word: str, check: Overrides) -> str:
    """Returns help on a group, GROUP=CHOICE, a section or a key. Raises ValueError for anything else."""
    group, equals, choice = word.partition("=")
    if equals and group in check.choices:
        if choice not in check.choices[group]:
            raise ValueError(f"{group}={choice}: no such {group}{nearest(choice, check.choices[group])}")
        text = f"{group}={choice}\n{_folded(_text_of(group, choice, check), 2)}"
        if group == "experiment":
            return text
        own = [leaf for leaf in _leaves(check.config_of([word])) if leaf[0].startswith(f"{group}.")]
        return f"{text}\n\n{_table(own) if own else 'It has no keys.'}"
    if group in check.choices:
        lines = [f"{group}: {GROUPS[group].meaning}", ""]
        lines += [_entry(f"  {group}={name}", line_of(group, name, check)) for name in check.choices[group]]
        example = check.choices[group][0]
        return "\n".join([*lines, "", f"Its keys: zerobench --help {group}={example}"])
    config = check.config_of([])
    leaves = _leaves(config)
    if group in KEYS and not equals:
        chosen = [leaf for leaf in leaves if leaf[0] == group] or [(group, None, "")]
        return _table(chosen)
    if group in config and not equals:
        own = [leaf for leaf in leaves if leaf[0].startswith(f"{group}.")]
        return f"{group}: {GROUPS[group].meaning}\n\n{_table(own)}"
    raise ValueError(f"{word}: neither a group, a key nor a verb{meant(group, [*config, *check.choices])}")


def _leaves(config: DictConfig, prefix: str = "") -> list[Leaf]:
    """Returns everything that can be set, in the config's order."""
    leaves: list[Leaf] = []
    for name in config:
        key, node = f"{prefix}{name!s}", config._get_node(name)
        if isinstance(node, DictConfig) and is_dataclass(OmegaConf.get_type(node)):
            leaves += _leaves(node, f"{key}.")
        elif not prefix or name not in IDENTITY:
            value = OmegaConf.to_container(node) if OmegaConf.is_config(node) else config[name]
            leaves.append((key, value, type_name(node)))
    return leaves


def _table(leaves: list[Leaf]) -> str:
    """Returns a line for each key: key=default, the meaning, the unit."""
    lines = []
    for key, default, kind in leaves:
        declared = KEYS.get(key, OF_A_BUILDER)
        meaning = declared.meaning + (f": {kind}" if declared is OF_A_BUILDER else "")
        shown = f"  {key}={_show(default)}" if default is not None else f"  {key}=null"
        lines.append(_entry(shown, meaning + (f" [{declared.unit}]" if declared.unit else "")))
    return "\n".join(lines)


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).lower() if isinstance(value, list) else str(value)


def _entry(start: str, text: str) -> str:
    """Returns `start` followed by the text in its own column, on the next line if `start` is too long."""
    column = 42
    folded = textwrap.wrap(text, max(20, _width() - column), break_on_hyphens=False) or [""]
    head = f"{start:<{column}}" if len(start) < column - 1 else f"{start}\n{' ' * column}"
    return head + f"\n{' ' * column}".join(folded)


def _folded(text: str, indent: int) -> str:
    space = " " * indent
    return textwrap.fill(text, _width(), initial_indent=space, subsequent_indent=space, break_on_hyphens=False)


def _width() -> int:
    return min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns)


def line_of(group: str, choice: str, check: Overrides) -> str:
    """Returns the first sentence on a choice."""
    return _text_of(group, choice, check).split(". ")[0].rstrip(".")


def _text_of(group: str, choice: str, check: Overrides) -> str:
    """Returns the comment at the top of the choice's file, else the docstring of its schema or of a user's builder."""
    if group in USERS and choice in USERS[group].all():
        text = inspect.getdoc(USERS[group].all()[choice]) or f"registered by a user's script or package as {choice}"
        return " ".join(text.split())
    if group == "strategy" and (spec := strategies.find(choice.removesuffix(TUNED))) is not None:
        first, _, rest = spec.description.partition(". ")
        serves = ", with what serves this harness's models in place of its own defaults"
        tuned = serves if choice.endswith(TUNED) else ""
        return ". ".join(filter(None, [first.rstrip(".") + tuned, rest.rstrip(".")])) + "."
    for folder in check.folders:
        if (file := folder / group / f"{choice}.yaml").is_file() and (text := _comment(file)):
            return text
    schema = SCHEMAS.get(group, {}).get(choice)
    return " ".join((inspect.getdoc(schema) or "").split()) if schema else ""


def _comment(file: Path) -> str:
    """Returns the comment at the top of a yaml file, as text."""
    lines = takewhile(lambda line: line.startswith("#"), file.read_text().splitlines())
    return " ".join(line.lstrip("# ") for line in lines if not line.startswith("# @package"))
