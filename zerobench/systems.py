"""Where shards live, how bytes travel and what becomes of activations: choices that compose with a stage.

Each is a group (or a key) of its own. At its usual choice it is left out of a resolved config, which is then as it was
before there was such a choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import zero

MIB = 2**20

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
    least_bytes: int = 64 * 1024


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

NOT_YET = ("activation", "buffers", "zeropp", "arena", "node_size", "shard_group")
"""What can be asked for and is not built."""


def leave_out_usual(plain: dict[str, Any]) -> None:
    """Removes from a resolved config, in place, what is at its usual choice."""
    for group, choices in SCHEMAS.items():
        if plain[group]["name"] == next(iter(choices)):
            del plain[group]
    for key, usual in USUAL.items():
        if plain[key] == usual:
            del plain[key]


def problems_of(plain: dict[str, Any]) -> list[str]:
    """Sentences on what of a resolved config's systems makes no sense, alone or together."""
    unbuilt = [f"{name}={words_of(plain, name)}: not built yet; leave it out" for name in NOT_YET if name in plain]
    return unbuilt + _offload_problems(plain)


def _offload_problems(plain: dict[str, Any]) -> list[str]:
    section, strategy = plain.get("offload"), plain["strategy"]["name"]
    if section is None:
        return []
    name = f"offload={section['name']}"
    if strategy not in OURS:
        return [f"{name}: strategy={strategy} does not offload here; use one of {', '.join(OURS)}"]
    if section["name"] == "nvme":
        return [f"{name}: not built yet; use offload=cpu"]
    problems = []
    if section["parameters"] and strategy != "zero3":
        problems.append(f"offload.parameters=true: strategy={strategy} has whole parameters on every rank; use zero3")
    try:
        _offload_of(section).check(strategy)
    except ValueError as error:
        problems.append(str(error))
    return list(dict.fromkeys(problems))


def words_of(plain: dict[str, Any], name: str) -> str:
    """What a resolved config says under a group's or a key's name, as on a command line; empty at the usual choice."""
    value = plain.get(name, "")
    return str(value["name"] if isinstance(value, dict) else value).lower()


def all_words(plain: dict[str, Any]) -> str:
    """All that is not usual: "offload=cpu activation=checkpoint"."""
    names = (*SCHEMAS, *USUAL)
    return " ".join(f"{name}={words_of(plain, name)}" for name in names if name in plain)


def files_in(plain: dict[str, Any], folder: str) -> str | None:
    """Where ranks make folders for the states that live in files: `offload.path`, or the run's own `folder`."""
    offload = plain.get("offload", {})
    return (offload["path"] or folder) if offload.get("name") == "nvme" else None


def engine_options(plain: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments for our engine: what a resolved config says of tiers, codecs and groups, beside the usual."""
    return {"offload": _offload_of(plain["offload"])} if "offload" in plain else {}


def _offload_of(section: dict[str, Any]) -> zero.Offload:
    delayed_after = section["delayed_after"] if section["delayed"] else None
    parts = {key: section[key] for key in ("optimizer", "gradients", "parameters", "fraction")}
    return zero.Offload(**parts, delayed_after=delayed_after)
