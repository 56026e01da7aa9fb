"""The sweeper of a sweep: Hydra's basic one, which lists the cells, or a plugin, which proposes them batch by batch.

plugin      a Hydra plugin (optuna, nevergrad, ...): it gets the objective of finished cells, and proposes more
axes        the keys with several values, which the plugin chooses from; it does not see `fixed` keys
settings    the plugin's config, hydra.sweeper; `asked` settings differ from the plugin's defaults

Objectives of a proposed sweep are columns of the table of runs, each with a direction:

known   the column determines which values are better: fewer bytes, seconds, elements, lower loss; more tokens/s
open    it does not (micro_batch, psi): the sweeper's direction setting does
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from enum import Enum
from functools import cache
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import ChoiceSweep, Override, RangeSweep
from hydra.core.plugins import Plugins
from omegaconf import DictConfig, OmegaConf

from ..records.describe import Column, columns_of
from ..records.run_row import RunSetting
from .launcher import BASIC
from .unknown_keys import nearest

GROUP, SETTINGS = "hydra/sweeper", "hydra.sweeper"

INSTALL = {
    "optuna": "pip install hydra-optuna-sweeper",
    "nevergrad": "pip install nevergrad, then pip install --no-deps hydra-nevergrad-sweeper==1.4.0rc3: 1.2.0 wants a"
    " numpy that Python 3.11 does not have",
}
"""Sweeper -> how its plugin is installed."""

ELSEWHERE = {
    "search_space": "list the values of a key as on a command line, KEY=V1,V2 or KEY=interval(A,B)",
    "parametrization": "list the values of a key as on a command line, KEY=V1,V2 or KEY=interval(A,B)",
    "custom_search_space": "it names code to import, which no config does here",
    "storage": "a search is kept by the results folder: the same command again resumes it",
    "study_name": "it names a study of a storage, and the results folder keeps the search",
}
"""Plugin setting that is not supported -> the alternative."""

DIRECTIONS: dict[str, tuple[Any, Any]] = {
    "direction": ("minimize", "maximize"), "optim.maximize": (False, True),
    "ax_config.experiment.minimize": (True, False),
}  # fmt: skip
"""A plugin's setting for the direction -> its value if smaller, and if larger, values are better."""

SEVERAL = "direction"
"""The key of DIRECTIONS that may be a list, with a direction for each objective."""

AT_ONCE = ("n_jobs", "optim.num_workers")
"""Plugin settings for the number of cells in a batch, which are proposed independently."""

COUNTS = ("n_trials", "optim.budget", *AT_ONCE)
"""Plugin settings that must be at least 1."""

Settings = dict[str, Any]


@dataclass(frozen=True)
class Proposed:
    """A sweep whose cells a plugin proposes. `words`: the Hydra overrides that choose the plugin; `axes` and `fixed`:
    the other overrides, with several values and with one.
    """

    name: str
    words: tuple[str, ...]
    settings: Mapping[str, Any]
    asked: frozenset[str]
    axes: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    objectives: tuple[Objective, ...] = ()

    @property
    def chosen(self) -> str:
        return f"{GROUP}={self.name}"

    @property
    def direction(self) -> str:
        """The plugin's setting for the direction; "" if none is known: such a plugin minimizes."""
        return next((key for key in DIRECTIONS if key in self.settings), "")

    def is_grid(self) -> bool:
        """Whether it tries all combinations, and needs lists."""
        return str(self.settings.get("sampler._target_", "")).endswith(".GridSampler")

    def changes(self, one_by_one: bool) -> Settings:
        """Returns settings that we change unless given: the objectives' directions, failures that do not end the sweep,
        a seed, so that the same command proposes the same cells, and with `one_by_one`, batches of one.
        """
        found: Settings = {}
        if self.direction:
            told = [DIRECTIONS[self.direction][bool(one.larger)] for one in self.objectives]
            found[self.direction] = told if len(told) > 1 else told[0]
        for key, value in self.settings.items():
            last = key.split(".")[-1]
            if last == "max_failure_rate":
                found[key] = 1.0
            elif last == "seed" and value is None:
                found[key] = 0
            elif key in AT_ONCE and one_by_one:
                found[key] = 1
        return {key: value for key, value in found.items() if key not in self.asked or key == self.direction}


def sweeping(words: Sequence[str]) -> tuple[str, ...]:
    """Returns the overrides that choose a sweeper and its settings."""
    named = (GROUP, f"{SETTINGS}.")
    return tuple(word for word in words if word.lstrip("+").startswith(named))


def _stored(group: str) -> list[str]:
    try:
        names = ConfigStore.instance().list(group)
    except OSError:  # there is no such group
        return []
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def problem_of_override(override: Override) -> str:
    """Returns an error message for an invalid override of a sweeper, or "". `problem_of_settings` checks settings."""
    line, key = override.input_line or "", override.key_or_group
    if override.is_sweep_override():
        return f"{line}: a sweep has one sweeper, and that one setting; run the sweeps one by one"
    if override.is_delete():
        return f"{line}: keys cannot be deleted; every key has a default"
    if key == GROUP:
        return _problem_of_choice(GROUP, str(override.value()), INSTALL)
    if key.startswith(f"{GROUP}/"):
        return _problem_of_choice(key, str(override.value()), {})
    first = key.removeprefix(f"{SETTINGS}.").split(".")[0]
    return f"{line}: {ELSEWHERE[first]}; leave it out" if first in ELSEWHERE else ""


def _problem_of_choice(group: str, name: str, install: Mapping[str, str]) -> str:
    Plugins.instance()  # which looks for them
    known = _stored(group)
    if name in known:
        return ""
    if name in install:
        return f"{group}={name}: its plugin is not installed; {install[name]}"
    if not known:
        return f"{group}={name}: no installed sweeper has such a choice"
    return f"{group}={name}: no such choice{nearest(name, known)}"


def chosen(hydra: DictConfig, words: Sequence[str]) -> Proposed | None:
    """Returns the plugin of a composed config; None for Hydra's basic sweeper."""
    name = hydra.runtime.choices.get(GROUP, BASIC)
    if name == BASIC:
        return None
    settings = _flat(OmegaConf.to_container(hydra.sweeper, resolve=False))
    defaults = _flat(
        OmegaConf.to_container(
            OmegaConf.structured(ConfigStore.instance().load(f"{GROUP}/{name}.yaml").node), resolve=False
        )
    )
    named = {word.partition("=")[0].lstrip("+").removeprefix(f"{SETTINGS}.") for word in words}
    asked = {key for key, value in settings.items() if key in named or (key in defaults and value != defaults[key])}
    return Proposed(name, tuple(words), settings, frozenset(asked))


def _flat(node: Any, where: str = "") -> Settings:
    """Returns the leaf settings below `node` by dotted key, with names for enumeration members."""
    if not isinstance(node, dict):
        return {where: _plain(node)}
    found: Settings = {}
    for key, value in node.items():
        found |= _flat(value, f"{where}.{key}" if where else str(key))
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return value.name if isinstance(value, Enum) else value


def problem_of_settings(proposed: Proposed, words: Sequence[str]) -> str:
    """Returns an error message for settings that the plugin does not support, or "". `words`: from the command line."""
    known = {key for key in proposed.settings if not key.startswith("params")}
    known |= {".".join(parts[:end]) for parts in (key.split(".") for key in known) for end in range(1, len(parts))}
    for word in words:
        key = word.partition("=")[0].lstrip("+")
        last = key.removeprefix(f"{SETTINGS}.")
        if key.startswith(f"{SETTINGS}.") and last not in known:
            settable = sorted(one for one in known if one.split(".")[-1] != "_target_" and one not in ELSEWHERE)
            return f"{word}: {proposed.chosen} has no such setting{nearest(last, settable, SETTINGS)}"
    for key in COUNTS:
        if isinstance(count := proposed.settings.get(key), int) and count < 1:
            return f"{SETTINGS}.{key}={count}: must be at least 1"
    used = next((key for key in ELSEWHERE if key in proposed.asked and proposed.settings.get(key) is not None), "")
    return f"{SETTINGS}.{used}: {ELSEWHERE[used]}; leave it out" if used else ""


def with_objectives(proposed: Proposed, objectives: tuple[Objective, ...]) -> Proposed:
    """Returns `proposed` with its objectives; those with an open direction take it from the plugin's settings. Raises
    ValueError if the plugin does not support them, or has settings that contradict them.
    """
    setting, text = proposed.direction, ",".join(one.column for one in objectives)
    if len(objectives) > 1 and setting != SEVERAL:
        raise ValueError(f"{KEY}={text}: {proposed.chosen} takes one objective; name one of them")
    if setting not in proposed.asked:
        unsaid = next((one.column for one in objectives if one.larger is None), "")
        if unsaid:
            raise ValueError(f"{KEY}={text}: is more {unsaid} better, or less? {_how_to_say(setting)}")
        return replace(proposed, objectives=objectives)
    value = proposed.settings[setting]
    told = value if isinstance(value, list) else [value]
    if len(told) != len(objectives):
        raise ValueError(f"{SETTINGS}.{setting}: {len(told)} directions for {KEY}={text}; give one for each")
    return replace(proposed, objectives=tuple(map(_directed, objectives, told, [setting] * len(told))))


def _how_to_say(setting: str) -> str:
    if not setting:
        return "its direction is not known, and the sweeper has no setting for it; name another column"
    return f"add {SETTINGS}.{setting}={'|'.join(str(one).lower() for one in DIRECTIONS[setting])}"


def _directed(objective: Objective, told: Any, setting: str) -> Objective:
    smaller, larger = DIRECTIONS[setting]
    if told not in (smaller, larger):
        raise ValueError(f"{SETTINGS}.{setting}={told}: use {smaller} or {larger}".lower())
    is_larger = told == larger
    if objective.larger not in (None, is_larger):
        better = "larger" if objective.larger else "smaller"
        raise ValueError(
            f"{SETTINGS}.{setting}={str(told).lower()}: {better} values of {KEY}={objective.column} are better; leave"
            " the setting out"
        )
    return replace(objective, larger=is_larger)


def axis(key: str, override: Override, values: Sequence[Any], is_grid: bool) -> str:
    """Returns an axis for the plugin. A range becomes an interval of its integers, or a list, since some plugins would
    propose the range's excluded end.
    """
    value, line = override.value(), override.input_line or ""
    if override.is_interval_sweep() or isinstance(value, ChoiceSweep):
        return f"{key}={line.partition('=')[2]}"
    whole = isinstance(value, RangeSweep) and abs(value.step or 1) == 1 and all(type(one) is int for one in values)
    if whole and len(values) > 1 and not is_grid:
        return f"{key}=int(interval({min(values)},{max(values)}))"
    return f"{key}=choice({','.join(str(one) for one in values)})"


def targets() -> set[str]:
    """Returns the code that choices of installed launchers and sweepers name; no other code is instantiated."""
    Plugins.instance()
    found: set[str] = set()
    _collect(ConfigStore.instance().repo.get("hydra", {}), found)
    return found


def _collect(node: Any, found: set[str]) -> None:
    if isinstance(node, dict):
        for one in node.values():
            _collect(one, found)
    elif hasattr(node, "node") and isinstance(node.node, DictConfig):
        target = OmegaConf.to_container(node.node, resolve=False)
        found.update(str(value) for key, value in _flat(target).items() if key.split(".")[-1] == "_target_")


KEY = "objective"

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
    unit: str
    larger: bool | None

    def better(self, one: float, other: float) -> bool:
        return one > other if self.larger else one < other


@cache
def _numbers() -> dict[str, Column]:
    found = [one for one in columns_of("runs") if one.kind in ("int", "float") and one.name not in NO_OBJECTIVE]
    return {one.name: one for one in found}


def _larger(column: Column) -> bool | None:
    if column.name in LARGER:
        return LARGER[column.name]
    if column.name in (one.name for one in fields(RunSetting)):
        return None
    return True if column.unit in LARGER_UNITS else False if column.unit in SMALLER_UNITS else None


def objectives_of(text: str) -> tuple[Objective, ...]:
    """Returns the objectives that `text` names, separated by commas. Raises ValueError for a name that is not a column
    of numbers, or that is repeated.
    """
    known, found = _numbers(), list[Objective]()
    for name in (part.strip() for part in text.split(",")):
        if name not in known:
            kinds = {one.name: one.kind for one in columns_of("runs")}
            hint = f"; its column is {kinds[name]}, not a number" if name in kinds else _near(name, list(known))
            raise ValueError(f"{KEY}={name}: no such column of numbers{hint}")
        if name in [one.column for one in found]:
            raise ValueError(f"{KEY}={text}: {name} is given twice")
        found.append(Objective(name, known[name].unit, _larger(known[name])))
    return tuple(found)


def _near(name: str, known: list[str]) -> str:
    """Suggests columns that begin with or contain the name, else the nearest column, else how to list all columns."""
    parts = [one for one in known if name and (one.startswith(name) or f"_{name}" in one)]
    if parts and not get_close_matches(name, known, n=1, cutoff=0.85):
        return f"; did you mean {' or '.join(parts[:3])}?"
    hint = nearest(name, known)
    return hint if "did you mean" in hint else "; zerobench columns --table runs lists them"
