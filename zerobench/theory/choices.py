"""What `auto` stands for in a strategy's section: the engine's rules (zero/options.py, root.py), written apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .shapes import ROOT, ParameterShape, bytes_of

AUTO = "auto"
BUCKETS_A_SHARD = 2
LEAST_BYTES, MOST_BYTES = 2**20, 25 * 2**20


def root_goes(strategy: dict[str, Any], shapes: Sequence[ParameterShape]) -> bool:
    """Whether zero3 gives its root back while backward is at other units (units/root.py)."""
    root = [shape for shape in shapes if shape.unit == ROOT]
    return strategy["keep_root"] == AUTO and len(root) < len(shapes) and not any(shape.pinned for shape in root)


def reads(shape: ParameterShape, left: int) -> bool:
    """Whether backward reads a parameter where its gradient is made. `left`: how many are to come, with this one."""
    return shape.reads[left - 1] if 0 < left <= len(shape.reads) else True


def settle(strategy: dict[str, Any], shapes: Sequence[ParameterShape], sharers: int) -> dict[str, Any]:
    """`strategy`, a resolved section, with a number for the bytes of a bucket: a part of psi/N, within limits."""
    if strategy.get("bucket_bytes") != AUTO:
        return strategy
    psi_bytes = sum(bytes_of(shape) for shape in shapes if shape.trainable)
    return strategy | {"bucket_bytes": min(max(psi_bytes // sharers // BUCKETS_A_SHARD, LEAST_BYTES), MOST_BYTES)}
