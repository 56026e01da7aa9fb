"""Mixed precision: the dtype of each tensor, loss scaling, the norm of gradients, and the update of fp32 masters.

[Note: the dtypes of a parameter]

    parameters   the module's own: read by forward and backward
    gradients    dtype of accumulation                             default: the parameter's
    wire         dtype that a reduction sends                      default: the gradients'
    master       dtype of the optimizer's copy                     fp32 if the parameter is half
    shard        dtype of a rank's part of the parameters          the parameter's; the master's if a unit of stage 3
                                                                   keeps only masters, which a gather rounds

Half precision with Adam: 2ψ parameters + 2ψ gradients + Kψ, K = 12: fp32 master, momentum, variance
(ZeRO, arXiv 1910.02054, section 3.1; Micikevicius et al., arXiv 1710.03740).

An optimizer needs gradients of its masters' dtype. They are cast one *tile* at a time, in one buffer, since a whole
fp32 gradient would need another 4ψ/N. The same tiles bound the temporaries of an unfused optimizer.

[Note: the factor of a step's gradients]
Before the optimizer gets gradients, the loss scale is removed, and clipping applied::

    clip      scales by the norm of the gradients, including earlier factors; a further call clips the result
    judge     with loss scaling: did a gradient overflow? A norm from clipping shows this, too
    forget    the gradients were consumed or dropped
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn, optim
from torch.optim.optimizer import _foreach_supported_types

from . import labels

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Name in options and configs -> dtype."""

HALF = (torch.bfloat16, torch.float16)

TRAINED = (torch.float32, torch.float64, *HALF)
"""Dtypes of parameters that can be trained."""

FROZEN = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
"""Further dtypes of frozen parameters, such as the codes of quantized ones: they are sent and divided as bytes."""

NORM_CHUNK = 2**16
"""Elements per step of the norm on a CPU, which is computed in fp64: the copy of a chunk fits the cache."""

LOOKS_ITSELF = (optim.Adam, optim.AdamW)
"""Optimizers whose fused kernels change nothing if `found_inf` is 1. torch's SGD does so too, except that it creates
momentum in a skipped first step and never fills it.
"""


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of a parameter's tensors (see the note)."""

    parameters: torch.dtype
    gradients: torch.dtype
    wire: torch.dtype
    master: torch.dtype
    shard: torch.dtype

    @property
    def keeps_masters(self) -> bool:
        """True if a rank keeps only the master of its part of the parameters."""
        return self.shard != self.parameters

    @property
    def casts(self) -> bool:
        """True if an update casts: gradients to the master's dtype, or masters to the parameters'."""
        return {self.gradients, self.parameters} != {self.master}

    @staticmethod
    def of(parameter: torch.dtype, gradient: torch.dtype | None = None, wire: torch.dtype | None = None) -> Dtypes:
        """Returns the dtypes for a parameter's dtype; `gradient` applies to half parameters, `wire` not to fp64."""
        half = parameter in HALF
        gradients = gradient if half and gradient else parameter
        sent = gradients if wire is None or parameter == torch.float64 else wire
        return Dtypes(parameter, gradients, sent, torch.float32 if half else parameter, parameter)


@dataclass(frozen=True)
class LossScaling:
    """Dynamic loss scaling for fp16: the loss is multiplied so that small gradients do not underflow.

    After a step whose gradients overflowed, which all ranks skip, the scale is multiplied by `backoff`; after
    `interval` steps without overflow, by `growth`. It never falls below `minimum`.
    """

    initial: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    minimum: float = 1.0

    def __post_init__(self) -> None:
        if not (self.initial >= self.minimum > 0 and math.isfinite(self.initial)):
            raise ValueError(f"loss_scaling: initial is {self.initial}; it must be finite and at least the minimum")
        if not (self.growth >= 1 and 0 < self.backoff <= 1 and self.interval >= 1):
            raise ValueError(
                f"loss_scaling: growth {self.growth}, backoff {self.backoff}, interval {self.interval}: growth must be"
                " at least 1, backoff in (0, 1], interval at least 1"
            )


class LossScaler:
    """The current loss scale. Without a policy it is always 1.

    `scale`    0-dim fp32 on the device
    `skipped`  1 if the last step was skipped, else 0; 0-dim fp32 on the device
    """

    scale: torch.Tensor | float = 1.0
    skipped: torch.Tensor | float = 0.0

    def __init__(self, policy: LossScaling | None, device: torch.device) -> None:
        self.policy = policy
        if policy is not None:
            self.scale = torch.full((), policy.initial, dtype=torch.float32, device=device)
            self._since = torch.zeros((), dtype=torch.int32, device=device)

    @property
    def unscaling(self) -> torch.Tensor | float:
        """The factor that removes the scale from a gradient."""
        return 1.0 if not isinstance(self.scale, torch.Tensor) else self.scale.reciprocal()

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns the loss to backpropagate in place of `loss`."""
        return loss if self.policy is None else loss * self.scale

    def follow(self, overflows: torch.Tensor, policy: LossScaling) -> None:
        """Changes the scale after a step whose gradients overflowed (1) or not (0)."""
        assert isinstance(self.scale, torch.Tensor)
        torch._amp_update_scale_(self.scale, self._since, overflows, policy.growth, policy.backoff, policy.interval)
        self.scale.clamp_(min=policy.minimum)

    def state(self) -> dict[str, float]:
        """Returns the values that training continues from."""
        return {"scale": float(self.scale), "since": int(self._since)}

    def load(self, state: dict[str, float]) -> None:
        """Restores the result of `state`."""
        assert isinstance(self.scale, torch.Tensor)
        self.scale.fill_(float(state["scale"]))
        self._since.fill_(int(state["since"]))


Norm = Callable[[float], torch.Tensor]
"""Given its p: the norm of all current gradients, 0-dim fp64."""


class GradientScaling:
    """The factor of a step's gradients (see the note). `coefficient`: for `update_tiles`, 0-dim; None: no factor."""

    def __init__(self, policy: LossScaling | None, device: torch.device, norm: Norm) -> None:
        self.scaler = LossScaler(policy, device)
        self.coefficient: torch.Tensor | float | None = None
        self._norm = norm
        self._overflows: torch.Tensor | None = None  # of these gradients, if clipping has asked for their norm

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool = False) -> torch.Tensor:
        """Returns the norm of the unscaled gradients, 0-dim fp32, and clips them to `max_norm`, as torch does."""
        norm = self._scaled(self._norm(norm_type).float())
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"clip_grad_norm_: the norm of the gradients is {norm.item()}, and error_if_nonfinite=True wants a"
                " finite one; the gradients are as they were: call zero_grad(), or clip without error_if_nonfinite"
            )
        self.coefficient = self._scaled(clip_coefficient(norm, max_norm))
        self._overflows = None if self.scaler.policy is None else _is_not_finite(norm)
        return norm

    @property
    def pending(self) -> torch.Tensor | float:
        """The factor by which gradients will be multiplied before the optimizer gets them, as far as is known."""
        return self.scaler.unscaling if self.coefficient is None else self.coefficient

    def _scaled(self, value: torch.Tensor) -> torch.Tensor:
        """Returns `value` times `pending`, in at most one kernel."""
        if self.coefficient is not None:
            return value * self.coefficient
        return value if self.scaler.policy is None else value / self.scaler.scale

    def edited(self) -> None:
        """Forgets whether gradients overflow: they may have been changed."""
        self._overflows = None

    @contextmanager
    def judging(self, optimizer: optim.Optimizer) -> Iterator[bool]:
        """Wraps an optimizer's step: sets the coefficient for it, and changes the loss scale afterwards. Yields True if
        the step must be skipped. An optimizer that reads `found_inf` on the device always runs: it changes nothing if
        gradients overflowed, and the host does not wait for the device.
        """
        policy = self.scaler.policy
        if policy is None:
            yield False
            return
        if self.coefficient is None:
            self.coefficient = self.scaler.unscaling
        overflows = _is_not_finite(self._norm(2.0).float()) if self._overflows is None else self._overflows
        self.scaler.skipped = overflows  # 1 if a gradient overflowed on any rank, else 0
        judges_itself = (
            type(optimizer) in LOOKS_ITSELF
            and is_fused(optimizer)
            and all(p.device == overflows.device for group in optimizer.param_groups for p in group["params"])
        )
        if judges_itself:
            optimizer.found_inf = overflows  # type: ignore[attr-defined]
        try:
            yield not judges_itself and bool(overflows)
        finally:
            if judges_itself:
                del optimizer.found_inf  # type: ignore[attr-defined]
        self.scaler.follow(overflows, policy)

    def forget(self) -> None:
        """Forgets what is known of the gradients."""
        self.coefficient = self._overflows = None


def _is_not_finite(norm: torch.Tensor) -> torch.Tensor:
    return norm.mul(0).ne_(0)  # 0 times infinity is NaN


IS_PART = (
    "this rank's parts of parameters, which torch's get_optimizer_state_dict and set_optimizer_state_dict take for"
    " whole ones; use engine.full_optimizer_state(name), or engine.save(path) and engine.load(path)"
)


class Counted(nn.Parameter):
    """An optimizer's parameter whose writes are all counted: its `.data` shares its version counter."""

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # torch's functions raise a KeyError of it
        return f"{super().__repr__()}, one of {IS_PART}"

    @property
    def data(self) -> torch.Tensor:
        """The tensor without a gradient."""
        return self.detach()

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        torch.Tensor.data.__set__(self, values)  # type: ignore[attr-defined]


_foreach_supported_types.append(Counted)  # torch chooses its foreach kernels by the type of parameters


class Share:
    """The interface that an update needs of a piece of a parameter: its tensor, its gradient, its tier. Subclasses
    implement it, such as OptimizerSegment and PendingShare.

    `tensor`     (numel,) view of the master: the optimizer's parameter
    `tier`       the tier of `tensor`
    `gradient`   (numel,) reduced gradient in its own dtype; None if the parameter took no part in the step
    `crosses`    True if the gradient is in another tier, and is copied before the cast
    `unit_name`  the unit that it belongs to; empty if there is none
    """

    tier = labels.DEVICE
    crosses = False
    unit_name = ""

    def __init__(self, master: torch.Tensor) -> None:
        self.tensor: nn.Parameter = Counted(master.data)

    def gradient(self) -> torch.Tensor | None:
        """Returns the reduced gradient."""
        raise NotImplementedError

    @property
    def rounded(self) -> torch.Tensor | None:
        """The (numel,) view of the parameters that are the rounded master; None if there are none."""
        return None


class UpdatedShare(NamedTuple):
    """A share in an update by one kernel. `state`: of the optimizer; `group`: its options; `number`: of its flag."""

    master: torch.Tensor
    gradient: torch.Tensor
    parameter: torch.Tensor | None
    state: dict[str, torch.Tensor]
    group: dict[str, Any]
    number: int

    @property
    def dtypes(self) -> str:
        """The dtypes of gradient and parameter, which one kernel's parts have in common."""
        return f"{self.gradient.dtype} {self.parameter.dtype if self.parameter is not None else ''}"


def shaped_as(tensor: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """Returns the view of `flat`, (numel,), that has the shape of a dense `tensor`, and its order of elements."""
    return flat if tensor.dim() == 1 else flat.as_strided(tensor.shape, tensor.stride(), flat.storage_offset())


def dtype_name(dtype: torch.dtype) -> str:
    """Returns a dtype's short name: `float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the (numel,) view of a dense tensor in the order of its memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


S = TypeVar("S", bound=Share)


def is_fused(optimizer: optim.Optimizer) -> bool:
    """Returns True if every group runs torch's fused kernels, which need no temporaries."""
    return all(group.get("fused") for group in optimizer.param_groups)


def cut_in_tiles(shares: Iterable[S], tile_numel: int) -> list[list[S]]:
    """Groups shares that are updated together: up to `tile_numel` elements per tile, unless a single one has more."""
    tiles: list[list[S]] = []
    room = 0
    for share in shares:
        if share.tensor.numel() > room or not tiles:
            tiles.append([])
            room = tile_numel
        tiles[-1].append(share)
        room -= share.tensor.numel()
    return tiles


def sum_of_powers(gradients: Iterable[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """Returns Σ |g|^p over all elements, 0-dim fp64 (fp32 would be off by 4e-4); for p = inf the maximum."""
    if not norm_type > 0:
        raise ValueError(f"norm_type: it is {norm_type}; give a number above 0, or inf")
    tensors = list(gradients)
    norms = (_norms_at_once if tensors and tensors[0].is_cuda else _norms_by_chunk)(tensors, norm_type)
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    stacked = torch.stack(norms)
    return stacked.max() if norm_type == math.inf else stacked.pow(norm_type).sum()


def _norms_by_chunk(gradients: list[torch.Tensor], norm_type: float) -> list[torch.Tensor]:
    chunks = (chunk for gradient in gradients for chunk in gradient.split(NORM_CHUNK))
    return [torch.linalg.vector_norm(chunk.double(), norm_type) for chunk in chunks]


def _norms_at_once(gradients: list[torch.Tensor], norm_type: float) -> list[torch.Tensor]:
    """Computes norms on a GPU with one kernel for many tensors, because launches dominate, and without fp64 copies."""
    return list(torch._foreach_norm(gradients, norm_type, dtype=torch.float64)) if gradients else []


def norm_over_ranks(
    total: torch.Tensor, norm_type: float, add: Callable[[torch.Tensor], None], maximum: Callable[[torch.Tensor], None]
) -> torch.Tensor:
    """Returns the norm from this rank's `sum_of_powers`; NaN if any is. `add`, `maximum`: over ranks, in place."""
    if norm_type != math.inf:
        add(total)
        return root_of_powers(total, norm_type)
    # backends' maxima drop NaN, so it is sent as infinity, and infinity as the largest number
    largest = torch.finfo(total.dtype).max
    sent = total.nan_to_num(nan=math.inf, posinf=largest)
    maximum(sent)
    return sent.masked_fill(sent == math.inf, math.nan).masked_fill(sent == largest, math.inf)


def root_of_powers(total: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Returns the norm from the sum (or maximum) over all ranks."""
    return total if norm_type == math.inf else total.pow(1 / norm_type)


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Returns the factor of gradient clipping, as torch.nn.utils.clip_grad_norm_ computes it."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)
