"""ZeRO-R in a resolved config: residual policies of activations, constant or fused buffers, an arena.

What of them makes no sense, what they mean for the rest of the config, and what the model and the engine are told.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from .. import models
from ..strategies import names_with, spec_of
from ..zero.activations.policies import LEAST_BYTES, POLICIES, ActivationPolicy
from ..zero.modules.wrapping import blocks
from .schema_memory import words_of

HAVE_BLOCKS = ("gpt", "mlp")
"""Models that need no look."""

UNBOUNDED_BYTES = 2**40
"""A bucket that takes every gradient there is."""


def resolve(plain: dict[str, Any], problems: list[str]) -> None:
    """Has the rest of a resolved config, in place, agree with its policies; sentences where it cannot."""
    problems += _activation_problems(plain) + _arena_problems(plain)
    if "checkpointing" in plain["model"] and recomputes(plain):  # the model's own word for it: one name for one thing
        plain["model"]["checkpointing"] = True
        if words_of(plain, "activation") == "checkpoint":
            del plain["activation"]
    if "buffers" in plain:
        problems += _fuse(plain)


def _fuse(plain: dict[str, Any]) -> list[str]:
    """One bucket for all gradients, whatever bucket_bytes says, and all fp32 gradients of a shard at once."""
    strategy, casts = plain["strategy"], plain["precision"]["gradient_dtype"] != "fp32"
    if not spec_of(strategy["name"]).composes.fused_buffers:
        known = ", ".join(names_with("fused_buffers"))
        return [f"buffers=fused: strategy={strategy['name']} has buffers of its own; use one of {known}"]
    if "bucket_bytes" in strategy:
        strategy["bucket_bytes"] = UNBOUNDED_BYTES
    elif not casts:
        words = "zero3 reduces unit by unit, and gradients in fp32 are not cast: there is nothing to fuse"
        return [f"buffers=fused: {words}; use precision=bf16"]
    plain["precision"]["tile_bytes"] = None
    return []


def _activation_problems(plain: dict[str, Any]) -> list[str]:
    name, problems = words_of(plain, "activation"), []
    if name == "offload" and plain["model"].get("checkpointing"):
        words = "model.checkpointing=true computes blocks again; say activation=checkpoint_offload for both"
        problems.append(f"activation=offload: {words}")
    searches = plain["search"]["memory_limit"] is not None and "checkpointing" in plain["model"]
    if name and searches and plain["search"]["checkpointing"] != [recomputes(plain)]:
        only = str([recomputes(plain)]).lower()
        problems.append(f"activation={name}: a search tries all of search.checkpointing; let that be {only}")
    return problems


def problems_of_units(plain: dict[str, Any]) -> list[str]:
    """A sentence where a resolved config's model has no blocks that its activation policy could be for. To see that it
    is built without memory; of one that cannot be, the ranks find out.
    """
    name, kind = words_of(plain, "activation"), plain["model"]["kind"]
    if not name or kind in HAVE_BLOCKS:
        return []
    section = plain["huggingface"] if kind == "huggingface" else plain["model"]
    try:
        with torch.device("meta"):
            model = models.build(kind, {key: value for key, value in section.items() if key not in ("kind", "name")})
    except Exception:  # a user's builder may do what a model without memory cannot
        return []
    if blocks(model):
        return []
    words = f"{type(model).__name__} has no blocks to apply it to; put them into an nn.ModuleList or an nn.Sequential"
    return [f"activation={name}: {words}, or use activation=none"]


def _arena_problems(plain: dict[str, Any]) -> list[str]:
    strategy = plain["strategy"]["name"]
    if "arena" in plain and not spec_of(strategy).composes.arena:
        return [f"arena=true: strategy={strategy} has memory of its own; use one of {', '.join(names_with('arena'))}"]
    return []


def recomputes(plain: dict[str, Any]) -> bool:
    """Returns True where a resolved config's blocks are recomputed in backward."""
    chosen = POLICIES[words_of(plain, "activation") or "none"]
    return chosen.recompute or bool(plain["model"].get("checkpointing"))


def of_schedule(plain: dict[str, Any]) -> dict[str, Any]:
    """Returns the part that theory's schedule of a step needs."""
    return {"recomputes": recomputes(plain), "arena": bool(plain.get("arena"))}


def activation_policy(plain: dict[str, Any]) -> ActivationPolicy:
    """Returns the policy for the units of a resolved config's model, besides checkpointing that it does itself."""
    section = plain.get("activation", {})
    policy = replace(POLICIES[section.get("name", "none")], least_bytes=section.get("least_bytes", LEAST_BYTES))
    if plain.get("arena") and recomputes(plain) and policy.keep == "device":
        policy = replace(policy, keep="slab")
    return replace(policy, recompute=policy.recompute and not plain["model"].get("checkpointing"))


def engine_options(plain: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments for our engine."""
    return {"arena": True} if plain.get("arena") else {}
