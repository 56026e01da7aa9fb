"""Megatron-core's distributed optimizer: optimizer states are partitioned, as in ZeRO-1, with its own choices.

Gradients are accumulated over the micro-batches in one contiguous buffer, in fp32 regardless of the model's dtype
(main gradients), and each rank owns 1/N of every bucket of this buffer::

    reduce    buckets are reduce-scattered in the last micro-batch            ψ sent
    update    fp32 masters; gradients in half precision are cast whole
    gather    buckets are sent while the next forward runs                    ψ sent

Bytes per parameter on each rank, according to its documentation (dist_optimizer.md, N data-parallel ranks):

    parameters fp16, gradients fp16    4 + 16/N
    parameters bf16, gradients fp32    6 + 12/N
    parameters fp32, gradients fp32    8 + 8/N
"""

from __future__ import annotations

from typing import Any

import torch

from . import labels
from .stage1 import Stage1, WholeBucket
from .units.unit import Unit

DEFAULTS: dict[str, Any] = {
    "bucket_bytes": 25 * 2**20, "gradient_dtype": torch.float32, "overlap_gather": True, "tile_bytes": None
}  # fmt: skip


class MegatronStage(Stage1):
    """Optimizer states partitioned, gradients in one fp32 buffer, gathers during the next forward."""

    def allocate_gradients(self, units: list[Unit]) -> None:
        """Allocates one contiguous buffer per dtype; the units' gradients are views of it."""
        for dtype in {unit.dtypes.gradients: None for unit in units}:
            alike = [unit for unit in units if unit.dtypes.gradients == dtype]
            numel = sum(unit.layout.padded_numel for unit in alike)
            flat = torch.zeros(numel, dtype=dtype, device=alike[0].parameter_shard.device)
            labels.label(flat, labels.GRADIENTS, "main gradients")
            start = 0
            for unit in alike:
                main = flat.narrow(0, start, unit.layout.padded_numel)
                unit.gradients = WholeBucket(unit, self.comm, self.options.reduce_with, main)
                start += unit.layout.padded_numel
