"""torch's Muon, or Adafactor, over hidden matrices and AdamW over the rest, as one optimizer.

    split               selects the parameters for AdamW by an explicit list; Muon gets the other matrices
    MuonWithAdamW       one update: each matrix is orthogonalized once, the rest is updated elementwise
    AdafactorWithAdamW  the same with Adafactor in place of Muon

Muon: Keller Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024. torch.optim.Muon does the update,
with one Newton-Schulz call per matrix; the momentum is the only state, 4 bytes per parameter less than Adam has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
from torch import nn, optim

from .owned import OWNED
from .step_by_tiles import raw_step

REST = ("not_2d", "embeddings", "head")
"""Words of a list of AdamW's parameters, besides name patterns: parameters that are not matrices; weights of
nn.Embedding; the last nn.Linear.
"""


class MuonWithAdamW(optim.Optimizer):
    """torch.optim.Muon for the groups with `owned=True`, torch.optim.AdamW for those with `owned=False`.

    A group's other options are passed to its optimizer. States: `momentum_buffer` of a matrix; `step`, `exp_avg` and
    `exp_avg_sq` of the rest. Raises ValueError for a group without `owned`.
    """

    parts: ClassVar[dict[bool, Any]] = {True: optim.Muon, False: optim.AdamW}
    """Value of a group's key OWNED -> the optimizer of the group."""

    def __init__(self, params: Iterable[dict[str, Any]]) -> None:
        groups = [dict(group) for group in params]
        if not all(isinstance(group.get(OWNED), bool) for group in groups):
            of = self.parts[True].__name__
            raise ValueError(f"{type(self).__name__}: each group says owned=True ({of}) or owned=False (AdamW)")
        made = [self.parts[group[OWNED]]([group]).param_groups[0] for group in groups]  # filled in and checked by torch
        super().__init__(made, {"differentiable": False})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates all parameters that have a gradient, a matrix with one orthogonalization."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for owned, kind in self.parts.items():
            part: optim.Optimizer = object.__new__(kind)  # over the same groups and states
            vars(part).update(vars(self), param_groups=[one for one in self.param_groups if one[OWNED] is owned])
            raw_step(part)
        return loss


class AdafactorWithAdamW(MuonWithAdamW):
    """MuonWithAdamW with torch.optim.Adafactor in place of Muon. Its means are over rows and columns of whole matrices:
    m + n state values for an (m, n) matrix. Checkpoints do not contain them.
    """

    parts: ClassVar = {True: optim.Adafactor, False: optim.AdamW}


def split(model: nn.Module, rest: Sequence[str]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Returns the trainable parameters for Muon, and those for AdamW: all that match an entry of `rest`.

    An entry is a word of REST, or a shell-style pattern of names ("blocks.*.attention_in.weight"). Raises ValueError
    for an empty list, an entry that matches nothing, a parameter that is not a matrix and in no entry, and if no matrix
    is left.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad and p.numel()}
    if not rest:
        raise ValueError(f"the list of parameters for AdamW is empty; use words of {', '.join(REST)}, and names")
    taken: set[nn.Parameter] = set()
    for entry in rest:
        mine = _meant(model, entry, named)
        if not mine and entry not in REST:
            near = get_close_matches(entry, [*REST, *named], n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"use words of {', '.join(REST)}, or names of parameters"
            raise ValueError(f"{entry!r} is no trainable parameter of {type(model).__name__}; {hint}")
        taken.update(mine)
    matrices = [p for p in named.values() if p not in taken]
    flat = next((name for name, p in named.items() if p not in taken and p.dim() != 2), None)
    if flat is not None:
        raise ValueError(f"{flat} has {named[flat].dim()} dimensions, and Muon takes matrices alone; add not_2d, or it")
    if not matrices:
        raise ValueError(
            f"it takes every parameter of {type(model).__name__}, and leaves no matrix for Muon; use adamw"
        )
    return matrices, [p for p in named.values() if p in taken]


def _meant(model: nn.Module, entry: str, named: dict[str, nn.Parameter]) -> list[nn.Parameter]:
    if entry == "not_2d":
        return [p for p in named.values() if p.dim() != 2]
    if entry in REST:
        kind = nn.Embedding if entry == "embeddings" else nn.Linear
        found: list[Any] = [module.weight for module in model.modules() if isinstance(module, kind)]
        return found if entry == "embeddings" else found[-1:]
    return [p for name, p in named.items() if fnmatchcase(name, entry)]
