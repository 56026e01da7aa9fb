"""Help texts for the whole command line, a group, one choice of a group, and one key; tab completion.

Completion is Hydra's own, plus our verbs as first words and minus the schemas, which are not choices:
eval "$(zerobench -sc install=bash)"      bash and zsh      zerobench -sc install=fish | source      fish
"""

from __future__ import annotations

import inspect
import io
import os
import shutil
import textwrap
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import is_dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any
from unittest import mock

from omegaconf import DictConfig, OmegaConf

from .. import strategies
from ..registry import GROUPS as USERS
from ..sections import Key
from .compose import RefusedError, run_hydra
from .composer import Composer
from .keys import GROUPS, IDENTITY, KEYS, meant, nearest, type_name
from .schema import SCHEMAS, TUNED

OF_A_BUILDER = Key("an option of its builder")
"""The Key for options of a user's model or data."""

Leaf = tuple[str, Any, str]
"""A key, its default, and its type in words."""

WIDEST = 120
"""Maximum width of a line, and the width if output is not a terminal."""


def of_everything(composer: Composer) -> str:
    """Returns help.txt, with a line for each group, followed by its choices, and for each key of the default config."""
    groups = []
    for group, choices in composer.choices.items():
        groups += [f"  {group:<11}{GROUPS[group].meaning}", _folded(", ".join(choices), 13)]
    text = (Path(__file__).parents[1] / "help.txt").read_text(encoding="utf-8")
    return text.format(groups="\n".join(groups), keys=_table(_leaves(composer.config_of([]))))


def of_word(word: str, composer: Composer) -> str:
    """Returns help on a group, GROUP=CHOICE, a section or a key. Raises ValueError for anything else."""
    group, equals, choice = word.partition("=")
    if equals and group in composer.choices:
        if choice not in composer.choices[group]:
            raise ValueError(f"{group}={choice}: no such {group}{nearest(choice, composer.choices[group])}")
        text = f"{group}={choice}\n{_folded(_description(group, choice, composer), 2)}"
        if group == "experiment":
            return text
        own = [leaf for leaf in _leaves(composer.config_of([word])) if leaf[0].startswith(f"{group}.")]
        return f"{text}\n\n{_table(own) if own else 'It has no keys.'}"
    if group in composer.choices:
        lines = [f"{group}: {GROUPS[group].meaning}", ""]
        lines += [
            _entry(f"  {group}={name}", first_sentence(group, name, composer)) for name in composer.choices[group]
        ]
        example = composer.choices[group][0]
        return "\n".join([*lines, "", f"Its keys: zerobench --help {group}={example}"])
    config = composer.config_of([])
    leaves = _leaves(config)
    if group in KEYS and not equals:
        chosen = [leaf for leaf in leaves if leaf[0] == group] or [(group, None, "")]
        return _table(chosen)
    if group in config and not equals:
        own = [leaf for leaf in leaves if leaf[0].startswith(f"{group}.")]
        return f"{group}: {GROUPS[group].meaning}\n\n{_table(own)}"
    raise ValueError(f"{word}: neither a group, a key nor a verb{meant(group, [*config, *composer.choices])}")


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


def first_sentence(group: str, choice: str, composer: Composer) -> str:
    """Returns the first sentence on a choice."""
    return _description(group, choice, composer).split(". ")[0].rstrip(".")


def _description(group: str, choice: str, composer: Composer) -> str:
    """Returns the comment at the top of the choice's file, else the docstring of its schema or of a user's builder."""
    if group in USERS and choice in USERS[group].all():
        text = inspect.getdoc(USERS[group].all()[choice]) or f"registered by a user's script or package as {choice}"
        return " ".join(text.split())
    if group == "strategy" and (spec := strategies.find(choice.removesuffix(TUNED))) is not None:
        first, _, rest = spec.description.partition(". ")
        serves = ", with what serves this harness's models in place of its own defaults"
        tuned = serves if choice.endswith(TUNED) else ""
        return ". ".join(filter(None, [first.rstrip(".") + tuned, rest.rstrip(".")])) + "."
    for folder in composer.folders:
        if (file := folder / group / f"{choice}.yaml").is_file():  # the comment at its top
            comment = takewhile(lambda line: line.startswith("#"), file.read_text().splitlines())
            if text := " ".join(line.lstrip("# ") for line in comment if not line.startswith("# @package")):
                return text
    schema = SCHEMAS.get(group, {}).get(choice)
    return " ".join((inspect.getdoc(schema) or "").split()) if schema else ""


COMPLETION_FLAGS = ("--shell-completion", "-sc")

COMMANDS = ("install", "uninstall", "query")
SHELLS = ("bash", "fish", "zsh")

LINE = "COMP_LINE"
"""Environment variable in which a shell passes the words typed so far."""

USAGE = 'say what to do and for which shell, as in: eval "$(zerobench -sc install=bash)"'


def complete(arguments: Sequence[str], verbs: Sequence[str]) -> None:
    """Prints the script that installs completion or, when that script asks, the words that may follow."""
    command, _, shell = arguments[0].partition("=") if len(arguments) == 1 else ("", "", "")
    if command not in COMMANDS or shell not in SHELLS:
        raise RefusedError([f"-sc: {USAGE} ({', '.join(COMMANDS)}; {', '.join(SHELLS)})"])
    if command != "query":
        run_hydra(["-sc", *arguments])
        return
    typed = os.environ.get(LINE)
    if typed is None:
        raise RefusedError([f"-sc query: for shells, with the typed line in {LINE}; {USAGE}"])
    program, *others = typed.split()
    unknown = [*verbs, "--dry-run", "record", "check"]  # to Hydra
    last = len(others) - 1 if typed[-1] != " " else None
    kept = [word for number, word in enumerate(others) if word not in unknown or number == last]
    line, printed = " ".join([program, *kept]) + (" " if typed.endswith(" ") or not kept else ""), io.StringIO()
    with mock.patch.dict(os.environ, {LINE: line}), redirect_stdout(printed):
        run_hydra(["-sc", f"query={shell}"])
    candidates = [word for word in printed.getvalue().split() if not word.startswith("schema")]
    if len(typed.split()) < 2 or (len(typed.split()) == 2 and not typed.endswith(" ")):
        candidates += [verb for verb in verbs if verb.startswith(typed.split()[-1] if typed.split()[1:] else "")]
    print(("\n" if shell == "fish" else " ").join(candidates))
