"""Block quantization: slices as whole numbers of 8 or 4 bits and a scale for every block of elements.

A slice of n elements is coded into a payload of bytes (`payload_bytes`, a multiple of 64)::

    values    8 bits: n bytes. 4 bits: ceil(n/2), element i in the low half of byte i, element i + ceil(n/2) in the high
    scales    4 bytes a block, fp32: max|x| over the block / LEVELS                  (the last block may be shorter)
    padding
    stamp     STAMP_NUMEL bytes, which whoever sends may write digits to (comm/desync.py)

LEVELS is 127 for 8 bits and 7 for 4. An element x of a block is coded as round(x / scale), to the nearest, ties to
even, and comes out as that times the scale.

[Note: the bound]
For every element of a block whose max|x| = m is finite

    |decoded - x|  <=  scale / 2 · (1 + 2^-14)  =  m / (2 · LEVELS) · (1 + 2^-14)       m/254, or m/14

in fp32; the few more are roundings of the scale, of the quotient and of the product. What is decoded into a half dtype
is rounded to that once more. Blocks of m below 2^-119 come out as 0. One with a NaN or an infinity comes out as NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .desync import STAMP_NUMEL

ALIGN_BYTES = 64

LEVELS = {8: 127, 4: 7}
"""Largest whole number by bits."""

LEAST = 2.0**-119
"""Blocks whose largest element is below come out as 0: their scale would be no normal fp32 number."""

CHUNK = 2**18
"""Elements that are coded at once on a CPU: temporaries in fp32 are of no more. A GPU has them whole, for its kernels
take their time to start.
"""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What can be coded."""


@dataclass(frozen=True)
class Codec:
    """`bits`: 8 or 4. `block`: elements that share a scale."""

    bits: int
    block: int

    def payload_bytes(self, numel: int) -> int:
        """Bytes of the payload of a slice of `numel` elements."""
        used = self._values_bytes(numel) + 4 * -(-numel // self.block) + STAMP_NUMEL
        return -(-used // ALIGN_BYTES) * ALIGN_BYTES

    def encode(self, slices: torch.Tensor, payloads: torch.Tensor) -> None:
        """Codes `slices`, (rows, numel) of one of DTYPES, into `payloads`, (rows, payload_bytes) uint8."""
        values, scales = self._parts(payloads, slices.shape[1])
        whole = torch.empty(slices.shape, dtype=torch.int8, device=slices.device)
        for part, place, into in _blocks(self.block, slices, whole, scales):
            self._encode_blocks(part.float(), place, into)
        if self.bits == 8:
            values.copy_(whole.view(torch.uint8))
        else:
            _pack(whole, values)
        payloads[:, self._values_bytes(slices.shape[1]) + 4 * scales.shape[1] :].zero_()

    def decode(self, payloads: torch.Tensor, slices: torch.Tensor) -> None:
        """Fills `slices`, (rows, numel) of one of DTYPES, from `payloads`, (rows, payload_bytes) uint8."""
        values, scales = self._parts(payloads, slices.shape[1])
        whole = values.view(torch.int8) if self.bits == 8 else _unpack(values, slices.shape[1])
        for place, part, scale in _blocks(self.block, slices, whole, scales):
            place.copy_(part.float().mul_(scale))  # not part * scale: of mixed dtypes it makes copies of its own

    def _encode_blocks(self, x: torch.Tensor, place: torch.Tensor, into: torch.Tensor) -> None:
        """`x`: (rows, blocks, elements) fp32; `place`: the same of int8; `into`: (rows, blocks, 1) fp32."""
        largest = x.abs().amax(2, keepdim=True)
        levels = largest.new_full((), LEVELS[self.bits])  # by a number CUDA would multiply by the reciprocal
        scale = torch.where(largest < LEAST, 0.0, largest / levels)
        scale = torch.where(largest.isfinite(), scale, torch.nan)
        into.copy_(scale)
        levels = (x / scale).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)  # 0 / 0, and what the scale tells
        place.copy_(levels.round_())

    def _values_bytes(self, numel: int) -> int:
        """With what brings the scales to a multiple of 4."""
        used = numel if self.bits == 8 else -(-numel // 2)
        return -(-used // 4) * 4

    def _parts(self, payloads: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views: values, (rows, n or ceil(n/2)) uint8; scales, (rows, blocks) fp32."""
        start, blocks = self._values_bytes(numel), -(-numel // self.block)
        used = numel if self.bits == 8 else -(-numel // 2)
        return payloads[:, :used], payloads[:, start : start + 4 * blocks].view(torch.float32)


def _blocks(
    block: int, first: torch.Tensor, second: torch.Tensor, scales: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Views of two (rows, numel) tensors as (rows, blocks, elements), and of their scales, (rows, blocks, 1): those of
    the whole blocks, CHUNK elements at a time on a CPU, and of the shorter one at the end.
    """
    rows, numel = first.shape
    whole = numel // block
    end = whole * block
    parts = []
    step = max(1, CHUNK // (rows * block)) if first.device.type == "cpu" else max(1, whole)
    for begin in range(0, whole, step):
        few = min(step, whole - begin)
        both = (x[:, begin * block : (begin + few) * block].unflatten(1, (few, block)) for x in (first, second))
        parts.append((*both, scales[:, begin : begin + few].unsqueeze(2)))
    if end < numel:
        both = (x[:, end:].unsqueeze(1) for x in (first, second))
        parts.append((*both, scales[:, whole:].unsqueeze(2)))
    return parts


def _pack(whole: torch.Tensor, values: torch.Tensor) -> None:
    """Two numbers of -7 .. 7 a byte, each 8 more than it is. `whole`: (rows, n) int8; `values`: (rows, ceil(n/2))."""
    half = values.shape[1]
    rest = whole.shape[1] - half
    shifted = whole.add_(8).view(torch.uint8)
    values.copy_(shifted[:, :half])
    values[:, :rest] |= shifted[:, half:] << 4


def _unpack(values: torch.Tensor, numel: int) -> torch.Tensor:
    """(rows, numel) int8."""
    half = values.shape[1]
    whole = torch.empty(values.shape[0], numel, dtype=torch.int8, device=values.device)
    whole[:, :half] = values & 15
    whole[:, half:] = values[:, : numel - half] >> 4
    return whole.sub_(8)
