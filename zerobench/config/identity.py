"""The identity of a cell: its config as stored with a run, without keys at their defaults, and its hashes.

Keys at their defaults are dropped, which leaves the config as it was before the key existed, so a new option does not
change the ids of cells that do not use it. Each Key (zerobench/sections.py) is marked omitted, volatile or local.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import field, fields, make_dataclass
from functools import cache
from typing import Any

from ..data import TEXT_VOCABULARY
from ..sections import Section
from ..strategies import StrategyOptions
from .keys import GROUPS, KEYS, omitted
from .schema import OF_A_SWEEP, SCHEMAS, SECTIONS, Config, Data, Measure, Model
from .schema_training import Optimizer, Precision

VERSION, VERSION_KEY = 2, "schema_version"

BASES: dict[str, type[Section]] = {
    "strategy": StrategyOptions, "model": Model, "data": Data, "optimizer": Optimizer, "precision": Precision,
}  # fmt: skip
"""Group -> base of its schemas, for a choice that this process does not know: a user's, or one of an older version."""

WATCHED = "watched"
"""Kind of the model in a user's watched loop: only the names of its strategy and optimizer are known, no options."""

MOVED = {
    key: key.partition(".")[2]
    for key, declared in KEYS.items()
    if key.startswith("launch.") or (key.startswith("measure.") and declared.volatile)
}
"""Key of a cell -> its name at the top level of the written form."""

DEFAULTS: dict[str, Any] = {MOVED.get(key, key): default for key, default in omitted().items()}
DEFAULTS |= {"nodes": 1, "ranks_per_gpu": 1}
"""Key -> the default at which an identity leaves it out; for a group's choice, with the whole section."""

VOLATILE = (*(MOVED.get(name, name) for name, declared in {**GROUPS, **KEYS}.items() if declared.volatile), VERSION_KEY)
"""Keys that do not change the measurement."""

LOCAL = (*(MOVED.get(name, name) for name, declared in KEYS.items() if declared.local), "nodes", "data.text_hash")
"""Keys that depend on the machine. They change times and losses, but no bytes and no volume."""


def work_id(config: Any) -> str:
    """Returns a hash of the measured work that is the same on any machine: without volatile and local keys."""
    kept = config.as_dict()
    for key in LOCAL:
        _remove(kept, key)
    return cell_id(kept)


def cell_id(written: dict[str, Any]) -> str:
    """Returns the hash of an identity without volatile keys: 12 hex digits."""
    kept = {key: value for key, value in written.items() if key not in VOLATILE}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:12]


def identity(config: Any) -> dict[str, Any]:
    """Returns every key of a cell in its written form, without those at their defaults."""
    compared = [field.name for field in fields(config) if field.compare and field.name not in OF_A_SWEEP]
    own = {name: getattr(config, name) for name in compared}
    written = {name: value.values() if isinstance(value, Section) else value for name, value in own.items()}
    written["model"]["name"] = written.pop("model_name")
    text_hash = written.pop("text_hash")
    if config.data.name == "text":
        written["data"]["vocabulary"] = TEXT_VOCABULARY
    if text_hash is not None:
        written["data"]["text_hash"] = text_hash
    for key, name in MOVED.items():
        section, last = key.split(".")
        written[name] = written[section].pop(last)
    del written["launch"]
    if written["huggingface"] is None:
        del written["huggingface"]
    for key, default in DEFAULTS.items():
        section, _, last = key.rpartition(".")
        if section and section not in written:
            continue
        if (written[section].get(last, default) if section else written[key]) == default:
            _remove(written, section if last == "name" else key)
    return written


def _remove(written: dict[str, Any], key: str) -> None:
    *path, last = key.split(".")
    node = written
    for part in path:
        node = node.get(part) or {}
    node.pop(last, None)


def restore(written: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a cell from its written form, with defaults filled in; version 1 has no version number.

    Unknown keys are kept in sections and dropped at the top level. Raises ValueError for a later version.
    """
    version = written.get(VERSION_KEY, 1)
    if not isinstance(version, int) or version > VERSION:
        raise ValueError(f"{VERSION_KEY}={version}: this code reads up to {VERSION}; use a newer zerobench")
    written = {key: dict(value) if isinstance(value, dict) else value for key, value in written.items()}
    model, data = (section if isinstance(section := written.get(name), dict) else {} for name in ("model", "data"))
    if data.get("name") == "text":
        data.pop("vocabulary", None)
    restored: dict[str, Any] = {"model_name": model.pop("name", None), "text_hash": data.pop("text_hash", None)}
    for key, name in MOVED.items():
        section, last = key.split(".")
        if name in written:
            written.setdefault(section, {})[last] = written.pop(name)
    for declared in fields(Config):
        if declared.name not in OF_A_SWEEP:
            restored[declared.name] = _field(declared.name, written, declared.default)
    if "huggingface" not in written:
        restored["huggingface"] = None
    return restored | {"nodes": written.get("nodes", 1), "ranks_per_gpu": written.get("ranks_per_gpu", 1)}


def _field(name: str, written: dict[str, Any], default: Any) -> Any:
    value = written.get(name, default)
    values: dict[str, Any] = value if isinstance(value, dict) else {}
    if name in SECTIONS or name == "measure":
        return _section(SECTIONS.get(name, Measure), values)
    if name not in SCHEMAS:
        return value
    choices = SCHEMAS[name]
    chosen = values.get("kind" if name == "model" else "name")
    model = written.get("model")
    if name in ("strategy", "optimizer") and isinstance(model, dict) and model.get("kind") == WATCHED:
        return _section(BASES[name], values)
    return _section(choices.get(str(chosen)) or BASES.get(name) or next(iter(choices.values())), values)


def _section(kind: Any, values: dict[str, Any]) -> Section:
    names = [field.name for field in fields(kind)]
    more = tuple(key for key in values if key not in names)
    section: Section = (_extended(kind, more) if more else kind)(**values)
    return section


@cache
def _extended(kind: type, names: tuple[str, ...]) -> type:
    """Returns a section class with options that its schema lacks, as for a user's choice that was not imported."""
    return make_dataclass(kind.__name__, [(name, Any, field(default=None)) for name in names], bases=(kind,))
