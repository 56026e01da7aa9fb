"""Where shards live, how bytes travel and what becomes of activations: choices that compose with a stage.

Each is a group (or a key) of its own. At its usual choice it is left out of a resolved config, which is then as it was
before there was such a choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MIB = 2**20


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
    the results), read and written in blocks of `block_bytes`, `depth` at a time, through a pool of `buffers` of them.

    `parameters`: null means under zero3. `direct`: past the page cache where the file system can. `checksums`: every
    block is checked as it is read.
    """

    name: str = "nvme"
    path: str | None = None
    optimizer: bool = True
    gradients: bool = True
    parameters: bool | None = None
    fraction: float = 1.0
    block_bytes: int = 4 * MIB
    buffers: int = 16
    depth: int = 8
    direct: bool = True
    checksums: bool = True


@dataclass
class Activation:
    """Activations between forward and backward: they stay on the device."""

    name: str = "none"


@dataclass
class CheckpointActivations(Activation):
    """Blocks keep their inputs alone and compute the rest again in backward."""

    name: str = "checkpoint"


@dataclass
class OffloadActivations(Activation):
    """Sends a block's saved tensors of `least_bytes` and more to host memory, and fetches them back in reverse
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
    """ZeRO++ (arXiv 2306.10209) on zero3: nothing of it."""

    name: str = "none"


@dataclass
class PartsOfZeropp(Zeropp):
    """Which of its three parts, and elements a quantization block has. A choice's own part cannot be taken from it;
    others can be added.
    """

    quantize_weights: bool = False
    secondary_shards: bool = False
    quantize_gradients: bool = False
    weight_block: int = 256
    gradient_block: int = 256


@dataclass
class Qwz(PartsOfZeropp):
    """Parameters are gathered in int8."""

    name: str = "qwz"
    quantize_weights: bool = True


@dataclass
class Hpz(PartsOfZeropp):
    """The backward gathers from secondary shards inside a node."""

    name: str = "hpz"
    secondary_shards: bool = True


@dataclass
class Qgz(PartsOfZeropp):
    """Gradients are exchanged in int4, first inside a node, then between nodes."""

    name: str = "qgz"
    quantize_gradients: bool = True


@dataclass
class AllOfZeropp(PartsOfZeropp):
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

USUAL: dict[str, Any] = {"arena": False, "node_size": None, "shard_group": None, "rank": None}
"""Keys that stand alone -> their usual value."""


def leave_out_usual(plain: dict[str, Any]) -> None:
    """Removes from a resolved config, in place, what is at its usual choice."""
    for group, choices in SCHEMAS.items():
        if plain[group]["name"] == next(iter(choices)):
            del plain[group]
    for key, usual in USUAL.items():
        if plain[key] == usual:
            del plain[key]


def words_of(plain: dict[str, Any], name: str) -> str:
    """Returns a resolved config's choice of a group or value of a key, as on a command line; empty at the default."""
    value = plain.get(name, "")
    return str(value["name"] if isinstance(value, dict) else value).lower()


def all_words(plain: dict[str, Any]) -> str:
    """All that is not usual: "offload=cpu activation=checkpoint"."""
    names = (*SCHEMAS, *USUAL)
    return " ".join(f"{name}={words_of(plain, name)}" for name in names if name in plain)
