"""The engine: ZeRO stages 1, 2 and 3 on plain nn.Modules. Depends only on torch.

    engine = zerobench.initialize(model, torch.optim.AdamW(model.parameters(), fused=True), strategy="zero2")
    for inputs in data:
        loss = engine(*inputs)
        engine.backward(loss)
        engine.step()

Read layout.py and units/unit.py for the tensors, strategy.py for the life of a unit, then stage1.py (P_os),
stage2.py (P_os+g) and stage3.py (P_os+g+p).
"""

from __future__ import annotations

from dataclasses import fields
from difflib import get_close_matches
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim

from .comm.out_of_step import compared_launches
from .comm.zeropp import Zeropp, connect_zeropp
from .modules.guards import (
    check_alike,
    check_gradients,
    check_ignored,
    check_memory,
    check_module,
    check_process_group,
    check_units,
    mark,
)
from .modules.wrapping import in_normal_mode
from .offload.placement import NvmeOffload, Offload
from .optim.muon import AdafactorWithAdamW, MuonWithAdamW
from .optim.segments import ELEMENTWISE, check_groups, check_optimizer, check_states, check_type
from .optim.step_by_tiles import ONE_PASS
from .options import BUCKETED, MODES, Options, check_owned, spelled_out, usual_tile_bytes
from .parameters import meta_init
from .precision import LossScaling, is_fused
from .stage1 import MEGATRON, MegatronStage, Stage1
from .stage2 import Stage2
from .stage3 import Stage3
from .strategy import Strategy


class StreamedStage1(Stage2):
    """ZeRO-1 that offloads gradients as they are reduced: at most one full bucket is live, as under stage 2."""

    stage = 1


STAGES: dict[str, type[Strategy]] = {"zero1": Stage1, "zero2": Stage2, "zero3": Stage3, "megatron": MegatronStage}

STREAMED: dict[str, type[Strategy]] = {"zero1": StreamedStage1}
"""The engine of a strategy whose gradients leave the device as they are reduced."""

DEFAULTS: dict[str, dict[str, Any]] = {"megatron": MEGATRON}
"""Options for which a strategy has its own defaults."""

_STATES = ("optimizer", "gradients")
OFFLOADS: dict[str, tuple[str, ...]] = {"zero1": _STATES, "zero2": _STATES, "zero3": (*_STATES, "parameters")}
"""Model states that may leave the device."""

__all__ = [
    "MODES", "STAGES", "AdafactorWithAdamW", "LossScaling", "MuonWithAdamW", "NvmeOffload", "Offload", "Options",
    "Strategy", "Zeropp", "initialize",
]  # fmt: skip


@in_normal_mode
def initialize(
    model: nn.Module, optimizer: optim.Optimizer, strategy: str = "zero2", *, group: dist.ProcessGroup | None = None,
    mode: str = "own", **options: Any,
) -> Strategy:  # fmt: skip
    """Puts `model` and `optimizer` under a ZeRO stage and returns the engine. Collective over the group.

    `optimizer`: an elementwise torch.optim optimizer over `model.parameters()`, MuonWithAdamW, or one whose groups say
    if their matrices are owned whole (optim/segments.py). The engine replaces its parameters with this rank's shards in
    place, so schedulers that reference it keep working; the states of one that has stepped, equal on all ranks, are cut
    to the shards.
    `group`: by default the default process group; without one, a world of one rank, unless WORLD_SIZE is larger.
    `mode`: own, paper or vendor: the set of option defaults (options.MODES).
    `options`: the fields of `Options` (options.py); some also accept a short form, such as offload="cpu".

    Afterwards every rank has rank 0's values. A model on the meta device gets the values of a plain construction with
    rank 0's seed, unit by unit, on `device` (parameters/meta_init.py).

    Raises ValueError for a model or optimizer that cannot be sharded, and for invalid options; RuntimeError if several
    ranks were started and no process group connects them.
    """
    check_process_group()
    moves_frozen = strategy == "zero3"
    device, chosen = _checked(model, optimizer, strategy, mode, spelled_out(options), moves_frozen)
    comm = connect_zeropp(group, device, chosen.node_size, chosen.shard_group, chosen.zeropp)
    comm.launches = compared_launches(comm)
    buffers = model.named_buffers() if chosen.broadcast_buffers else ()
    check_alike([*model.named_parameters(), *buffers], {*chosen.ignored_parameters}, comm, device)
    check_states(optimizer, comm)
    kinds = STAGES | (STREAMED if chosen.offload is not None and chosen.offload.gradients else {})
    engine = kinds[strategy](model, optimizer, comm, chosen)
    engine.name = strategy
    comm.launches.register(engine)
    mark(engine.orders, strategy, moves_frozen)
    return engine


def _checked(
    model: nn.Module, optimizer: optim.Optimizer, strategy: str, mode: str, options: dict[str, Any], moves_frozen: bool
) -> tuple[torch.device, Options]:
    """Returns the model's device and the options with defaults. Raises ValueError if the model cannot be sharded."""
    if strategy not in STAGES:
        raise ValueError(f"strategy: {strategy!r} is unknown{_nearest(str(strategy), list(STAGES))}")
    if not isinstance(model, nn.Module):
        raise ValueError(f"model: it is a {type(model).__name__}; give a torch.nn.Module")
    check_type(optimizer)
    device = next((p.device for p in model.parameters() if not p.is_meta), options.get("device") or torch.device("cpu"))
    if device.type == "cuda" and device.index not in (None, torch.cuda.current_device()):
        raise ValueError(
            f"model: it is on {device}, but this process works on cuda:{torch.cuda.current_device()}; call"
            f" torch.cuda.set_device({device.index}) first"
        )
    if mode not in MODES:
        raise ValueError(f"mode: {mode!r} is unknown{_nearest(str(mode), list(MODES))}")
    names = [option.name for option in fields(Options)]
    for name in options:
        if name not in names:
            raise ValueError(f"{name}: no such option{_nearest(name, names)}")
    # the defaults: of the optimizer, of the mode, of the strategy
    offload = options.get("offload")
    updated_by = "cpu" if offload is not None and offload.optimizer else device.type
    usual = usual_tile_bytes(updated_by, type(optimizer), is_fused(optimizer))
    tile_bytes = usual if type(optimizer) in ELEMENTWISE else None  # of others we do not know enough
    preset = {key: value for key, value in MODES[mode].items() if (strategy == "zero3") != (key in BUCKETED)}
    own = DEFAULTS.get(strategy, {}) | ({"tile_bytes": ONE_PASS} if tile_bytes == ONE_PASS else {})
    chosen = Options(**{"tile_bytes": tile_bytes, **preset, **own, **options})
    chosen.check()
    if chosen.offload is not None:
        chosen.offload.check(strategy, OFFLOADS.get(strategy, ()))
    # the model and the optimizer under these options
    ignored = {*chosen.ignored_parameters}
    check_ignored(model, ignored)
    check_module(model, moves_frozen, ignored)
    if meta_init.on_meta(model):
        meta_init.check_replay(model)
    trainable = {p: name for name, p in model.named_parameters() if p.requires_grad and p not in ignored}
    check_optimizer(optimizer, trainable, chosen.elementwise, ignored)
    check_gradients(trainable)
    check_groups(optimizer, updated_by)
    check_owned(optimizer, chosen)
    check_memory(model, moves_frozen, ignored)
    if strategy == "zero3":
        check_units(model)
    elif chosen.zeropp is not None:
        raise ValueError(f"zeropp: it is for gathers and reductions of zero3, not of {strategy}; leave it out")
    return device, chosen


def _nearest(name: str, valid: list[str]) -> str:
    near = get_close_matches(name, valid, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else f" (valid: {', '.join(valid)})"
