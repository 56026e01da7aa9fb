"""A command line -> cells. Hydra composes every job of a sweep before the first rank starts, and runs none.

So an override that does not compose rejects the whole sweep, a dry run takes the same path and stops there, and
we choose the order of the runs (sweep/sweep.py). Hydra's private modules are used here and in overrides.py alone.

    command line -> Overrides.check -> a Hydra sweeper -> CellLauncher -> cells, in batches

Hydra's own sweeper makes one batch of all combinations; Optuna and others propose a batch from the values of the last.
"""

from __future__ import annotations

import io
import logging
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any
from unittest import mock

from hydra._internal.callbacks import Callbacks
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf

from ..cluster import job
from ..host.pipes import print_note
from ..host.signals import heed, insist
from ..host.terminal import is_quiet
from ..registry import GROUPS
from ..sizes import printable
from ..strategies import specs
from .cell import Cell
from .flags import asks_for_config, only_compose, split_arguments, unknown_flags
from .flat import by_key
from .hydra_problems import not_composed, problem_of_missing, reason
from .launcher import GROUP
from .overrides import SWEEPER, CheckedLine, Overrides, compositions_of
from .resolve import resolve_draft, unresolved
from .schema import Data, Model, config_dir, store_schemas, strategy_choices
from .unknown_keys import stray_keys
from .yaml_file import read_yaml


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
        shared = [problem for problem in every if all(problem in cell.problems for cell in cells)]
        raise RefusedError(shared or list(every))


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


@dataclass(frozen=True)
class Composed:
    """A checked command line and its cells, in the order of the sweep; none if its sweeper proposes them.
    `overrides`: id of a cell -> the overrides that make it. `price`: dollars per GPU hour, for the table. `target`: the
    device that fake tensors act as; empty: the cells' own.
    """

    check: Overrides
    line: CheckedLine
    cells: list[Cell]
    overrides: dict[str, list[str]]
    price: float | None = None
    target: str = ""

    def collect(self, batch: list[Cell]) -> list[None]:
        """Adds a batch of cells, which are not run here."""
        self.cells.extend(batch)
        return [None] * len(batch)


Run = Callable[[list[Cell]], Sequence[Sequence[float] | None]]
"""Runs the cells of a batch. Returns for each the values for the sweeper; None if it only splits."""


def compose_cells(arguments: list[str], verbs: tuple[str, ...] = (), target: str = "") -> list[Cell]:
    """Returns the cells of a command line, to run or inspect in this process only. Raises RefusedError."""
    composed = compose(arguments, verbs, target)
    if composed is None:
        return []
    if composed.line.launcher is not None:
        raise RefusedError([f"{GROUP}={composed.line.launcher.name}: only a sweep of the command line is launched so"])
    if composed.line.proposes:
        why = "only a sweep of the command line is proposed so; list the values, as in strategy=zero1,zero2"
        raise RefusedError([f"{SWEEPER}={composed.line.sweeper}: {why}"])
    return composed.cells


def compose(arguments: list[str], verbs: tuple[str, ...] = (), target: str = "") -> Composed | None:
    """Composes the cells of `[-m] KEY=VALUE ...`; returns None if a Hydra flag asked for something else, which it did.

    Raises RefusedError if the command line is invalid, and JobError if the processes of a job cannot connect.
    """
    with _hydra_untouched():
        job.gather()  # cells follow from it
        flags, overrides, extra_dirs = split_arguments(arguments)
        if problems := unknown_flags(flags):
            raise RefusedError(problems)
        check = checker(extra_dirs)
        line = check.check(overrides, multirun=bool({"-m", "--multirun"} & set(flags)), verbs=list(verbs))
        if line is None:
            raise RefusedError(check.problems)
        if line.launcher is not None and job.current_job() is not None:
            raise RefusedError([f"{GROUP}={line.launcher.name}: this is a job already, and launches its cells itself"])
        for note in line.notes if not is_quiet() else ():
            print_note(f"zerobench: {note}")
        if not only_compose(flags):
            if not line.multirun and asks_for_config(flags):
                print(OmegaConf.to_yaml(_settled(check, line)), end="")
            else:
                run_hydra([*flags, *line.hydra, *map(check.forced, (*line.fixed, *line.swept))])
            return None
        composed = Composed(check, line, [], {}, target=target)
        if not line.proposes:
            with insist():
                sweep(composed, composed.collect)
            composed.cells[:] = _distinct(composed.cells, by_id=bool(check.elsewhere))
        return composed


def _distinct(cells: Sequence[Cell], by_id: bool) -> list[Cell]:
    """Returns the cells without repetitions: of a value given twice, or, `by_id`, of keys that do not apply to all."""
    seen: dict[str, list[Cell]] = {}
    for cell in cells:
        alike = seen.setdefault(cell.cell_id, [])
        if not any(by_id or cell == other for other in alike):
            alike.append(cell)
    return [cell for cell in cells if any(cell is kept for kept in seen[cell.cell_id])]


def sweep(composed: Composed, run: Run) -> dict[str, Any]:
    """Lets the sweeper split or propose overrides, and runs the cells of each batch. Returns the sweeper's own account
    of its results, {} if it has none. Raises RefusedError if a proposal is not a cell, or the sweeper gives up.
    """
    with _hydra_untouched():
        return _sweep(composed, run)


def _sweep(composed: Composed, run: Run) -> dict[str, Any]:
    launcher, line = CellLauncher(composed, run), composed.line
    try:
        if line.proposes:
            return _let_propose(composed, launcher)
        swept = OverridesParser.create().parse_overrides([*line.swept])
        launcher.launch(BasicSweeper.split_arguments(swept, None)[0], 0)
        return {}
    except _EndedError as ended:
        raise ended.reason from None
    except Exception as error:
        if line.proposes:
            raise RefusedError([f"{SWEEPER}={line.sweeper}: {reason(error)}"]) from error
        raise RefusedError([not_composed([*line.hydra, *line.swept], error)]) from error


def _let_propose(composed: Composed, launcher: CellLauncher) -> dict[str, Any]:
    """Lets a sweeper propose batches to `launcher`. Returns its account of its results, {} if it has none."""
    from ..host.temporary import temporary_folder  # with what tables are read by, which no completion needs

    with temporary_folder() as folder:
        config = _hydra_config(composed, folder)
        if "params" in config.hydra.sweeper:
            config.hydra.sweeper.params = None  # they are among the swept overrides
        with _only_swept():
            with mock.patch.object(Plugins, "instantiate_launcher", return_value=launcher):
                sweeper = Plugins.instance().instantiate_sweeper(
                    config=config, hydra_context=_context(composed), task_function=lambda _: None
                )
            sweeper.sweep(arguments=list(composed.line.swept))
        account = Path(config.hydra.sweep.dir) / RESULTS
        return dict(read_yaml(account)) if account.is_file() else {}


def _hydra_config(composed: Composed, folder: Path) -> DictConfig:
    """Returns a config with Hydra's part as the command line has it. `folder`: for Hydra's own files."""
    config = composed.check.compose_whole([*composed.line.hydra, *UNLOGGED])
    OmegaConf.set_struct(config.hydra, False)
    if not any(word.lstrip("+").startswith("hydra.sweep.dir=") for word in composed.line.hydra):
        config.hydra.sweep.dir = str(folder)
    return config


def _context(composed: Composed) -> HydraContext:
    return HydraContext(composed.check.loader, Callbacks())


@contextmanager
def _only_swept() -> Iterator[None]:
    """Skips the sweeper's check that each job composes, since our launcher composes it, and the logs of a plugin and
    its warnings for programmers.
    """
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), mock.patch.object(Sweeper, "validate_batch_is_legal"):
            warnings.filterwarnings("ignore", module="optuna|hydra_plugins|nevergrad")
            yield
    finally:
        logging.disable(level)


RESULTS = "optimization_results.yaml"
"""The file into which Hydra sweepers write their results."""


class _EndedError(BaseException):
    """Passes an error of a batch through a sweeper, past its handlers."""

    def __init__(self, reason: BaseException) -> None:
        super().__init__()
        self.reason = reason


class CellLauncher(Launcher):
    """The launcher of every sweeper: composes the cells of a batch, and has them run by `run`."""

    def __init__(self, composed: Composed, run: Run) -> None:
        self._composed, self._run = composed, run

    def setup(self, *, hydra_context: HydraContext, task_function: Any, config: DictConfig) -> None:
        """Needs nothing from Hydra."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Runs a batch, and returns its values in order. Raises _EndedError."""
        check, line = self._composed.check, self._composed.line
        cells = []
        try:
            for number, overrides in enumerate(job_overrides, initial_job_idx):
                heed()
                whole = [check.forced(word) for word in (*line.hydra, *line.fixed, *map(str, overrides))]
                if line.proposes:  # whose sweeper searches
                    whole = [word for word in whole if not word.startswith(LIMIT)] + [f"{LIMIT}null"]
                cells.append(_compose_one(check, line, whole, number, self._composed.target))
                self._composed.overrides[cells[-1].cell_id] = whole
            values = self._run(cells)
        except BaseException as error:
            raise _EndedError(error) from error
        return [
            JobReturn(
                overrides=overrides, status=JobStatus.COMPLETED,
                _return_value=value[0] if value is not None and len(value) == 1 else value,
            )
            for overrides, value in zip(job_overrides, values, strict=True)
        ]  # fmt: skip


def _settled(check: Overrides, line: CheckedLine) -> DictConfig:
    """Returns the composed config of one cell, in which the values that follow from others and from this machine
    replace null and auto: a cell that can run shows what will run.
    """
    overrides = [check.forced(word) for word in (*line.hydra, *line.fixed)]
    config, cell = check.config_of(overrides), _compose_one(check, line, overrides)
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


def _compose_one(check: Overrides, line: CheckedLine, overrides: list[str], number: int = 0, target: str = "") -> Cell:
    """Composes and resolves a single cell, the job `number` of its sweep."""
    try:
        config, model, lacks = check.cell_of(overrides, number)
    except Exception as error:
        raise RefusedError([not_composed(overrides, error)]) from error
    try:
        if lacks and (problem := problem_of_missing(config)):
            return unresolved(config, model, problem)
        plain: Any = OmegaConf.to_object(config)
        cell = resolve_draft(plain, model, stray_keys(config, check.elsewhere), line.launcher, target)
        return Cell(cell.config, tuple(map(printable, cell.problems)))
    except Exception as error:  # the other cells are not to suffer; this one becomes a row
        return unresolved(config, model, reason(error))


LIMIT = "search.memory_limit="

UNLOGGED = ("hydra/hydra_logging=none", "hydra/job_logging=none", "hydra.output_subdir=null")
"""Overrides that stop Hydra from writing its own logs and configs."""


def run_hydra(arguments: list[str]) -> None:
    """Runs a command line of flags by which Hydra only prints. Raises RefusedError."""
    import hydra

    app = hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="config")
    argv = mock.patch.object(sys, "argv", ["zerobench", *arguments])
    log = logging.getLogger()
    handlers, level = log.handlers[:], log.level  # for --info Hydra sets the whole process to tell everything
    full = mock.patch.dict(os.environ, HYDRA_FULL_ERROR="1")  # raises errors, instead of printing them
    said = io.StringIO()
    try:
        with argv, full, insist(), redirect_stderr(said):
            app(lambda _: None)()
    except SystemExit as stop:
        if stop.code:  # after the usage of its flags
            message = said.getvalue().rpartition("error: ")[2].strip() or "Hydra cannot do that"
            raise RefusedError([f"{' '.join(arguments)}: {message}"]) from stop
    except Exception as error:
        raise RefusedError([not_composed(arguments, error)]) from error
    finally:
        log.handlers[:] = handlers
        log.setLevel(level)


def instantiate_launcher(
    composed: Composed, folder: Path, number: int, settings: Mapping[str, Any], task: Callable[..., Any]
) -> Launcher:
    """Returns the launcher that a command line chooses, for one job that calls `task`. `folder`: for the launcher's
    files; `settings`: by key below hydra.launcher.
    """
    config = _hydra_config(composed, folder / "hydra")
    config.hydra.job.name = f"zerobench-{number}"
    for key, value in settings.items():
        OmegaConf.update(config.hydra.launcher, key, value, force_add=True)
    if "submitit_folder" in config.hydra.launcher:  # a job that begins before its own folder exists has no log
        config.hydra.launcher.submitit_folder = str(folder / f"submitit-{number}")
        (folder / f"submitit-{number}").mkdir()
    launcher = Plugins.instance().instantiate_launcher(
        hydra_context=_context(composed), task_function=task, config=config
    )
    assert isinstance(launcher, Launcher)
    return launcher
