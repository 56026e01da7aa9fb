"""ONE RANK ON ONE PAGE: read this first.

A pass of a cell runs this on every rank, in a fresh process (ranks/rank_main.py). How anything is measured
is the probe's business (probes/probe.py); what a strategy does is the engine's (strategies/engine.py, zero/); here is
only the order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import data, strategies
from .config import combinations
from .config.cell import CellConfig
from .config.schema_training import NORMS
from .fake import RealWorld, world_of_tensors
from .host.environment import FAKE, SIMULATED, Rendezvous, make_deterministic, rank_environment, seed_everything
from .models import loss_of
from .models.linears import TensorAxis
from .predict.build import build_as_run, connect_axis, initial_options, place_model, schedule_options, shapes_of
from .predict.estimate import predict_activations
from .probes import Probe, make_pass
from .probes.intervals import ASIDE
from .probes.labeling import tensors_in
from .probes.probe import Saves, StepResult, current_scale, read_step, squares
from .probes.snapshot import snapshots
from .rank_record import RankRecord, schedule_of, step_records
from .sections import known
from .strategies.engine import Engine
from .theory.shapes import ParameterShape

Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class RankJob:
    """The work of one rank in one pass. `config`: a resolved cell. `rendezvous`: where all ranks meet. `folder`: the
    folder in which the run is being written; this rank puts files there that are not tables. `own_activation_bytes`:
    the prediction for an earlier cell with the same model and batch; if None, rank 0 predicts it in the accounted pass.
    `operators`: whether events include every operator that computes.
    """

    config: CellConfig
    mode: str
    rank: int
    rendezvous: Rendezvous
    folder: str
    own_activation_bytes: int | None = None
    operators: bool = False

    @property
    def scratch(self) -> str | None:
        """Folder of this rank's offloaded states; None without such files. The launcher removes those left there."""
        return self.config.offload.files_in(self.folder)


def run_rank(job: RankJob, report: Report) -> RankRecord:
    """Builds, warms up, steps, and returns the records. `report` takes progress, a dict now and then."""
    config, measure = job.config, job.config.measure
    with (
        rank_environment(
            job.rank, config.world_size, config.device, config.backend, job.rendezvous,
            known(config.launch.threads), config.launch.timeout_s,
        ) as device,
        world_of_tensors(config.tensors == FAKE) as world,
        # only the accounted pass records a snapshot's history
        snapshots(Path(job.folder), job.rank, device, job.mode == "accounted" and measure.snapshot) as history,
        make_pass(
            job.mode, device, config.node_size, history, world.is_fake,
            not strategies.predicts(config.strategy.values()), measure.events, job.operators,
            config.tensor_parallel,
        ) as probe,
        Saves(measure.save, measure.save_every, measure.warmup, Path(job.folder), job.rank) as saves,
    ):  # fmt: skip
        # 1 build: the same seed on every rank, the same model for every strategy
        with world.building():
            axis = connect_axis(config, device)
            model, shapes, engine, batches = _build(job, probe, device, axis)

        # 2 warm up, then measure: the steps are alike
        results: list[StepResult] = []
        unread: list[Callable[[], StepResult]] = []
        total = measure.warmup + measure.steps
        for number in range(total):
            scale = current_scale(engine)
            with probe.step(measured=(measured := number >= measure.warmup)):
                loss = _accumulate(engine, batches, probe, world, model, number, config)
                # this rank's part of the squared gradient norm before clipping, in a phase that no figure counts; not
                # with tensor parallelism: a sum over the ranks would count replicated parameters several times
                square_sum = None
                if axis is None and probe.may_read_gradients(measured):
                    with probe.phase(ASIDE):
                        # fake gradients have no values: the first suffices, as the result takes the same memory
                        square_sum = squares(islice(engine.reduced_gradients(), 1 if world.is_fake else None), scale)
                with probe.phase("update"):
                    norm = None
                    if config.clip is not None:
                        norm = engine.clip_grad_norm_(config.clip, NORMS[config.clip_norm])
                    engine.step()
                probe.after_update(engine.optimizer)
                saves.after_update(number, engine, probe)
            unread.append(partial(read_step, loss, norm, scale, engine.scaler.skipped, square_sum))
            del loss, norm, scale, square_sum
            if probe.may_wait:
                results.append(unread.pop()())
            if job.rank == 0 or config.backend == SIMULATED:
                progress = {"mode": job.mode, "step": number + 1, "steps": total, "peak_bytes": probe.peak_bytes}
                report(progress | {"loss": results[-1].loss if results and not world.is_fake else None})

        engine.settle()  # a gather that overlaps the next forward belongs to the last step's time
        probe.end_steps()
        results += [read() for read in unread]
        holders = engine.gradient_holders

    # 3 collect the records, after the probe has stopped observing: this is not part of a step
    records = probe.records(job.rank, Path(job.folder))
    own_activation_bytes = job.own_activation_bytes
    if own_activation_bytes is None and job.mode == "accounted" and job.rank == 0:
        own_activation_bytes = predict_activations(config, batches, build_as_run)
    return RankRecord(
        **vars(records),
        rank=job.rank,
        mode=job.mode,
        steps=step_records(job.rank, job.mode, measure.warmup, results, records.times, saves),
        schedule=schedule_of(records.order, shapes, config.accumulation, schedule_options(config)),
        checkpoint_bytes=saves.checkpoint_bytes,
        buffer_bytes=sum(buffer.nbytes for buffer in model.buffers()),
        own_activation_bytes=own_activation_bytes,
        gradient_holders=holders,
    )


def _accumulate(
    engine: Engine, batches: data.Batches | data.OwnBatches, probe: Probe, world: RealWorld, model: nn.Module,
    number: int, config: CellConfig,
) -> torch.Tensor:  # fmt: skip
    micro_batches, accumulate = config.accumulation, config.strategy.reduces
    if world.is_fake and number < config.measure.warmup:
        micro_batches = 1  # without values the first steps only lead to the steady state
    mean: torch.Tensor | float = 0.0
    for micro in range(micro_batches):
        with probe.phase("data"):
            batch = world.take(batches.batch(number, micro))
        probe.inputs(*tensors_in(batch))
        with strategies.synchronizing(engine, accumulate, last=micro == micro_batches - 1):
            with probe.phase("forward"), world.model_runs():
                loss = loss_of(engine, batch, config.called)
            probe.before_backward(loss)
            with probe.phase("backward"):
                with world.model_runs():
                    engine.backward(loss / micro_batches if micro_batches > 1 else loss)
                probe.after_backward(model)
        mean = loss.detach() if micro_batches == 1 else mean + loss.detach() / micro_batches
        del loss
    assert isinstance(mean, torch.Tensor)
    return mean


def _build(
    job: RankJob, probe: Probe, device: torch.device, axis: TensorAxis | None
) -> tuple[nn.Module, list[ParameterShape], Engine, data.Batches | data.OwnBatches]:
    config, replica = job.config, job.rank // job.config.tensor_parallel  # the number of the model's copy
    if config.deterministic:
        make_deterministic()
    seed_everything(config.seed)
    with probe.phase("init"):
        model = place_model(config, device, axis)
        shapes = shapes_of(model, config.optimizer.owned(model), config.optimizer.block_numel)
        probe.adopt(model)
        optimizer = config.optimizer.build_for(model)
        options = config.precision.engine_options(config)
        options |= combinations.engine_options(config, job.scratch) | initial_options(config, device)
        options |= {} if axis is None else {"group": axis.data_group}
        engine = strategies.wrap(config.strategy.values(), model, optimizer, clips=config.clip is not None, **options)
        del optimizer  # of a peer that builds another it would keep the whole model's parameters
        batches = data.build_batches(config.batching, replica, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what building has left there is no part of a step
    seed_everything(config.seed + replica)  # from here on ranks may draw (dropout), each model its own
    return model, shapes, engine, batches
