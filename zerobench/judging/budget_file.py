"""Budget files: yaml, committed, written by `zerobench budget record` and by people::

command: [-m, "strategy=zero1,zero2", model=gpt_tiny]     # what makes the cells; budget check runs it
results_dir: runs/budget                                  # optional: where, below the folder of the check
environments:
  cpu, torch 2.13:                                        # device class and torch's minor version; or: any
    cells:
      zero2 gpt_tiny N=2 b=8:
        work: 0123456789ab                                # optional; without it the name is what counts
        limits: {peak_bytes: 12345678, states_bytes: <= 24 GiB, step_s: 0.2 ± 25 %}
        lines:                                            # optional; what lives at the peak, and what grows, by line
          peak:
          - [6553600, 10, activations, blocks.0–4, model.py:40 in Block.forward, '']
          growth: []
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from ..config.yaml_file import read_yaml
from ..results.provenance import torch_minor
from .judge import METRICS, Limit, parse_limit, show_limit
from .lines import Lines, parse_lines, plain

DEFAULT_FOLDER = Path("results/budgets")

REMOVED = ("heap_bytes",)
"""Metrics of older files that are no longer measured: their limits are not checked."""

ANY = "any"
"""An environment whose limits apply everywhere."""


@dataclass
class CellBudget:
    """A cell's budget."""

    work: str | None
    """Identity of the measured work (resolve.work_id); None if only the name was given."""
    limits: dict[str, Limit]
    lines: Lines = field(default_factory=dict)
    """The recorded lines of code; empty in files that are manual or older than this field."""


@dataclass
class Environment:
    """The budgets of one environment. `about`: date, commit and machine of the measurement."""

    about: dict[str, Any] = field(default_factory=dict)
    cells: dict[str, CellBudget] = field(default_factory=dict)


@dataclass
class BudgetFile:
    """A budget file. `command`: the arguments that compose the cells; empty if they were recorded from runs.
    `results_dir`: the results folder of the runs, below the working directory; empty for the default.
    """

    path: Path
    command: list[str] = field(default_factory=list)
    environments: dict[str, Environment] = field(default_factory=dict)
    results_dir: str = ""

    def of(self, environment: str) -> list[tuple[str, CellBudget]]:
        """Returns the cells with a budget in this environment, by name. Limits for any environment apply in addition,
        but do not replace this environment's if other environments have their own limits.
        """
        if environment not in self.environments and set(self.environments) != {ANY}:
            return []
        names = [name for name in (ANY, environment) if name in self.environments]
        return [cell for name in names for cell in self.environments[name].cells.items()]


def environment_of(device_class: str, torch_version: str) -> str:
    """Returns the class of machines that agree on bytes: "cpu, torch 2.13"."""
    return f"{device_class}, torch {torch_minor(torch_version)}"


def read_budget(path: Path) -> BudgetFile:
    """Reads and checks a budget file. Raises ValueError or OSError."""
    if not path.is_file():
        raise ValueError(f"{path}: there is no such budget file")
    content = read_yaml(path) or {}
    _check_keys(path, "the file", content, ("command", "results_dir", "environments"))
    command, folder = _command(path, content), content.get("results_dir") or ""
    if folder and not (isinstance(folder, str) and folder_below(folder)):
        raise ValueError(
            f"{path}: results_dir is {folder!r:.80}; it is a folder below the working directory, as runs/budget"
        )
    environments = content.get("environments") or {}
    _check_keys(path, "environments", environments, None)
    return BudgetFile(path, command, {str(k): _environment(path, str(k), v) for k, v in environments.items()}, folder)


def folder_below(folder: str) -> str:
    """Returns a folder that a budget file may name, because it is below the working directory; else empty."""
    parts = PurePosixPath(folder).parts
    is_below = re.fullmatch(r"[\w./+-]+", folder) and not folder.startswith("/") and ".." not in parts
    return folder if is_below and all(not part.startswith(".") for part in parts) else ""


def _command(path: Path, content: dict[str, Any]) -> list[str]:
    """Returns the command of the file, or of the `about` of an environment; empty if there is none."""
    command = content.get("command") or []
    if not isinstance(command, list):
        raise ValueError(f"{path}: command is {command!r:.80}; write a list, as in [-m, 'strategy=zero1,zero2']")
    command = [str(part) for part in command]
    try:
        check_command(command)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return command


def _environment(path: Path, name: str, content: Any) -> Environment:
    _check_keys(path, name, content, ("about", "cells"))
    cells = content.get("cells") or {}
    _check_keys(path, f"{name}: cells", cells, None)
    about = content.get("about") or {}
    _check_keys(path, f"{name}: about", about, None)
    about |= {"command": command} if (command := _command(path, about)) else {}
    return Environment(about, {str(k): _cell(path, str(k), v) for k, v in cells.items()})


def _cell(path: Path, name: str, content: Any) -> CellBudget:
    _check_keys(path, name, content, ("work", "limits", "lines"))
    limits = content.get("limits") or {}
    if isinstance(limits, dict):
        limits = {metric: text for metric, text in limits.items() if metric not in REMOVED}
    _check_keys(path, f"{name}: limits", limits, METRICS)
    if not limits:
        raise ValueError(f"{path}: {name} has no limits; give it one, as peak_bytes: <= 24 GiB, or remove it")
    try:
        parsed = {metric: parse_limit(metric, text) for metric, text in limits.items()}
        return CellBudget(content.get("work"), parsed, parse_lines(content.get("lines") or {}))
    except ValueError as error:
        raise ValueError(f"{path}: {name}: {error}") from error


def check_command(command: list[str]) -> None:
    """Raises ValueError for a part of a command that belongs on the command line of the check: a flag or a folder."""
    for part in command:
        is_flag = part.startswith("-") and part not in ("-m", "--multirun")
        if is_flag or part.startswith("results_dir="):
            raise ValueError(f"command has {part!r:.80}; a budget's command is -m and KEY=VALUE, without a folder")


def _check_keys(path: Path, where: str, content: Any, keys: tuple[str, ...] | None) -> None:
    if not isinstance(content, dict):
        raise ValueError(f"{path}: {where} is {content!r:.80}; it must be a mapping")
    for key in content:
        if keys is not None and key not in keys:
            near = get_close_matches(str(key), keys, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"{path}: {where}: {key} is none of {', '.join(keys)}{hint}")


def write_budget(budget: BudgetFile) -> None:
    """Writes the file atomically."""
    content: dict[str, Any] = {"command": budget.command}
    if budget.results_dir:
        content["results_dir"] = budget.results_dir
    content["environments"] = {}
    for name, environment in budget.environments.items():
        cells: dict[str, Any] = {}
        for cell_name, cell in environment.cells.items():
            shown = cells[cell_name] = {"work": cell.work} if cell.work else {}
            shown["limits"] = {metric: show_limit(metric, limit) for metric, limit in cell.limits.items()}
            if cell.lines:
                shown["lines"] = {at: list(map(_Row, rows)) for at, rows in plain(cell.lines).items()}
        content["environments"][name] = {"about": environment.about, "cells": cells}
    budget.path.parent.mkdir(parents=True, exist_ok=True)
    head = "# A budget: `zerobench budget check` holds runs against it, `budget record` writes it again.\n"
    head += "# Limits: a value (exact), `value ± 2 %`, or `<= 24 GiB` by hand, which recording keeps.\n"
    draft = budget.path.with_name(f".{budget.path.name}.{os.getpid()}")
    text = yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)
    draft.write_text(head + text, encoding="utf-8")
    draft.replace(budget.path)


class _Row(list[Any]):
    """A list written on one line of the file, so that a changed one is one line of a diff."""


class _Dumper(yaml.SafeDumper):
    pass


_Dumper.add_representer(_Row, lambda dumper, row: dumper.represent_sequence("tag:yaml.org,2002:seq", row, True))
