"""A command line -> cells. Hydra composes every job of a sweep before the first rank starts, and runs none.

So an override that does not compose rejects the whole sweep, a dry run takes the same path and stops there, and
we choose the order of the runs (sweep/sweep.py).

    command line -> check_line -> a CommandLine -> batches of overrides -> cells

Hydra's own sweeper makes one batch of all combinations; Optuna and others propose a batch from the values of the last.

Hydra silently accepts `+strategy.stge=1`; here every key must exist, even after a +, and the error message for an
unknown key suggests the nearest one. Before Hydra parses a word, it is checked and may be rewritten:

limits   integers that no column holds, too many cells: rejected before anything is listed
sizes    the value of a key that ends in _bytes may be 25MiB, and is converted to bytes
lists    `launch.retry=crash,oom` is one value, which Hydra would parse as a sweep over two
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Glob, Override, RangeSweep
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from ..host import job
from ..host.files import read_yaml
from ..host.pipes import print_note
from ..host.signals import raise_if_interrupted, repeat_interruption
from ..host.terminal import is_quiet
from ..registry import GROUPS as USERS
from ..sizes import parse_bytes, printable
from ..strategies import specs
from ..zero.optim.segments import why_not_sharded
from . import composer as hydra
from . import schema_memory
from .cell import Cell
from .composer import GROUPS, BatchError, Composer, composition_cache, not_composed, reason, root_key
from .flags import asks_for_config, only_compose, split_arguments, unknown_flags
from .flat import by_key
from .keys import IDENTITY, meant, meant_verb, nearest, spaced, stray_keys, type_name
from .plugins import BASIC, LAUNCHER, OBJECTIVE, SWEEPER, LauncherChoice, Objective, chosen_launcher, parse_objectives
from .resolve import resolve, unresolved
from .schema import SCHEMAS, Data, Model, store_schemas, strategy_choices

CHOSEN_BY_GROUP = (
    "strategy.name", "model.kind", "data.name", "optimizer.name", "precision.name",
    *(f"{group}.name" for group in schema_memory.SCHEMAS),
)  # fmt: skip
"""Keys that name the choice of a group."""

DELAYED, DELAYED_AFTER = "offload.delayed", "offload.delayed_after"
"""A key, and one that has an effect only if the first is true somewhere in a sweep."""

UNREADABLE = (HydraException, OmegaConfBaseException, YAMLError, OSError, ValueError, RecursionError)
"""Errors that composing a user's yaml may raise."""

LIMIT = "search.memory_limit="

MOST_DIGITS = 18
"""Maximum digits of an integer, more than any table column supports."""

MOST_CELLS = 10_000
"""Maximum number of values of a key, and of cells of a sweep, all of which are listed before the first runs."""

ENDLESS = "an interval has no end of values; list them, or have a sweeper choose: hydra/sweeper=optuna objective=COLUMN"

_WHOLE = re.compile(r"(?<![\w./-])-?(\d+)(?![\w./-])")

SUFFIX = "_bytes"

_SIZE = re.compile(r"""(?<![\w.])(['"]?)([0-9]*\.?[0-9]+\s*[kmgt]i?b)\1(?![\w.])""", re.IGNORECASE)
"""A number and a unit, quoted or not, as a single value or one of several."""

ONE_VALUE = {"launch.retry": "[{}]", "objective": "'{}'"}
"""Key -> format of its value for Hydra."""

OPENINGS = ("'", '"', "[", "$", "null")
"""Beginnings of values that are already in Hydra's form."""


class RefusedError(ValueError):
    """The command line is invalid; `problems` lists the error messages."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = [printable(problem) for problem in problems]
        super().__init__("; ".join(self.problems))


def refuse_senseless(cells: Sequence[Cell]) -> None:
    """Raises RefusedError if no cell of a command can run; these cells get no rows. The error lists the problems that
    all cells share or, if there are none, every problem once.
    """
    if cells and all(cell.problems for cell in cells):
        every = dict.fromkeys(problem for cell in cells for problem in cell.problems)
        shared = [problem for problem in every if all(problem in cell.problems for cell in cells)]
        raise RefusedError(shared or list(every))


def make_composer(extra_dirs: list[Any]) -> Composer:
    """Returns a composer that knows every choice and key, including users' models and data."""
    bases = {"model": Model, "data": Data}
    users = {
        group: {name: registry.schema_of(name, build, bases[group]) for name, build in registry.all().items()}
        for group, registry in USERS.items()
    }
    store_schemas(users)
    added = {group: list(schemas) for group, schemas in users.items()} | {"strategy": list(strategy_choices())}
    builders = ((group, *row) for group, registry in USERS.items() for row in registry.all().items())
    compositions = composition_cache(*builders, *((name, spec.options) for name, spec in specs().items()))
    # a user's files may change between commands of one process
    return Composer(added, extra_dirs, {} if extra_dirs else compositions)


@dataclass(frozen=True)
class CommandLine:
    """A valid command line and its cells, in the order of the sweep; none if its sweeper proposes them.

    `fixed`: the overrides of every cell; `swept`: those that the sweeper splits, without a plus; `own`: those below
    `hydra`, with the experiment. `elsewhere`: keys that some choices of a sweep have and others lack; cells without
    them ignore them. `multirun`: several cells may follow. `sweeper`: a Hydra plugin that proposes cells from their
    `objectives`, or `BASIC`. `notes`: lines for the user. `price`: dollars per GPU hour, for the table. `target`: the
    device that fake tensors act as; empty: the cells' own.
    """

    composer: Composer
    fixed: tuple[str, ...]
    swept: tuple[str, ...]
    own: tuple[str, ...]
    elsewhere: frozenset[str]
    multirun: bool
    launcher: LauncherChoice | None
    sweeper: str
    objectives: tuple[Objective, ...]
    notes: tuple[str, ...]
    target: str
    cells: list[Cell] = field(default_factory=list)
    price: float | None = None

    @property
    def proposes(self) -> bool:
        """Whether the sweeper proposes cells from what earlier ones measured."""
        return self.sweeper != BASIC

    def forced(self, overrides: Sequence[str]) -> list[str]:
        """Adds the prefix `++` to overrides whose keys not all cells have."""
        added = [
            (key := word.partition("=")[0].lstrip("+")) in self.elsewhere or key.startswith("huggingface.options.")
            for word in overrides
        ]
        return [f"++{word.lstrip('+')}" if forces else word for word, forces in zip(overrides, added, strict=True)]

    def cells_of(self, batch: Sequence[Sequence[str]], first: int) -> list[Cell]:
        """Composes and resolves the cells of a batch, numbered from `first`; each keeps the overrides that make it."""
        cells = []
        for number, chosen in enumerate(batch, first):
            raise_if_interrupted()
            overrides = self.forced([*self.own, *self.fixed, *map(str, chosen)])
            if self.proposes:  # whose sweeper searches
                overrides = [word for word in overrides if not word.startswith(LIMIT)] + [f"{LIMIT}null"]
            try:
                config, model, lacks = self.composer.cell_of(overrides, number)
            except Exception as error:
                raise RefusedError([not_composed(overrides, error)]) from error
            try:
                if lacks and (problem := problem_of_missing(config)):
                    cell = unresolved(config, model, problem)
                else:
                    draft: Any = OmegaConf.to_object(config)
                    cell = resolve(draft, model, stray_keys(config, self.elsewhere), self.launcher, self.target)
            except Exception as error:  # the other cells are not to suffer; this one becomes a row
                cell = unresolved(config, model, reason(error))
            problems = tuple(map(printable, cell.problems))
            cells.append(replace(cell, problems=problems, overrides=tuple(overrides)))
        return cells


def compose_cells(arguments: list[str], target: str = "") -> list[Cell]:
    """Returns the cells of a command line, to run or inspect in this process only. Raises RefusedError."""
    line = compose(arguments, target=target)
    if line is None:
        return []
    if line.launcher is not None:
        raise RefusedError([f"{LAUNCHER}={line.launcher.name}: only a sweep of the command line is launched so"])
    if line.proposes:
        why = "only a sweep of the command line is proposed so; list the values, as in strategy=zero1,zero2"
        raise RefusedError([f"{SWEEPER}={line.sweeper}: {why}"])
    return line.cells


def compose(arguments: list[str], verbs: tuple[str, ...] = (), target: str = "") -> CommandLine | None:
    """Composes the cells of `[-m] KEY=VALUE ...`; returns None if a Hydra flag asked for something else, which it did.

    Raises RefusedError if the command line is invalid, and JobError if the processes of a job cannot connect.
    """
    with hydra.untouched():
        job.gather()  # cells follow from it
        flags, overrides, extra_dirs = split_arguments(arguments)
        if problems := unknown_flags(flags):
            raise RefusedError(problems)
        line = check_line(make_composer(extra_dirs), overrides, bool({"-m", "--multirun"} & set(flags)), verbs, target)
        if line.launcher is not None and job.current_job() is not None:
            raise RefusedError(
                [f"{LAUNCHER}={line.launcher.name}: this is a job already, and launches its cells itself"]
            )
        for note in line.notes if not is_quiet() else ():
            print_note(f"zerobench: {note}")
        if not only_compose(flags):
            if not line.multirun and asks_for_config(flags):
                print(OmegaConf.to_yaml(_settled(line)), end="")
            else:
                run_hydra([*flags, *line.own, *line.forced([*line.fixed, *line.swept])])
            return None
        if not line.proposes:
            with repeat_interruption():
                try:
                    batch = hydra.split(line.swept)
                except Exception as error:
                    raise RefusedError([not_composed([*line.own, *line.swept], error)]) from error
                line.cells.extend(_distinct(line.cells_of(batch, 0)))
        return line


def _distinct(cells: Sequence[Cell]) -> list[Cell]:
    """Returns the cells without repetitions: of a value given twice, or of keys that do not apply to all."""
    return list({(json.dumps(cell.config.as_dict()), cell.problems): cell for cell in cells}.values())


def propose(line: CommandLine, run: Callable[[list[Cell]], Sequence[Sequence[float]]]) -> dict[str, Any]:
    """Lets the sweeper propose cells, and runs each batch by `run`, which returns their values for the sweeper. Returns
    the sweeper's own account of its results, {} if it has none. Raises RefusedError if a proposal is not a cell, or the
    sweeper gives up, and the errors of `run`.
    """
    with hydra.untouched():
        try:
            return hydra.propose(
                line.composer, line.own, line.swept, lambda batch, first: run(line.cells_of(batch, first))
            )
        except BatchError as ended:
            raise ended.reason from None
        except Exception as error:
            raise RefusedError([f"{SWEEPER}={line.sweeper}: {reason(error)}"]) from error


def _settled(line: CommandLine) -> DictConfig:
    """Returns the composed config of one cell, in which the values that follow from others and from this machine
    replace null and auto: a cell that can run shows what will run.
    """
    (cell,) = line.cells_of([[]], 0)
    config = line.composer.config_of(cell.overrides)
    if cell.problems:
        return config
    plain: Any = OmegaConf.to_container(config)
    for key, value in by_key(cell.config.as_dict()).items():
        *path, last = key.split(".")
        section = reduce(lambda part, name: part.get(name) or {}, path, plain)
        if section.get(last, "") in (None, "auto"):
            section[last] = value
    settled: DictConfig = OmegaConf.create(plain)
    return settled


def run_hydra(arguments: list[str]) -> None:
    """Runs a command line of flags by which Hydra only prints. Raises RefusedError."""
    try:
        hydra.run_hydra(arguments)
    except ValueError as error:
        raise RefusedError([str(error)]) from error


def check_line(
    composer: Composer, arguments: list[str], multirun: bool, verbs: Collection[str], target: str = ""
) -> CommandLine:
    """Checks overrides one by one. Raises RefusedError with an error message for each that is invalid."""
    problems: list[str] = []

    def stop_if_wrong() -> None:
        if problems:
            raise RefusedError(problems)

    try:
        # 1. Words are read.
        own, parsed, values = _read_words(composer, arguments, verbs)
        given = {override.key_or_group: values[id(override)] for override in parsed}

        # 2. Experiments and users' choices must have all values, and the names that our schemas require.
        study = [f"experiment={e}" for e in given.get("experiment", [])[:1] if e in composer.choices["experiment"]]
        problems += _problems_of_files(composer, given, study)
        stop_if_wrong()

        # 3. The launcher, the sweeper and its parameters follow from Hydra's own part.
        part = composer.compose([*study, *own]).hydra
        mode = part.mode.name if part.mode is not None else ""
        multirun = mode == "MULTIRUN" or (multirun and mode != "RUN")  # RUN: one cell, here, whatever an experiment has
        parameters = (part.sweeper.get("params") or {}) if multirun else {}
        # the command line replaces the others
        of_sweeper, unread = _parse_all([f"{key}={parameters[key]!s}" for key in parameters if key not in given], [])
        problems += unread
        parsed = [*of_sweeper, *parsed]
        values |= {id(override): composer.override_values(override) for override in of_sweeper}
        axes = {o.key_or_group: o for o in parsed if o.is_sweep_override()}
        sweeper = BASIC if mode == "RUN" else part.runtime.choices.get(SWEEPER, BASIC)
        named = given[OBJECTIVE] if OBJECTIVE in given else [composer.config_of(study).get(OBJECTIVE)]
        objective = "" if mode == "RUN" else ",".join(str(name) for name in named if name is not None)
        objectives, wrong = _check_sweeper(sweeper, objective, multirun, axes, values)
        problems += wrong
        stop_if_wrong()

        # 4. Each override has a key and values that some cell takes.
        given = {override.key_or_group: values[id(override)] for override in parsed}
        elsewhere: set[str] = set()
        for override in parsed:
            wrong, lacks = _check_override(composer, override, values[id(override)], given, study)
            problems += wrong
            elsewhere |= {override.key_or_group} if lacks else set()
        if not problems and axes and not multirun:
            problems.append(f"{', '.join(axes)}: several values make a sweep; add -m")
        if not problems and DELAYED_AFTER in given:
            configs = map(composer.config_of, _configs(composer, "offload", given, study))
            if True not in (given.get(DELAYED) or [OmegaConf.select(config, DELAYED) for config in configs]):
                problems.append(f"{DELAYED_AFTER}: it has no effect without {DELAYED}=true; add that")
        launcher = None if mode == "RUN" else chosen_launcher(part, own)
    except RefusedError:
        raise
    except UNREADABLE as error:
        problems.append(not_composed(arguments, error.__cause__ or error))
    stop_if_wrong()

    globs = [override for override in parsed if isinstance(override.value(), Glob)]
    lines = {  # of two overrides of a key the last counts
        o.key_or_group: f"{o.key_or_group}={','.join(values[id(o)])}"
        if o in globs
        else (o.input_line or "").lstrip("+")
        for o in parsed
    }
    return CommandLine(
        composer,
        fixed=tuple(text for key, text in lines.items() if key not in {*axes, OBJECTIVE}),
        swept=tuple(text for key, text in lines.items() if key in axes),
        own=(*study, *own),
        elsewhere=frozenset(elsewhere),
        multirun=multirun,
        launcher=launcher,
        sweeper=sweeper,
        objectives=objectives,
        notes=tuple(f"{override.input_line} takes {', '.join(values[id(override)])}" for override in globs),
        target=target,
    )


def _read_words(
    composer: Composer, arguments: list[str], verbs: Collection[str]
) -> tuple[list[str], list[Override], dict[int, list[Any]]]:
    """Returns the overrides below `hydra`, the others, and the values of these by id. Raises RefusedError."""
    problems = problems_of_folders(composer.extra_dirs, GROUPS)
    if spaces := spaced(arguments):
        raise RefusedError([*problems, spaces])
    parsed, unread = _parse_all(arguments, verbs)
    if problems + unread:
        raise RefusedError(problems + unread)
    own = [override.input_line or "" for override in parsed if root_key(override) == "hydra"]
    parsed = [override for override in parsed if root_key(override) != "hydra"]
    values = {id(override): composer.override_values(override) for override in parsed}
    if any(len(values[id(override)]) > 1 for override in parsed if override.key_or_group == "experiment"):
        raise RefusedError(["experiment: several experiments are several sweeps; run them one after the other"])
    return own, [o for o in parsed if not (o.key_or_group == "experiment" and values[id(o)] == [None])], values


def _check_sweeper(
    sweeper: str, objective: str, multirun: bool, axes: Mapping[str, Override], values: Mapping[int, list[Any]]
) -> tuple[tuple[Objective, ...], list[str]]:
    """Returns the objectives, and an error message if they do not fit the sweeper, or if there are too many values to
    list, or infinitely many, which only a sweeper that proposes cells can draw from.
    """
    counts = {key: len(values[id(override)]) for key, override in axes.items()}
    endless = next((override.input_line for override in axes.values() if override.is_interval_sweep()), None)
    problem = ""
    if sweeper == BASIC and objective:
        problem = f"{OBJECTIVE}={objective}: no sweeper asks for it; add {SWEEPER}=optuna, or leave it out"
    elif sweeper == BASIC and endless:
        problem = f"{endless}: {ENDLESS}"
    elif sweeper == BASIC and (cells := math.prod(counts.values())) > MOST_CELLS:
        several = ", ".join(key for key, count in counts.items() if count > 1)
        problem = f"{several}: {cells:,} cells; at most {MOST_CELLS:,} are listed"
    elif sweeper != BASIC and not multirun:
        problem = f"{SWEEPER}={sweeper}: it needs a sweep; add -m"
    elif sweeper != BASIC and not objective:
        lacking = f"an objective; add {OBJECTIVE}=COLUMN, as {OBJECTIVE}=-tokens_per_s"
        problem = f"{SWEEPER}={sweeper}: it needs {lacking}"
    if problem or sweeper == BASIC:
        return (), [problem] if problem else []
    try:
        return parse_objectives(objective), []
    except ValueError as error:
        return (), [str(error)]


def _parse_all(words: Sequence[str], verbs: Collection[str]) -> tuple[list[Override], list[str]]:
    """Returns the words that can be read, and an error message for each of the others."""
    parsed, problems = list[Override](), list[str]()
    for word in map(in_hydras_form, words):
        longest = max(map(len, _WHOLE.findall(word)), default=0)
        if longest > MOST_DIGITS:  # than any column of a table holds
            why = f"a number of {longest} digits; the largest that any key takes has {MOST_DIGITS}"
            problems.append(f"{word[:60]}…: {why}")
            continue
        try:
            override = hydra.parse(word)
        except HydraException:
            key = word.lstrip("+~").split("=")[0]
            if "=" in word:
                problems.append(f"{word}: the value cannot be read; quote it, as in '{key}=\"...\"'")
            else:
                hint = meant_verb(word, verbs)
                problems.append(f"{word or repr('')}: neither KEY=VALUE nor a verb{hint}; see zerobench --help")
            continue
        if problem := problem_of_range(override):
            problems.append(problem)
        else:
            parsed.append(override)
    return parsed, problems


def _problems_of_files(composer: Composer, given: Mapping[str, list[Any]], study: list[str]) -> list[str]:
    """Returns error messages for the experiment, and for the chosen files of a user's folders, if they lack values or
    the names that our schemas require.
    """
    files = {
        (folder / group / f"{choice}.yaml", f"{group}={choice}")
        for folder in composer.extra_dirs
        for group in SCHEMAS
        for choice in given.get(group, [])
        if choice in composer.choices[group]
    }
    problems: dict[str, None] = {}
    for overrides in (study, *([override, *study] for path, override in sorted(files) if path.is_file())):
        config = composer.config_of(overrides)
        problems[problem_of_missing(config) or problem_of_names(config, CHOSEN_BY_GROUP)] = None
    return [problem for problem in problems if problem]


def _configs(composer: Composer, root: str, given: Mapping[str, list[Any]], study: list[str]) -> list[list[str]]:
    """Returns the configs that a key below `root` may be in, as overrides: one for each choice of a group."""
    choices = given.get(root, []) if root in SCHEMAS else []
    chosen = [[f"{root}={choice}"] for choice in choices if choice in composer.choices[root]]
    return [overrides + study for overrides in chosen or [[]]]


def _check_override(
    composer: Composer, override: Override, values: list[Any], given: Mapping[str, list[Any]], study: list[str]
) -> tuple[list[str], bool]:
    """Returns error messages for an override, and whether some of the chosen configs lack its key."""
    key, word, root = override.key_or_group, (override.input_line or "").lstrip("+"), root_key(override)
    if override.is_delete():
        return [f"{override.input_line}: keys cannot be deleted; every key has a default"], False
    problems, lacks, configs = [], False, _configs(composer, root, given, study)
    if key in CHOSEN_BY_GROUP:
        choices = "|".join(composer.choices[root])
        problems = [f"{word}: it follows from the group; choose it with {root}={choices}"]
    elif root == "huggingface" and "experiment" not in given and not any(
        OmegaConf.select(composer.config_of(overrides), "model.kind") == "huggingface"
        for overrides in _configs(composer, "model", given, study) if overrides
    ):  # fmt: skip
        problems = [f"{word}: it has a meaning for models that transformers builds; add model=huggingface"]
    elif key == "results_dir":
        problems = [problem for value in values if (problem := problem_of_folder(word, value))]
    elif override.package is not None:
        problems = [f"{word}: {key} cannot be moved to another package"]
    elif key in GROUPS:
        problems = _problems_of_choices(key, values, composer.choices[key])
    else:
        # The values are tried in composed configs, one for each choice of the key's group; one must have the key.
        sentences = [_lacks(composer, key, overrides) for overrides in configs]
        lacks = any(sentences)
        if all(sentences):
            lacks, problems = False, [next((text for text in sentences if "did you mean" in text), sentences[0])]
        for overrides, sentence in zip(configs, sentences, strict=True):
            problems += _problems_of_values(composer.config_of(overrides), key, values) if not sentence else []
    if override.is_interval_sweep() and problems:
        problems = [f"{problems[0]}; of whole numbers it is {key}=int({word.partition('=')[2]})"]
    return problems, lacks


def _problems_of_choices(group: str, choices: list[Any], names: list[str]) -> list[str]:
    problems = [f"{group}: none of {', '.join(names)} matches"] if not choices else []
    for choice in choices:
        if choice in names or (group == "experiment" and choice is None):
            continue
        hint = nearest(str(choice), names)
        hint += f" (all choices: zerobench --help {group})" if "did you mean" in hint else ""
        if group == "optimizer" and (why := why_not_sharded(str(choice))):
            hint = f": it cannot be sharded, since {why}"
        if group in ("model", "data", "strategy") and "did you mean" not in hint:
            hint += f"; if a script registers it, run that script: python SCRIPT {group}={choice!s}"
        problems.append(f"{group}={choice!s}: no such {group}{hint}")
    return problems


def _lacks(composer: Composer, key: str, overrides: list[str]) -> str:
    """Returns an error message if the config of `overrides` lacks a key, else ""."""
    node: Any = composer.config_of(overrides)
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
            alternatives = "|".join(name for name in composer.choices.get(group, []) if name in having)
            listed = ", ".join(name for name in names if name not in IDENTITY)
            under += f", which has {listed}" if alternatives and listed and under else ""
            had = f"; choose {group}={alternatives} for it" if alternatives else ""
            return f"{key}: no such key{under}{had or meant(key, names, '.'.join(path))}"
        path.append(part)
        node = node._get_node(part)
    return ""


def _problems_of_values(config: DictConfig, key: str, values: list[Any]) -> list[str]:
    """Returns an error message for each value of the wrong type for the key; checks the extremes of many."""
    *path, last = key.split(".")
    if path[:2] == ["huggingface", "options"]:
        return []
    parent: Any = OmegaConf.select(config, ".".join(path)) if path else config
    node = parent._get_node(last)
    if isinstance(node, DictConfig):
        return [f"{key}: it has parts; set one of them{nearest('', [f'{key}.{k!s}' for k in node])}"]
    problems = []
    if values and all(type(value) is int for value in values):
        values = sorted({min(values), max(values)})  # which represent all
    for value in values:
        if isinstance(value, str) and "${" in value:
            continue  # an interpolation has its value when the cell is composed
        try:
            OmegaConf.update(config.copy(), key, value)
        except OmegaConfBaseException:
            size = ", as 1048576 or 1MiB" if key.endswith(SUFFIX) else ""
            problems.append(f"{key}={value}: wants {type_name(node)}{size}, and {value!r} is none")
    return problems


def problems_of_folders(folders: Iterable[Path], groups: Collection[str]) -> list[str]:
    """Returns an error message for each damaged yaml file in these config folders. A file in a folder of `groups` is a
    choice, which holds a mapping.
    """
    problems = []
    patterns = ("*.yaml", "*/*.yaml", "*/*/*.yaml")
    for path in [path for folder in folders for pattern in patterns for path in folder.glob(pattern)]:
        group = path.parent.name
        try:
            content = read_yaml(path)
        except (OSError, ValueError) as error:
            problems.append(str(error))
            continue
        if group in groups and not isinstance(content, dict | None):
            problems.append(f"{path}: it holds {str(content)[:40]!r}; a choice of {group} has KEY: VALUE")
    return problems


def problem_of_names(config: DictConfig, keys: Collection[str]) -> str:
    """Returns an error message if a yaml sets one of `keys`, each the name of a schema, to another name or without
    beginning with a schema, else "". All keys must have a value.
    """
    for key in keys:
        group, _, last = key.partition(".")
        schema, value = getattr(OmegaConf.get_type(config, group), last, None), config[group][last]
        if schema == MISSING:
            return f"{key}={value}: {_begun_with(group)}"
        if isinstance(schema, str) and value != schema:
            return f"{key}={value}: the schema of its yaml has {schema}; leave it out, or begin with another schema"
    return ""


def problem_of_missing(config: DictConfig) -> str:
    """Returns an error message for a key without a value, as in a yaml that does not begin with our schema, else ""."""
    missing = sorted(OmegaConf.missing_keys(config))
    if not missing:
        return ""
    group = missing[0].partition(".")[0]
    return f"{missing[0]}: it has no value; {_begun_with(group) if group in SCHEMAS else 'give it one'}"


def _begun_with(group: str) -> str:
    kinds = ", ".join(SCHEMAS[group])
    return f"begin its yaml with 'defaults: [/schema/{group}/KIND@_here_]', where KIND is one of {kinds}"


# -- words, before Hydra parses them ------------------------------------------------------------------------------


def problem_of_range(override: Override) -> str:
    """Returns an error message for a range that is infinite, too long or empty, else ""; does not list the range."""
    value = override.value()
    if not isinstance(value, RangeSweep):
        return ""
    start, stop, step = (float(bound or 0) for bound in (value.start, value.stop, value.step))
    count = (stop - start) / step if step else math.inf  # not finite for a subnormal step, inf or nan
    if not math.isfinite(count):
        return f"{override.input_line}: a range without end; a sweep has at most {MOST_CELLS:,} cells"
    if count > MOST_CELLS:
        return (
            f"{override.input_line}: a range of {math.ceil(count):,} values; a sweep has at most {MOST_CELLS:,} cells"
        )
    return f"{override.input_line}: a range without a value" if count <= 0 else ""


def problem_of_folder(line: str, value: Any) -> str:
    """Returns an error message if `value` names no folder that exists or can be created, else ""."""
    if not isinstance(value, str) or not value:
        return f"{line}: name a folder"
    if "${" in value:
        return ""
    where = Path(value).expanduser().absolute()
    try:
        existing = next(p for p in (where, *where.parents) if p.exists())
        writable = existing.is_dir() and os.access(existing, os.W_OK)
    except (OSError, ValueError) as error:
        return f"{line}: it is no folder's name: {getattr(error, 'strerror', None) or error}"
    return "" if writable else f"{line}: {existing} is no folder that can be written to"


def in_hydras_form(word: str) -> str:
    """Returns an override with sizes converted to bytes if its key ends in _bytes, with the words of a key in
    ONE_VALUE as one value, and with a folder in the user's home quoted; other overrides unchanged.
    """
    key, equals, value = word.partition("=")
    if key.endswith(SUFFIX):
        value = _SIZE.sub(lambda size: str(parse_bytes(size[2])), value)
    form = ONE_VALUE.get(key.lstrip("+"))
    if form is not None and value.strip() and not value.lstrip().startswith(OPENINGS):
        value = form.format(value)
    value = re.sub(r"(?<![^,])~/[^,]*", r"'\g<0>'", value)  # zsh and Python leave it to the program, Hydra refuses it
    return f"{key}{equals}{value}"
