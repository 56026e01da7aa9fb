"""Compositions of features: axes of a run, the combinations that make sense, and few of these to train.

axis           a choice of a run, {name: keys of Config}; the usual value comes first
choice         (axis, name)
combination    {axis: name}
core           the axes that composition.problems_of looks at; the others go with everything
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
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

BLOCK_BYTES = 8192
"""Block of a file: every unit of a zoo model has several cuts."""

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


RANKS: dict[Choice, int] = {("node_size", "2"): 4, ("shard_group", "2"): 4, ("zeropp", "hpz"): 4}
"""Choices that do nothing with fewer ranks; two are enough for the others."""


@cache
def legal(n: int) -> list[Combination]:
    """The combinations of the core that make sense at N ranks."""
    return [one for one in core() if not problems_of(one, n)]


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


def drawn_at_random(n: int, count: int) -> list[Combination]:
    """Returns combinations that make sense at N ranks, the same in each run."""
    draw = random.Random(n)
    free = ({axis: draw.choice(list(names)) for axis, names in FREE.items()} for _ in range(count))
    return [draw.choice(legal(n)) | one | {"options": str(number % 3)} for number, one in enumerate(free)]


def low_bit(n: int) -> list[Combination]:
    """Returns the combinations with optimizers whose states have fewer bits."""
    rows = by_strategy(n)
    return [row | {"optimizer": "adamw_bf16" if "nvme" in row["offload"] else "adamw8bit"} for row in rows]
