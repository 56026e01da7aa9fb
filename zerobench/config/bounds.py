"""The least and the greatest value of each number in a config that makes sense."""

from __future__ import annotations

from typing import Any

from ..strategies import spec_of
from .cell import CellConfig

MINIMUM_WARMUP = 2

LIMITS: dict[str, tuple[float, float]] = {
    "world_size": (1, 1024),
    "launch.threads": (1, 1024),
    "launch.timeout_s": (0.001, 1e7),
    "launch.retries": (1, 100),
    "sequence": (1, 1e9),
    "accumulation": (1, 1e6),
    "measure.repeats": (1, 1000),
    "search.steps": (1, 1e7),
    "search.repeats": (1, 1000),
    "seed": (0, 2**31),
    "measure.steps": (1, 1e7),
    "measure.warmup": (MINIMUM_WARMUP, 1e7),
    "data.vocabulary": (2, 1e9),
    "strategy.bucket_bytes": (1024, 2**40),
    "strategy.prefetch": (0, 1e6),
    "strategy.persistence_numel": (0, 1e12),
    "strategy.reduce_bucket_numel": (1, 1e12),
    "strategy.prefetch_numel": (0, 1e12),
    "strategy.max_live_numel": (0, 1e12),
    "strategy.max_reuse_numel": (0, 1e12),
    "zeropp.weight_block": (8, 2**20),
    "zeropp.gradient_block": (8, 2**20),
    "optimizer.lr": (0, 1e6),
    "optimizer.weight_decay": (0, 1e6),
    "optimizer.momentum": (0, 1),
    "optimizer.dampening": (0, 1),
    "optimizer.lr_decay": (0, 1e6),
    "optimizer.initial_accumulator_value": (0, 1e6),
    "optimizer.momentum_decay": (0, 1e6),
    "optimizer.rho": (0, 1),
    "optimizer.alpha": (0, 1e6),
    "optimizer.eta_minus": (1e-6, 1),
    "optimizer.eta_plus": (1, 1e6),
    "optimizer.step_min": (0, 1e6),
    "optimizer.step_max": (0, 1e6),
    "optimizer.lambd": (0, 1e6),
    "optimizer.t0": (1, 1e12),
    "precision.tile_bytes": (1024, 2**40),
    "activation.least_bytes": (0, 2**40),
    "model.tiles": (1, 1e6),
    "precision.initial_scale": (2**-24, 2**100),
    "precision.minimum_scale": (2**-24, 2**100),
    "precision.growth": (1, 1e6),
    "precision.backoff": (1e-6, 1),
    "precision.interval": (1, 1e9),
    "optimizer.beta1": (0, 0.9999999),
    "optimizer.beta2": (0, 0.9999999),
    "optimizer.eps": (0, 1e6),
    "offload.fraction": (1e-9, 1),
    "offload.delayed_after": (0, 1e6),
    "offload.block_bytes": (4096, 2**30),
    "offload.buffers": (8, 65536),
    "offload.depth": (1, 256),
}
"""Key of a cell -> least and greatest value that makes sense."""

AUTO = "auto"
MAY_BE_AUTO = ("strategy.bucket_bytes",)
"""Keys whose number may be left to follow the model."""


def problems_of(cell: CellConfig) -> list[str]:
    """Returns sentences on values of a cell that are out of their range."""
    problems = []
    users = spec_of(cell.strategy.name).of_user  # whose option of the same name may be another thing
    for key, (least, most) in LIMITS.items():
        if users and key.startswith("strategy."):
            continue
        value: Any = cell
        for part in key.split("."):
            value = getattr(value, part, None)
        if value is None or (key in MAY_BE_AUTO and value == AUTO):
            continue
        if isinstance(value, str):
            problems.append(f"{key}={value}: use {AUTO} or bytes, at least {least:g}, as in 25MiB")
        elif not least <= value <= most:
            why = "; memory is counted from the third step on, when optimizer states exist" if "warmup" in key else ""
            bound = f"at most {most:g}" if value > most else f"at least {least:g}"
            problems.append(f"{key}={value}: must be {bound}{why}")
    return problems
