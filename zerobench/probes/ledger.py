"""The ledger: every storage with its bytes, lifetime and category, for any strategy.

A dispatch mode sees each operator's outputs; a weak reference reports a storage's end; a patch of
`UntypedStorage.resize_`, which dispatches nothing, reports changes of size. Labels (zero/labels.py) give categories.
Categories of unlabeled storages are inferred: activations if allocated in forward, or while backward recomputes;
otherwise temporary.

An unlabeled argument of a collective, except flags, is a communication buffer from its birth: this applies to the
buckets and gather buffers of strategies without labels. Tensors that contain others are resolved to their contents.

A storage is in one *tier* all its life: host memory if a label says so, or on CUDA if it is not on a GPU. A file's
bytes are known only from labels. Each tier has its own sums.

A gradient is identified only once autograd delivers it. So a storage's first label applies from its birth: each step is
recorded as events and summed when it is over.

Fake tensors' storages are all on the meta device, whatever device they represent: their ledger is ShapesOnly.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ..fake.compiler import GraphMode, dispatch_buffers
from ..fake.observers import MATMULS, Growth, IntervalMark, copied_by_backend, shapes_asked, take_observers
from ..fake.operators import MISSED, HostValues, represented_device
from ..records import STATES
from ..zero import labels
from .in_transit import InTransit
from .intervals import Birth, Event, History, Interval, IntervalSums, StorageRecord
from .labeling import contains_others, holds_others, label_parts, parts_of, plain_tensors_in
from .outside_dispatch import optimizer_steps_watched, resizes_watched
from .source_lines import SourceLines
from .traffic import COPIES, NAMESPACES

FLEETING = (labels.ACTIVATIONS, "temporary")
"""Categories of storages that should not exist at the beginning or end of a step."""

CLONE, CAST = torch.ops.aten.clone.default, torch.ops.aten._to_copy.default
"""Operators whose result may have the category of their first argument."""

WAIT = torch.ops._c10d_functional.wait_tensor.default
"""The operator with which a caller of a functional collective waits for it."""


class LedgerLog(Protocol):
    """Notified of a profiler's marks (event_log.py). `of_storages`: their events need the line that ran."""

    of_storages: bool

    def marked(self, operator: str, args: Sequence[object]) -> None: ...


class Ledger(GraphMode, labels.Observer):
    """Records operators, storages and labels. `begin` and `end` bound an interval. `device`: the device's type."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.phase = "init"
        self.module = ""
        self.sums = IntervalSums()
        self.kept: dict[StorageRecord, int] = {}
        """Storages on the device that survived a whole interval although they are activations or temporary."""
        self._device = device
        self._files: dict[tuple[str, str, str], StorageRecord] = {}
        self.lines = SourceLines()
        self._live: dict[int, StorageRecord] = {}
        self._watches: dict[int, weakref.ref[Any]] = {}
        self.events: list[Event] = []
        """Events of the interval so far."""
        self._at_begin: dict[StorageRecord, int] = {}
        self._began = time.perf_counter()
        self._home = threading.get_ident()
        self._in_optimizer = False  # within an optimizer's step, whose copies are temporaries
        self._stack = ExitStack()
        self.history: History | None = None
        """Filled for a snapshot, if requested."""
        self.log: LedgerLog | None = None
        """Set if events or predicted times are requested: events that change no storage are then recorded, too."""
        self.logged: Interval | None = None
        """The last interval that ended, if there is a log."""
        self.in_transit: InTransit | None = None
        """Tensors that the ledger waits for; set if collectives of the user's loop may drop tensors late."""
        self.within_model: Callable[[Any, Any], bool] = lambda func, args: False
        """Returns True for a collective among ranks that share a model, which send each other activations."""

    # -- listening ------------------------------------------------------------------------------------

    def __enter__(self) -> Ledger:
        if "torch._inductor" in sys.modules:  # a loop that compiles: graphs are loaded at their first call
            dispatch_buffers()
        self._stack.enter_context(resizes_watched(self._meet))
        self._stack.enter_context(optimizer_steps_watched(partial(setattr, self, "_in_optimizer")))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if holds_others(types):
            return NotImplemented  # it is dispatched again on its contents
        is_collective = func.namespace in NAMESPACES and labels.current_collective()[0] != "control"
        within_model = is_collective and self.within_model(func, args)
        if is_collective and not within_model:
            self.note_collective(args)
        if self.in_transit is not None:
            # our engines keep what they send until they have waited for it
            is_foreign = labels.current_collective() in (("", ""), ("control", labels.BUFFERS))
            self.in_transit.before_operator(is_foreign and func.namespace in NAMESPACES, args, self.knows)
        if self.log is not None and func.namespace == "profiler":
            self.log.marked(func._schema.name.split("::")[1], args)
        self.lines.see_operator()
        out = self._run(func, args, kwargs or {})
        if self.in_transit is not None and func is WAIT:
            self.in_transit.wait_for(args[0])
        self._meet_all(out)
        if within_model:  # what ranks of one model send each other is no communication buffer, in a later wait either
            for tensor in plain_tensors_in((args, out)):
                self._meet(self._see(tensor), tensor.shape).labeled = True
        if func in (CLONE, CAST) and not self._in_optimizer:
            # A copy of a state has the state's category, unless a label says otherwise: for example a strategy's clone
            # of gradients. A cast is such a copy only of a gradient in backward, as in FSDP2, which accumulates whole
            # gradients in the dtype of the reduction; other casts compute.
            categories: Sequence[str] = STATES if func is CLONE and self.phase != "forward" else ()
            if func is CAST and self.phase == "backward":
                categories = (labels.GRADIENTS,)
            original, copied = map(self.record_of, (args[0], out))
            if original is not None and copied is not None and original.category in categories and not copied.labeled:
                copied.category, copied.name = original.category, f"copy of {original.name}"
        return out

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

    def on_tensor(self, tensor: torch.Tensor, category: str, name: str, tier: str | None = None) -> None:
        """Applies a label: from birth if it is the storage's first, otherwise from now on; the tier is permanent."""
        stored = self._meet(self._see(tensor), tensor.shape)
        stored.tier = tier or stored.tier
        if stored.labeled and stored.category != category:
            self.events.append(Event(self.phase, time.perf_counter(), stored, moved=(stored.category, category)))
        stored.category, stored.labeled = category, True
        stored.name = name or stored.name
        stored.first_name = stored.first_name or name

    def on_file(self, path: str, name: str, category: str, size: int) -> None:
        """Records a file's bytes, which are in no storage."""
        stored = self._files.setdefault(
            (path, name, category), StorageRecord(0, category, name, "", self.phase, True, labels.NVME)
        )
        grown, stored.bytes = size - stored.bytes, size
        self.events.append(Event(self.phase, time.perf_counter(), stored, grown=grown))

    def label_states(self, optimizer: torch.optim.Optimizer) -> None:
        """Labels an optimizer's states, which are in their parameter's tier."""
        for parameter, state in optimizer.state.items():
            tier = self.tier_of(next(parts_of(parameter)))
            for name, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor):
                    label_parts(value, labels.OPTIMIZER, str(name), tier if value.device == parameter.device else None)

    def record_of(self, tensor: torch.Tensor) -> StorageRecord | None:
        """Returns the record of a tensor's storage, if it has been met; does not count it."""
        values = next(parts_of(tensor), None) if contains_others(tensor) else tensor
        return None if values is None else self._live.get(values.untyped_storage()._cdata)

    def knows(self, tensor: torch.Tensor) -> bool:
        """Returns True if the tensor's storage has been met."""
        return self.record_of(tensor) is not None

    def meet(self, tensor: torch.Tensor, name: str) -> None:
        """Counts a tensor that was made before the ledger started, as temporary."""
        stored = self._meet(self._see(tensor), tensor.shape)
        stored.name, stored.category, stored.module, stored.source = name, "temporary", "", ""

    def tier_of(self, tensor: torch.Tensor) -> str:
        """Returns a tensor's tier, without counting the tensor."""
        if (stored := self.record_of(tensor)) is not None:
            return stored.tier
        part = next(parts_of(tensor), None)
        return labels.DEVICE if part is None else self._infer_tier(part.untyped_storage())

    def name_of(self, tensor: torch.Tensor) -> str:
        """Returns a tensor's label."""
        stored = self.record_of(tensor)
        return stored.name if stored is not None else ""

    def note(self, kind: str, source: str = "", **facts: Any) -> None:
        """Records an event of `kind` that changes no storage; `facts`: values of columns."""
        event = Event(self.phase, time.perf_counter(), source=source, kind=kind, module=self._maker(), facts=facts)
        self.events.append(event)

    def note_collective(self, args: Any) -> None:
        """Makes unlabeled arguments of a collective communication buffers from their birth."""
        for tensor in plain_tensors_in(args):
            if not self._meet(self._see(tensor), tensor.shape).labeled:
                self.on_tensor(tensor, labels.COMMUNICATION, "given to a collective")

    def _meet_all(self, out: Any) -> None:
        for tensor in plain_tensors_in(out):
            self._meet(self._see(tensor), tensor.shape)

    def _see(self, tensor: torch.Tensor) -> torch.UntypedStorage:
        return tensor.untyped_storage()

    def _meet(self, storage: torch.UntypedStorage, shape: Sequence[int] = ()) -> StorageRecord:
        key, size = storage._cdata, self._bytes_of(storage)
        stored = self._live.get(key)
        if stored is None:
            self._settle()
            tier, source = self._infer_tier(storage), self.lines.here()
            recomputing = self.phase == "backward" and torch.is_grad_enabled()
            is_of_forward = threading.get_ident() == self._home and (self.phase == "forward" or recomputing)
            category = labels.ACTIVATIONS if is_of_forward else "temporary"
            stored = StorageRecord(0, category, "", self._maker(), self.phase, tier=tier, source=source, shape=shape)
            self._live[key] = stored
            self._watches[key] = weakref.ref(storage, lambda _: self._bury(key))
        elif size > stored.bytes:  # resized, as FSDP2's parameters are
            self._settle()
        if size != stored.bytes:
            self._grow(stored, size - stored.bytes)
            if self.history is not None and device_of(storage) == "cuda":
                self.history.births.append(Birth(storage.data_ptr(), time.perf_counter(), stored))
        return stored

    def _settle(self) -> None:
        if self.in_transit is not None and threading.get_ident() == self._home:
            self.in_transit.settle()

    def _bytes_of(self, storage: torch.UntypedStorage) -> int:
        return 0 if storage.device.type == "meta" else storage.nbytes()

    def _bury(self, key: int) -> None:
        stored = self._live.pop(key, None)
        self._watches.pop(key, None)
        if stored is not None and stored.bytes:
            self._grow(stored, -stored.bytes)

    def _grow(self, stored: StorageRecord, grown: int) -> None:
        """Records that a storage has grown by `grown` bytes, or shrunk if `grown` is below 0."""
        source = self.lines.here() if self.log is not None and self.log.of_storages else ""
        self.events.append(Event(self.phase, time.perf_counter(), stored, grown, source=source))
        stored.bytes += grown

    def _maker(self) -> str:
        """Returns the name of the running module or thread."""
        is_home = threading.get_ident() == self._home
        return self.module if is_home else f"thread {threading.current_thread().name}"

    def _infer_tier(self, storage: torch.UntypedStorage) -> str:
        tier = labels.DEVICE if device_of(storage) in (self._device, "meta") else labels.HOST
        return labels.current_tier() or tier

    # -- intervals ------------------------------------------------------------------------------------

    def enter_phase(self, phase: str) -> None:
        """Assigns later events to `phase`."""
        self._settle()
        self.phase = phase
        self.events.append(Event(phase, time.perf_counter()))

    def live_bytes(self) -> dict[StorageRecord, int]:
        """Returns the storages currently alive on the device, with their sizes."""
        living = list(self._live.values())  # at once: other threads free tensors too
        return {stored: stored.bytes for stored in living if stored.tier == labels.DEVICE and stored.bytes}

    def begin(self) -> None:
        """Begins an interval: drops the events so far."""
        self.events = []
        self.lines.forget()
        self._began = time.perf_counter()
        self._at_begin = {stored: stored.bytes for stored in (*self._live.values(), *self._files.values())}

    def end(self, whole: str) -> None:
        """Ends the interval: adds it to the sums of each phase and of `whole`."""
        self._settle()
        interval = self._interval()
        if self.log is not None:
            self.logged = interval
        peak = self.sums.add(whole, interval)
        self.kept = {
            stored: size
            for stored, size in self._at_begin.items()
            if size and stored.bytes == size and stored.tier == labels.DEVICE and stored.category in FLEETING
        }
        if self.history is not None and whole == "step" and peak == self.sums.extremes[whole].peak:
            self.history.step = interval

    def _interval(self) -> Interval:
        """Returns the interval with its storages' first categories: a first label applies from birth."""
        categories = {stored: stored.category for stored in self._at_begin}
        categories |= {event.stored: event.stored.category for event in self.events if event.stored is not None}
        for event in reversed(self.events):
            if event.stored is not None and event.moved is not None:
                categories[event.stored] = event.moved[0]
        log = list(self.events)
        changes = log if self.log is None else [event for event in log if not event.kind]
        return Interval(self._began, self._at_begin, categories, changes, log)


def device_of(storage: torch.UntypedStorage) -> str:
    """Returns the type of the storage's device."""
    return storage.device.type


class ShapesOnly(Ledger):
    """Counts storages of fake tensors on the device that they represent. Placeholders, which represent the meta device
    itself, are not counted, and neither are tensors made inside DTensor's shape functions. Its observers are notified
    of each change.
    """

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self._placeholders: set[int] = set()
        self._observers = take_observers()
        self._at_once: Callable[[Any, Any, dict[str, Any]], Any] = lambda *_: MISSED

    def __enter__(self) -> Ledger:
        for mode in _get_current_dispatch_mode_stack():
            if isinstance(mode, HostValues):
                self._at_once = mode.at_once
        return super().__enter__()

    def enter_phase(self, phase: str) -> None:
        super().enter_phase(phase)
        self._notify(IntervalMark("phase", phase))

    def begin(self) -> None:
        super().begin()
        self._notify(IntervalMark("begin"))

    def end(self, whole: str) -> None:
        super().end(whole)
        self._notify(IntervalMark("end", whole))

    def _grow(self, stored: StorageRecord, grown: int) -> None:
        super()._grow(stored, grown)
        self._notify(Growth(stored, grown))

    def _notify(self, event: Growth | IntervalMark) -> None:
        for observer in self._observers:
            observer(event)

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        is_traffic = func.namespace != "aten" or func in COPIES  # the meter below sees it
        out = MISSED if is_traffic else self._at_once(func, args, kwargs)
        if out is MISSED:
            out = func(*args, **kwargs)
            self._meet_all(copied_by_backend(func, args))
        if func in MATMULS:
            self._meet_all(out)
            self._notify(IntervalMark("matmul"))
        return out

    def _meet(self, storage: torch.UntypedStorage, shape: Sequence[int] = ()) -> StorageRecord:
        stored = self._live.get(storage._cdata)
        is_current = stored is not None and stored.bytes == self._bytes_of(storage)
        return stored if stored is not None and is_current else super()._meet(storage, shape)

    def _see(self, tensor: torch.Tensor) -> torch.UntypedStorage:
        storage = tensor.untyped_storage()
        uncounted = represented_device(tensor).type == "meta" or shapes_asked()
        (self._placeholders.add if uncounted else self._placeholders.discard)(storage._cdata)
        return storage

    def _bytes_of(self, storage: torch.UntypedStorage) -> int:
        return 0 if storage._cdata in self._placeholders else storage.nbytes()
