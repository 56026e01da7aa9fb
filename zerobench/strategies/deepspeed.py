"""DeepSpeed's ZeRO stages 1, 2 and 3 behind the engine's interface (the extra `peers`).

Tensors: stages 1 and 2 keep the parameters flat and whole, a second copy of this rank's 1/N as "fp32 master" although
the parameters are fp32 already, and gradients in `averaged_gradients`; stage 3 keeps 1/N of each parameter, the same
again as master, and a flat buffer for the gradients. All of them reduce through a bucket of fixed size.

DeepSpeed's own defaults are used, except one that would change the mathematics: `gradient_clipping`, by default 1.0, is
0 here. The user's torch optimizer is used unchanged, which avoids DeepSpeed's own CPU kernels and their compilation.
Stages 1 and 2 all-reduce each bucket (2ψ) and gather once (1ψ): 3ψ; with `multi_rank_allreduce=false` they reduce to
each owner, 2ψ.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.utils import _pytree as pytree

from ..zero import labels
from .engine import PeerEngine

FIELDS = {
    "reduce_bucket_numel": "reduce_bucket_size",
    "multi_rank_allreduce": "use_multi_rank_bucket_allreduce",
    "overlap_comm": "overlap_comm",
    "prefetch_numel": "stage3_prefetch_bucket_size",
    "persistence_numel": "stage3_param_persistence_threshold",
    "max_live_numel": "stage3_max_live_parameters",
    "max_reuse_numel": "stage3_max_reuse_distance",
}
"""Our names for DeepSpeed's settings, which include the unit -> DeepSpeed's names."""


class DeepspeedEngine(PeerEngine):
    """DeepSpeed's engine; labels its tensors."""

    hides_gradients = True
    """Between backward and update the gradients are in the engine's own buffers."""

    def __init__(
        self, module: nn.Module, optimizer: optim.Optimizer, level: int, tuned: bool = False, **settings: Any
    ) -> None:
        deepspeed = _import_deepspeed(next(module.parameters()).device.type)
        config = {
            "train_micro_batch_size_per_gpu": 1,  # only for its own throughput figures
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": level, **{FIELDS[key]: value for key, value in settings.items()}},
        }
        self._engine, self.optimizer, *_ = deepspeed.initialize(
            model=module, optimizer=optimizer, config=config, dist_init_required=False
        )
        self.module = module
        for bucket in getattr(self.optimizer, "ipg_buckets", {}).values():
            if isinstance(bucket.buffer, list):
                bucket.buffer = _Buffers()
            else:
                labels.label(bucket.buffer, labels.COMMUNICATION, "bucket")
        self._label()

    def __call__(self, *inputs: Any, **named_inputs: Any) -> Any:
        return self._engine(*inputs, **named_inputs)

    def backward(self, loss: torch.Tensor) -> None:
        """Backpropagates; buckets are reduced as they fill, in stage 1 once backward is over."""
        self._engine.backward(loss)
        self._label()

    def step(self) -> None:
        self._engine.step()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Wraps a micro-batch before a step's last: stage 1 keeps its gradients, stages 2 and 3 reduce them."""
        self._engine.set_gradient_accumulation_boundary(False)
        try:
            yield
            self._engine.step()  # counts the micro-batch, updates nothing
        finally:
            self._engine.set_gradient_accumulation_boundary(True)

    def _label(self) -> None:
        for attribute, category in HELD.items():
            for leaf in pytree.tree_leaves(getattr(self.optimizer, attribute, None)):
                if isinstance(leaf, torch.Tensor):
                    labels.label(leaf, category, attribute)


HELD = {
    "bit16_groups_flat": labels.PARAMETERS,
    "fp16_partitioned_groups_flat": labels.PARAMETERS,
    "lp_param_buffer": labels.PARAMETERS,
    "single_partition_of_fp32_groups": labels.MASTER,
    "fp32_partitioned_groups_flat": labels.MASTER,
    "averaged_gradients": labels.GRADIENTS,
    "grad_partitions_flat_buffer": labels.GRADIENTS,
}
"""Attribute of DeepSpeed's optimizer -> category of its tensors."""


class _Buffers(list[torch.Tensor]):
    """Buffers of a bucket of stages 1 and 2, made and dropped in backward: labeled when appended."""

    def append(self, buffer: torch.Tensor) -> None:
        super().append(labels.label(buffer, labels.COMMUNICATION, "bucket"))


def _import_deepspeed(device: str) -> Any:
    """Imports deepspeed, with this rank in the environment, without compiling operators that ZeRO does not use."""
    os.environ.setdefault("DS_ACCELERATOR", device)
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
