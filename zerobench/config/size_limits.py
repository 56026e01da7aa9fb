"""Words of a command line before Hydra parses them: limits, sizes in bytes, lists.

limits   too long, too deep, too many cells: refused before anything is parsed or listed
sizes    the value of a key that ends in _bytes may be 25MiB, and is a number of bytes from here on
lists    `launch.group_by=model,world_size` is one value, which Hydra would read as a sweep over two
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

MOST_CHARACTERS = 20_000
DEEPEST = 50
"""Brackets within one another; parsers need a few calls for each."""

MOST_DIGITS = 18
"""Digits of a whole number: more than any column of a table takes."""

MOST_CELLS = 10_000
"""Values of one key, and cells of a sweep, which are all listed before the first is run."""

ENDLESS = "an interval has no end of values; list them, or have a sweeper choose: hydra/sweeper=optuna objective=COLUMN"

_WHOLE = re.compile(r"(?<![\w.])\d+(?![\w.])")


def problem_of(argument: str) -> str:
    """A sentence for a word that no parser should see, else nothing."""
    if len(argument) > MOST_CHARACTERS:
        return f"{argument[:60]}…: it has {len(argument)} characters; at most {MOST_CHARACTERS} are read"
    deepest = depth = 0
    for letter in argument:
        depth += (letter in "([{") - (letter in ")]}")
        deepest = max(deepest, depth)
    if deepest > DEEPEST:
        return f"{argument[:60]}…: it has {deepest} brackets within one another; at most {DEEPEST} are read"
    longest = max(map(len, _WHOLE.findall(argument)), default=0)
    if longest > MOST_DIGITS:
        return f"{argument[:60]}…: a number of {longest} digits; the largest that any key takes has {MOST_DIGITS}"
    return ""


def problem_of_values(override: Override) -> str:
    """A sentence for a range without end, or of no values, else nothing; the range is not listed."""
    value = override.value()
    if not isinstance(value, RangeSweep):
        return ""
    start, stop, step = (float(one or 0) for one in (value.start, value.stop, value.step))
    count = math.ceil((stop - start) / step) if step and math.isfinite(stop - start) else math.inf
    if count > MOST_CELLS:
        return f"{override.input_line}: a range of {count:,} values; a sweep has at most {MOST_CELLS:,} cells"
    return f"{override.input_line}: a range without a value" if count < 1 else ""


def problem_of_count(counts: Mapping[str, int]) -> str:
    """An error message if keys with so many values each make more cells than are listed, else nothing."""
    cells, keys = math.prod(counts.values()), [key for key, count in counts.items() if count > 1]
    return f"{', '.join(keys)}: {cells:,} cells; at most {MOST_CELLS:,} are listed" if cells > MOST_CELLS else ""


def extremes(values: Sequence[Any]) -> Sequence[Any]:
    """The values to be tried in a key's place: of whole numbers the least and the largest stand for all."""
    return sorted({min(values), max(values)}) if values and all(type(one) is int for one in values) else values


def problem_of_folder(line: str, value: Any) -> str:
    """An error message if `value` names no folder that is there or can be made, else nothing."""
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
"""A number and a unit, in quotes or not, as one value or one of several."""


def in_bytes(argument: str) -> str:
    """Returns an override with the sizes of a key in bytes as whole numbers, and any other override as it is."""
    key, equals, value = argument.partition("=")
    if not equals or not key.endswith(SUFFIX):
        return argument
    return f"{key}={_SIZE.sub(lambda found: str(parse_bytes(found[2])), value)}"


ONE_VALUE = {"launch.group_by": "'{}'", "launch.retry": "[{}]", "objective": "'{}'"}
"""Key -> its value for Hydra, around the words."""

OPENINGS = ("'", '"', "[", "$", "null")
"""Beginnings of values that are written as Hydra wants them."""


def in_one(word: str) -> str:
    """Returns an override of the command line, with the words of such a key as one value."""
    key, equals, value = word.partition("=")
    around = ONE_VALUE.get(key.lstrip("+"))
    if around is None or not value.strip() or value.lstrip().startswith(OPENINGS):
        return word
    return f"{key}{equals}{around.format(value)}"
