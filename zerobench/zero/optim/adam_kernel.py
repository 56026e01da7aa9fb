"""Adam and AdamW over a rank's shards in one pass, in Triton, which torch's builds for CUDA bring along.

A table in device memory has one row of COLUMNS 64-bit words for each segment: addresses, elements, and its group's
options as the bits of fp64 numbers. A program updates BLOCK elements, and finds its segment by bisection. Numbers are
rounded to bf16 in integers: Triton's interpreter, which runs the kernels on a CPU (TRITON_INTERPRET=1), truncates.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import triton
from triton import language as tl

from ..precision import UpdatedShare

COLUMNS = tl.constexpr(18)
BLOCK = 4096
"""Elements of a program."""


@triton.jit
def _segment(table, segments, depth):
    """Returns the row of the segment that this program updates, and the program's first element in the segment."""
    block = tl.program_id(0).to(tl.int64)
    low, high = block * 0, block * 0 + segments
    for _ in range(depth):
        middle = (low + high) // 2
        later = tl.load(table + middle * COLUMNS) > block
        low, high = tl.where(later, low, middle), tl.where(later, middle, high)
    row = table + low * COLUMNS
    return row, block - tl.load(row)


@triton.jit
def _rounded(values, IS_BF16: tl.constexpr):
    """Returns the bits of fp32 `values` rounded to the nearest number of a half-precision dtype, ties to even."""
    if IS_BF16:
        bits = values.to(tl.int32, bitcast=True)
        rounded = tl.where(values == values, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0)
        return rounded.to(tl.int16)
    return values.to(tl.float16).to(tl.int16, bitcast=True)


@triton.jit
def _update(row, i, mask, factor, GRADIENT: tl.constexpr, IS_BF16: tl.constexpr, ROUNDS: tl.constexpr,
            COMPARES: tl.constexpr, AMSGRAD: tl.constexpr, ALIGNED: tl.constexpr):  # fmt: skip
    """Updates elements `i` of a segment, where `mask` is True: torch's arithmetic."""
    masters = tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(tl.float32)) + i, [ALIGNED])
    gradients = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(GRADIENT)) + i, [ALIGNED])
    averages = tl.multiple_of(tl.load(row + 4).to(tl.pointer_type(tl.float32)) + i, [ALIGNED])
    squares = tl.multiple_of(tl.load(row + 5).to(tl.pointer_type(tl.float32)) + i, [ALIGNED])
    numbers = row.to(tl.pointer_type(tl.float64), bitcast=True)
    lr, beta1, beta2 = tl.load(numbers + 10), tl.load(numbers + 11), tl.load(numbers + 12)
    if tl.load(row + 9) != 0:  # the learning rate is a tensor
        lr = tl.load(tl.load(row + 9).to(tl.pointer_type(tl.float32))).to(tl.float64)
    eps, decay, coupled_decay = tl.load(numbers + 13), tl.load(numbers + 14), tl.load(numbers + 15).to(tl.float32)
    count = tl.load(tl.load(row + 7).to(tl.pointer_type(tl.float32))).to(tl.float64) + 1
    correction1 = 1 - tl.exp(count * tl.log(tl.maximum(beta1, 1e-300)))  # 1 - beta1^count
    correction2 = 1 - tl.exp(count * tl.log(tl.maximum(beta2, 1e-300)))
    rate, root = (lr / correction1).to(tl.float32), tl.sqrt(correction2).to(tl.float32)

    m = tl.load(masters, mask=mask, other=0.0)
    if ROUNDS:
        parameters = tl.multiple_of(tl.load(row + 8).to(tl.pointer_type(tl.int16)) + i, [ALIGNED])
        if COMPARES:
            differ = (_rounded(m, IS_BF16) != tl.load(parameters, mask=mask, other=0)) & (m == m) & mask
            if tl.max(differ.to(tl.int32)) > 0:
                tl.store(tl.load(row + 17).to(tl.pointer_type(tl.int32)), 1)
    g = tl.load(gradients, mask=mask, other=0.0).to(tl.float32) * factor * tl.load(numbers + 16).to(tl.float32)
    if coupled_decay != 0:
        g = g + m * coupled_decay
    m = m * (1 - lr * decay).to(tl.float32)
    a, s = tl.load(averages, mask=mask, other=0.0), tl.load(squares, mask=mask, other=0.0)
    a = a + (1 - beta1).to(tl.float32) * (g - a)
    s = s * beta2.to(tl.float32) + (1 - beta2).to(tl.float32) * g * g
    tl.store(averages, a, mask=mask)
    tl.store(squares, s, mask=mask)
    if AMSGRAD:  # noqa: SIM102  # a condition of compilation
        if tl.load(row + 6) != 0:
            largest = tl.multiple_of(tl.load(row + 6).to(tl.pointer_type(tl.float32)) + i, [ALIGNED])
            s = tl.maximum(tl.load(largest, mask=mask, other=0.0), s, propagate_nan=tl.PropagateNan.ALL)
            tl.store(largest, s, mask=mask)
    m = m - tl.div_rn(rate * a, tl.div_rn(tl.sqrt_rn(s), root) + eps.to(tl.float32))
    tl.store(masters, m, mask=mask)
    if ROUNDS:
        tl.store(parameters, _rounded(m, IS_BF16), mask=mask)


@triton.jit
def _adam(table, segments, depth, factor, found_inf, HAS_FACTOR: tl.constexpr, JUDGES: tl.constexpr,
          GRADIENT: tl.constexpr, IS_BF16: tl.constexpr, ROUNDS: tl.constexpr, COMPARES: tl.constexpr,
          AMSGRAD: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row, blocks = _segment(table, segments, depth)
    i, numel = blocks * BLOCK + tl.arange(0, BLOCK), tl.load(row + 1)
    if JUDGES:
        numel = tl.where(tl.load(found_inf) == 0, numel, 0)
    scale = 1.0
    if HAS_FACTOR:
        scale = tl.load(factor).to(tl.float32)
    if (blocks + 1) * BLOCK <= numel:  # without a mask that the compiler knows nothing of, loads are of 16 bytes
        _update(row, i, i >= 0, scale, GRADIENT, IS_BF16, ROUNDS, COMPARES, AMSGRAD, ALIGNED)
    else:
        _update(row, i, i < numel, scale, GRADIENT, IS_BF16, ROUNDS, COMPARES, AMSGRAD, ALIGNED)


@triton.jit
def _count(table, segments, found_inf, JUDGES: tl.constexpr, BLOCK: tl.constexpr):
    """Adds 1 to the steps of all segments, unless a gradient overflowed."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    steps = tl.load(table + i * COLUMNS + 7, mask=i < segments, other=0).to(tl.pointer_type(tl.float32))
    added = 1.0
    if JUDGES:
        added = tl.where(tl.load(found_inf) == 0, 1.0, 0.0)
    tl.store(steps, tl.load(steps, mask=i < segments, other=0.0) + added, mask=i < segments)


@triton.jit
def _squares(table, segments, depth, sums, GRADIENT: tl.constexpr, ALIGNED: tl.constexpr,
             BLOCK: tl.constexpr):  # fmt: skip
    """Writes each program's sum of the squares of its gradients."""
    row, blocks = _segment(table, segments, depth)
    i = blocks * BLOCK + tl.arange(0, BLOCK)
    gradients = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(GRADIENT)) + i, [ALIGNED])
    g = tl.load(gradients, mask=i < tl.load(row + 1), other=0.0).to(tl.float64)
    tl.store(sums + tl.program_id(0), tl.sum(g * g))


def update(
    parts: Sequence[UpdatedShare], factor: torch.Tensor | None, found_inf: torch.Tensor | None,
    flags: torch.Tensor | None,
) -> None:  # fmt: skip
    """Updates `parts` of the same dtypes, as one_pass.Kernels specifies."""
    first, rows, options = 0, list[list[int]](), dict[int, list[int]]()
    for part in parts:
        lr, state = part.group["lr"], part.state
        if id(part.group) not in options:
            options[id(part.group)] = _options(part.group, part.master.device)
        tensors = (
            part.master, part.gradient, state["exp_avg"], state["exp_avg_sq"], state.get("max_exp_avg_sq"),
            state["step"], part.parameter, lr if _is_read(lr, part.master.device) else None,
        )  # fmt: skip
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        flag = 0 if flags is None else flags.data_ptr() + 4 * part.number
        rows.append([first, part.master.numel(), *addresses, *options[id(part.group)], flag])
        first += triton.cdiv(part.master.numel(), BLOCK)
    table, depth = _sent(rows, parts[0].master.device), (len(rows) - 1).bit_length()
    rounded = parts[0].parameter
    with torch.cuda.device_of(table):  # Triton launches on the current device
        if first:
            _adam[(first,)](
                table, len(rows), depth, factor, found_inf, factor is not None, found_inf is not None,
                DTYPES[parts[0].gradient.dtype], rounded is not None and rounded.dtype == torch.bfloat16,
                rounded is not None, flags is not None, any(part.group["amsgrad"] for part in parts),
                _alignment(address for row in rows for address in row[2:9]), BLOCK, num_warps=8,
            )  # fmt: skip
        _count[(triton.cdiv(len(rows), BLOCK),)](table, len(rows), found_inf, found_inf is not None, BLOCK)


def squares(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns each program's sum of squares, in fp64, of gradients of one dtype."""
    first, rows = 0, list[list[int]]()
    for gradient in gradients:
        rows.append([first, gradient.numel(), 0, gradient.data_ptr(), *[0] * (COLUMNS.value - 4)])
        first += triton.cdiv(gradient.numel(), BLOCK)
    device, depth = gradients[0].device, (len(rows) - 1).bit_length()
    sums = torch.empty(first, dtype=torch.float64, device=device)
    if first:
        aligned = _alignment(row[3] for row in rows)
        table, dtype = _sent(rows, device), DTYPES[gradients[0].dtype]
        with torch.cuda.device_of(table):
            _squares[(first,)](table, len(rows), depth, sums, dtype, aligned, BLOCK, num_warps=8)
    return sums


DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def _options(group: dict[str, Any], device: torch.device) -> list[int]:
    lr, decay, decoupled = group["lr"], group["weight_decay"], group["decoupled_weight_decay"]
    numbers = (
        0 if _is_read(lr, device) else lr, *group["betas"], group["eps"], decay * decoupled, decay * (not decoupled),
        -1 if group["maximize"] else 1,
    )  # fmt: skip
    return [*struct.unpack("7q", struct.pack("7d", *map(float, numbers)))]


def _is_read(lr: torch.Tensor | float, device: torch.device) -> bool:
    """Returns True for a learning rate that the kernel reads, so that the host does not wait for it."""
    return isinstance(lr, torch.Tensor) and lr.device == device and lr.dtype == torch.float32


def _sent(rows: list[list[int]], device: torch.device) -> torch.Tensor:
    """Returns a table on the device; torch keeps pinned memory until it was copied."""
    return torch.tensor(rows, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def _alignment(addresses: Iterable[int]) -> int:
    """Returns a number of bytes that divides all addresses, at most 16."""
    return 16 if all(address % 16 == 0 for address in addresses) else 2
