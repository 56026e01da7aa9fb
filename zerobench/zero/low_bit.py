"""AdamW whose two moments take 2 or 4 bytes per parameter instead of 8; the update itself is torch's, in fp32.

[Note: the states of a parameter]
Flat, in the order of the parameter's memory (layout.py), with the number of steps as a Python integer::

    AdamW8bit    exp_avg, exp_avg_sq               uint8, a code for each element
                 exp_avg_scale, exp_avg_sq_scale   fp32, the largest magnitude of each block of 256 elements
    AdamWBf16    exp_avg, exp_avg_sq               bf16, rounded stochastically

A code is the number of a level in a dynamic map (Dettmers et al., arXiv 2110.02861, sections 1.3 and 2.1); its value is
the level times the block's scale. Levels are dense near 1 and span seven decades, like magnitudes in a block. One level
of the paper is not used: zero, for the second moment. If an element's second moment were rounded to zero but
not its first, it would move by `exp_avg / eps`: this would happen to rarely used rows of an embedding.

[Note: every partition makes the same states]
Blocks are counted from the start of each parameter. An engine that starts parameters and ends shards, tiles and tiers
at multiples of `block_numel` elements never cuts a block, so that the update of an element is the same for any N, to
the bit. Stochastic rounding takes its random bits from a hash of the value and the step, not from a generator, so
that they do not depend on the partition either, and a checkpoint holds no generator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import optim
from torch.nn.functional import pad

from .layout import MemoryOrder

BLOCK_NUMEL = 256
CHUNK_NUMEL = {"cpu": 2**20, "cuda": 2**26}
"""Device type -> elements whose states are decoded to fp32 at a time, whole blocks. Small chunks stay in a CPU's cache,
and leave a GPU's multiprocessors idle.
"""

MOMENTS = ("exp_avg", "exp_avg_sq")


def block_numel(optimizer: object) -> int:
    """Elements whose states cannot be cut: the attribute `block_numel` of an optimizer or its class, or 1."""
    return int(getattr(optimizer, "block_numel", 1))


def state_block(optimizer: optim.Optimizer, key: str) -> int:
    """Elements of a parameter for each element of the state `key`: more than 1 for states in `per_block`."""
    return block_numel(optimizer) if key in getattr(optimizer, "per_block", ()) else 1


class LowBitAdamW(optim.Optimizer):
    """torch.optim.AdamW, with moments that are decoded before an update and encoded after it, a chunk at a time.

    `dtypes`: of each state; `per_block`: the states with an element per block of `block_numel` elements.
    Raises ValueError for options out of range.
    """

    block_numel = 1
    per_block: ClassVar[tuple[str, ...]] = ()
    dtypes: ClassVar[dict[str, torch.dtype]]

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.01, *, foreach: bool | None = None,
    ) -> None:  # fmt: skip
        right = {"lr": lr >= 0, "betas": all(0 <= beta < 1 for beta in betas), "eps": eps >= 0, "foreach": not foreach}
        if wrong := [name for name, fits in right.items() if not fits]:
            raise ValueError(
                f"{type(self).__name__}: {wrong[0]} is out of range (lr, eps: at least 0; betas: at least 0 and below"
                " 1; foreach: it has a loop only)"
            )
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        order, numel = MemoryOrder.of(parameter), parameter.numel()
        kept = self.state[parameter]
        if not kept:
            kept["step"] = 0
            sizes = {key: -(-numel // state_block(self, key)) for key in self.dtypes}
            kept |= {
                key: torch.zeros(sizes[key], dtype=dtype, device=parameter.device) for key, dtype in self.dtypes.items()
            }
        kept["step"] += 1
        flat, gradient = order.flatten(parameter), order.flatten(gradient)
        chunk = CHUNK_NUMEL[parameter.device.type]
        for start in range(0, numel, chunk):
            part = {
                key: value[start // state_block(self, key) : -(-(start + chunk) // state_block(self, key))]
                for key, value in kept.items()
                if key in self.dtypes
            }
            elements = slice(start, start + chunk)
            self._update_part(flat[elements], gradient[elements].float(), part, group, kept["step"])
        if parameter.stride() != order.strides:  # flat may be a copy
            parameter.copy_(order.view(flat))

    def _update_part(
        self, flat: torch.Tensor, gradient: torch.Tensor, kept: dict[str, torch.Tensor], group: dict[str, Any],
        step: int,
    ) -> None:  # fmt: skip
        """The operations of torch.optim.AdamW(foreach=False), in its order."""
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        flat.mul_(1 - lr * group["weight_decay"])
        mean, square = (self._decode(key, kept) for key in MOMENTS)
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        denominator = (square.sqrt() / (1 - beta2**step) ** 0.5).add_(group["eps"])
        flat.addcdiv_(mean, denominator, value=-lr / (1 - beta1**step))
        for key, values in zip(MOMENTS, (mean, square), strict=True):
            self._encode(key, values, kept, step)

    def _decode(self, key: str, kept: dict[str, torch.Tensor]) -> torch.Tensor:
        """The moment `key` in fp32, (n,), not a view."""
        raise NotImplementedError

    def _encode(self, key: str, values: torch.Tensor, kept: dict[str, torch.Tensor], step: int) -> None:
        """Stores the moment `key`, `values` of (n,) in fp32, in `kept`."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state; the low-bit tensors as they are, since torch's casts them to the parameter's dtype."""
        super().load_state_dict(state_dict)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for parameter, number in zip(group["params"], saved["params"], strict=True):
                kept = state_dict["state"].get(number, {})
                self.state[parameter].update(
                    (key, kept[key].to(parameter.device, dtype, copy=True))
                    for key, dtype in self.dtypes.items() if key in kept
                )  # fmt: skip


class AdamW8bit(LowBitAdamW):
    """AdamW with 8-bit moments: 2 + 8/256 bytes of states per parameter. See the module's notes."""

    block_numel = BLOCK_NUMEL
    per_block = tuple(f"{key}_scale" for key in MOMENTS)
    dtypes: ClassVar = dict.fromkeys(MOMENTS, torch.uint8) | dict.fromkeys(per_block, torch.float32)

    def _decode(self, key: str, kept: dict[str, torch.Tensor]) -> torch.Tensor:
        codes, scale = kept[key], kept[f"{key}_scale"]
        return _on(codes.device, LEVELS[key]).index_select(0, codes.int()).mul_(_spread(scale, codes.numel()))

    def _encode(self, key: str, values: torch.Tensor, kept: dict[str, torch.Tensor], step: int) -> None:
        blocks = pad(values, (0, -values.numel() % BLOCK_NUMEL)).view(-1, BLOCK_NUMEL)
        scale = kept[f"{key}_scale"].copy_(blocks.abs().amax(1))
        parts = values / _spread(torch.where(scale == 0, 1, scale), values.numel())
        levels = LEVELS[key]
        middles = [(low + high) / 2 for low, high in pairwise(levels)]
        codes = torch.bucketize(parts, _on(values.device, middles), out_int32=True)
        kept[key].copy_(codes.clamp_(min=1) if key == "exp_avg_sq" else codes)  # 0: see the first note


class AdamWBf16(LowBitAdamW):
    """AdamW with bf16 moments, rounded stochastically: 4 bytes of states per parameter.

    With rounding to nearest a second moment would stop changing: with beta2 = 0.999 a step changes it by less than half
    of bf16's last place.
    """

    dtypes: ClassVar = dict.fromkeys(MOMENTS, torch.bfloat16)

    def _decode(self, key: str, kept: dict[str, torch.Tensor]) -> torch.Tensor:
        return kept[key].float()

    def _encode(self, key: str, values: torch.Tensor, kept: dict[str, torch.Tensor], step: int) -> None:
        kept[key].copy_(round_stochastically(values, 2 * step + MOMENTS.index(key)))


def round_stochastically(values: torch.Tensor, salt: int) -> torch.Tensor:
    """Rounds fp32 values to one of their two bf16 neighbors, with a probability that makes the mean exact. The random
    bits are a hash of the value's own bits and `salt`, independent of the value's position. Equal values are rounded
    alike, and differently with another salt.
    """
    bits = values.view(torch.int32)
    # lowbias32 (C. Wellons, hash-prospector); int32 shifts keep the sign, hence the masks
    noise = bits ^ _signed(salt * 0x9E3779B1)
    noise ^= (noise >> 16) & 0xFFFF
    noise *= 0x7FEB352D
    noise ^= (noise >> 15) & 0x1FFFF
    noise *= _signed(0x846CA68B)
    noise = noise ^ ((noise >> 16) & 0xFFFF)
    rounded = ((bits + (noise & 0xFFFF)) & -0x10000).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)


def _signed(number: int) -> int:
    """The low 32 bits as a signed integer."""
    return (number + 2**31) % 2**32 - 2**31


def _levels(first: int, bits: int) -> list[float]:
    """The levels above 0 of a dynamic map, up to 1: number n, from `first` to 2^bits - 1, is the middle of one of
    2^e equal parts of [0.1, 1], times 10^(e - bits + 1), where 2^e is n's highest bit.
    """
    levels = []
    for n in range(first, 2**bits):
        parts = 2 ** (n.bit_length() - 1)
        levels.append(10.0 ** (n.bit_length() - bits) * (0.1 + 0.9 * (n - parts + 0.5) / parts))
    return [*levels, 1.0]


_POSITIVE = _levels(1, 7)
LEVELS = {"exp_avg": [*(-level for level in _POSITIVE[-2::-1]), 0.0, *_POSITIVE], "exp_avg_sq": [0.0, *_levels(2, 8)]}
"""256 levels each: -0.993 to 1 for the first moment, 0 to 1 for the second."""


def _spread(scale: torch.Tensor, numel: int) -> torch.Tensor:
    """Each element's scale, (numel,)."""
    return scale.repeat_interleave(BLOCK_NUMEL)[:numel]


def _on(device: torch.device, values: Iterable[float]) -> torch.Tensor:
    """The values in fp32, without waiting for a GPU; not cached, because that would be memory beyond the states."""
    return torch.tensor(values, dtype=torch.float32).to(device, non_blocking=True)
