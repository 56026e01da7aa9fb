"""The ledger over fake tensors, whose storages are all on the meta device, whatever device they stand for."""

from __future__ import annotations

import torch

from .ledger import Ledger


class ShapesOnly(Ledger):
    """Counts storages of fake tensors on the device that they stand for. Placeholders, which stand for the meta device
    itself, count nothing.
    """

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self._placeholders: set[int] = set()

    def _see(self, tensor: torch.Tensor) -> torch.UntypedStorage:
        storage = tensor.untyped_storage()
        (self._placeholders.add if tensor.device.type == "meta" else self._placeholders.discard)(storage._cdata)
        return storage

    def _bytes_of(self, storage: torch.UntypedStorage) -> int:
        return 0 if storage._cdata in self._placeholders else storage.nbytes()
