"""From reduced gradients to new masters: the part of `engine.step()` on this rank's shards.

    agree     which parameters have a gradient anywhere            one small all-reduce
    check     with loss scaling: did any gradient overflow?        one small all-reduce
    clip      if asked: the norm over all shards                   one small all-reduce
    update    torch's optimizer, over the segments of the shards   by one kernel, or tile by tile (step_by_tiles.py)

None of these steps waits for a GPU: flags are sent between the hosts if the process group can (backend
"cpu:gloo,cuda:nccl"; with only "nccl" the host waits once per step), norms stay on the device, and so does the
information that gradients overflowed if the optimizer accepts it there (precision.GradientScaling).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, NoReturn

import torch
from torch import nn, optim

from .. import labels
from ..comm.base import FAULT, Comm
from ..layout import MemoryOrder, Segment
from ..offload.placement import Placement
from ..precision import GradientScaling, LossScaling, cut_in_tiles, is_fused, norm_over_ranks, shaped_as, sum_of_powers
from ..units.unit import Unit, align_numel
from .one_pass import OnePass
from .segments import OWNED, STEP, OptimizerSegment, Waiting, dimensions, guard, set_aside, swap_parameters
from .step_by_tiles import (
    ONE_PASS,
    TILE_BYTES,
    TileBuffers,
    facts_of,
    follow_facts,
    optimizer_over,
    raw_step,
    update_tiles,
)


class Update:
    """The optimizer over this rank's segments.

    `used`        parameters, by number, with a gradient on this rank; after `agree`, on any rank
    `one_pass`    the update by one kernel; None: by tiles
    `waiting`     frozen parameters of the optimizer's groups, for which the optimizer has no segments yet
    `is_running`  True while the optimizer runs, in any thread
    `is_stepping`  True only inside `step`, not while a delayed update runs in its thread during a forward
    `fault`       returns None, or a number for a lost write (Writes.take_lost) that must stop the update;
                  `raise_fault` raises the error for it
    """

    fault: Callable[[], int | None]
    raise_fault: Callable[[int], NoReturn]

    def __init__(
        self, optimizer: optim.Optimizer, comm: Comm, units: Sequence[Unit], placement: Placement,
        trainable: list[nn.Parameter], names: list[str], orders: dict[nn.Parameter, MemoryOrder],
        tile_bytes: int | None, scaling: LossScaling | None,
    ) -> None:  # fmt: skip
        self.optimizer = optimizer
        self.units = units
        self._placement = placement
        self.comm = comm
        self.trainable = trainable
        self.names = names
        self._orders = orders
        device = trainable[0].device if trainable else torch.device("cpu")
        self.scaling = GradientScaling(scaling, device, self._norm)
        self.used: set[int] = set()
        self._agreed = False
        self.is_running = self.is_stepping = False
        self._device = device
        self._tile_bytes = tile_bytes
        self.segments: list[OptimizerSegment] = []
        self.tiles: list[list[OptimizerSegment]] = []
        self.waiting: Waiting = set_aside(optimizer, optimizer.param_groups)
        self._unheld = {i for i, p in enumerate(trainable) if p not in self.waiting}
        self.add(units)
        optimizer.add_param_group = self._add_param_group  # type: ignore[method-assign, assignment]
        optimizer.register_step_pre_hook(self._check_step)
        guard(optimizer, comm.rank, comm.size)

    def add(self, units: Sequence[Unit]) -> None:
        """Gives the optimizer the segments of `units`, which are new, as are their parameters in `trainable`."""
        # One permanent tensor: a gloo thread may release what it sent at any time, and memory would vary between runs.
        device = self.comm.flags_device or self._device
        self._used_flags = torch.zeros(len(self.trainable), dtype=torch.int32, device=device)
        casts = any(unit.dtypes.casts for unit in self.units)
        max_numel = self._tile_numel(casts)
        new = []
        for unit in units:
            for shard_range in self._placement.ranges[unit]:
                for segment in unit.layout.segments(self.comm.rank, max_numel):
                    # cut at the range's ends
                    first = max(segment.offset, shard_range.start)
                    last = min(segment.offset + segment.numel, shard_range.stop)
                    if first < last:
                        start = segment.start + first - segment.offset
                        part = Segment(segment.parameter, start, start + last - first, first)
                        parameter = self.trainable[segment.parameter]
                        ndim, order = dimensions(self.optimizer, parameter), self._orders[parameter]
                        new.append(OptimizerSegment(shard_range, part, unit.gradients, ndim, order))
        self.segments += new
        groups: dict[Any, list[OptimizerSegment]] = {}  # a tile's segments are of one tier, or of one range of its own
        for optimized in new:
            groups.setdefault(optimized.shard_range.group, []).append(optimized)
        for key, group in groups.items():
            is_cut = max_numel is not None and key is not group[0].shard_range
            self.tiles += cut_in_tiles(group, max_numel) if is_cut and max_numel else [group]
        self.buffers = TileBuffers(self.tiles)
        asks_for_kernel = self._tile_bytes == ONE_PASS and casts  # without casts torch's own fused kernel is one pass
        self.one_pass = OnePass.of(self.optimizer, self.segments, self._device) if asks_for_kernel else None
        self._index = {p: i for i, p in enumerate(self.trainable)}
        swap_parameters(self.optimizer, self.waiting, self._index, new, self._orders)
        self._placement.attach(self.optimizer, new)
        self._group_ids = self._ids_in_groups()

    def _tile_numel(self, casts: bool) -> int | None:
        """Returns the elements per tile, or None if one step over everything needs no memory besides the states."""
        tile_bytes = self._tile_bytes
        if tile_bytes == ONE_PASS:  # a kernel's temporaries; without a kernel, the default's
            tile_bytes = TILE_BYTES[self._device.type]
        if tile_bytes is None or (is_fused(self.optimizer) and not casts and not self._placement.tiles_always):
            return None
        align = align_numel(self.optimizer, 4)
        return max(align, tile_bytes // 4 // align * align)

    # -- the phases ---------------------------------------------------------------------------------------

    def agree(self, what: str = "step") -> None:
        """Finds the parameters with a gradient on any rank; parameters unused on all keep grad None, as under DDP.
        `what`: the operation that this rank is about to do, which must be the same on every rank.
        """
        if self._agreed:
            return
        self._agreed = True
        for unit in self.units:
            unit.gradients.wait_for_copies()
        fault = self.fault()
        if self.comm.size > 1:
            # flags are made on the host, and agreed upon there if the process group can: no wait for a device
            own_flags = torch.zeros(len(self.trainable), dtype=torch.int32)
            own_flags[list(self.used)] = 1
            if fault is not None:
                own_flags[:1] = FAULT + fault
            flags = self.comm.launches.agree(self.comm, own_flags, self._used_flags, what)
            fault = flags[0] - FAULT if flags and flags[0] >= FAULT else None
            self.used = {i for i, flag in enumerate(flags) if flag} if fault is None else self.used
        if fault is not None:
            self._agreed = False
            self.raise_fault(fault)
        for segment in self.segments:
            segment.used = segment.span.parameter in self.used

    def begin(self) -> None:
        """Discards facts about the gradients when a backward starts."""
        if self.scaling.coefficient is not None and self.used:
            raise RuntimeError(
                "backward: clip_grad_norm_ has clipped the present gradients, and this backward would add to them;"
                " call step or zero_grad first, or clip after the last backward"
            )
        self._agreed = False
        self.scaling.forget()

    def run(self) -> bool:
        """Updates the masters; returns False if the host knows that gradients overflowed and every rank skips."""
        # 1 which parameters have gradients on any rank
        self.prepare()
        # 2 with loss scaling: all ranks skip, or none
        with self.scaling.judging(self.optimizer) as skips:
            if not skips:
                # 3 by one kernel; or tile by tile, which bounds the memory of casts and of an unfused optimizer
                factor = self.scaling.coefficient
                with self.running():
                    if self.one_pass is not None:
                        hooks_wrote = self.one_pass.step(factor)
                    else:
                        hooks_wrote = self._update_tiles(factor)
                    if hooks_wrote:
                        self._placement.round_masters()
                if self._placement.unseen is not None:
                    self._placement.unseen.send()
        return not skips

    def _update_tiles(self, factor: torch.Tensor | float | None) -> bool:
        # all ranges of a tile share a `group`: its first range opens it for all; a range with I/O of its own is its own
        # group, and so its own tile
        try:
            return update_tiles(
                self.optimizer, self.tiles, factor, self.buffers, visit=lambda tile: tile[0].shard_range.visit(tile)
            )
        except BaseException:  # of a hook: a step after it must not multiply the same gradients again
            only = self.tiles[0] if len(self.tiles) == 1 and factor is not None else []
            given = [(share.gradient(), share.tensor.grad) for share in only]
            if any(own is not None and grad is not None and own.data_ptr() == grad.data_ptr() for own, grad in given):
                self.scaling.coefficient = 1.0
            raise

    def prepare(self) -> None:
        """Prepares an update, immediate or pending. Raises an error if the optimizer's parameters were changed."""
        self.agree()
        missing = [self.names[i] for i in sorted(self._unheld & self.used)]
        if missing:
            raise ValueError(
                f"optimizer: it does not hold {missing[0]}, which is trainable and has a gradient; freeze it, add it"
                " with add_param_group, drop its gradient before the step (`p.grad = None`), or leave the parameter to"
                " you by ignored_parameters= of initialize()"
            )
        if self._ids_in_groups() != self._group_ids:
            raise RuntimeError(
                "optimizer: its param_groups hold other tensors than the engine put there, so that some parameters"
                " would not be trained; change only options (lr, weight_decay, ...), freeze a parameter by"
                " requires_grad_(False), and add groups with add_param_group"
            )

    @contextmanager
    def running(self) -> Iterator[None]:
        """Allows the optimizer to step inside."""
        self.is_running = self.is_stepping = True
        try:
            yield
        finally:
            self.is_running = self.is_stepping = False

    def forget(self) -> None:
        """Forgets the gradients, which were consumed or dropped."""
        self.forget_use()
        for segment in self.segments:
            segment.tensor.grad = None

    def forget_use(self) -> None:
        """Forgets which gradients exist; the optimizer's tensors keep their `.grad`."""
        self.used.clear()
        self._agreed = False
        self.scaling.forget()
        for segment in self.segments:
            segment.used = False

    def drop(self, numbers: set[int]) -> None:
        """Forgets this rank's gradients of these parameters."""
        self.used -= numbers
        self._agreed = False
        self.scaling.edited()

    def visited(self, selects: Callable[[OptimizerSegment], bool], edits: bool = False) -> Iterator[OptimizerSegment]:
        """Yields the segments that `selects` chooses, while their gradients can be read, or with `edits` changed."""
        for shard_range, segments in groupby(self.segments, key=lambda segment: segment.shard_range):
            chosen = [segment for segment in segments if selects(segment)]
            if chosen:
                with shard_range.gradients(edits):
                    yield from chosen

    # -- overridden by DelayedUpdate (delayed_update.py); here no update is ever pending --------------------

    is_at_work = False
    """True while a pending update is running."""

    def launch(self) -> None:
        """Starts the pending update when a training forward starts."""

    def complete(self) -> bool:
        """Makes or awaits the pending update, without updating parameters. Returns True if one was pending."""
        return False

    def check_saveable(self) -> None:
        """Raises ValueError while the pending update is running."""

    def check_writable(self, name: str) -> None:
        """Raises RuntimeError while the pending update is running: masters cannot follow writes to `name`."""

    def pending_gradients(self) -> list[tuple[OptimizerSegment, torch.Tensor]]:
        """Returns gradients whose update is still to be made, by segment."""
        return []

    def describe_pending(self) -> dict[str, Any]:
        """Returns the steps so far and the pending update's facts, as JSON, for a checkpoint; else empty."""
        return {}

    def restart(self, steps: int) -> None:
        """Discards the pending update, which belongs to replaced weights. `steps`: taken so far."""

    def restore_pending(self, gradients: dict[OptimizerSegment, torch.Tensor], described: dict[str, Any]) -> None:
        """Makes an update by these gradients pending, or, here, at once."""
        for segment, gradient in gradients.items():
            segment.tensor.grad = shaped_as(segment.tensor, gradient).to(segment.tensor)
            if described["coefficient"] is not None:
                segment.tensor.grad.mul_(described["coefficient"])
        # with the options of the step that made the gradients, and without the hooks, which ran in it
        groups = [
            group | {key: saved[key] for key in saved.keys() - {"foreach", "fused", "capturable"}}
            for group, saved in zip(self.optimizer.param_groups, described["options"], strict=True)
        ]
        other = optimizer_over(self.optimizer, groups)
        before = facts_of(other)
        raw_step(other)
        follow_facts(self.optimizer, before, facts_of(other))
        for segment in gradients:
            segment.tensor.grad = None

    # -- helpers ------------------------------------------------------------------------------------------

    def _norm(self, norm_type: float) -> torch.Tensor:
        """Returns the norm over all ranks' gradients, 0-dim fp64; NaN if any gradient has one."""
        if self.one_pass is not None and norm_type == 2:
            return norm_over_ranks(self.one_pass.sum_of_squares(), norm_type, self.comm.sum, self.comm.maximum)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for tile in self.tiles:
            with tile[0].shard_range.gradients(), labels.on_tier(tile[0].gradient_tier):
                gradients = [g for segment in tile if (g := segment.gradient()) is not None]
                part = sum_of_powers(gradients, norm_type, self._device).to(self._device)
            total = torch.maximum(total, part) if norm_type == math.inf else total + part
        return norm_over_ranks(total, norm_type, self.comm.sum, self.comm.maximum)

    def _check_step(self, *_: Any) -> None:
        if not self.is_stepping:
            raise RuntimeError(STEP)

    def _add_param_group(self, group: dict[str, Any]) -> None:
        """Adds a group of the model's parameters that no group holds yet; frozen ones wait until they are unfrozen."""
        given = group["params"]
        given = [given] if isinstance(given, torch.Tensor) else list(given)
        trained = {self._index[p] for p in given if p in self._index}
        if not trained <= self._unheld or any(p not in self._orders or p in self.waiting for p in given):
            raise ValueError("add_param_group: it takes parameters of the model that no group holds yet")
        if trained and group.get(OWNED):
            raise ValueError(
                "add_param_group: owned=True comes too late for parameters that are divided; give such a"
                " group to the optimizer before initialize()"
            )
        type(self.optimizer).add_param_group(self.optimizer, {**group, "params": given})
        self._unheld -= trained
        self.waiting |= set_aside(self.optimizer, self.optimizer.param_groups[-1:])
        swap_parameters(self.optimizer, self.waiting, self._index, self.segments, self._orders)
        self._group_ids = self._ids_in_groups()

    def _ids_in_groups(self) -> list[int]:
        return [id(tensor) for group in self.optimizer.param_groups for tensor in group["params"]]
