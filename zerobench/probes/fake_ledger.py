"""The ledger over fake tensors, whose storages are all on the meta device, whatever device they represent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ..fake.observers import Growth, IntervalMark, copied_by_backend, shapes_asked, take_observers
from ..fake.operators import MISSED, HostValues, represented_device
from .intervals import StorageRecord
from .ledger import Ledger
from .traffic import COPIES


class ShapesOnly(Ledger):
    """Counts storages of fake tensors on the device that they represent. Placeholders, which represent the meta device
    itself, are not counted, and neither are tensors that only answer a question about shapes. Its observers are
    notified of each change.
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
        self._tell(IntervalMark("phase", phase))

    def begin(self) -> None:
        super().begin()
        self._tell(IntervalMark("begin"))

    def end(self, whole: str) -> None:
        super().end(whole)
        self._tell(IntervalMark("end", whole))

    def _grow(self, stored: StorageRecord, grown: int) -> None:
        super()._grow(stored, grown)
        self._tell(Growth(stored, grown))

    def _tell(self, heard: Growth | IntervalMark) -> None:
        for observer in self._observers:
            observer(heard)

    def _run(self, func: Any, args: Any, named: dict[str, Any]) -> Any:
        is_traffic = func.namespace != "aten" or func in COPIES  # the meter below sees it
        if not is_traffic and (out := self._at_once(func, args, named)) is not MISSED:
            return out
        out = func(*args, **named)
        self._meet_all(copied_by_backend(func, args))
        return out

    def _meet(self, storage: torch.UntypedStorage, shape: Sequence[int] = ()) -> StorageRecord:
        stored = self._live.get(storage._cdata)
        is_known = stored is not None and stored.bytes == self._bytes_of(storage)
        return stored if stored is not None and is_known else super()._meet(storage, shape)

    def _see(self, tensor: torch.Tensor) -> torch.UntypedStorage:
        storage = tensor.untyped_storage()
        uncounted = represented_device(tensor).type == "meta" or shapes_asked()
        (self._placeholders.add if uncounted else self._placeholders.discard)(storage._cdata)
        return storage

    def _bytes_of(self, storage: torch.UntypedStorage) -> int:
        return 0 if storage._cdata in self._placeholders else storage.nbytes()
