"""A chunk of a unit's shard whose master and states lie in the file (offload/nvme.py), and its visit by the optimizer.

fill      the optimizer's tensors are views of the pool, into which the chunk has been read
update    torch's optimizer, over them alone; states that it makes move into the file
empty     they are NaN without memory again, so that misuse is loud, and the chunk is written back
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import torch
from torch import optim

from .. import labels
from .paged_tensor import PagedTensor
from .placement import Placement, SegmentView, ShardRange

if TYPE_CHECKING:
    from ..units.unit import Unit

MASTER = "master"
"""The master's name beside those of the optimizer's states."""


class FileTier(Placement, ABC):
    """The placement (offload/nvme.py) as its chunks see it."""

    optimizer: optim.Optimizer
    is_in_memory: bool

    @abstractmethod
    def absent(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A NaN of that size, without memory."""

    @abstractmethod
    def bring(self, one: FileRange) -> None:
        """The range's chunk is in the pool; the reading of those that are updated next has begun."""

    @abstractmethod
    def is_used(self, one: FileRange) -> bool:
        """A gradient has come to something in it; else none need be in the file."""

    @abstractmethod
    def give_back(self, one: FileRange, master: torch.Tensor) -> None:
        """The parameters of the range become the rounded master."""

    @abstractmethod
    def state_of(self, one: FileRange, key: str, dtype: torch.dtype) -> torch.Tensor:
        """Where a state of the range's chunk lies in the pool; made, of zeros, where the file does not have it yet."""

    @abstractmethod
    def reading_gradients(self, one: FileRange, write_back: bool = False) -> AbstractContextManager[None]:
        """Inside, the range's gradients are in the pool; with `write_back` what is made of them there is kept."""

    @abstractmethod
    def forget_gradients(self, one: FileRange) -> None:
        """The optimizer has had the range's gradients."""


class FileRange(ShardRange):
    """Elements [start, stop) of a unit's shard, chunk number `chunk` of that, whose master and states are in the file.

    `number`   among all chunks of this rank, in the order of their updates
    `kept`     the master and each state, by name
    """

    tier = labels.HOST
    rounds_late = False

    def __init__(
        self, tier: FileTier, unit: Unit, start: int, stop: int, chunk: int, number: int, master: PagedTensor
    ) -> None:
        super().__init__(tier, unit, start, stop)
        self.chunk, self.number = chunk, number
        self._tier = tier
        self.kept: dict[str, PagedTensor] = {MASTER: master}
        self.master = tier.absent(stop - start, unit.dtypes.master)

    @property
    def group(self) -> object:
        return self

    @property
    def is_present(self) -> bool:
        return self._tier.is_in_memory

    def make_master(self) -> None:
        master = self.kept[MASTER].open(self.chunk)
        self._tier.read(self.unit, self.start, master)
        self.kept[MASTER].write_back(self.chunk)

    def round_master(self) -> None:
        if self._tier.is_in_memory:
            self._tier.give_back(self, self.master)
            return
        self.kept[MASTER].load(self.chunk)
        self._tier.give_back(self, self.kept[MASTER].present(self.chunk))
        self.kept[MASTER].drop(self.chunk)

    def follow_parameters(self, loaded: Sequence[tuple[int, int]] = (), asks: bool = False) -> None:
        if self._tier.is_in_memory:
            self._follow(self.master, loaded, asks)
            return
        self.kept[MASTER].load(self.chunk)
        self._follow(self.kept[MASTER].present(self.chunk), loaded, asks)
        self.kept[MASTER].write_back(self.chunk)

    @contextmanager
    def visit(self, tile: Sequence[SegmentView]) -> Iterator[None]:
        tier = self._tier
        if not tier.is_used(self):  # nothing is updated: nothing need be read
            yield
            return
        tier.bring(self)
        self._fill(tile)
        with labels.on_tier(labels.HOST):
            yield
        master = self.kept[MASTER].present(self.chunk)
        tier.give_back(self, master)
        self._empty(tile)
        for kept in self.kept.values():
            kept.write_back(self.chunk)
        tier.forget_gradients(self)

    @contextmanager
    def reading(self) -> Iterator[None]:
        with self._tier.reading_gradients(self):
            yield

    @contextmanager
    def editing(self) -> Iterator[None]:
        with self._tier.reading_gradients(self, write_back=True):
            yield

    def take_out(self, segments: Sequence[SegmentView]) -> None:
        """Masters and states lie in memory of their own, until `put_in`."""
        copies = {key: kept.copy(self.chunk) for key, kept in self.kept.items()}
        self.master = copies[MASTER]
        for share in segments:
            at, numel = share.segment.offset - self.start, share.segment.numel
            shape = share.tensor.shape
            share.tensor.data = self.master.narrow(0, at, numel).view(shape)
            state = self._tier.optimizer.state.get(share.tensor, {})
            state |= {key: copies[key].narrow(0, at, numel).view(shape) for key in state.keys() & copies.keys()}

    def put_in(self, segments: Sequence[SegmentView], write_back: bool) -> None:
        """They lie in the file again; with `write_back` as they are now."""
        if write_back:
            self.kept[MASTER].write(self.chunk, self.master)
        self._empty(segments, keep=write_back)
        for key in self.kept.keys() - {MASTER}:
            if self.kept[key].is_present(self.chunk):
                self.kept[key].write_back(self.chunk)
        self.master = self._tier.absent(self.stop - self.start, self.unit.dtypes.master)

    def _fill(self, tile: Sequence[SegmentView]) -> None:
        """The optimizer's tensors are those in the pool."""
        for share in tile:
            at, numel = share.segment.offset - self.start, share.segment.numel
            shape = share.tensor.shape
            share.tensor.data = self.kept[MASTER].present(self.chunk).narrow(0, at, numel).view(shape)
            state = self._tier.optimizer.state.get(share.tensor, {})
            for key in state.keys() & self.kept.keys():
                state[key] = self.kept[key].present(self.chunk).narrow(0, at, numel).view(shape)

    def _empty(self, tile: Sequence[SegmentView], keep: bool = True) -> None:
        """They are in the pool alone; with `keep` states that the optimizer has made elsewhere move there."""
        for share in tile:
            at, numel = share.segment.offset - self.start, share.segment.numel
            state, shape = self._tier.optimizer.state.get(share.tensor, {}), share.tensor.shape
            for key, value in state.items():
                if not isinstance(value, torch.Tensor) or value.shape != shape:
                    continue
                if keep:
                    place = self._tier.state_of(self, key, value.dtype).narrow(0, at, numel).view(shape)
                    if place.data_ptr() != value.data_ptr():
                        place.copy_(value)
                state[key] = self._tier.absent(numel, value.dtype).view(shape)
            share.tensor.data = self._tier.absent(numel, share.tensor.dtype).view(shape)


class Together:
    """The tensors of one chunk that are read at once."""

    def __init__(self, kept: list[PagedTensor]) -> None:
        self._kept = kept

    def __len__(self) -> int:
        return len(self._kept)

    def load_all(self, chunk: int) -> None:
        """All of it is in the pool."""
        for one in self._kept:
            one.launch(chunk)
        for one in self._kept:
            one.load(chunk)

    def load_ahead(self, chunk: int, spare: int) -> bool:
        """Its reading begins, as far as the pool has room but for `spare` buffers. Returns whether that was enough."""
        return all(one.launch_if_free(chunk, spare) for one in self._kept)
