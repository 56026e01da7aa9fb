"""Drives Hydra: configs are composed, sweeps split or proposed, plugins made, and errors put in plain words.

Hydra's private modules are used here alone. `Composer` knows every choice, key and default; it checks nothing that a
user typed (compose.py does), and knows no cells.
"""

from __future__ import annotations

import io
import logging
import os
import random
import re
import sys
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import hydra
from hydra import compose, initialize_config_dir
from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override, Quote, QuotedString
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext
from omegaconf import MISSING, DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from ..host.files import read_yaml
from ..host.pipes import first_line
from ..host.signals import repeat_interruption
from .schema import SCHEMAS, config_dir

GROUPS = (*SCHEMAS, "experiment")

ASKS = "${hydra:"
"""Begins an interpolation from Hydra's part of a config."""

UNLOGGED = ("hydra/hydra_logging=none", "hydra/job_logging=none", "hydra.output_subdir=null")
"""Overrides that stop Hydra from writing its own logs and configs."""

RESULTS = "optimization_results.yaml"
"""The file into which Hydra sweepers write their results."""

RunBatch = Callable[[Sequence[Sequence[str]], int], Sequence[Sequence[float] | None]]
"""Runs cells, each given as overrides, numbered from an index. Returns for each its values for the sweeper."""


class HydraComposition(NamedTuple):
    """A config, and Hydra's own part of it; neither is ever modified. `asks_hydra`: whether one of its values is
    interpolated from Hydra's part; `lacks`: whether a key may have no value.
    """

    config: DictConfig
    hydra: DictConfig
    asks_hydra: bool
    lacks: bool


@lru_cache(4)
def composition_cache(*choices: Hashable) -> dict[tuple[str, ...], HydraComposition]:
    """Returns the cache of compositions by overrides, for these `choices` added to the package's: a process may run
    many commands.
    """
    return {}


class Composer:
    """Composes configs of every choice, including those from `users` and `extra_dirs`. `loader`: Hydra's loader of the
    last composed config. `compositions`: a cache, since Hydra takes a quarter of a second.
    """

    def __init__(
        self, users: dict[str, list[str]], extra_dirs: list[Path], compositions: dict[tuple[str, ...], HydraComposition]
    ) -> None:
        self.extra_dirs = extra_dirs
        self.folders = (*extra_dirs, config_dir())
        self.choices = {
            group: sorted({path.stem for folder in self.folders for path in (folder / group).glob("*.yaml")})
            for group in GROUPS
        }
        for group, names in users.items():
            self.choices[group] += names
        self._compositions = compositions
        self.loader: Any = None

    def compose(self, overrides: Sequence[str]) -> HydraComposition:
        key = tuple(overrides)
        if key not in self._compositions:
            plain = self.compose_whole([*overrides])
            with open_dict(plain):
                own = plain.pop("hydra")
            text = OmegaConf.to_yaml(plain)
            self._compositions[key] = HydraComposition(plain, own, ASKS in text, MISSING in text)
        return self._compositions[key]

    def config_of(self, overrides: Sequence[str]) -> DictConfig:
        return self.compose(overrides).config

    def compose_whole(self, overrides: list[str]) -> DictConfig:
        """Returns the config of `overrides` with Hydra's own part. Hydra's exceptions propagate."""
        GlobalHydra.instance().clear()
        folders = [QuotedString(f"file://{folder.resolve()}", Quote.single).with_quotes() for folder in self.extra_dirs]
        with (
            # Hydra copies its sources, and all schemas with them, which takes as long as to read the files
            mock.patch.object(ConfigStore, "__deepcopy__", lambda store, _: store, create=True),
            initialize_config_dir(str(config_dir().resolve()), version_base="1.3"),
        ):
            self.loader = GlobalHydra.instance().config_loader()
            searched = [*overrides, *([f"hydra.searchpath=[{','.join(folders)}]"] if folders else [])]
            try:
                return compose("config", overrides=searched, return_hydra_config=True)
            except (AssertionError, AttributeError):  # OmegaConf's, as for hydra.sweeper.params={...}
                raise HydraException("a key that is null is given parts") from None

    def cell_of(self, overrides: list[str], number: int) -> tuple[DictConfig, str, bool]:
        """Returns the config of a cell, the job `number` of its sweep, its choice of a model, and if a key may lack
        its value. Cells with equal choices are updates of one composition, as Hydra makes them, unless a value is
        interpolated from Hydra's part.
        """
        parsed = [(word, parse(word)) for word in overrides]
        is_choice = [override.key_or_group in GROUPS or root_key(override) == "hydra" for _, override in parsed]
        composition = self.compose([word for (word, _), chosen in zip(parsed, is_choice, strict=True) if chosen])
        if composition.asks_hydra or any(ASKS in word for word in overrides):
            config = self.compose_whole(overrides)
            with open_dict(config):
                config.hydra.job.num = number
                HydraConfig.instance().set_config(config)
                del config["hydra"]
        else:
            config = composition.config.copy()
            keys = [override for (_, override), chosen in zip(parsed, is_choice, strict=True) if not chosen]
            ConfigLoaderImpl._apply_overrides_to_config(keys, config)
        lacks = composition.lacks or any(MISSING in word for word in overrides)
        return config, composition.hydra.runtime.choices["model"], lacks

    def override_values(self, override: Override) -> list[Any]:
        """Returns the values that an override sets or sweeps over; a glob selects among a group's choices."""
        value = override.value()
        if isinstance(value, Glob):
            return list(value.filter(self.choices.get(override.key_or_group, [])))
        if isinstance(value, IntervalSweep):
            return [value.start, value.end]
        values = list(override.sweep_iterator(transformer=lambda x: x)) if override.is_sweep_override() else [value]
        return [item.text if isinstance(item, QuotedString) else item for item in values]


@lru_cache(10_000)
def parse(word: str) -> Override:
    """Parses an override; the cells of a sweep have many in common. Raises HydraException."""
    return OverridesParser.create().parse_override(word)


def root_key(override: Override) -> str:
    """Returns the group or section of an override's key."""
    return override.key_or_group.split(".")[0].split("/")[0]


def split(swept: Sequence[str]) -> list[list[str]]:
    """Returns the overrides of each combination of the values of `swept`, in Hydra's order."""
    batches = BasicSweeper.split_arguments(OverridesParser.create().parse_overrides([*swept]), None)
    return [[*overrides] for overrides in batches[0]]


@contextmanager
def untouched() -> Iterator[None]:
    """Restores Hydra's globals and Python's random state: the caller may be a job of a Hydra app."""
    app, config = GlobalHydra.instance(), HydraConfig.instance()
    before, drawn = (app.hydra, config.cfg), random.getstate()  # shuffle() draws
    try:
        yield
    finally:
        app.hydra, config.cfg = before
        random.setstate(drawn)


class BatchError(BaseException):
    """Passes the error of a batch through a sweeper, past handlers that would take it for a failed job."""

    def __init__(self, reason: BaseException) -> None:
        super().__init__()
        self.reason = reason


class _BatchLauncher(Launcher):
    """The launcher of a sweeper that proposes cells: has each batch run by `run`."""

    def __init__(self, run: RunBatch) -> None:
        self._run = run

    def setup(self, *, hydra_context: HydraContext, task_function: Any, config: DictConfig) -> None:
        """Needs nothing from Hydra."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Runs a batch, and returns its values in order. Raises BatchError."""
        try:
            values = self._run(job_overrides, initial_job_idx)
        except BaseException as error:
            raise BatchError(error) from error
        return [
            JobReturn(
                overrides=overrides, status=JobStatus.COMPLETED,
                _return_value=value[0] if value is not None and len(value) == 1 else value,
            )
            for overrides, value in zip(job_overrides, values, strict=True)
        ]  # fmt: skip


def propose(composer: Composer, own: Sequence[str], swept: Sequence[str], run: RunBatch) -> dict[str, Any]:
    """Makes a Hydra sweeper propose batches of values for the keys `swept`. `own`: overrides below `hydra` that choose
    the sweeper. Returns the sweeper's account of its results, {} if it has none. Raises BatchError.
    """
    from ..host.temporary import temporary_folder  # with what tables are read by, which no completion needs

    level = logging.root.manager.disable
    with temporary_folder() as folder:
        config = hydra_config(composer, own, folder)
        if "params" in config.hydra.sweeper:
            config.hydra.sweeper.params = None  # they are among the swept overrides
        logging.disable(logging.CRITICAL)
        try:
            # Our launcher composes the jobs, so that the sweeper need not check that each composes.
            with warnings.catch_warnings(), mock.patch.object(Sweeper, "validate_batch_is_legal"):
                warnings.filterwarnings("ignore", module="optuna|hydra_plugins|nevergrad")  # for programmers
                with mock.patch.object(Plugins, "instantiate_launcher", return_value=_BatchLauncher(run)):
                    sweeper = Plugins.instance().instantiate_sweeper(
                        config=config,
                        hydra_context=HydraContext(composer.loader, Callbacks()),
                        task_function=lambda _: None,
                    )
                sweeper.sweep(arguments=[*swept])
        finally:
            logging.disable(level)
        account = Path(config.hydra.sweep.dir) / RESULTS
        return dict(read_yaml(account)) if account.is_file() else {}


def hydra_config(composer: Composer, own: Sequence[str], folder: Path) -> DictConfig:
    """Returns a config with Hydra's part as the overrides `own` have it. `folder`: for Hydra's own files."""
    config = composer.compose_whole([*own, *UNLOGGED])
    OmegaConf.set_struct(config.hydra, False)
    if not any(word.lstrip("+").startswith("hydra.sweep.dir=") for word in own):
        config.hydra.sweep.dir = str(folder)
    return config


def instantiate_launcher(
    composer: Composer, own: Sequence[str], folder: Path, number: int, settings: Mapping[str, Any],
    task: Callable[..., Any],
) -> Launcher:  # fmt: skip
    """Returns the launcher that the overrides `own` choose, for one job that calls `task`. `folder`: for the launcher's
    files; `settings`: by key below hydra.launcher.
    """
    config = hydra_config(composer, own, folder / "hydra")
    config.hydra.job.name = f"zerobench-{number}"
    for key, value in settings.items():
        OmegaConf.update(config.hydra.launcher, key, value, force_add=True)
    if "submitit_folder" in config.hydra.launcher:  # a job that begins before its own folder exists has no log
        config.hydra.launcher.submitit_folder = str(folder / f"submitit-{number}")
        (folder / f"submitit-{number}").mkdir()
    launcher = Plugins.instance().instantiate_launcher(
        hydra_context=HydraContext(composer.loader, Callbacks()), task_function=task, config=config
    )
    assert isinstance(launcher, Launcher)
    return launcher


def run_hydra(arguments: list[str]) -> None:
    """Runs a command line of flags by which Hydra only prints. Raises ValueError with Hydra's own message."""
    app = hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="config")
    log = logging.getLogger()
    handlers, level = log.handlers[:], log.level  # for --info Hydra sets the whole process to log everything
    printed = io.StringIO()
    try:
        with (
            mock.patch.object(sys, "argv", ["zerobench", *arguments]),
            mock.patch.dict(os.environ, HYDRA_FULL_ERROR="1"),  # raises errors, instead of printing them
            repeat_interruption(),
            redirect_stderr(printed),
        ):
            app(lambda _: None)()
    except SystemExit as stop:
        if stop.code:  # after the usage of its flags
            message = printed.getvalue().rpartition("error: ")[2].strip() or "Hydra cannot do that"
            raise ValueError(f"{' '.join(arguments)}: {message}") from stop
    except Exception as error:
        raise ValueError(not_composed(arguments, error)) from error
    finally:
        log.handlers[:] = handlers
        log.setLevel(level)


_WRAPPED = re.compile(r"\b\w+ raised while (?:resolving interpolation|composing config): |^\w+Error: ")
"""The name of a Python exception before its message."""


def reason(error: BaseException) -> str:
    """Returns the reason from a composition error: its first line, and the next line too if it ends with a colon."""
    if isinstance(error, RecursionError) or "RecursionError raised" in str(error):
        return "configs take one another in, or values name one another, without end"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [first_line(error)]
    message = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
    options = [number for number, line in enumerate(lines, 1) if line.startswith("Available options in ")]
    if options:
        message += f" (valid: {', '.join(takewhile(lambda line: ' ' not in line, lines[options[0] :]))})"
    key = getattr(error, "full_key", None)
    message = _WRAPPED.sub("", message)
    message = f"{key}: {message}" if key and key not in message else message
    is_plain = isinstance(error, HydraException | OmegaConfBaseException) or type(error) is ValueError
    return message if is_plain else f"{type(error).__name__}: {message}"


def not_composed(arguments: Sequence[str], error: BaseException) -> str:
    """Returns the error message for a command line that Hydra cannot compose, or if a plugin fails to import."""
    if "mutable default <class 'hydra_plugins." in str(error):
        why = f"a Hydra plugin cannot be imported here: {reason(error)}"
        return f"{why}; uninstall it, or install a later version of it"
    return f"{' '.join(arguments)}: it cannot be composed: {reason(error)}"
