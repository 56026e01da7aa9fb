"""A command line -> cells. Hydra composes every job of a sweep before the first rank starts, and runs none.

So an override that does not compose rejects the whole sweep, a dry run takes the same path and stops there, and
we choose the order of the runs (sweep/sweep.py). Hydra's private modules are used only here.
"""

from __future__ import annotations

import io
import logging
import os
import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from hydra._internal.callbacks import Callbacks
from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.resolvers import oc

from ..cluster import job
from ..host.pipes import print_note
from ..host.signals import insist
from ..host.terminal import is_quiet
from ..registry import GROUPS
from ..sizes import printable
from ..strategies import specs
from .cell import Cell
from .flags import asks_for_config, only_compose, split_arguments, unknown_flags
from .flat import by_key
from .grouping import problems_of_groups
from .hydra_keys import not_composed, problem_of_missing, quoted, reason, sentence_of
from .launcher import GROUP, LauncherChoice, planning_for
from .overrides import Overrides, compositions_of
from .resolve import resolve, unresolved
from .schema import Data, Model, config_dir, store_schemas, strategy_choices
from .sweeper import Proposed
from .unknown_keys import stray_keys


class RefusedError(ValueError):
    """The command line is invalid; `problems` lists the error messages."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(map(printable, problems)))
        self.problems = [printable(problem) for problem in problems]


def refuse_senseless(cells: Sequence[Cell]) -> None:
    """Raises RefusedError if no cell of a command can run; such cells become no rows. It has each problem once, and if
    some are those of all cells, these alone.
    """
    if cells and all(cell.problems for cell in cells):
        every = dict.fromkeys(problem for cell in cells for problem in cell.problems)
        raise RefusedError([one for one in every if all(one in cell.problems for cell in cells)] or list(every))


def checker(extra_dirs: list[Path]) -> Overrides:
    """Returns a checker that knows every choice and key, including users' models and data."""
    bases = {"model": Model, "data": Data}
    users = {
        group: {name: registry.schema_of(name, build, bases[group]) for name, build in registry.all().items()}
        for group, registry in GROUPS.items()
    }
    store_schemas(users)
    added = {group: list(schemas) for group, schemas in users.items()} | {"strategy": list(strategy_choices())}
    builders = ((group, *row) for group, registry in GROUPS.items() for row in registry.all().items())
    composed = compositions_of(*builders, *((name, spec.options) for name, spec in specs().items()))
    # a user's files may change between commands of one process
    return Overrides(config_dir(), added, extra_dirs, {} if extra_dirs else composed)


@dataclass(frozen=True)
class Composed:
    """A command line's cells, in Hydra's order. `launcher`: the Hydra plugin that runs them, or None for our launcher.
    `proposed`: set if a sweeper proposes the cells, which are then not known yet; else None.
    """

    cells: list[Cell]
    launcher: LauncherChoice | None
    check: Overrides
    proposed: Proposed | None = None


def compose_cells(arguments: list[str], verbs: tuple[str, ...] = ()) -> list[Cell]:
    """Returns the cells of a command line, to run or inspect in this process only. Raises RefusedError."""
    composed = compose(arguments, verbs)
    if composed.launcher is not None:
        raise RefusedError([f"{GROUP}={composed.launcher.name}: only a sweep of the command line is launched so"])
    if composed.proposed is not None:
        words = "only a sweep of the command line is proposed so; list the values, as in strategy=zero1,zero2"
        raise RefusedError([f"{composed.proposed.chosen}: {words}"])
    return composed.cells


def compose(arguments: list[str], verbs: tuple[str, ...] = ()) -> Composed:
    """Composes the cells of `[-m] KEY=VALUE ...`; returns none if a Hydra flag asks for something else.

    Raises RefusedError if the command line is invalid, and JobError if the processes of a job cannot connect.
    """
    with _hydra_untouched(), named_alone(arguments):
        return _compose(arguments, verbs)


def _compose(arguments: list[str], verbs: tuple[str, ...]) -> Composed:
    job.gather()  # cells follow from it
    flags, overrides, extra_dirs = split_arguments(arguments)
    if problems := unknown_flags(flags):
        raise RefusedError(problems)
    check = checker(extra_dirs)
    overrides = check.check(overrides, multirun=bool({"-m", "--multirun"} & set(flags)), verbs=list(verbs))
    if check.problems:
        raise RefusedError(check.problems)
    if check.launcher is not None and job.current_job() is not None:
        raise RefusedError([f"{GROUP}={check.launcher.name}: this is a job already, and launches its cells itself"])
    for line, names in check.globs.items() if not is_quiet() else ():
        print_note(f"zerobench: {line} takes {', '.join(names)}")
    if check.proposed is not None and only_compose(flags):
        return Composed([], check.launcher, check, check.proposed)
    with planning_for(check.launcher):
        cells = _compose_all(check, flags, overrides)
    if problems := problems_of_groups(cells, check.launcher, overrides):
        raise RefusedError(problems)
    return Composed(cells, check.launcher, check)


def _compose_all(check: Overrides, flags: list[str], overrides: list[str]) -> list[Cell]:
    if not check.multirun and only_compose(flags):
        return [_compose_one(check, overrides)]
    if not check.multirun and asks_for_config(flags):
        print(OmegaConf.to_yaml(_settled(check, overrides)), end="")
        return []
    from ..host.temporary import temporary_folder  # with what tables are read by, which no completion needs

    cells: list[Cell] = []

    def compose_job(config: Any) -> None:
        cells.append(_cell_of(config, HydraConfig.get().runtime.choices["model"], check.elsewhere))

    with temporary_folder() as folder:  # that Hydra makes, and leaves empty
        overrides = [*overrides, f"hydra.sweep.dir={quoted(str(folder))}", f"hydra.run.dir={quoted(str(folder))}"]
        run_hydra([*flags, *overrides], compose_job)
    # cells that differ only in keys that do not apply to them are one cell
    return list({cell.cell_id: cell for cell in reversed(cells)}.values())[::-1] if check.elsewhere else cells


def _settled(check: Overrides, overrides: list[str]) -> DictConfig:
    """Returns the composed config of one cell, in which the values that follow from others and from this machine
    replace null and auto: a cell that can run shows what will run.
    """
    config = check.config_of(overrides)
    cell = _compose_one(check, overrides)
    if cell.problems:
        return config
    plain: Any = OmegaConf.to_container(config)
    for key, value in by_key(cell.config.as_dict()).items():
        *path, last = key.split(".")
        section = reduce(lambda one, name: one.get(name) or {}, path, plain)
        if section.get(last, "") in (None, "auto"):
            section[last] = value
    settled: DictConfig = OmegaConf.create(plain)
    return settled


def compose_trial(check: Overrides, overrides: list[str]) -> Cell:
    """Returns the cell of fixed and proposed overrides; a memory limit does not turn it into a search."""
    with planning_for(check.launcher), named_alone(overrides):
        return _compose_one(check, overrides, without=("search.memory_limit",))


def _compose_one(check: Overrides, overrides: list[str], without: tuple[str, ...] = ()) -> Cell:
    """Composes a single cell, for which Hydra's own app would compose twice. `without`: keys that become null."""
    try:
        config = check.compose_whole(overrides)
    except Exception as error:
        raise RefusedError([not_composed(overrides, error)]) from error
    model = config.hydra.runtime.choices["model"]
    HydraConfig.instance().set_config(config)  # for ${hydra:...} in a value
    with open_dict(config):
        del config["hydra"]
    for key in without:
        OmegaConf.update(config, key, None)
    return _cell_of(config, model, check.elsewhere)


UNLOGGED = ("hydra/hydra_logging=none", "hydra/job_logging=none", "hydra.output_subdir=null")
"""Overrides that stop Hydra from writing its own logs and configs."""


def compose_plugin(check: Overrides, words: Sequence[str]) -> tuple[DictConfig, HydraContext]:
    """Returns a config with the Hydra plugin that `words` choose, and the context from which Hydra makes plugins."""
    config = check.compose_whole([*words, *UNLOGGED])
    return config, HydraContext(check.loader, Callbacks())


def run_hydra(arguments: list[str], job: Callable[[Any], None] = lambda _: None) -> None:
    """Runs Hydra's own command line, calling `job` for each composed config. Raises RefusedError."""
    import hydra

    app = hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="config")
    before, sys.argv = sys.argv, ["zerobench", *arguments]
    log = logging.getLogger()
    handlers, level = log.handlers[:], log.level  # for --info Hydra sets the whole process to tell everything
    said = io.StringIO()
    try:
        with redirect_stderr(said), insist(), each_job_composed_once(), launching_with(BasicLauncher):
            app(job)()
    except SystemExit as stop:
        if stop.code:
            raise RefusedError([sentence_of(said.getvalue())]) from stop
    except Exception as error:
        raise RefusedError([not_composed(arguments, error)]) from error
    finally:
        sys.argv = before
        log.handlers[:] = handlers
        log.setLevel(level)
    sys.stderr.write(said.getvalue())


@contextmanager
def _hydra_untouched() -> Iterator[None]:
    """Restores Hydra's globals and Python's random state: the caller may be a job of a Hydra app."""
    hydra, config = GlobalHydra.instance(), HydraConfig.instance()
    before, drawn = (hydra.hydra, config.cfg), random.getstate()  # shuffle() draws
    try:
        yield
    finally:
        hydra.hydra, config.cfg = before
        random.setstate(drawn)


_NAMED = re.compile(r"\$\{oc\.env:\s*(\w+)")


@contextmanager
def named_alone(words: Iterable[str]) -> Iterator[None]:
    """Lets configs read only the environment variables that `words` of a command line name as `${oc.env:NAME}`.

    Otherwise another person's config folder could have any environment variable, even a password, printed and written
    into runs. The resolver does the check because a file can assemble its name from parts.
    """
    named = {name for word in words for name in _NAMED.findall(word)}

    def env(name: str, *default: Any) -> str | None:
        if name not in named:
            raise ValueError(
                f"a config reads the environment variable {name}; only a command line may, "
                f"as in KEY='${{oc.env:{name}}}'"
            )
        if name not in os.environ and not default:
            raise ValueError(f"the environment variable {name} is not set")
        return oc.env(name, *default)

    OmegaConf.register_new_resolver("oc.env", env, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


@contextmanager
def each_job_composed_once() -> Iterator[None]:
    """Skips the check by Hydra's sweepers that each job composes, since our jobs only compose."""
    check = Sweeper.validate_batch_is_legal
    Sweeper.validate_batch_is_legal = lambda self, batch: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Sweeper.validate_batch_is_legal = check  # type: ignore[method-assign]


@contextmanager
def launching_with(kind: Callable[[], Launcher]) -> Iterator[None]:
    """Makes Hydra's sweepers call our launcher, made by `kind`, whichever launcher will run the cells later."""

    def ours(self: Plugins, hydra_context: Any, task_function: Any, config: DictConfig) -> Launcher:
        launcher = kind()
        launcher.setup(hydra_context=hydra_context, task_function=task_function, config=config)
        return launcher

    theirs = Plugins.instantiate_launcher
    Plugins.instantiate_launcher = ours  # type: ignore[method-assign]
    try:
        yield
    finally:
        Plugins.instantiate_launcher = theirs  # type: ignore[method-assign]


def _cell_of(config: DictConfig, model: str, elsewhere: set[str]) -> Cell:
    """Resolves `config` without the keys of `elsewhere` that its choices lack; `model`: the choice of the group."""
    try:
        if problem := problem_of_missing(config):
            return unresolved(config, model, problem)
        plain: Any = OmegaConf.to_object(config)
        cell = resolve(plain, model, stray_keys(config, elsewhere))
        return Cell(cell.config, tuple(map(printable, cell.problems)))
    except Exception as error:  # the other cells are not to suffer; this one becomes a row
        return unresolved(config, model, reason(error))
