"""The ledger: every storage with its bytes, lifetime and category, for any strategy.

A dispatch mode sees each operator's outputs; a weak reference reports a storage's end; a patch of
`UntypedStorage.resize_`, which dispatches nothing, reports changes of size. Labels (zero/labels.py) give categories.
Unlabeled storages are inferred: allocated in forward, or while backward recomputes: activations; elsewhere: temporary.

An unlabeled argument of a collective, except flags, is a communication buffer from its birth: so are the buckets and
gather buffers of strategies without labels. Tensors that contain others are resolved to these.

A storage is in one *tier* all its life: host memory where a label says so, or on CUDA where it is not a GPU's. A file's
bytes are known from labels only. Each tier has sums of its own.

A gradient is identified only once autograd delivers it. So the first label of a storage holds from its birth: each step
is recorded as events and summed when it is over.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from ..records import CATEGORIES, STATES, TIERS
from ..zero import labels
from .collective_operators import NAMESPACES
from .dtensor import holds_others, parts_of
from .history import Birth, History, Interval, Listener
from .in_transit import InTransit
from .ledger_maxima import ASIDE, INSTANTS, Births, Event, Extremes, Instant, StorageRecord, thin_out
from .source_lines import SourceLines

FLEETING = (labels.ACTIVATIONS, "temporary")
"""Categories of storages that a step neither begins nor ends with."""

COPIES = {torch.ops.aten.clone.default}
"""Operators whose result has the category of their first argument."""


class Ledger(TorchDispatchMode):
    """Records operators, storages and labels. `begin` and `end` bound an interval; `extremes` has the device's sums,
    `elsewhere` those of the other tiers, by (tier, phase). `device`: the type of device that counts as the device.
    """

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.phase = "init"
        self.module = ""
        self.extremes: dict[str, Extremes] = {}
        self.elsewhere: dict[tuple[str, str], Extremes] = {}
        self.in_memory: Counter[str] = Counter()
        """The peak of device and host memory together, by phase: on a CPU one allocator has both."""
        self.kept: dict[StorageRecord, int] = {}
        """Storages on the device that survived a whole interval although they are activations or temporary."""
        self._device = device
        self._files: dict[tuple[str, str], StorageRecord] = {}
        self.timeline: list[Instant] = []
        self.lines = SourceLines()
        self._live: dict[int, StorageRecord] = {}
        self._watches: dict[int, weakref.ref[Any]] = {}
        self._events: list[Event] = []
        self._at_begin: dict[StorageRecord, int] = {}
        self._began = time.perf_counter()
        self._home = threading.get_ident()
        self._in_optimizer = False
        self._resize = torch.UntypedStorage.resize_
        self.history: History | None = None
        """Filled for a snapshot, where one is asked for."""
        self.log: Listener | None = None
        """Told of each interval, where a table of events is asked for."""
        self.in_transit: InTransit | None = None
        """Waited for, where a loop's own collectives may drop tensors late."""

    # -- listening ------------------------------------------------------------------------------------

    def __enter__(self) -> Ledger:
        ledger, resize = self, self._resize

        def resize_and_tell(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            ledger._meet(storage)
            return result

        torch.UntypedStorage.resize_ = resize_and_tell  # type: ignore[assignment,method-assign]
        self._hooks = [
            register_optimizer_step_pre_hook(lambda *_: self._enter_optimizer(True)),
            register_optimizer_step_post_hook(lambda *_: self._enter_optimizer(False)),
        ]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if holds_others(types):
            return NotImplemented  # it is dispatched again on its contents
        if func.namespace in NAMESPACES and labels.current_collective()[0] != "control":
            self.note_collective(args)
        if self.in_transit is not None:
            self._see_transit(func, args)
        if self.log is not None and func.namespace == "profiler":
            self.log.marked(func._schema.name.split("::")[1], args)
        self.lines.see_operator()
        out = func(*args, **(kwargs or {}))
        self._meet_all(out)
        if func in COPIES and self.phase != "forward" and not self._in_optimizer:
            self._follow_copy(args[0], out)
        return out

    def _enter_optimizer(self, within: bool) -> None:
        """Records that the optimizer's step runs: its copies are its own temporaries."""
        self._in_optimizer = within

    def _follow_copy(self, source: torch.Tensor, copy: torch.Tensor) -> None:
        """Gives a copy of a state its category, unless a label says otherwise: for example a strategy's clone of
        gradients.
        """
        origin, made = (self._live.get(one.untyped_storage()._cdata) for one in (source, copy))
        if origin is not None and made is not None and origin.category in STATES and not made.labeled:
            made.category, made.name = origin.category, f"copy of {origin.name}"

    def on_tensor(self, tensor: torch.Tensor, category: str, name: str, tier: str | None = None) -> None:
        """Applies a label: from birth if it is the storage's first, from now on otherwise; the tier is for life."""
        stored = self._meet(self._see(tensor), tensor.shape)
        stored.tier = tier or stored.tier
        if stored.labeled and stored.category != category:
            self._events.append(Event(self.phase, time.perf_counter(), stored, moved=(stored.category, category)))
        stored.category, stored.labeled = category, True
        stored.name = name or stored.name
        stored.first_name = stored.first_name or name

    def on_file(self, name: str, category: str, grown: int) -> None:
        """Records a file's bytes, which are in no storage."""
        stored = self._files.setdefault(
            (name, category), StorageRecord(0, category, name, "", self.phase, True, labels.NVME)
        )
        stored.bytes += grown
        self._events.append(Event(self.phase, time.perf_counter(), stored, grown=grown))

    def on_transfer(self, kind: str, size: int, name: str) -> None:
        """Ignores transfers, which the traffic meter records."""

    def on_unit(self, kind: str, unit: str, size: int) -> None:
        """Ignores units, which the log of events records."""

    def on_update(self, parts: Sequence[labels.Updated]) -> None:
        """Ignores updates."""

    def on_wait(self, operation: int) -> None:
        """Ignores waits, which the log of events records."""

    def now(self) -> tuple[int, str, str]:
        """Returns the number of events so far, the phase, and the module or thread that runs."""
        return len(self._events), self.phase, self._maker()

    def since(self, number: int) -> list[Event]:
        """Returns the interval's events from this number on."""
        return self._events[number:]

    def knows(self, tensor: torch.Tensor) -> bool:
        """Returns True where the tensor's storage has been met."""
        return tensor.untyped_storage()._cdata in self._live

    def is_labeled(self, tensor: torch.Tensor) -> bool:
        """Returns True where a label has said what the tensor's storage is."""
        stored = self._live.get(tensor.untyped_storage()._cdata)
        return stored is not None and stored.labeled

    def meet(self, tensor: torch.Tensor, name: str) -> None:
        """Counts a tensor that was made before the ledger listened, as temporary."""
        stored = self._meet(self._see(tensor), tensor.shape)
        stored.name, stored.category, stored.module, stored.source = name, "temporary", "", ""

    def tier_of(self, tensor: torch.Tensor) -> str:
        """Returns a tensor's tier, without counting the tensor."""
        storage = tensor.untyped_storage()
        stored = self._live.get(storage._cdata)
        return stored.tier if stored is not None else self._infer_tier(storage)

    def name_of(self, tensor: torch.Tensor) -> str:
        """Returns a tensor's label."""
        stored = self._live.get(tensor.untyped_storage()._cdata)
        return stored.name if stored is not None else ""

    def unit_name_of(self, tensor: torch.Tensor) -> str:
        """Returns a tensor's first label, which an engine gives it: its unit."""
        stored = self._live.get(tensor.untyped_storage()._cdata)
        return stored.first_name if stored is not None else ""

    def note_collective(self, given: Any) -> None:
        """Makes unlabeled arguments of a collective communication buffers from their birth."""
        if isinstance(given, torch.Tensor):
            if not self._meet(self._see(given), given.shape).labeled:
                self.on_tensor(given, labels.COMMUNICATION, "given to a collective")
        elif isinstance(given, tuple | list):
            for one in given:
                self.note_collective(one)

    def _meet_all(self, out: Any) -> None:
        if isinstance(out, torch.Tensor):
            for tensor in parts_of(out):
                self._meet(self._see(tensor), tensor.shape)
        elif isinstance(out, tuple | list):
            for one in out:
                self._meet_all(one)

    def _see(self, tensor: torch.Tensor) -> torch.UntypedStorage:
        return tensor.untyped_storage()

    def _meet(self, storage: torch.UntypedStorage, shape: Sequence[int] = ()) -> StorageRecord:
        key, size = storage._cdata, self._bytes_of(storage)
        stored = self._live.get(key)
        if stored is None:
            stored = self._born(storage, shape)
            self._live[key] = stored
            self._watches[key] = weakref.ref(storage, lambda _: self._bury(key))
        elif size > stored.bytes:  # resized, as FSDP2's parameters are
            self._settle()
        if size != stored.bytes:
            self._grow(stored, size - stored.bytes)
            if self.history is not None and device_of(storage) == "cuda":
                self.history.births.append(Birth(storage.data_ptr(), time.perf_counter(), stored))
        return stored

    def _see_transit(self, func: Any, args: Any) -> None:
        """Records what a collective is given, and copies that gloo has made: it alone can have made what is unknown."""
        assert self.in_transit is not None
        if func.namespace in NAMESPACES:
            self.in_transit.give(args)
        elif args and type(args[0]) is torch.Tensor and not self.knows(args[0]):
            self.in_transit.give(args[0], always=True)

    def _settle(self) -> None:
        if self.in_transit is not None and threading.get_ident() == self._home:
            self.in_transit.settle()

    def _born(self, storage: torch.UntypedStorage, shape: Sequence[int]) -> StorageRecord:
        self._settle()
        tier, source = self._infer_tier(storage), self.lines.here()
        return StorageRecord(0, self._infer(), "", self._maker(), self.phase, tier=tier, source=source, shape=shape)

    def _bytes_of(self, storage: torch.UntypedStorage) -> int:
        return 0 if storage.device.type == "meta" else storage.nbytes()

    def _bury(self, key: int) -> None:
        stored = self._live.pop(key, None)
        self._watches.pop(key, None)
        if stored is not None and stored.bytes:
            self._grow(stored, -stored.bytes)

    def _grow(self, stored: StorageRecord, grown: int) -> None:
        """Records that a storage has grown by so many bytes, or shrunk where `grown` is below 0."""
        if self.log is not None:
            self.log.changed()
        self._events.append(Event(self.phase, time.perf_counter(), stored, grown=grown))
        stored.bytes += grown

    def _maker(self) -> str:
        """Names the module that runs, or the thread."""
        here = threading.get_ident() == self._home
        return self.module if here else f"thread {threading.current_thread().name}"

    def _infer(self) -> str:
        if threading.get_ident() != self._home:
            return "temporary"  # of another thread: belongs to no forward
        recomputing = self.phase == "backward" and torch.is_grad_enabled()
        return labels.ACTIVATIONS if self.phase == "forward" or recomputing else "temporary"

    def _infer_tier(self, storage: torch.UntypedStorage) -> str:
        here = labels.DEVICE if device_of(storage) in (self._device, "meta") else labels.HOST
        return labels.current_tier() or here

    # -- adding up ------------------------------------------------------------------------------------

    def enter_phase(self, phase: str) -> None:
        """Assigns later events to `phase`."""
        self._settle()
        self.phase = phase
        self._events.append(Event(phase, time.perf_counter()))

    def live_bytes(self) -> dict[StorageRecord, int]:
        """Returns the storages that live on the device now, with their sizes."""
        living = list(self._live.values())  # at once: other threads free tensors too
        return {stored: stored.bytes for stored in living if stored.tier == labels.DEVICE and stored.bytes}

    def begin(self) -> None:
        """Begins an interval: drops the events so far."""
        self._events = []
        if self.log is not None:
            self.log.begin()
        self.lines.forget()
        self._began = time.perf_counter()
        self._at_begin = {stored: stored.bytes for stored in (*self._live.values(), *self._files.values())}

    def end(self, whole: str) -> None:
        """Ends the interval: adds it to the extremes of each phase and of `whole`."""
        self._settle()
        sizes, categories = dict(self._at_begin), self._first_categories()
        interval = self._interval(categories) if self.history is not None or self.log is not None else None
        if self.log is not None and interval is not None:
            self.log.end(interval)
        totals = {tier: Counter(dict.fromkeys(CATEGORIES, 0)) for tier in TIERS}
        for stored, size in sizes.items():
            totals[stored.tier][categories.get(stored, stored.category)] += size
        on_device, best_at, states_at = totals[labels.DEVICE], -1, -1
        best = self.extremes.setdefault(whole, Extremes())
        self._see_elsewhere(totals, whole, whole)
        instants: list[Instant] = []
        births = Births()
        for number, event in enumerate(self._events):
            self._apply(event, sizes, categories, totals)
            if event.phase == ASIDE:
                continue
            if event.grown and event.stored is not None and event.stored.tier == labels.DEVICE:
                births.see(event.stored, event.grown, event.phase, categories.get(event.stored, event.stored.category))
            self.extremes.setdefault(event.phase, Extremes()).see(on_device)
            if event.stored is None or event.stored.tier != labels.DEVICE:
                self._see_elsewhere(totals, event.phase, whole)
            before = best.states
            best_at = number if best.see(on_device) else best_at
            states_at = number if best.states > before else states_at
            others = {tier: totals[tier].total() for tier in TIERS[1:]}
            together = on_device.total() + others[labels.HOST]
            for name in (event.phase, whole):
                self.in_memory[name] = max(self.in_memory[name], together)
            instants.append(Instant(number, event.at - self._began, event.phase, on_device.copy(), others))
        best.see_births(births.end())
        self.kept = self._find_kept()
        if best_at >= 0:
            best.alive = self._alive_at(best_at)
        if states_at >= 0:
            best.alive_states = [one for one in self._alive_at(states_at) if one[2] in STATES]
        if self.history is not None and whole == "step" and max(i.totals.total() for i in instants) == best.peak:
            self.history.step = interval
        self.timeline = thin_out(instants, INSTANTS)

    def _interval(self, first: dict[StorageRecord, str]) -> Interval:
        """Returns the interval with the categories as they are now: a later label is no part of it."""
        of_all = dict.fromkeys([*self._at_begin, *(e.stored for e in self._events if e.stored is not None)])
        categories = {stored: first.get(stored, stored.category) for stored in of_all}
        return Interval(self._began, self._at_begin, categories, list(self._events))

    def _find_kept(self) -> dict[StorageRecord, int]:
        return {
            stored: size
            for stored, size in self._at_begin.items()
            if size and stored.bytes == size and stored.tier == labels.DEVICE and stored.category in FLEETING
        }

    def _see_elsewhere(self, totals: dict[str, Counter[str]], *names: str) -> None:
        for tier in TIERS[1:]:
            if totals[tier].total():
                for name in names:
                    self.elsewhere.setdefault((tier, name), Extremes()).see(totals[tier])

    def _first_categories(self) -> dict[StorageRecord, str]:
        """Returns the first category of storages that changed category in this interval."""
        first: dict[StorageRecord, str] = {}
        for event in self._events:
            if event.stored is not None and event.moved is not None:
                first.setdefault(event.stored, event.moved[0])
        return first

    @staticmethod
    def _apply(
        event: Event,
        sizes: dict[StorageRecord, int],
        categories: dict[StorageRecord, str],
        totals: dict[str, Counter[str]],
    ) -> None:
        stored = event.stored
        if stored is None:
            return
        tier = totals[stored.tier]
        if event.moved is not None:
            old, new = event.moved
            tier[old] -= sizes.get(stored, 0)
            tier[new] += sizes.get(stored, 0)
            categories[stored] = new
        else:
            tier[categories.get(stored, stored.category)] += event.grown
            sizes[stored] = sizes.get(stored, 0) + event.grown

    def _alive_at(self, last: int) -> list[tuple[int, StorageRecord, str]]:
        """Returns the storages alive after event number `last`, with their categories then, largest first."""
        sizes, categories = dict(self._at_begin), self._first_categories()
        for event in self._events[: last + 1]:
            self._apply(event, sizes, categories, {tier: Counter() for tier in TIERS})
        here = {stored: size for stored, size in sizes.items() if size and stored.tier == labels.DEVICE}
        alive = [(size, stored, categories.get(stored, stored.category)) for stored, size in here.items()]
        return sorted(alive, key=lambda one: -one[0])


def device_of(storage: torch.UntypedStorage) -> str:
    """Returns the type of the storage's device."""
    return storage.device.type
