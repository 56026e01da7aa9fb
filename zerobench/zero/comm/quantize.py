"""Block quantization: slices as integers of 8 or 4 bits, with a scale per block of elements.

A slice of n elements is quantized into a payload of bytes (`payload_bytes`, a multiple of 64)::

    values    8 bits: n bytes. 4 bits: ceil(n/2), element i in the low half of byte i, element i + ceil(n/2) in the high
    scales    4 bytes per block, fp32: max|x| over the block / LEVELS                (the last block may be shorter)
    padding   of at least RESERVED_BYTES

LEVELS is 127 for 8 bits and 7 for 4. An element x of a block is quantized to q = round(x / scale), to the nearest, ties
to even, and dequantized to q · scale.

[Note: the bound]
For every element of a block whose max|x| = m is finite

    |decoded - x|  <=  scale / 2 · (1 + 2^-14)  =  m / (2 · LEVELS) · (1 + 2^-14)       m/254, or m/14

in fp32; the term 2^-14 covers the rounding of the scale, the quotient and the product. Decoding to a half dtype
rounds once more. Blocks with m below 2^-119 decode to 0. A block with a NaN or an infinity decodes to NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

ALIGN_BYTES = 64

RESERVED_BYTES = 8
"""Bytes kept free at the end of a payload. The predicted and the recorded volumes count them."""

LEVELS = {8: 127, 4: 7}
"""Bits -> largest quantized magnitude."""

LEAST = 2.0**-119
"""Blocks whose largest magnitude is below this decode to 0: their scale would not be a normal fp32 number."""

CHUNKS = {"cpu": 2**18}
"""Device type -> elements quantized at a time, which bounds the fp32 temporaries. A GPU quantizes whole slices, since
its kernels take long to launch.
"""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that can be quantized."""


@dataclass(frozen=True)
class Codec:
    """A block quantizer. `bits`: 8 or 4. `block`: elements per scale."""

    bits: int
    block: int

    def payload_bytes(self, numel: int) -> int:
        """Returns the payload's size in bytes for a slice of `numel` elements."""
        used = self._values_bytes(numel) + 4 * -(-numel // self.block) + RESERVED_BYTES
        return -(-used // ALIGN_BYTES) * ALIGN_BYTES

    def encode(self, slices: torch.Tensor, payloads: torch.Tensor) -> None:
        """Quantizes `slices`, (rows, numel) in one of DTYPES, into `payloads`, (rows, payload_bytes) uint8."""
        values, scales = self._parts(payloads, slices.shape[1])
        whole = torch.empty(slices.shape, dtype=torch.int8, device=slices.device)
        for part, quantized, scale in _blocks(self.block, slices, whole, scales):
            self._encode_blocks(part.float(), quantized, scale)
        if self.bits == 8:
            values.copy_(whole.view(torch.uint8))
        else:
            half = values.shape[1]
            rest = whole.shape[1] - half
            shifted = whole.add_(8).view(torch.uint8)
            values.copy_(shifted[:, :half])
            values[:, :rest] |= shifted[:, half:] << 4
        payloads[:, self._values_bytes(slices.shape[1]) + 4 * scales.shape[1] :].zero_()

    def decode(self, payloads: torch.Tensor, slices: torch.Tensor) -> None:
        """Fills `slices`, (rows, numel) in one of DTYPES, from `payloads`, (rows, payload_bytes) uint8."""
        values, scales = self._parts(payloads, slices.shape[1])
        if self.bits == 8:
            whole = values.view(torch.int8)
        else:
            half, (rows, numel) = values.shape[1], slices.shape
            whole = torch.empty(rows, numel, dtype=torch.int8, device=values.device)
            whole[:, :half] = values & 15
            whole[:, half:] = values[:, : numel - half] >> 4
            whole.sub_(8)
        for decoded, part, scale in _blocks(self.block, slices, whole, scales):
            decoded.copy_(part.float().mul_(scale))  # not part * scale: mixed dtypes would make another temporary

    def _encode_blocks(self, x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> None:
        """Quantizes `x`, (rows, blocks, elements) fp32, into `values`, int8, and `scales`, (rows, blocks, 1)."""
        largest = x.abs().amax(2, keepdim=True)
        levels = largest.new_full((), LEVELS[self.bits])  # a tensor: dividing by a number, CUDA uses the reciprocal
        scale = torch.where(largest < LEAST, 0.0, largest / levels)
        scale = torch.where(largest.isfinite(), scale, torch.nan)
        scales.copy_(scale)
        levels = (x / scale).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)  # 0 / 0; NaN and inf are in the scale
        values.copy_(levels.round_())

    def _values_bytes(self, numel: int) -> int:
        """Returns the bytes of the values, padded to a multiple of 4, at which the fp32 scales begin."""
        used = numel if self.bits == 8 else -(-numel // 2)
        return -(-used // 4) * 4

    def _parts(self, payloads: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns views of the values, (rows, n or ceil(n/2)) uint8, and the scales, (rows, blocks) fp32."""
        start, blocks = self._values_bytes(numel), -(-numel // self.block)
        used = numel if self.bits == 8 else -(-numel // 2)
        return payloads[:, :used], payloads[:, start : start + 4 * blocks].view(torch.float32)


def _blocks(
    block: int, first: torch.Tensor, second: torch.Tensor, scales: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Returns views of two (rows, numel) tensors as (rows, blocks, elements), and of their scales, (rows, blocks, 1).
    First the whole blocks, CHUNKS elements at a time, then the shorter block at the end.
    """
    rows, numel = first.shape
    whole = numel // block
    end = whole * block
    parts = []
    step = max(1, CHUNKS.get(first.device.type, first.numel()) // (rows * block))
    for begin in range(0, whole, step):
        count = min(step, whole - begin)
        pair = (x[:, begin * block : (begin + count) * block].unflatten(1, (count, block)) for x in (first, second))
        parts.append((*pair, scales[:, begin : begin + count].unsqueeze(2)))
    if end < numel:
        pair = (x[:, end:].unsqueeze(1) for x in (first, second))
        parts.append((*pair, scales[:, whole:].unsqueeze(2)))
    return parts
