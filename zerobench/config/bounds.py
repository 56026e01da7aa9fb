"""The least and the greatest value of each number in a config that makes sense, and the words of some keys."""

from __future__ import annotations

from typing import Any

from ..strategies import spec_of

MINIMUM_WARMUP = 2

LIMITS: dict[str, tuple[float, float]] = {
    "world_size": (1, 1024),
    "threads": (1, 1024),
    "timeout_s": (0.001, 1e7),
    "sequence": (1, 1e9),
    "accumulation": (1, 1e6),
    "repeats": (1, 1000),
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
    "offload.delayed_after": (0, 1e9),
    "offload.block_bytes": (4096, 2**30),
    "offload.buffers": (8, 65536),
    "offload.depth": (1, 256),
}
"""Key of a resolved config -> least and greatest value that makes sense."""

AUTO = "auto"
MAY_BE_AUTO = ("strategy.bucket_bytes",)
"""Keys whose number may be left to follow the model."""

USER_KEYS = {"threads": "launch.threads", "timeout_s": "launch.timeout_s", "repeats": "measure.repeats"}


USUAL: dict[str, Any] = {"model.tiles": 1}
"""Key -> its usual value, which a resolved config does not name."""

CHOICES: dict[str, tuple[Any, ...]] = {
    "deterministic": (False, True),
    "draw_on": ("cpu", "device"),
    "measure.passes": ("both", "timed", "accounted"),
    "measure.trace": (False, True),
    "measure.snapshot": (False, True),
}
"""Key -> what it may be, the usual first: then a resolved config lacks it, as it did before there was such a key."""


def leave_out_usual(plain: dict[str, Any]) -> list[str]:
    """Removes the keys of CHOICES and USUAL that are as usual, in place. Returns sentences on those that cannot be."""
    problems = []
    for key, choices in CHOICES.items():
        *path, last = key.split(".")
        node = plain[path[0]] if path else plain
        if node[last] not in choices:
            problems.append(f"{key}={node[last]}: use one of {', '.join(map(str, choices))}")
        if node[last] == choices[0]:
            del node[last]
    for key, usual in USUAL.items():
        section, last = key.split(".")
        if plain[section].get(last) == usual:
            del plain[section][last]
    return problems


def problems_of(plain: dict[str, Any]) -> list[str]:
    """Sentences on values of a resolved config that are out of their range."""
    problems = []
    users = spec_of(plain["strategy"]["name"]).of_user  # whose option of the same name may be another thing
    for key, (least, most) in LIMITS.items():
        if users and key.startswith("strategy."):
            continue
        node: Any = plain
        for part in key.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        if node is None or (key in MAY_BE_AUTO and node == AUTO):
            continue
        if isinstance(node, str):
            problems.append(f"{key}={node}: use {AUTO} or a whole number of at least {least:g}")
            continue
        if least <= node <= most:
            continue
        why = "; memory is counted from the third step on, when optimizer states exist" if "warmup" in key else ""
        bound = f"at most {most:g}" if node > most else f"at least {least:g}"
        problems.append(f"{USER_KEYS.get(key, key)}={node}: must be {bound}{why}")
    return problems
