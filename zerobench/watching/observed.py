"""Observations of one rank for a certificate: dtypes, updates, norms and collectives of each step of a watched loop.

A certificate is made from these alone. They are read with the ledger's and meter's modes off, and copies are made on
the host, so that the tables of a watch have the figures that they have without a certificate.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn, optim
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import _disable_current_modes

from ..probes.labeling import parts_of
from ..probes.ledger import Ledger
from ..probes.traffic import Operation, TrafficMeter, is_of_step
from ..zero.precision import sum_of_powers
from . import parts
from .held_tensors import not_of_loop, torch_optimizers
from .parts import UpdatedPart
from .phases import replaced

UPDATES = 3
"""Number of first updates whose values are compared with a reference's."""

NOISE = 0.1

REDUCTIONS = ("all_reduce", "reduce_scatter")
"""Kinds of collectives that reduce gradients."""

Squares = dict[str, list[float]]
"""Parameter -> sum of the squares of its gradient on this rank, and their number."""


@dataclass
class PartSeen:
    """One rank's part of a parameter. dtypes as text; `moments`: state -> its dtype; `updates`: per step. `is_copy`:
    the optimizer holds another tensor of its shape, such as a master.
    """

    elements: int = 0
    moment_elements: int = 0
    in_model: str = ""
    master: str = ""
    gradient: str = ""
    moments: dict[str, str] = field(default_factory=dict)
    optimizer: str = ""
    is_torchs: bool = True
    is_copy: bool = False
    updates: list[int] = field(default_factory=list)
    gradients: int = 0
    changed: bool = False
    square: float = 0.0
    """Sum of the squares of its values after the last step."""
    lr: float = 0.0
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
    updates: int = 0
    skipped: bool = False
    before: Squares = field(default_factory=dict)
    at_update: Squares = field(default_factory=dict)
    moved: list[dict[str, float]] = field(default_factory=list)
    calls: list[list[int]] = field(default_factory=list)
    sent: dict[str, dict[str, int]] = field(default_factory=dict)


@dataclass
class Deviation:
    """A part's values after an update compared with the reference's: sums of squares of their difference, of the
    reference's movement since the beginning and of its values; the largest difference in units in the last place.
    """

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
    """Everything that one rank observed. `deviations`: per update from 0, the initial values: parameter -> deviation.
    `sizes`: elements of the whole trainable parameters. `computes`: dtypes of the outputs of modules with parameters.
    `own`: parameters that DDP leaves to each rank. `lines`: kind of a collective -> the first line that issued it.
    """

    parts: dict[str, PartSeen] = field(default_factory=dict)
    steps: list[StepSeen] = field(default_factory=list)
    deviations: list[dict[str, Deviation]] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    computes: list[str] = field(default_factory=list)
    own: list[str] = field(default_factory=list)
    lines: dict[str, str] = field(default_factory=dict)
    peak_bytes: int = 0


@dataclass
class FirstUpdates:
    """Whole parameters on the host: `values`, the initial ones, then after each update, by name. `noise`: elements
    whose gradient in any of these updates is not 0 and at most NOISE of the root mean square of the tensor's.

    Such a gradient may be rounding alone (of the keys' part of a bias of attention), and Adam moves an element by the
    learning rate whatever the size of its gradient. So noise is not compared.
    """

    values: list[dict[str, torch.Tensor]] = field(default_factory=list)
    noise: dict[str, torch.Tensor] = field(default_factory=dict)

    def keep(self, number: int, name: str, tensor: torch.Tensor) -> None:
        """Keeps a copy of a parameter after update `number`."""
        while len(self.values) <= number:
            self.values.append({})
        self.values[number][name] = _copied(tensor)

    def keep_noise(self, name: str, gradient: torch.Tensor) -> None:
        """Notes the noise in a gradient."""
        size = gradient.detach().float().abs()
        is_noise = (size > 0) & (size <= NOISE * size.square().mean().sqrt())
        known = self.noise.get(name)
        self.noise[name] = _copied(is_noise if known is None else known | is_noise.cpu())

    def of_part(self, part: UpdatedPart, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Returns a part's initial values, those after update `number`, and which elements are noise, (numel,) each;
        None if they are unknown.
        """
        if number >= len(self.values) or part.name not in self.values[number]:
            return None
        whole = self.values[number][part.name]
        noise = self.noise.get(part.name, torch.zeros(whole.shape, dtype=torch.bool))
        cuts = [
            cut.reshape(-1) for one in (self.values[0][part.name], whole, noise) if (cut := part.cut(one)) is not None
        ]
        return (cuts[0], cuts[1], cuts[2]) if len(cuts) == 3 and len(cuts[1]) == part.tensor.numel() else None


class TrainingObserver:
    """Observes the steps of a watch. `reference`: values to compare with, if any; `keeps`: whether to keep its own."""

    def __init__(
        self, model: nn.Module, engines: list[Any], ledger: Ledger, meter: TrafficMeter, reference: FirstUpdates | None,
        keeps: bool,
    ) -> None:  # fmt: skip
        self._model, self._ledger, self._meter = model, ledger, meter
        self._engine = next((one for one in engines if parts.is_ours(one)), None)
        self._names = parts.names_in(model)
        self._reference, self._keeps = reference, keeps
        self._known: dict[int, UpdatedPart] = {}
        self._previous: dict[int, torch.Tensor] = {}
        self._rounded: set[int] = set()  # masters that were made from a model whose values were rounded before
        self._step = StepSeen()
        self._updated: Counter[str] = Counter()  # since the last backward
        self._most_updated: Counter[str] = Counter()  # in this step, after one backward
        self._from = 0
        self._engine_seen = False
        self._optimizers: list[optim.Optimizer] = []
        self.values = FirstUpdates()
        self.seen = RankSeen(sizes={name: parts.numel_of(p) for p, name in self._names.items()})
        self.seen.own = list(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Observes the dtypes in which modules compute, and scalers, in its block."""
        with ExitStack() as stack:
            stack.callback(register_module_forward_hook(self._after_module).remove)
            stack.callback(replaced(torch.amp.GradScaler, "step", self.scaling))
            stack.callback(setattr, self._meter, "tell", self._meter.tell)
            self._meter.tell = self._issued
            yield
            self.seen.peak_bytes = max((one.peak for one in self._ledger.sums.extremes.values()), default=0)

    def _after_module(self, module: nn.Module, _inputs: object, output: object) -> None:
        if torch.compiler.is_compiling() or not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return
        shown = shown_dtype(output.dtype)
        if next(module.parameters(recurse=False), None) is not None and shown not in self.seen.computes:
            self.seen.computes.append(shown)

    def _issued(self, operation: Operation, _times: int) -> None:
        if operation.group_size > 1 and not operation.control and operation.kind not in self.seen.lines:
            self.seen.lines[operation.kind] = self._ledger.lines.here()

    # -- a step ---------------------------------------------------------------------------------------

    def after_backward(self) -> None:
        """Called when a micro-batch's gradients exist."""
        self._end_section()
        self._most_updated |= self._updated
        self._updated.clear()
        if self._engine is None:
            self._step.before = self._squares((name, p.grad) for p, name in self._names.items())

    def on_engine_step(self) -> None:
        """Called when the step of one of our engines begins, before it clips in the step itself."""
        if self._engine is None or self._engine_seen:
            return
        self._engine_seen = True
        with _unseen():
            self._step.scale = self._engine.loss_scale
            dtypes: dict[str, torch.dtype] = {}
            self._step.before = self._squares(self._reduced(dtypes))
            self._step.at_update = scaled(self._step.before, float(self._engine.update.scaling.pending))
            self._step.before = scaled(self._step.before, 1 / self._step.scale)
            for part in parts.parts_of_engine(self._engine):
                self._see(part, self._engine.optimizer, dtypes.get(part.name), "")

    def _reduced(self, dtypes: dict[str, torch.dtype]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the engine's gradients by name, and puts their dtypes into `dtypes`."""
        for name, gradient in parts.gradients_of_engine(self._engine):
            dtypes[name] = gradient.dtype
            yield name, gradient

    def on_update(self, optimizer: optim.Optimizer, by_closure: bool = False) -> None:
        """Called when an optimizer's step begins, and `by_closure`: when its closure has made the gradients."""
        if self._engine is not None or any(one is not optimizer for one in torch_optimizers([optimizer])):
            return  # a wrapper: the optimizer inside of it steps, too
        self._step.updates += not by_closure
        if all(optimizer is not one for one in self._optimizers):
            self._optimizers.append(optimizer)
        with _unseen():
            found = list(parts.parts_of_optimizer(optimizer, self._names))
            scale = getattr(optimizer, "grad_scale", None)  # of a fused update, which unscales by itself
            got = self._squares((one.name, one.key.grad) for one in found)
            self._step.at_update |= got if scale is None else scaled(got, 1 / float(scale))
            for part in found:
                gradient = None if part.key.grad is None else next(parts_of(part.key.grad))
                if self._keeps and gradient is not None and len(self.seen.steps) < UPDATES:
                    self.values.keep_noise(part.name, gradient)
                line = "" if gradient is None else self._line_of(gradient)
                self._see(part, optimizer, None if gradient is None else gradient.dtype, line)

    @contextmanager
    def scaling(self, scaler: torch.amp.GradScaler, *_args: Any, **_named: Any) -> Iterator[None]:
        """Wraps the step of a GradScaler, whose factor the loss of this step has."""
        self._step.scale = scaler.get_scale()
        yield

    def end_step(self, loss: float, backwards: int) -> None:
        """Called when a step is over, before its operations are forgotten."""
        step = self._step
        step.backwards = backwards
        self._end_section()
        if self._engine is not None:
            step.skipped = bool(self._engine.skipped)
            step.updates = int(not step.skipped)
        else:
            step.skipped = step.updates == 0
            step.before = scaled(step.before, 1 / step.scale)
        self._most_updated |= self._updated
        if step.skipped:
            self._most_updated.clear()
        step.loss = loss / step.scale
        sent = step.sent
        for operation, times in self._meter.operations:
            if operation.group_size > 1 and not operation.control and is_of_step(operation):
                sizes = sent.setdefault(operation.kind, {})
                sizes[operation.dtype] = sizes.get(operation.dtype, 0) + times * operation.payload_bytes
        self._end_updates()
        self.seen.steps.append(step)
        self._step, self._from, self._engine_seen = StepSeen(), 0, False
        self._updated.clear()
        self._most_updated.clear()

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

    def _see(self, part: UpdatedPart, optimizer: optim.Optimizer, gradient: torch.dtype | None, source: str) -> None:
        seen = self.seen.parts.setdefault(part.name, PartSeen())
        if id(part.key) not in self._known:
            self._known[id(part.key)] = part
            seen.elements += part.tensor.numel()
            self._previous[id(part.key)] = _copied(part.tensor)
            self._compare(part, 0)
        seen.is_copy = self._engine is None and part.key not in self._names
        seen.in_model, seen.master = shown_dtype(part.in_model), shown_dtype(part.tensor.dtype)
        seen.lines.setdefault("masters", self._line_of(part.tensor))
        seen.optimizer, seen.is_torchs = type(optimizer).__name__, type(optimizer).__module__.startswith("torch.optim")
        groups = (g for g in optimizer.param_groups if any(p is part.key for p in g["params"]))
        seen.lr = max([seen.lr, *(abs(float(g.get("lr") or 0)) for g in groups)])
        if gradient is not None:
            seen.gradient = shown_dtype(gradient)
            seen.lines |= {"gradients": source} if source else {}
            seen.gradients += self._updated[part.name] == 0
            if self._engine is None or not self._updated[part.name]:  # else another segment: one update in parts
                self._updated[part.name] += 1

    def _end_updates(self) -> None:
        number = 1 + len(self.seen.steps)
        with _unseen():
            squares: Counter[str] = Counter()
            for key, part in self._known.items():
                seen, value = self.seen.parts[part.name], part.tensor.detach().reshape(-1)
                squares[part.name] += sum_of_powers([value], 2.0, value.device).item()  # type: ignore[assignment]
                if not seen.changed and not torch.equal(self._previous[key], part.tensor.detach().cpu()):
                    seen.changed = True
                if number <= UPDATES:
                    self._compare(part, number)
            for name, seen in self.seen.parts.items():
                seen.updates.append(self._most_updated[name])
                seen.square = squares[name]
            self._see_states()

    def _see_states(self) -> None:
        optimizers = self._optimizers if self._engine is None else [self._engine.optimizer]
        sizes: Counter[str] = Counter()
        for optimizer in optimizers:
            for key, state in optimizer.state.items():
                part = self._known.get(id(key))
                if part is None or not isinstance(state, dict):
                    continue
                moments = {n: v for n, v in state.items() if isinstance(v, torch.Tensor) and v.dim() and n != "step"}
                seen, local = self.seen.parts[part.name], [next(parts_of(value)) for value in moments.values()]
                seen.moments |= {n: shown_dtype(v.dtype) for n, v in moments.items()}
                if local:
                    seen.lines["moments"] = self._line_of(local[0])
                sizes[part.name] += max((one.numel() for one in local), default=0)
        for name, size in sizes.items():
            self.seen.parts[name].moment_elements = size

    def _line_of(self, tensor: torch.Tensor) -> str:
        record = self._ledger.record_of(tensor)
        return "" if record is None else record.source

    def _squares(self, gradients: Iterable[tuple[str, torch.Tensor | None]]) -> Squares:
        found: Squares = {}
        with _unseen():
            for name, gradient in gradients:
                for part in () if gradient is None else parts_of(gradient):
                    if part.dtype == torch.int64:  # the places of sparse values
                        continue
                    total = found.setdefault(name, [0.0, 0])
                    total[0] += sum_of_powers([part.detach().reshape(-1)], 2.0, part.device).item()
                    total[1] += part.numel()
        return found

    # -- values ---------------------------------------------------------------------------------------

    def _compare(self, part: UpdatedPart, number: int) -> None:
        if self._keeps:
            self.values.keep(number, part.name, part.tensor)
        there = None if self._reference is None else self._reference.of_part(part, number)
        if there is None:
            return
        while len(self.seen.deviations) <= number:
            self.seen.deviations.append({})
        first, now, noise = there
        heard = ~noise if number else torch.ones_like(noise)
        own, rounded = part.tensor.detach().cpu().reshape(-1), first.to(part.in_model)
        if (
            number == 0
            and not torch.equal(own.double(), first.double())
            and torch.equal(own.double(), rounded.double())
        ):
            self._rounded.add(id(part.key))
        own, now, rounded, first = own[heard], *(one[heard].double() for one in (now, rounded, first))
        moved, now = now - first, now + (rounded - first if id(part.key) in self._rounded else 0)
        off = Deviation(
            (own.double() - now).square().sum().item(), moved.square().sum().item(),
            now.square().sum().item(), ulps_between(own, now),
        )  # fmt: skip
        known = self.seen.deviations[number].get(part.name)
        self.seen.deviations[number][part.name] = off if known is None else known.joined(off)


def scaled(squares: Squares, factor: float) -> Squares:
    """Returns the squares of gradients that are multiplied by `factor`."""
    return {name: [total * factor**2, number] for name, (total, number) in squares.items()}


def shown_dtype(dtype: torch.dtype) -> str:
    """Returns a dtype as text, as in tables of traffic: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


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
    not_of_loop[copy] = True
    return copy


@contextmanager
def _unseen() -> Iterator[None]:
    with _disable_current_modes(), torch.no_grad():
        yield
