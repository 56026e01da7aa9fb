"""Functions of torch.nn.functional whose CUDA kernels keep other tensors for backward than a CPU's.

dropout      one kernel: keeps a mask of one byte an element, where a CPU keeps a factor in the input's dtype
layer_norm   keeps means and deviations in fp32, where a CPU keeps them in the input's dtype
rms_norm     one kernel: keeps its input and fp32 deviations, where a CPU runs plain operators
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

_HALVES = (torch.float16, torch.bfloat16)
_dropout, _layer_norm, _rms_norm = F.dropout, F.layer_norm, F.rms_norm


def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Stands for dropout; in place CUDA runs plain operators, too."""
    if inplace or not training or not 0 < p < 1:
        return _dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


class _Norm(torch.autograd.Function):
    """A normalization in one kernel. `statistics`: fp32 numbers that it keeps of each row."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, dims: int, statistics: int
    ) -> torch.Tensor:
        rows = [*x.shape[: x.dim() - dims], *[1] * dims]
        kept = [torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(statistics)]
        ctx.save_for_backward(x, weight, bias, *kept)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        given = ctx.saved_tensors[:3]
        wanted = zip(given, ctx.needs_input_grad, strict=False)
        return *(torch.empty_like(one) if one is not None and needed else None for one, needed in wanted), None, None


def layer_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, eps: float = 1e-5,
) -> torch.Tensor:  # fmt: skip
    """Stands for layer_norm; in fp32 the devices are alike."""
    if input.dtype not in _HALVES:
        return _layer_norm(input, list(normalized_shape), weight, bias, eps)
    return _Norm.apply(input.contiguous(), weight, bias, len(normalized_shape), 2)


def rms_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """Stands for rms_norm; where dtypes differ CUDA runs plain operators, too."""
    if weight is not None and weight.dtype != input.dtype:
        return _rms_norm(input, list(normalized_shape), weight, eps)
    return _Norm.apply(input.contiguous(), weight, None, len(normalized_shape), 1)
