"""The account of a sweeper's trials, a file beside the runs: RESULTS/searches/NAME-HASH.yaml.

sweeper, objectives, axes, fixed    of the sweep; the hash is of these, so that the same command replaces it
best                                the best trials: parameters, values, and the command that runs the cell
trials                              each with its parameters, status, runs and values, in the order of the proposals
found                               the plugin's own account, as it wrote it (optimization_results.yaml)
"""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from ..config.sweeper import Proposed
from ..results.tables import SEARCHES
from .proposals import Proposals
from .trial import Trial


def write_account(
    results_dir: Path, proposed: Proposed, trials: Proposals, commands: Sequence[list[str]], best: Sequence[Trial]
) -> Path:
    """Writes the account, and returns its path. Raises OSError."""
    columns = [one.column for one in proposed.objectives]
    sweep: dict[str, Any] = {
        "sweeper": proposed.name, "objectives": {one.column: _direction(one.larger) for one in proposed.objectives},
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
    path, aside = folder / f"{proposed.name}-{number}.yaml", folder / f".{number}.{os.getpid()}"
    aside.write_text(yaml.safe_dump(told, sort_keys=False))
    aside.replace(path)
    return path


def _direction(larger: bool | None) -> str:
    return "larger is better" if larger else "smaller is better"


def _told(trial: Trial, columns: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"parameters": [word.lstrip("+") for word in trial.words], "status": trial.status}
    if trial.reason:
        found["reason"] = trial.reason
    found["runs"] = [str(row["run_id"]) for row in trial.rows]
    if trial.values:
        found["values"] = dict(zip(columns, trial.values, strict=True))
    return found
