"""Command-line overrides, checked against the schemas before Hydra sees them.

Hydra alone accepts `+strategy.stge=1` and attaches it silently; here every key must exist, also behind a +,
and what does not exist is answered with the nearest name that does.
"""

from __future__ import annotations

from dataclasses import fields
from math import prod
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from . import schema_memory, size_limits
from .byte_sizes import SUFFIX, in_bytes
from .hydra_keys import problem_of, problem_of_choices, quoted, spelled_out
from .safe_yaml import problems_of_folders
from .schema import SCHEMAS
from .unknown_keys import meant, meant_verb, nearest, type_name

GROUPS = (*SCHEMAS, "experiment")

CHOSEN_BY_GROUP = (
    "strategy.name",
    "model.kind",
    "data.name",
    "optimizer.name",
    "precision.name",
    *(f"{group}.name" for group in schema_memory.SCHEMAS),
)
"""Keys that say which choice of a group this is."""

NEEDS: dict[str, tuple[str, Any]] = {"offload.delayed_after": ("offload.delayed", True)}
"""Key -> (another, the value it must have somewhere in a sweep for the first to mean anything)."""

UNREADABLE = (HydraException, OmegaConfBaseException, YAMLError, ValueError, RecursionError)
"""Errors that a user's yaml may raise when it is composed."""


class Overrides:
    """Checks overrides one by one. `problems` holds a sentence for each that is wrong, `elsewhere` the keys that some
    choices of a sweep have and others lack: these are left out where they mean nothing.
    """

    def __init__(self, config_dir: Path, users: dict[str, list[str]], extra_dirs: list[Path]) -> None:
        self._config_dir = config_dir
        self._extra_dirs = extra_dirs
        self.folders = (*extra_dirs, config_dir)
        self.choices = {group: self._found_choices(group) for group in GROUPS}
        for group, names in users.items():
            self.choices[group] += names
        self._composed: dict[tuple[str, ...], tuple[DictConfig, DictConfig]] = {}
        self.problems: list[str] = []
        self.elsewhere: set[str] = set()
        self.cells = 1
        self.multirun = False

    def check(self, words: list[str], multirun: bool, verbs: list[str]) -> list[str]:
        """The overrides as Hydra shall see them; fills `problems`, `cells`, the number of cells, and `multirun`."""
        try:
            return self._check_all([in_bytes(word) for word in spelled_out(words)], multirun, verbs)
        except UNREADABLE as error:
            why = " ".join(str(error.__cause__ or error).split())
            self.problems.append(f"{' '.join(words)}: it cannot be composed: {why[:300]}")
            return words

    def _check_all(self, words: list[str], multirun: bool, verbs: list[str]) -> list[str]:
        self.problems += problems_of_folders(self._extra_dirs)
        parsed = [override for argument in words if (override := self._parse(argument, verbs))]
        if self.problems:
            return words
        parsed = [o for o in parsed if not (o.key_or_group == "experiment" and self._values(o) == [None])]
        given = {o.key_or_group: self._values(o) for o in parsed}
        picked = {group: choices for group, choices in given.items() if group in GROUPS}
        self._check_mode(picked)
        hydra = self._compose(self._study(picked), with_hydra=True).hydra
        self.problems += [problem] if (problem := problem_of_choices(hydra)) else []
        modes = [str(o.value()).upper() for o in parsed if o.key_or_group == "hydra.mode"]
        mode = modes[-1] if modes else hydra.mode.name if hydra.mode is not None else ""
        self.multirun = multirun = mode == "MULTIRUN" or (multirun and mode != "RUN")
        studied = self._swept_by_a_study(hydra, given) if multirun else {}
        picked |= {group: choices for group, choices in studied.items() if group in GROUPS}
        if problem := size_limits.problem_of_count({key: len(values) for key, values in (given | studied).items()}):
            self.problems.append(problem)
            return words
        checked = [self._check_one(override, picked) for override in parsed]
        swept = {o.key_or_group: len(self._values(o)) for o in parsed if o.is_sweep_override()}
        if not self.problems and swept and not multirun:
            self.problems.append(f"{', '.join(swept)}: several values make a sweep; add -m")
        if not self.problems:
            self._check_needs(given | studied, picked)
        swept |= {key: len(values) for key, values in studied.items()}
        self.cells = prod(swept.values())
        if self.cells > size_limits.MOST_CELLS:
            self.problems.append(
                f"{', '.join(swept)}: {self.cells:,} cells; at most {size_limits.MOST_CELLS:,} are listed"
            )
        return [_swept_along(line, override, swept) for line, override in zip(checked, parsed, strict=True)]

    def _study(self, picked: dict[str, list[Any]]) -> list[str]:
        """The experiment, as an override."""
        return [f"experiment={e}" for e in picked.get("experiment", [])[:1] if e in self.choices["experiment"]]

    def _configs(self, root: str, picked: dict[str, list[Any]]) -> list[list[str]]:
        """The configs that a key below `root` may be in, as overrides: one for each choice, if it is a group."""
        choices = picked.get(root, []) if root in SCHEMAS else []
        chosen = [[f"{root}={choice}"] for choice in choices if choice in self.choices[root]]
        return [one + self._study(picked) for one in chosen or [[]]]

    def _check_needs(self, seen: dict[str, list[Any]], picked: dict[str, list[Any]]) -> None:
        """`seen`: what is set or swept over, key -> values."""
        for key, (other, wanted) in NEEDS.items():
            if key not in seen:
                continue
            configs = self._configs(key.split(".")[0], picked)
            values = seen.get(other) or [OmegaConf.select(self._compose(one), other) for one in configs]
            if wanted not in values:
                self.problems.append(f"{key}: it means nothing without {other}={str(wanted).lower()}; add that")

    def _swept_by_a_study(self, hydra: DictConfig, given: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Returns the axes that an experiment itself sweeps over, key -> values."""
        params = {key: value for key, value in (hydra.sweeper.params or {}).items() if key not in given}
        parsed = [self._parse(f"{key}={value!s}", []) for key, value in params.items()]
        return {override.key_or_group: self._values(override) for override in parsed if override}

    def _check_mode(self, picked: dict[str, list[Any]]) -> None:
        """An experiment sets the stage for a whole sweep; several of them would each want their own."""
        if len(picked.get("experiment", [])) > 1:
            self.problems.append("experiment: several experiments are several sweeps; run them one after the other")

    def config_of(self, overrides: list[str]) -> DictConfig:
        """Composes the config of a command line of these overrides."""
        return self._compose(overrides)

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
                self.problems.append(f"{argument}: neither KEY=VALUE nor a verb{hint}; see zerobench --help")
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
        line = line.lstrip("+")
        if key in CHOSEN_BY_GROUP:
            group = root
            self.problems.append(
                f"{line}: it follows from the group; choose it with {group}={'|'.join(self.choices[group])}"
            )
        elif root == "huggingface" and "huggingface" not in picked.get("model", []) and "experiment" not in picked:
            self.problems.append(f"{line}: it has a meaning for model=huggingface only; add that")
        elif key == "results_dir":
            found = [size_limits.problem_of_folder(line, value) for value in self._values(override)]
            self.problems += [problem for problem in found if problem]
        elif override.package is not None:
            self.problems.append(f"{line}: {key} cannot be moved to another package")
        elif key in GROUPS:
            self._check_choice(key, self._values(override))
        else:
            self._check_key(key, self._values(override), self._configs(root, picked))
        return "++" + line if key.startswith("huggingface.options.") or key in self.elsewhere else line

    def _check_choice(self, group: str, choices: list[Any]) -> None:
        known = self.choices[group]
        for choice in choices:
            if choice not in known and not (group == "experiment" and choice is None):
                hint = nearest(str(choice), known)
                hint += f" (all of them: zerobench --help {group})" if "did you mean" in hint else ""
                self.problems.append(f"{group}={choice!s}: no such {group}{hint}")

    def _check_key(self, key: str, values: list[Any], configs: list[list[str]]) -> None:
        """Tries the values in the key's place in composed configs, a list of overrides each: one for each choice of
        the key's group. Some of them must have the key.
        """
        lacking = [(overrides, sentence) for overrides in configs if (sentence := self._lacks(key, overrides))]
        having = [overrides for overrides in configs if overrides not in [one for one, _ in lacking]]
        if not having:
            sentences = [sentence for _, sentence in lacking]
            self.problems.append(next((one for one in sentences if "did you mean" in one), sentences[0]))
        elif lacking:
            self.elsewhere.add(key)
        for overrides in having:
            self._check_values(key, values, overrides)

    def _lacks(self, key: str, overrides: list[str]) -> str:
        """Walks `key` through a composed config: a sentence where that has no such key, else nothing."""
        node: Any = self._compose(overrides)
        path: list[str] = []
        for part in key.split("."):
            if path == ["huggingface", "options"]:
                return ""
            known = list(node) if isinstance(node, DictConfig) else []
            if part not in known:
                under = f" under {overrides[0]}" if overrides and path else ""
                had = self._had_by(key)
                return f"{key}: no such key{under}{had or meant(key, known, '.'.join(path))}"
            path.append(part)
            node = node._get_node(part)
        return ""

    def _had_by(self, key: str) -> str:
        """Which choices of the key's group have it, to follow a sentence."""
        group, _, rest = key.partition(".")
        having = [name for name, kind in SCHEMAS.get(group, {}).items() if rest in (one.name for one in fields(kind))]
        words = "|".join(name for name in self.choices.get(group, []) if name in having)
        return f"; choose {group}={words} for it" if words else ""

    def _check_values(self, key: str, values: list[Any], overrides: list[str]) -> None:
        config = self._compose(overrides)
        *path, last = key.split(".")
        parent = OmegaConf.select(config, ".".join(path)) if path else config
        if path[:2] == ["huggingface", "options"]:
            return
        node = parent._get_node(last)
        if isinstance(node, DictConfig):
            self.problems.append(f"{key}: it has parts; set one of them{nearest('', [f'{key}.{k!s}' for k in node])}")
            return
        for value in size_limits.extremes(values):
            if isinstance(value, str) and "${" in value:
                continue  # an interpolation has its value when the cell is composed
            try:
                OmegaConf.update(config.copy(), key, value)
            except OmegaConfBaseException:
                size = ", as 1048576 or 1MiB" * key.endswith(SUFFIX)
                self.problems.append(f"{key}={value}: wants {type_name(node)}{size}, and {value!r} is none")

    def compose_whole(self, overrides: list[str]) -> DictConfig:
        """The config of `overrides` with Hydra's own part. Hydra's exceptions come through."""
        GlobalHydra.instance().clear()
        search = [f"hydra.searchpath=[{','.join(quoted(f'file://{d.resolve()}') for d in self._extra_dirs)}]"]
        with initialize_config_dir(str(self._config_dir.resolve()), version_base="1.3"):
            return compose(
                "config", overrides=[*overrides, *(search if self._extra_dirs else [])], return_hydra_config=True
            )

    def _compose(self, overrides: list[str], with_hydra: bool = False) -> DictConfig:
        """The config of `overrides`. Both forms are composed at once: Hydra takes a quarter of a second each time."""
        where = tuple(overrides)
        if where not in self._composed:
            whole = self.compose_whole(overrides)
            plain = whole.copy()
            with open_dict(plain):
                del plain["hydra"]
            self._composed[where] = (plain, whole)
        return self._composed[where][with_hydra]

    def _values(self, override: Override) -> list[Any]:
        """Returns the values that an override sets or sweeps over; a glob selects among a group's choices."""
        value = override.value()
        if isinstance(value, Glob):
            return list(value.filter(self.choices.get(override.key_or_group, [])))
        found = list(override.sweep_iterator(transformer=lambda x: x)) if override.is_sweep_override() else [value]
        return [one.text if isinstance(one, QuotedString) else one for one in found]

    def _found_choices(self, group: str) -> list[str]:
        found = {
            path.stem for where in (self._config_dir, *self._extra_dirs) for path in (where / group).glob("*.yaml")
        }
        return sorted(found)


def _swept_along(line: str, override: Override, swept: dict[str, int]) -> str:
    """A key below a group that is swept over becomes a sweep of one value: Hydra composes a sweep's other overrides
    once beforehand, with the group's default, which need not have the key.
    """
    group, _, rest = override.key_or_group.partition(".")
    if not rest or group not in swept or group not in SCHEMAS or override.is_sweep_override():
        return line
    key, _, value = line.partition("=")
    return f"{key}=choice({value})"
