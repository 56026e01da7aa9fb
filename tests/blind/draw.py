"""Cells drawn by a seed: three kinds of model, every strategy that a CPU has, two to four ranks, options mixed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from tests.cells import MODELS, cell
from zerobench.config import schema, schema_memory, schema_training
from zerobench.config.cell import CellConfig
from zerobench.config.schema import Measure
from zerobench.strategies import spec_of, specs

CELLS = 30

STRATEGIES = [name for name, spec in specs().items() if spec.requires is None and not spec.of_user]

KINDS = ("gpt", "mlp", "transformers")

TRIES = 200

FOR_DTENSORS = ("sgd", "adam", "adamw", "asgd", "rmsprop", "adadelta")
"""Optimizers whose operators torch has for DTensors: with Rprop, say, a cell of FSDP2 fails, in a run as well."""


@dataclass(frozen=True)
class Drawn:
    """`words`: the choices as on a command line, for people."""

    number: int
    words: str
    config: CellConfig


def draw(seed: int, cells: int = CELLS) -> list[Drawn]:
    """Returns the cells of a seed, always the same: each strategy and kind of model in turn, all else by chance."""
    chance = random.Random(f"blind {seed}")
    strategies = [STRATEGIES[number % len(STRATEGIES)] for number in range(cells)]
    chance.shuffle(strategies)
    return [_cell(chance, number, strategies[number], KINDS[number % len(KINDS)]) for number in range(cells)]


def _cell(chance: random.Random, number: int, strategy: str, kind: str) -> Drawn:
    for _ in range(TRIES):
        model, options = _model(chance, kind), _options(chance, strategy)
        n = chance.randint(2, 4)
        if options.pop("nodes", False) and n == 4:
            options |= {"node_size": 2}
        MODELS["blind"] = model.pop("schema")
        one = cell(strategy, n, "blind", measure=Measure(1, 2, passes="accounted"), **model, **dict(options))
        if not one.problems:
            return Drawn(number, _words(strategy, n, MODELS["blind"], {**model, **options}), one.config)
    raise AssertionError(f"{strategy}: no cell that makes sense in {TRIES} draws: {one.problems}")


def _model(chance: random.Random, kind: str) -> dict[str, Any]:
    heads = chance.choice((1, 2, 4))
    layers, hidden = chance.randint(1, 4), heads * chance.choice((8, 12, 18, 24))
    vocabulary = chance.choice((256, 301, 777, 2000))
    if kind == "mlp":
        return {
            "schema": schema.Mlp(layers=layers + 1, hidden=chance.choice((33, 70, 128, 190)), vocabulary=vocabulary)
        }
    if kind == "gpt":
        tied, checkpointing = chance.random() < 0.5, chance.random() < 0.2
        return {
            "schema": schema.Gpt(
                layers=layers, hidden=hidden, heads=heads, vocabulary=vocabulary, tied=tied, checkpointing=checkpointing
            )
        }
    architecture = chance.choice(("gpt2", "llama", "gpt_neox", "opt"))
    shape = schema.Huggingface(architecture, layers, hidden, heads, vocabulary)
    return {"schema": schema.HuggingfaceModel(), "huggingface": shape}


def _options(chance: random.Random, strategy: str) -> dict[str, Any]:
    spec = spec_of(strategy)
    precisions: list[schema_training.Precision] = [schema_training.Fp32(), schema_training.Bf16()]
    shards = strategy.startswith("fsdp2")
    optimizers = [one for name, one in schema_training.OPTIMIZERS.items() if not shards or name in FOR_DTENSORS]
    options: dict[str, Any] = {
        "precision": chance.choice([*precisions, schema_training.Fp16(initial_scale=256.0)]),
        "optimizer": chance.choice(optimizers)(),
        "accumulation": chance.randint(1, 3),
        "micro_batch": chance.randint(1, 3),
        "sequence": chance.choice((8, 16, 24, 32)),
        "clip": chance.choice((None, None, 1.0)),
        "bucket_bytes": chance.choice((4096, 65536, 1 << 20)),
        "activation": chance.choice(
            (
                schema_memory.Activation(), schema_memory.Activation(), schema_memory.CheckpointActivations(),
                schema_memory.OffloadActivations(least_bytes=2048),
                schema_memory.CheckpointOffloadActivations(least_bytes=2048),
            )
        ),
    }  # fmt: skip
    if shards and options["optimizer"].name == "sgd":
        options["optimizer"] = schema_training.Sgd(implementation="loop")  # torch's fused one is not for DTensors
    if spec.tuning:
        options["tuned"] = chance.random() < 0.5
    return options | (_of_ours(chance, strategy) if spec.composes.arena else {})


def _of_ours(chance: random.Random, strategy: str) -> dict[str, Any]:
    section: dict[str, Any] = {
        "mode": chance.choice(("own", "paper", "vendor")),
        "accumulate": chance.choice(("last", "every")),
        "construct": chance.choice(("plain", "plain", "meta")),
    }
    if strategy == "zero3":
        section |= {"prefetch": chance.randrange(3), "persistence_numel": chance.choice((0, 100))}
    kind = chance.choice(("none", "arena", "fused", "nodes", "cpu", "delayed", "nvme"))
    more: dict[str, Any] = {
        "none": {},
        "arena": {"arena": True},
        "fused": {"buffers": schema_memory.FusedBuffers()},
        "nodes": {"nodes": True} | ({"zeropp": schema_memory.AllOfZeropp()} if strategy == "zero3" else {}),
        "cpu": {"offload": schema_memory.CpuOffload(fraction=chance.choice((1.0, 0.5)))},
        "delayed": {"offload": schema_memory.CpuOffload(delayed=True, delayed_after=1)},
        "nvme": {"offload": schema_memory.NvmeOffload(block_bytes=64 * 1024)},
    }[kind]
    return {"strategy": section} | more


def _words(strategy: str, n: int, model: Any, options: dict[str, Any]) -> str:
    """Returns the choices that are not the defaults' as words."""
    told = [f"strategy={strategy}", f"world_size={n}", f"model={_told(model)}"]
    return " ".join([*told, *(f"{key}={_told(value)}" for key, value in options.items() if value is not None)])


def _told(value: Any) -> str:
    if isinstance(value, dict):
        return "(" + " ".join(f"{key}={_told(one)}" for key, one in value.items() if one is not None) + ")"
    if not hasattr(value, "values"):
        return str(value).lower() if isinstance(value, bool) else str(value)
    default = type(value)()
    name = getattr(value, "name", None) or getattr(value, "kind", None) or getattr(value, "architecture", "")
    other = {key: one for key, one in vars(value).items() if one != getattr(default, key) and key[0] != "_"}
    return name + (_told(other) if other else "")
