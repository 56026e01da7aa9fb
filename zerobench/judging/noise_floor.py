"""Noise floors: the variation of times between launches of identical code, recorded for a machine.

A *launch's time* is the median of its steps. For launches of one cell, s is the standard deviation of the times'
logarithms. The *floor* is the effect (paired.py) that the ratio of two further launches of identical code stays below
in 95 % of cases: exp(t · s · √2) − 1, with Student's t for n − 1 degrees of freedom. This is the prediction interval of
a difference of two. It uses every launch once, so no pairing has to be chosen; with few launches it is wide. For the
mean over k pairs, s is smaller by √k: `NoiseFloor.of`.

Records are kept per *environment*: device class, processor, cores and torch's minor version.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy
import yaml

from ..config.cell import CellConfig
from ..config.flat import base_name
from ..config.yaml_file import read_yaml
from ..results.provenance import torch_minor
from ..results.summary import LEAST_LAUNCHES, TIMES

CONFIDENCE = 0.95
ENVIRONMENT = ("device_class", "processor", "cores", "torch")


@dataclass(frozen=True)
class NoiseFloor:
    """One record. `floors`: a time's column -> the floor of one pair. `medians`: the launches' times, in seconds."""

    environment: dict[str, Any]
    cell: str
    date: str
    command: str
    commit: str | None
    floors: dict[str, float]
    medians: dict[str, list[float]]

    def of(self, metric: str, pairs: int = 1) -> float:
        """Returns the floor of the geometric mean over `pairs` pairs."""
        return float(np.expm1(np.log1p(self.floors[metric]) / np.sqrt(pairs)))

    @property
    def launches(self) -> int:
        """The number of launches of the measurement."""
        return len(next(iter(self.medians.values())))

    @property
    def title(self) -> str:
        """The measured cell and date."""
        return f"{self.cell}, {self.launches} launches of {self.date}"


def environment_of(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the part of a run's row that determines which record applies to it."""
    return {
        "device_class": row["device_class"],
        "processor": row["processor"],
        "cores": int(row["cores"]),
        "torch": torch_minor(row["torch_version"]),
    }


def floor_of(times: list[float]) -> float:
    """Returns the floor of one pair, from the times of at least two launches."""
    spread = float(np.std(np.log(times), ddof=1))
    return float(np.expm1(scipy.stats.t.ppf((1 + CONFIDENCE) / 2, len(times) - 1) * spread * np.sqrt(2)))


def floor_from(launches: list[dict[str, Any]], config: CellConfig) -> NoiseFloor:
    """Returns the record of a cell's launches, all of them ok. Raises ValueError if there are too few."""
    if len(launches) < LEAST_LAUNCHES:
        raise ValueError(f"{base_name(config)} has {len(launches)} launches; a noise floor needs {LEAST_LAUNCHES}")
    medians = {metric: [float(row[metric]) for row in launches] for metric in TIMES}
    last = launches[-1]
    return NoiseFloor(
        environment=environment_of(last),
        cell=base_name(config),
        date=last["started"][:10],
        command=last["command"],
        commit=last["commit"],
        floors={metric: floor_of(times) for metric, times in medians.items()},
        medians=medians,
    )


def read(folder: Path) -> list[NoiseFloor]:
    """Reads all records in a folder; none if the folder does not exist. Raises ValueError for a file with other
    content.
    """
    return [floor for path in sorted(folder.glob("*.yaml")) for floor in _read_file(path)]


def write(folder: Path, floor: NoiseFloor) -> Path:
    """Adds a record to its device class's file, replacing an earlier one of the same environment."""
    name = re.sub(r"[^a-z0-9]+", "-", floor.environment["device_class"].lower()).strip("-")
    path = folder / f"{name}.yaml"
    others = [one for one in (_read_file(path) if path.is_file() else []) if one.environment != floor.environment]
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump([asdict(one) for one in [*others, floor]], sort_keys=False, allow_unicode=True))
    return path


def lookup(floors: list[NoiseFloor], environment: dict[str, Any]) -> NoiseFloor | None:
    """Returns the record that applies to an environment."""
    return next((floor for floor in floors if floor.environment == environment), None)


def _read_file(path: Path) -> list[NoiseFloor]:
    try:
        found = [NoiseFloor(**one) for one in read_yaml(path) or []]
        for floor in found:
            if set(floor.environment) != set(ENVIRONMENT) or set(floor.floors) != set(TIMES):
                raise TypeError(f"{floor.cell}: environment needs {', '.join(ENVIRONMENT)}, floors {', '.join(TIMES)}")
            if not isinstance(floor.medians, dict) or not all(
                isinstance(m, list) and m for m in floor.medians.values()
            ):
                raise TypeError(f"{floor.cell}: medians must be lists of seconds")
            numbers = [*floor.floors.values(), *(one for times in floor.medians.values() for one in times)]
            if not all(type(one) in (int, float) and one >= 0 for one in numbers) or not floor.medians:
                raise TypeError(f"{floor.cell}: floors and medians must be numbers from 0 on")
    except TypeError as error:
        raise ValueError(f"{path}: no record of noise floors: {error}") from error
    return found
