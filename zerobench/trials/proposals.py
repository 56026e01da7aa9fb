"""Runs a Hydra sweeper: it proposes batches of cells, our launcher runs them and returns their values.

1. propose   the plugin calls its launcher with the overrides of a batch
2. compose   each becomes a cell, with all checks of a sweep; a repeated cell reuses its trial's rows
3. run       the new cells, through the sweep: reused, run here or dispatched to jobs
4. return    the objectives' values; infeasible trials as failed jobs
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict

from ..config.cell import Cell
from ..config.compose import RefusedError, compose_plugin, compose_trial, each_job_composed_once, launching_with
from ..config.hydra_keys import first_line
from ..config.overrides import Overrides
from ..config.safe_yaml import read_yaml
from ..config.sweeper import SETTINGS, Proposed
from ..host.signals import heed
from ..host.temporary import temporary_folder
from ..sweep.command import fitting
from ..sweep.sweep import Sweep
from .trial import InfeasibleError, MissingError, Trial

RESULTS = "optimization_results.yaml"
"""The file into which Hydra sweepers write their results."""


class EndedError(BaseException):
    """Raised through a plugin, past its handlers, to end the sweep early. `refused`: a proposal is not a cell."""

    def __init__(self, refused: RefusedError | None = None) -> None:
        super().__init__()
        self.refused = refused


@dataclass
class Proposals:
    """The trials of a sweep. `before`: called with the new cells of a batch before they run; may raise RefusedError.
    `gave_up`: an error message if the plugin ended with an error; `found`: its own account of the best trials.
    """

    proposed: Proposed
    check: Overrides
    sweep: Sweep
    one_by_one: bool
    limit_bytes: int | None = None
    before: Callable[[list[Cell]], None] = lambda cells: None
    trials: list[Trial] = field(default_factory=list)
    gave_up: str = ""
    found: dict[str, Any] = field(default_factory=dict)
    _judged: dict[str, Trial] = field(default_factory=dict)

    def run(self) -> None:
        """Runs the plugin to its end. Raises RefusedError for a proposal that is not a cell, or a run without an
        objective.
        """
        with temporary_folder() as folder:
            try:
                with ExitStack() as silence, each_job_composed_once():
                    silence.enter_context(_silenced())
                    self._sweeper(folder, silence).sweep(arguments=list(self.proposed.axes))
            except EndedError as ended:
                if ended.refused is not None:
                    raise ended.refused from None
            except KeyboardInterrupt:
                self.sweep.stopped = True
            except Exception as error:
                self.gave_up = self._why(error)
            self.found = _read_results(folder / RESULTS)

    def _why(self, error: Exception) -> str:
        """Returns why the plugin gave up; "" if it only misses a best trial because there is none."""
        if isinstance(error, InfeasibleError):
            rate = next((key for key in self.proposed.asked if key.endswith("max_failure_rate")), "max_failure_rate")
            return f"more trials of a batch failed than {SETTINGS}.{rate} permits, as {error}"
        if self.trials and not any(trial.values for trial in self.trials):
            return ""
        return f"{type(error).__name__}: {first_line(error)}"

    def _sweeper(self, folder: Path, silence: ExitStack) -> Any:
        """Creates the plugin, with our launcher; the jobs of a dispatched sweep use the chosen one."""
        config, context = compose_plugin(self.check, self.proposed.words)
        with open_dict(config):
            config.hydra.sweep.dir = str(folder)
            if "params" in config.hydra.sweeper:
                config.hydra.sweeper.params = None  # they are among the axes
            for key, value in self.proposed.changes(self.one_by_one).items():
                OmegaConf.update(config.hydra.sweeper, key, value)
        with launching_with(lambda: _Batches(self, silence)):
            return Plugins.instance().instantiate_sweeper(
                config=config, hydra_context=context, task_function=lambda _: None
            )

    def launch(self, batch: Sequence[Sequence[str]]) -> list[JobReturn]:
        """Runs a batch of proposed overrides, and returns their values in order. Raises EndedError."""
        try:
            return self._launch(batch)
        except RefusedError as refused:
            raise EndedError(refused) from None

    def _launch(self, batch: Sequence[Sequence[str]]) -> list[JobReturn]:
        trials = [self._trial(tuple(map(str, words))) for words in batch]
        heed()
        self.trials += trials
        fresh = {one.cell.cell_id: one for one in trials if one.cell.cell_id not in self._judged}
        if fresh:
            self._run(list(fresh.values()))
        for trial in trials:
            known = self._judged[trial.cell.cell_id]
            trial.status, trial.reason, trial.rows, trial.values = known.status, known.reason, known.rows, known.values
        return [trial.returned(self._signs) for trial in trials]

    def _trial(self, words: tuple[str, ...]) -> Trial:
        mine = tuple(self._forced(word) for word in words)
        return Trial(len(self.trials), words, compose_trial(self.check, [*self.proposed.fixed, *mine]))

    def _forced(self, word: str) -> str:
        """Adds the prefix `++` to an override whose key not all choices of the sweep have."""
        key = word.partition("=")[0].lstrip("+")
        added = key in self.check.elsewhere or key.startswith("huggingface.options.")
        return f"++{word.lstrip('+')}" if added else word

    def _run(self, trials: list[Trial]) -> None:
        cells = [trial.cell for trial in trials]
        cells = fitting(cells) if self.one_by_one else cells
        self.before(cells)
        self.sweep.run(cells, names=[trial.name for trial in trials])
        ended = self.sweep.stopped or self.sweep.failed_fast
        for trial in trials:
            rows = self.sweep.by_cell.get(trial.cell.cell_id, [])
            if rows and (not ended or len(rows) >= trial.cell.config.measure.repeats):
                self._judge(trial, rows)
        if ended:
            raise EndedError

    def _judge(self, trial: Trial, rows: list[dict[str, Any]]) -> None:
        try:
            trial.judge(rows, self.proposed.objectives, self.limit_bytes)
        except MissingError as error:
            raise RefusedError([str(error)]) from None
        self._judged[trial.cell.cell_id] = trial

    @property
    def _signs(self) -> list[int]:
        """Signs of the objectives' values: a plugin that cannot be given a direction minimizes."""
        told = bool(self.proposed.direction)
        return [-1 if one.larger and not told else 1 for one in self.proposed.objectives]


@contextmanager
def _silenced() -> Iterator[None]:
    """Keeps a plugin's logs, and its warnings for programmers, off the sweep's console."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


class _Batches(Launcher):
    """The launcher that a Hydra sweeper calls: runs batches through Proposals, outside of the plugin's `silence`."""

    def __init__(self, proposals: Proposals, silence: ExitStack) -> None:
        self._proposals, self._silence = proposals, silence

    def setup(self, *, hydra_context: HydraContext, task_function: Any, config: DictConfig) -> None:
        """Needs nothing from Hydra."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        self._silence.close()
        try:
            return self._proposals.launch(job_overrides)
        finally:
            self._silence.enter_context(_silenced())


def _read_results(path: Path) -> dict[str, Any]:
    """Returns the plugin's own account of its best parameters; {} if it wrote none."""
    try:
        found = read_yaml(path)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
