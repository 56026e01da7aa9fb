"""torch's Muon, or Adafactor, over hidden matrices and AdamW over the rest, as one optimizer.

    split               selects the parameters for AdamW by an explicit list; Muon gets the other matrices
    MuonWithAdamW       one update: each matrix is orthogonalized once, the rest is updated elementwise
    AdafactorWithAdamW  the same with Adafactor in place of Muon

Muon: Keller Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024. torch.optim.Muon does the update,
with one Newton-Schulz call per matrix; the momentum is the only state, 4 bytes per parameter less than Adam has. A
parameter of 3 dimensions is a stack of matrices, such as a mixture's experts: Muon updates each of them by itself.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
from torch import nn, optim

from .segments import OWNED
from .step_by_tiles import raw_step

REST = ("not_2d", "embeddings", "head")
"""AdamW's parameters, usually: those that are not matrices; weights of nn.Embedding; the last nn.Linear."""

STACKS = "not_2d_or_3d"
"""In place of not_2d: Muon gets stacks of matrices, too."""

DIMENSIONS = {"not_2d": (2,), STACKS: (2, 3)}
"""Word -> dimensions of the parameters that it leaves to Muon."""

WORDS = (*DIMENSIONS, *REST[1:])
"""Words of a list, besides name patterns."""


class MuonWithAdamW(optim.Optimizer):
    """torch.optim.Muon for groups with `owned=True`, AdamW for `owned=False`; ValueError for a group without it."""

    parts: ClassVar[dict[bool, Any]] = {True: optim.Muon, False: optim.AdamW}
    """Value of a group's key OWNED -> the optimizer of the group."""

    def __init__(self, params: Iterable[dict[str, Any]]) -> None:
        super().__init__(params, {"differentiable": False})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, with the defaults of its optimizer."""
        super().add_param_group(self._checked(param_group))

    def _checked(self, group: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(group, dict) or not isinstance(group.get(OWNED), bool):
            of = self.parts[True].__name__
            raise ValueError(f"{type(self).__name__}: each group says owned=True ({of}) or owned=False (AdamW)")
        kind, params = self.parts[group[OWNED]], list(group["params"])
        shown = [p.detach().flatten(0, 1) if kind is optim.Muon and _is_stack(p) else p for p in params]
        made: dict[str, Any] = kind([group | {"params": shown}]).param_groups[0]
        return made if all(map(operator.is_, shown, params)) else made | {"params": params}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates all parameters that have a gradient, a matrix with one orthogonalization."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for owned, kind in self.parts.items():
            part: optim.Optimizer = object.__new__(kind)  # over the same groups and states
            vars(part).update(vars(self), param_groups=[group for group in self.param_groups if group[OWNED] is owned])
            with _unstacked(part) if kind is optim.Muon else nullcontext():
                raw_step(part)
        return loss


def _is_stack(p: Any) -> bool:
    return isinstance(p, torch.Tensor) and p.dim() == 3


@contextmanager
def _unstacked(part: optim.Optimizer) -> Iterator[None]:
    """Replaces stacks of matrices in the groups of `part` by views of each matrix, its gradient and its momentum."""
    views: list[torch.Tensor] = []
    groups, part.param_groups = part.param_groups, []
    for group in groups:
        params = [p for p in group["params"] if not _is_stack(p)]
        for p in [p for p in group["params"] if _is_stack(p) and p.grad is not None]:
            if "momentum_buffer" not in part.state[p]:
                part.state[p]["momentum_buffer"] = torch.zeros_like(p.grad)
            for matrix, gradient, own in zip(p.detach(), p.grad, part.state[p]["momentum_buffer"], strict=True):
                matrix.grad, part.state[matrix] = gradient, {"momentum_buffer": own}
                views.append(matrix)
                params.append(matrix)
        part.param_groups.append(group | {"params": params})
    try:
        yield
    finally:
        for matrix in views:
            del part.state[matrix]


class AdafactorWithAdamW(MuonWithAdamW):
    """MuonWithAdamW with torch.optim.Adafactor in place of Muon. Its means are over rows and columns of whole matrices:
    m + n state values for an (m, n) matrix. Checkpoints do not contain them.
    """

    parts: ClassVar = {True: optim.Adafactor, False: optim.AdamW}


def split(model: nn.Module, rest: Sequence[str]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Returns the trainable parameters for Muon, and those for AdamW: all that match an entry of `rest`.

    An entry is one of WORDS, or a shell-style pattern of names ("blocks.*.attention_in.weight"). Raises ValueError
    for an empty list, an entry that matches nothing, a parameter that is not a matrix and in no entry, and if no matrix
    is left.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad and p.numel()}
    if not rest:
        raise ValueError(f"the list of parameters for AdamW is empty; use words of {', '.join(WORDS)}, and names")
    taken: set[nn.Parameter] = set()
    for entry in rest:
        matching = _matching(model, entry, named)
        if not matching and entry not in WORDS:
            near = get_close_matches(entry, [*WORDS, *named], n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"use words of {', '.join(WORDS)}, or names of parameters"
            raise ValueError(f"{entry!r} is no trainable parameter of {type(model).__name__}; {hint}")
        taken.update(matching)
    matrices = [p for p in named.values() if p not in taken]
    allowed = DIMENSIONS[STACKS] if STACKS in rest else (2,)  # a 3-D parameter may also be a convolution's
    flat = next((name for name, p in named.items() if p not in taken and p.dim() not in allowed), None)
    if flat is not None:
        stacks = f"; {STACKS} in place of not_2d leaves Muon stacks of matrices" if named[flat].dim() == 3 else ""
        raise ValueError(
            f"{flat} has {named[flat].dim()} dimensions, and Muon takes only matrices; add not_2d, or it{stacks}"
        )
    if not matrices:
        raise ValueError(
            f"it takes every parameter of {type(model).__name__}, and leaves no matrix for Muon; use adamw"
        )
    empty = [p for p in model.parameters() if p.requires_grad and not p.numel()]
    return matrices, [p for p in named.values() if p in taken] + empty


def _matching(model: nn.Module, entry: str, named: dict[str, nn.Parameter]) -> list[nn.Parameter]:
    if entry in DIMENSIONS:
        return [p for p in named.values() if p.dim() not in DIMENSIONS[entry]]
    if entry in REST:
        kind = nn.Embedding if entry == "embeddings" else nn.Linear
        weights: list[Any] = [module.weight for module in model.modules() if isinstance(module, kind)]
        return weights if entry == "embeddings" else weights[-1:]
    return [p for name, p in named.items() if fnmatchcase(name, entry)]
