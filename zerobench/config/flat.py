"""An identity, as rows have it, as one level of keys: "optimizer.lr"."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from .identity import DEFAULTS, LOCAL, VOLATILE

IDENTITY = ("name", "kind")
"""Keys that say which choice of a group a section is."""

LEFT_OUT = {key.removesuffix(".name"): name for key, name in DEFAULTS.items() if key.endswith(".name")}
"""Group -> the choice that an identity does not name."""

OPTIONS = (
    "deterministic", "draw_on", "measure.passes", "measure.trace", "measure.snapshot", "measure.events",
    "model.tiles",
)  # fmt: skip
"""Keys that an identity leaves out at their defaults, and that are told as these all the same."""


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Key -> value, less what is volatile."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if name in VOLATILE:
            continue
        if isinstance(value, dict):
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = value
    return flat


def by_key(config: dict[str, Any]) -> dict[str, Any]:
    """Key -> value as on a command line: a group's own word is its choice, and what is as usual is there, too."""
    usual = {key: DEFAULTS[key] for key in OPTIONS}
    there = {key: value for key, value in usual.items() if "." not in key or key.split(".")[0] in config}
    groups = {name: one.get("name") for name, one in config.items() if isinstance(one, dict) and "name" in one}
    own = {key: value for key, value in flatten(config).items() if key.split(".")[-1] not in IDENTITY}
    return LEFT_OUT | there | groups | own


def swept(configs: Sequence[str], beside: Iterable[str] = ()) -> dict[str, list[Any]]:
    """Keys in which configs (JSON) of the same choices differ, and the choices that differ: key -> a value for each
    config, None where it has no such key. Less the keys `beside`, which the caller has columns for.
    """
    every = [by_key(json.loads(text)) for text in configs]
    keys = [key for key in dict.fromkeys(key for one in every for key in one) if key not in {*beside, *LOCAL}]
    found = {}
    for key in keys:
        by_choice: dict[Any, set[str]] = {}
        for one in every:
            by_choice.setdefault(one.get(key.split(".")[0]) if "." in key else None, set()).add(str(one.get(key)))
        if any(len(values) > 1 for values in by_choice.values()):
            found[key] = [one.get(key) for one in every]
    return found
