"""ONE RANK ON ONE PAGE: read this first.

A pass of a cell runs this on every rank, in a fresh process. What is measured, and how, is the probe's
business (probes/); what a strategy does is the engine's (zero/, baselines/); here is only the order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import data, strategies
from .config import activations, combinations, offload, optimizers, precision
from .config.schema_training import NORMS
from .host.environment import SIMULATED, Rendezvous, make_deterministic, rank_environment, seed_everything
from .models import contract
from .predict import activations as predicted_activations
from .predict.build import build_model, initial_options, place_model, shapes_of
from .probes import AccountedPass, TracedPass, gradient_norm, make_pass
from .probes.ledger_maxima import ASIDE
from .probes.nvidia_smi import GpuState
from .probes.snapshot import snapshots
from .probes.step_values import StepResult, StepValues, scale_of, skipped_by
from .records import MemoryRow, StepRow, TensorRow, TimelineRow, TrafficRow
from .theory.shapes import ROOT, ParameterShape, Schedule

Tell = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class RankJob:
    """What one rank of one pass is to do. `config`: a resolved cell. `rendezvous`: where all ranks meet. `folder`: the
    run's, as long as it is written, where this rank leaves what is no table.
    """

    config: dict[str, Any]
    mode: str
    rank: int
    rendezvous: Rendezvous
    folder: str

    @property
    def scratch(self) -> str | None:
        """Where this rank's files go that no one needs after it; None where it has none. The launcher sweeps there."""
        return offload.files_in(self.config, self.folder)

    @property
    def records_history(self) -> bool:
        """Whether the allocator's history is to be recorded; the timed pass is to carry nothing."""
        return self.mode == "accounted" and bool(self.config["measure"].get("snapshot"))


@dataclass
class RankRecord:
    """What one rank of one pass brings home."""

    rank: int
    mode: str
    steps: list[StepRow]
    process_memory: dict[str, int | None]
    schedule: Schedule
    memory: list[MemoryRow]
    tensors: list[TensorRow]
    traffic: list[TrafficRow]
    timeline: list[TimelineRow]
    gpu_states: list[GpuState] = field(default_factory=list)
    buffer_bytes: int = 0
    """Of the module's buffers."""
    own_activation_bytes: int | None = None
    """What the model needs of activations without an engine (predict/activations.py), where that can be foretold."""
    kept: str = ""
    """The largest storage of kept_bytes, in words."""
    witness: str = ""
    """Of the accounted pass: what told of the allocator's total (probes/allocator_total.py)."""
    wall_s: float | None = None
    """From the begin of the first measured step to the end of the last; None in a pass without times."""
    gradient_holders: int = 1
    """How many ranks hold the same part of the gradients, and add the same to their norm."""


def run_rank(job: RankJob, tell: Tell) -> RankRecord:
    """Builds, warms up, steps, and returns the records. `tell` takes progress, a dict now and then."""
    config, measure = job.config, job.config["measure"]
    with (
        rank_environment(
            job.rank, config["world_size"], config["device"], config["backend"], job.rendezvous,
            config["threads"], config["timeout_s"],
        ) as device,
        snapshots(Path(job.folder), job.rank, device, job.records_history),
        make_pass(job.mode, device, config.get("node_size")) as probe,
    ):  # fmt: skip
        # 1 build: the same seed on every rank, the same model for every strategy
        model, shapes, engine, batches = _build(job, probe, device)

        # 2 warm up, then measure: the steps are alike
        results: list[StepResult] = []
        unread: list[StepValues] = []
        total = measure["warmup"] + measure["steps"]
        for number in range(total):
            scale = scale_of(engine)
            with probe.step(measured=(measured := number >= measure["warmup"])):
                loss = _accumulate(engine, batches, probe, model, number, config)
                squares = _look(engine, scale, probe, measured)
                with probe.phase("update"):
                    norm = _clip(engine, config)
                    engine.step()
                probe.after_update(engine.optimizer)
            unread.append(StepValues(loss, norm, scale, skipped_by(engine), squares))
            del loss, norm, scale, squares
            if probe.may_wait:
                results.append(unread.pop().read())
            if job.rank == 0 or config["backend"] == SIMULATED:
                news = {"mode": job.mode, "step": number + 1, "steps": total, "peak_bytes": probe.peak_bytes}
                tell(news | {"loss": results[-1].loss if results else None})

        strategies.settle(engine)
        probe.end_steps()
        results += [values.read() for values in unread]
        holders = gradient_norm.holders(engine)

    # 3 bring home
    buffer_bytes = sum(buffer.nbytes for buffer in model.buffers())
    record = _record(job, probe, results, shapes, holders)
    own = predicted_activations.of(config, batches, build_model) if job.mode == "accounted" and job.rank == 0 else None
    return replace(record, buffer_bytes=buffer_bytes, own_activation_bytes=own)


def _accumulate(
    engine: Any,
    batches: data.Batches | data.OwnBatches,
    probe: Any,
    model: nn.Module,
    number: int,
    config: dict[str, Any],
) -> torch.Tensor:
    """Forward and backward of a step's micro-batches; the mean of their losses."""
    micro_batches, accumulate = config["accumulation"], config["strategy"].get("accumulate", "last")
    mean: torch.Tensor | float = 0.0
    for micro in range(micro_batches):
        with probe.phase("data"):
            batch = batches.batch(number, micro)
        probe.inputs(*data.tensors_of(batch))
        with strategies.synchronizing(engine, accumulate, last=micro == micro_batches - 1):
            with probe.phase("forward"):
                loss = contract.loss_of(engine, batch, config)
            probe.before_backward(loss)
            with probe.phase("backward"):
                engine.backward(loss / micro_batches if micro_batches > 1 else loss)
                probe.after_backward(model)
        mean = loss.detach() if micro_batches == 1 else mean + loss.detach() / micro_batches
        del loss
    assert isinstance(mean, torch.Tensor)
    return mean


def _look(engine: Any, scale: torch.Tensor | float, probe: Any, measured: bool) -> torch.Tensor | None:
    """What this rank adds to the gradients' squared norm, before they are clipped; in a phase that no figure counts."""
    if not probe.may_look(measured):
        return None
    with probe.phase(ASIDE):
        return gradient_norm.squares(engine, scale)


def _clip(engine: Any, config: dict[str, Any]) -> torch.Tensor | None:
    """Clips the gradients where the run asks for it; their norm before."""
    if config["clip"] is None:
        return None
    norm: torch.Tensor = engine.clip_grad_norm_(config["clip"], NORMS[config["clip_norm"]])
    return norm


def _build(
    job: RankJob, probe: Any, device: torch.device
) -> tuple[nn.Module, list[ParameterShape], Any, data.Batches | data.OwnBatches]:
    config = job.config
    if config.get("deterministic"):
        make_deterministic()
    seed_everything(config["seed"])
    with probe.phase("init"):
        model = place_model(config, device)
        shapes = shapes_of(model)
        probe.adopt(model)
        optimizer = optimizers.build(config["optimizer"], model.parameters())
        options = precision.options_of(config["precision"], config["strategy"]["name"])
        options |= combinations.engine_options(config, job.scratch) | initial_options(config, device)
        engine = strategies.wrap(config["strategy"], model, optimizer, clips=config["clip"] is not None, **options)
        batches = data.build_batches(config, job.rank, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what building has left there is no part of a step
    seed_everything(config["seed"] + job.rank)  # from here on ranks may draw, dropout say, each its own
    return model, shapes, engine, batches


def _schedule(probe: Any, shapes: list[ParameterShape], config: dict[str, Any]) -> Schedule:
    """The order of events that the accounted pass saw in its last step; the expected one for the timed pass."""
    more = activations.of_schedule(config)
    if not isinstance(probe, AccountedPass):
        return replace(Schedule.sequential(shapes, config["accumulation"]), **more)
    units = {shape.unit for shape in shapes if shape.unit != ROOT}
    runs = [(name, returns) for name, returns in probe.modules_run if name in units]
    uses, returns = tuple(name for name, _ in runs), tuple(returns for _, returns in runs)
    return Schedule(tuple(shapes), tuple(probe.arrivals), uses, config["accumulation"], returns, **more)


def _record(
    job: RankJob, probe: Any, results: list[StepResult], shapes: list[ParameterShape], holders: int
) -> RankRecord:
    if isinstance(probe, TracedPass):
        probe.finish(Path(job.folder), job.rank)
    times = probe.times or [{}] * len(results)
    steps = [
        StepRow(
            job.rank, job.mode, number, number < job.config["measure"]["warmup"], result.loss,
            t.get("step"), t.get("forward"), t.get("backward"), t.get("update"),
            None, result.loss_scale, result.skipped, t.get("communication"), t.get("exposed"),
            result.grad_squares, result.clip_norm,
        )
        for number, (result, t) in enumerate(zip(results, times, strict=True))
    ]  # fmt: skip
    accounted = isinstance(probe, AccountedPass)
    return RankRecord(
        rank=job.rank,
        mode=job.mode,
        steps=steps,
        process_memory=probe.memory,
        schedule=_schedule(probe, shapes, job.config),
        memory=probe.memory_rows(job.rank) if accounted else [],
        tensors=probe.tensor_rows(job.rank) if accounted else [],
        traffic=probe.traffic_rows(job.rank) if accounted else [],
        timeline=probe.timeline_rows(job.rank) if accounted else [],
        gpu_states=[] if accounted else probe.gpu_states,
        kept=probe.kept if accounted else "",
        witness=probe.witness if accounted else "",
        wall_s=None if accounted else probe.wall_s,
        gradient_holders=holders,
    )
