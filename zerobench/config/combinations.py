"""The axes of a cell combined: rejected combinations, options of the engine, and ZeRO-R (activations, buffers, arena)
with the model and the strategy.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from typing import Any

import torch

from .. import models
from ..host.environment import FAKE
from ..strategies import names_with, spec_of
from ..zero.activations.policies import ActivationPolicy
from ..zero.modules.wrapping import blocks
from .cell import CellConfig
from .schema_memory import Activation
from .schema_training import Optimizer


def validate(cell: CellConfig) -> list[str]:
    """Returns error messages for a cell's axes that are invalid, alone or together."""
    problems = cell.activation.validate(cell)
    if cell.arena and not spec_of(cell.strategy.name).composes.arena:
        why = f"strategy={cell.strategy.name} manages its own memory; use one of {', '.join(names_with('arena'))}"
        problems.append(f"arena=true: {why}")
    problems += problems_of_compile(cell) + problems_of_tensor_parallel(cell)
    problems += cell.buffers.validate(cell) + cell.optimizer.validate(cell)
    return problems + cell.offload.validate(cell) + problems_of_groups(cell) + cell.zeropp.validate(cell)


def engine_options(cell: CellConfig, folder: str | None = None) -> dict[str, Any]:
    """Returns keyword arguments for our engine that differ from its defaults.

    `folder`: for files, if the config names none.
    """
    options: dict[str, Any] = {"arena": True} if cell.arena else {}
    options |= cell.offload.engine_options(cell, folder) | cell.zeropp.engine_options(cell)
    return options | {key: size for key in ("node_size", "shard_group") if (size := getattr(cell, key)) is not None}


def problems_of_groups(cell: CellConfig) -> list[str]:
    """Returns error messages for groups of ranks (nodes, between which bytes travel more slowly, and shard groups, each
    of which has a whole model) that the strategy does not support or that do not divide the world.
    """
    name, ranks, problems = cell.strategy.name, cell.world_size or 1, []
    for key, size, least in (("node_size", cell.node_size, 1), ("shard_group", cell.shard_group, 2)):
        if size is None:
            continue
        if not spec_of(name).composes.groups:
            why = f"strategy={name} knows no groups of ranks; leave it out, or use {', '.join(names_with('groups'))}"
            problems.append(f"{key}={size}: {why}")
        elif size < least or ranks % size:
            problems.append(f"{key}={size}: must be a divisor of world_size={ranks}, and at least {least}")
    if None not in (cell.node_size, cell.shard_group) and cell.node_size != cell.shard_group:
        why = f"with node_size={cell.node_size} a shard group must be a node"
        problems.append(f"shard_group={cell.shard_group}: {why}")
    return problems


HAVE_BLOCKS = ("gpt", "gpt_moe", "mlp")
"""Models that are known to have blocks."""

UNBOUNDED_BYTES = 2**40
"""Size of a bucket that fits all gradients."""


def problems_of_compile(cell: CellConfig) -> list[str]:
    """Returns an error message if an option would act inside a compiled block, or if no compiler exists."""
    if cell.compile == "none":
        return []
    strategy, compiler = cell.strategy.name, os.environ.get("CXX", "g++")
    no_compiler = cell.device == "cpu" and cell.tensors != FAKE and shutil.which(compiler) is None
    refused = (
        (not spec_of(strategy).composes.compiles, f"strategy={strategy} compiles by a call of its own"),
        (
            cell.activation.policy().keep != "device",
            f"activation={cell.activation.name} would move tensors of a graph; use none, checkpoint or selective",
        ),
        (cell.arena, "arena=true has no slots for tensors that a graph keeps; leave it out"),
        (
            getattr(cell.model, "tiles", 1) > 1,
            "model.tiles are gathered separately, inside of a graph; use model.tiles=1",
        ),
        (
            getattr(cell.model, "separate_experts", False),
            "experts are gathered separately; use model.separate_experts=false",
        ),
        (no_compiler, f"inductor needs a C++ compiler, and there is no program {compiler}; install g++, or set CXX"),
    )
    return [f"compile={cell.compile}: {why}, or use compile=none" for is_so, why in refused if is_so]


CUT = ("gpt",)
"""Models that support tensor parallelism: they have a method `cut`."""


def problems_of_tensor_parallel(cell: CellConfig) -> list[str]:
    """Returns error messages if a model cannot be split over that many ranks, or another option needs whole models."""
    ranks, name, model = cell.tensor_parallel, cell.strategy.name, cell.model
    if ranks <= 1:
        return []
    key = f"tensor_parallel={ranks}"
    if not spec_of(name).composes.tensor_parallel:
        why = f"strategy={name} takes all ranks for itself"
        return [f"{key}: {why}; use one of {', '.join(names_with('tensor_parallel'))}"]
    if model.kind not in CUT:
        return [f"{key}: model={cell.model_name} does not support tensor parallelism; use a model of {CUT[0]}"]
    problems, heads = [], getattr(model, "heads", 1)
    if cell.world_size % ranks:
        problems.append(f"{key}: must be a divisor of world_size={cell.world_size}")
    if heads % ranks:
        problems.append(f"{key}: a rank has whole heads, so it must be a divisor of model.heads={heads}")
    usual = {
        "node_size": (cell.node_size, None), "shard_group": (cell.shard_group, None),
        "zeropp": (cell.zeropp.name, "none"), "offload": (cell.offload.name, "none"), "clip": (cell.clip, None),
        "compile": (cell.compile, "none"), "arena": (cell.arena, False),
        "search.memory_limit": (cell.search.memory_limit, None),
        "strategy.construct": (getattr(cell.strategy, "construct", "plain"), "plain"),
        **{f"model.{key}": (getattr(model, key, at), at) for key, at in (("lora", 0), ("tiles", 1), ("mlp_chunks", 1))},
    }  # fmt: skip
    given = [f"{option}={value}" for option, (value, at) in usual.items() if value != at]
    given += [f"precision={cell.precision.name}"] if cell.precision.scales else []
    given += [] if cell.optimizer.takes_elements else [f"optimizer={cell.optimizer.name}"]
    given += ["activation=selective"] if cell.activation.name == "selective" else []
    return problems + [f"{key}: {it} does not work with tensor parallelism; leave one of the two out" for it in given]


def problems_of_model(cell: CellConfig) -> list[str]:
    """Returns error messages if a model has no blocks for its activation policy or compilation, or if an optimizer
    cannot divide its parameters by its own list. To check, the model is built on the meta device; a model that cannot
    be built there is left to the ranks.
    """
    chosen = {"activation": cell.activation.name, "compile": cell.compile}
    key = next((key for key, choice in chosen.items() if choice != "none"), None)
    needs_blocks = key is not None and cell.model.kind not in HAVE_BLOCKS
    divides = type(cell.optimizer).owned is not Optimizer.owned
    if not (needs_blocks or divides):
        return []
    try:
        with torch.device("meta"):
            model = models.build(cell.model.kind, cell.model_options)
    except Exception:  # a user's builder may do what a model without memory cannot
        return []
    problems = []
    if needs_blocks and not blocks(model):
        why = f"{type(model).__name__} has no blocks to apply it to; put them into an nn.ModuleList or an nn.Sequential"
        problems.append(f"{key}={chosen[str(key)]}: {why}, or use {key}=none")
    try:
        cell.optimizer.owned(model)
    except ValueError as error:
        problems.append(f"optimizer.adamw={list(getattr(cell.optimizer, 'adamw', ()))}: {error}")
    return problems


def resolved(cell: CellConfig) -> CellConfig:
    """Returns the cell in canonical form: a model that can checkpoint its own blocks does so, and fused buffers become
    an unbounded bucket, and a cast of all of a shard's gradients together.
    """
    if cell.model.can_checkpoint and cell.recomputes and not cell.activation.policy().selective:
        model = replace(cell.model, checkpointing=True)  # type: ignore[call-arg]
        kept = Activation() if cell.activation.name == "checkpoint" else cell.activation
        cell = replace(cell, model=model, activation=kept)
    if cell.buffers.name == "constant" or cell.buffers.validate(cell):
        return cell
    if cell.strategy.has_buckets:
        cell = replace(cell, strategy=replace(cell.strategy, bucket_bytes=UNBOUNDED_BYTES))  # type: ignore[call-arg]
    return replace(cell, precision=replace(cell.precision, tile_bytes=None))


def activation_policy(cell: CellConfig) -> ActivationPolicy:
    """Returns the activation policy for the units of a cell's model, without checkpointing done by the model itself."""
    policy = cell.activation.policy()
    if cell.arena and cell.recomputes and policy.keep == "device":
        policy = replace(policy, keep="slab")
    return replace(policy, recompute=policy.recompute and not cell.model.checkpoints)
