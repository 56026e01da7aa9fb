"""The traffic meter: every collective, functional ones included, with the bytes of the logical tensor.

With S the bytes of the full tensor and n the ranks of the group, one rank sends on average, by the ring optimum::

    operator            wire bytes       volume (elements, the paper's convention)
    all-reduce          2(n-1)/n · S     2 · elements
    reduce-scatter      (n-1)/n · S      1 ·
    all-gather          (n-1)/n · S      1 ·
    all-to-all          (n-1)/n · S      1 ·
    broadcast           (n-1)/n · S      1 ·
    send                S                n/(n-1) · elements sent

With s the bytes of one rank's values and indices, and v its values, gloo's all-reduce of sparse tensors gathers them:
(n-1) · s wire bytes, and a volume of n · v.

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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from itertools import pairwise
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from ..fake.compiler import GraphMode
from ..records import COLLECTIVES, DATA_AXIS, TENSOR_AXIS
from ..zero import labels
from .intervals import ASIDE, SAVE
from .labeling import holds_others, parts_of
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
"""Prefix for the thread of an asynchronous save (zero/checkpoint/save_load.py)."""

SUMMED = ("elements", "payload_bytes", "wire_bytes", "within_bytes", "between_bytes", "volume_elements")
"""Fields of an operation that are summed over equal operations."""

# -- torch's collectives by operator ---------------------------------------------------------------

NAMESPACES = ("c10d", "_c10d_functional")
"""Namespaces of torch's collectives: torch.distributed's, and those of torch.compile and DTensor."""

SILENT = {"recv_", "recv_any_source_", "barrier", "monitored_barrier_", "wait_tensor", "_wrap_tensor_autograd"}
"""Operators without their own bytes: a receive is counted where it is sent."""


class OperatorRule(NamedTuple):
    """One operator: its full tensor, factors for n ranks, and the category of unlabeled volume."""

    full: Callable[[tuple[Any, ...]], list[torch.Tensor]]
    kind: str = "other"
    wire: Callable[[int], float] = lambda n: (n - 1) / n
    volume: Callable[[int], float] = lambda n: 1


def _flat(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else [tensor for part in value for tensor in _flat(part)]


def _first(arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    return _flat(arguments[0])


def _second(arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    return _flat(arguments[1])


_OPERATORS = {
    OperatorRule(_first, "all_reduce", lambda n: 2 * (n - 1) / n, lambda n: 2): (
        "all_reduce", "all_reduce_coalesced", "allreduce_", "allreduce_coalesced_",
    ),
    OperatorRule(lambda arguments: _flat(arguments[0]) * arguments[1], "all_gather"): (  # input, group size
        "all_gather_into_tensor", "all_gather_into_tensor_coalesced",
    ),
    OperatorRule(_first, "all_gather"): (
        "allgather_", "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_",
    ),
    OperatorRule(_first, "reduce_scatter"): ("reduce_scatter_tensor", "reduce_scatter_tensor_coalesced"),
    OperatorRule(_second, "reduce_scatter"): (
        "reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_",
    ),
    OperatorRule(_first): ("all_to_all_single", "broadcast", "broadcast_", "reduce_", "gather_", "scatter_"),
    OperatorRule(_second): ("alltoall_", "alltoall_base_"),
    OperatorRule(_first, wire=lambda n: 1, volume=lambda n: n / (n - 1) if n > 1 else 0): ("send",),
}  # fmt: skip

RULES = {operator: rule for rule, operators in _OPERATORS.items() for operator in operators}

RAW = {name.removesuffix("_"): name for name in RULES if name.endswith("_") or name == "send"}
"""Method of a process group's backend -> the operator that calls it, whose rule counts it."""


def gloo_factor(operator: str) -> int:
    """Returns gloo's bytes over the ring optimum: its reduce-scatter is a clone and an all-reduce."""
    return 2 if "reduce_scatter" in operator else 1


def tensors_in(args: tuple[Any, ...], rule: OperatorRule | None) -> list[torch.Tensor]:
    """Returns the full tensors by the rule; for an unknown operator all tensors."""
    return rule.full(args) if rule else [t for a in args if isinstance(a, torch.Tensor | list) for t in _flat(a)]


# -- the meter -------------------------------------------------------------------------------------


class Operation(NamedTuple):
    """One physical operation as it was issued."""

    phase: str
    operator: str
    kind: str
    unit: str
    dtype: str
    elements: int
    payload_bytes: int
    control: bool
    collective: str = ""
    group_size: int = 1
    wire_bytes: float = 0.0
    within_bytes: float = 0.0
    between_bytes: float = 0.0
    volume_elements: float = 0.0
    known: bool = True
    group: str = ""
    stride: int = 1
    axis: str = DATA_AXIS


def is_of_step(operation: Operation) -> bool:
    """Returns False for a save of a checkpoint, its thread's messages, and the harness's own work, but True for a write
    to a file during that work: the harness writes none, so the write comes from a thread of the step's file tier.
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
        self.on_operation: Callable[[Operation, int], None] | None = None
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
            self._note_copy(*(args[:2] if func is torch.ops.aten.copy_.default else (out, args[0])))
        return out

    def _note_copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Records a copy between tiers: torch casts at the source, so its dtype is the destination's."""
        kind = LINKS.get((self._tier_of(source), self._tier_of(target)))
        if kind is not None and source.numel():
            # a batch or a flag: not data that the engine transfers between tiers
            is_control = self.phase == "data" or target.dim() == 0 or bool(labels.current_collective()[0])
            dtype, size = str(target.dtype).removeprefix("torch."), target.numel() * target.element_size()
            self._record(Operation(
                self.phase, "copy_", kind, self._name_of(target), dtype, target.numel(), size,
                self.phase == "init" or is_control,
            ), 1)  # fmt: skip

    def on_transfer(self, kind: str, size: int, name: str) -> None:
        self._record(Operation(self.phase, kind, kind, name, "uint8", size, size, self.phase == "init"), 1)

    def note_raw(self, name: str, args: tuple[Any, ...], ranks: int) -> None:
        """Records a collective passed directly to a backend, without an operator."""
        self._count(f"raw_{name}", RULES.get(name), args, ranks)

    def _note(self, name: str, func: Any, args: tuple[Any, ...]) -> None:
        if name in SILENT:
            return
        rule, group = RULES.get(name), self._group(func, args)
        if name == "send" and not any(t.numel() for t in tensors_in(args, rule)):
            return  # a barrier of gloo's ranks, which is empty
        ranks = dist.get_process_group_ranks(group)
        stride = min((following - here for here, following in pairwise(ranks)), default=1)
        for outside, times in self._shares_between(group, args[2] if name == "send" else None).items():
            self._count(name, rule, args, group.size(), outside, times, group.group_name, stride, self._axis(ranks))

    def _count(
        self, name: str, rule: OperatorRule | None, args: tuple[Any, ...], n: int, outside: float = 0.0, times: int = 1,
        group: str = "", stride: int = 1, axis: str = DATA_AXIS,
    ) -> None:  # fmt: skip
        """Records operations. `outside`: the fraction of wire bytes that leaves a node. `times`: number of such
        operations. `group`: the process group's name. `stride`: the distance between its consecutive ranks.
        `axis`: of the mesh; only traffic between ranks with different data counts in the strategy's volume.
        """
        tensors = tensors_in(args, rule)
        elements = sum(t.numel() for t in tensors)
        payload = sum(part.numel() * part.element_size() for t in tensors for part in parts_of(t))
        wire = payload * rule.wire(n) if rule else 0.0
        volume = elements * rule.volume(n) if rule else 0.0
        if any(t.is_sparse for t in tensors):  # its all-reduce gathers the values and indices of all ranks
            wire, volume = payload * (n - 1.0), n * sum(next(parts_of(t)).numel() for t in tensors)
        collective, unit = self._named()
        # small traffic that is labeled as control, or unlabeled integers; buffers of any size
        is_labeled, are_flags = (
            collective == "control",
            not collective and any(not t.is_floating_point() for t in tensors),
        )
        control = self.phase == "init" or elements == 1 or (is_labeled and unit == labels.BUFFERS)
        control = control or ((is_labeled or are_flags) and payload <= CONTROL_MOST_BYTES)
        between = wire * outside
        operation = Operation(
            self.phase, name, collective if collective in COLLECTIVES else rule.kind if rule else "other", unit,
            str(tensors[0].dtype).removeprefix("torch.") if tensors else "", elements, payload, control,
            collective=collective, group_size=n, wire_bytes=wire, within_bytes=wire - between, between_bytes=between,
            volume_elements=volume if not control and n > 1 and axis == DATA_AXIS else 0.0,
            known=rule is not None, group=group, stride=stride, axis=axis,
        )  # fmt: skip
        self._record(operation, times)

    def _record(self, operation: Operation, times: int) -> None:
        self.operations.append((operation, times))
        if self.on_operation is not None:
            self.on_operation(operation, times)

    def followed(self) -> Relay:
        return Relay([self], 0)

    def _named(self) -> tuple[str, str]:
        """Returns collective and unit of the main thread's and the engine's threads' labels; others have none."""
        if threading.get_ident() == self._home or isinstance(threading.current_thread(), labels.EngineThread):
            return labels.current_collective()
        return "", f"{THREAD}{threading.current_thread().name}"

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
            outside = Counter(float(nodes[peer] != nodes[group.rank()]) for peer in peers)
            return {fraction: each * sends for fraction, sends in outside.items()}
        crossings = sum(node != following for node, following in zip(nodes, nodes[1:] + nodes[:1], strict=True))
        return {crossings / len(nodes): 1}

    def within_model(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Returns True for a collective among ranks that share a model."""
        return self._axis(dist.get_process_group_ranks(self._group(func, args))) == TENSOR_AXIS

    def _axis(self, ranks: list[int]) -> str:
        inside = len(ranks) > 1 and ranks[0] // self.model_ranks == ranks[-1] // self.model_ranks
        return TENSOR_AXIS if inside else DATA_AXIS

    @staticmethod
    def _group(func: Any, args: tuple[Any, ...]) -> dist.ProcessGroup:
        names = [argument.name for argument in func._schema.arguments][: len(args)]
        group = next((args[i] for i, name in enumerate(names) if name in ("process_group", "group_name")), None)
        if group is None:
            assert dist.group.WORLD is not None
            return dist.group.WORLD
        if isinstance(group, str):
            group = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]  # private; a test
        if not isinstance(group, dist.ProcessGroup):
            group = dist.ProcessGroup.unbox(group)
        return group


@contextmanager
def backends_watched(note: Callable[[str, tuple[Any, ...], int], None]) -> Iterator[None]:
    """Calls `note(operator, arguments, ranks)` for collectives that Python passes directly to a backend, for which no
    operator is dispatched. torch.distributed's collectives reach the backend from C++, not through this path.
    """

    def noted(method: Callable[..., Any], operator: str) -> Callable[..., Any]:
        @wraps(method)
        def call(backend: Any, *args: Any, **kwargs: Any) -> Any:
            note(operator, (*args, *kwargs.values()), backend.size())
            return method(backend, *args, **kwargs)

        return call

    backend: Any = torch._C._distributed_c10d.Backend  # the base class of all, of Python's as well
    with ExitStack() as stack:  # mock puts back what the class itself holds: a method that binds
        for name in filter(partial(hasattr, backend), RAW):
            stack.enter_context(mock.patch.object(backend, name, noted(getattr(backend, name), RAW[name])))
        yield
