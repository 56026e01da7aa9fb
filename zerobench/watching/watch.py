"""A watch over a training loop, and its states; and callbacks that mark steps in a trainer's loop.

    new        it knows the loop's model and optimizers, and observes nothing
    warming    `warmup` steps are observed without records, while optimizer states and buckets are created
    measuring  `steps` steps are accounted
    over       every hook is removed, and the loop runs as if it had never been watched
    stopped    the ranks' records are one row, with its tables

A step ends with the optimizer's step, or with the loop's call of `watch.step()`.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ..host.job import rebuild, to_plain
from ..probes import AccountedPass
from ..probes.in_transit import InTransit
from ..probes.intervals import History
from ..probes.labeling import has_storage, tensors_in
from ..probes.snapshot import recorded, take
from ..probes.snapshot import write as write_snapshot
from ..records import CertificateRow
from ..results.tables import Results
from ..zero.modules.wrapping import inside_backward
from . import held_tensors, rows
from .certificate import FIRST, UNKNOWN, Certificate, ExpectedTraining, JobSeen
from .comparing import compare_with_reference, effect_of_option
from .held_tensors import HeldTensors, is_ours
from .judging import judge
from .observed import FirstUpdates, RankSeen, TrainingObserver
from .phases import Phases, inside_compiled, is_engine, on_step
from .rows import WatchedWorld, WatchError

NEW, WARMING, MEASURING, OVER, STOPPED = "new", "warming", "measuring", "over", "stopped"

OF_LOOP = ("model", "_outer", "_called", "_optimizers", "_watched", "_held", "_phases", "_observer")
"""Attributes that refer to objects of the loop; a stopped watch no longer has them."""

_watching: list[Watch] = []
"""The watch that observes this process, if any."""

DEPTH = 4
"""Levels of nested arguments of a loop in which tensors are looked for."""

ENDS = ("optimizer", "step")
"""Ends of a step: the optimizer's step, or the loop's call of `watch.step()`."""

WATCH_TO = "ZEROBENCH_WATCH_TO"
"""The environment variable that names the results folder of watches without their own."""

CALLBACKS = {"transformers.trainer": "trainer_callback", "lightning.pytorch.trainer": "lightning_callback"}
"""Module of a trainer -> our callback, which watches the loop that a trainer hides."""


class Watch:
    """Accounts memory and traffic of some steps of a loop; a context manager, or `start` and `stop`.

    model       the torch.nn.Module that the loop calls, wrapped or not, or an engine that holds it as `module`
    optimizer   whatever has the loop's `step`, or several in the order in which they step; None: an engine's own
    ends        "optimizer": a step ends with the last optimizer's step; "step": with `watch.step()`
    warmup      steps before the measured ones; without any, what the first step leaves is counted as growth. None:
                1, and 2 if DDP, which makes its buckets again in the second step, reduces the gradients
    steps       measured steps
    to          a results folder; None: that of the variable ZEROBENCH_WATCH_TO; without it the tables are in
                `results` alone
    name        the run's name in tables and budgets; default: the model's class
    node_size   ranks per node, for traffic between nodes; None: all ranks are one node
    timeout_s   seconds that rank 0 waits for the other ranks' records
    verify      True, a reference or an ExpectedTraining: also makes a certificate of the training (certificate.py)
    snapshot    True: each rank writes `snapshots/rankR.pickle` into the run's folder, for pytorch.org/memory_viz

    Raises ValueError for arguments that cannot be watched, and WatchError on leaving a loop without a measured step.
    """

    def __init__(
        self, model: Any, optimizer: Any = None, *, ends: str | None = None, warmup: int | None = None, steps: int = 2,
        to: str | Path | None = None, name: str = "", node_size: int | None = None, timeout_s: float = 120.0,
        snapshot: bool = False, verify: bool | Certificate | str | Path | ExpectedTraining = False,
    ) -> None:  # fmt: skip
        self.model = held_tensors.inner_model(model)
        self._called = held_tensors.called_model(model)
        self._outer = model = self._called if model is self.model else model
        warmup = (
            1 + isinstance(held_tensors.uncompiled(self._called), DistributedDataParallel) if warmup is None else warmup
        )
        optimizer = model if optimizer is None and is_engine(model) else optimizer
        self._optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer] * (optimizer is not None)
        if is_ours(model):  # whose step is more than its optimizer's, whichever of the two the loop calls
            self._optimizers = [model if given is model.optimizer else given for given in self._optimizers]
        if ends not in (None, *ENDS):
            raise ValueError(f'watch: ends={ends!r}; it is "optimizer" or "step"')
        if ends == "optimizer" and not self._optimizers:
            raise ValueError('watch: ends="optimizer" needs the optimizer; give it, or mark steps with watch.step()')
        for given in self._optimizers:
            if not callable(getattr(given, "step", None)):
                raise ValueError(f"watch: optimizer is {type(given).__name__}, which has no step")
        for argument, value, least in (("warmup", warmup, 0), ("steps", steps, 1)):
            if not isinstance(value, int) or value < least:
                raise ValueError(f"watch: {argument}={value!r}; it is a whole number from {least} on")
        self._to, self._timeout_s = to or os.environ.get(WATCH_TO) or None, timeout_s
        if snapshot and self._to is None:
            raise ValueError("watch: snapshot=True writes a file into the run's folder; give to=, a results folder")
        self._ends = ends or ("optimizer" if self._optimizers else "step")
        self.warmup, self.steps, self.node_size = warmup, steps, node_size
        self._about = rows.About.of(name, model, self.model, self._optimizers, warmup)
        self.state, self.done = NEW, 0
        self.problem = ""
        """Error message if the loop cannot be accounted; empty while it can."""
        self.results: Results | None = None
        """The tables, on rank 0 once the watch has stopped."""
        self.folder: Path | None = None
        """The run's folder, where `to` is given."""
        self._verifying = None if verify is False else Verifying(verify)
        self._observer: TrainingObserver | None = None
        self.certificate: Certificate | None = None
        """The certificate, on rank 0 once the watch has stopped, if `verify` is given."""
        self._observing, self._step = ExitStack(), ExitStack()
        self._seen_forward, self._loss, self._backwards, self._since_update = False, 0.0, 0, 0
        self._micro_batches, self._forwards = 0, 0  # forwards that no backward has followed
        self._others = ""  # the class of an optimizer that steps and is not watched
        self._history = History() if snapshot else None
        self._snapshot: dict[str, Any] | None = None  # from the end of the last step on

    # -- its life -------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        self.stop(error)

    def start(self) -> Self:
        """Begins to observe; the next step is the first."""
        if self.state != NEW:
            raise WatchError(f"watch: it is {self.state}; make a new one for another loop")
        if _watching:
            raise WatchError("watch: another one observes this process; leave it, or stop() it, before the next begins")
        self._world = WatchedWorld.here(self.node_size, self._timeout_s)
        self._thread = threading.get_ident()
        if self._to is not None:  # a folder that cannot be made is an error before the training, on all ranks
            Path(self._to).mkdir(parents=True, exist_ok=True)
        try:
            _watching.append(self)
            self._observing.callback(_watching.remove, self)
            device = next((p.device for p in self._called.parameters()), torch.device("cpu"))
            self._observing.enter_context(recorded(device, self._history))
            self._observing.callback(self._take_snapshot, device)
            accounted = AccountedPass(device, self.node_size, witness=False, history=self._history)
            accounted.ledger.in_transit = InTransit()
            self.probe = self._observing.enter_context(accounted)
            self._watched = [*self._optimizers, *held_tensors.torch_optimizers(self._optimizers)]
            self._held = HeldTensors(self.probe.ledger, self._outer, self.model, self._optimizers)
            self._held.label_all()
            self.probe.listen_to(self.model)
            engines = list(filter(is_engine, dict.fromkeys((self._outer, *self._optimizers))))
            self._phases = self._observing.enter_context(Phases(self._called, engines, self))
            if self._verifying is not None:
                reference = self._verifying.reference
                self._observer = TrainingObserver(
                    self.model, engines, self._optimizers, accounted.ledger, accounted.meter,
                    None if reference is None else reference.values, self._world.world_size,
                )  # fmt: skip
                self._observing.enter_context(self._observer.observing(self._called))
            if self._ends == "optimizer":
                self._observing.callback(on_step(self._optimizers[-1], self._end_step))
        except BaseException:
            self._observing.close()
            raise
        self._begin_step()
        return self

    def step(self) -> None:
        """Marks the end of a step with `ends="step"`. Raises WatchError if the optimizer's step ends a step."""
        if self._ends != "step":
            raise WatchError('watch.step: the optimizer\'s step ends a step here; give ends="step" to mark it yourself')
        if self.state == NEW:
            raise WatchError("watch.step: the watch has not started; use it as a context manager, or call start()")
        self._end_step()

    def stop(self, error: BaseException | None = None) -> None:
        """Ends the watch: removes every hook, brings the ranks' records together and makes the tables.

        `error`: the exception that ended the loop early; it becomes the run's status, and is never hidden by the watch.
        Raises WatchError if no step was measured.
        """
        if self.state == NEW:
            raise WatchError("watch.stop: the watch has not started; use it as a context manager, or call start()")
        if self.state == STOPPED:
            return
        if self.state in (WARMING, MEASURING):
            self.probe.ledger.begin()
        self._step = ExitStack()  # a step that has begun and will not end leaves no records
        self._observing.close()
        self.state = STOPPED
        try:
            self._finish(error)
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"watch: it could not finish: {failure}")
        finally:
            for name in OF_LOOP:  # a watch that is kept for its results keeps no model alive
                vars(self).pop(name, None)

    def _finish(self, error: BaseException | None) -> None:
        """Brings the ranks' records together and makes the tables; raises WatchError if there is nothing to account."""
        measured, world = max(0, self.done - self.warmup), self._world
        problem = self.problem
        if not problem and not measured:
            steps = {0: "without a step", 1: "after 1 step"}.get(self.done, f"after {self.done} steps")
            problem = f"watch: the loop ended {steps}"
            if self._others:
                name = type(self._optimizers[-1]).__name__
                problem += f" of the watched {name}, while another {self._others} stepped; were model and optimizer"
                problem += " replaced? Watch the ones that the loop uses"
            elif self.done:
                problem += f", and the first {self.warmup} are not accounted; give it more steps"
            else:
                ends = self._ends == "optimizer"
                problem += f": {'the optimizer took no step' if ends else 'watch.step() was not called'}"
        if problem and (self.problem or self._others or not self.done):
            callbacks = [f"zerobench.{callback}()" for module, callback in CALLBACKS.items() if module in sys.modules]
            problem += f"; a Trainer is watched by callbacks=[{' or '.join(callbacks)}]" if callbacks else ""
        if error is not None:
            problem = f"it left the loop with {type(error).__name__}"
        if problem:
            world.post_problem(problem)
        if problem and error is None:
            raise WatchError(problem)
        plain = to_plain(self.probe.records(world.rank, Path())) if measured else {}
        # after an error other ranks may wait for this one in a collective: their records will not come
        records, observed = [plain], []
        if error is None:
            records = world.gather(plain)
            if self._observer is not None:
                observed = world.gather(to_plain(self._observer.seen), "seen")
        if world.rank == 0 or error is not None:
            if self._verifying is not None and self._observer is not None and observed:
                about, values = self._about, self._observer.values
                self.certificate = self._verifying.certify(observed, values, about.strategy, about.name)
            self.results, self.folder = rows.write(
                self._about, world, measured, records, error, self._to, self.certificate
            )
        if self._snapshot is not None:
            folder = world.share_folder(self.folder) if error is None else self.folder
            write_snapshot(folder, world.rank, self._snapshot)

    # -- a step ---------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        self.state = WARMING if self.done < self.warmup else MEASURING
        self._phases.begin_step()
        self._step.enter_context(self.probe.step(measured=self.state == MEASURING))

    def _end_step(self) -> None:
        if self.state not in (WARMING, MEASURING) or threading.get_ident() != self._thread:
            return
        self._held.label_updated()
        if self._observer is not None:
            self._observer.end_step(self._loss, self._backwards, self._micro_batches or self._backwards)
        self._step.close()
        self.done += 1
        self._about.losses.append(self._loss)
        self._loss, self._backwards, self._since_update, self._micro_batches, self._forwards = 0.0, 0, 0, 0, 0
        if not self._seen_forward:
            self.problem = (
                f"watch: the watched {type(self.model).__name__} was not called in step {self.done}; was it replaced?"
                " Watch the model that the loop calls"
            )
        self._seen_forward = False
        if self.done < self.warmup + self.steps and not self.problem:
            self._begin_step()
        else:
            self.state = OVER
            # else another mode is on top of the ledger, or compiled code would restore the ledger: `stop` closes it
            if _get_current_dispatch_mode() is self.probe.ledger and not inside_compiled():
                self._observing.close()

    def _take_snapshot(self, device: torch.device) -> None:
        self._snapshot = take(device, self._history) if self._history is not None else None
        self._history = None

    # -- called by the phases -------------------------------------------------------------------------

    def enter_phase(self, phase: str) -> None:
        """Called when a phase of the loop begins."""
        self.probe.enter_phase(phase)
        if phase == "update" and self._observer is not None:
            self._observer.on_engine_step()

    def on_inputs(self, inputs: Any) -> None:
        """Called when the model is called."""
        self._seen_forward = True
        if torch.is_grad_enabled() and not inside_backward():  # no evaluation, and not recomputed
            self._forwards += 1
        tensors = [tensor for tensor in tensors_in(inputs, DEPTH) if has_storage(tensor)]
        self._about.read_batch(tensors)
        self.probe.inputs(*tensors)

    def on_update(self, optimizer: torch.optim.Optimizer, closure: str = "", is_inner: bool = False) -> None:
        """Called when an optimizer's step begins, "before" its closure makes gradients and "after" it has. `is_inner`:
        in the step of another optimizer.
        """
        if optimizer not in self._watched:
            self._others = type(optimizer).__name__
        self._since_update = 0
        if self._observer is not None:
            self._observer.on_update(optimizer, closure, is_inner)

    def on_loss(self, tensors: Any) -> None:
        """Called when backward is called."""
        self._backwards, self._since_update = self._backwards + 1, self._since_update + 1
        self._about.accumulation = max(self._about.accumulation, self._since_update)
        if self._observer is not None and self._observer.before_backward():
            self._micro_batches = 0 if self._forwards else min(1, self._micro_batches)  # the same one's next loss
        self._micro_batches += bool(self._forwards)
        self._forwards = max(0, self._forwards - 1)
        if isinstance(tensors, torch.Tensor):
            self.probe.before_backward(tensors)
        for tensor in tensors_in(tensors, DEPTH):
            if type(tensor) is torch.Tensor and tensor.numel() == 1:
                self._loss += float(tensor.detach())
            elif type(tensor) is torch.Tensor and self._observer is not None and not tensor.detach().isfinite().all():
                self._loss = math.nan  # the samples' weights, and so the loss, are unknown

    def after_backward(self) -> None:
        """Called when the gradients exist."""
        self.probe.after_backward(self.model)
        if not self._seen_forward:  # a loop may call parts or other methods of the model
            self._seen_forward = any(p.grad is not None for p in self.model.parameters())
        if self._observer is not None:
            self._observer.after_backward()


class Verifying:
    """One certificate in the making. Raises FileNotFoundError for a reference without one, ValueError if damaged."""

    def __init__(self, verify: Literal[True] | Certificate | str | Path | ExpectedTraining) -> None:
        if isinstance(verify, ExpectedTraining):
            self.expected = verify
        else:
            self.expected = ExpectedTraining(reference=None if verify is True else verify)
        self.reference, self._unlike = (
            Certificate.read(given, with_updates) if isinstance(given, str | Path) else given
            for given, with_updates in ((self.expected.reference, True), (self.expected.unlike, False))
        )
        if self.reference is not None and not self.reference.values.values:
            raise ValueError(
                "watch: the reference has no values of its updates; watch a loop of one process, with verify=True"
            )

    def certify(self, records: list[dict[str, Any]], values: FirstUpdates, strategy: str, name: str) -> Certificate:
        """Returns the certificate of the job from the observations of all ranks."""
        job = JobSeen(strategy, [rebuild(RankSeen, record) for record in records], name)
        if problem := next((rank.failure for rank in job.ranks if rank.failure), ""):
            row = CertificateRow("watch", "the loop", "not followed to its end", "", problem, UNKNOWN)
            return Certificate(job, [row])
        reference = self.reference.job if self.reference is not None else None
        checks = [*judge(job, self.expected, reference)]
        if reference is not None:
            checks += compare_with_reference(job, reference)
        if self._unlike is not None:
            checks.append(effect_of_option(job, self._unlike.job))
        checks.sort(key=lambda row: FIRST.index(row.verdict) if row.verdict in FIRST else len(FIRST))
        return Certificate(job, checks, values)


class WatchOfTrainer:
    """The common part of both callbacks: the watch, which the first step creates, and its end."""

    watch: Watch | None = None

    def on_train_end(self, *_args: Any, **_objects: Any) -> None:
        """Makes the tables."""
        if self.watch is not None:
            self.watch.stop()

    @property
    def results(self) -> Any:
        """The tables, on rank 0 once the training has ended."""
        return self.watch.results if self.watch is not None else None


def trainer_callback(**options: Any) -> Any:
    """Returns a transformers.TrainerCallback that watches a Trainer's steps; `options` are Watch's.

    A step lasts from one `on_step_begin` to the next `on_step_end`, with all of its micro-batches. The callback's
    `results` exist when training has ended. A trainer does not notify callbacks of a failure:
    `callback.watch.stop(error)` then makes the tables. Raises ImportError if transformers is not installed.
    """
    from transformers import TrainerCallback

    class TrainerWatch(WatchOfTrainer, TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            if self.watch is None:
                self.watch = Watch(objects["model"], objects.get("optimizer"), ends="step", **options).start()

        def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            if self.watch is not None:
                self.watch.step()

    return TrainerWatch()


def lightning_callback(**options: Any) -> Any:
    """Returns a lightning.pytorch.Callback that watches a Trainer's steps; `options` are Watch's.

    A step ends with `on_train_batch_end` of the last micro-batch of an accumulation. Raises ImportError if Lightning
    is not installed.
    """
    from lightning.pytorch import Callback

    class LightningWatch(WatchOfTrainer, Callback):
        _updates = 0

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if self.watch is None:
                self.watch = Watch(trainer.model, trainer.optimizers, ends="step", **options).start()

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.watch is not None and trainer.global_step > self._updates:
                self._updates = trainer.global_step
                self.watch.step()

        def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
            if self.watch is not None:
                self.watch.stop(exception)

    return LightningWatch()
