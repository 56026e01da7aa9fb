"""Writes to parameters outside of the optimizer, and their consequences.

    found by     written by
    version      p.mul_(), nn.init, load_state_dict          masters are updated
                 tensors of optimizer.param_groups           an error at the next forward or step
    value        p.data.mul_(), NumPy: in a forward          lost under stage 3, which reshards the unit
                 the same elsewhere                          found by a step or a checkpoint, and masters are updated;
                                                             on a GPU found by the update's kernel, if there is one,
                                                             too late: an error at the next step
    address      p.data = ..., module.double()               an error at the next forward or step
    identity     module.weight = nn.Parameter(...)           an error at the next forward or step
                 edits of optimizer.param_groups             an error at the next step

At the end of full_parameters() all values are compared: shards and masters are updated, a replaced `.data` is copied
back into the engine's memory, and values that differ between ranks raise an error on all ranks.

A rank updates only its own part: every rank must write equal values, as under DDP. Only the end of full_parameters()
compares them, with one small collective.

A forward checks addresses and versions, a step versions: about 0.3 µs of host time per parameter in total. Values are
compared if masters and parameters are separate: each rank its own part. On a GPU, which the host must not wait for, the
kernel of the update compares them (parameters/access.py).

torch's `module.load_state_dict`, of the whole module or of a part: a sharded parameter gets memory for all of its
elements, into which torch copies; then this rank's part is kept, and masters are updated at the next forward or step.
There is no collective: every rank loads equal values. `assign=True` copies too, since the parameters' memory is fixed.
`module.state_dict()` of sharded parameters raises an error, since it would contain NaN.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from .engine import ShardedEngine
from .modules.wrapping import Hook
from .parameters import access
from .units.gathered_unit import GatheredUnit
from .units.unit import Unit

HOW = (
    "write in place inside `with engine.full_parameters()`, or load with engine.module.load_state_dict() or"
    " engine.load_weights()"
)

WRITTEN = f"it was written to while this rank held a part of it only; {HOW}"

HOST_MAY_COMPARE = {"cpu": True}
"""Device type -> True if the host may ask for the result of a comparison, since it need not wait for the device."""

UNSENT = (
    "optimizer: a tensor of its param_groups was written to outside of a step; it is only this rank's part, and the"
    " parameters do not follow by themselves: call engine.sync_parameters() on every rank after such writes"
    " (optimizer.eval(), optimizer.train(), decay by hand), or write to the parameters in place"
)


class Writes:
    """The state in which the engine left parameters and masters, for comparison.

    `homes`   parameters that the engine has moved -> the view that each has while its values are present
    `unit_of` the unit that may hide a parameter
    """

    def __init__(self, engine: ShardedEngine) -> None:
        self._engine = engine
        self.unit_of: dict[nn.Parameter, Unit] = {}
        self.are_kept = 0  # units inside of `keeping`
        self._after: dict[Unit, torch.Tensor] = {}  # their fingerprints at its end
        self._differ = False  # ranks have written different values inside
        self.start()

    def start(self) -> None:
        """Reads the engine's units, at the start and whenever they have been replaced."""
        engine, placement, one_pass = self._engine, self._engine.placement, self._engine.update.one_pass
        self._gathered = [unit for unit in engine.gathered_units() if isinstance(unit, GatheredUnit)]
        self.unit_of.clear()
        self.unit_of.update({p: unit for unit in self._gathered for p in unit.parameters})
        self._names = {p: name for name, p in engine.module.named_parameters()}
        self._numbers = {p: i for i, p in enumerate(engine.trainable)}
        self.homes = {p: view for unit in self._gathered for p, view in unit.views()}
        self.homes = self.homes or {p: p.data for p in engine.trainable}
        self._look_at_module()
        self._checked_addresses: list[int] = []
        self._loaded: set[int] = set()  # numbers of parameters that load_state_dict has written
        self._stored: dict[Unit, None] = {}  # units with parameters written while sharded
        self._units = [unit for unit, _ in engine.parameters_by_unit()]
        for unit, parameters in engine.parameters_by_unit():
            unit.versions = access.Versions(parameters)
        self._segments = access.Versions([segment.tensor for segment in engine.segments])
        # units whose masters are separate from the parameters: comparing the two finds writes to the parameters
        ranges = {unit: placement.ranges.get(unit, []) for unit in self._units}
        self._compared = [unit for unit in self._units if not all(part.is_parameters for part in ranges[unit])]
        self._host_may_compare = not engine.comm.on_streams and all(
            HOST_MAY_COMPARE.get(p.device.type, False) for p in engine.trainable
        )
        placement.host_may_compare = self._host_may_compare or placement.is_tiered
        if (
            one_pass is not None
            and not placement.host_may_compare
            and any(s.rounded is not None for s in engine.segments)
        ):
            numbers = [segment.span.parameter for segment in engine.segments]
            placement.unseen = access.UnseenWrites(numbers, engine.names, engine.trainable[0].device)
            one_pass.flags = placement.unseen.flags
        self.note()

    # -- the check ----------------------------------------------------------------------------------------

    def check(self, collective: bool = True) -> None:
        """Updates masters after all writes. Raises RuntimeError for lost ones; on all ranks if `collective`."""
        self._engine.settle()  # gathers in flight read what is compared
        self.check_addresses()
        self.follow_all()
        self._segments.note()
        number, comm = self.take_lost(waits=True), self._engine.comm
        if collective and comm.size > 1 and self._engine.placement.unseen is not None:
            device = comm.flags_device or self._units[0].device
            with torch.inference_mode(False):  # a communicator keeps the last value that it sent
                flag = torch.tensor([-1 if number is None else number], dtype=torch.int32, device=device)
            comm.maximum(flag)
            number = int(flag) if flag >= 0 else None
        if number is not None:
            self.raise_lost(number)

    def take_lost(self, waits: bool = False) -> int | None:
        """Returns the number of a parameter whose writes an update has replaced. `waits`: for the last update."""
        unseen = self._engine.placement.unseen
        return None if unseen is None else unseen.find(waits)

    def raise_lost(self, number: int) -> NoReturn:
        """Raises RuntimeError for a number that `take_lost` has returned on some rank."""
        self.forget_lost()
        raise RuntimeError(f"{self._engine.names[number]}: {access.OVERWRITTEN}")

    def forget_lost(self) -> None:
        """Forgets writes that updates have replaced."""
        if self._engine.placement.unseen is not None:
            self._engine.placement.unseen.forget()

    def follow(self) -> None:
        """Updates masters after writes that versions show; the next forward checks addresses."""
        if not self._engine.update.is_at_work and self._segments.have_moved:
            raise RuntimeError(UNSENT)
        for unit in self._stored:
            unit.follow(self._loaded)
        self._stored.clear()
        for unit in self._units:
            if written := unit.versions.written():
                name = self._names[written[0]]
                if not unit.is_whole:
                    access.restore_placeholders()
                    raise RuntimeError(f"{name}: {WRITTEN}")
                self._engine.update.check_writable(name)
                unit.keep_parameters(self._loaded)
        self._loaded.clear()

    def follow_before_sync(self) -> None:
        """Updates masters after writes to parameters. Raises RuntimeError if masters were written to as well."""
        units = [unit for unit in self._compared if unit in self._stored or unit.versions.have_moved]
        if units and self._segments.have_moved:
            raise RuntimeError(
                f"sync_parameters: parameters of {units[0].name} were loaded or written to, and the tensors of"
                " optimizer.param_groups too, since the masters followed; call engine.sync_parameters() between the two"
            )
        if units:
            self.follow()

    def follow_all(self, updates: bool = False) -> None:
        """Updates masters after all writes, including those that only values show. `updates`: an update follows; then
        values on a GPU are not compared here, since the update's kernel may do so (parameters/access.py).
        """
        self.follow()
        for unit in self._compared if self._engine.placement.host_may_compare or not updates else ():
            if unit.placement.may_be_written(unit):
                self._engine.update.check_writable(unit.name)
                unit.placement.follow(unit, (), self._host_may_compare)

    def drop_unsent(self) -> None:
        """Forgets writes to the optimizer's tensors, which have raised an error."""
        self._segments.note()

    def note(self) -> None:
        """Records all current values as written by the engine, so that only later writes count as the user's."""
        for unit in self._units if self._engine.placement.is_tiered else ():
            unit.placement.note_parameters(unit)
        self._segments.note()
        self._loaded.clear()
        self._stored.clear()
        for unit in self._units:
            unit.versions.note()

    def loaded(self, parameter: nn.Parameter) -> None:
        """Records that all of `parameter` was loaded: its master takes exactly these values."""
        if parameter in self._numbers:
            self._loaded.add(self._numbers[parameter])

    def store(self, unit: Unit, parameter: nn.Parameter, values: torch.Tensor) -> None:
        """Keeps this rank's part of `values`, of the parameter's shape, loaded while the parameter is sharded."""
        self._engine.update.check_writable(self._names[parameter])
        unit.placement.wait()
        self._engine.store(parameter, values)
        self._stored[unit] = None
        unit.versions.note()

    def check_addresses(self) -> None:
        """Raises RuntimeError if a parameter is not in the engine's memory."""
        size = sum(len(module._parameters) + len(module._modules) for module in self._modules)
        if size != self._seen_size or any(parts.get(name) is not part for parts, name, part in self._sites):
            self._look_at_module()
        with access.as_they_are():
            addresses = [parameter.data_ptr() for parameter in self.homes]
        if addresses == self._checked_addresses:
            return
        for parameter, home in self.homes.items():
            with access.as_they_are():
                is_home = parameter.data_ptr() == home.data_ptr()
            if is_home or access.is_placeholder(parameter):
                continue
            why = f"its .data was replaced (`p.data = ...`, vector_to_parameters) and would not be trained; {HOW}"
            if (parameter.dtype, parameter.device) != (home.dtype, home.device):
                was, is_now = f"{home.dtype} on {home.device}", f"{parameter.dtype} on {parameter.device}"
                why = f"it was {was} when initialize() was called and is {is_now} now; convert the model before that"
            raise RuntimeError(f"{self._names[parameter]}: {why}")
        self._checked_addresses = addresses

    def _look_at_module(self) -> None:
        """Raises RuntimeError unless a changed module has its old parameters and no new trainable ones."""
        self._modules = list(self._engine.module.modules())
        both: list[dict[str, Any]] = [parts for m in self._modules for parts in (m._parameters, m._modules)]
        self._sites = [(parts, name, part) for parts in both for name, part in parts.items() if part is not None]
        self._seen_size = sum(map(len, both))
        present = {*self._engine.module.parameters()}
        for parameter, name in self._names.items():
            if parameter not in present:
                raise RuntimeError(
                    f"{name}: the module does not have the parameter any more that initialize() was given, so that it"
                    f" would never be trained; keep the parameter, and {HOW}"
                )
        for name, parameter in self._engine.module.named_parameters():
            if parameter not in self._names and parameter.requires_grad:
                raise RuntimeError(
                    f"{name}: it was added to the module after initialize(), so that its gradient would not be reduced,"
                    " nor would it be trained; add it before, or freeze it by requires_grad_(False)"
                )

    # -- inside full_parameters() -------------------------------------------------------------------------

    @contextmanager
    def keeping(self, unit: Unit) -> Iterator[None]:
        """Keeps values that are written inside to the whole `unit`, unless `compare` found ranks that differ."""
        before = access.fingerprint(unit.full_parameters)  # of all parts, so that all ranks decide alike
        self.are_kept += 1
        try:
            yield
        finally:
            self.are_kept -= 1
            self._bring_home(unit)
            after, written = self._after.pop(unit, None), unit.versions.written()
            after = access.fingerprint(unit.full_parameters) if after is None else after  # after an exception inside
            if (written or bool(before != after)) and not self._differ:
                self._engine.update.check_writable(unit.name)
                unit.keep_parameters(self._loaded)

    def _bring_home(self, unit: Unit) -> None:
        """Copies the parameters of `unit` whose `.data` was replaced into the engine's memory."""
        for parameter in unit.versions.parameters:
            home = self.homes[parameter]
            alike = (parameter.shape, parameter.dtype, parameter.device) == (home.shape, home.dtype, home.device)
            if parameter.data_ptr() != home.data_ptr() and alike:
                home.copy_(parameter.data)
                parameter.data = home

    def compare(self, units: Sequence[Unit]) -> None:
        """Raises RuntimeError, on all ranks, if the parameters of whole `units` differ between ranks: for the first."""
        group, self._differ = self._engine.comm.group, False
        if group is None or not units:
            return
        for unit in units:
            self._bring_home(unit)
            self._after[unit] = access.fingerprint(unit.full_parameters)
        prints = torch.stack([self._after[unit] for unit in units])
        most = self._most(torch.stack([prints, ~prints]))  # ~ reverses the order: the most, and the least
        for unit in [unit for unit, differs in zip(units, (most[0] != ~most[1]).tolist(), strict=True) if differs]:
            # a row of each rank, with the fingerprint of each parameter, for all ranks
            table = torch.full((dist.get_world_size(group), len(unit.layout.pieces)), torch.iinfo(torch.int64).min)
            for number, piece in enumerate(unit.layout.pieces):
                content = unit.full_parameters.narrow(0, piece.offset, piece.numel).clone().view(torch.uint8)
                padded = nn.functional.pad(content, (0, -content.numel() % 8))  # to whole 64-bit numbers
                table[dist.get_rank(group), number] = access.fingerprint(padded)
            columns = self._most(table.to(unit.device)).T.tolist()
            for parameter, column in zip(self._engine.parameters_of(unit), columns, strict=True):
                alike: dict[int, list[str]] = {}
                for rank, value in enumerate(column):
                    alike.setdefault(value, []).append(str(rank))
                self._differ = len(alike) > 1
                if self._differ:
                    groups = " and ".join(", ".join(ranks) for ranks in alike.values())
                    raise RuntimeError(
                        f"{self._names[parameter]}: at the end of full_parameters() its values differ between ranks"
                        f" {groups}, and each rank keeps its part only; write equal values on every rank (broadcast"
                        " rank 0's first)"
                    )

    def _most(self, values: torch.Tensor) -> torch.Tensor:
        comm = self._engine.comm
        with torch.inference_mode(False):  # a communicator keeps the last value that it sent
            sent = values.to(comm.flags_device or values.device, copy=True)
        comm.maximum(sent)
        return sent


def register_load_hooks(engine: ShardedEngine, writes: Writes) -> None:
    """Registers the hooks on the modules that have parameters of their own."""
    for module in engine.module.modules():
        if any(True for _ in module.parameters(recurse=False)):
            load = Load(engine, writes)
            module.register_load_state_dict_pre_hook(Hook(load.before))
            module.register_load_state_dict_post_hook(Hook(load.after))
            if writes.unit_of:
                module.register_state_dict_pre_hook(Hook(partial(_check_whole, writes.unit_of)))


def _check_whole(held: Collection[nn.Parameter], module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Raises RuntimeError if `module.state_dict()` would contain NaN."""
    for name, parameter in module.named_parameters(recurse=False):
        if not keep_vars and parameter in held and access.is_placeholder(parameter):
            raise RuntimeError(
                f"state_dict: {prefix}{name} is in parts, one on each rank; on every rank, call"
                " engine.full_state_dict(), or this inside `with engine.full_parameters()`"
            )


class Load:
    """The state of a load into one module's own parameters.

    `_versions`  their versions before the load, by which written ones are found
    `_lent`      parameters with memory for the load only
    """

    def __init__(self, engine: ShardedEngine, writes: Writes) -> None:
        self._engine, self._writes = engine, writes
        self._unit_of = writes.unit_of
        self._versions: dict[nn.Parameter, int] = {}
        self._lent: set[nn.Parameter] = set()

    def before(self, module: nn.Module, _state: Any, _prefix: str, metadata: dict[str, Any], *_: Any) -> None:
        """Makes every parameter of the module writable."""
        self._engine.settle()
        metadata["assign_to_params_buffers"] = False
        for parameter in module.parameters(recurse=False):
            self._versions[parameter] = parameter._version
            if parameter in self._unit_of and access.is_placeholder(parameter):
                parameter.data = access.placeholder(parameter).clone()
                self._lent.add(parameter)

    def after(self, _module: nn.Module, *_: Any) -> None:
        """Keeps the copied values."""
        versions, lent = self._versions, self._lent
        self._versions, self._lent = {}, set()
        for parameter, version in versions.items():
            with access.as_they_are():
                values = parameter.data
                if parameter in lent:
                    parameter.data = access.placeholder(parameter)
            if parameter._version != version:
                self._writes.loaded(parameter)
                if parameter in lent:
                    self._writes.store(self._unit_of[parameter], parameter, values)
