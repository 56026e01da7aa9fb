"""The tables of a watched loop: a row and its long tables, in the same format as any other run's.

Facts that a loop does not state are inferred: the strategy and the optimizer from their classes, the batch from the
first tensor that the model is called with. Its config has the format of a cell's, so that every verb can read it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..config.cell import WATCHED, CellConfig
from ..host.serialize import rebuild
from ..host.temporary import temporary_folder
from ..probes.probe import PassRecords, StepResult
from ..rank_record import RankRecord, steps_of
from ..results import provenance
from ..results.folders import claim_folder, write_run
from ..results.tables import Results, load
from ..sweep.aggregate import blank_row, join
from ..theory.shapes import ROOT, ParameterShape, Schedule
from . import held_tensors
from .certificate import Certificate
from .exchange import WatchedWorld
from .held_tensors import numel_of

PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
NOT_IN_A_FOLDER_NAME = re.compile(r"[^\w.+=\[\]-]+")
"""A watch may be named like its test: "test_memory.py::test_step"."""


@dataclass
class About:
    """A loop as its objects reveal it. `batch`, `sequence`: of the first call; `accumulation`: backwards per update."""

    name: str
    strategy: str
    optimizer: str
    implementation: str
    precision: str
    device: str
    shapes: list[ParameterShape]
    buffer_bytes: int
    warmup: int
    batch: int = 0
    sequence: int = 1
    accumulation: int = 1
    losses: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, name: str, outer: Any, model: nn.Module, optimizers: list[Any], warmup: int) -> About:
        """Reads a loop's objects before its first step."""
        first = next(model.parameters(), torch.zeros(0))
        inner = held_tensors.torch_optimizers(optimizers)
        optimizer = type(inner[-1]).__name__.lower() if inner else "none"
        defaults = inner[-1].defaults if inner else {}
        implementation = next((option for option in ("fused", "foreach") if defaults.get(option)), "auto")
        precision = PRECISIONS.get(first.dtype, str(first.dtype).removeprefix("torch."))
        return cls(
            name or type(model).__name__, held_tensors.strategy_of(outer, optimizers), optimizer, implementation,
            precision, first.device.type,
            [ParameterShape(numel_of(p), p.element_size(), p.requires_grad, ROOT) for p in model.parameters()],
            sum(buffer.nbytes for buffer in model.buffers()), warmup,
        )  # fmt: skip

    def read_batch(self, tensors: Sequence[torch.Tensor]) -> None:
        """Infers batch and sequence from the first call: integers of shape (sequences, tokens), or (samples, ...)."""
        if not self.batch and tensors and tensors[0].dim():
            is_tokens = tensors[0].dim() == 2 and not tensors[0].is_floating_point()
            self.batch, self.sequence = tensors[0].shape[0], tensors[0].shape[1] if is_tokens else 1

    def config(self, world: WatchedWorld, measured: int) -> CellConfig:
        """Returns the loop as a cell."""
        return CellConfig.from_dict({
            "strategy": {"name": self.strategy},
            "model": {"name": self.name, "kind": WATCHED},
            "data": {"name": WATCHED},
            "optimizer": {"name": self.optimizer, "implementation": self.implementation, "lr": None},
            "precision": {"name": self.precision},
            "measure": {"steps": measured, "warmup": self.warmup, "passes": "accounted"},
            "world_size": world.world_size,
            "node_size": world.node_size,
            "device": self.device,
            "backend": dist.get_backend() if dist.is_initialized() else "none",
            "micro_batch": self.batch,
            "accumulation": self.accumulation,
            "batch": self.batch * self.accumulation * world.world_size,
            "sequence": self.sequence,
            "seed": 0,
            "draw_on": "cpu",
            "threads": torch.get_num_threads(),
        })  # fmt: skip


def write(
    about: About, world: WatchedWorld, measured: int, plain: list[dict[str, Any]], error: BaseException | None,
    to: str | Path | None, certificate: Certificate | None = None,
) -> tuple[Results, Path | None]:  # fmt: skip
    """Makes the run of a watch from its ranks' records, below `to`. Returns its tables and its folder."""
    config = about.config(world, measured)
    machine = provenance.provenance(config) | {"commit": provenance.commit_of(Path.cwd()), "launched_by": "watch"}
    row = blank_row(config, machine, world.started)
    row.status = "ok"
    if error is not None:
        lines = str(error).strip().splitlines()
        row.reason = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
        is_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
        row.status = "oom" if is_memory else "interrupted" if isinstance(error, KeyboardInterrupt) else "crash"
    row.seconds = round(time.monotonic() - world.began, 3)
    losses = (about.losses + [float("nan")] * (about.warmup + measured))[: about.warmup + measured]
    results = [StepResult(loss, None, 1.0, False, None) for loss in losses]
    schedule = Schedule.sequential(about.shapes)
    records = [
        RankRecord(
            **vars(rebuild(PassRecords, record)), rank=rank, mode="accounted", buffer_bytes=about.buffer_bytes,
            steps=steps_of(rank, "accounted", about.warmup, results, []), schedule=schedule,
        )
        for rank, record in enumerate(plain, 0 if error is None else world.rank)
        if record
    ]  # fmt: skip
    tables = join(row, config, records, theory=False) if records else {}
    if certificate is not None:
        tables["certificate"] = certificate.rows
    with nullcontext(Path(to)) if to is not None else temporary_folder() as folder:
        prefix = f"{NOT_IN_A_FOLDER_NAME.sub('-', about.name)[:80]}-{row.cell_id}"
        path = write_run(claim_folder(folder, prefix), prefix, row, config, machine, tables)
        if certificate is not None and to is not None:
            certificate.write(path)
        return load(path), path if to is not None else None
