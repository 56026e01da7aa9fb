"""Selective recomputation: of a unit's operators, which outputs stay and which are computed again in backward.

kept          outputs of attention kernels, and of every second matrix product: dear to compute again
recomputed    all others: norms, activation functions, products between; they cost bandwidth more than arithmetic

(torchtitan's activation checkpointing by operators, `selective_ac_option = "op"`; Korthikanti et al., arXiv 2205.05198,
section 5, recompute attention's core alone, which fused kernels do by themselves.)
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
"""Matrix products of linear layers without and with a bias."""

ATTENTION = (
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
)  # fmt: skip
"""Kernels of scaled_dot_product_attention in torch.ops.aten."""

KEPT = frozenset(getattr(torch.ops.aten, name).default for name in ATTENTION)


class _Choice:
    """The decision on each operator of one forward, and on the same ones as they are met again in backward."""

    def __init__(self) -> None:
        self._products = {False: 0, True: 0}

    def __call__(self, context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if operator in PRODUCTS:
            self._products[context.is_recompute] += 1
            keeps = self._products[context.is_recompute] % 2 == 1
        else:
            keeps = operator in KEPT
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Returns the contexts of a unit's forward and of its recomputation, for torch.utils.checkpoint."""
    forward, again = create_selective_checkpoint_contexts(_Choice())
    return forward, again
