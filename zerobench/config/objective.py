"""The objective of a sweep whose cells a Hydra sweeper (Optuna, Nevergrad, ...) proposes: columns of the table of runs.

known   the column determines which values are better: fewer bytes, seconds, elements, lower loss; more tokens/s
open    it does not (micro_batch, psi): the sweeper's direction setting does
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ..records.describe import columns_of
from ..records.run_row import RunSetting
from .unknown_keys import nearest

KEY = "objective"

DIRECTIONS: dict[str, tuple[Any, Any]] = {"direction": ("minimize", "maximize"), "optim.maximize": (False, True)}
"""A sweeper's setting for the direction -> its value if smaller, and if larger, values are better."""

LARGER_UNITS, SMALLER_UNITS = ("tokens / s",), ("bytes", "s", "elements / ψ", "loss")
"""Units of columns for which larger, or smaller, values are better."""

LARGER = {"mfu": True, "hfu": True, "overlap": True, "seconds": False}
"""Column whose unit does not determine the direction -> whether larger values are better."""

NO_OBJECTIVE = ("repeat", "seed", "threads", "cores", "schema_version")
"""Columns of numbers that are not measurements."""


@dataclass(frozen=True)
class Objective:
    """A column to optimize. `larger`: whether larger values are better; None if the column leaves that open."""

    column: str
    larger: bool | None


def objectives_of(text: str) -> tuple[Objective, ...]:
    """Returns the objectives that `text` names, separated by commas. Raises ValueError for a name that is not a column
    of numbers.
    """
    columns = {column.name: column for column in columns_of("runs")}
    numbers = {name: column for name, column in columns.items() if column.kind in ("int", "float")}
    known, objectives = [name for name in numbers if name not in NO_OBJECTIVE], list[Objective]()
    for name in (part.strip() for part in text.split(",")):
        if name not in known:
            hint = f"; its column is {columns[name].kind}, not a number" if name in columns else _near(name, known)
            raise ValueError(f"{KEY}={name}: no such column of numbers{hint}")
        column = columns[name]
        larger = True if column.unit in LARGER_UNITS else False if column.unit in SMALLER_UNITS else None
        is_setting = name in (field.name for field in fields(RunSetting))
        objectives.append(Objective(name, LARGER.get(name, None if is_setting else larger)))
    return tuple(objectives)


def _near(name: str, known: list[str]) -> str:
    """Suggests columns that begin with or contain the name, else the nearest column, else how to list all columns."""
    parts = [column for column in known if name and (column.startswith(name) or f"_{name}" in column)]
    if parts and not get_close_matches(name, known, n=1, cutoff=0.85):
        return f"; did you mean {' or '.join(parts[:3])}?"
    hint = nearest(name, known)
    return hint if "did you mean" in hint else "; docs/reference/columns.md lists them"


def direct(sweeper: DictConfig, objectives: tuple[Objective, ...], given: set[str]) -> list[int]:
    """Changes settings of a sweeper: the directions of the objectives, a seed, so that the same command proposes the
    same cells, and that infeasible cells do not end the sweep. Keys in `given` stay. Returns the sign of each value for
    a sweeper that only minimizes, else 1.

    Raises ValueError if a column leaves its direction open, and the command line does not give it.
    """
    setting = next((key for key in DIRECTIONS if OmegaConf.select(sweeper, key) is not None), "")
    for seed in ("seed", "sampler.seed", "optim.seed"):
        if OmegaConf.select(sweeper, seed, default=0) is None:
            OmegaConf.update(sweeper, seed, 0)
    if "max_failure_rate" in sweeper and "hydra.sweeper.max_failure_rate" not in given:
        sweeper.max_failure_rate = 1.0
    if f"hydra.sweeper.{setting}" in given:
        return [1] * len(objectives)
    if unsaid := next((each.column for each in objectives if each.larger is None), ""):
        words = " or ".join(map(str, DIRECTIONS[setting])) if setting else ""
        how = (
            f"add hydra.sweeper.{setting}= with {words}"
            if setting
            else "the sweeper has no setting for it; name another column"
        )
        raise ValueError(f"{KEY}={unsaid}: is more better, or less? {how}")
    if not setting:
        return [-1 if each.larger else 1 for each in objectives]
    values = [DIRECTIONS[setting][bool(each.larger)] for each in objectives]
    OmegaConf.update(sweeper, setting, values if len(values) > 1 else values[0])
    return [1] * len(objectives)
