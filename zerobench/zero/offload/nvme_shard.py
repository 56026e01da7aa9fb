"""A cut of a unit's shard whose master and states lie in the file (offload/nvme.py), and its visit by the optimizer.

fill      the optimizer's tensors are views of the pool, into which the cut has been read
update    torch's optimizer, over them alone; states that it makes move into the file
empty     they are NaN without memory again, so that misuse is loud, and the cut is written back
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from .. import labels
from .paged_tensor import Kept
from .placement import Run

if TYPE_CHECKING:
    from ..optim.segments import OptimizerSegment
    from ..units.unit import Unit
    from .nvme import FilePlaces

MASTER = "master"
"""The master's name beside those of the optimizer's states."""


class FileRun(Run):
    """Elements [start, stop) of a unit's shard, cut number `cut` of that, whose master and states are in the file."""

    tier = labels.HOST
    rounds_late = False
    number: int
    """Among all cuts of this rank, in the order of their updates."""

    def __init__(self, unit: Unit, start: int, stop: int, cut: int, places: FilePlaces, master: Kept) -> None:
        super().__init__(unit, start, stop)
        self.cut = cut
        self._places = places
        self.kept: dict[str, Kept] = {MASTER: master}
        self.master = places.absent(stop - start, unit.dtypes.master)

    @property
    def group(self) -> object:
        return self

    def make_master(self) -> None:
        master = self.kept[MASTER].open(self.cut)
        self._places.read(self.unit, self.start, master)
        self.kept[MASTER].write_back(self.cut)

    def round_master(self) -> None:
        if self._places.is_in_memory:
            self._places.give_back(self, self.master)
            return
        self.kept[MASTER].load(self.cut)
        self._places.give_back(self, self.kept[MASTER].present(self.cut))
        self.kept[MASTER].drop(self.cut)

    def follow_parameters(self, loaded: Sequence[tuple[int, int]] = ()) -> None:
        if self._places.is_in_memory:
            self._follow(self.master, loaded)
            return
        self.kept[MASTER].load(self.cut)
        self._follow(self.kept[MASTER].present(self.cut), loaded)
        self.kept[MASTER].write_back(self.cut)

    @contextmanager
    def visit(self, tile: Sequence[OptimizerSegment]) -> Iterator[None]:
        places = self._places
        if not places.is_used(self):  # nothing is updated: nothing need be read
            yield
            return
        places.bring(self)
        self._fill(tile)
        with labels.on_tier(labels.HOST):
            yield
        master = self.kept[MASTER].present(self.cut)
        places.give_back(self, master)
        self._empty(tile)
        for kept in self.kept.values():
            kept.write_back(self.cut)
        places.forget_gradients(self)

    @contextmanager
    def reading(self) -> Iterator[None]:
        with self._places.reading_gradients(self):
            yield

    @contextmanager
    def editing(self) -> Iterator[None]:
        with self._places.reading_gradients(self, write_back=True):
            yield

    def take_out(self, segments: Sequence[OptimizerSegment]) -> None:
        """Masters and states lie in memory of their own, until `put_in`."""
        copies = {key: kept.copy(self.cut) for key, kept in self.kept.items()}
        self.master = copies[MASTER]
        for share in segments:
            at, numel = share.segment.offset - self.start, share.segment.numel
            share.tensor.data = self.master.narrow(0, at, numel)
            state = self._places.optimizer.state.get(share.tensor, {})
            state |= {key: copies[key].narrow(0, at, numel) for key in state.keys() & copies.keys()}

    def put_in(self, segments: Sequence[OptimizerSegment], write_back: bool) -> None:
        """They lie in the file again; with `write_back` as they are now."""
        if write_back:
            self.kept[MASTER].write(self.cut, self.master)
        self._empty(segments, keep=write_back)
        for key in self.kept.keys() - {MASTER}:
            if self.kept[key].is_present(self.cut):
                self.kept[key].write_back(self.cut)
        self.master = self._places.absent(self.stop - self.start, self.unit.dtypes.master)

    def _fill(self, tile: Sequence[OptimizerSegment]) -> None:
        """The optimizer's tensors are those in the pool."""
        for share in tile:
            at, numel = share.segment.offset - self.start, share.segment.numel
            share.tensor.data = self.kept[MASTER].present(self.cut).narrow(0, at, numel)
            state = self._places.optimizer.state.get(share.tensor, {})
            for key in state.keys() & self.kept.keys():
                state[key] = self.kept[key].present(self.cut).narrow(0, at, numel)

    def _empty(self, tile: Sequence[OptimizerSegment], keep: bool = True) -> None:
        """They are in the pool alone; with `keep` states that the optimizer has made elsewhere move there."""
        for share in tile:
            at, numel = share.segment.offset - self.start, share.segment.numel
            state = self._places.optimizer.state.get(share.tensor, {})
            for key, value in state.items():
                if not isinstance(value, torch.Tensor) or value.shape != share.tensor.shape:
                    continue
                if keep:
                    place = self._places.state_of(self, key, value.dtype).narrow(0, at, numel)
                    if place.data_ptr() != value.data_ptr():
                        place.copy_(value)
                state[key] = self._places.absent(numel, value.dtype)
            share.tensor.data = self._places.absent(numel, share.tensor.dtype)


class Together:
    """What is read of one cut at once."""

    def __init__(self, kept: list[Kept]) -> None:
        self._kept = kept

    def __len__(self) -> int:
        return len(self._kept)

    def load_all(self, cut: int) -> None:
        """All of it is in the pool."""
        for one in self._kept:
            one.launch(cut)
        for one in self._kept:
            one.load(cut)

    def load_ahead(self, cut: int, spare: int) -> bool:
        """Its reading begins, as far as the pool has room but for `spare` buffers. Returns whether that was enough."""
        return all(one.launch_if_free(cut, spare) for one in self._kept)
