"""The accounted pass: the ledger and the traffic meter over one rank, entered before the model is built.

On CUDA the allocator's own peaks are recorded next to the ledger, phase by phase. All accounting is in host memory: it
allocates nothing on the device, and never waits for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from ..records import ALLOCATOR, CATEGORIES, LineRow, MemoryRow, TensorRow, TimelineRow, TrafficRow
from ..zero import labels
from . import allocator
from .allocator import IN_MEMORY, MEASURED_STEP, PhasePeaks, profiled_peaks
from .event_log import EventLog, event_rows, listening
from .intervals import LARGEST, History, StorageRecord, extremes_rows, rows_by_line
from .labeling import contains_others, label_parts
from .ledger import Ledger, ShapesOnly
from .model_listener import ModelListener
from .operator_stream import OperatorStream
from .outside_dispatch import orthogonalizations_watched, threads_relayed
from .probe import PassRecords, Probe
from .source_lines import find_keepers
from .traffic import SUMMED, Operation, TrafficMeter, backends_watched, is_of_step


class AccountedPass(Probe):
    """A ledger and a traffic meter. `node_size`: ranks per node, for the meter; None: all are on one node.

    `witness`: whether the allocator's total is recorded; on a CPU it counts only memory allocated from then on.
    `history`: the records to keep for a snapshot. `events`: whether the last step is kept event by event. `operators`:
    whether every operator that computes is kept as well; events of storages are kept only with `events`.
    """

    def __init__(
        self, device: torch.device, node_size: int | None = None, witness: bool = True, history: History | None = None,
        fake: bool = False, events: bool = False, operators: bool = False,
    ) -> None:  # fmt: skip
        witness = witness and not fake
        self._cuda = device.type == "cuda"
        is_asked = witness or self._cuda
        self.witness, take = allocator.take_allocated(device) if is_asked else (allocator.NONE, dict)
        self.allocator = PhasePeaks(take, ALLOCATOR if self._cuda else IN_MEMORY)
        self._profile: profile | None = None  # in place of the hook
        if witness and self.witness == allocator.NONE:
            self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self.ledger = ShapesOnly(device.type) if fake else Ledger(device.type)
        self.ledger.history = history
        self.meter = TrafficMeter(self.ledger.tier_of, self.ledger.name_of)
        self.meter.node_size = node_size
        self.log = EventLog(self.ledger, events) if events or operators else None
        self._operators = OperatorStream(self.log) if self.log is not None and operators else None
        self.memory: dict[str, int | None] = {}
        self.traffic: list[tuple[int, Operation, int]] = []
        """(measured step, operation, number of equal operations)."""
        self._model = ModelListener(self.ledger, self.log)
        self._measured = 0
        self._before: dict[StorageRecord, int] | None = None  # live bytes where the last warm-up step ended
        self._grown: list[tuple[int, StorageRecord, str]] = []
        self._orthogonalized: list[int] = []  # FLOPs of each Newton-Schulz call of the step
        self.kept = ""
        """A description of the largest storage that survived a measured step but should not have."""
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        for listener in (self.ledger, self.meter):
            labels.listen(listener)
            self._stack.callback(labels.unlisten, listener)
        for observer in (
            self.meter, self.ledger, self._operators or nullcontext(), threads_relayed((self.meter, self.ledger)),
            backends_watched(self._note_raw), self._model, orthogonalizations_watched(self._orthogonalized.append),
            nullcontext() if self.log is None else listening(self.log, self.meter),
        ):  # fmt: skip
            self._stack.enter_context(observer)
        if self._profile is not None:
            self._profile.start()
            self.witness = allocator.PROFILER
        self.allocator.begin()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        if self._profile is not None:
            self._profile.stop()
            if peaks := profiled_peaks(self._profile):
                self.allocator.of["step"] = peaks
        if self._cuda and error[0] is None and "step" in self.allocator.of:
            self.memory |= allocator.process_memory(self.allocator.of["step"])

    def adopt(self, model: nn.Module) -> None:
        """Labels parameters, buffers and gradients after the model is built, before a strategy wraps it."""
        for name, parameter in model.named_parameters():
            labels.label(parameter, labels.PARAMETERS, name)
        for name, buffer in model.named_buffers():
            labels.label(buffer, labels.INPUTS, name)
        self.listen_to(model)

    def listen_to(self, model: nn.Module) -> None:
        """Listens to a model's modules and gradients, until the pass ends."""
        self._model.listen_to(model)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Runs a phase of a step, or "init". Arrivals and modules come from the step's last forward."""
        if name == "forward":
            self._model.begin_forward()
        self.enter_phase(name)
        yield
        if name == "init":
            self.ledger.end("init")
            self.allocator.end("init")
        self.enter_phase("data")

    @contextmanager
    def step(self, measured: bool) -> Iterator[None]:
        """Runs one whole step, which leaves records only if it is measured."""
        if measured and not self._measured and self._cuda:
            allocator.reset_peaks()
        if measured and self._before is None:
            self._before = self.ledger.live_bytes()
        self.ledger.begin()
        self.allocator.begin()
        self.meter.operations.clear()
        self._orthogonalized.clear()
        if self._operators is not None:
            self._operators.on = measured
        self.enter_phase("data")
        with record_function(MEASURED_STEP) if self._profile is not None and measured else nullcontext():
            yield
        if not measured:
            self._before = self.ledger.live_bytes()
            self.meter.operations.clear()
            return
        self.ledger.end("step")
        self.allocator.end("step")
        size = sum(self.ledger.kept.values())
        if size >= (self.memory.get("kept_bytes") or 0):
            self.memory["kept_bytes"] = size
            largest = max(self.ledger.kept, key=lambda stored: stored.bytes, default=None)
            name = largest and (largest.name or largest.module or f"made in {largest.phase}")
            self.kept = f"{name} ({largest.category})" if largest else ""
        before, now = self._before or {}, self.ledger.live_bytes()
        grown = {stored: now.get(stored, 0) - before.get(stored, 0) for stored in {**before, **now}}
        self._grown = [(by, stored, stored.category) for stored, by in grown.items() if by]
        self.memory["growth_bytes"] = sum(grown.values())
        for name, value in (("calls", len(self._orthogonalized)), ("flops", sum(self._orthogonalized))):
            self.memory[f"newton_schulz_{name}"] = (self.memory.get(f"newton_schulz_{name}") or 0) + value
        counts: Counter[Operation] = Counter()
        for operation, times in self.meter.operations:
            counts[operation] += times * is_of_step(operation)
        self.traffic += [(self._measured, operation, calls) for operation, calls in counts.items() if calls]
        self._measured += 1
        self.ledger.begin()  # the records are memory too
        self.meter.operations.clear()

    may_wait = True
    """True, because this pass measures no times."""

    def may_read_gradients(self, measured: bool) -> bool:
        """Returns True if the harness may read gradients before the update: a profiler would count the memory."""
        return self._profile is None or not measured

    def inputs(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            labels.label(tensor, labels.INPUTS, "batch")

    def before_backward(self, loss: torch.Tensor) -> None:
        """Labels gradients of a tied parameter: one per use, kept until they are summed."""
        self._model.before_backward(loss)

    def after_backward(self, model: nn.Module) -> None:
        """Labels gradients that a strategy keeps on the parameters (DDP's buckets); for DTensors, their shards."""
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                label_parts(parameter.grad, labels.GRADIENTS, name)
            if contains_others(parameter):
                label_parts(parameter.data, labels.PARAMETERS, name)

    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Labels optimizer states; for ZeroRedundancyOptimizer, the states of the optimizer inside it."""
        self.ledger.label_states(getattr(optimizer, "optim", optimizer))

    def records(self, rank: int, folder: Path) -> PassRecords:
        log, step = self.log, self.ledger.logged
        return PassRecords(
            process_memory=self.memory, memory=self.memory_rows(rank), tensors=self.tensor_rows(rank),
            lines=self.line_rows(rank), traffic=self.traffic_rows(rank), timeline=self.timeline_rows(rank),
            events=[] if log is None or step is None else event_rows(rank, step, log.of_storages),
            kept=self.kept, witness=self.witness, order=self._model.order,
        )  # fmt: skip

    def memory_rows(self, rank: int) -> list[MemoryRow]:
        """Returns each phase's extremes by category, on CUDA with the allocator's; then other tiers'."""
        rows: list[MemoryRow] = []
        for phase, extremes in self.ledger.sums.extremes.items():
            seen = extremes.peak if self._cuda else self.ledger.sums.in_memory[phase]
            rows += [*extremes_rows(rank, phase, extremes), *self.allocator.rows(rank, phase, seen)]
        for (tier, phase), extremes in self.ledger.sums.elsewhere.items():
            rows += [replace(row, tier=tier) for row in extremes_rows(rank, phase, extremes)]
        return rows

    def tensor_rows(self, rank: int) -> list[TensorRow]:
        """Returns the largest storages at the peak instant."""
        return [
            TensorRow(
                rank, size, category, stored.name, stored.module, stored.phase, source=stored.source,
                shape=stored.shown_shape,
            )
            for size, stored, category in self.ledger.sums.extremes["step"].alive[:LARGEST]
        ]  # fmt: skip

    def line_rows(self, rank: int) -> list[LineRow]:
        """Returns the storages alive at the peak instant, and the growth over the measured steps, by line of code; in a
        fake world, whose states are compared with formulas, also the states at their own maximum.
        """
        step, states, keepers = self.ledger.sums.extremes["step"], list[LineRow](), dict[StorageRecord, str]()
        if isinstance(self.ledger, ShapesOnly):
            states = [*rows_by_line(rank, "states", step.alive_states)]
        else:
            keepers = find_keepers(self.ledger.record_of, {stored for by, stored, _ in self._grown if by > 0})
        return [*rows_by_line(rank, "peak", step.alive), *rows_by_line(rank, "growth", self._grown, keepers), *states]

    def traffic_rows(self, rank: int) -> list[TrafficRow]:
        """Returns every operation of the measured steps, with equal operations of a step combined."""
        rows = []
        for step, operation, calls in self.traffic:
            columns = operation._asdict()
            del columns["stride"]  # a column of events
            columns |= {key: calls * columns[key] for key in SUMMED}
            rows.append(TrafficRow(rank=rank, step=step, calls=calls, **columns))
        return rows

    def timeline_rows(self, rank: int) -> list[TimelineRow]:
        """Returns the last measured step, instant by instant."""
        return [
            TimelineRow(
                rank, instant.number, instant.seconds, instant.phase,
                **{f"{category}_bytes": instant.totals[category] for category in CATEGORIES},
                **{f"{tier}_bytes": size for tier, size in instant.others.items()},
            )
            for instant in self.ledger.sums.timeline
        ]  # fmt: skip

    @property
    def peak_bytes(self) -> int | None:
        step = self.ledger.sums.extremes.get("step")
        return step.peak if step is not None else None

    def _note_raw(self, operator: str, args: tuple[Any, ...], ranks: int) -> None:
        self.ledger.note_collective(args)
        self.meter.note_raw(operator, args, ranks)

    def enter_phase(self, name: str) -> None:
        """Assigns the following events to a phase, for a loop without context managers."""
        self.ledger.enter_phase(name)
        self.allocator.enter_phase(name)
        self.meter.phase = name
