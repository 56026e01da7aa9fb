"""The stream of operators of a step: the work and bytes of each, as events of kind `compute` between the others.

operator   reads or writes memory; views and operators that only allocate a tensor are not counted
flops      by torch's own formulas (torch.utils.flop_counter) and FORMULAS, 0 if neither covers the operator
sizes      "b x m x n x k" of a matrix product, with the mean over its b groups if it is grouped; of an attention
           "b x heads x queries x keys x head": the key in tables of measured times
stream     the number of the current stream; 0 is the one that the model runs on

order      a dependency between streams: one records an event, or waits for an event or for another stream

Operators inside a collective of a simulated world represent other ranks' data, and are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any, Self
from unittest import mock

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count, shape_wrapper

from ..fake.as_gpu.stand_in import NullStream
from ..fake.compiler import GraphMode
from ..records.long_rows import COMPUTE, ORDER
from ..zero import labels
from .event_log import EventLog
from .intervals import ASIDE
from .labeling import holds_others, tensors_in

ATEN = torch.ops.aten

GROUPED = ATEN._grouped_mm, ATEN._scaled_grouped_mm
"""Products of groups of rows, such as the tokens of each expert, with a matrix for each group."""


def _grouped_flops(left: Sequence[int], right: Sequence[int], *_: Any, **__: Any) -> int:
    """Returns the FLOPs of a grouped product. If both factors have three dimensions, each pair of matrices is a
    product; if one has two dimensions, the groups share one of these.
    """
    batch = left[0] if len(left) == len(right) == 3 else 1
    return 2 * batch * left[-2] * left[-1] * right[-1]


FORMULAS: dict[Any, Callable[..., int]] = {
    **dict.fromkeys(GROUPED, _grouped_flops),
    ATEN._scaled_dot_product_flash_attention_for_cpu: lambda *shapes, **_: sdpa_flop_count(*shapes[:3]),
    ATEN._scaled_dot_product_flash_attention_for_cpu_backward: lambda *shapes, **_: sdpa_backward_flop_count(
        *shapes[:4]
    ),
}
"""Operators that torch has no formula for -> theirs, by the shapes of the arguments."""

MATMULS: dict[Any, tuple[int, int]] = {
    ATEN.mm: (0, 1), ATEN.addmm: (1, 2), ATEN.bmm: (0, 1), ATEN.baddbmm: (1, 2), ATEN._scaled_mm: (0, 1),
    **dict.fromkeys(GROUPED, (0, 1)),
}  # fmt: skip
"""Matrix products -> the argument positions of their two factors, (…, m, k) and (…, k, n)."""

ATTENTIONS: dict[Any, tuple[int, int]] = {
    ATEN._scaled_dot_product_flash_attention: (0, 1), ATEN._scaled_dot_product_efficient_attention: (0, 1),
    ATEN._scaled_dot_product_flash_attention_backward: (1, 2), ATEN._scaled_dot_product_flash_attention_for_cpu: (0, 1),
    ATEN._scaled_dot_product_efficient_attention_backward: (1, 2),
    ATEN._scaled_dot_product_flash_attention_for_cpu_backward: (1, 2),
}  # fmt: skip
"""Attention kernels -> the argument positions of queries and keys, (B, H, L, D)."""

MAKES_ONLY = {
    ATEN.empty, ATEN.empty_like, ATEN.empty_strided, ATEN.new_empty, ATEN.new_empty_strided, ATEN.set_, ATEN.detach,
    ATEN.alias, ATEN.resize_, ATEN._local_scalar_dense, ATEN.record_stream, ATEN.is_same_size, ATEN._unsafe_view,
}  # fmt: skip
"""Operators that read and write no bytes."""

SILENT = ("c10d", "_c10d_functional", "profiler", "prim", "record_stream")
"""Namespaces of operators that are not work on the device."""

GATHERS = {ATEN.embedding: 0, ATEN.index_select: 0, ATEN.gather: 0, ATEN.nll_loss_forward: 0}
"""Operators -> position of an argument of which they read only a part: as much as they write."""


class OperatorStream(GraphMode):
    """Records each operator in an event log, in steps in which it is `on`."""

    def __init__(self, log: EventLog) -> None:
        super().__init__()
        self._log = log
        self.on = False
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._number(torch.cpu.current_stream())
        self._log.stream = lambda: self._number(torch.cpu.current_stream())
        for owner, name, note in (
            (torch.cpu.Stream, "record_event", self._recorded), (NullStream, "record_event", self._recorded),
            (torch.cpu.Stream, "wait_event", self._waits), (torch.cpu.Stream, "wait_stream", self._waits),
            (torch.cpu.Event, "record", partial(self._of_event, "record")),
            (torch.cpu.Event, "wait", partial(self._of_event, "wait")),
        ):  # fmt: skip
            self._stack.enter_context(mock.patch.object(owner, name, _noted(getattr(owner, name), note)))
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if holds_others(types):
            return NotImplemented  # it is dispatched again on its contents
        out = func(*args, **(kwargs or {}))
        if (
            self.on
            and func.namespace not in SILENT
            and self._log.ledger.phase != ASIDE
            and not labels.current_collective()[0]
        ):
            self._note(func, args, kwargs or {}, out)
        return out

    def _note(self, func: Any, args: Sequence[Any], named: dict[str, Any], out: Any) -> None:
        packet = func.overloadpacket
        if packet in MAKES_ONLY or func.is_view:
            return
        read, written = list(tensors_in([*args, *named.values()])), list(tensors_in(out))
        moved = _bytes_of(packet, func, args, read, written)
        if not moved:
            return
        formula = flop_registry.get(packet) or (shape_wrapper(FORMULAS[packet]) if packet in FORMULAS else None)
        flops = int(formula(*args, **named, out_val=out)) if formula is not None else 0
        result = written[0] if written else read[0]
        first = args[0] if isinstance(args[0], (list, tuple)) else [result]
        elements = sum(tensor.numel() for tensor in tensors_in(first))
        factors = MATMULS.get(packet) or ATTENTIONS.get(packet)
        dtype = args[factors[0]].dtype if factors else result.dtype
        self._log.note(
            COMPUTE, operator=str(packet).removeprefix("aten."), bytes=moved, flops=flops,
            sizes=_sizes(packet, args, result), elements=elements, stream=self._log.stream(),
            dtype=str(dtype).removeprefix("torch."),
        )  # fmt: skip

    def _number(self, thing: Any) -> int:
        if id(thing) not in self._numbers:
            self._numbers[id(thing)] = len(self._numbers)
            self._kept.append(thing)  # its id stays its own
        return self._numbers[id(thing)]

    def _order(self, what: str, stream: Any, other: Any) -> None:
        if self._log.ledger.phase != ASIDE:
            self._log.note(ORDER, operator=what, stream=self._number(stream), elements=self._number(other))

    def _recorded(self, stream: Any, event: Any) -> Any:
        event = torch.cpu.Event() if event is None else event
        self._order("record", stream, event)
        return event

    def _waits(self, stream: Any, _: Any, other: Any) -> None:
        if other is not None:
            self._order("wait", stream, other)

    def _of_event(self, what: str, event: Any, result: Any, stream: Any = None) -> Any:
        self._order(what, stream or torch.cpu.current_stream(), event)
        return result


def _noted(method: Callable[..., Any], note: Callable[..., Any]) -> Any:
    @wraps(method)
    def call(owner: Any, *args: Any) -> Any:
        return note(owner, method(owner, *args), *args)

    return call


def _size(tensor: torch.Tensor) -> int:
    """Returns the bytes of a tensor's own elements: repeated elements of an expanded tensor count once."""
    numel = math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or size == 1)
    return numel * tensor.element_size()


def _bytes_of(
    packet: Any, func: Any, args: Sequence[Any], read: list[torch.Tensor], written: list[torch.Tensor]
) -> int:
    """Returns the bytes that an operator reads and writes; a tensor changed in place counts as both."""
    written_bytes = sum(map(_size, written))
    if packet in GATHERS:
        return 2 * written_bytes
    if packet in (ATEN.fill_, ATEN.zero_, ATEN.zeros_like, ATEN.ones_like, ATEN.full_like):
        return written_bytes
    if packet is ATEN.copy_:
        return _size(args[1]) + _size(args[0])
    if not written:  # a fused or foreach operator in place: it says nothing of what it wrote
        changed = [
            a for a, s in zip(args, func._schema.arguments, strict=False) if s.alias_info and s.alias_info.is_write
        ]
        written_bytes = sum(map(_size, tensors_in(changed)))
    if packet is torch.ops.zerobench.adam_:
        written_bytes -= sum(map(_size, args[2]))  # parameters are written without being read
    return written_bytes + sum(map(_size, read))


def _sizes(packet: Any, args: Sequence[Any], result: torch.Tensor) -> str:
    if packet in MATMULS:
        left, right = (args[position] for position in MATMULS[packet])
        batch = next((matrices.shape[0] for matrices in (left, right, result) if matrices.dim() == 3), 1)
        sizes = [left.shape[-2], right.shape[-1], left.shape[-1]]
        if packet in GROUPED and 2 in (left.dim(), right.dim()):  # the groups divide rows, columns or what is summed
            shared = {(2, 3): 0, (3, 2): 1, (2, 2): 2}[left.dim(), right.dim()]
            sizes[shared] = max(1, sizes[shared] // batch)
        return "x".join(map(str, (batch, *sizes)))
    if packet in ATTENTIONS:
        query, key = (args[position] for position in ATTENTIONS[packet])
        batch, heads, length, head = query.shape
        return f"{batch}x{heads}x{length}x{key.shape[-2]}x{head}"
    return ""
