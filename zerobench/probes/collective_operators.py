"""torch's collectives by operator: which argument is the full tensor, and the bytes that one rank sends
(traffic.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class OperatorRule(NamedTuple):
    """The accounting of one operator: its full tensor, and its factors for n ranks."""

    full: Callable[[tuple[Any, ...]], list[torch.Tensor]]
    wire: Callable[[int], float]
    volume: Callable[[int], float]


def _flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for one in value for t in _flat(one)]


def _ring(n: int) -> float:
    return (n - 1) / n


def _argument(place: int) -> Callable[[tuple[Any, ...]], list[torch.Tensor]]:
    return lambda arguments: _flat(arguments[place])


_ALL_REDUCE = OperatorRule(_argument(0), lambda n: 2 * _ring(n), lambda n: 2)
_ONCE_FIRST = OperatorRule(_argument(0), _ring, lambda n: 1)
_ONCE_SECOND = OperatorRule(_argument(1), _ring, lambda n: 1)
_SEND = OperatorRule(_argument(0), lambda n: 1, lambda n: n / (n - 1) if n > 1 else 0)

_GATHER_FUNCTIONAL = OperatorRule(
    lambda arguments: _flat(arguments[0]) * arguments[1], _ring, lambda n: 1
)  # input, group size

RULES = {
    "all_reduce": _ALL_REDUCE,
    "all_reduce_coalesced": _ALL_REDUCE,
    "all_gather_into_tensor": _GATHER_FUNCTIONAL,
    "all_gather_into_tensor_coalesced": _GATHER_FUNCTIONAL,
    "reduce_scatter_tensor": _ONCE_FIRST,
    "reduce_scatter_tensor_coalesced": _ONCE_FIRST,
    "all_to_all_single": _ONCE_FIRST,
    "broadcast": _ONCE_FIRST,
    "allreduce_": _ALL_REDUCE,
    "allreduce_coalesced_": _ALL_REDUCE,
    "broadcast_": _ONCE_FIRST,
    "allgather_": _ONCE_FIRST,
    "_allgather_base_": _ONCE_FIRST,
    "allgather_coalesced_": _ONCE_FIRST,
    "allgather_into_tensor_coalesced_": _ONCE_FIRST,
    "reduce_scatter_": _ONCE_SECOND,
    "_reduce_scatter_base_": _ONCE_SECOND,
    "reduce_scatter_tensor_coalesced_": _ONCE_SECOND,
    "alltoall_": _ONCE_SECOND,
    "alltoall_base_": _ONCE_SECOND,
    "reduce_": _ONCE_FIRST,
    "gather_": _ONCE_FIRST,
    "scatter_": _ONCE_FIRST,
    "send": _SEND,
}

KINDS = {
    "all_reduce": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
}
"""Operator -> category of its volume where no label is given; others are counted under "other"."""


def gloo_factor(operator: str) -> int:
    """Returns gloo's bytes for an operator relative to the ring optimum: torch's reduce-scatter is a clone and an all-
    reduce there.
    """
    return 2 if "reduce_scatter" in operator else 1


NAMESPACES = ("c10d", "_c10d_functional")
"""Namespaces of torch's collectives: those of torch.distributed, and those of torch.compile and DTensor."""

SILENT = {"recv_", "recv_any_source_", "barrier", "monitored_barrier_", "wait_tensor", "_wrap_tensor_autograd"}
"""Operators without bytes of their own: a receive is counted where it is sent."""


def tensors_in(args: tuple[Any, ...], rule: OperatorRule | None) -> list[torch.Tensor]:
    """Returns the full tensors by the rule; of an unknown operator all."""
    return rule.full(args) if rule else [t for a in args if isinstance(a, torch.Tensor | list) for t in _flat(a)]
