"""Command-line overrides, checked against the schemas before Hydra sees them.

Hydra silently accepts `+strategy.stge=1`; here every key must exist, even after a +,
and the error message for an unknown key suggests the nearest one.

Composer      composes configs through Hydra to find their keys and valid values
Overrides     checks each override against those configs
CheckedLine   a valid command line: which overrides every cell has, and which a sweeper splits
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override, QuotedString
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from ..zero.optim.segments import why_not_sharded
from . import schema_memory, size_limits
from .hydra_problems import not_composed, problem_of_missing, problem_of_names, quoted
from .launcher import BASIC, LauncherChoice, chosen_launcher
from .objective import KEY as OBJECTIVE
from .objective import Objective, objectives_of
from .schema import SCHEMAS
from .size_limits import SUFFIX, in_bytes, in_one
from .unknown_keys import IDENTITY, meant, meant_verb, nearest, spaced, type_name
from .yaml_file import problems_of_folders

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

DELAYED, DELAYED_AFTER = "offload.delayed", "offload.delayed_after"
"""A key, and one that has an effect only if the first is true somewhere in a sweep."""

REGISTERED = ("model", "data", "strategy")
"""Groups to which a user's script adds choices."""

UNREADABLE = (HydraException, OmegaConfBaseException, YAMLError, OSError, ValueError, RecursionError)
"""Errors that composing a user's yaml may raise."""


class ChosenConfig(NamedTuple):
    """A config, and Hydra's own part of it; neither is ever modified. `asks_hydra`: whether one of its values is
    interpolated from Hydra's part; `lacks`: whether a key may have no value.
    """

    config: DictConfig
    hydra: DictConfig
    asks_hydra: bool
    lacks: bool


@lru_cache(4)
def compositions_of(*choices: Hashable) -> dict[tuple[str, ...], ChosenConfig]:
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
        composed: dict[tuple[str, ...], ChosenConfig],
    ) -> None:  # fmt: skip
        self._config_dir = config_dir
        self.extra_dirs = extra_dirs
        self.folders = (*extra_dirs, config_dir)
        self.choices = {
            group: sorted({path.stem for where in self.folders for path in (where / group).glob("*.yaml")})
            for group in GROUPS
        }
        for group, names in users.items():
            self.choices[group] += names
        self._composed = composed
        self.loader: Any = None
        self.problems: list[str] = []
        self.elsewhere: set[str] = set()

    def config_of(self, overrides: list[str]) -> DictConfig:
        return self._compose(overrides).config

    def hydra_of(self, overrides: list[str]) -> DictConfig:
        return self._compose(overrides).hydra

    def cell_of(self, overrides: list[str], number: int) -> tuple[DictConfig, str, bool]:
        """Returns the config of a cell, the job `number` of its sweep, its choice of a model, and if a key may lack
        its value. Cells with equal choices are updates of one composition, as Hydra makes them, unless a value is
        interpolated from Hydra's part.
        """
        choices, keys = list[str](), list[Override]()
        for word in overrides:
            override = _parsed(word)
            if override.key_or_group in GROUPS or _root(override) == "hydra":
                choices.append(word)
            else:
                keys.append(override)
        composed = self._compose(choices)
        if composed.asks_hydra or any(ASKS in word for word in overrides):
            config = self.compose_whole(overrides)
            with open_dict(config):
                config.hydra.job.num = number
                HydraConfig.instance().set_config(config)
                del config["hydra"]
        else:
            config = composed.config.copy()
            ConfigLoaderImpl._apply_overrides_to_config(keys, config)
        lacks = composed.lacks or any(MISSING in word for word in overrides)
        return config, composed.hydra.runtime.choices["model"], lacks

    def compose_whole(self, overrides: list[str]) -> DictConfig:
        """Returns the config of `overrides` with Hydra's own part. Hydra's exceptions propagate."""
        GlobalHydra.instance().clear()
        search = [f"hydra.searchpath=[{','.join(quoted(f'file://{d.resolve()}') for d in self.extra_dirs)}]"]
        with initialize_config_dir(str(self._config_dir.resolve()), version_base="1.3"):
            self.loader = GlobalHydra.instance().config_loader()
            searched = [*overrides, *(search if self.extra_dirs else [])]
            try:
                return compose("config", overrides=searched, return_hydra_config=True)
            except (AssertionError, AttributeError):  # OmegaConf's, as for hydra.sweeper.params={...}
                raise HydraException("a key that is null is given parts") from None

    def _compose(self, overrides: list[str]) -> ChosenConfig:
        """Returns the config of `overrides`, and Hydra's part; cached, since Hydra takes a quarter of a second."""
        where = tuple(overrides)
        if where not in self._composed:
            plain = self.compose_whole(overrides)
            with open_dict(plain):
                hydra = plain.pop("hydra")
            text = OmegaConf.to_yaml(plain)
            self._composed[where] = ChosenConfig(plain, hydra, ASKS in text, MISSING in text)
        return self._composed[where]

    def _lacks(self, key: str, overrides: list[str]) -> str:
        node: Any = self.config_of(overrides)
        path: list[str] = []
        for part in key.split("."):
            if path == ["huggingface", "options"]:
                return ""
            names = list(node) if isinstance(node, DictConfig) else []
            if part not in names:
                under = f" under {overrides[0]}" if overrides and path else ""
                group, _, rest = key.partition(".")
                schemas = SCHEMAS.get(group, {})
                having = [name for name in schemas if rest in (field.name for field in fields(schemas[name]))]
                alternatives = "|".join(name for name in self.choices.get(group, []) if name in having)
                own = ", ".join(name for name in names if name not in IDENTITY)
                under += f", which has {own}" if alternatives and own and under else ""
                had = f"; choose {group}={alternatives} for it" if alternatives else ""
                return f"{key}: no such key{under}{had or meant(key, names, '.'.join(path))}"
            path.append(part)
            node = node._get_node(part)
        return ""

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
                size = ", as 1048576 or 1MiB" if key.endswith(SUFFIX) else ""
                problems.append(f"{key}={value}: wants {type_name(node)}{size}, and {value!r} is none")
        return problems


ASKS = "${hydra:"
"""Begins an interpolation from Hydra's part of a config."""

SWEEPER = "hydra/sweeper"


@dataclass(frozen=True)
class CheckedLine:
    """A valid command line. `fixed`: the overrides of every cell; `swept`: those that the sweeper splits, without a
    plus; `hydra`: those below `hydra`, with the experiment. `multirun`: several cells may follow. `sweeper`: a
    Hydra plugin that proposes cells from their `objectives`, or `BASIC`. `notes`: lines for the user.
    """

    fixed: tuple[str, ...]
    swept: tuple[str, ...]
    hydra: tuple[str, ...]
    multirun: bool
    launcher: LauncherChoice | None
    sweeper: str = BASIC
    objectives: tuple[Objective, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def proposes(self) -> bool:
        """Whether the sweeper proposes cells from what earlier ones measured."""
        return self.sweeper != BASIC


class Overrides(Composer):
    """Checks overrides one by one. `problems`: an error message for each invalid override. `elsewhere`: keys that some
    choices of a sweep have and others lack; cells without them ignore them.
    """

    def check(self, arguments: list[str], multirun: bool, verbs: list[str]) -> CheckedLine | None:
        """Returns the checked command line; None if it is invalid, with `problems` set."""
        try:
            line = self._check_all(arguments, multirun, verbs)
        except UNREADABLE as error:
            self.problems.append(not_composed(arguments, error.__cause__ or error))
        return None if self.problems else line

    def forced(self, word: str) -> str:
        """Adds the prefix `++` to an override whose key not all cells have."""
        key = word.partition("=")[0].lstrip("+")
        added = key in self.elsewhere or key.startswith("huggingface.options.")
        return f"++{word.lstrip('+')}" if added else word

    def _check_all(self, arguments: list[str], multirun: bool, verbs: list[str]) -> CheckedLine | None:
        parsed = self._parse_all(arguments, verbs)
        if self.problems:
            return None
        own = [o.input_line or "" for o in parsed if _root(o) == "hydra"]
        parsed = [o for o in parsed if _root(o) != "hydra"]
        given = {o.key_or_group: self._values(o) for o in parsed}
        picked = {group: choices for group, choices in given.items() if group in GROUPS}
        study = [*self._study(picked), *own]
        hydra = self._check_composed(picked, study)
        if self.problems:
            return None
        mode = hydra.mode.name if hydra.mode is not None else ""
        multirun = mode == "MULTIRUN" or (multirun and mode != "RUN")  # RUN: one cell, here, whatever an experiment has
        parsed = [*(self._by_config(hydra, given) if multirun else ()), *parsed]
        axes = [o for o in parsed if o.is_sweep_override()]
        sweeper = BASIC if mode == "RUN" else hydra.runtime.choices.get(SWEEPER, BASIC)
        named = given[OBJECTIVE] if OBJECTIVE in given else [self.config_of(self._study(picked)).get(OBJECTIVE)]
        objective = "" if mode == "RUN" else ",".join(str(name) for name in named if name is not None)
        objectives = self._check_sweeper(sweeper, objective, multirun, axes)
        if self.problems:
            return None
        values = {o.key_or_group: self._values(o) for o in parsed}
        picked = {group: choices for group, choices in values.items() if group in GROUPS}
        lines = {o.key_or_group: self._check_one(o, picked) for o in parsed}
        if not self.problems and axes and not multirun:
            self.problems.append(f"{', '.join(o.key_or_group for o in axes)}: several values make a sweep; add -m")
        self._check_delayed(values, picked)
        swept = {o.key_or_group for o in axes}
        globs = [f"{o.input_line} takes {', '.join(self._values(o))}" for o in parsed if isinstance(o.value(), Glob)]
        return CheckedLine(
            fixed=tuple(line for key, line in lines.items() if key not in {*swept, OBJECTIVE}),
            swept=tuple(line for key, line in lines.items() if key in swept),
            hydra=tuple(study),
            multirun=multirun,
            launcher=None if mode == "RUN" else chosen_launcher(hydra, own),
            sweeper=sweeper,
            objectives=objectives,
            notes=tuple(globs),
        )

    def _parse_all(self, arguments: list[str], verbs: list[str]) -> list[Override]:
        self.problems += problems_of_folders(self.extra_dirs, GROUPS)
        if problem := spaced(arguments):
            self.problems.append(problem)
            return []
        parsed = [override for argument in arguments if (override := self._parse(argument, verbs))]
        if self.problems:
            return []
        chosen = {id(o): self._values(o) for o in parsed if o.key_or_group == "experiment"}
        if any(len(experiments) > 1 for experiments in chosen.values()):
            self.problems.append("experiment: several experiments are several sweeps; run them one after the other")
        return [o for o in parsed if chosen.get(id(o)) != [None]]

    def _by_config(self, hydra: DictConfig, given: dict[str, list[Any]]) -> Iterator[Override]:
        """Yields the overrides among the parameters of the sweeper that the command line does not replace."""
        for key, value in (hydra.sweeper.get("params") or {}).items():
            if key not in given and (override := self._parse(f"{key}={value!s}", [])):
                yield override

    def _check_delayed(self, values: dict[str, list[Any]], picked: dict[str, list[Any]]) -> None:
        if self.problems or DELAYED_AFTER not in values:
            return
        configs = map(self.config_of, self._configs("offload", picked))
        if True not in (values.get(DELAYED) or [OmegaConf.select(config, DELAYED) for config in configs]):
            self.problems.append(f"{DELAYED_AFTER}: it means nothing without {DELAYED}=true; add that")

    def _check_sweeper(
        self, sweeper: str, objective: str, multirun: bool, axes: Sequence[Override]
    ) -> tuple[Objective, ...]:
        """Returns the objectives; adds a problem if there are too many values to list, or infinitely many, which only a
        sweeper that proposes cells can draw from.
        """
        if sweeper == BASIC:
            endless = next((o.input_line for o in axes if o.is_interval_sweep()), None)
            counts = {o.key_or_group: len(self._values(o)) for o in axes}
            if objective:
                self.problems.append(
                    f"{OBJECTIVE}={objective}: no sweeper asks for it; add {SWEEPER}=optuna, or leave it out"
                )
            elif problem := f"{endless}: {size_limits.ENDLESS}" if endless else size_limits.problem_of_count(counts):
                self.problems.append(problem)
            return ()
        if not objective or not multirun:
            lacking = "a sweep; add -m"
            if multirun:
                lacking = f"an objective; add {OBJECTIVE}=COLUMN, as {OBJECTIVE}=-tokens_per_s"
            self.problems.append(f"{SWEEPER}={sweeper}: it needs {lacking}")
            return ()
        try:
            return objectives_of(objective)
        except ValueError as error:
            self.problems.append(str(error))
            return ()

    def _check_composed(self, picked: dict[str, list[Any]], study: list[str]) -> DictConfig:
        """Returns Hydra's own config, after checking that experiments and users' choices have all values and the names
        that our schemas require.
        """
        for overrides in (self._study(picked), *self._of_users(picked)):
            config = self.config_of(overrides)
            problem = problem_of_missing(config) or problem_of_names(config, CHOSEN_BY_GROUP)
            self.problems += [problem] if problem and problem not in self.problems else []
        return self.hydra_of([] if self.problems else study)

    def _study(self, picked: dict[str, list[Any]]) -> list[str]:
        return [f"experiment={e}" for e in picked.get("experiment", [])[:1] if e in self.choices["experiment"]]

    def _of_users(self, picked: dict[str, list[Any]]) -> list[list[str]]:
        """Returns the configs, as overrides, of choices from a user's folders, which may set Hydra keys."""
        files = {
            (where / group / f"{choice}.yaml", f"{group}={choice}")
            for where in self.extra_dirs
            for group in SCHEMAS
            for choice in picked.get(group, [])
            if choice in self.choices[group]
        }
        return [[override, *self._study(picked)] for path, override in sorted(files) if path.is_file()]

    def _configs(self, root: str, picked: dict[str, list[Any]]) -> list[list[str]]:
        """Returns the configs that a key below `root` may be in, as overrides: one for each choice, if `root` is a
        group.
        """
        choices = picked.get(root, []) if root in SCHEMAS else []
        chosen = [[f"{root}={choice}"] for choice in choices if choice in self.choices[root]]
        return [overrides + self._study(picked) for overrides in chosen or [[]]]

    def _parse(self, argument: str, verbs: list[str]) -> Override | None:
        argument = in_one(in_bytes(argument))
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
        key, line, root = override.key_or_group, override.input_line or "", _root(override)
        if override.is_delete():
            self.problems.append(f"{line}: keys cannot be deleted; every key has a default")
            return line
        line, before = line.lstrip("+"), len(self.problems)
        if key in CHOSEN_BY_GROUP:
            group = root
            self.problems.append(
                f"{line}: it follows from the group; choose it with {group}={'|'.join(self.choices[group])}"
            )
        elif root == "huggingface" and "experiment" not in picked and not any(
            OmegaConf.select(self.config_of(overrides), "model.kind") == "huggingface"
            for overrides in self._configs("model", picked) if overrides
        ):  # fmt: skip
            self.problems.append(f"{line}: it has a meaning for models that transformers builds; add model=huggingface")
        elif key == "results_dir":
            messages = (size_limits.problem_of_folder(line, value) for value in self._values(override))
            self.problems += filter(None, messages)
        elif override.package is not None:
            self.problems.append(f"{line}: {key} cannot be moved to another package")
        elif key in GROUPS:
            self._check_choice(key, self._values(override))
        else:
            self._check_key(key, self._values(override), self._configs(root, picked))
        if override.is_interval_sweep() and self.problems[before:]:
            whole = f"of whole numbers it is {key}=int({line.partition('=')[2]})"
            self.problems[before:] = [f"{self.problems[before]}; {whole}"]
        return f"{key}={','.join(self._values(override))}" if isinstance(override.value(), Glob) else line

    def _check_choice(self, group: str, choices: list[Any]) -> None:
        names = self.choices[group]
        if not choices:
            self.problems.append(f"{group}: none of {', '.join(names)} matches")
        for choice in choices:
            if choice not in names and not (group == "experiment" and choice is None):
                hint = nearest(str(choice), names)
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
        having = [overrides for overrides in configs if overrides not in [lacks for lacks, _ in lacking]]
        if not having:
            sentences = [sentence for _, sentence in lacking]
            self.problems.append(next((sentence for sentence in sentences if "did you mean" in sentence), sentences[0]))
        elif lacking:
            self.elsewhere.add(key)
        for overrides in having:
            self.problems += self._problems_of_values(key, values, overrides)

    def _values(self, override: Override) -> list[Any]:
        """Returns the values that an override sets or sweeps over; a glob selects among a group's choices."""
        value = override.value()
        if isinstance(value, Glob):
            return list(value.filter(self.choices.get(override.key_or_group, [])))
        if isinstance(value, IntervalSweep):
            return [value.start, value.end]
        values = list(override.sweep_iterator(transformer=lambda x: x)) if override.is_sweep_override() else [value]
        return [item.text if isinstance(item, QuotedString) else item for item in values]


@lru_cache(10_000)
def _parsed(word: str) -> Override:
    """Returns an override of one cell; the cells of a sweep have many in common."""
    return OverridesParser.create().parse_override(word)


def _root(override: Override) -> str:
    """Returns the group or section of an override's key."""
    return override.key_or_group.split(".")[0].split("/")[0]
