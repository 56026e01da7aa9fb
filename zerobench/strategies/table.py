"""The table of strategies: DDP, our stages and the peers, one row each. A user's script adds rows by the same call.

Engines are imported when they are built: a command that only reads the table loads none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..records.palette import BLACK, BLUE, GRAY, GREEN, ORANGE, PURPLE, SKY, VERMILION, YELLOW
from ..theory import strategy as theory
from . import options
from .registration import register_strategy
from .spec import Composition, Look, fullest_rank

if TYPE_CHECKING:
    from torch import nn, optim

STAGE = Composition(
    offload=("optimizer", "gradients"), groups=True, fused_buffers=True, arena=True, simulated=True,
    gradient_dtypes=True, owned=True, tensor_parallel=True, saves=True,
)  # fmt: skip
STAGE3 = Composition(
    offload=("optimizer", "gradients", "parameters"), groups=True, zeropp=True, fused_buffers=True, arena=True,
    simulated=True, gradient_dtypes=True, owned=True, tensor_parallel=True, saves=True,
)  # fmt: skip
DEEPSPEED = "it is the extra `peers`: DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed"
SIMULATED = Composition(simulated=True, owned=True, tensor_parallel=True)


def _ddp(model: nn.Module, optimizer: optim.Optimizer, bucket_bytes: int, broadcast_buffers: bool, tile_bytes: int,
         **more: Any) -> Any:  # fmt: skip
    from ..zero.precision import HALF
    from .ddp import DdpEngine
    from .ddp_masters import MasterDdpEngine

    if not broadcast_buffers:  # the default needs no word, and torch 2.13 warns of this one
        more["broadcast_buffers"] = False
    if "group" in more:
        more["process_group"] = more.pop("group")
    more["bucket_cap_mb"] = bucket_bytes / 2**20
    if any(p.dtype in HALF for p in model.parameters()):
        return MasterDdpEngine(model, optimizer, tile_bytes=tile_bytes, **more)
    return DdpEngine(model, optimizer, **more)


def _stage(name: str) -> Callable[..., Any]:
    def build(model: nn.Module, optimizer: optim.Optimizer, **more: Any) -> Any:
        from .. import zero

        return zero.initialize(model, optimizer, name, **more)

    return build


def _peer(module: str, engine: str, **fixed: Any) -> Callable[..., Any]:
    def build(model: nn.Module, optimizer: optim.Optimizer, **more: Any) -> Any:
        return getattr(import_module(f".{module}", __package__), engine)(model, optimizer, **fixed, **more)

    return build


register_strategy(
    "ddp", _ddp, options=options.Ddp, theory=theory.DDP, label="DDP", look=Look(BLACK, "o", "-"), composes=SIMULATED,
    half="masters", reference={"find_unused_parameters": True},
)  # fmt: skip
for _name, _options, _theory, _label, _look, _composes in (
    ("zero1", options.Zero1, theory.ZERO1, "ZeRO-1", Look(ORANGE, "s", "--"), STAGE),
    ("zero2", options.Zero2, theory.ZERO2, "ZeRO-2", Look(BLUE, "^", "-."), STAGE),
    ("zero3", options.Zero3, theory.ZERO3, "ZeRO-3", Look(VERMILION, "D", ":"), STAGE3),
):
    register_strategy(
        _name, _stage(_name), options=_options, theory=_theory, label=_label, look=_look, composes=_composes,
        half="masters", rounds_as_reference=True, settles_after=1, read_by_harness=("accumulate", "mode", "construct"),
    )  # fmt: skip
register_strategy(
    "megatron", _stage("megatron"), options=options.Megatron, theory=theory.MEGATRON, label="Megatron",
    look=Look(GREEN, "P", (0, (5, 1, 1, 1, 1, 1))),
    composes=Composition(simulated=True, gradient_dtypes=True, owned=True), half="masters",
    precision_defaults={"gradient_dtype": "fp32", "tile_bytes": None}, settles_after=1,
)  # fmt: skip
register_strategy(
    "fsdp2", _peer("fsdp2", "Fsdp2Engine", reshard=True), options=options.Fsdp2, label="FSDP2",
    look=Look(SKY, ">", (0, (1, 1))), half="casts", tuning=options.FSDP2,
    partitions_as="zero3", settles_after=1, refused_optimizers=options.WITHOUT_RULE,
    read_by_harness=("accumulate", "upcast_frozen"),
)  # fmt: skip
register_strategy(
    "fsdp2_no_reshard", _peer("fsdp2", "Fsdp2Engine", reshard=False), options=options.Fsdp2NoReshard,
    label="FSDP2, no reshard", look=Look(PURPLE, "v", (0, (3, 1, 1, 1))), half="casts", tuning=options.FSDP2,
    partitions_as="zero3", settles_after=1, refused_optimizers=options.WITHOUT_RULE,
    read_by_harness=("accumulate", "upcast_frozen"),
)  # fmt: skip
register_strategy(
    "zero_redundancy", _peer("zero_redundancy", "ZeroRedundancyEngine"), options=options.ZeroRedundancy,
    label="ZeroRedundancyOptimizer", look=Look(YELLOW, "<", (0, (3, 1))), tuning=options.ZERO_REDUNDANCY,
    fullest_rank=fullest_rank, partitions_as="zero1",
)  # fmt: skip
for _level, _settings, _tuning, _marker in (
    (1, options.DeepspeedZero1, options.DEEPSPEED_12, "h"),
    (2, options.DeepspeedZero2, options.DEEPSPEED_12, "p"),
    (3, options.DeepspeedZero3, options.DEEPSPEED_3, "X"),
):
    register_strategy(
        f"deepspeed_zero{_level}", _peer("deepspeed", "DeepspeedEngine", level=_level), options=_settings,
        label=f"DeepSpeed ZeRO-{_level}", look=Look(GRAY, _marker, (0, (5, 2))),
        composes=Composition(clip=False, compiles=False),
        tuning=_tuning, partitions_as=f"zero{_level}", requires="deepspeed", install=DEEPSPEED,
    )  # fmt: skip
