"""Kernels and memory traffic of an update, counted on fake tensors: without a cache, and with half of a GPU's.

A GPU's cache is two halves with a link between. What a block leaves in one half, another block may want in the other,
so one half is modeled. It has whole lines, and forgets the line that was used least recently. A line that it lacks is
read from memory; a line that a kernel changes in it is written to memory once, unless it was to be written already.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves

from zerobench.probes.operator_stream import ATEN, MAKES_ONLY, OperatorStream
from zerobench.simulation.costs import BLOCK, LISTS, MOST_BLOCKS, OWN_LAUNCHES, GpuCosts

CACHE_BYTES, LINE_BYTES = 25 * 10**6, 4096
"""Half of an H100's L2 cache, and the bytes that the model looks up at a time."""

FILLS = {ATEN.copy_, ATEN._foreach_copy_, ATEN.fill_, ATEN.zero_, ATEN._foreach_zero_}
"""Operators that write to their first argument without reading it."""

WAITS = {ATEN._local_scalar_dense, ATEN.equal, ATEN.nonzero, ATEN.masked_select}
"""Operators whose result the host waits for."""

OWN = {torch.ops.zerobench.adam_: 2, torch.ops.zerobench.squares: 1}
"""Operators in place of our kernels -> kernels; each is also a copy of a table to the device. Steps have their own."""

OLDER, NEWER = MOST_BLOCKS
MOST_TENSORS = {OLDER: (110, 64, 48, 36, 30), NEWER: (770, 448, 336, 252, 210)}
"""torch -> tensors of one multi-tensor kernel, by the number of its lists."""


@dataclass
class Operator:
    """Kernels of an operator, by torch's limits; `elements` of its lists if it is a multi-tensor operator; bytes that
    they `touched`, and that `moved` to or from memory with half a cache.
    """

    name: str
    kernels: dict[str, int]
    elements: int = 0
    touched: int = 0
    moved: int = 0

    def seconds(self, costs: GpuCosts, torch_version: str) -> float:
        """Returns the time on a GPU without a cache."""
        launches = OWN_LAUNCHES.get(self.name, self.kernels[torch_version])
        return costs.kernels_s(self.touched, launches, self.elements)


class CachedMemory:
    """Counts one update: its `operators`, and `waits` of the host."""

    kernels = property(lambda self: sum(one.kernels[OLDER] for one in self.operators))
    touched = property(lambda self: sum(one.touched for one in self.operators))
    moved = property(lambda self: sum(one.moved for one in self.operators))

    def __init__(self) -> None:
        self.waits = 0
        self.operators: list[Operator] = []
        self._lines: OrderedDict[int, bool] = OrderedDict()  # -> whether memory lacks the line's values
        self._places: dict[int, tuple[int, torch.UntypedStorage]] = {}  # address of each storage, kept alive
        self._end = 0

    def run(self, func: Any, args: Sequence[Any], named: dict[str, Any], out: Any) -> None:
        """Counts the kernels of one operator."""
        packet, places = func.overloadpacket, func._schema.arguments
        self.waits += packet in WAITS
        if packet in MAKES_ONLY or func.is_view:
            return
        values = {one.name: named.get(one.name, *args[number : number + 1]) for number, one in enumerate(places)}
        changed = [one.name for one in places if one.alias_info is not None and one.alias_info.is_write]
        changed = [name for name in changed if name != "grads"]  # a fused optimizer's, which it only reads
        skipped = changed[:1] if packet in FILLS or "out" in changed else []
        skipped += ["parameters"] * (packet is torch.ops.zerobench.adam_)
        read = _tensors([value for name, value in values.items() if name not in skipped])
        written = _tensors([values[name] for name in changed] or out)
        lists = [_tensors(one) for one in values.values() if isinstance(one, list | tuple)]
        lists, name = [one for one in lists if one], str(packet).removeprefix("aten.")
        kernels = {version: OWN.get(packet) or _launches(lists, version) for version in MOST_BLOCKS}
        elements = sum(tensor.numel() for tensor in lists[0]) if LISTS.match(name) else 0
        self.operators.append(Operator(name, kernels, elements))
        self._stream([(one, False) for one in read] + [(one, True) for one in written])

    def _stream(self, ways: list[tuple[torch.Tensor, bool]]) -> None:
        """Goes through all tensors of a kernel side by side."""
        self.operators[-1].touched += sum(one.nbytes for one, _ in ways)
        parts = -(-max((one.nbytes for one, _ in ways), default=0) // (64 * LINE_BYTES))
        for part in range(parts):
            for tensor, writes in ways:
                first = self._address(tensor.untyped_storage()) + tensor.storage_offset() * tensor.element_size()
                start, stop = (first + tensor.nbytes * edge // parts for edge in (part, part + 1))
                for line in range(-(-start // LINE_BYTES) if part else start // LINE_BYTES, -(-stop // LINE_BYTES)):
                    low, high = line * LINE_BYTES, (line + 1) * LINE_BYTES
                    self._touch(line, min(first + tensor.nbytes, high) - max(first, low), writes)

    def _touch(self, line: int, size: int, writes: bool) -> None:
        newer = self._lines.pop(line, None)
        self.operators[-1].moved += size * ((newer is None and not writes) + (writes and not newer))
        self._lines[line] = writes or bool(newer)
        if len(self._lines) > CACHE_BYTES // LINE_BYTES:
            self._lines.popitem(last=False)

    def _address(self, storage: torch.UntypedStorage) -> int:
        if storage._cdata not in self._places:
            self._places[storage._cdata] = (self._end, storage)
            self._end += LINE_BYTES * (storage.nbytes() // LINE_BYTES + 1)
        return self._places[storage._cdata][0]


def _tensors(values: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, torch.Tensor)]


def _launches(lists: list[list[torch.Tensor]], torch_version: str) -> int:
    """Returns the kernels of an operator over these lists of tensors; 1 if it has none."""
    first = lists[0] if lists else []
    blocks = sum(-(-tensor.numel() // BLOCK) for tensor in first)
    tensors = MOST_TENSORS[torch_version][min(5, max(1, len(lists))) - 1]
    return max(1, -(-len(first) // tensors), -(-blocks // MOST_BLOCKS[torch_version]))


@contextmanager
def counted() -> Iterator[list[CachedMemory]]:
    """Yields the updates that are simulated inside, in order; each starts with an empty cache."""
    updates: list[CachedMemory] = []
    inside = [False]

    def note(stream: OperatorStream, *operator: Any) -> None:
        was, inside[0] = inside[0], stream._log.ledger.phase == "update"
        if inside[0]:
            updates.extend([] if was else [CachedMemory()])
            updates[-1].run(*operator)

    with mock.patch.object(OperatorStream, "_note", note):
        yield updates
