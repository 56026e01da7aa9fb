"""Intervals of predictions, from errors of runs that were compared: zerobench/hardware/validated.yaml keeps them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from zerobench.host.files import replace_text

VALIDATED = Path("zerobench/hardware/validated.yaml")
COVERED = 0.9
"""Part of the errors that an interval holds."""

HEADER = "# Written by `make predicted-runs` and `make predicted-here`: validation/predicted_runs.py says how.\n"


def write_validated(found: dict[str, Any]) -> None:
    """Writes scales and intervals."""
    replace_text(VALIDATED, HEADER + yaml.safe_dump(found, sort_keys=False))


def renew_interval(kind: str, errors: Sequence[float]) -> None:
    """Writes the interval of one kind of run again. `errors`: |log| of predicted over measured."""
    found = yaml.safe_load(VALIDATED.read_text())
    found["intervals"][kind] = interval_of(errors)
    write_validated(found)


def interval_of(errors: Sequence[float]) -> dict[str, float | int]:
    """Returns the interval of a kind of run: factors on a step, and the fraction of rows that they cover in turns."""
    wide = math.exp(float(np.quantile(errors, COVERED)))
    shuffled = np.random.default_rng(0).permutation(np.array(errors))
    inside = 0
    for part in range(10):
        held = shuffled[part::10]
        rest = np.concatenate([shuffled[other::10] for other in range(10) if other != part])
        inside += int((held <= np.quantile(rest, COVERED)).sum())
    return {
        "low": round(1 / wide, 3),
        "high": round(wide, 3),
        "runs": len(errors),
        "covered": round(inside / len(errors), 3),
    }
