"""The traffic meter: every collective, functional ones included, with the bytes of the logical tensor.

With S the bytes of the full tensor and n the ranks of the group, one rank sends on average, by the ring optimum::

    operator            wire bytes       volume (elements, the paper's convention)
    all-reduce          2(n-1)/n · S     2 · elements
    reduce-scatter      (n-1)/n · S      1 ·
    all-gather          (n-1)/n · S      1 ·
    all-to-all          (n-1)/n · S      1 ·
    broadcast           (n-1)/n · S      1 ·
    send                S                n/(n-1) · elements sent

Wire bytes between nodes are counted separately; a node is `node_size` consecutive ranks. A send counts entirely or not
at all, by its peer; a collective by the fraction of links between two nodes in a ring through the group's ranks in
order. A group inside a node has no such bytes, a group with one rank per node no others.

So n broadcasts of slices count as the equivalent all-gather, and a pairwise exchange as 1 · the whole.

Control traffic (scalars, unlabeled integers such as flags, and traffic labeled as control, up to 64 KiB each; a
module's buffers; and all of start-up) is listed, but not in the volume. Transfers between tiers are listed too, with
their payload only: copies between a device and host memory ("down", "up"), which without a GPU are copies between
storages that labels place in different tiers, and reads and writes of files, as labels report them.
In a group of one rank nothing is sent, and the volume is 0. An operator without a row here is listed as unknown, never
dropped.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..fake.compiler import GraphMode
from ..records import COLLECTIVES, DATA_AXIS, TENSOR_AXIS
from ..zero import labels
from .collective_operators import NAMESPACES, RULES, SILENT, OperatorRule, tensors_in
from .intervals import ASIDE, SAVE
from .labeling import holds_others
from .outside_dispatch import Relay

COPIES = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default}
"""Operators that copy values to new memory, possibly in another tier."""

LINKS = {(labels.DEVICE, labels.HOST): "down", (labels.HOST, labels.DEVICE): "up"}
"""(From, to) -> the name under which a copy is counted."""

CONTROL_MOST_BYTES = 64 * 1024
"""Limit of control traffic (flags and scalars): a larger payload counts in the volume, whatever its label."""

THREAD = "thread "
"""Prefix of the unit of an operation that another thread has issued."""

SAVER = f"{THREAD}checkpoint"
"""Prefix for the thread of an asynchronous save (zero/checkpoint/consensus.py)."""

SUMMED = ("elements", "payload_bytes", "wire_bytes", "within_bytes", "between_bytes", "volume_elements")
"""Fields of an operation that are summed over equal operations."""


class Operation(NamedTuple):
    """One physical operation as it was issued."""

    phase: str
    operator: str
    collective: str
    kind: str
    unit: str
    dtype: str
    group_size: int
    elements: int
    payload_bytes: int
    wire_bytes: float
    within_bytes: float
    between_bytes: float
    volume_elements: float
    control: bool
    known: bool
    group: str = ""
    stride: int = 1
    axis: str = DATA_AXIS


def is_of_step(operation: Operation) -> bool:
    """Returns True if it is part of the step, as a save of a checkpoint and the messages of its thread are not. The
    harness's own reading of gradients writes nothing: a write in that phase comes from a thread of the step's files.
    """
    if operation.phase == SAVE or operation.unit.startswith(SAVER):
        return False
    return operation.phase != ASIDE or operation.kind == labels.WRITE


class TrafficMeter(GraphMode, labels.Observer):
    """Records (operation, number) in `operations`; the reader empties the list. `tier_of`, `name_of`: tensor -> its
    tier and label, from the ledger. `node_size`: ranks per node; None: all are on one node. `model_ranks`: consecutive
    ranks that share one model.
    """

    node_size: int | None = None
    model_ranks: int = 1

    def __init__(
        self, tier_of: Callable[[torch.Tensor], str] = lambda _: labels.DEVICE,
        name_of: Callable[[torch.Tensor], str] = lambda _: "",
    ) -> None:  # fmt: skip
        super().__init__()
        self._tier_of, self._name_of = tier_of, name_of
        self.phase = "init"
        self.operations: list[tuple[Operation, int]] = []
        self.tell: Callable[[Operation, int], None] | None = None
        """Called with each operation when it is issued, if a table of events is requested."""
        self._home = threading.get_ident()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if holds_others(types):
            return NotImplemented  # it is dispatched again on its contents
        if func.namespace in NAMESPACES:
            name = func._schema.name.split("::")[1]
            # an in-place functional operator is the same operation as its out-of-place form
            self._note(name if func.namespace == "c10d" else name.rstrip("_"), func, args)
        out = func(*args, **(kwargs or {}))
        if func in COPIES:
            place = args[0] if func is torch.ops.aten.copy_.default else out
            source = args[1] if func is torch.ops.aten.copy_.default else args[0]
            self._note_copy(place, source)
        return out

    def _note_copy(self, place: torch.Tensor, source: torch.Tensor) -> None:
        """Records a copy between tiers: torch casts at the source, so that the transferred data has the destination's
        dtype.
        """
        kind = LINKS.get((self._tier_of(source), self._tier_of(place)))
        if kind is not None and source.numel():
            # a batch or a flag: not data that the engine transfers between tiers
            aside = self.phase == "data" or place.dim() == 0 or bool(labels.current_collective()[0])
            name, size = self._name_of(place), place.element_size()
            self._note_link("copy_", kind, name, place.dtype, place.numel(), size, aside)

    def on_transfer(self, kind: str, size: int, name: str) -> None:
        """Records bytes read from a file, or written to one."""
        self._note_link(kind, kind, name, torch.uint8, size, 1)

    def _note_link(
        self, operator: str, kind: str, unit: str, dtype: torch.dtype, elements: int, size: int, aside: bool = False
    ) -> None:
        named = str(dtype).removeprefix("torch.")
        operation = Operation(
            self.phase, operator, "", kind, unit, named, 1, elements, elements * size, 0.0, 0.0, 0.0, 0.0,
            control=self.phase == "init" or aside, known=True,
        )  # fmt: skip
        self._record(operation, 1)

    def note_raw(self, name: str, args: tuple[Any, ...], ranks: int) -> None:
        """Records a collective passed directly to a backend, without an operator (probes/outside_dispatch.py)."""
        self._count(f"raw_{name}", RULES.get(name), tensors_in(args, RULES.get(name)), ranks, 0.0)

    def _note(self, name: str, func: Any, args: tuple[Any, ...]) -> None:
        if name in SILENT:
            return
        rule, group = RULES.get(name), self._group(func, args)
        if name == "send" and not any(t.numel() for t in tensors_in(args, rule)):
            return  # a barrier of gloo's ranks, which is empty
        for outside, times in self._shares_between(group, args[2] if name == "send" else None).items():
            ranks = dist.get_process_group_ranks(group)
            self._count(
                name,
                rule,
                tensors_in(args, rule),
                group.size(),
                outside,
                times,
                group.group_name,
                min((following - here for here, following in pairwise(ranks)), default=1),
                self._axis_of(ranks),
            )

    def _count(
        self, name: str, rule: OperatorRule | None, tensors: list[torch.Tensor], n: int, outside: float, times: int = 1,
        group: str = "", stride: int = 1, axis: str = DATA_AXIS,
    ) -> None:  # fmt: skip
        """Records operations. `outside`: the fraction of wire bytes that leaves a node. `times`: number of such
        operations. `group`: the process group's name. `stride`: the distance between its consecutive ranks.
        `axis`: of the mesh; only traffic between ranks with different data counts in the strategy's volume.
        """
        elements = sum(t.numel() for t in tensors)
        payload = sum(t.numel() * t.element_size() for t in tensors)
        collective, unit = self._named()
        control = self.phase == "init" or elements == 1 or self._is_control(collective, unit, tensors, payload)
        wire = payload * rule.wire(n) if rule else 0.0
        between = wire * outside
        operation = Operation(
            phase=self.phase,
            operator=name,
            collective=collective,
            kind=collective if collective in COLLECTIVES else rule.kind if rule else "other",
            unit=unit,
            dtype=str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
            group_size=n,
            elements=elements,
            payload_bytes=payload,
            wire_bytes=wire,
            within_bytes=wire - between,
            between_bytes=between,
            volume_elements=elements * rule.volume(n) if rule and not control and n > 1 and axis == DATA_AXIS else 0.0,
            control=control,
            known=rule is not None,
            group=group,
            stride=stride,
            axis=axis,
        )
        self._record(operation, times)

    def _record(self, operation: Operation, times: int) -> None:
        self.operations.append((operation, times))
        if self.tell is not None:
            self.tell(operation, times)

    def followed(self) -> Relay:
        return Relay([self], 0)

    def _named(self) -> tuple[str, str]:
        """Returns the collective and unit from the labels of the main thread and the engine's threads; operations of
        other threads have none.
        """
        if threading.get_ident() == self._home or isinstance(threading.current_thread(), labels.EngineThread):
            return labels.current_collective()
        return "", f"{THREAD}{threading.current_thread().name}"

    @staticmethod
    def _is_control(collective: str, unit: str, tensors: list[torch.Tensor], payload: int) -> bool:
        """Returns True for control traffic: buffers of any size; otherwise, if small, traffic labeled as control and
        unlabeled integers.
        """
        flags = any(not t.is_floating_point() for t in tensors) and not collective
        said = collective == "control"
        return (said and unit == labels.BUFFERS) or ((said or flags) and payload <= CONTROL_MOST_BYTES)

    def _shares_between(self, group: dist.ProcessGroup, peer: int | None) -> dict[float, int]:
        """Returns fraction of an operation's wire bytes that leaves a node -> number of such operations. `peer`: the
        destination of a send, as a rank in the group; one send may stand for several.
        """
        peers, each = labels.current_sends()
        if peer is None or not peers:
            peers, each = [] if peer is None else [peer], 1
        if self.node_size is None:
            return {0.0: each * len(peers) or 1}
        nodes = [rank // self.node_size for rank in dist.get_process_group_ranks(group)]
        if peers:
            outside = Counter(float(nodes[one] != nodes[group.rank()]) for one in peers)
            return {fraction: each * sends for fraction, sends in outside.items()}
        leaving = sum(here != following for here, following in zip(nodes, nodes[1:] + nodes[:1], strict=True))
        return {leaving / len(nodes): 1}

    def within_model(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Returns True for a collective among ranks that share a model."""
        return self._axis_of(dist.get_process_group_ranks(self._group(func, args))) == TENSOR_AXIS

    def _axis_of(self, ranks: list[int]) -> str:
        inside = len(ranks) > 1 and ranks[0] // self.model_ranks == ranks[-1] // self.model_ranks
        return TENSOR_AXIS if inside else DATA_AXIS

    @staticmethod
    def _group(func: Any, args: tuple[Any, ...]) -> dist.ProcessGroup:
        places = [i for i, a in enumerate(func._schema.arguments) if a.name in ("process_group", "group_name")]
        if not places or places[0] >= len(args):
            assert dist.group.WORLD is not None
            return dist.group.WORLD
        group = args[places[0]]
        if isinstance(group, str):
            group = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]  # private; a test
        if not isinstance(group, dist.ProcessGroup):
            group = dist.ProcessGroup.unbox(group)
        return group
