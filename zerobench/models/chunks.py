"""Long sequences in parts: head and loss over parts of the tokens, an MLP over parts of the sequence; and the loss as
fused kernels compute it.

Head and MLP are recomputed in backward, a part at a time, so that tensors as wide as the vocabulary, or as the MLP's
inner layer, never exist for all tokens. Gradients of weights are sums over the parts in another order.

head and loss, T tokens, V words, n parts: 12·T·V bytes in fp32 (logits, log-probabilities, gradient) become 4·T·V/n
x        (T, H), weight (V, H): kept for backward, with the logarithm of each row's sum of exponentials, (T,) fp32

The fused loss has no logits in fp32, and stores no probabilities:
logits     (T, V) in the model's dtype; kept for the backward
lse        (T,) fp32, the logarithm of each row's sum of exponentials; kept
gradient   (T, V) in the model's dtype, (softmax(logits) - one_hot(targets)) / T, made in the backward
Its values equal cross_entropy(logits.float(), targets) up to the rounding of the gradient to the logits' dtype. Rows
are processed in blocks, whose fp32 copies stand for a kernel's registers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class LossHead(nn.Linear):
    """A head that returns the mean cross-entropy, fp32, of predicting (T,) `targets` from (T, H), in `chunks` parts.

    One module and one graph node for any number of parts: its weight is gathered once and has one gradient.
    """

    def __init__(self, chunks: int, *of_linear: Any, **more: Any) -> None:
        super().__init__(*of_linear, **more)
        self.chunks = chunks

    @staticmethod
    def of(head: nn.Linear, chunks: int) -> LossHead:
        """Returns the LossHead with the parameters of `head`."""
        shape = head.in_features, head.out_features, head.bias is not None
        made = LossHead(chunks, *shape, device="meta")
        made.weight, made.bias = head.weight, head.bias
        return made

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Returns the loss, a scalar."""
        loss: torch.Tensor = _ChunkedLoss.apply(x, self.weight, self.bias, targets, self.chunks)
        return loss


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, chunks: int
    ) -> torch.Tensor:  # fmt: skip
        lse, chosen = (torch.empty(len(x), dtype=torch.float32, device=x.device) for _ in range(2))
        parts = (whole.chunk(chunks) for whole in (x, targets, lse, chosen))
        for part, target, total, logit in zip(*parts, strict=True):
            logits = F.linear(part, weight, bias)
            logit.copy_(logits.gather(1, target[:, None])[:, 0])
            logits = logits.float()
            most = logits.amax(1, keepdim=True)
            total.copy_(logits.sub_(most).exp_().sum(1).log_().add_(most[:, 0]))
            del logits  # before the next part's are made
        ctx.save_for_backward(x, weight, bias, targets, lse)
        ctx.chunks = chunks
        return (lse - chosen).mean()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias, targets, lse = ctx.saved_tensors
        to_x, to_weight, to_bias = ctx.needs_input_grad[:3]
        of_x = torch.empty_like(x) if to_x else None
        of_weight = torch.zeros_like(weight) if to_weight else None
        of_bias = torch.zeros_like(bias) if to_bias else None
        rows = -(-len(x) // ctx.chunks)  # as Tensor.chunk has them
        for start in range(0, len(x), rows):
            part = slice(start, start + rows)
            error = _error(F.linear(x[part], weight, bias), targets[part], lse[part], gradients[0] / len(x))
            if of_x is not None:
                torch.mm(error, weight, out=of_x[part])
            if of_weight is not None:
                torch.addmm(of_weight, error.t(), x[part], out=of_weight)
            if of_bias is not None:
                of_bias.add_(error.sum(0))
            del error  # before the next part's is made
        return of_x, of_weight, of_bias, None, None


def _error(logits: torch.Tensor, targets: torch.Tensor, lse: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of `logits` in their dtype, (softmax - one_hot(targets)) · scale; may overwrite them."""
    values = logits.float().sub_(lse[:, None]).exp_()
    values.scatter_add_(1, targets[:, None], values.new_full((len(targets), 1), -1.0))
    return values.mul_(scale).to(logits.dtype)


def in_chunks(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, chunks: int) -> torch.Tensor:
    """Runs `run`, (B, S, H) -> (B, S, H), over `chunks` parts of the sequence, and again in backward; whole if 1."""
    if chunks == 1:
        return run(x)
    return torch.cat([checkpoint(run, part, use_reentrant=False) for part in x.chunk(chunks, dim=1)], dim=1)


# -- the fused loss ---------------------------------------------------------------------------------------

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
        blocks = (tensor.split(rows) for tensor in (whole, logits, lse, targets))
        for part, block, total, target in zip(*blocks, strict=True):
            values = block.float().sub_(total[:, None]).exp_()
            values.scatter_add_(1, target[:, None], values.new_full((len(target), 1), -1.0))
            part.copy_(values.mul_(gradients[0] / count))
        return whole, None


def _rows(logits: torch.Tensor) -> int:
    return max(1, BLOCK_NUMEL // logits.shape[1])


def fused_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the mean cross-entropy, fp32, of predicting `targets`, (T,) int64, from `logits`, (T, V)."""
    loss: torch.Tensor = _FusedCrossEntropy.apply(logits, targets)
    return loss
