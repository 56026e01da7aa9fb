"""Command-line overrides, checked against the schemas before Hydra sees them.

Hydra silently accepts `+strategy.stge=1`; here every key must exist, even after a +,
and the error message for an unknown key suggests the nearest one.

Composer    composes configs through Hydra to find their keys and valid values
Overrides   checks each override against those configs
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import fields
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from ..zero.optim.segments import why_not_sharded
from . import schema_memory, size_limits
from .hydra_keys import (
    not_composed,
    problem_of,
    problem_of_choices,
    problem_of_missing,
    problem_of_names,
    quoted,
    spelled_out,
)
from .launcher import LauncherChoice
from .plugin_choice import choose_launcher, choose_sweeper, with_axes
from .safe_yaml import problems_of_folders
from .schema import SCHEMAS
from .size_limits import SUFFIX, in_bytes, in_one
from .sweeper import KEY as OBJECTIVE
from .sweeper import Proposed
from .unknown_keys import IDENTITY, meant, meant_verb, nearest, spaced, type_name

GROUPS = (*SCHEMAS, "experiment")

CHOSEN_BY_GROUP = (
    "strategy.name",
    "model.kind",
    "data.name",
    "optimizer.name",
    "precision.name",
    *(f"{group}.name" for group in schema_memory.SCHEMAS),
)
"""Keys that name the choice of a group."""

NEEDS: dict[str, tuple[str, Any]] = {
    "offload.delayed_after": ("offload.delayed", True)
}  # fmt: skip
"""Key -> (another key, the value it must have somewhere in a sweep for the first to have an effect)."""

REGISTERED = ("model", "data", "strategy")
"""Groups to which a user's script adds choices."""

UNREADABLE = (HydraException, OmegaConfBaseException, YAMLError, OSError, ValueError, RecursionError)
"""Errors that composing a user's yaml may raise."""


Composition = tuple[DictConfig, DictConfig]
"""A config, and Hydra's own part of it. Neither is ever modified."""


@lru_cache(4)
def compositions_of(*choices: Hashable) -> dict[tuple[str, ...], Composition]:
    """Returns the cache of compositions by overrides, for these `choices` added to the package's: a process may run
    many commands.
    """
    return {}


class Composer:
    """Knows every choice, including those from `users` and `extra_dirs`. `loader`: Hydra's loader of the last composed
    config. `composed`: cache of compositions.
    """

    def __init__(
        self, config_dir: Path, users: dict[str, list[str]], extra_dirs: list[Path],
        composed: dict[tuple[str, ...], Composition],
    ) -> None:  # fmt: skip
        self._config_dir = config_dir
        self._extra_dirs = extra_dirs
        self.folders = (*extra_dirs, config_dir)
        self.choices = {group: self._found_choices(group) for group in GROUPS}
        for group, names in users.items():
            self.choices[group] += names
        self._composed = composed
        self.loader: Any = None

    def config_of(self, overrides: list[str]) -> DictConfig:
        return self._compose(overrides)[0]

    def hydra_of(self, overrides: list[str]) -> DictConfig:
        return self._compose(overrides)[1]

    def compose_whole(self, overrides: list[str]) -> DictConfig:
        """Returns the config of `overrides` with Hydra's own part. Hydra's exceptions propagate."""
        GlobalHydra.instance().clear()
        search = [f"hydra.searchpath=[{','.join(quoted(f'file://{d.resolve()}') for d in self._extra_dirs)}]"]
        with initialize_config_dir(str(self._config_dir.resolve()), version_base="1.3"):
            self.loader = GlobalHydra.instance().config_loader()
            return compose(
                "config", overrides=[*overrides, *(search if self._extra_dirs else [])], return_hydra_config=True
            )

    def _compose(self, overrides: list[str]) -> Composition:
        """Returns the config of `overrides`, and Hydra's part; cached, since Hydra takes a quarter of a second."""
        where = tuple(overrides)
        if where not in self._composed:
            whole = self.compose_whole(overrides)
            plain = whole.copy()
            with open_dict(plain):
                del plain["hydra"]
            self._composed[where] = (plain, whole.hydra)
        return self._composed[where]

    def _found_choices(self, group: str) -> list[str]:
        found = {
            path.stem for where in (self._config_dir, *self._extra_dirs) for path in (where / group).glob("*.yaml")
        }
        return sorted(found)

    def _lacks(self, key: str, overrides: list[str]) -> str:
        node: Any = self.config_of(overrides)
        path: list[str] = []
        for part in key.split("."):
            if path == ["huggingface", "options"]:
                return ""
            known = list(node) if isinstance(node, DictConfig) else []
            if part not in known:
                under = f" under {overrides[0]}" if overrides and path else ""
                had, own = self._had_by(key), ", ".join(one for one in known if one not in IDENTITY)
                under += f", which has {own}" * bool(had and own and under)
                return f"{key}: no such key{under}{had or meant(key, known, '.'.join(path))}"
            path.append(part)
            node = node._get_node(part)
        return ""

    def _had_by(self, key: str) -> str:
        """Returns the end of an error message that names the choices of the key's group that have the key."""
        group, _, rest = key.partition(".")
        having = [name for name, kind in SCHEMAS.get(group, {}).items() if rest in (one.name for one in fields(kind))]
        words = "|".join(name for name in self.choices.get(group, []) if name in having)
        return f"; choose {group}={words} for it" if words else ""

    def _problems_of_values(self, key: str, values: list[Any], overrides: list[str]) -> list[str]:
        """Returns an error message for each value of the wrong type for the key; checks the extremes of many."""
        config = self.config_of(overrides)
        *path, last = key.split(".")
        parent = OmegaConf.select(config, ".".join(path)) if path else config
        if path[:2] == ["huggingface", "options"]:
            return []
        node = parent._get_node(last)
        if isinstance(node, DictConfig):
            return [f"{key}: it has parts; set one of them{nearest('', [f'{key}.{k!s}' for k in node])}"]
        problems = []
        for value in size_limits.extremes(values):
            if isinstance(value, str) and "${" in value:
                continue  # an interpolation has its value when the cell is composed
            try:
                OmegaConf.update(config.copy(), key, value)
            except OmegaConfBaseException:
                size = ", as 1048576 or 1MiB" * key.endswith(SUFFIX)
                problems.append(f"{key}={value}: wants {type_name(node)}{size}, and {value!r} is none")
        return problems


class Overrides(Composer):
    """Checks overrides one by one. `problems`: an error message for each invalid override. `elsewhere`: keys that some
    choices of a sweep have and others lack; cells without them ignore them.
    """

    def __init__(
        self, config_dir: Path, users: dict[str, list[str]], extra_dirs: list[Path],
        composed: dict[tuple[str, ...], Composition],
    ) -> None:  # fmt: skip
        super().__init__(config_dir, users, extra_dirs, composed)
        self.problems: list[str] = []
        self.globs: dict[str, list[str]] = {}
        """Override with a glob -> the choices that it takes."""
        self.elsewhere: set[str] = set()
        self.cells = 1
        self.multirun = False
        self.launcher: LauncherChoice | None = None
        self.proposed: Proposed | None = None

    def check(self, words: list[str], multirun: bool, verbs: list[str]) -> list[str]:
        """Returns the overrides to pass to Hydra; sets `problems`, `cells` (the number of cells) and `multirun`."""
        try:
            return self._check_all([in_one(in_bytes(word)) for word in spelled_out(words)], multirun, verbs)
        except UNREADABLE as error:
            self.problems.append(not_composed(words, error.__cause__ or error))
            return words

    def _check_all(self, words: list[str], multirun: bool, verbs: list[str]) -> list[str]:
        self.problems += problems_of_folders(self._extra_dirs, GROUPS)
        if problem := spaced(words):
            self.problems.append(problem)
            return words
        parsed = [override for argument in words if (override := self._parse(argument, verbs))]
        if self.problems:
            return words
        parsed = [o for o in parsed if not (o.key_or_group == "experiment" and self._values(o) == [None])]
        given = {o.key_or_group: self._values(o) for o in parsed}
        picked = {group: choices for group, choices in given.items() if group in GROUPS}
        if len(picked.get("experiment", [])) > 1:
            self.problems.append("experiment: several experiments are several sweeps; run them one after the other")
        hydra = self._check_composed(picked)
        self._choose_plugins(parsed, self._study(picked), given)
        if self.problems:
            return words
        self.multirun = multirun = _is_sweep(parsed, hydra, multirun)
        swept_by_it = self._swept_by_a_study(hydra, given) if multirun else []
        studied = {override.key_or_group: self._values(override) for override in swept_by_it}
        picked |= {group: choices for group, choices in studied.items() if group in GROUPS}
        if problem := self._unlisted([*parsed, *swept_by_it], given | studied):
            self.problems.append(problem)
            return words
        checked = [self._check_one(override, picked) for override in parsed]
        swept = {o.key_or_group: len(self._values(o)) for o in parsed if o.is_sweep_override()}
        if not self.problems and swept and not multirun:
            self.problems.append(f"{', '.join(swept)}: several values make a sweep; add -m")
        if not self.problems:
            self._check_needs(given | studied, picked)
        swept |= {key: len(values) for key, values in studied.items()}
        if self.proposed is not None:
            lines = [*((o, o.input_line or "") for o in swept_by_it), *zip(parsed, checked, strict=True)]
            self._propose([(override, line, self._values(override)) for override, line in lines])
            return words
        self.cells = prod(swept.values())
        if self.cells > size_limits.MOST_CELLS:
            self.problems.append(
                f"{', '.join(swept)}: {self.cells:,} cells; at most {size_limits.MOST_CELLS:,} are listed"
            )
        return [_swept_along(line, override, swept) for line, override in zip(checked, parsed, strict=True)]

    def _unlisted(self, overrides: list[Override], values: dict[str, list[Any]]) -> str:
        """Returns an error message if there are too many values to list, or infinitely many, else ""; a sweeper may
        draw from such values.
        """
        if self.proposed is not None:
            return ""
        endless = [one.input_line for one in overrides if one.is_interval_sweep()]
        if endless:
            return f"{endless[0]}: {size_limits.ENDLESS}"
        return size_limits.problem_of_count({key: len(one) for key, one in values.items()})

    def _check_composed(self, picked: dict[str, list[Any]]) -> DictConfig:
        """Returns Hydra's own config, after checking that experiments and users' choices change only allowed parts of
        it, and that they have all values and the names that our schemas require.
        """
        usual = self.hydra_of([])
        for one in (study := self._study(picked), *self._of_users(picked)):
            config = self.config_of(one)
            lacking = problem_of_missing(config) or problem_of_names(config, CHOSEN_BY_GROUP)
            found = (problem_of_choices(self.hydra_of(one), usual), lacking)
            self.problems += [problem for problem in found if problem and problem not in self.problems]
        return self.hydra_of(study)

    def _choose_plugins(self, parsed: list[Override], study: list[str], given: dict[str, list[Any]]) -> None:
        self.launcher = choose_launcher(self.hydra_of, parsed, study, self.problems)
        named = [str(one) for one in given.get(OBJECTIVE, []) if one is not None]
        objective = ",".join(named) if OBJECTIVE in given else self.config_of(study).get(OBJECTIVE)
        if not self.problems:
            self.proposed = choose_sweeper(self.hydra_of, parsed, study, objective or None, self.problems)

    def _propose(self, overrides: list[tuple[Override, str, list[Any]]]) -> None:
        """Adds to `proposed` the axes that its sweeper chooses from."""
        if self.proposed is None:
            return
        if not self.multirun:
            self.problems.append(f"{self.proposed.chosen}: a sweeper proposes the cells of a sweep; add -m")
        self.proposed = with_axes(self.proposed, overrides, self.problems)

    def _study(self, picked: dict[str, list[Any]]) -> list[str]:
        return [f"experiment={e}" for e in picked.get("experiment", [])[:1] if e in self.choices["experiment"]]

    def _of_users(self, picked: dict[str, list[Any]]) -> list[list[str]]:
        """Returns the configs, as overrides, of choices from a user's folders, which may set Hydra keys."""
        mine = {
            (where / group / f"{one}.yaml", f"{group}={one}")
            for where in self._extra_dirs
            for group in SCHEMAS
            for one in picked.get(group, [])
            if one in self.choices[group]
        }
        return [[override, *self._study(picked)] for path, override in sorted(mine) if path.is_file()]

    def _configs(self, root: str, picked: dict[str, list[Any]]) -> list[list[str]]:
        """Returns the configs that a key below `root` may be in, as overrides: one for each choice, if `root` is a
        group.
        """
        choices = picked.get(root, []) if root in SCHEMAS else []
        chosen = [[f"{root}={choice}"] for choice in choices if choice in self.choices[root]]
        return [one + self._study(picked) for one in chosen or [[]]]

    def _is_by_transformers(self, picked: dict[str, list[Any]]) -> bool:
        """Returns True if a picked model has its shape under `huggingface`."""
        chosen = [one for one in self._configs("model", picked) if one]
        return any(OmegaConf.select(self.config_of(one), "model.kind") == "huggingface" for one in chosen)

    def _check_needs(self, seen: dict[str, list[Any]], picked: dict[str, list[Any]]) -> None:
        """Checks NEEDS. `seen`: key -> its values, set or swept over."""
        for key, (other, wanted) in NEEDS.items():
            if key not in seen:
                continue
            configs = self._configs(key.split(".")[0], picked)
            values = seen.get(other) or [OmegaConf.select(self.config_of(one), other) for one in configs]
            if wanted not in values:
                self.problems.append(f"{key}: it means nothing without {other}={str(wanted).lower()}; add that")

    def _swept_by_a_study(self, hydra: DictConfig, given: dict[str, list[Any]]) -> list[Override]:
        """Returns the axes that an experiment sweeps over."""
        params = {key: value for key, value in (hydra.sweeper.get("params") or {}).items() if key not in given}
        parsed = [self._parse(f"{key}={value!s}", []) for key, value in params.items()]
        return [override for override in parsed if override]

    def _parse(self, argument: str, verbs: list[str]) -> Override | None:
        if problem := size_limits.problem_of(argument):
            self.problems.append(problem)
            return None
        try:
            override = OverridesParser.create().parse_override(argument)
            self.problems += [problem] if (problem := size_limits.problem_of_values(override)) else []
            return override if not problem else None
        except HydraException:
            key = argument.lstrip("+~").split("=")[0]
            if "=" in argument:
                self.problems.append(f"{argument}: the value cannot be read; quote it, as in '{key}=\"...\"'")
            else:
                hint = meant_verb(argument, verbs)
                self.problems.append(
                    f"{argument or repr('')}: neither KEY=VALUE nor a verb{hint}; see zerobench --help"
                )
            return None

    def _check_one(self, override: Override, picked: dict[str, list[Any]]) -> str:
        key, line = override.key_or_group, override.input_line or ""
        root = key.split(".")[0].split("/")[0]
        if root == "hydra":
            self.problems += [problem] if (problem := problem_of(override)) else []
            return line
        if override.is_delete():
            self.problems.append(f"{line}: keys cannot be deleted; every key has a default")
            return line
        line, known = line.lstrip("+"), len(self.problems)
        if key in CHOSEN_BY_GROUP:
            group = root
            self.problems.append(
                f"{line}: it follows from the group; choose it with {group}={'|'.join(self.choices[group])}"
            )
        elif root == "huggingface" and "experiment" not in picked and not self._is_by_transformers(picked):
            self.problems.append(f"{line}: it has a meaning for models that transformers builds; add model=huggingface")
        elif key == "results_dir":
            found = [size_limits.problem_of_folder(line, value) for value in self._values(override)]
            self.problems += [problem for problem in found if problem]
        elif override.package is not None:
            self.problems.append(f"{line}: {key} cannot be moved to another package")
        elif key in GROUPS:
            self._check_choice(key, self._values(override))
        else:
            self._check_key(key, self._values(override), self._configs(root, picked))
        if override.is_interval_sweep() and self.problems[known:]:
            whole = f"of whole numbers it is {key}=int({line.partition('=')[2]})"
            self.problems[known:] = [f"{self.problems[known]}; {whole}"]
        return "++" + line if key.startswith("huggingface.options.") or key in self.elsewhere else line

    def _check_choice(self, group: str, choices: list[Any]) -> None:
        known = self.choices[group]
        for choice in choices:
            if choice not in known and not (group == "experiment" and choice is None):
                hint = nearest(str(choice), known)
                hint += f" (all choices: zerobench --help {group})" if "did you mean" in hint else ""
                if group == "optimizer" and (why := why_not_sharded(str(choice))):
                    hint = f": it cannot be sharded, since {why}"
                if group in REGISTERED and "did you mean" not in hint:
                    hint += f"; if a script registers it, run that script: python SCRIPT {group}={choice!s}"
                self.problems.append(f"{group}={choice!s}: no such {group}{hint}")

    def _check_key(self, key: str, values: list[Any], configs: list[list[str]]) -> None:
        """Tries the values of a key in composed configs, given as lists of overrides, one for each choice of the key's
        group. At least one must have the key.
        """
        lacking = [(overrides, sentence) for overrides in configs if (sentence := self._lacks(key, overrides))]
        having = [overrides for overrides in configs if overrides not in [one for one, _ in lacking]]
        if not having:
            sentences = [sentence for _, sentence in lacking]
            self.problems.append(next((one for one in sentences if "did you mean" in one), sentences[0]))
        elif lacking:
            self.elsewhere.add(key)
        for overrides in having:
            self.problems += self._problems_of_values(key, values, overrides)

    def _values(self, override: Override) -> list[Any]:
        """Returns the values that an override sets or sweeps over; a glob selects among a group's choices."""
        value = override.value()
        if isinstance(value, Glob):
            names = list(value.filter(self.choices.get(override.key_or_group, [])))
            self.globs[override.input_line or ""] = names
            return names
        if isinstance(value, IntervalSweep):
            return [value.start, value.end]
        found = list(override.sweep_iterator(transformer=lambda x: x)) if override.is_sweep_override() else [value]
        return [one.text if isinstance(one, QuotedString) else one for one in found]


def _is_sweep(parsed: list[Override], hydra: DictConfig, multirun: bool) -> bool:
    """Whether several cells may be composed: with -m, unless hydra.mode says otherwise."""
    modes = [str(override.value()).upper() for override in parsed if override.key_or_group == "hydra.mode"]
    mode = modes[-1] if modes else hydra.mode.name if hydra.mode is not None else ""
    return mode == "MULTIRUN" or (multirun and mode != "RUN")


def _swept_along(line: str, override: Override, swept: dict[str, int]) -> str:
    """Turns a key below a swept group into a sweep of one value: Hydra first composes a sweep's other overrides with
    the group's default, which may lack the key.
    """
    group, _, rest = override.key_or_group.partition(".")
    if not rest or group not in swept or group not in SCHEMAS or override.is_sweep_override():
        return line
    key, _, value = line.partition("=")
    return f"{key}=choice({value})"
