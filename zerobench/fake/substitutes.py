"""Parts of a run that a fake world replaces: files, threads, masks of packed sequences.

files     the file tier (zero/offload/disk.py): regions and transfers have sizes, but no byte moves. A channel counts
          reserved bytes and reports each transfer with the size that the disk would transfer; carriers run every
          request immediately in the calling thread, so a read is complete once launched. A pool is a fake tensor with
          a made-up address, so it gets no page advice
threads   the engine's own thread does its work when it is started, since FakeTensorMode is for one thread. As in a real
          thread, probes do not follow the work, but labels and transfers are reported
masks     transformers' models search positions for packed sequences, and make a mask of S × S elements if there are
          any. For tensors without values they always assume some; here each row is one sequence, so no mask is made,
          as in a run
products  grouped ones of a dtype other than bf16: torch's CPU kernel takes them, its shape function does not
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import _meta_registrations as registrations
from torch.utils._python_dispatch import _disable_current_modes

from ..zero import labels
from ..zero.offload import disk, nvme
from ..zero.offload.disk import Act, aligned
from ..zero.optim import delayed_update


class NoFile:
    """Replaces a Channel; every reservation succeeds."""

    def __init__(self, path: Path, direct: bool, piece_bytes: int, depth: int) -> None:
        self.path, self.direct, self.bytes = path, direct, 0

    def grow(self, nbytes: int) -> int:
        """Reserves `nbytes` more and returns their offset."""
        self.bytes += nbytes
        return self.bytes - nbytes

    def read(self, piece: range, offset: int, name: str) -> None:
        """Reports a read."""
        labels.transfer(labels.READ, self._carried(piece), name)

    def write(self, piece: range, offset: int, name: str) -> None:
        """Reports a write."""
        labels.transfer(labels.WRITE, self._carried(piece), name)

    def close(self) -> None:
        """Leaves nothing."""

    def _carried(self, piece: range) -> int:
        return aligned(len(piece)) if self.direct else len(piece)


class CarriersAtOnce:
    """Replaces Carriers."""

    def __init__(self, count: int, name: str) -> None:
        pass

    def submit(self, block: Hashable, act: Act) -> None:
        """Calls `act`."""
        act()

    def end(self) -> None:
        """Does nothing: no request is in flight."""


class NoFolder:
    """Replaces a Scratch: messages name `path`, but it is not created."""

    def __init__(self, parent: Path | str) -> None:
        self.path = Path(parent)


@contextmanager
def no_files() -> Iterator[None]:
    """Counts the bytes of files without creating any. A range has a length and can be sliced, as a tensor's memory."""
    with (
        mock.patch.object(disk, "Channel", NoFile),
        mock.patch.object(disk, "Carriers", CarriersAtOnce),
        mock.patch.object(disk, "memory_of", lambda tensor: range(tensor.numel() * tensor.element_size())),
        mock.patch.object(nvme, "Scratch", NoFolder),
    ):
        yield


# -- threads ---------------------------------------------------------------------------------------


class DoneAtStart:
    """Replaces a thread. `modes`: the modes that its work runs under, the outermost first."""

    def __init__(
        self, modes: list[AbstractContextManager[Any]], target: Callable[..., None], args: tuple[Any, ...], name: str
    ) -> None:
        self._modes, self._work = modes, partial(target, *args)

    def start(self) -> None:
        """Does the work."""
        with ExitStack() as stack:
            stack.enter_context(_disable_current_modes())
            for mode in self._modes:
                stack.enter_context(mode)
            self._work()

    def join(self) -> None:
        """Returns immediately: the work is done."""


@contextmanager
def threads_done_at_start(*modes: AbstractContextManager[Any]) -> Iterator[None]:
    """Runs delayed updates when they are launched."""
    with mock.patch.object(delayed_update, "Thread", partial(DoneAtStart, list(modes))):
        yield


# -- masks -----------------------------------------------------------------------------------------


MODULE, FUNCTION = "transformers.masking_utils", "find_packed_sequence_indices"
"""The function returns None if no sequences are packed."""


@contextmanager
def as_with_values() -> Iterator[None]:
    """Makes transformers' models see rows of one sequence each."""
    module = sys.modules.get(MODULE)
    if not hasattr(module, FUNCTION):  # no such model, or transformers of another release
        yield
        return
    find = getattr(module, FUNCTION)

    def none_packed(positions: Any) -> None:
        if not positions.is_meta:
            (find(positions)[:, -1] == 0).all()  # what it computes takes memory, for a moment

    with mock.patch.object(module, FUNCTION, none_packed):
        yield


# -- grouped products ------------------------------------------------------------------------------


@contextmanager
def grouped_products_of_any_dtype() -> Iterator[None]:
    """Makes torch's grouped product take fake and meta tensors of every dtype that it takes in a run."""
    checked = registrations._meta_grouped_mm_common

    def product(mat_a: torch.Tensor, mat_b: torch.Tensor, **more: Any) -> Any:
        if mat_a.dtype in (torch.float32, torch.float16):
            return registrations._create_grouped_mm_output_tensor(mat_a, mat_b, more["offs"], more["out_dtype"])
        return checked(mat_a, mat_b, **more)

    with mock.patch.object(registrations, "_meta_grouped_mm_common", product):
        yield
