"""Compositions of features: axes of a run, the combinations that make sense, and few of these that hold every pair.

axis           a choice of a run, {name: keys of Config}; the usual value comes first
choice         (axis, name)
combination    {axis: name}
pair           two choices of one combination, in the order of the axes
core           the axes that composition.problems_of looks at; the others go with everything
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations, product
from typing import Any

import zerobench
from tests import zoo
from tests.cells import MODELS, cell
from zerobench.config import combinations as composition
from zerobench.config import schema_memory, schema_training
from zerobench.config.cell import Cell, CellConfig
from zerobench.config.schema import Gpt, Model
from zerobench.registry import MODELS as REGISTRY

Choice = tuple[str, str]
Combination = dict[str, str]
Pair = tuple[Choice, Choice]

BLOCK_BYTES = 8192
"""Of files: every unit of a zoo model has several cuts."""

STRATEGIES: dict[str, list[dict[str, Any]]] = {
    "zero1": [{}, {"mode": "vendor"}, {"accumulate": "every"}],
    "zero2": [{}, {"overlap_gather": True, "accumulate": "last"}, {"mode": "vendor"}],
    "zero3": [{}, {"persistence_numel": 60, "prefetch": 2}, {"mode": "paper", "prefetch": 0, "accumulate": "last"}],
}
"""Name -> options that combinations have by turns."""


def _files(**more: Any) -> schema_memory.NvmeOffloadConfig:
    return schema_memory.NvmeOffloadConfig(block_bytes=BLOCK_BYTES, buffers=8, depth=2, **more)


CORE: dict[str, dict[str, dict[str, Any]]] = {
    "offload": {
        "none": {},
        "cpu": {"offload": schema_memory.CpuOffload()},
        "cpu, states stay": {"offload": schema_memory.CpuOffload(optimizer=False)},
        "cpu, gradients stay": {"offload": schema_memory.CpuOffload(gradients=False)},
        "cpu, 0.4": {"offload": schema_memory.CpuOffload(fraction=0.4)},
        "cpu, delayed": {"offload": schema_memory.CpuOffload(delayed=True, delayed_after=1)},
        "cpu, parameters": {"offload": schema_memory.CpuOffload(parameters=True)},
        "cpu, parameters alone": {
            "offload": schema_memory.CpuOffload(optimizer=False, gradients=False, parameters=True)
        },
        "nvme": {"offload": _files()},
        "nvme, gradients stay": {"offload": _files(gradients=False)},
        "nvme, parameters stay": {"offload": _files(parameters=False)},
        "nvme, 0.4": {"offload": _files(fraction=0.4)},
        "nvme, parameters alone": {"offload": _files(optimizer=False, gradients=False, parameters=True)},
    },
    "activation": {
        "none": {},
        "checkpoint": {"activation": schema_memory.CheckpointActivations()},
        "selective": {"activation": schema_memory.SelectiveActivations()},
        "offload": {"activation": schema_memory.OffloadActivations(least_bytes=256)},
        "checkpoint_offload": {"activation": schema_memory.CheckpointOffloadActivations(least_bytes=256)},
    },
    "arena": {"no": {}, "yes": {"arena": True}},
    "buffers": {"constant": {}, "fused": {"buffers": schema_memory.FusedBuffers()}},
    "precision": {
        "fp32": {"precision": schema_training.Fp32(tile_bytes=4096)},
        "bf16": {"precision": schema_training.Bf16(tile_bytes=4096)},
        "bf16, wide": {"precision": schema_training.Bf16(tile_bytes=2048, gradient_dtype="fp32", wire_dtype="bf16")},
        "fp16": {"precision": schema_training.Fp16(tile_bytes=4096, initial_scale=1024.0, interval=2)},
    },
    "node_size": {"none": {}, "2": {"node_size": 2}},
    "shard_group": {"none": {}, "2": {"shard_group": 2}},
    "zeropp": {
        "none": {},
        "qwz": {"zeropp": schema_memory.Qwz()},
        "hpz": {"zeropp": schema_memory.Hpz()},
        "qgz": {"zeropp": schema_memory.Qgz()},
        "all": {"zeropp": schema_memory.AllOfZeropp(weight_block=64, gradient_block=64)},
    },
}

FREE: dict[str, dict[str, dict[str, Any]]] = {
    "clip": {"none": {}, "0.1": {"clip": 0.1}, "inf": {"clip": 0.01, "clip_norm": "inf"}},
    "accumulation": {"1": {}, "2": {"accumulation": 2}},
    "optimizer": {
        "adamw": {"optimizer": schema_training.AdamW(lr=1e-2)},
        "sgd": {"optimizer": schema_training.Sgd(lr=1e-2, momentum=0.9, implementation="loop")},
    },
    "model": {"tied": {}, "unused": {}, "adapted": {}, "tiled": {}},
}

LOW_BIT: dict[str, dict[str, Any]] = {
    "adamw8bit": {"optimizer": schema_training.Adamw8bit(lr=1e-2)},
    "adamw_bf16": {"optimizer": schema_training.AdamwBf16(lr=1e-2)},
}
"""Optimizers that do not go with every choice, the first not with files."""


def tied():
    return zoo.MODELS["tied"]()


def unused():
    return zoo.MODELS["unused"]()


def adapted():
    return zoo.MODELS["adapted"]()


for builder in (tied, unused, adapted):
    zerobench.register_model(builder.__name__, builder)
    MODELS[builder.__name__] = REGISTRY.schema_of(builder.__name__, builder, Model)()

MODELS["tiled"] = Gpt(layers=2, hidden=12, heads=2, tied=False, tiles=3)


def keys_of(chosen: Combination) -> dict[str, Any]:
    """The keys of Config that a combination means, without its strategy and model."""
    axes = CORE | FREE | {"optimizer": FREE["optimizer"] | LOW_BIT}
    return {key: value for axis in axes if axis in chosen for key, value in axes[axis][chosen[axis]].items()}


def cell_of(chosen: Combination, n: int) -> Cell:
    """The whole way from a config."""
    options = STRATEGIES[chosen["strategy"]][int(chosen.get("options", "0"))]
    return cell(chosen["strategy"], n, chosen["model"], bucket_bytes=4096, strategy=dict(options), **keys_of(chosen))


def problems_of(chosen: Combination, n: int) -> list[str]:
    """Returns the config's sentences on a combination of the core: as `cell_of`, a hundred times as fast."""
    base = _base(chosen["strategy"], chosen["precision"], n)
    config = object.__new__(CellConfig)  # `replace` would freeze every section again, for each of 200,000 combinations
    vars(config).update(vars(base), **_keys_of_core(chosen))
    return composition.validate(config)


def config_of(chosen: Combination, n: int) -> CellConfig:
    """A combination of the core as a config whose axes nobody has looked at together."""
    return replace(_base(chosen["strategy"], chosen["precision"], n), **_keys_of_core(chosen))


def _keys_of_core(chosen: Combination) -> dict[str, Any]:
    return {
        key: value for axis, names in CORE.items() if axis != "precision" for key, value in names[chosen[axis]].items()
    }


@cache
def _base(strategy: str, precision: str, n: int) -> CellConfig:
    return cell_of({"strategy": strategy, "precision": precision, "model": "tied"}, n).config


def core() -> Iterator[Combination]:
    """The whole cross product of what may be refused."""
    names = ("strategy", *CORE)
    for values in product(STRATEGIES, *CORE.values()):
        yield dict(zip(names, values, strict=True))


PLACES = ("offload", "activation", "arena", "buffers")
"""Axes that (but for late updates) do not change what is trained."""

WORLDS = (4, 2, 1)
"""Numbers of ranks that combinations are tried with, by turns: first what needs the most."""

RANKS: dict[Choice, int] = {("node_size", "2"): 4, ("shard_group", "2"): 4, ("zeropp", "hpz"): 4}
"""Choices that do nothing with fewer ranks; two are enough for the others."""

ALONE = {
    "offload": ("none", "cpu", "cpu, 0.4", "cpu, delayed", "cpu, parameters", "nvme", "nvme, gradients stay"),
    "zeropp": ("none",),
}
"""Values of an axis that are tried on one rank too, without communication."""


@cache
def legal(n: int) -> list[Combination]:
    """The combinations of the core that make sense at N ranks."""
    return [one for one in core() if not problems_of(one, n)]


@cache
def pairs(n: int) -> dict[Pair, None]:
    """Every pair that occurs in a combination that makes sense at N ranks."""
    found: dict[Pair, None] = {}
    for one in legal(n):
        found |= dict.fromkeys(combinations(one.items(), 2))
    cores = dict.fromkeys(choice for pair in found for choice in pair)
    free = [(axis, name) for axis, values in FREE.items() for name in values]
    found |= dict.fromkeys(product(cores, free))
    return found | dict.fromkeys(pair for pair in combinations(free, 2) if pair[0][0] != pair[1][0])


@cache
def coverings() -> dict[int, list[Combination]]:
    """N -> combinations that make sense there: together they hold every pair that makes sense at any N. Four ranks,
    which take the longest, have what two cannot; one rank has what is left, and what may differ where nobody else is.
    """
    missing = {pair: None for n in WORLDS for pair in pairs(n)}
    rows = {}
    for n in WORLDS:
        own = [pair for pair in pairs(n) if pair in missing and max(RANKS.get(choice, 2) for choice in pair) >= n]
        rows[n] = _cover(n, dict.fromkeys(own + (list(_alone()) if n == 1 else [])))
        for pair in (pair for row in rows[n] for pair in combinations(row.items(), 2)):
            missing.pop(pair, None)
    return rows


def by_strategy(n: int) -> list[Combination]:
    """Few combinations that make sense at N ranks: every choice occurs with every strategy that it can occur with, but
    those of `offload`, which are the most, with one of them each.
    """
    drawn, rows = random.Random(n), []
    possible = [one for one in legal(n) if all(RANKS.get(choice, n) <= n for choice in one.items())]
    for strategy in STRATEGIES:
        own = [one for one in possible if one["strategy"] == strategy]
        missing = {choice for one in own for choice in one.items()} - {("offload", row["offload"]) for row in rows}
        while any(axis != "offload" or strategy == list(STRATEGIES)[-1] for axis, _ in missing):
            best = max(drawn.sample(own, 400), key=lambda one: len(missing & one.items()))
            missing -= best.items()
            free = {axis: list(names)[len(rows) % len(names)] for axis, names in FREE.items()}
            rows.append(best | free | {"options": str(len(rows) % 3)})
    return rows


def low_bit(n: int) -> list[Combination]:
    """Returns the combinations with optimizers whose states have fewer bits."""
    rows = by_strategy(n)
    return [row | {"optimizer": "adamw_bf16" if "nvme" in row["offload"] else "adamw8bit"} for row in rows]


def _alone() -> Iterator[Pair]:
    return (pair for pair in pairs(1) if all(name in ALONE.get(axis, (name,)) for axis, name in pair))


def _cover(n: int, missing: dict[Pair, None], tries: int = 60) -> list[Combination]:
    """Combinations of all axes that make sense at N ranks and hold every pair of `missing`: greedily, always the same.

    For the first pair that is missing, of 2 · `tries` combinations with it the one that brings most that are missing
    for its time: a combination that trains as an earlier one needs no other reference.
    """
    drawn, rows, trained = random.Random(n), [], set()
    while missing:
        pair = dict(next(iter(missing)))
        own = [(axis, name) for axis, name in pair.items() if axis not in FREE]
        fitting = [one for one in legal(n) if all(one[axis] == name for axis, name in own)]
        free = ({axis: drawn.choice(list(values)) for axis, values in FREE.items()} for _ in range(tries))
        options = {"options": str(len(trained) % 3)}
        fresh = [drawn.choice(fitting) | one | pair | options for one in free]
        again = [drawn.choice(rows) | {axis: one[axis] for axis in PLACES} for one in fresh if rows]
        again = [one for one in again if one.items() >= pair.items() and not problems_of(one, n)]
        best = max(fresh + again, key=lambda one: _brings(one, missing) / (1 if _training(one) in trained else 2))
        for found in combinations(best.items(), 2):
            missing.pop(found, None)
        rows.append(best)
        trained.add(_training(best))
    return rows


def _brings(one: Combination, missing: dict[Pair, None]) -> int:
    return sum(pair in missing for pair in combinations(one.items(), 2))


def _training(one: Combination) -> frozenset[Choice]:
    return frozenset(choice for choice in one.items() if choice[0] not in PLACES)
