"""Where shards live, how bytes travel and what becomes of activations: choices that compose with a stage.

Each is a group (or a key) of its own. At its usual choice it is left out of a resolved config, which is then as it was
before there was such a choice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from .zero.residual import LEAST_BYTES, POLICIES, ActivationPolicy

MIB = 2**20

UNBOUNDED_BYTES = 2**40
"""A bucket that takes every gradient there is."""

OURS = ("zero1", "zero2", "zero3")
"""Strategies that tiers, codecs and groups compose with."""


@dataclass
class Offload:
    """Which part of the model states lives in another tier than the device: none."""

    name: str = "none"


@dataclass
class CpuOffload(Offload):
    """ZeRO-Offload (arXiv 2101.06840): the parts named here live in pinned host memory, and the update runs there.

    `fraction` of the optimizer's shard goes, the rest stays. `delayed`: from step `delayed_after` on the update runs
    behind the next step's forward and backward, whose parameters are one update older (delayed parameter update).
    """

    name: str = "cpu"
    optimizer: bool = True
    gradients: bool = True
    parameters: bool = False
    fraction: float = 1.0
    delayed: bool = False
    delayed_after: int = 40


@dataclass
class NvmeOffload(Offload):
    """ZeRO-Infinity (arXiv 2104.07857): the parts live in files under `path` (null: a folder of the run's own beside
    the results), read and written in blocks of `block_bytes` through a pool of `buffers` of them.

    `parameters`: null means under zero3. `direct`: past the page cache where the file system can. `checksums`: every
    block is checked as it is read.
    """

    name: str = "nvme"
    path: str | None = None
    optimizer: bool = True
    gradients: bool = True
    parameters: bool | None = None
    block_bytes: int = 4 * MIB
    buffers: int = 16
    direct: bool = True
    checksums: bool = True


@dataclass
class Activation:
    """What becomes of activations between forward and backward: they stay on the device."""

    name: str = "none"


@dataclass
class CheckpointActivations(Activation):
    """Blocks keep their inputs alone and compute the rest again in backward."""

    name: str = "checkpoint"


@dataclass
class OffloadActivations(Activation):
    """What backward needs of a block goes to host memory, tensors of `least_bytes` and more, and comes back in reverse
    order ahead of its use.
    """

    name: str = "offload"
    least_bytes: int = LEAST_BYTES


@dataclass
class CheckpointOffloadActivations(OffloadActivations):
    """Blocks are computed again from inputs that wait in host memory (ZeRO-R's P_a+cpu without its partitioning)."""

    name: str = "checkpoint_offload"


@dataclass
class Buffers:
    """Constant-size buffers (C_B, ZeRO section 6.2), or one fused buffer that grows with the model."""

    name: str = "constant"


@dataclass
class FusedBuffers(Buffers):
    """Gradients are reduced in one buffer of the model's size, and cast to fp32 all at once."""

    name: str = "fused"


@dataclass
class Zeropp:
    """ZeRO++ (arXiv 2306.10209) on zero3: which of its three parts, and elements a quantisation block has."""

    name: str = "none"
    quantize_weights: bool = False
    secondary_shards: bool = False
    quantize_gradients: bool = False
    weight_block: int = 256
    gradient_block: int = 256


@dataclass
class Qwz(Zeropp):
    """Parameters are gathered in int8."""

    name: str = "qwz"
    quantize_weights: bool = True


@dataclass
class Hpz(Zeropp):
    """The backward gathers from secondary shards inside a node."""

    name: str = "hpz"
    secondary_shards: bool = True


@dataclass
class Qgz(Zeropp):
    """Gradients are exchanged in int4, first inside a node, then between nodes."""

    name: str = "qgz"
    quantize_gradients: bool = True


@dataclass
class AllOfZeropp(Zeropp):
    """The three together."""

    name: str = "all"
    quantize_weights: bool = True
    secondary_shards: bool = True
    quantize_gradients: bool = True


SCHEMAS: dict[str, dict[str, type]] = {
    "offload": {"none": Offload, "cpu": CpuOffload, "nvme": NvmeOffload},
    "activation": {
        "none": Activation,
        "checkpoint": CheckpointActivations,
        "offload": OffloadActivations,
        "checkpoint_offload": CheckpointOffloadActivations,
    },
    "buffers": {"constant": Buffers, "fused": FusedBuffers},
    "zeropp": {"none": Zeropp, "qwz": Qwz, "hpz": Hpz, "qgz": Qgz, "all": AllOfZeropp},
}
"""Group -> choice -> dataclass, the usual choice first."""

USUAL: dict[str, Any] = {"arena": False, "node_size": None, "shard_group": None}
"""Keys that stand alone -> their usual value."""

NOT_YET = ("offload", "zeropp", "node_size", "shard_group")
"""What can be asked for and is not built."""


def leave_out_usual(plain: dict[str, Any]) -> None:
    """Removes from a resolved config, in place, what is at its usual choice."""
    for group, choices in SCHEMAS.items():
        if plain[group]["name"] == next(iter(choices)):
            del plain[group]
    for key, usual in USUAL.items():
        if plain[key] == usual:
            del plain[key]


def resolve(plain: dict[str, Any], problems: list[str]) -> None:
    """Has the rest of a resolved config, in place, agree with its residual policies; sentences where it cannot."""
    problems += _activation_problems(plain)
    if "checkpointing" in plain["model"] and recomputes(plain):  # the model's own word for it: one name for one thing
        plain["model"]["checkpointing"] = True
        if words_of(plain, "activation") == "checkpoint":
            del plain["activation"]
    if "buffers" in plain:
        problems += _fuse(plain)


def _fuse(plain: dict[str, Any]) -> list[str]:
    """One bucket for all gradients, whatever bucket_bytes says, and all fp32 gradients of a shard at once."""
    strategy, half = plain["strategy"], plain["precision"]["gradient_dtype"] != "fp32"
    if strategy["name"] not in OURS:
        return [f"buffers=fused: strategy={strategy['name']} has buffers of its own; use one of {', '.join(OURS)}"]
    if "bucket_bytes" in strategy:
        strategy["bucket_bytes"] = UNBOUNDED_BYTES
    elif not half:
        words = (
            "zero3 reduces unit by unit, and fp32 gradients are not cast: there is nothing to fuse; use precision=bf16"
        )
        return [f"buffers=fused: {words}"]
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


def problems_of(plain: dict[str, Any]) -> list[str]:
    """Sentences on what of a resolved config's systems makes no sense, alone or together."""
    problems = [f"{name}={words_of(plain, name)}: not built yet; leave it out" for name in NOT_YET if name in plain]
    strategy = plain["strategy"]["name"]
    if "arena" in plain and strategy not in OURS:
        words = f"strategy={strategy} has memory of its own ways; use one of {', '.join(OURS)}"
        problems.append(f"arena=true: {words}")
    return problems


def recomputes(plain: dict[str, Any]) -> bool:
    """Whether a resolved config's blocks are computed again in backward."""
    chosen = POLICIES[words_of(plain, "activation") or "none"]
    return chosen.recompute or bool(plain["model"].get("checkpointing"))


def activation_policy(plain: dict[str, Any]) -> ActivationPolicy:
    """What a resolved config has to be done to the model's units. A model with checkpointing of its own does that."""
    section = plain.get("activation", {})
    policy = replace(POLICIES[section.get("name", "none")], least_bytes=section.get("least_bytes", LEAST_BYTES))
    if plain.get("arena") and recomputes(plain) and policy.keep == "device":
        policy = replace(policy, keep="slab")
    return replace(policy, recompute=policy.recompute and not plain["model"].get("checkpointing"))


def words_of(plain: dict[str, Any], name: str) -> str:
    """What a resolved config says under a group's or a key's name, as on a command line; empty at the usual choice."""
    value = plain.get(name, "")
    return str(value["name"] if isinstance(value, dict) else value).lower()


def all_words(plain: dict[str, Any]) -> str:
    """All that is not usual: "offload=cpu activation=checkpoint"."""
    names = (*SCHEMAS, *USUAL)
    return " ".join(f"{name}={words_of(plain, name)}" for name in names if name in plain)


def engine_options(plain: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments for our engine: what a resolved config says of tiers, codecs and groups, beside the usual."""
    return {"arena": True} if plain.get("arena") else {}
