"""Runs a sweep whose cells a Hydra sweeper proposes, as a command: with progress, one table, and the best trials.
Writes an account of its trials to a file in the results folder, RESULTS/searches/NAME-HASH.yaml:

sweeper, objectives, axes, fixed    of the sweep; the hash is of these, so that the same command replaces the file
best                                the best trials: parameters, values, and the command that runs the cell
trials                              each with its parameters, status, runs and values, in the order proposed
found                               the plugin's own account, unchanged (optimization_results.yaml)
"""

from __future__ import annotations

import hashlib
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from ..config.compose import RefusedError
from ..config.overrides import Overrides
from ..config.sweeper import Proposed
from ..host.files import replace_text
from ..host.pipes import print_line, print_note
from ..host.terminal import is_quiet
from ..results import rescue
from ..results.printed_table import SweepColumn, print_results
from ..results.tables import SEARCHES
from ..sizes import counted, parse_bytes, show_bytes
from ..sweep.command import check_folders, print_ending
from ..sweep.parity import DIFFERS
from ..sweep.parity_check import ParityCheck
from ..sweep.progress import Reporter
from ..sweep.sweep import Sweep
from .proposals import Proposals
from .trial import ANSWERS, Trial, best_of

AGAIN = ("measure.repeats=3", "rerun=true")
"""Overrides that measure the best trial again: the best of many timings is partly luck."""


def run_proposed(
    proposed: Proposed, check: Overrides, is_local: bool, chosen: Sequence[str] | None, kind: Callable[..., Sweep]
) -> int:
    """Runs the sweep, and prints its table and its best trials. Returns the exit code: 0 if there is a best trial and
    all others answered the sweeper (not fitting counts as an answer); otherwise 1; 130 if the user stopped it. Raises
    RefusedError.

    `is_local`: cells run one after the other, so that each proposal can use the results of all earlier ones.
    """
    limit_bytes, refused = _limit_of(check, proposed), None
    with Reporter() as reporter:
        training = ParityCheck()
        sweep = kind(reporter, check=training)
        trials = Proposals(proposed, check, sweep, is_local, limit_bytes, check_folders)
        try:
            trials.run()
        except RefusedError as error:
            refused = error
        ended = sweep.stopped or sweep.failed_fast or refused is not None
        sweep.stopped |= not training.finish(makes=not ended, say=reporter.say)
    best = best_of(trials.trials, proposed.objectives)
    if sweep.rows:
        print_results(sweep.rows, chosen, _columns(proposed, trials.trials, best))
        _print_best(proposed, trials.trials, best)
        _write(proposed, trials, best, sweep)
    print_ending([trial.cell for trial in trials.trials], sweep.unwritten, sweep, reporter)
    if refused is not None:
        raise refused
    if trials.gave_up:
        print_note(f"zerobench: {proposed.chosen} gave up: {trials.gave_up}")
    return _code(trials, best, sweep)


def _code(trials: Proposals, best: list[Trial], sweep: Sweep) -> int:
    if sweep.stopped:
        return 130
    failed = [trial for trial in trials.trials if trial.status not in ANSWERS]
    differs = [row for row in sweep.rows if row["training"] == DIFFERS]
    return int(bool(failed or differs or sweep.unwritten or trials.gave_up or not best or sweep.failed_fast))


def _limit_of(check: Overrides, proposed: Proposed) -> int | None:
    words = [word for word in proposed.fixed if word.lstrip("+").startswith(("search.memory_limit=", "experiment="))]
    limit = check.config_of(words).search.memory_limit
    try:
        return None if limit is None else parse_bytes(limit)
    except ValueError as error:
        raise RefusedError([f"search.memory_limit: {error}"]) from None


def _columns(proposed: Proposed, trials: Sequence[Trial], best: Sequence[Trial]) -> dict[str, SweepColumn]:
    """Columns of the sweep's table: the objectives, with a mark on the best trials."""
    by_cell = {row["cell_id"]: trial for trial in trials for row in trial.rows}
    chosen = {trial.cell.cell_id for trial in best}

    def shows(place: int) -> Callable[[dict[str, Any]], str]:
        def show(row: dict[str, Any]) -> str:
            trial = by_cell.get(row["cell_id"])
            if trial is None or not trial.values:
                return "–" if trial is None else trial.status
            return _shown(proposed, place, trial) + " best" * (trial.cell.cell_id in chosen)

        return show

    return {one.column: SweepColumn(text=shows(place)) for place, one in enumerate(proposed.objectives)}


def _shown(proposed: Proposed, place: int, trial: Trial) -> str:
    objective, value = proposed.objectives[place], trial.values[place]
    if objective.unit == "bytes":
        return show_bytes(value)
    figure = f"{value:.6g}"
    unit = objective.unit.replace("tokens", counted([trial.cell.config.sequence]))
    return f"{figure} {unit}" if unit not in ("", "loss") else figure


def _print_best(proposed: Proposed, trials: Sequence[Trial], best: Sequence[Trial]) -> None:
    columns = ", ".join(one.column for one in proposed.objectives)
    cells = len({trial.cell.cell_id for trial in trials})
    again = f", {len(trials) - cells} of them repeated" if len(trials) > cells else ""
    statuses = Counter(trial.status for trial in trials if trial.status and not trial.values)
    failed = f"; infeasible: {', '.join(f'{number} {status}' for status, number in statuses.items())}"
    unrun = sum(not trial.status for trial in trials)
    left = f"; not run: {unrun}" * bool(unrun)
    print_line(f"{len(trials)} trials of {proposed.name}{again}{failed * bool(statuses)}{left}")
    if not best:
        print_line(f"none is feasible, so none is best by {columns}")
    for trial in best:
        values = ", ".join(f"{one.column} {_shown(proposed, n, trial)}" for n, one in enumerate(proposed.objectives))
        which = "best" if len(best) == 1 else "best in one way"
        print_line(f"{which}: {trial.name}: {values}")
        if not is_quiet():
            print_line(f"  to confirm it: {shlex.join(command_of(proposed, trial))}")


def command_of(proposed: Proposed, trial: Trial) -> list[str]:
    """Returns the command line that runs this trial's cell; three new launches if an objective is a time."""
    times = any(one.unit in ("s", "tokens / s") for one in proposed.objectives)
    given = {word.partition("=")[0].lstrip("+") for word in proposed.fixed}
    words = [word for word in proposed.fixed if not word.lstrip("+").startswith("search.memory_limit=")]
    again = [word for word in AGAIN if times and word.partition("=")[0] not in given]
    return ["zerobench", *dict.fromkeys([*words, *trial.words, *again])]


def _write(proposed: Proposed, trials: Proposals, best: Sequence[Trial], sweep: Sweep) -> None:
    folder = Path(trials.trials[0].cell.config.results_dir)
    try:
        path = write_account(folder, proposed, trials, [command_of(proposed, one) for one in best], best)
    except OSError as error:
        sweep.unwritten.append(rescue.Unwritten(folder, error.strerror or str(error), None))
    else:
        if not is_quiet():
            print_line(f"trials: {path}")


# -- the account -----------------------------------------------------------------------------------


def write_account(
    results_dir: Path, proposed: Proposed, trials: Proposals, commands: Sequence[list[str]], best: Sequence[Trial]
) -> Path:
    """Writes the account, and returns its path. Raises OSError."""
    columns = [one.column for one in proposed.objectives]
    better = {one.column: f"{'larger' if one.larger else 'smaller'} is better" for one in proposed.objectives}
    sweep: dict[str, Any] = {
        "sweeper": proposed.name, "objectives": better,
        "axes": list(proposed.axes), "fixed": list(proposed.fixed), "settings": list(proposed.words),
    }  # fmt: skip
    number = hashlib.sha256(yaml.safe_dump(sweep).encode()).hexdigest()[:12]
    told = {
        **sweep,
        "best": [_told(one, columns) | {"command": shlex.join(how)} for one, how in zip(best, commands, strict=True)],
        "trials": [_told(one, columns) for one in trials.trials],
        "found": trials.found,
    }
    folder = results_dir / SEARCHES
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{proposed.name}-{number}.yaml"
    replace_text(path, yaml.safe_dump(told, sort_keys=False))
    return path


def _told(trial: Trial, columns: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"parameters": [word.lstrip("+") for word in trial.words], "status": trial.status}
    if trial.reason:
        found["reason"] = trial.reason
    found["runs"] = [str(row["run_id"]) for row in trial.rows]
    if trial.values:
        found["values"] = dict(zip(columns, trial.values, strict=True))
    return found
