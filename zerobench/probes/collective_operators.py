"""torch's collectives by operator: which argument is the full tensor, and the bytes that a rank sends (traffic.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class OperatorRule(NamedTuple):
    """The accounting of one operator: its full tensor, its factors for n ranks, and the category of its volume if it
    has no label.
    """

    full: Callable[[tuple[Any, ...]], list[torch.Tensor]]
    wire: Callable[[int], float]
    volume: Callable[[int], float]
    kind: str = "other"


def _flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for one in value for t in _flat(one)]


def _ring(n: int) -> float:
    return (n - 1) / n


def _argument(place: int) -> Callable[[tuple[Any, ...]], list[torch.Tensor]]:
    return lambda arguments: _flat(arguments[place])


def _once(full: Callable[[tuple[Any, ...]], list[torch.Tensor]], kind: str = "other") -> OperatorRule:
    return OperatorRule(full, _ring, lambda n: 1, kind)


_OPERATORS = (
    (
        OperatorRule(_argument(0), lambda n: 2 * _ring(n), lambda n: 2, "all_reduce"),
        ("all_reduce", "all_reduce_coalesced", "allreduce_", "allreduce_coalesced_"),
    ),
    (
        _once(lambda arguments: _flat(arguments[0]) * arguments[1], "all_gather"),  # input, group size
        ("all_gather_into_tensor", "all_gather_into_tensor_coalesced"),
    ),
    (
        _once(_argument(0), "all_gather"),
        ("allgather_", "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_"),
    ),
    (_once(_argument(0), "reduce_scatter"), ("reduce_scatter_tensor", "reduce_scatter_tensor_coalesced")),
    (
        _once(_argument(1), "reduce_scatter"),
        ("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"),
    ),
    (_once(_argument(0)), ("all_to_all_single", "broadcast", "broadcast_", "reduce_", "gather_", "scatter_")),
    (_once(_argument(1)), ("alltoall_", "alltoall_base_")),
    (OperatorRule(_argument(0), lambda n: 1, lambda n: n / (n - 1) if n > 1 else 0), ("send",)),
)

RULES = {operator: rule for rule, operators in _OPERATORS for operator in operators}


def gloo_factor(operator: str) -> int:
    """Returns gloo's bytes for an operator relative to the ring optimum: torch's reduce-scatter on gloo is a clone and
    an all-reduce.
    """
    return 2 if "reduce_scatter" in operator else 1


NAMESPACES = ("c10d", "_c10d_functional")
"""Namespaces of torch's collectives: torch.distributed's, and those of torch.compile and DTensor."""

SILENT = {"recv_", "recv_any_source_", "barrier", "monitored_barrier_", "wait_tensor", "_wrap_tensor_autograd"}
"""Operators without their own bytes: a receive is counted where it is sent."""


def tensors_in(args: tuple[Any, ...], rule: OperatorRule | None) -> list[torch.Tensor]:
    """Returns the full tensors by the rule; for an unknown operator all tensors."""
    return rule.full(args) if rule else [t for a in args if isinstance(a, torch.Tensor | list) for t in _flat(a)]
