"""Observations of one rank for a certificate: dtypes, updates, norms and collectives of each step of a watched loop.

A certificate is made from these alone. They are read with the ledger's and meter's modes off, and copies are made on
the host, so that the tables of a watch have the figures that they have without a certificate.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

import torch
from torch import nn, optim
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes

from ..probes.labeling import parts_of
from ..probes.ledger import Ledger
from ..probes.traffic import Operation, TrafficMeter, is_of_step
from ..zero.precision import dtype_name, sum_of_powers
from . import held_tensors
from .held_tensors import UpdatedPart
from .phases import WatchHook, replaced

UPDATES = 3
"""Number of first updates whose values are compared with a reference's."""

NOISE = 0.1

COLUMNS = 4093
"""A checksum sums the words of a tensor by columns; a prime, so that moved rows change the sums."""

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

UNITS = ("Linear", "Conv1D", "Conv1d", "Conv2d", "Conv3d", "Bilinear")
"""Classes of modules that autocast computes in its dtype."""

REDUCTIONS = ("all_reduce", "reduce_scatter")
"""Kinds of collectives that reduce gradients."""

Squares = dict[str, list[float]]
"""Parameter -> sum of the squares of its gradient on this rank, and their number."""


@dataclass
class PartSeen:
    """One rank's part of a parameter; dtypes are text."""

    elements: int = 0
    moment_elements: int = 0
    in_model: str = ""
    master: str = ""
    gradient: str = ""
    moments: dict[str, str] = field(default_factory=dict)
    """State -> its dtype."""
    optimizer: str = ""
    is_torchs: bool = True
    is_copy: bool = False
    """If true, the optimizer holds another tensor of the parameter's shape, such as a master."""
    updates: list[int] = field(default_factory=list)
    """Per step, the updates with one and the same gradient."""
    gradients: int = 0
    lost: int = 0
    """Updates in which the optimizer lacked a gradient that backward had left on the parameter."""
    changes: int = 0
    """Steps that changed its value."""
    reach: float = math.inf
    """For a part that never changed: the largest change that an update should have made, in half ULPs."""
    not_finite: int = 0
    """The first step after which a value is not finite; 0 if there is none."""
    rates: list[float] = field(default_factory=list)
    """The learning rate of each update."""
    lines: dict[str, str] = field(default_factory=dict)
    """masters, moments or gradients -> the line that made them."""


@dataclass
class StepSeen:
    """One step on one rank. Per micro-batch, then for the rest of the step: `moved`: kind -> elements, `calls`: number
    and payload bytes of collectives. `sent`: kind -> dtype -> payload bytes. `before`: gradients after backward;
    `at_update`: gradients that the optimizer got.
    """

    loss: float = 0.0
    scale: float = 1.0
    backwards: int = 0
    micro_batches: int = 0
    updates: int = 0
    between: int = 0
    """Micro-batches after which something other than backward changed the gradients."""
    stale: bool = False
    """Whether each backward began with a gradient of one parameter that was not 0: nobody zeroed an earlier step's."""
    schedules: int = 0
    """The most steps of one scheduler since the last update."""
    schedules_early: bool = False
    """Whether a scheduler stepped between backward and the update."""
    skipped: bool = False
    before: Squares = field(default_factory=dict)
    at_update: Squares = field(default_factory=dict)
    moved: list[dict[str, float]] = field(default_factory=list)
    calls: list[list[int]] = field(default_factory=list)
    sent: dict[str, dict[str, int]] = field(default_factory=dict)


@dataclass
class Deviation:
    """Sums of squares: of own - reference, of its movement since the beginning, of its values; largest ULP."""

    off: float
    update: float
    value: float
    ulp: int

    def joined(self, other: Deviation) -> Deviation:
        """Returns the deviation of two parts of a parameter together."""
        ulp = -1 if -1 in (self.ulp, other.ulp) else max(self.ulp, other.ulp)
        return Deviation(self.off + other.off, self.update + other.update, self.value + other.value, ulp)


@dataclass
class RankSeen:
    """Everything that one rank observed. `deviations`: parameter -> deviation, for the initial values, then after each
    update. `sizes`: elements of each whole trainable parameter. `held`: trainable parameters in a watched optimizer.
    `computes`: dtype -> modules with parameters whose output has it -> elements of the module's matrix. `values`,
    `buffers`: name -> checksum of a whole tensor, before the first step and after each step. `frozen`: parameters that
    need no gradient. `own`: parameters and buffers that DDP leaves to each rank. `lines`: kind of a collective -> the
    first line that issued it.
    """

    parts: dict[str, PartSeen] = field(default_factory=dict)
    steps: list[StepSeen] = field(default_factory=list)
    deviations: list[dict[str, Deviation]] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    held: list[str] = field(default_factory=list)
    computes: dict[str, dict[str, int]] = field(default_factory=dict)
    called: dict[str, bool] = field(default_factory=dict)
    """Modules with parameters that were called, with or without gradients."""
    replaced: list[str] = field(default_factory=list)
    """Names that another parameter of the model has since the watch began."""
    values: list[dict[str, int]] = field(default_factory=list)
    buffers: list[dict[str, int]] = field(default_factory=list)
    frozen: list[str] = field(default_factory=list)
    own: list[str] = field(default_factory=list)
    is_ddp: bool = False
    wrapper_calls: int = 0
    has_hook: bool = False
    syncs_buffers: bool = True
    lines: dict[str, str] = field(default_factory=dict)
    peak_bytes: int = 0
    failure: str = ""
    """The error after which the rank was no longer observed."""


@dataclass
class FirstUpdates:
    """Whole parameters on the host: `values`, the initial ones, then after each update, by name. `noise`: elements
    whose gradient in any of these updates is not 0 and at most NOISE of the root mean square of the tensor's.

    Such a gradient may be rounding alone (of the keys' part of a bias of attention), and Adam moves an element by the
    learning rate whatever the size of its gradient. So noise is not compared.
    """

    values: list[dict[str, torch.Tensor]] = field(default_factory=list)
    noise: dict[str, torch.Tensor] = field(default_factory=dict)

    def keep_noise(self, name: str, gradient: torch.Tensor) -> None:
        """Notes the noise in a gradient."""
        size = gradient.detach().float().abs()
        is_noise = (size > 0) & (size <= NOISE * size.square().mean().sqrt())
        earlier = self.noise.get(name)
        if earlier is not None and earlier.shape == is_noise.shape:
            is_noise = earlier | is_noise.cpu()
        self.noise[name] = _copied(is_noise)

    def of_part(self, part: UpdatedPart, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Returns a part's initial values, those after update `number`, and its noise, (numel,) each; or None."""
        if number >= len(self.values) or part.name not in self.values[number]:
            return None
        first, now = self.values[0][part.name], self.values[number][part.name]
        if now.is_complex() or part.tensor.is_complex():
            return None
        noise = self.noise.get(part.name, torch.zeros(now.shape, dtype=torch.bool))
        cuts = [cut.reshape(-1) for whole in (first, now, noise) if (cut := part.cut(whole)) is not None]
        return (cuts[0], cuts[1], cuts[2]) if len(cuts) == 3 and len(cuts[1]) == part.tensor.numel() else None


def _guarded(method: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps the error of an observation, after which the loop is no longer observed: no error reaches the loop."""

    @wraps(method)
    def observe(self: TrainingObserver, *args: Any) -> Any:
        if self.seen.failure:
            return None
        try:
            return method(self, *args)
        except Exception as error:
            self.seen.failure = f"{type(error).__name__}: {error}"
            return None

    return observe


class TrainingObserver:
    """Observes the steps of a watch. `reference` has values to compare with; without it, one rank keeps its own."""

    def __init__(
        self, model: nn.Module, engines: list[Any], optimizers: list[Any], ledger: Ledger, meter: TrafficMeter,
        reference: FirstUpdates | None, ranks: int,
    ) -> None:  # fmt: skip
        self._model, self._ledger, self._meter, self._ranks = model, ledger, meter, ranks
        self._engine = next((engine for engine in engines if held_tensors.is_ours(engine)), None)
        self._given = held_tensors.torch_optimizers(optimizers)
        self._all = held_tensors.names_in(model)
        self._names = {p: name for p, name in self._all.items() if p.requires_grad}
        self._reference, self._keeps = reference, ranks == 1 and reference is None
        self._parts: dict[int, UpdatedPart] = {}  # by the id of their key
        self._bits: dict[int, int] = {}  # checksums of parts at the end of the last step
        self._rounded: set[int] = set()  # masters that were made from a model whose values were rounded before
        self._step = StepSeen()
        self._stale: set[str] = set()  # parameters with a gradient at the beginning of each backward of this step
        self._left: set[str] = set()  # parameters with a gradient of the last backward, until an update
        self._has_backward = False  # since the last update
        self._got: dict[str, tuple[float, int, int]] = {}  # in this step: square of the gradient, updates, call
        self._last: dict[str, tuple[float, int, int]] = {}  # the same of the step before
        self._calls = 0  # of optimizers' steps
        self._overflows = self._has_scaler = False  # in this step
        self._scheduled: Counter[int] = Counter()
        self._from = 0
        self._engine_seen = False
        self._optimizers: list[optim.Optimizer] = []
        self._modules: dict[nn.Module, str] = {}
        self.values = FirstUpdates()
        sizes = {name: held_tensors.full_numel(p) for p, name in self._names.items()}
        self.seen = RankSeen(sizes=sizes, frozen=[n for p, n in self._all.items() if not p.requires_grad])

    @contextmanager
    def observing(self, wrapper: Any) -> Iterator[None]:
        """Observes computing dtypes, scalers and schedulers. `wrapper`: DDP's, or the model itself."""
        seen = self.seen
        seen.own = list(getattr(self._model, "_ddp_params_and_buffers_to_ignore", ()))
        seen.is_ddp = isinstance(held_tensors.uncompiled(wrapper), DistributedDataParallel)
        seen.has_hook = bool(getattr(wrapper, "_comm_hooks", ()))
        seen.syncs_buffers = bool(getattr(wrapper, "broadcast_buffers", True))
        self._modules = {module: held_tensors.plain_name(name) for name, module in self._model.named_modules()}
        with ExitStack() as stack:
            stack.callback(register_module_forward_hook(self._after_module).remove)
            stack.callback(wrapper.register_forward_pre_hook(WatchHook(self._count_call)).remove)
            stack.callback(replaced(torch.amp.GradScaler, "step", self.scaling))
            stack.callback(replaced(optim.lr_scheduler.LRScheduler, "step", self._scheduling))
            stack.callback(setattr, self._meter, "on_operation", self._meter.on_operation)
            self._meter.on_operation = self._keep_line
            self._keep_checksums()
            yield
            seen.peak_bytes = max((extreme.peak for extreme in self._ledger.sums.extremes.values()), default=0)

    def _count_call(self, *_: object) -> None:
        self.seen.wrapper_calls += 1

    @_guarded
    def _after_module(self, module: nn.Module, _inputs: object, output: object) -> None:
        if torch.compiler.is_compiling() or not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return
        if (name := self._modules.get(module)) is None or next(module.parameters(recurse=False), None) is None:
            return
        self.seen.called[name] = True
        if torch.is_grad_enabled():  # an evaluation may compute in another dtype
            weight = getattr(module, "weight", None) if type(module).__name__ in UNITS else None
            size = weight.numel() if isinstance(weight, torch.Tensor) else 0
            self.seen.computes.setdefault(dtype_name(output.dtype), {})[name] = size

    @contextmanager
    def _scheduling(self, scheduler: Any, *_args: Any, **_named: Any) -> Iterator[None]:
        is_begun = bool(self.seen.steps) or self._has_backward  # before, a resumed scheduler may catch up
        if is_begun and any(getattr(scheduler, "optimizer", None) is optimizer for optimizer in self._given):
            self._scheduled[id(scheduler)] += 1
            self._step.schedules_early |= self._has_backward
        yield

    @_guarded
    def _keep_line(self, operation: Operation, _times: int) -> None:
        if operation.group_size > 1 and not operation.control and operation.kind not in self.seen.lines:
            self.seen.lines[operation.kind] = self._ledger.lines.here()

    # -- a step ---------------------------------------------------------------------------------------

    @_guarded
    def before_backward(self) -> bool:
        """Called when a micro-batch's backward begins. Returns True if the gradients so far were dropped."""
        if self._engine is not None:
            return False
        is_first, is_dropped = not self._step.before, False
        if self._has_backward or self._stale or is_first:
            now = self._squares((name, p.grad) for p, name in self._names.items())
            if self._has_backward:
                self._step.between += any(now[name] != self._step.before.get(name) for name in now if now[name][0])
                is_dropped = bool(self._left) and not any(square for square, _ in now.values())
            left = {name for name, (square, _) in now.items() if square}
            self._stale = left if is_first else self._stale & left
        return is_dropped

    @_guarded
    def after_backward(self) -> None:
        """Called when a micro-batch's gradients exist."""
        self._end_section()
        if self._engine is None:
            self._step.before = self._squares((name, p.grad) for p, name in self._names.items())
            self._left = {name for name, (square, _) in self._step.before.items() if square}
        self._has_backward = True

    @_guarded
    def on_engine_step(self) -> None:
        """Called when the step of one of our engines begins, before it clips in the step itself."""
        engine = self._engine
        if engine is None or self._engine_seen:
            return
        self._engine_seen = True
        dtypes: dict[str, torch.dtype] = {}

        def gradients() -> Iterator[tuple[str, torch.Tensor]]:
            for segment, gradient in engine.reduced_segments():
                name = held_tensors.plain_name(engine.names[segment.span.parameter])
                dtypes[name] = gradient.dtype
                yield name, gradient

        with _unseen():
            self._step.scale = engine.loss_scale
            squares = self._squares(gradients())
            self._step.at_update = scaled(squares, float(engine.update.scaling.pending))
            self._step.before = scaled(squares, 1 / self._step.scale)
            for part in held_tensors.parts_of_engine(engine):
                self._observe(part, engine.optimizer, dtypes.get(part.name), "")

    @_guarded
    def on_update(self, optimizer: optim.Optimizer, closure: str = "", is_inner: bool = False) -> None:
        """Called when an optimizer's step begins. `closure`: "before" one that makes gradients, "after" each call.
        `is_inner`: in the step of another optimizer, which is the same update.
        """
        wrapped = held_tensors.torch_optimizers([optimizer])
        if self._engine is not None or any(inner is not optimizer for inner in wrapped):
            return  # a wrapper: the optimizer inside of it steps, too
        if optimizer not in self._given and not any(p in self._all for p in held_tensors.held_by(optimizer)):
            return  # another model's
        if closure != "after":
            self._step.updates += 1
            self._calls += not is_inner
        if all(optimizer is not other for other in self._optimizers):
            self._optimizers.append(optimizer)
        if closure != "before":
            with _unseen():
                updated = list(held_tensors.parts_of_optimizer(optimizer, self._all))
                scale = getattr(optimizer, "grad_scale", None)  # of a fused update, which unscales and skips by itself
                self._overflows |= bool(getattr(optimizer, "found_inf", None))
                squares = self._squares((part.name, part.key.grad) for part in updated)
                for part in updated:
                    gradient = None if part.key.grad is None else next(parts_of(part.key.grad))
                    if self._keeps and gradient is not None and self._number <= UPDATES:
                        self.values.keep_noise(part.name, gradient)
                    line = "" if gradient is None else self._source(gradient)
                    self._observe(part, optimizer, None if gradient is None else gradient.dtype, line)
                    seen = self.seen.parts[part.name]
                    square = squares.get(part.name, [0.0])[0]
                    seen.lost += part.name in self._left and not square
                    # without a backward in this step, the gradient may be that of the last step
                    earlier = self._got if self._step.before or part.name in self._got else self._last
                    before, updates, call = earlier.get(part.name, (math.nan, 0, 0))
                    is_same = square == before != 0 and call != self._calls
                    self._got[part.name] = (square, updates + 1 if is_same else max(1, updates), self._calls)
                    if gradient is not None and seen.gradients > 1 and not seen.changes and seen.rates:
                        seen.reach = _reach(part.tensor, gradient, optimizer, seen.rates[-1])
                self._left -= {part.name for part in updated}
                self._has_backward = False
                self._step.at_update |= squares if scale is None else scaled(squares, 1 / float(scale))

    @contextmanager
    def scaling(self, scaler: torch.amp.GradScaler, *_args: Any, **_named: Any) -> Iterator[None]:
        """Wraps the step of a GradScaler, which has scaled the loss of this step."""
        self._step.scale = scaler.get_scale()
        yield
        self._has_backward, self._has_scaler = False, True

    @property
    def _number(self) -> int:
        """The number of the next update, from 1: skipped ones do not count."""
        return 1 + sum(not step.skipped for step in self.seen.steps)

    @_guarded
    def end_step(self, loss: float, backwards: int, micro_batches: int) -> None:
        """Called when a step is over, before its operations are forgotten."""
        step = self._step
        step.backwards, step.micro_batches = backwards, micro_batches
        step.schedules = max(self._scheduled.values(), default=0)
        self._end_section()
        if self._engine is not None:
            step.skipped = bool(self._engine.skipped)
            step.updates = int(not step.skipped)
        else:
            step.skipped = self._overflows or (self._has_scaler and step.updates == 0)
            step.before = scaled(step.before, 1 / step.scale)
        step.loss, step.stale = loss / step.scale, bool(self._stale)
        for operation, times in self._meter.operations:
            if operation.group_size > 1 and not operation.control and is_of_step(operation):
                sizes = step.sent.setdefault(operation.kind, {})
                sizes[operation.dtype] = sizes.get(operation.dtype, 0) + times * operation.payload_bytes
        self._end_updates()
        self.seen.steps.append(step)
        self._step, self._from, self._engine_seen, self._has_backward = StepSeen(), 0, False, False
        self._overflows = self._has_scaler = False
        self._last = {name: (square, 1, call) for name, (square, _, call) in self._got.items()}
        self._got = {}
        self._left.clear()
        self._stale.clear()
        self._scheduled.clear()

    def _end_section(self) -> None:
        operations, moved, calls = self._meter.operations[self._from :], defaultdict[str, float](float), [0, 0]
        self._from = len(self._meter.operations)
        for operation, times in operations:
            if operation.group_size > 1 and not operation.control:
                counted = 2 if operation.kind == "all_reduce" else 1  # in the volume
                moved[operation.kind] += times * operation.volume_elements / counted
                calls = [calls[0] + times, calls[1] + times * operation.payload_bytes]
        self._step.moved.append(dict(moved))
        self._step.calls.append(calls)

    def _observe(
        self, part: UpdatedPart, optimizer: optim.Optimizer, gradient: torch.dtype | None, source: str
    ) -> None:
        seen = self.seen.parts.setdefault(part.name, PartSeen())
        if id(part.key) not in self._parts:
            seen.elements += part.tensor.numel()
            self._bits[id(part.key)] = checksum(part.tensor)
            self._compare(part, 0)
        self._parts[id(part.key)] = part
        seen.is_copy = self._engine is None and part.key not in self._names
        seen.in_model, seen.master = dtype_name(part.in_model), dtype_name(part.tensor.dtype)
        seen.lines.setdefault("masters", self._source(part.tensor))
        seen.optimizer, seen.is_torchs = type(optimizer).__name__, type(optimizer).__module__.startswith("torch.optim")
        for group in optimizer.param_groups:
            lr = group.get("lr")  # some optimizers of the user's own have none, or not a number
            if isinstance(lr, int | float | torch.Tensor) and any(p is part.key for p in group["params"]):
                seen.rates.append(abs(float(lr)))
                break
        if gradient is not None:
            seen.gradient = dtype_name(gradient)
            seen.lines |= {"gradients": source} if source else {}
            seen.gradients += part.name not in self._got
            if self._engine is not None:
                self._got[part.name] = (math.nan, 1, 0)

    def _end_updates(self) -> None:
        number, is_update = self._number, not self._step.skipped
        with _unseen():
            changed = set()
            for key, part in self._parts.items():
                if self._engine is None:  # a loop may have given the parameter another tensor by `.data`
                    part = replace(part, tensor=next(parts_of(part.key.detach())))
                seen, bits = self.seen.parts[part.name], checksum(part.tensor)
                if bits != self._bits[key]:
                    changed.add(part.name)
                self._bits[key] = bits
                value = part.tensor.detach().reshape(-1)
                # The sum takes less time than a check of each element; it may overflow.
                if not seen.not_finite and not (value.sum().isfinite() or value.isfinite().all()):
                    seen.not_finite = len(self.seen.steps) + 1
                if is_update and number <= UPDATES:
                    self._compare(part, number)
            for name, seen in self.seen.parts.items():
                seen.changes += name in changed
                seen.updates.append(0 if self._step.skipped else self._got.get(name, (0.0, 0, 0))[1])
            self._observe_states()
            now = {held_tensors.plain_name(name): p for name, p in self._model.named_parameters()}
            whole = {name: p for p, name in self._all.items() if self._engine is None and _is_whole(p)}
            self.seen.replaced = [name for name, p in whole.items() if now.get(name, p) is not p]
            optimizers = self._given + self._optimizers
            held = set(self.seen.held) | {  # in any step: a loop may freeze them later
                part.name for optimizer in optimizers for part in held_tensors.parts_of_optimizer(optimizer, self._all)
            }
            if self._engine is not None:
                held |= {self._names[p] for p in self._engine.trainable if p in self._names}
            self.seen.held = [name for name in self.seen.sizes if name in held]
        self._keep_checksums()

    def _keep_checksums(self) -> None:
        """Keeps checksums of whole parameters (of one rank only frozen ones and masters') and buffers."""
        named = {} if self._engine is not None else {name: p.detach() for p, name in self._all.items()}
        if self._ranks == 1:
            kept_alone = {*self.seen.frozen, *(name for name, seen in self.seen.parts.items() if seen.is_copy)}
            named = {name: p for name, p in named.items() if name in kept_alone}
        is_kept = self._ranks > 1 or not self.seen.buffers
        buffers = {held_tensors.plain_name(name): buffer for name, buffer in self._model.named_buffers() if is_kept}
        with _unseen():
            for kept, tensors in ((self.seen.values, named), (self.seen.buffers, buffers)):
                kept.append({name: checksum(tensor) for name, tensor in tensors.items() if _is_whole(tensor)})

    def _observe_states(self) -> None:
        optimizers = self._optimizers if self._engine is None else [self._engine.optimizer]
        sizes: Counter[str] = Counter()
        for optimizer in optimizers:
            for key, state in optimizer.state.items():
                part = self._parts.get(id(key))
                if part is None or not isinstance(state, dict):
                    continue
                moments = {n: v for n, v in state.items() if isinstance(v, torch.Tensor) and v.dim() and n != "step"}
                seen, local = self.seen.parts[part.name], [next(parts_of(value)) for value in moments.values()]
                seen.moments |= {n: dtype_name(v.dtype) for n, v in moments.items()}
                if local:
                    seen.lines["moments"] = self._source(local[0])
                sizes[part.name] += max((tensor.numel() for tensor in local), default=0)
        for name, size in sizes.items():
            self.seen.parts[name].moment_elements = size

    def _source(self, tensor: torch.Tensor) -> str:
        record = self._ledger.record_of(tensor)
        return "" if record is None else record.source

    def _squares(self, gradients: Iterable[tuple[str, torch.Tensor | None]]) -> Squares:
        squares: Squares = {}
        with _unseen():
            for name, gradient in gradients:
                for part in () if gradient is None else parts_of(gradient):
                    if part.dtype == torch.int64:  # the indices of sparse values
                        continue
                    total = squares.setdefault(name, [0.0, 0])
                    total[0] += sum_of_powers([part.detach().reshape(-1)], 2.0, part.device).item()
                    total[1] += part.numel()
        return squares

    # -- values ---------------------------------------------------------------------------------------

    def _compare(self, part: UpdatedPart, number: int) -> None:
        if self._keeps:
            self.values.values += [{} for _ in range(len(self.values.values), number + 1)]
            self.values.values[number][part.name] = _copied(part.tensor)
        reference = None if self._reference is None else self._reference.of_part(part, number)
        if reference is None:
            return
        self.seen.deviations += [{} for _ in range(len(self.seen.deviations), number + 1)]
        first, now, noise = reference
        own, rounded = part.tensor.detach().cpu().reshape(-1), first.to(part.in_model)
        if number == 0:
            is_exact, is_rounded = (torch.equal(own.double(), values.double()) for values in (first, rounded))
            if is_rounded and not is_exact:
                self._rounded.add(id(part.key))
        compared = ~noise if number else torch.ones_like(noise)
        own, now, rounded, first = own[compared], *(values[compared].double() for values in (now, rounded, first))
        moved, now = now - first, now + (rounded - first if id(part.key) in self._rounded else 0)
        deviation = Deviation(
            (own.double() - now).square().sum().item(), moved.square().sum().item(),
            now.square().sum().item(), ulps_between(own, now),
        )  # fmt: skip
        other = self.seen.deviations[number].get(part.name)
        self.seen.deviations[number][part.name] = deviation if other is None else other.joined(deviation)


def _is_whole(tensor: torch.Tensor) -> bool:
    """Returns True for a plain tensor in memory: no shard, nothing sparse, not freed."""
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer) and tensor.layout == torch.strided
    return is_plain and not tensor.is_meta and tensor.untyped_storage().nbytes() >= tensor.nbytes > 0


def checksum(tensor: torch.Tensor) -> int:
    """Returns 32 bits of a tensor's bits: the CRC of the sums of its words in rows of COLUMNS and in their columns."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    integers = plain.contiguous().reshape(-1).view(INTEGERS[plain.element_size()])
    end = integers.numel() // COLUMNS * COLUMNS
    rows, total = integers[:end].view(-1, COLUMNS), 0
    for values in (rows.sum(0, dtype=rows.dtype), rows.sum(1, dtype=rows.dtype), integers[end:]):  # wider sums are slow
        total = zlib.crc32(values.cpu().numpy().tobytes(), total)
    return total


def _reach(tensor: torch.Tensor, gradient: torch.Tensor, optimizer: optim.Optimizer, lr: float) -> float:
    """Returns the largest change of an element, over half a unit in its last place. SGD changes each by the learning
    rate times the gradient, Adam by about the learning rate, if the gradient is far above its eps. For other
    optimizers, and if the loop has hooks of its own on their steps, it is unknown: infinite.
    """
    is_plain = type(optimizer) in (optim.SGD, optim.Adam, optim.AdamW)
    is_plain &= all(isinstance(hook, WatchHook) for hook in optimizer._optimizer_step_post_hooks.values())
    if not is_plain or gradient.is_sparse or not tensor.numel() or tensor.is_complex():
        return math.inf
    size = gradient.double().abs()
    change = lr * (size if type(optimizer) is optim.SGD else size / (size + optimizer.defaults["eps"]))
    _, exponent = torch.frexp(tensor.detach().double())
    half_unit = torch.finfo(tensor.dtype).eps / 4 * 2.0 ** exponent.double()
    return (change.cpu() / half_unit.cpu()).max().item()


def scaled(squares: Squares, factor: float) -> Squares:
    """Returns the squares of gradients that are multiplied by `factor`."""
    return {name: [total * factor**2, number] for name, (total, number) in squares.items()}


def ulps_between(own: torch.Tensor, other: torch.Tensor) -> int:
    """Returns the largest difference of elements, in units in the last place of other's largest value in own's dtype;
    -1 if a value is not finite. An element's own unit says nothing near 0.
    """
    if not own.numel():
        return 0
    off, largest = (own.double() - other).abs().max().item(), other.abs().max().item()
    if not (math.isfinite(off) and math.isfinite(largest)):
        return -1
    unit = torch.finfo(own.dtype).eps * 2.0 ** math.floor(math.log2(largest or 1.0))
    return math.ceil(off / unit)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.detach().to("cpu", copy=True)
    held_tensors.not_of_loop[copy] = True
    return copy


@contextmanager
def _unseen() -> Iterator[None]:
    with _disable_current_modes(), torch.no_grad():
        yield
