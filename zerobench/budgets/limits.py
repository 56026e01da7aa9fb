"""Parses a marker: its options and manual limits.

limit    [<= | >= | ==] size [± 2 %]     exact without an operator, as in budget files; `leaks` is a ceiling
size     term + term ...                 "24 GiB", "16 psi + 2 unit", "12/4 psi"
term     a number or fraction with a unit; a bare number is in bytes, for a volume in ψ

B, KiB, MiB, GiB, TiB, KB, MB, GB, TB
psi    the parameters of the whole model, on whichever ranks they are: in bytes, 1 B per parameter ("16 psi" is 16 B per
       parameter); in a volume, 1 element per parameter
unit   the bytes of the largest unit: the largest group of parameters that FSDP2 gathers, or else the largest block
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from ..records import CATEGORIES, COLLECTIVES
from ..sizes import SIZES
from .judge import Limit

METRICS = {
    "peak": "peak_bytes",
    "states": "states_bytes",
    "leaks": "growth_bytes",
    **{category: f"max_{category}_bytes" for category in CATEGORIES},
    "volume": "volume_psi",
    **{collective: f"volume_{collective}_psi" for collective in COLLECTIVES},
    "wire": "wire_bytes",
    "control": "control_bytes",
}
"""A marker's argument -> the column of runs that it limits; the column's own name works as well."""

COLUMNS = tuple(METRICS.values())

_LIMIT = re.compile(r"(<=|>=|==)?\s*([^±<>=]+?)\s*(?:±\s*([0-9]*\.?[0-9]+)\s*%)?")
_PLUS = re.compile(r"(?<![0-9][eE])\+")  # not that of an exponent
_TERM = re.compile(r"([0-9]*\.?[0-9]+(?:e[-+]?[0-9]+)?)\s*(?:/\s*([0-9]*\.?[0-9]+))?\s*([a-zψ]*)", re.IGNORECASE)
_PSI, _UNIT = ("psi", "ψ"), ("unit", "units")
_FORMS = '"<= 24 GiB", "<= 16 psi + 2 unit", "30 MiB ± 2 %"'
_BYTES = "B, KiB, MiB, GiB, KB, MB, GB, psi or unit"


class GateError(ValueError):
    """A test requests something that the gate cannot provide; the message says what."""


@dataclass(frozen=True)
class Sizes:
    """A model's sizes: `psi` parameters, and `unit` bytes of its largest unit."""

    psi: int
    unit: int


@dataclass(frozen=True)
class HandLimit:
    """A limit as written. `bound`: as in judge.Limit; `terms`: factors of units."""

    metric: str
    written: str
    bound: str
    terms: tuple[tuple[float, str], ...]
    tolerance: float

    def of(self, sizes: Sizes) -> Limit:
        """Returns the limit for a model of these sizes."""
        of_unit = {"psi": sizes.psi if self.metric.endswith("_bytes") else 1, "unit": sizes.unit}
        value = sum(factor * (of_unit.get(unit) or SIZES.get(unit, 0)) for factor, unit in self.terms)
        return Limit(float(round(value)) if self.metric.endswith("_bytes") else value, self.bound, self.tolerance)


def parse_hand(argument: str, value: Any) -> HandLimit:
    """Parses a limit of a marker. Raises GateError, which names the closest argument if there is no such."""
    metric = METRICS.get(argument, argument)
    if metric not in COLUMNS:
        near = get_close_matches(argument, [*METRICS, *OPTIONS], n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        options = f"limits are {', '.join(METRICS)}; options are {', '.join(OPTIONS)}"
        raise GateError(f"zerobench: {argument} is no limit and no option; {hint}{options}")
    written = f'{argument}="{value}"' if isinstance(value, str) else f"{argument}={value!r:.60}"
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise GateError(f"zerobench: {written} is no limit; write a number or words, as {_FORMS}")
    match = _LIMIT.fullmatch(str(value).strip())
    if match is None:
        raise GateError(f"zerobench: {written} is no limit; write <=, >= or nothing and a size, as {_FORMS}")
    terms = tuple(_term(written, metric, part.strip()) for part in _PLUS.split(match[2]))
    bound = match[1] or ("<=" if metric == "growth_bytes" else "")
    return HandLimit(metric, written, bound.replace("==", ""), terms, float(match[3] or 0) / 100)


def _term(written: str, metric: str, text: str) -> tuple[float, str]:
    match = _TERM.fullmatch(text)
    factor = float(match[1]) / float(match[2] or 1) if match and float(match[2] or 1) else math.nan
    if match is None or not math.isfinite(factor):
        raise GateError(f"zerobench: {written}: {text!r:.40} is no size; write a number and a unit, as {_FORMS}")
    unit = match[3].lower()
    unit = "psi" if unit in _PSI else "unit" if unit in _UNIT else unit
    if metric.endswith("_psi"):
        if unit not in ("", "psi"):
            raise GateError(
                f"zerobench: {written}: a volume is counted in psi, elements per parameter; wire= is in bytes"
            )
        return factor, "psi"
    if unit not in ("", "psi", "unit") and unit not in SIZES:
        raise GateError(f"zerobench: {written}: {match[3]} is no unit; it is {_BYTES}")
    return factor, unit or "b"


MOST_RANKS = 64

OPTIONS = ("ranks", "timeout_s", "recorded")
"""Arguments of the marker that are not limits."""


@dataclass(frozen=True)
class Request:
    """Limits and options of a test."""

    limits: tuple[HandLimit, ...]
    recorded: bool
    """If true, the test is compared with its record."""
    ranks: int | None = None
    """None for a test in this process."""
    timeout_s: float = 300.0


def read(markers: Iterable[Any]) -> Request:
    """Reads a test's markers, the closest first, which takes precedence. Raises GateError."""
    arguments: dict[str, Any] = {}
    for marker in reversed(list(markers)):
        if marker.args:
            raise GateError(f'zerobench: {marker.args[0]!r:.60} has no name; write limits as peak="<= 24 GiB"')
        arguments |= marker.kwargs
    ranks, timeout_s = arguments.pop("ranks", None), arguments.pop("timeout_s", 300.0)
    if ranks is not None and (type(ranks) is not int or not 1 <= ranks <= MOST_RANKS):
        raise GateError(f"zerobench: ranks={ranks!r:.60}; it is a whole number from 1 to {MOST_RANKS}")
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s > 0:
        raise GateError(f"zerobench: timeout_s={timeout_s!r:.60}; it is a number of seconds above 0")
    recorded = arguments.pop("recorded", None)
    if recorded not in (None, True, False):
        raise GateError(f"zerobench: recorded={recorded!r:.60}; it is True or False")
    limits = hand_limits(arguments)
    if recorded is False and not limits:
        raise GateError("zerobench: recorded=False and no limit: there is nothing to hold the test against")
    return Request(limits, not limits if recorded is None else recorded, ranks, timeout_s)


def hand_limits(arguments: Mapping[str, Any]) -> tuple[HandLimit, ...]:
    """Reads manual limits. Raises GateError."""
    limits = tuple(parse_hand(argument, value) for argument, value in arguments.items())
    metrics = [limit.metric for limit in limits]
    for limit in limits:
        if metrics.count(limit.metric) > 1:
            raise GateError(f"zerobench: {limit.written}: {limit.metric} has two limits")
    return limits
