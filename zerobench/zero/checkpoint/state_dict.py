"""The engine's state as dicts: the plain module's full state, and each rank's own part.

[Note: temporary weights]
Averages, for example, for an evaluation; afterwards parameters, masters and buffers are as before.

    put aside   shards that no separate master can restore, frozen parameters that are replaced, and buffers: this
                rank's part, in host memory
    swapped in  the given values, each rank its own part; masters do not follow
    put back    shards from these copies or by rounding their masters, and sent to all ranks as after a load

So a device never holds a second copy of the masters. Between the two the engine only evaluates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from os import PathLike
from typing import Any

import torch
from torch import nn

from .. import labels
from ..engine import ShardedEngine
from ..gradients.access import trainable_number
from ..gradients.flow import GradientFlow
from ..modules.wrapping import in_normal_mode
from ..precision import TRAINED, flattened
from ..writes import Writes
from . import save_load
from .contents import before_load, decode, put, states_of, whole_frozen
from .save_load import SaveHandle, ranks_of
from .storage import DTYPES, is_elements


class StateMixin(ShardedEngine):
    """The methods of `Strategy` that save, load and convert its state."""

    gradients: GradientFlow
    writes: Writes
    _buffers_due: bool

    @in_normal_mode
    def full_state_dict(self, rank0_only: bool = False) -> dict[str, Any]:
        """Returns the plain module's `state_dict`: same keys, shapes and values, copied; collective over the ranks.

        With `rank0_only` the other ranks participate and return an empty dict.
        """
        self.settle()
        self.writes.check()
        keep = self.comm.is_first or not rank0_only
        gathered: dict[torch.Tensor, torch.Tensor] = {}
        with torch.no_grad():
            for unit in self.gathered_units():
                with self.whole(unit):
                    if keep:
                        gathered |= {p: p.detach().clone() for p in self.parameters_of(unit)}
        if not keep:
            return {}

        def copy(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value  # a module's extra state
            return gathered[value] if value in gathered else value.detach().clone()

        return {name: copy(value) for name, value in self.module.state_dict(keep_vars=True).items()}

    @in_normal_mode
    def full_optimizer_state(self, name: str, rank0_only: bool = False) -> dict[str, Any]:
        """Returns the optimizer's whole state of a parameter, by key, copied; collective over the ranks.

        States of elements have the parameter's shape, states of blocks of elements are (blocks,). Empty if it was never
        updated; with `rank0_only` the other ranks return an empty dict. `name`: as in `module.named_parameters()`.
        Raises ValueError if `name` is not a trainable parameter.
        """
        number = trainable_number(self, name)
        with self.placement.in_memory(write_back=False), torch.no_grad():
            self.settle()
            self.update.check_saveable()
            state = _whole_state(self, number)
        return state if self.comm.is_first or not rank0_only else {}

    @in_normal_mode
    def state_dict(self) -> dict[str, Any]:
        """A copy of this rank's shards, buffers, frozen parameters and optimizer state, for this N and stage only."""
        self.raise_if_weights_are_temporary("state_dict")
        self.writes.check(collective=False)
        with self.placement.in_memory(write_back=False):
            self.settle()
            self.update.check_saveable()
            pending = dict(self.update.pending_gradients())
            return {
                "stage": self.stage,
                "world_size": self.comm.size,
                "rank": self.comm.rank,
                "orders": _orders(self),
                "tensors": {name: tensor.detach().clone() for name, tensor in _own_tensors(self).items()},
                "optimizer": deepcopy(self.optimizer.state_dict()),
                "pending": {number: pending[s].clone() for number, s in enumerate(self.segments) if s in pending},
                "extra": self.extra_state(),
            }

    @in_normal_mode
    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restores the result of `state_dict` on the same rank. Raises ValueError if it does not fit this engine."""
        self.raise_if_weights_are_temporary("load_state_dict")
        with self.placement.in_memory(write_back=True):
            self.settle()
            if "stage" not in saved:
                raise ValueError(
                    "state_dict: it is not a result of engine.state_dict(); a plain module's state goes into"
                    " engine.module.load_state_dict(), a file of weights into engine.load_weights()"
                )
            for key, value in (("stage", self.stage), ("world_size", self.comm.size), ("rank", self.comm.rank)):
                if saved.get(key) != value:
                    raise ValueError(f"state_dict: {key} is {saved.get(key)}, but this engine's is {value}")
            orders, others = _orders(self), saved.get("orders", {})
            for name in orders.keys() | others.keys():
                if orders.get(name) != others.get(name):
                    raise ValueError(
                        f"state_dict: the memory order of {name} differs from this model's; give it the strides that it"
                        " had, or use save and load, which reorder"
                    )
            own, given = _own_tensors(self), saved["tensors"]
            for name, tensor in own.items():
                if name not in given or given[name].shape != tensor.shape:
                    raise ValueError(f"state_dict: {name} is missing or of another size than this model's")
            before_load(self)
            for name, tensor in own.items():
                put(tensor, given[name])
            self.optimizer.load_state_dict(deepcopy(saved["optimizer"]))
            extra = saved.get("extra", {})
            self.load_extra_state(extra)
            if saved.get("pending"):
                pending = {self.segments[number]: gradient.clone() for number, gradient in saved["pending"].items()}
                with torch.no_grad():
                    self.update.restore_pending(pending, extra["pending"])
            self.after_load()

    @contextmanager
    def full_parameters(self) -> Iterator[nn.Module]:
        """Gathers the module's parameters on every rank, to be read and written inside the context; collective.

        For example to update averages, or for `load_state_dict`. Values written in place or by `p.data = ...` are
        copied into shards and fp32 masters at the end; every rank must write equal values, since each keeps only its
        own part. Optimizer states are unchanged. Raises RuntimeError, on all ranks, for values that differ between
        ranks, and for a parameter that was replaced by a tensor of another dtype or device.
        """
        self.settle()
        self.writes.check()
        units = self.gathered_units() or self.units
        with ExitStack() as stack:
            for unit in units:
                stack.enter_context(self.whole(unit))
                stack.enter_context(self.writes.keeping(unit))
            with self.following_reads():
                yield self.module
            self.writes.compare(units)
        self.writes.check()

    @contextmanager
    def temporary_weights(self, weights: Mapping[str, Any]) -> Iterator[nn.Module]:
        """Gives the module other weights inside the context, such as averages for an evaluation; collective.

        `weights`: whole tensors of parameters and buffers by their names in the module, on any device, equal on every
        rank; others keep their values, and values that are no tensors are left out. At the end parameters, masters and
        buffers are as before, to the bit, whatever was written inside; meanwhile this rank's part is in host memory.
        Inside, the engine evaluates and exports: training, saving and loading raise RuntimeError. Raises ValueError,
        before anything is changed, for weights that do not fit the module.
        """
        self.raise_if_weights_are_temporary("temporary_weights")
        swap, is_due = TemporaryWeights(self, weights), self._buffers_due
        if self.writes.are_kept:
            raise RuntimeError("temporary_weights: leave `with engine.full_parameters()` first")
        self.update.check_writable("temporary_weights")
        self.writes.check()
        try:
            swap.put_in()
            yield self.module
        finally:
            swap.put_back()
            self._buffers_due = is_due

    def sync_parameters(self) -> None:
        """Sets the parameters of all ranks to the values in `optimizer.param_groups`; collective.

        Needed after writes to these tensors outside of a step, in which each rank writes its own part: an optimizer's
        `eval()` and `train()`, manual decay. Raises RuntimeError while a delayed update runs, and if masters are in
        files.
        """
        self.raise_if_weights_are_temporary("sync_parameters")
        self.update.check_writable("sync_parameters")
        if not all(piece.is_present for piece in self.placement.all_ranges()):
            self.placement.restore_absent()
            self.writes.drop_unsent()
            raise RuntimeError(
                "sync_parameters: masters lie in files (offload=nvme), where writes to optimizer.param_groups do not"
                " reach them, and are dropped; write to the parameters inside `with engine.full_parameters()`"
            )
        self.settle()
        self.writes.follow_before_sync()
        self.after_load()

    def save(
        self, path: str | PathLike[str], *, asynchronous: bool = False, user_state: dict[str, Any] | None = None,
        exclude_frozen: bool = False, without_gradients: bool = False,
    ) -> SaveHandle | None:  # fmt: skip
        """Writes a checkpoint, the folder `path`, that any stage at any N can load; collective over the ranks.

        `user_state`: JSON values that `load` returns; rank 0's are saved. `asynchronous`: returns once this
        rank's part is copied to the CPU; an error is raised by the handle's `wait`, or by the next save or load. An
        existing checkpoint is replaced only when the new one is complete. Raises ValueError for state that cannot be
        saved, RuntimeError if writing failed, on all ranks.
        """
        self.raise_if_weights_are_temporary("save")
        self.writes.check()
        self.gradients.stand_ins.follow_edits()
        with self.placement.in_memory(write_back=False):
            return save_load.save(self, path, asynchronous, user_state or {}, exclude_frozen, without_gradients)

    @in_normal_mode
    def load(self, path: str | PathLike[str], *, weights_only: bool = False, strict: bool = True) -> dict[str, Any]:
        """Loads a checkpoint that `save` wrote at any stage and N, and returns its `user_state`; collective.

        `weights_only`: loads only parameters and buffers, as `load_weights` does. Without `strict` parameters and
        buffers that the checkpoint lacks keep their values and states, and those that the module lacks are left out; a
        warning names both. Raises ValueError, on all ranks and before anything is changed, for a checkpoint that is
        damaged or for another model or optimizer.
        """
        self.raise_if_weights_are_temporary("load")
        if not strict:
            self._settle_parameters()
        with self.placement.in_memory(write_back=True):
            return save_load.load_weights(self, path, strict)[1] if weights_only else save_load.load(self, path, strict)

    def _settle_parameters(self) -> None:
        """Updates masters after writes since the last step, and makes a pending update, before a partial load."""
        self.writes.check()
        if self.update.complete():
            self.placement.round_masters()

    @in_normal_mode
    def load_weights(self, path: str | PathLike[str], *, strict: bool = True) -> tuple[list[str], list[str]]:
        """Loads parameters and buffers from safetensors (a file, an index or a folder of them) or from a checkpoint.

        Collective; each rank reads only its own elements. Masters are filled with the file's values in their full
        precision; optimizer states are unchanged. One name of a tied parameter is enough. Returns the names that the
        file lacks, `missing_keys`, and the names that the module lacks, `unexpected_keys`. Raises ValueError, on all
        ranks and before anything is changed, for damaged files, for other shapes and, if `strict`, for missing and
        unexpected names. Nothing is unpickled.
        """
        self.raise_if_weights_are_temporary("load_weights")
        if not strict:
            self._settle_parameters()
        with self.placement.in_memory(write_back=True):
            return save_load.load_weights(self, path, strict)[0]

    def export_safetensors(self, path: str | PathLike[str]) -> None:
        """Writes the plain module's state, as `full_state_dict` returns it, into one file; collective, unit by unit."""
        self.writes.check()
        save_load.export_safetensors(self, path)

    def after_load(self) -> None:
        """Refreshes the parameter shards, and from them the parameters of all ranks, after masters were overwritten."""
        with torch.no_grad():
            self.placement.round_masters()
            self.placement.settle()
        self.writes.forget_lost()
        self.send_parameters()

    def send_parameters(self) -> None:
        with torch.no_grad():
            self.after_update()
            self.comm.forget()
            self.settle()
        torch.clear_autocast_cache()  # an autocast around this would hand out casts of the earlier values
        for parameter in self.trainable:  # makes a backward through an earlier forward raise, as in torch
            torch.autograd.graph.increment_version(parameter)
        self.writes.note()


def _whole_state(engine: ShardedEngine, number: int) -> dict[str, Any]:
    name, parameter, optimizer = engine.names[number], engine.trainable[number], engine.optimizer
    segments = [segment for segment in engine.segments if segment.span.parameter == number]
    engine.comm.meet(f"full_optimizer_state, {name}")
    with labels.collective("control"):
        facts_of_ranks = ranks_of(engine).each(lambda: states_of(name, segments[0], optimizer) if segments else {})
    state = {key: fact for facts in facts_of_ranks for key, fact in facts.items()}
    for key, fact in state.items():
        if not is_elements(fact):
            state[key] = decode(fact)
            continue
        block = fact.get("block", 1)
        flat = torch.zeros(-(-parameter.numel() // block), dtype=DTYPES[fact["elements"]], device=parameter.device)
        for segment in segments:
            part, start = flattened(optimizer.state[segment.tensor][key]), segment.span.start // block
            flat[start : start + part.numel()].copy_(part)
        engine.comm.sum(flat.view(torch.uint8))  # all other ranks' bytes are zero
        state[key] = flat if block > 1 else engine.orders[parameter].view(flat)
    return state


def _own_tensors(engine: ShardedEngine) -> dict[str, torch.Tensor]:
    """Returns this rank's live tensors that training continues from, by name; sharded frozen ones are in units."""
    shards = {f"unit {unit.name}": unit.parameter_shard for unit in engine.gathered_units()}
    for piece in engine.placement.all_ranges():
        # the first range has its unit's name: the unit's parameter shard is the range's rounded values
        shards[f"unit {piece.unit.name}" + (f" from {piece.start}" if piece.start else "")] = piece.master
    frozen = {} if engine.gathered_units() else whole_frozen(engine)
    return {**shards, **frozen, **dict(engine.module.named_buffers())}


def _orders(engine: ShardedEngine) -> dict[str, tuple[int, ...]]:
    orders = {name: engine.orders[p] for name, p in engine.module.named_parameters() if p in engine.orders}
    return {name: order.dims for name, order in orders.items() if not order.is_row_major}


class TemporaryWeights:
    """`weights` for the module of `engine`, by name. Raises ValueError for weights that do not fit it."""

    def __init__(self, engine: ShardedEngine, weights: Mapping[str, Any]) -> None:
        if not isinstance(weights, Mapping):
            kind = type(weights).__name__
            raise ValueError(f"weights: it is a {kind}; give tensors by name, as module.state_dict() returns them")
        self._engine = engine
        parameters = dict(engine.module.named_parameters(remove_duplicate=False))
        buffers = dict(engine.module.named_buffers(remove_duplicate=False))
        tensors = {name: value for name, value in weights.items() if isinstance(value, torch.Tensor)}
        for name, value in tensors.items():
            _check(name, value, parameters.get(name, buffers.get(name)))
        ours = {name: p for name, p in parameters.items() if p in engine.orders}
        buffers |= {name: p for name, p in parameters.items() if name not in ours}  # that initialize() was to ignore
        self._parameters = {ours[name]: value for name, value in tensors.items() if name in ours}
        self._buffers = [(buffers[name], value) for name, value in tensors.items() if name in buffers]
        self._put_back: list[Callable[[], object]] = []
        self._put_sources_back: Callable[[], object] = lambda: None

    @in_normal_mode
    def put_in(self) -> None:
        """Puts the module's own values aside, and the given ones in their place."""
        engine = self._engine
        engine.placement.wait()
        engine.close_forwards()
        for unit in engine.gathered_units() or engine.units:
            if unit in engine.placement.ranges or self._parameters.keys() & {*engine.parameters_of(unit)}:
                self._put_back.append(unit.put_aside())
        sites = [(module._buffers, dict(module._buffers)) for module in engine.module.modules()]
        self._put_back += [partial(own.update, before) for own, before in sites]
        tensors = [p for p in whole_frozen(engine).values() if p in self._parameters]
        tensors += [p for p, _ in self._buffers if isinstance(p, nn.Parameter)]
        for tensor in [*tensors, *engine.module.buffers()]:
            category = labels.PARAMETERS if isinstance(tensor, nn.Parameter) else labels.BUFFERS
            copy = labels.label(tensor.detach().to("cpu", copy=True), category, tier=labels.HOST)
            self._put_back.append(partial(put, tensor, copy))
        self._put_sources_back = engine.comm.put_aside()
        engine.placement.masters_follow = False
        with torch.no_grad():
            for parameter, value in self._parameters.items():
                engine.store(parameter, value)
        for buffer, value in self._buffers:
            put(buffer, value)
        engine.send_parameters()

    @in_normal_mode
    def put_back(self) -> None:
        """Restores the module's own values on all ranks; collective."""
        engine = self._engine
        engine.settle()
        engine.placement.wait()
        with torch.no_grad():
            for restore in self._put_back:
                restore()
        engine.placement.masters_follow = True
        engine.after_load()
        self._put_sources_back()


def _check(name: str, value: torch.Tensor, own: nn.Parameter | torch.Tensor | None) -> None:
    if own is None:
        raise ValueError(
            f"{name}: the module has no parameter or buffer of this name; the names are those of its state_dict (for"
            " torch's AveragedModel give `averaged.module.state_dict()`)"
        )
    if value.shape != own.shape or value.is_meta or value.layout is not torch.strided:
        what = f"{tuple(value.shape)}, {value.layout}, on {value.device}"
        raise ValueError(f"{name}: it is of shape {what}; give a dense tensor of shape {tuple(own.shape)} with values")
    if isinstance(own, nn.Parameter) and not (
        value.is_floating_point() if own.dtype in TRAINED else value.dtype == own.dtype
    ):
        wanted = "a floating dtype" if own.dtype in TRAINED else f"its own, {own.dtype}"
        raise ValueError(f"{name}: its dtype is {value.dtype}; give values of {wanted}")
