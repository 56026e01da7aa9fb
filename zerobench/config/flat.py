"""Flattens an identity, as stored in rows, to keys such as "optimizer.lr", and derives short unique names."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from ..host.environment import SIMULATED
from .cell import DEFAULTS, LOCAL, VOLATILE, CellConfig
from .keys import IDENTITY
from .schema import Gpt

LEFT_OUT = {key.removesuffix(".name"): name for key, name in DEFAULTS.items() if key.endswith(".name")}
"""Group -> the choice that an identity does not name."""

OPTIONS = (
    "deterministic", "draw_on", "measure.passes", "measure.trace", "measure.snapshot", "measure.events",
    "measure.save", "measure.save_every", "model.tiles",
)  # fmt: skip
"""Keys that an identity leaves out at their defaults, but that are reported with those defaults."""


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Key -> value, without volatile keys."""
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
    """Key -> value as on a command line: a group's key has its choice, and defaults are included."""
    usual = {key: DEFAULTS[key] for key in OPTIONS}
    there = {key: value for key, value in usual.items() if "." not in key or key.split(".")[0] in config}
    groups = {name: part.get("name") for name, part in config.items() if isinstance(part, dict) and "name" in part}
    own = {key: value for key, value in flatten(config).items() if key.split(".")[-1] not in IDENTITY}
    return LEFT_OUT | there | groups | own


def swept(configs: Sequence[str], beside: Iterable[str] = ()) -> dict[str, list[Any]]:
    """Keys in which configs (JSON) of the same choices differ, and choices that differ: key -> a value for each config,
    None if it has no such key. Leaves out the keys `beside`, for which the caller has columns.
    """
    every = [by_key(json.loads(text)) for text in configs]
    keys = [key for key in dict.fromkeys(key for config in every for key in config) if key not in {*beside, *LOCAL}]
    differing = {}
    for key in keys:
        by_choice: dict[Any, set[str]] = {}
        for config in every:
            by_choice.setdefault(config.get(key.split(".")[0]) if "." in key else None, set()).add(str(config.get(key)))
        if any(len(values) > 1 for values in by_choice.values()):
            differing[key] = [config.get(key) for config in every]
    return differing


DERIVED = ("micro_batch", "data.vocabulary", "model.positions", "model.vocabulary")
"""Keys that follow from the base name or from another key."""


def base_name(cell: CellConfig) -> str:
    """ "zero2 gpt_small N=2 b=8", with a=4 if it accumulates, "recomputed" if blocks are and "tuned" if another
    library's strategy is; plus a simulated world, several machines, a precision other than fp32 and an optimizer other
    than adamw.
    """
    name = f"{cell.strategy.name} {cell.model_name} N={cell.world_size} b={cell.batch}"
    if cell.accumulation not in (1, None):
        name += f" a={cell.accumulation}"
    name += " recomputed" if cell.model.checkpoints and cell.activation.name == "none" else ""
    name += f" tiles={cell.model.tiles}" if isinstance(cell.model, Gpt) and cell.model.tiles != 1 else ""
    name += " tuned" if cell.strategy.is_tuned else ""
    name += " simulated" if cell.backend == SIMULATED else ""
    name += f" nodes={cell.nodes}" if cell.nodes > 1 else ""
    name = " ".join(filter(None, [name, cell.systems_label]))
    usual = (("fp32", cell.precision.label), ("adamw", cell.optimizer.name))
    return " ".join([name, *(chosen for default, chosen in usual if chosen and chosen != default)])


def name_cells(cells: Sequence[CellConfig]) -> list[str]:
    """Returns a name for each cell; equal base names get the keys in which their cells differ, local keys last."""
    names = [base_name(cell) for cell in cells]
    flat = [flatten(cell.as_dict()) for cell in cells]
    names = _told_apart(names, [{k: v for k, v in config.items() if k not in (*LOCAL, *DERIVED)} for config in flat])
    return _told_apart(names, [{k: v for k, v in config.items() if k in LOCAL} for config in flat])


def _told_apart(names: list[str], configs: list[dict[str, Any]]) -> list[str]:
    """Returns the names, with the keys in which flat configs differ appended to equal names."""
    groups = defaultdict(list)
    for index, name in enumerate(names):
        groups[name].append(index)
    names = list(names)
    for base, indices in groups.items():
        flat = [configs[index] for index in indices]
        differing = [k for k in dict.fromkeys(k for f in flat for k in f) if len({str(f.get(k)) for f in flat}) > 1]
        for index, options in zip(indices, flat, strict=True):
            parts = [f"{key.split('.', 1)[-1]}={show_value(options[key])}" for key in differing if key in options]
            names[index] = " ".join([base, *parts])
    return names


def differences(a: CellConfig, b: CellConfig) -> dict[str, tuple[Any, Any]]:
    """Non-volatile keys in which two cells differ: key -> (value in `a`, value in `b`)."""
    first, second = flatten(a.as_dict()), flatten(b.as_dict())
    keys = dict.fromkeys([*first, *second])
    return {k: (first.get(k), second.get(k)) for k in keys if first.get(k) != second.get(k)}


def show_value(value: Any) -> str:
    """Formats a config's value as on a command line."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def name_strategies(cells: Sequence[CellConfig]) -> list[str]:
    """Names cells that agree except in their strategy by that strategy, plus the keys in which equal names differ."""
    flat = [by_key(cell.as_dict()) for cell in cells]
    chosen = [key for key in LEFT_OUT if len({config.get(key) for config in flat}) > 1]
    names = [cell.strategy.name + (" tuned" if cell.strategy.is_tuned else "") for cell in cells]
    unsaid = (*LOCAL, *DERIVED, "batch", "strategy")
    told = [
        {key: value for key, value in config.items() if key not in unsaid and key.split(".")[0] not in chosen}
        | {key: config.get(key) for key in chosen}  # a choice says what its keys are
        for config in flat
    ]
    names = _told_apart(names, told)
    # cells with the same choice differ in its keys
    names = _told_apart(names, [{key: config[key] for key in config if key not in unsaid} for config in flat])
    return _told_apart(names, [{"micro_batch": config.get("micro_batch")} for config in flat])
