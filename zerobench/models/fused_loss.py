"""The mean cross-entropy as fused kernels compute it: no logits in fp32, no stored probabilities.

logits     (T, V) in the model's dtype; kept for the backward
lse        (T,) fp32, the logarithm of each row's sum of exponentials; kept
gradient   (T, V) in the model's dtype, (softmax(logits) - one_hot(targets)) / T, made in the backward

Values equal cross_entropy(logits.float(), targets) up to the rounding of the gradient to the logits' dtype. Rows are
processed in blocks, whose fp32 copies stand for a kernel's registers.
"""

from __future__ import annotations

from typing import Any

import torch

BLOCK_NUMEL = 2**22
"""Elements of logits converted to fp32 at a time."""


class _FusedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        lse = torch.cat([block.float().logsumexp(1) for block in logits.split(_rows(logits))])
        ctx.save_for_backward(logits, targets, lse)
        chosen = logits.gather(1, targets[:, None])[:, 0].float()
        return (lse - chosen).mean()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, targets, lse = ctx.saved_tensors
        rows, count = _rows(logits), len(logits)
        whole = torch.empty_like(logits)
        for part, block, of, to in zip(*(one.split(rows) for one in (whole, logits, lse, targets)), strict=True):
            values = block.float().sub_(of[:, None]).exp_()
            values.scatter_add_(1, to[:, None], values.new_full((len(to), 1), -1.0))
            part.copy_(values.mul_(gradients[0] / count))
        return whole, None


def _rows(logits: torch.Tensor) -> int:
    return max(1, BLOCK_NUMEL // logits.shape[1])


def fused_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the mean cross-entropy, fp32, of predicting `targets`, (T,) int64, from `logits`, (T, V)."""
    loss: torch.Tensor = _FusedCrossEntropy.apply(logits, targets)
    return loss
