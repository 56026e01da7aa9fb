"""A command line -> cells. Hydra composes every job of a sweep before the first rank starts; none is run by Hydra.

So an override that does not compose refuses the whole sweep, a dry run is the same thing without what follows, and
the order of the runs is ours (sweep/sweep.py).
"""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.plugins.sweeper import Sweeper
from omegaconf import DictConfig, OmegaConf, open_dict

from ..cluster import job
from ..host.signals import insist
from ..registry import GROUPS
from .cell import Cell, CellConfig
from .flags import only_compose, split_arguments
from .hydra_keys import quoted
from .overrides import Overrides
from .resolve import resolve, unresolved
from .schema import Data, Model, config_dir, store_schemas, strategy_choices
from .unknown_keys import stray_keys


class RefusedError(Exception):
    """The command line makes no sweep; `problems` says why, a sentence each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def checker(extra_dirs: list[Path]) -> Overrides:
    """Knows every choice and key, users' models and data included."""
    bases = {"model": Model, "data": Data}
    users = {
        group: {name: registry.schema_of(name, build, bases[group]) for name, build in registry.all().items()}
        for group, registry in GROUPS.items()
    }
    store_schemas(users)
    added = {group: list(schemas) for group, schemas in users.items()} | {"strategy": list(strategy_choices())}
    return Overrides(config_dir(), added, extra_dirs)


def compose_cells(arguments: list[str], verbs: tuple[str, ...] = ()) -> list[Cell]:
    """The cells of `[-m] KEY=VALUE ...`, in Hydra's order; none where a flag of Hydra's asks for something else.

    Raises RefusedError where the command line is wrong, and JobError where the processes of a job do not come together.
    """
    job.gather()  # cells follow from it
    flags, overrides, extra_dirs = split_arguments(arguments)
    check = checker(extra_dirs)
    overrides = check.check(overrides, multirun=bool({"-m", "--multirun"} & set(flags)), verbs=list(verbs))
    if check.problems:
        raise RefusedError(check.problems)
    if not check.multirun and only_compose(flags):
        return [_compose_one(check, overrides)]
    from ..host.temporary import temporary_folder  # with what tables are read by, which no completion needs

    with temporary_folder() as folder:
        journal = folder / "cells.jsonl"
        overrides = [*overrides, f"hydra.sweep.dir={quoted(str(folder))}", f"hydra.run.dir={quoted(str(folder))}"]
        run_hydra([*flags, *overrides], partial(_note_cell, journal, check.elsewhere))
        lines = journal.read_text().splitlines() if journal.exists() else []
    cells = [Cell(CellConfig.from_dict(one["config"]), tuple(one["problems"])) for one in map(json.loads, lines)]
    # values of a key that means nothing to a cell make one cell of it
    return list({cell.cell_id: cell for cell in reversed(cells)}.values())[::-1] if check.elsewhere else cells


def _compose_one(check: Overrides, overrides: list[str]) -> Cell:
    """The cell of a command line that is no sweep. Hydra's own app composes twice for it."""
    try:
        config = check.compose_whole(overrides)
    except Exception as error:
        raise RefusedError([f"{type(error).__name__}: {first_line(error)}"]) from error
    model = config.hydra.runtime.choices["model"]
    HydraConfig.instance().set_config(config)  # for ${hydra:...} in a value
    with open_dict(config):
        del config["hydra"]
    return _cell_of(config, model, check.elsewhere)


def run_hydra(arguments: list[str], job: Callable[[Any], None] = lambda _: None) -> None:
    """Runs Hydra's own command line, with `job` for each config that it composes. Raises RefusedError."""
    import hydra

    app = hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="config")
    before, sys.argv = sys.argv, ["zerobench", *arguments]
    log = logging.getLogger()
    handlers, level = log.handlers[:], log.level  # for --info Hydra sets the whole process to tell everything
    said = io.StringIO()
    try:
        with redirect_stderr(said), insist(), _each_job_composed_once():
            app(job)()
    except SystemExit as stop:
        if stop.code:
            raise RefusedError([_sentence(said.getvalue())]) from stop
    except Exception as error:
        raise RefusedError([f"{type(error).__name__}: {first_line(error)}"]) from error
    finally:
        sys.argv = before
        log.handlers[:] = handlers
        log.setLevel(level)
    sys.stderr.write(said.getvalue())


@contextmanager
def _each_job_composed_once() -> Iterator[None]:
    """Spares Hydra's sweepers the check that each job composes beforehand: our jobs do nothing else."""
    check = Sweeper.validate_batch_is_legal
    Sweeper.validate_batch_is_legal = lambda self, batch: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Sweeper.validate_batch_is_legal = check  # type: ignore[method-assign]


def _sentence(said: str) -> str:
    """Returns Hydra's output before its error, without its hints and the lines of a traceback."""
    lines = [line.strip() for line in said.splitlines() if line.strip() and not line.startswith((" ", "Traceback"))]
    told = [line for line in lines if not line.startswith(("Set the environment variable", "See http", "usage:"))]
    if not told:
        return "Hydra gave up without a word"
    return f"Hydra: {told[-1] if told[0].startswith('Error executing') else told[0]}"


def _note_cell(journal: Path, elsewhere: set[str], config: Any) -> None:
    """One job of Hydra's: a composed config becomes a cell, without the keys of `elsewhere` that its choices lack."""
    cell = _cell_of(config, HydraConfig.get().runtime.choices["model"], elsewhere)
    with journal.open("a") as file:  # a launcher of Hydra's may run jobs in processes of its own
        file.write(json.dumps({"config": cell.config.as_dict(), "problems": cell.problems}) + "\n")


def _cell_of(config: DictConfig, model: str, elsewhere: set[str]) -> Cell:
    """`config` resolved, less the keys of `elsewhere` that its choices lack; `model`: the choice of the group."""
    try:
        plain: Any = OmegaConf.to_object(config)
        return resolve(plain, model, stray_keys(config, elsewhere))
    except Exception as error:  # the other cells are not to suffer; this one becomes a row
        return unresolved(config, model, f"{type(error).__name__}: {first_line(error)}")


def first_line(error: BaseException) -> str:
    """Returns an error's message, in one line."""
    return (str(error).strip() or "no message").splitlines()[0]
