"""How gradients get from autograd into buckets, and which buckets are in flight.

    arrive    autograd has computed a gradient: it is written into the buckets that hold a piece of it, and dropped
    reduce    the buckets that the stage calls due are sent; the next one fills meanwhile
    wait      oldest first, when too many are in flight, at the end of a backward, or before a second gradient

The order is decided here; bucket.py has the buffers, and the stages allocate and free their memory.

[Note: stand-ins]
From backward to step the engine holds the gradients, and a parameter's `.grad` is a stand-in of its shape and dtype,
without memory:

    dropped     `module.zero_grad()`, also of a submodule, or `p.grad = None`: the engine drops that gradient
    used        clip_grad_norm_, GradScaler.unscale_, p.grad.norm(), ...: an error, since there are no values
    replaced    `p.grad = ...`: an error at the next backward or step

The optimizer's first tensor has one, too, for callers that look for gradients in the optimizer.

[Note: a plain backward]
`engine.backward` begins and ends by itself. The program may also start one, as in plain torch: loss.backward() or
torch.autograd.backward().

    begin    a gradient comes to an output of the module's forward, or to a parameter, and parameters will get theirs
    finish   called by autograd at the end of the graph task, before loss.backward() returns
    abandon  the graph task was freed without that call: an exception has ended it

torch.autograd.grad gives no parameter a gradient, and begins nothing.

torch-private names, tested: `_make_wrapper_subclass`, `queue_callback` of the execution engine,
`_will_engine_execute_node`, and `_backward_hooks` and `_post_accumulate_grad_hooks` of parameters.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.utils import _pytree as pytree

from .. import labels
from ..bucket import GradientBucket
from ..comm.base import Handle
from ..engine import ShardedEngine
from ..layout import Piece
from ..modules.wrapping import NO_TASK, TiedName, graph_task, inside_backward, names_of_tied, tensors_that_require_grad
from ..parameters.access import as_they_are
from ..units.unit import Unit

REDUCTIONS_IN_FLIGHT = 1
"""Reductions that may run while the next unit fills, if their send buffers exist only for them."""

HOW = (
    "to read or change gradients use engine.clip_grad_norm_(), engine.full_gradient(name), engine.gradient_norms() or"
    " engine.gradient_segments() (docs/how-to/gradients.md)"
)


class StandIn(torch.Tensor):
    """A stand-in for the gradient of `parameter_name`. `zeroed`: names of gradients that were set to zero. `_added`: a
    gradient that autograd added to it before the engine's backward had begun, for example a weight penalty's.
    """

    parameter_name: str
    zeroed: set[str]
    _added: torch.Tensor | None = None

    @staticmethod
    def of(tensor: torch.Tensor, name: str, zeroed: set[str]) -> StandIn:
        """Returns a new stand-in for the gradient of `tensor`."""
        stand_in: StandIn = torch.Tensor._make_wrapper_subclass(
            StandIn, tensor.shape, strides=tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
        stand_in.parameter_name, stand_in.zeroed = name, zeroed
        return stand_in

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        stand_ins = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, StandIn)]
        name, first = func.overloadpacket.__name__, stand_ins[0]
        if name in ("zero_", "_foreach_zero_"):
            for stand_in in stand_ins:
                stand_in.zeroed.add(stand_in.parameter_name)
            return args[0] if name == "zero_" else None
        if name == "add_" and inside_backward():
            first._added = args[1]
            return args[0]
        if name == "_amp_foreach_non_finite_check_and_unscale_":
            raise RuntimeError(
                f"{first.parameter_name}: a GradScaler finds no gradients here; give initialize()"
                f" loss_scaling=zerobench.zero.LossScaling(); {HOW}"
            )
        raise RuntimeError(f"{first.parameter_name}: its gradient is in the engine's shards, not in .grad; {HOW}")

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        """Returns no inner tensors, so that instruments that count memory find none."""
        return [], self.parameter_name

    @staticmethod
    def __tensor_unflatten__(_inner: Any, _name: str, *_: Any) -> StandIn:
        raise RuntimeError("a gradient's stand-in cannot be copied")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        name = self.parameter_name
        return f"<the gradient of {name}, in the engine's shards: engine.full_gradient({name!r})>"


class StandIns:
    """The stand-ins of one engine. `drop`: drops the gradients of parameters, by number.

    `_made`    by parameter number, created once
    `_put`     those that are in `.grad` now
    `_zeroed`  names of the gradients that have been set to zero
    """

    def __init__(self, engine: ShardedEngine, drop: Callable[[set[int]], object]) -> None:
        self._engine, self._drop = engine, drop
        self._made: dict[int, StandIn] = {}
        self._put: dict[int, StandIn] = {}
        self._zeroed: set[str] = set()
        self._of_optimizer: StandIn | None = None

    def put(self) -> None:
        """Puts a stand-in into `.grad` for each gradient of a finished backward."""
        engine = self._engine
        for i in engine.update.used - self._made.keys():
            self._made[i] = StandIn.of(engine.trainable[i], engine.names[i], self._zeroed)
        self._zeroed.clear()
        self._put = {i: self._made[i] for i in engine.update.used}
        with as_they_are():
            for i, stand_in in self._put.items():
                engine.trainable[i].grad = stand_in
        if not engine.update.is_running:  # during a forward, in a thread, with gradients of its own
            for segment in engine.update.segments[:1]:
                if self._of_optimizer is None:
                    self._of_optimizer = StandIn.of(segment.tensor, "optimizer", set())
                segment.tensor.grad = self._of_optimizer

    def take_away(self) -> None:
        """Removes the stand-ins before a backward or the optimizer would find them."""
        with as_they_are():
            for i in self._put:
                self._engine.trainable[i].grad = None
        self._put = {}
        if self._engine.update.is_running:
            return  # in a thread, which sets and drops gradients of its own there: not even to be read meanwhile
        for segment in self._engine.update.segments[:1]:
            if segment.tensor.grad is self._of_optimizer:
                segment.tensor.grad = None

    @contextmanager
    def away(self) -> Iterator[None]:
        """Takes them away; after an error they are back, so that the caller can still drop gradients."""
        self.take_away()
        try:
            yield
        except BaseException:
            self.put()
            raise

    def follow_edits(self) -> None:
        """Drops gradients whose stand-ins were dropped. Raises RuntimeError for a stand-in that was replaced."""
        dropped: set[int] = set()
        with as_they_are():
            for i, parameter in enumerate(self._engine.trainable):
                grad, stand_in = parameter.grad, self._put.get(i)
                is_zeroed = bool(self._zeroed) and self._engine.names[i] in self._zeroed
                if grad is stand_in and not (is_zeroed and stand_in is not None):
                    continue
                if stand_in is None or not (grad is None or is_zeroed):
                    raise RuntimeError(
                        f"{self._engine.names[i]}: something was assigned to its .grad, which the engine does not read;"
                        " use engine.set_full_gradient(name, value) after backward (docs/how-to/gradients.md)"
                    )
                dropped.add(i)
                parameter.grad = None
        if not dropped:
            return
        if dropped == self._put.keys():
            self._engine.zero_grad()
            return
        self._put = {i: stand_in for i, stand_in in self._put.items() if i not in dropped}
        self._zeroed.clear()
        self._drop(dropped)


class PlainBackward:
    """The backward that the program has started itself, if one runs.

    `_end`        autograd's call at its end, which lives as long as the graph task; None if none runs
    `_last_seen`  number of the last graph task for which `begin` ran, so that each is examined once
    """

    engine_backwards = 0
    """Running calls of `engine.backward`, of all engines."""

    def __init__(self, engine: ShardedEngine) -> None:
        self._engine = engine
        self._end: weakref.ref[Callable[[], None]] | None = None
        self._last_seen = NO_TASK

    @property
    def is_running(self) -> bool:
        """True from `begin` to the end, also an early one."""
        return self._end is not None

    def begin(self) -> None:
        """Begins a backward that gives parameters gradients. Raises RuntimeError for one that cannot be followed."""
        previous, self._last_seen = self._last_seen, graph_task()
        if previous == self._last_seen or not will_accumulate(self._engine.trainable):
            return
        if self.engine_backwards:
            raise RuntimeError(
                "engine.backward of another engine came to this one's parameters: call loss.backward(), which trains"
                " both, or freeze this one's model by requires_grad_(False)"
            )
        if self._engine.update.scaling.scaler.policy is not None:
            raise RuntimeError(
                "call engine.backward(loss), not loss.backward(): the engine scales losses (loss_scaling=), and this"
                " one is not scaled"
            )
        if torch.is_grad_enabled():
            raise RuntimeError(
                "loss.backward(create_graph=True): the engine's gradients have no graph; use"
                " torch.autograd.grad(create_graph=True) for a penalty, and then loss.backward()"
            )
        self._engine.begin_backward()
        end = partial(self._finish)
        self._end = weakref.ref(end, self._abandon)
        # autograd now holds the only strong reference to `end`: if the graph task dies without calling it, the
        # weakref's callback runs `_abandon`
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def _finish(self) -> None:
        self._end = None
        try:
            self._engine.finish_backward()
        except BaseException:
            self._engine.abandon_backward()
            raise

    def _abandon(self, end: Any) -> None:
        if end is self._end:
            self._end = None
            self._engine.abandon_backward()


def will_accumulate(parameters: Iterable[nn.Parameter]) -> bool:
    """Returns True if the running graph task adds to the `.grad` of any of `parameters`."""
    with as_they_are():
        nodes = (get_gradient_edge(p).node for p in parameters if p.requires_grad)
        try:
            return any(torch._C._will_engine_execute_node(node) for node in nodes)
        except RuntimeError:  # torch.autograd.grad returns the gradient of one of them
            return False
        except AttributeError:  # inside of a transform of torch.func, which gives parameters no gradient
            return False


class ArrivalHook:
    """The engine's hook on a parameter, called when autograd has computed its gradient, after all hooks of the user."""

    def __init__(self, parameter: nn.Parameter, arrive: Callable[[torch.Tensor], None]) -> None:
        self._parameter = parameter
        self._handle = parameter.register_post_accumulate_grad_hook(arrive)

    @property
    def is_only_hook(self) -> bool:
        """True if only the engine uses the parameter's gradient."""
        hooks: Any = self._parameter._post_accumulate_grad_hooks
        return not self._parameter._backward_hooks and len(hooks) == 1

    def go_last(self) -> None:
        """Moves the engine's hook behind hooks that were registered later, so that they receive the gradient too."""
        hooks: Any = self._parameter._post_accumulate_grad_hooks
        if next(reversed(hooks)) != self._handle.id:
            hooks[self._handle.id] = hooks.pop(self._handle.id)


class GradientFlow:
    """The gradients of one engine on this rank.

    `pieces`         for each trainable parameter: the units that hold it, with their pieces
    `synchronizing`  True if backwards reduce, False if they keep their gradients here (no_sync)
    `plain`          the backward that the program has started itself, if one runs
    """

    # weakly: the flow, of any engine, that launched last
    _last_sender: Callable[[], GradientFlow | None] = staticmethod(lambda: None)

    def __init__(self, engine: ShardedEngine) -> None:
        self._engine = engine
        # reductions: (bucket, its handle, where its mean lands)
        self.in_flight: deque[tuple[GradientBucket, Handle, torch.Tensor]] = deque()
        self.stand_ins = StandIns(engine, self.drop)
        self.plain = PlainBackward(engine)
        self._in_engine_backward = False  # `engine.backward` runs
        self.synchronizing = True
        self.repeats = False  # a gradient has come again in this backward, of a part recomputed re-entrantly
        self.buckets: list[GradientBucket] = []
        self.pieces: list[list[tuple[Unit, Piece]]] = []
        self._hooks: list[ArrivalHook] = []
        self.add(engine.units)

    def add(self, units: Iterable[Unit]) -> None:
        """Takes the gradients of `units`, which are new, as are their parameters in the engine's `trainable`."""
        engine, first = self._engine, len(self.pieces)
        new = list(enumerate(engine.trainable))[first:]
        self.pieces += [[] for _ in new]
        for unit in units:
            self.buckets.append(unit.gradients)
            for piece in unit.layout.pieces:
                self.pieces[piece.parameter].append((unit, piece))
                unit.gradients.expected.add(piece.parameter)
        # weakly: the garbage collector cannot see these hooks; an engine that they reference would never be freed, nor
        # its files and threads
        flow = weakref.ref(self)
        self._hooks += [ArrivalHook(parameter, partial(GradientFlow._arrive, flow, i)) for i, parameter in new]
        tied = names_of_tied(engine.module)
        for i, parameter in new:
            for module, name in tied.get(parameter, []):
                TiedName(parameter, module, name, partial(GradientFlow._take_use, flow, i))

    # -- arrive ---------------------------------------------------------------------------------------------

    @property
    def in_backward(self) -> bool:
        """True while this engine's backward runs, not another engine's or torch.autograd.grad."""
        return self._in_engine_backward or self.plain.is_running

    @contextmanager
    def in_engine_backward(self) -> Iterator[None]:
        """Around autograd's run in `engine.backward`."""
        self._in_engine_backward = True
        PlainBackward.engine_backwards += 1
        try:
            yield
        finally:
            self._in_engine_backward = False
            PlainBackward.engine_backwards -= 1

    def begin_backward(self) -> None:
        """Prepares for new gradients: drops those that the caller dropped, and makes the engine's hooks run last."""
        self.stand_ins.follow_edits()
        self.stand_ins.take_away()
        for hook in self._hooks:
            hook.go_last()

    def begin_plain(self) -> None:
        """Called when a gradient comes to the module's output, or to a parameter: begins a backward, if none runs."""
        if not self.in_backward:
            self.plain.begin()

    def hook_output(self, output: Any) -> None:
        """Hooks the output of a forward, which a backward that the program starts itself reaches first."""
        tensors = [tensor for tensor in tensors_that_require_grad(output) if tensor.grad_fn is not None]
        if tensors:
            register_multi_grad_hook(tensors, partial(GradientFlow._come_to_output, weakref.ref(self)), mode="any")

    @staticmethod
    def _come_to_output(flow: weakref.ref[GradientFlow], _gradient: torch.Tensor) -> None:
        if (self := flow()) is not None:
            self.begin_plain()

    @staticmethod
    def _arrive(flow: weakref.ref[GradientFlow], i: int, leaf: torch.Tensor) -> None:
        """Autograd is done with a parameter; `.grad` is None if all gradients were taken, or none computed."""
        if (self := flow()) is None:
            return
        gradient = leaf.grad
        if isinstance(gradient, StandIn):
            stand_in, gradient = gradient, gradient._added
            stand_in._added = None
        else:
            leaf.grad = None
        if not self._in_engine_backward:
            self.begin_plain()
        flat = None if gradient is None else self._accept(i, gradient)
        for unit, piece in self.pieces[i]:
            if flat is not None:
                self._fill(unit.gradients, piece, flat)
            self.repeats = self.repeats or i in unit.gradients.arrived
            unit.gradients.arrived.add(i)
            if self.synchronizing:
                self.reduce(self._engine.due(unit))

    @staticmethod
    def _take_use(flow: weakref.ref[GradientFlow], i: int, gradient: torch.Tensor) -> torch.Tensor | None:
        """Takes the gradient of one use of a tied parameter, or returns it for autograd to add to the sum."""
        if (self := flow()) is None:
            return gradient
        self.begin_plain()
        if not (self.in_backward and self._hooks[i].is_only_hook and self._engine.trainable[i].requires_grad):
            return gradient
        flat = self._accept(i, gradient)
        for unit, piece in self.pieces[i]:
            self._fill(unit.gradients, piece, flat)
        return None

    def _accept(self, i: int, gradient: torch.Tensor) -> torch.Tensor:
        """Returns the gradient of parameter `i`, flat, and marks it as used. Raises an error if it is not accepted."""
        engine = self._engine
        name = engine.names[i]
        labels.label(gradient, labels.GRADIENTS, name)
        if gradient.is_sparse:
            raise ValueError(f"{name}: its gradient is sparse, which flat buffers do not hold")
        engine.update.used.add(i)
        return engine.orders[engine.trainable[i]].flatten(gradient)

    def _fill(self, bucket: GradientBucket, piece: Piece, flat: torch.Tensor) -> None:
        if bucket.is_in_flight:  # a second gradient, after the bucket was sent: it goes in a round of its own
            self.wait_all()
        if bucket.check is not None:
            bucket.check()
        if not bucket.filled:
            bucket.open(sends=self.synchronizing)
        bucket.fill(piece, flat[piece.start : piece.stop])

    # -- launch and wait --------------------------------------------------------------------------------------

    def reduce(self, units: Iterable[Unit]) -> None:
        """Starts the reductions of `units`, in this order; waits for the oldest if too many are in flight."""
        comm = self._engine.comm
        for unit in units:
            bucket = unit.gradients
            if bucket.is_local:
                continue
            # two engines may share a backward: their threads would pair messages of units of the same name and size
            last = GradientFlow._last_sender()
            if last is not None and last is not self:
                last.wait_all()
            GradientFlow._last_sender = weakref.ref(self)
            # before this one takes memory
            while not bucket.reduces_in_place and len(self.in_flight) >= REDUCTIONS_IN_FLIGHT:
                self._wait_oldest()
            # a bucket without gradients is sent as zeros: all ranks send the same buckets
            full, into = bucket.prepare()
            comm.launches.add("reduction", unit.name)
            if bucket.all_reduces:  # as other systems do: every slice is summed, at twice the volume
                handle = comm.all_reduce(full, unit.name)
            else:
                handle = comm.reduce_scatter(full, unit.name, into, unit.layout.sizes)
            bucket.is_in_flight = True
            self.in_flight.append((bucket, handle, unit.own_slice(full) if into is None else into))

    def wait_all(self) -> None:
        """Waits for all reductions, and for copies of means to other tiers."""
        while self.in_flight:
            self._wait_oldest()
        self._engine.placement.release_copied()

    def _wait_oldest(self) -> None:
        """Waits in launch order, which is equal on all ranks."""
        bucket, handle, mean = self.in_flight.popleft()
        handle.wait()
        if bucket.divisor_after != 1:
            mean.div_(bucket.divisor_after)
        bucket.store(mean)

    # -- around a backward and a step -------------------------------------------------------------------------

    def end_backward(self) -> None:
        """Clears arrivals, which do not apply to the next backward; `.grad` shows which gradients exist."""
        for bucket in self.buckets:
            bucket.arrived.clear()
        self.repeats = False
        self.stand_ins.put()

    def drop(self, numbers: set[int]) -> None:
        """Drops this rank's gradients of these parameters."""
        self.wait_all()
        for number in numbers:
            for unit, piece in self.pieces[number]:
                unit.gradients.filled.discard(piece)
        # not reduced yet: left out when the bucket is sent, since `filled` lacks them. Reduced: zeroed in the shard.
        # `used` is set meanwhile, because a file tier makes only used ranges readable
        update = self._engine.update
        dropped = {s for s in update.segments if s.span.parameter in numbers and s.bucket.is_reduced}
        for segment in dropped:
            segment.used = True
        for segment in update.visited(dropped.__contains__, edits=True):
            segment.bucket.drop(segment.span.offset, segment.span.numel)
        for segment in dropped:
            segment.used = False
        update.drop(numbers)

    def release(self) -> None:
        """Releases all buckets: the optimizer has used the gradients, or they are dropped."""
        for bucket in self.buckets:
            bucket.release()

    def check_reduced(self, what: str) -> None:
        """Raises RuntimeError if gradients were kept back by no_sync and never reduced."""
        self.stand_ins.follow_edits()
        if any(bucket.filled and not bucket.is_local for bucket in self.buckets):
            raise RuntimeError(f"{what}: the last backward was under no_sync; run one outside it before {what}()")
