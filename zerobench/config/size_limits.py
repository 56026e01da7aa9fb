"""Handles words of a command line before Hydra parses them: limits, sizes in bytes, lists.

limits   integers that no column holds, too many cells: rejected before anything is listed
sizes    the value of a key that ends in _bytes may be 25MiB, and is converted to bytes here
lists    `launch.retry=crash,oom` is one value, which Hydra would parse as a sweep over two
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override, RangeSweep

from ..sizes import parse_bytes

MOST_DIGITS = 18
"""Maximum digits of an integer, more than any table column supports."""

MOST_CELLS = 10_000
"""Maximum number of values of a key, and of cells of a sweep, all of which are listed before the first runs."""

ENDLESS = "an interval has no end of values; list them, or have a sweeper choose: hydra/sweeper=optuna objective=COLUMN"

_WHOLE = re.compile(r"(?<![\w.])\d+(?![\w.])")


def problem_of(argument: str) -> str:
    """Returns an error message for an override with an integer that no column of a table holds, else ""."""
    longest = max(map(len, _WHOLE.findall(argument)), default=0)
    if longest > MOST_DIGITS:
        return f"{argument[:60]}…: a number of {longest} digits; the largest that any key takes has {MOST_DIGITS}"
    return ""


def problem_of_values(override: Override) -> str:
    """Returns an error message for a range that is infinite, too long or empty, else ""; does not list the range."""
    value = override.value()
    if not isinstance(value, RangeSweep):
        return ""
    start, stop, step = (float(bound or 0) for bound in (value.start, value.stop, value.step))
    count = (stop - start) / step if step else math.inf  # not finite for a subnormal step, inf or nan
    if not math.isfinite(count):
        return f"{override.input_line}: a range without end; a sweep has at most {MOST_CELLS:,} cells"
    if count > MOST_CELLS:
        return (
            f"{override.input_line}: a range of {math.ceil(count):,} values; a sweep has at most {MOST_CELLS:,} cells"
        )
    return f"{override.input_line}: a range without a value" if count <= 0 else ""


def problem_of_count(counts: Mapping[str, int]) -> str:
    """Returns an error message if keys with these numbers of values make more cells than are listed, else ""."""
    cells, keys = math.prod(counts.values()), [key for key, count in counts.items() if count > 1]
    return f"{', '.join(keys)}: {cells:,} cells; at most {MOST_CELLS:,} are listed" if cells > MOST_CELLS else ""


def extremes(values: Sequence[Any]) -> Sequence[Any]:
    """Returns the values of a key to check: for integers, the smallest and largest represent all."""
    return sorted({min(values), max(values)}) if values and all(type(value) is int for value in values) else values


def problem_of_folder(line: str, value: Any) -> str:
    """Returns an error message if `value` names no folder that exists or can be created, else ""."""
    if not isinstance(value, str) or not value:
        return f"{line}: name a folder"
    if "${" in value:
        return ""
    where = Path(value).expanduser().absolute()
    try:
        existing = next(p for p in (where, *where.parents) if p.exists())
        writable = existing.is_dir() and os.access(existing, os.W_OK)
    except (OSError, ValueError) as error:
        return f"{line}: it is no folder's name: {getattr(error, 'strerror', None) or error}"
    return "" if writable else f"{line}: {existing} is no folder that can be written to"


SUFFIX = "_bytes"

_SIZE = re.compile(r"""(?<![\w.])(['"]?)([0-9]*\.?[0-9]+\s*[kmgt]i?b)\1(?![\w.])""", re.IGNORECASE)
"""A number and a unit, quoted or not, as a single value or one of several."""


def in_bytes(argument: str) -> str:
    """Returns an override with sizes converted to bytes if its key ends in _bytes; other overrides unchanged."""
    key, equals, value = argument.partition("=")
    if not equals or not key.endswith(SUFFIX):
        return argument
    return f"{key}={_SIZE.sub(lambda found: str(parse_bytes(found[2])), value)}"


ONE_VALUE = {"launch.retry": "[{}]", "objective": "'{}'"}
"""Key -> format of its value for Hydra."""

OPENINGS = ("'", '"', "[", "$", "null")
"""Beginnings of values that are already in Hydra's form."""


def in_one(word: str) -> str:
    """Returns an override with the words of a key in ONE_VALUE as one value; other overrides unchanged."""
    key, equals, value = word.partition("=")
    around = ONE_VALUE.get(key.lstrip("+"))
    if around is None or not value.strip() or value.lstrip().startswith(OPENINGS):
        return word
    return f"{key}{equals}{around.format(value)}"
