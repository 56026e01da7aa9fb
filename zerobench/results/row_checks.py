"""Checks of a run read from files: any program may have written them, and one bad run must not spoil a folder.

Each check returns the end of a message, or "" if the run is valid. A valid run can be sorted, named, summarized and
written again without further checks.
"""

from __future__ import annotations

import json
import re
from dataclasses import MISSING, fields
from datetime import datetime
from functools import cache
from typing import Any, get_type_hints

import pyarrow as pa

from ..config.identity import VERSION, VERSION_KEY
from ..records import SCHEMA_VERSION

IDENTITY = ("run_id", "cell_id", "status", "strategy", "model", "config", "source_hash", "started", "repeat")
"""Columns of a run that must have a value: runs are found, grouped and ordered by them."""

SECTIONS = ("strategy", "model", "precision", "optimizer", "data")
"""Parts of a run's config, each a mapping with a name."""

CHOICES = ("offload", "activation", "buffers", "zeropp")
"""Parts that a config has only if they are not at their default."""

_LARGEST_INT = 2**63

_SURROGATE = re.compile("[\ud800-\udfff]")

_ARROW_KINDS = {
    int: (pa.types.is_integer,),
    float: (pa.types.is_floating, pa.types.is_integer),
    str: (pa.types.is_string, pa.types.is_large_string),
    bool: (pa.types.is_boolean,),
}


@cache
def columns_of(kind: type) -> tuple[tuple[str, type], ...]:
    """Returns column names and base types of a row type; an optional column has its base type."""
    hints = get_type_hints(kind)
    bases = (str, bool, int, float)
    return tuple(
        (f.name, next(t for t in bases if t in getattr(hints[f.name], "__args__", (hints[f.name],))))
        for f in fields(kind)
    )


def problem_of_version(row: dict[str, Any]) -> str:
    """Checks that `row` is of this schema version or an older one."""
    version = row.get("schema_version", 0)
    if not _is(version, int):
        return f"schema_version is {version!r:.60}, which is no version"
    return f"schema_version {version} is newer than {SCHEMA_VERSION}; update zerobench" * (version > SCHEMA_VERSION)  # type: ignore[no-any-return]


def problem_of_columns(row: dict[str, Any], kind: type) -> str:
    """Checks that `row` has the columns of `kind`; an older version may lack newer ones, which are None."""
    older = 0 < int(row.get("schema_version", 0)) < SCHEMA_VERSION
    needed = [one.name for one in fields(kind) if not older or one.default is MISSING]
    missing = [name for name in needed if name not in row]
    return f"it lacks {', '.join(missing[:3])}; an older zerobench wrote it" if missing else ""


def problem_of_values(row: dict[str, Any], kind: type) -> str:
    """Checks that every column of `kind` has a value of its type, or None."""
    for name, base in columns_of(kind):
        value = row.get(name)
        if value is not None and not _is(value, base):
            return f"{name} is {value!r:.60}, which is no {base.__name__}"
    return ""


def problem_of_run(row: dict[str, Any]) -> str:
    """Checks that a run has an identity, a date, and a config with the parts that verbs read."""
    missing = [name for name in IDENTITY if row.get(name) is None]
    if missing:
        return f"{missing[0]} is missing"
    try:
        dated = datetime.fromisoformat(row["started"]).tzinfo is not None
    except ValueError:
        dated = False
    return _problem_of_config(row["config"]) if dated else f"started is {row['started']!r:.60}, which is no date"


def _problem_of_config(text: str) -> str:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        return f"config is {text!r:.60}, which is no JSON"
    if not isinstance(config, dict):
        return f"config is {text!r:.60}, which is no mapping"
    version = config.get(VERSION_KEY, 1)
    if not _is(version, int) or version > VERSION:
        return f"config has {VERSION_KEY} {version!r:.20}, where {VERSION} is the newest; update zerobench"
    for name in (*SECTIONS, *(choice for choice in CHOICES if choice in config)):
        section = config.get(name)
        if not isinstance(section, dict) or not isinstance(section.get("name"), str):
            return f"config lacks {name}.name"
    measure = config.get("measure")
    counts = [measure.get("steps"), measure.get("warmup")] if isinstance(measure, dict) else [None]
    counts += [config.get("world_size", 0), config.get("batch", 0), config.get("accumulation", 0)]
    if not all(one is None or _is(one, int) for one in counts) or not isinstance(measure, dict):
        return "config has another world_size, batch, accumulation or measure than a whole number"
    return ""


def problem_of_table(schema: pa.Schema, kind: type, own: bool) -> str:
    """Checks that a table's columns have the types of `kind`. `own`: it is of one run, whose rows do not name it."""
    if (passed := _PASSED.get((kind, own))) is not None and passed.equals(schema):
        return ""
    problem = _problem_of_columns(schema, kind, own)
    if not problem:
        _PASSED[kind, own] = schema
    return problem


_PASSED: dict[tuple[type, bool], pa.Schema] = {}
"""Kind of a row, and whether of one run -> the columns of the last valid table, which usually fit the next one, too."""


def _problem_of_columns(schema: pa.Schema, kind: type, own: bool) -> str:
    if own and "run_id" in schema.names:
        return "it has a column run_id, which the table of one run has not"
    if len(set(schema.names)) < len(schema.names):
        return "it has a column twice"
    for name, base in columns_of(kind):
        found = schema.field(name).type if name in schema.names else pa.null()
        if not pa.types.is_null(found) and not any(fits(found) for fits in _ARROW_KINDS[base]):
            return f"its column {name} holds {found}, where {base.__name__} belongs"
    return ""


def _is(value: Any, base: type) -> bool:
    """Returns True if a column of this type can store the value, in a table on disk."""
    if base is str:
        return isinstance(value, str) and (value.isascii() or not _SURROGATE.search(value))
    if base is bool or isinstance(value, bool):
        return base is bool and isinstance(value, bool)
    if isinstance(value, int):
        return abs(value) < _LARGEST_INT
    return base is float and isinstance(value, float)
