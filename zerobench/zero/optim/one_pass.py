"""Adam and AdamW on a GPU: one kernel updates all of a rank's shards, and reads and writes each value once.

Per element it reads the gradient in its own dtype, times a factor on the device (unscaling, clipping), the master and
both moments, and writes master, moments and the rounded parameter; with `flags` it compares the old parameter, too.
The kernel is in Triton (adam_kernel.py). At the first use on a device it is compared with torch's own; if it is
missing, fails or differs, a warning says so, and updates are made in tiles (step_by_tiles.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from itertools import groupby
from typing import Protocol

import torch
from torch import optim

from .. import labels
from ..parameters.access import Versions
from ..precision import LOOKS_ITSELF, Share, UpdatedShare, is_fused
from .step_by_tiles import step_with

TOLERANCE_ULPS = 2
"""Largest difference of a master from torch's kernel after one step; both round several times."""


class Kernels(Protocol):
    """The kernels of a device."""

    def update(
        self, parts: Sequence[UpdatedShare], factor: torch.Tensor | None, found_inf: torch.Tensor | None,
        flags: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Updates `parts` of the same dtypes, and counts the step; changes nothing if `found_inf` is not 0."""

    def squares(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns sums of squares, in fp64, of disjoint ranges of gradients of one dtype."""


@cache
def triton_kernels(device: torch.device) -> Kernels | None:
    """Returns Triton's kernels; None, with a warning, if they do not work on `device`."""
    try:
        from . import adam_kernel

        why = _difference(adam_kernel, device)
    except ImportError as error:
        why = f"Triton is missing ({error})"
    except Exception as error:  # a compiler's, of many kinds
        why = f"it fails: {type(error).__name__}: {error}"
    if why:
        warnings.warn(f"Adam's update on {device} does not use its kernel, and is slower: {why}", stacklevel=2)
    return None if why else adam_kernel


KERNELS: dict[str, Callable[[torch.device], Kernels | None]] = {"cuda": triton_kernels}
"""Device type -> the kernels of a device."""


def _difference(kernels: Kernels, device: torch.device) -> str:
    """Compares a few steps of two segments with torch's kernel. Returns "" or the difference."""
    make = torch.Generator().manual_seed(0)
    masters = [torch.rand(numel, generator=make).add_(1).to(device) for numel in (3000, 4099)]
    others = [torch.nn.Parameter(master.clone()) for master in masters]
    optimizer = optim.AdamW(others, lr=1e-3, weight_decay=0.1, fused=True)
    halves, (group,) = [(master.bfloat16(), master.bfloat16()) for master in masters], optimizer.param_groups
    parts = [UpdatedShare(m, *pair, new_state(m, False), group, 0) for m, pair in zip(masters, halves, strict=True)]
    flags, factor = torch.zeros(1, dtype=torch.int32, device=device), torch.full((), 0.5, device=device)
    for _ in range(3):
        for (gradient, _), other in zip(halves, others, strict=True):
            gradient.copy_(torch.randn(gradient.shape, generator=make))
            other.grad = gradient.float() * factor
        optimizer.step()
        kernels.update(parts, factor, None, flags)
        for master, (_, parameter), other in zip(masters, halves, others, strict=True):
            ulps = int((master.view(torch.int32) - other.detach().view(torch.int32)).abs().max())
            if ulps > TOLERANCE_ULPS or not torch.equal(parameter, master.bfloat16()) or int(flags):
                return f"it differs from torch's by {ulps} units in the last place of a master"
            master.copy_(other.detach())
            parameter.copy_(master)
    return ""


def new_state(master: torch.Tensor, amsgrad: bool) -> dict[str, torch.Tensor]:
    """Returns the state of torch's fused Adam before the first step."""
    names = ["exp_avg", "exp_avg_sq", *["max_exp_avg_sq"] * amsgrad]
    step = torch.zeros((), dtype=torch.float32, device=master.device)
    return {"step": step} | {name: torch.zeros_like(master, memory_format=torch.preserve_format) for name in names}


class OnePass:
    """The update of all `shares`. `flags`: (shares,) int32, set for those written to since; None: none are compared."""

    flags: torch.Tensor | None = None

    def __init__(
        self, optimizer: optim.Optimizer, shares: Sequence[Share], kernels: Kernels, device: torch.device
    ) -> None:
        self._optimizer, self._shares, self._kernels, self._device = optimizer, shares, kernels, device

    @classmethod
    def of(cls, optimizer: optim.Optimizer, shares: Sequence[Share], device: torch.device) -> OnePass | None:
        """Returns the update; None if there is no kernel for it."""
        if device.type not in KERNELS or type(optimizer) not in LOOKS_ITSELF or not is_fused(optimizer):
            return None
        if not all(s.tier == labels.DEVICE and not s.crosses and s.tensor.dtype == torch.float32 for s in shares):
            return None
        kernels = KERNELS[device.type](device)
        return None if kernels is None else cls(optimizer, shares, kernels, device)

    def step(self, coefficient: torch.Tensor | float | None) -> bool:
        """Calls `optimizer.step()` with its hooks; the kernel updates, and torch's own update then finds no gradients.
        `coefficient` multiplies the gradients. Returns True if a post-hook has written to masters: then all must be
        rounded again. If a pre-hook has, parameters are not compared, since they are no longer the rounded masters.
        """
        masters = Versions([share.tensor for share in self._shares])

        def launch() -> None:
            flags = None if masters.have_moved else self.flags
            group_of = {id(p): group for group in self._optimizer.param_groups for p in group["params"]}
            used, parts = [], []
            for number, share in enumerate(self._shares):
                if (gradient := share.gradient()) is not None and (group := group_of.get(id(share.tensor))) is not None:
                    used.append(share)
                    if not (state := self._optimizer.state[share.tensor]):
                        state.update(new_state(share.tensor.detach(), group["amsgrad"]))
                    parts.append(UpdatedShare(share.tensor.detach(), gradient, share.rounded, state, group, number))
            labels.updates(used)
            factor = torch.full((), coefficient, device=self._device) if isinstance(coefficient, float) else coefficient
            found_inf = getattr(self._optimizer, "found_inf", None)
            parts.sort(key=lambda part: part.dtypes)
            for _, alike in groupby(parts, lambda part: part.dtypes):
                self._kernels.update([*alike], factor, found_inf, flags)
            masters.note()

        step_with(self._optimizer, launch)
        return masters.have_moved

    def sum_of_squares(self) -> torch.Tensor:
        """Returns the sum of all gradients' squares, 0-dim fp64."""
        gradients = [gradient for share in self._shares if (gradient := share.gradient()) is not None]
        gradients.sort(key=lambda gradient: str(gradient.dtype))
        sums = [self._kernels.squares([*alike]) for _, alike in groupby(gradients, lambda gradient: gradient.dtype)]
        if not sums:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        return (sums[0] if len(sums) == 1 else torch.cat(sums)).sum()
