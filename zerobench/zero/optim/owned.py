"""Optimizers that update a whole matrix at a time: which rank owns which matrix.

[Note: Owned]
Newton-Schulz, or another function of a whole matrix, needs all of it on one rank. With `owned=True` in a parameter
group, each of its matrices is *owned*: its gradient is reduced only to its owner, which updates it and sends the new
values to all. That is one reduction and one gather per matrix, with the volume of an elementwise optimizer: 2ψ under
stages 1 and 2, 3ψ under stage 3. Only the owner has the states, whole.

    owners    of all matrices, the costliest first, each to the rank with the least load so far (LPT; Graham 1969)
    segments  of an owned parameter: the whole parameter, in its own shape, on its owner, and none elsewhere

Groups with `owned=False` stay elementwise, cut anywhere. A user's own optimizer, such as Shampoo or SOAP, has its
matrices owned by the same key.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from torch import nn, optim

OWNED = "owned"
"""The key in a parameter group."""


def says_who_owns(optimizer: optim.Optimizer) -> bool:
    """Returns True if every group specifies whether its parameters are owned."""
    return all(isinstance(group.get(OWNED), bool) for group in optimizer.param_groups)


def cost_of(shape: Sequence[int]) -> int:
    """Returns the multiplications and additions of one Newton-Schulz iteration on an (m, n) matrix, m ≤ n: X Xᵀ, its
    square, and the product with X: 4m²n + 2m³. Of a stack, (experts, m, n), those of all its matrices.
    """
    m, n = sorted(shape[-2:])
    return prod(shape[:-2]) * (4 * m * m * n + 2 * m**3)


def assign(costs: Sequence[int], ranks: int) -> list[int]:
    """Returns the owner of each matrix: the costliest first, each to the rank with the least load so far. Ties go to
    the lowest rank, and to the first matrix.
    """
    loads, owner = [0] * ranks, [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
        owner[number] = rank = loads.index(min(loads))
        loads[rank] += costs[number]
    return owner


def owned_by(optimizer: optim.Optimizer) -> set[nn.Parameter]:
    """Returns the parameters in groups with `owned=True`."""
    return {p for group in optimizer.param_groups if group.get(OWNED) for p in group["params"]}


def owners_of(held: set[nn.Parameter], trainable: Iterable[nn.Parameter], ranks: int) -> dict[nn.Parameter, int]:
    """Returns the owner of every trainable parameter in `held`. Raises ValueError for one that is neither a matrix nor
    a stack of matrices, which one rank owns together.
    """
    mine = [p for p in trainable if p in held and p.numel()]
    if any(p.dim() not in (2, 3) for p in mine):
        shape = next(tuple(p.shape) for p in mine if p.dim() not in (2, 3))
        raise ValueError(
            f"optimizer: a parameter of shape {shape} is in a group with owned=True, which is for matrices, and stacks"
            " of them"
        )
    return dict(zip(mine, assign([cost_of(p.shape) for p in mine], ranks), strict=True))
