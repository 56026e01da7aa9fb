"""The ledger over fake tensors, whose storages are all on the meta device, whatever device they represent."""

from __future__ import annotations

from typing import Any

import torch

from ..fake.observers import Growth, IntervalMark, copied_by_backend, shapes_asked, take_observers
from .intervals import StorageRecord
from .ledger import Ledger


class ShapesOnly(Ledger):
    """Counts storages of fake tensors on the device that they represent. Placeholders, which represent the meta device
    itself, are not counted, and neither are tensors that only answer a question about shapes. Its observers are
    notified of each change.
    """

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self._placeholders: set[int] = set()
        self._observers = take_observers()

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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self._meet_all(copied_by_backend(func, args))
        return out

    def _see(self, tensor: torch.Tensor) -> torch.UntypedStorage:
        storage = tensor.untyped_storage()
        uncounted = tensor.device.type == "meta" or shapes_asked()
        (self._placeholders.add if uncounted else self._placeholders.discard)(storage._cdata)
        return storage

    def _bytes_of(self, storage: torch.UntypedStorage) -> int:
        return 0 if storage._cdata in self._placeholders else storage.nbytes()
