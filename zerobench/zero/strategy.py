"""The engine's interface, and the events of a unit that the stages implement.

[Note: the life of a unit]

    adopt                 the stage cuts the parameters into units and hands the optimizer its segments
    before forward        the unit's full parameters must be present                    (stage 3: unshard)
    after forward         they are not read for a while                                 (stage 3: reshard)
    before backward       they must be present again                                    (stage 3: unshard)
    gradient arrived      autograd has finished one parameter's gradient: it moves into the unit's bucket
    gradients ready       the bucket has them all: reduce over ranks, each keeps its shard (bucket.py)
    after update          the shards have new parameters                                (stages 1 and 2: all-gather)

A training step is `loss = engine(*inputs)`, `engine.backward(loss)`, `engine.step()`, or as in plain torch
`loss.backward()` and `optimizer.step()`. Gradients are means over the ranks. `step` consumes them; `zero_grad` drops
any that are left.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import nn, optim

from . import labels
from .bucket import Arena, Heap
from .checkpoint.state_dict import StateMixin
from .comm.base import Comm
from .gradients.access import GradientMixin
from .gradients.flow import GradientFlow
from .modules.wrapping import Hook, in_normal_mode
from .offload import placement_for
from .optim.delayed_update import DelayedUpdate
from .optim.segments import OWNED, owned_by, owners_of, step_by
from .optim.update import Update
from .options import Options
from .parameters import meta_init
from .parameters.access import as_they_are
from .precision import LossScaler
from .units.unit import Unit
from .writes import Writes, register_load_hooks

SHOWN = {
    labels.PARAMETERS: "parameters",
    labels.GRADIENTS: "gradients",
    labels.MASTER: "masters",
    labels.OPTIMIZER: "optimizer states",
}
"""Category of an engine's tensors -> its name in the engine's description."""


class Strategy(GradientMixin, StateMixin):
    """A model and its optimizer under one ZeRO stage. Created by `zerobench.initialize`, by its `name` there."""

    name = ""

    def __init__(self, module: nn.Module, optimizer: optim.Optimizer, comm: Comm, options: Options) -> None:
        self.module = module
        self.optimizer = optimizer
        self.comm = comm
        ignored = {*options.ignored_parameters}
        named = {p: name for name, p in module.named_parameters() if p not in ignored}
        self.names = [name for p, name in named.items() if p.requires_grad]
        self.trainable = [p for p in named if p.requires_grad]
        self.frozen = [p for p in named if not p.requires_grad]
        self.options = options = options.resolved(self.trainable, comm.size)
        self.units: list[Unit] = []
        self.steps = 0
        self.running = 0  # forwards of the model that are running, and methods in their place
        self.orders = {p: order for p, order in meta_init.memory_orders(module).items() if p in named}
        self.owners = owners_of(owned_by(optimizer), self.trainable, comm.size)
        self._heap = Arena() if options.arena else Heap()
        self.placement = placement_for(options.offload, options.device_of(module))
        self._buffers_due = True
        on_meta = meta_init.on_meta(module)
        if on_meta:
            meta_init.use_placeholders(module, options.device or torch.device("cpu"))
        # of a model on the meta device no values are sent: meta_init.fill draws the same ones on every rank
        self.broadcast_initial = (lambda tensor: None) if on_meta else comm.broadcast
        with torch.no_grad():
            self.adopt()
            if on_meta:
                meta_init.fill(module, self.store, self.read, comm, options.initial_dtype, options.initial_device)
            for buffer in module.buffers():
                comm.broadcast(buffer)
            for unit in self.units:
                unit.heap = self._heap
                self.placement.adopt(unit)
        self.gradients = GradientFlow(self)
        after = options.delayed_after
        self.update = (Update if after is None else partial(DelayedUpdate, after))(
            optimizer, comm, self.units, self.placement, self.trainable, self.names, self.orders, options.tile_bytes,
            options.loss_scaling,
        )  # fmt: skip
        self.writes = Writes(self)
        # a lost write stops the update on all ranks
        self.update.fault, self.update.raise_fault = self.writes.take_lost, self.writes.raise_lost
        register_load_hooks(self, self.writes)
        module.register_forward_hook(Hook(lambda _module, _inputs, output: self.gradients.hook_output(output)))
        optimizer.zero_grad = self.zero_grad  # type: ignore[method-assign]  # scripts drop gradients by either
        step_by(optimizer, self)

    # -- the interface --------------------------------------------------------------------------------

    def __call__(self, *inputs: Any, **named_inputs: Any) -> Any:
        """Runs the module's forward. First copies rank 0's buffers to all ranks if DDP would: if the last forward's
        gradients are reduced. Each forward inside one torch.autocast casts again, so updates may come between them.
        """
        return self.run_forward(partial(self.module, *inputs, **named_inputs))

    def register_forward_method(self, module: nn.Module, name: str) -> None:
        """Makes another method of `module`, the model or a part of it, work like its forward, such as "generate": its
        parameters are present, and its result can be trained. Corresponds to FSDP2's register_fsdp_forward_method.

        Raises ValueError for a module that is not the model's, and for a method that it does not have.
        """
        kind = type(module).__name__
        if not any(module is each for each in self.module.modules()):
            raise ValueError(f"register_forward_method: the {kind} is neither engine.module nor a part of it")
        method = getattr(module, name, None)
        if not isinstance(method, MethodType):
            raise ValueError(f"register_forward_method: {kind} has no method {name!r}")
        engine, original, registered = weakref.ref(self), method.__func__, weakref.ref(module)

        @wraps(original)
        def as_forward(own: nn.Module, *inputs: Any, **named_inputs: Any) -> Any:
            living, run = engine(), partial(original, own, *inputs, **named_inputs)
            if living is None or registered() is not own:
                return run()
            output = living.run_registered(own, run)
            living.gradients.hook_output(output)
            return output

        setattr(module, name, MethodType(as_forward, module))  # of a copy of the module, a method of the copy

    def run_registered(self, module: nn.Module, run: Callable[[], Any]) -> Any:
        """Runs a registered method of `module`."""
        return self.run_forward(run) if module is self.module else run()

    def run_forward(self, run: Callable[[], Any]) -> Any:
        """Runs the forward of the model, or a method that stands for it."""
        if not self.running:
            Hook(self._before_forward)()
        self.running += 1
        try:
            return run()
        finally:
            self.running -= 1

    def _before_forward(self) -> None:
        # autocast's cached casts may predate an update; and a cast that several forwards share would pass its gradient
        # on only after the backward of all of them
        torch.clear_autocast_cache()
        with as_they_are():
            self.writes.check_addresses()
            self.writes.follow()
            unfrozen = [p for p in self.update.waiting if p.requires_grad] if torch.is_grad_enabled() else []
        if unfrozen:
            self._train(unfrozen)
        if self.options.broadcast_buffers and self._buffers_due:
            with torch.no_grad():
                for buffer in self.module.buffers():
                    self.comm.broadcast(buffer)
        # training: the pending delayed update starts now; in evaluation, and under temporary weights, only wait for
        # transfers
        if torch.is_grad_enabled() and self.placement.masters_follow:
            self.update.launch()
        else:
            self.settle()
        self._buffers_due = torch.is_grad_enabled() and self.gradients.synchronizing

    def _train(self, unfrozen: list[nn.Parameter]) -> None:
        """Gives parameters of the optimizer's groups that were frozen until now gradients and masters; collective."""
        names = {p: name for name, p in self.module.named_parameters()}
        name = names[unfrozen[0]]
        self.comm.meet(f"unfreezing of {name} and {len(unfrozen) - 1} others")
        self.update.check_writable(name)
        if self.writes.are_kept:
            raise RuntimeError(f"{name}: it is unfrozen; leave `with engine.full_parameters()` before the next forward")
        self.writes.check()
        first_unit, first = len(self.units), len(self.trainable)
        owned = {p for p in unfrozen if self.update.waiting[p][0].get(OWNED)}
        self.owners |= owners_of(owned, unfrozen, self.comm.size)
        self.trainable += unfrozen
        self.names += [names[p] for p in unfrozen]
        self.frozen = [p for p in self.frozen if p not in self.update.waiting or not p.requires_grad]
        with torch.no_grad():
            self.adopt_unfrozen(range(first, len(self.trainable)))
            for unit in self.units[first_unit:]:
                unit.heap = self._heap
                self.placement.adopt(unit)
            self.gradients.add(self.units[first_unit:])
            self.update.add(self.units[first_unit:])
            self.writes.start()

    def _check_unfrozen(self) -> None:
        """Raises ValueError if a parameter that the engine took for frozen when the forward ran has a gradient."""
        unfrozen = next((p for p in self.frozen if p.requires_grad and p.grad is not None), None)
        if unfrozen is not None:
            name = next(name for name, p in self.module.named_parameters() if p is unfrozen)
            way = "call engine(...) rather than engine.module(...)"
            if unfrozen not in self.update.waiting:
                way = "add it with engine.optimizer.add_param_group before the forward"
            raise ValueError(
                f"{name}: it was frozen before, and its gradient has come without the engine, which would not train it;"
                f" {way}"
            )

    @in_normal_mode
    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Backpropagates `loss`, a scalar, and reduces the gradients over the ranks; applies loss scaling, if any.

        `retain_graph`: keeps the graph, so that stages 1 and 2 can go through it again before the next step.
        """
        # 1 gradients that the caller has dropped since the last backward go first: new ones are not added to them
        self.begin_backward()
        # 2 autograd: gradients come into buckets, and complete buckets are sent meanwhile
        try:
            with self.gradients.in_engine_backward():
                self.update.scaling.scaler.scaled(loss).backward(retain_graph=retain_graph)
            # 3 the rest is sent, and each rank has its shard of the mean
            self.finish_backward()
        except BaseException:
            self.gradients.end_backward()  # what has come so far can be dropped
            raise

    def abandon_backward(self) -> None:
        self.gradients.end_backward()  # what has come so far can be dropped

    def raise_if_weights_are_temporary(self, what: str) -> None:
        if not self.placement.masters_follow:
            raise RuntimeError(
                f"{what}: inside `with engine.temporary_weights()` the module has other weights for an evaluation;"
                f" call {what} outside of it"
            )

    def begin_backward(self) -> None:
        self.raise_if_weights_are_temporary("backward")
        self.gradients.begin_backward()
        self.update.begin()

    def finish_backward(self) -> None:
        if self.gradients.synchronizing:
            self.gradients.reduce(self.left_over())
            self.gradients.wait_all()
        self.gradients.end_backward()

    @in_normal_mode
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        """One update. Consumes the gradients. Raises RuntimeError for gradients that were never reduced.

        `closure` first computes the gradients, with `backward`, and returns the loss. All ranks skip if one overflowed.
        """
        self.raise_if_weights_are_temporary("step")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.gradients.check_reduced("step")
        self._check_unfrozen()
        self.settle()  # a unit that was not used since the last update may still be on its way
        self.writes.follow_all(updates=True)
        with self.gradients.stand_ins.away(), torch.no_grad():
            # 1 which parameters have gradients on any rank
            self.update.agree()
            # 2 update the masters, and round them to the parameters, tile by tile, if no gradient overflowed
            updated = self.update.run()
            if updated:
                self.placement.settle()
            with as_they_are():
                torch.autograd.graph.increment_version(self.trainable)  # a backward through an older forward must raise
                self.writes.note()  # before gathers are in flight, which read the same memory
            if updated:
                # 3 send the new parameters to all ranks that hold them whole
                self.after_update()
        # 4 consume
        self.zero_grad()
        self.steps += 1
        return loss

    @property
    def scaler(self) -> LossScaler:
        """The loss scaling, with its values on the device."""
        return self.update.scaling.scaler

    @property
    def loss_scale(self) -> float:
        """The factor by which `backward` multiplies the loss; 1.0 without scaling. Reading it waits for the device."""
        return float(self.update.scaling.scaler.scale)

    @property
    def skipped(self) -> bool:
        """True if the last step was skipped because gradients overflowed. Reading it waits for the device."""
        return bool(self.update.scaling.scaler.skipped)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients that `step` has not consumed. `set_to_none` exists for compatibility with torch."""
        self.gradients.wait_all()
        self.gradients.stand_ins.take_away()
        self.update.forget()
        self.gradients.release()
        self.forget()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside keep their gradients on this rank; the next one outside reduces their sum."""
        before, self.gradients.synchronizing = self.gradients.synchronizing, False
        try:
            yield
        finally:
            self.gradients.synchronizing = before

    def held_tensors(self) -> Iterator[labels.Held]:
        for parameter in [] if self.gathered_units() else self.frozen:  # that no unit holds
            yield labels.Held(parameter.data, labels.PARAMETERS, "frozen")
        for segment, gradient in self.update.pending_gradients():
            name = f"{self.names[segment.span.parameter]} pending"
            yield labels.Held(gradient, labels.GRADIENTS, name, segment.tier)
        for unit in self.gathered_units() or self.units:
            yield from unit.held_tensors()
        yield from self.placement.held_tensors()

    def label_held(self) -> None:
        """Labels all tensors of the engine again, for an observer that registered after `initialize`."""
        for held in self.held_tensors():
            labels.label(*held)
        self.placement.label_files()

    def extra_state(self) -> dict[str, Any]:
        scaler = {} if self.options.loss_scaling is None else {"loss_scaler": self.update.scaling.scaler.state()}
        return scaler | self.update.describe_pending()

    def load_extra_state(self, extra: dict[str, Any]) -> None:
        if self.options.loss_scaling is not None and "loss_scaler" in extra:
            self.update.scaling.scaler.load(extra["loss_scaler"])
        self.update.restart(extra.get("steps", 0))

    # -- the module's methods that an engine has, and errors for methods that it does not support ----------

    def parameters(self) -> Iterator[nn.Parameter]:
        """The module's parameters. Under zero3 shapes are full, and values are present while a unit is gathered."""
        return self.module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The module's parameters with their names."""
        return self.module.named_parameters()

    def buffers(self) -> Iterator[torch.Tensor]:
        """The module's buffers, whole on every rank."""
        return self.module.buffers()

    @property
    def training(self) -> bool:
        """The module's training mode."""
        return self.module.training

    def train(self, mode: bool = True) -> Any:
        """Sets the module's training mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Any:
        """Sets the module's evaluation mode."""
        return self.train(False)

    def __repr__(self) -> str:
        labeled: list[tuple[Any, str]] = [(parameter, labels.PARAMETERS) for parameter in self.module.parameters()]
        labeled += [(held.tensor, held.category) for held in self.held_tensors()]
        for state in self.optimizer.state.values():
            labeled += [(value, labels.OPTIMIZER) for value in state.values()] if isinstance(state, dict) else []
        # in memory, in all tiers; each storage counts once
        category_of = {tensor.untyped_storage(): category for tensor, category in labeled if torch.is_tensor(tensor)}
        sizes: Counter[str] = Counter()
        for storage, category in category_of.items():
            sizes[category] += storage.nbytes()
        parts = ", ".join(f"{name} {sizes[category]:,}" for category, name in SHOWN.items())
        psi = sum(p.numel() for p in self.trainable)
        return (
            f"{self.name} of {type(self.module).__name__}: ψ = {psi:,}, N = {self.comm.size}, rank {self.comm.rank}"
            f" holds {sum(sizes[category] for category in SHOWN):,} bytes now ({parts})"
        )

    def __deepcopy__(self, _: Any) -> NoReturn:
        raise TypeError(
            "deepcopy: an engine has a part on every rank and cannot be copied; copy engine.module inside `with"
            " engine.full_parameters()`, which gives a plain module, or keep engine.state_dict()"
        )

    def __reduce_ex__(self, _: Any) -> NoReturn:
        raise TypeError(
            "an engine cannot be pickled or copied: it has a part on every rank; use engine.save(path),"
            " engine.state_dict() or engine.full_state_dict()"
        )

    @property
    def param_groups(self) -> NoReturn:
        """Raises AttributeError: an engine is not an optimizer, and torch's GradScaler would mistake it for one."""
        raise AttributeError(
            "param_groups: use engine.optimizer.param_groups; if a GradScaler asked for them: the engine scales losses"
            " itself, with loss_scaling=zerobench.zero.LossScaling()"
        )

    @property
    def join_hook(self) -> NoReturn:
        """Raises AttributeError: torch's Join asks for it, and an engine cannot step on only some ranks."""
        raise AttributeError(
            "join_hook: torch's Join is for unequal numbers of batches, but every rank takes part in every step of an"
            " engine; give all ranks as many batches (drop_last=True of DistributedSampler or DataLoader)"
        )
