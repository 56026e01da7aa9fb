"""Files as a tier (ZeRO-Infinity, arXiv 2104.07857): what leaves the device lies in a file of this rank's own.

    cut        what of a unit's shard is read, updated and written together: `block_bytes` of fp32 at most
    kept       a tensor of the shard's elements in the file, cut by cut: parameters, gradients, master, a state
    visit      a cut's master, states and gradients are in buffers of the pool while the optimizer updates them

A step's update is a pipeline over cuts: cut k + 1 is read, cut k is updated, cut k - 1 is written. Parameters of stage
3 are read for the gather after the next, in the order of the last step; gradients are written as they are reduced.
Every rank reads and writes its own 1/N (bandwidth-centric partitioning, section 5.1).

In host memory there are the pool, `buffers` of `block_bytes`; a cut's gradients in fp32, where they are kept in half;
and 1 Mi parameters twice on their way up. Nothing else grows with the model but the optimizer's counts: 4 bytes for
each parameter's part of a cut.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import optim

from .. import labels
from ..protocols import GradientSink
from .cpu import Bus, NoUpload, Offload, Upload, wait_for
from .nvme_shard import FileRun, Together
from .paged_tensor import AHEAD, GIVING_BACK, LEAST_BUFFERS, Kept, Shelf
from .placement import Places, Run

if TYPE_CHECKING:
    from ..optim.segments import OptimizerSegment
    from ..units.unit import Unit


@dataclass(frozen=True)
class NvmeOffload(Offload):
    """What leaves for files below the folder `path`. `block_bytes`: of one buffer, of which there are `buffers` (Adam's
    pipeline wants 12: one cut is updated, one is read, one written; with 8 it is one after the other);
    `depth` requests are at the disk at once; `direct`: past the page cache where the file system can; `checksums`: each
    block is checked as it is read.
    """

    path: str = ""
    block_bytes: int = 4 * 2**20
    buffers: int = 16
    depth: int = 8
    direct: bool = True
    checksums: bool = True

    def check(self, strategy: str, leaves: Collection[str]) -> None:
        super().check(strategy, leaves)
        if not self.path:
            raise ValueError("offload.path: name the folder for files")
        if self.gradients and not self.optimizer:
            raise ValueError("offload.gradients: in files they need an optimizer there; let the optimizer leave, too")
        if self.delayed_after is not None:
            raise ValueError("offload.delayed_after: an update over files is not delayed; use offload=cpu")
        if self.buffers < LEAST_BUFFERS:
            raise ValueError(f"offload.buffers: {self.buffers} are too few; use at least {LEAST_BUFFERS}")
        if self.block_bytes < 4096 or self.block_bytes % 4096:
            raise ValueError(f"offload.block_bytes: {self.block_bytes} cannot be; use a multiple of 4096")

    def places(self, device: torch.device) -> Places:
        return FilePlaces(self, device)


class FileGradients(GradientSink):
    """(leaving,) gradients in the file; read into the pool for an update, or for a norm."""

    tier = labels.HOST

    def __init__(self, kept: Kept) -> None:
        self.kept = kept
        self.numel = kept.numel

    def take(self, mean: torch.Tensor, adds: bool) -> None:
        self.kept.write_all(mean, adds)

    def release(self, give_back: Callable[[], None]) -> None:
        give_back()  # it was copied into the pool

    def view(self, offset: int, numel: int) -> torch.Tensor:
        return self.kept.view(offset, numel)

    def settle(self) -> None:
        """A read waits for the writes before it."""


class FilePlaces(Places):
    """See NvmeOffload."""

    tiles_always = True
    optimizer: optim.Optimizer

    def __init__(self, policy: NvmeOffload, device: torch.device) -> None:
        self._policy, self._device = policy, device
        self.shelf = Shelf(policy, pinned=device.type == "cuda")
        self.keeps_parameters = not policy.parameters
        self._bus = Bus(device)
        self._upload = NoUpload(self._bus) if policy.parameters else Upload(device, self._bus)
        self._parameters: dict[Unit, Kept] = {}
        self._states: dict[tuple[Unit, str], Kept] = {}
        self._absent: dict[torch.dtype, torch.Tensor] = {}
        self._runs: list[FileRun] = []
        self._segments: dict[FileRun, list[OptimizerSegment]] = {}
        self.is_in_memory = False

    # -- what a unit asks ------------------------------------------------------------------------------------

    def leaving(self, shard_numel: int, align: int) -> int:
        return self._policy.part_of(shard_numel, align)

    def runs(self, unit: Unit) -> list[Run]:
        stop, most = unit.leaving, unit.layout.shard_numel
        if not self._policy.optimizer:
            return [Run(unit, 0, most)]
        master = self.shelf.keep(stop, unit.dtypes.master, labels.MASTER, unit.name)
        mine = [FileRun(unit, a, b, k, self, master) for k, (a, b) in enumerate(master.cuts)]
        for run in mine:
            run.number = len(self._runs)
            self._runs.append(run)
        return [*mine, *([Run(unit, stop, most)] * (stop < most))]

    def sink(self, unit: Unit) -> FileGradients | None:
        if not self._policy.gradients:
            return None
        return FileGradients(self.shelf.keep(unit.leaving, unit.dtypes.gradients, labels.GRADIENTS, unit.name))

    def keep_parameters(self, unit: Unit, shard: torch.Tensor) -> torch.Tensor:
        if self.keeps_parameters:
            return super().keep_parameters(unit, shard)
        self._parameters[unit] = kept = self.shelf.keep(shard.numel(), shard.dtype, labels.PARAMETERS, unit.name)
        kept.write_all(shard)
        return self.absent(shard.numel(), shard.dtype)

    def fetch(self, unit: Unit, place: torch.Tensor) -> None:
        if unit in self._parameters and not self.is_in_memory:
            self.shelf.fetch(self._parameters[unit], place)
        else:
            super().fetch(unit, place)

    def read(self, unit: Unit, start: int, place: torch.Tensor) -> None:
        if unit in self._parameters and not self.is_in_memory:
            self._parameters[unit].read(start, place)
        else:
            super().read(unit, start, place)

    def put(self, unit: Unit, start: int, values: torch.Tensor) -> None:
        if unit in self._parameters and not self.is_in_memory:
            self._parameters[unit].put(start, values)
        else:
            super().put(unit, start, values)

    def attach(self, optimizer: optim.Optimizer, segments: Sequence[OptimizerSegment]) -> None:
        self.optimizer = optimizer
        self._segments = {run: [] for run in self._runs}
        for segment in segments:
            if isinstance(segment.run, FileRun):
                self._segments[segment.run].append(segment)

    @contextmanager
    def in_memory(self, write_back: bool) -> Iterator[None]:
        for unit, kept in self._parameters.items():
            unit.parameter_shard = torch.cat([kept.copy(cut) for cut in range(len(kept.cuts))])
        for run, segments in self._segments.items():
            run.take_out(segments)
        self.is_in_memory = True
        try:
            yield
        finally:
            self.is_in_memory = False
            for run, segments in self._segments.items():
                run.put_in(segments, write_back)
            for unit, kept in self._parameters.items():
                if write_back:
                    kept.write_all(unit.parameter_shard)
                unit.parameter_shard = self.absent(kept.numel, kept.dtype)
            self.shelf.end_step()

    def settle(self) -> None:
        """The update is over: all is written, or what went wrong is raised here."""
        self._bus.join()
        self.shelf.end_step()

    # -- what a cut asks -------------------------------------------------------------------------------------

    def absent(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A NaN of that size, without memory: whoever reads what lies in the file shows that he did."""
        if dtype not in self._absent:
            nan = torch.full((), float("nan"), dtype=dtype)
            self._absent[dtype] = labels.label(nan, labels.OPTIMIZER, "in the file", tier=labels.HOST)
        return self._absent[dtype].expand(numel)

    def bring(self, run: FileRun) -> None:
        """The run's cut is in the pool; the reading of those that are updated next has begun."""
        here = self._kept_of(run)
        here.load_all(run.cut)
        spare = GIVING_BACK if len(run.kept) > 1 else LEAST_BUFFERS - len(here)  # states may have to be made
        behind = (one for one in islice(self._runs, run.number + 1, None) if self.is_used(one))
        for following in islice(behind, AHEAD):
            if not self._kept_of(following).load_ahead(following.cut, spare):
                break  # in order: a later one's buffers would be missed

    def is_used(self, run: FileRun) -> bool:
        """Whether a gradient has come to anything in it; else none need be in the file."""
        return any(segment.used for segment in self._segments[run])

    def _kept_of(self, run: FileRun) -> Together:
        away = run.unit.gradients.sink
        gradients = [away.kept] if isinstance(away, FileGradients) else []
        return Together([*run.kept.values(), *gradients])

    def give_back(self, run: FileRun, master: torch.Tensor) -> None:
        """The parameters of the run become the rounded master."""
        kept = self._parameters.get(run.unit)
        if kept is not None and not self.is_in_memory:
            kept.put(run.start, master)
        else:
            wait_for(self._upload.send(run.parameters, master))  # the pool's buffers go to others

    def state_of(self, run: FileRun, key: str, dtype: torch.dtype) -> torch.Tensor:
        """Where a state of the run's cut lies in the pool; made, of zeros, where the file does not have it yet."""
        unit = run.unit
        if (unit, key) not in self._states:
            self._states[unit, key] = self.shelf.keep(unit.leaving, dtype, labels.OPTIMIZER, f"{unit.name} {key}")
        run.kept[key] = kept = self._states[unit, key]
        if not kept.is_present(run.cut):
            kept.open(run.cut).zero_()
        return kept.present(run.cut)

    @contextmanager
    def reading_gradients(self, run: FileRun, write_back: bool = False) -> Iterator[None]:
        """Inside, the run's gradients are in the pool; with `write_back` what is made of them there is kept."""
        away = run.unit.gradients.sink
        if not isinstance(away, FileGradients) or not self.is_used(run):
            yield
            return
        away.kept.load(run.cut)
        try:
            yield
        finally:
            (away.kept.write_back if write_back else away.kept.drop)(run.cut)

    def forget_gradients(self, run: FileRun) -> None:
        """Nobody reads the run's gradients any more."""
        away = run.unit.gradients.sink
        if isinstance(away, FileGradients):
            away.kept.drop(run.cut)
