"""The ledger: every storage, its bytes, its life and its category, for any strategy.

A dispatch mode sees each operator's outputs; a weak reference tells when a storage dies; a patch on
`UntypedStorage.resize_`, which dispatches nothing, tells when one changes size. Labels (zero/labels.py)
give categories. What nobody labels is inferred: made in forward, or while backward recomputes: activations;
made elsewhere: temporary.

What a collective is given and nobody has labelled, flags apart, is a communication buffer from its birth: so are the
buckets and gather buffers of strategies that say nothing about themselves. Tensors that hold others are looked into.

A gradient is known for one only once autograd hands it over. So the first label of a storage holds from
its birth: each step is written down as events and added up when it is over.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..records import CATEGORIES, STATES
from ..zero import labels
from .traffic import NAMESPACES
from .wrapped import holds_others, parts_of


@dataclass(eq=False)
class Stored:
    """One storage: what it is, how large, and whether on a GPU. `labelled`: somebody said so, it is not inferred."""

    bytes: int
    category: str
    name: str
    module: str
    phase: str
    labelled: bool = False
    on_gpu: bool = False


@dataclass(frozen=True)
class Event:
    """`stored` grew by `grown` bytes (freed: by minus its size), or moved to another category, or a phase began."""

    phase: str
    at: float
    stored: Stored | None = None
    grown: int = 0
    moved: tuple[str, str] | None = None


@dataclass(frozen=True)
class Instant:
    """Live bytes by category after event `number`, `seconds` after the stretch began."""

    number: int
    seconds: float
    phase: str
    totals: Counter[str]


INSTANTS = 400
"""What a stretch's timeline is thinned out to."""


@dataclass
class Extremes:
    """Largest values over a stretch of time, in bytes."""

    peak: int = -1
    at_peak: Counter[str] = field(default_factory=Counter)
    highest: Counter[str] = field(default_factory=Counter)
    states: int = -1
    at_states: Counter[str] = field(default_factory=Counter)
    largest: list[tuple[int, Stored, str]] = field(default_factory=list)
    gpu_peak: int = 0
    """Of what is on a GPU alone; on CUDA a little (flags, counters of steps) is in host memory all the same."""

    def see(self, totals: Counter[str], on_gpu: int) -> bool:
        """Takes in the totals of one instant, and how much of them is on a GPU; True if they are a new peak."""
        self.gpu_peak = max(self.gpu_peak, on_gpu)
        for category, value in totals.items():
            if value > self.highest[category]:
                self.highest[category] = value
        states = sum(totals[category] for category in STATES)
        if states > self.states:
            self.states, self.at_states = states, Counter(totals)
        total = sum(totals.values())
        if total <= self.peak:
            return False
        self.peak, self.at_peak = total, Counter(totals)
        return True


class Ledger(TorchDispatchMode):
    """Listens to operators, storages and labels. `begin` and `end` bound a stretch; `extremes` adds them up."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = "init"
        self.module = ""
        self.extremes: dict[str, Extremes] = {}
        self.timeline: list[Instant] = []
        self._live: dict[int, Stored] = {}
        self._watches: dict[int, weakref.ref[Any]] = {}
        self._events: list[Event] = []
        self._at_begin: dict[Stored, int] = {}
        self._began = time.perf_counter()
        self._resize = torch.UntypedStorage.resize_

    # -- listening ------------------------------------------------------------------------------------

    def __enter__(self) -> Ledger:
        ledger, resize = self, self._resize

        def resize_and_tell(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            ledger._meet(storage)
            return result

        torch.UntypedStorage.resize_ = resize_and_tell  # type: ignore[assignment,method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if holds_others(types):
            return NotImplemented  # it will come back with what it holds
        if func.namespace in NAMESPACES and labels.current_collective()[0] != "control":
            self._note_collective(args)
        out = func(*args, **(kwargs or {}))
        self._meet_all(out)
        return out

    def on_tensor(self, tensor: torch.Tensor, category: str, name: str) -> None:
        """A label: from birth if it is the storage's first, from now on otherwise."""
        stored = self._meet(tensor.untyped_storage())
        if stored.labelled and stored.category != category:
            self._events.append(Event(self.phase, time.perf_counter(), stored, moved=(stored.category, category)))
        stored.category, stored.labelled = category, True
        stored.name = name or stored.name

    def _note_collective(self, given: Any) -> None:
        if isinstance(given, torch.Tensor):
            if not self._meet(given.untyped_storage()).labelled:
                self.on_tensor(given, labels.COMMUNICATION, "given to a collective")
        elif isinstance(given, tuple | list):
            for one in given:
                self._note_collective(one)

    def _meet_all(self, out: Any) -> None:
        if isinstance(out, torch.Tensor):
            for tensor in parts_of(out):
                self._meet(tensor.untyped_storage())
        elif isinstance(out, tuple | list):
            for one in out:
                self._meet_all(one)

    def _meet(self, storage: torch.UntypedStorage) -> Stored:
        key, size = storage._cdata, 0 if storage.device.type == "meta" else storage.nbytes()
        stored = self._live.get(key)
        if stored is None:
            stored = Stored(0, self._infer(), "", self.module, self.phase, on_gpu=is_on_gpu(storage))
            self._live[key] = stored
            self._watches[key] = weakref.ref(storage, lambda _: self._bury(key))
        if size != stored.bytes:
            self._events.append(Event(self.phase, time.perf_counter(), stored, grown=size - stored.bytes))
            stored.bytes = size
        return stored

    def _bury(self, key: int) -> None:
        stored = self._live.pop(key, None)
        self._watches.pop(key, None)
        if stored is not None and stored.bytes:
            self._events.append(Event(self.phase, time.perf_counter(), stored, grown=-stored.bytes))
            stored.bytes = 0

    def _infer(self) -> str:
        recomputing = self.phase == "backward" and torch.is_grad_enabled()
        return "activations" if self.phase == "forward" or recomputing else "temporary"

    # -- adding up ------------------------------------------------------------------------------------

    def enter_phase(self, phase: str) -> None:
        """What happens from now on belongs to `phase`."""
        self.phase = phase
        self._events.append(Event(phase, time.perf_counter()))

    def begin(self) -> None:
        """A stretch begins: forgets the events so far."""
        self._events = []
        self._began = time.perf_counter()
        self._at_begin = {stored: stored.bytes for stored in self._live.values()}

    def end(self, whole: str) -> None:
        """The stretch is over: adds it to the extremes of each phase and of `whole`."""
        sizes, categories = dict(self._at_begin), self._first_categories()
        totals: Counter[str] = Counter(dict.fromkeys(CATEGORIES, 0))
        for stored, size in sizes.items():
            totals[categories.get(stored, stored.category)] += size
        on_gpu = sum(size for stored, size in sizes.items() if stored.on_gpu)
        best, best_at = self.extremes.setdefault(whole, Extremes()), -1
        instants: list[Instant] = []
        for number, event in enumerate(self._events):
            self._apply(event, sizes, categories, totals)
            on_gpu += event.grown if event.stored is not None and event.stored.on_gpu else 0
            self.extremes.setdefault(event.phase, Extremes()).see(totals, on_gpu)
            if best.see(totals, on_gpu):
                best_at = number
            instants.append(Instant(number, event.at - self._began, event.phase, totals.copy()))
        if best_at >= 0:
            best.largest = self._alive_at(best_at)
        self.timeline = thin_out(instants, INSTANTS)

    def _first_categories(self) -> dict[Stored, str]:
        """For storages that changed category in this stretch: what they were before."""
        first: dict[Stored, str] = {}
        for event in self._events:
            if event.stored is not None and event.moved is not None:
                first.setdefault(event.stored, event.moved[0])
        return first

    @staticmethod
    def _apply(event: Event, sizes: dict[Stored, int], categories: dict[Stored, str], totals: Counter[str]) -> None:
        stored = event.stored
        if stored is None:
            return
        if event.moved is not None:
            old, new = event.moved
            totals[old] -= sizes.get(stored, 0)
            totals[new] += sizes.get(stored, 0)
            categories[stored] = new
        else:
            totals[categories.get(stored, stored.category)] += event.grown
            sizes[stored] = sizes.get(stored, 0) + event.grown

    def _alive_at(self, last: int) -> list[tuple[int, Stored, str]]:
        """The storages alive after event number `last`, with their categories then, largest first."""
        sizes, categories = dict(self._at_begin), self._first_categories()
        for event in self._events[: last + 1]:
            self._apply(event, sizes, categories, Counter())
        alive = [(size, stored, categories.get(stored, stored.category)) for stored, size in sizes.items() if size]
        return sorted(alive, key=lambda one: -one[0])[:20]


def is_on_gpu(storage: torch.UntypedStorage) -> bool:
    """Whether CUDA's allocator counts it."""
    return storage.device.type == "cuda"


def thin_out(instants: list[Instant], most: int) -> list[Instant]:
    """About `most` of them: of each stretch the one with the largest sum, and the first of each phase."""
    width = max(1, -(-len(instants) // most))
    kept = []
    for start in range(0, len(instants), width):
        stretch = instants[start : start + width]
        highest = max(stretch, key=lambda i: sum(i.totals.values()))
        before = instants[start - 1].phase if start else ""
        kept += [i for i, last in zip(stretch, [before, *(i.phase for i in stretch)], strict=False)
                 if i is highest or i.phase != last]  # fmt: skip
    return kept
