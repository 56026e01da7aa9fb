"""Quantization errors, computed in one process: qwZ's weights as the ranks use them, qgZ's mean gradients.

Nothing is communicated here; the arithmetic is that of comm/zeropp.py, block by block and in its order, which a test
compares bit for bit with a real exchange.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .quantize import Codec


@dataclass(frozen=True)
class Error:
    """The quantization error of one tensor.

    `snr_db`: 10 · log10(sum of x² / sum of errors²), infinite without errors. `bias`: the mean error over the mean of
    |x|. `largest`: the largest error over the largest |x|.
    """

    snr_db: float
    bias: float
    largest: float

    @staticmethod
    def of(exact: torch.Tensor, coded: torch.Tensor) -> Error:
        """Compares two tensors of one shape; sums in fp64."""
        x, off = exact.double(), coded.double() - exact.double()
        signal, noise = x.square().sum().item(), off.square().sum().item()
        snr = math.inf if noise == 0 else 10 * math.log10(signal / noise) if signal else -math.inf
        most, mean = x.abs().max().item(), x.abs().mean().item()
        return Error(snr, off.mean().item() / mean if mean else 0.0, off.abs().max().item() / most if most else 0.0)


def through(codec: Codec, slices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Quantizes `slices`, (rows, numel), and returns them dequantized to `dtype`."""
    payloads = slices.new_empty(len(slices), codec.payload_bytes(slices.shape[1]), dtype=torch.uint8)
    codec.encode(slices, payloads)
    decoded = torch.empty_like(slices, dtype=dtype)
    codec.decode(payloads, decoded)
    return decoded


def gathered(full: torch.Tensor, ranks: int, codec: Codec) -> torch.Tensor:
    """Returns `full`, (N · shard_numel,), after qwZ's quantized gather."""
    return through(codec, full.view(ranks, -1), full.dtype).view(-1)


def exchanged(brought: torch.Tensor, node_size: int, codec: Codec) -> torch.Tensor:
    """Returns qgZ's reduce-scatter of N ranks' gradients, (N, numel): the sum, (numel,), in their dtype."""
    ranks = len(brought)
    sums = torch.stack([_hop(node, codec) for node in brought.view(ranks // node_size, node_size, -1)])
    if node_size == 1:
        sums = brought
    if ranks > node_size:  # local rank l's block, in which each node has a slice
        blocks = sums.view(ranks // node_size, node_size, -1).unbind(1)
        sums = torch.stack([_hop(block, codec) for block in blocks])
    return sums.reshape(-1).to(brought.dtype)


def _hop(rows: torch.Tensor, codec: Codec) -> torch.Tensor:
    """Sums `rows`, (n, numel), over n ranks: part j of every other row reaches rank j quantized; fp32, (numel,)."""
    n = len(rows)
    parts = rows.view(n, n, -1)
    sums = []
    for here in range(n):
        total = parts[here, here].float()
        for peer in (peer for peer in range(n) if peer != here):
            total = total + through(codec, parts[peer, here][None], torch.float32)[0]
        sums.append(total)
    return torch.cat(sums)
