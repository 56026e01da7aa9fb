"""The tables of a watched loop, in the format of any other run's, from the records of its ranks.

Records go to rank 0 through the job's store: no collective, so a rank that has left blocks no other; as JSON: no data
from another process is unpickled.

Facts that a loop does not state are inferred: the strategy and the optimizer from their classes, the batch from the
first tensor that the model is called with. Its config has the format of a cell's, so that every verb can read it.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..config.cell import WATCHED, CellConfig
from ..host.job import rebuild
from ..host.temporary import temporary_folder
from ..probes.probe import PassRecords, StepResult
from ..rank_record import RankRecord, step_records
from ..results import provenance
from ..results.folders import claim_folder, write_run
from ..results.tables import Results, load
from ..sweep.aggregate import blank_row, join
from ..theory.shapes import ROOT, ParameterShape, Schedule
from . import held_tensors
from .certificate import Certificate
from .held_tensors import full_numel

PROBLEM = "problem"
"""Key of the error message that a rank posts instead of its record."""

_exchanges = count(1)


class WatchError(RuntimeError):
    """A loop cannot be watched, made no step, or a rank's record is missing."""


@dataclass(frozen=True)
class WatchedWorld:
    """The ranks of a loop, and the start of its watch: by the wall clock, and in seconds of a monotonic clock."""

    rank: int
    world_size: int
    node_size: int | None
    timeout_s: float
    """How long rank 0 waits for a record."""
    prefix: str = field(default_factory=lambda: f"zerobench/watching/{next(_exchanges)}")
    """Prefix of keys in the store; the same on every rank that starts its watches in the same order."""
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="milliseconds"))
    began: float = field(default_factory=time.monotonic)

    @classmethod
    def here(cls, node_size: int | None, timeout_s: float) -> WatchedWorld:
        """Reads the default process group; without one, a world of one rank."""
        joined = dist.is_initialized()
        return cls(dist.get_rank() if joined else 0, dist.get_world_size() if joined else 1, node_size, timeout_s)

    def gather(self, own: dict[str, Any], kind: str = "record") -> list[dict[str, Any]]:
        """Returns all records on rank 0, elsewhere only `own`. Raises WatchError for a missing record or a problem."""
        if self.rank:
            self._post(kind, own)
        if self.rank or self.world_size == 1:
            return [own]
        store, records = _store(), {0: own}
        missing: list[int] = []
        for other in range(1, self.world_size):
            key = f"{self.prefix}/{kind}/{other}"
            try:
                store.wait([key], timedelta(seconds=self.timeout_s if not missing else 0.05))
            except RuntimeError:  # a file store raises no DistError
                missing.append(other)
                continue
            records[other] = json.loads(store.get(key))
            store.delete_key(key)
        for other, record in records.items():
            if PROBLEM in record:  # it may explain why other ranks are missing
                raise WatchError(f"watch: rank {other}: {record[PROBLEM].removeprefix('watch: ')}")
        if missing:
            ranks = ", ".join(map(str, missing))
            raise WatchError(
                f"watch: no record came from rank {ranks} within {self.timeout_s:g} s;"
                " every rank must watch its loop to the end"
            )
        return [*records.values()]

    def post_problem(self, problem: str) -> None:
        """Sends an error message in place of this rank's record, or of rank 0's folder."""
        with suppress(WatchError):  # the caller raises an error with this message as well
            if self.rank:
                self._post("record", {PROBLEM: problem})
            elif self.world_size > 1:
                _store().set(f"{self.prefix}/folder", "")

    def share_folder(self, folder: Path | None) -> Path | None:
        """Returns rank 0's `folder` on every rank. Raises WatchError if rank 0 names none in `timeout_s` seconds."""
        if self.world_size == 1:
            return folder
        store, key = _store(), f"{self.prefix}/folder"
        if self.rank == 0:
            store.set(key, str(folder.resolve()) if folder is not None else "")
            return folder
        try:
            store.wait([key], timedelta(seconds=self.timeout_s))
        except RuntimeError as error:  # a file store raises no DistError
            raise WatchError(f"watch: rank 0 named no folder for snapshots within {self.timeout_s:g} s") from error
        name = store.get(key).decode()
        return Path(name) if name else None

    def _post(self, kind: str, record: dict[str, Any]) -> None:
        try:
            _store().set(f"{self.prefix}/{kind}/{self.rank}", json.dumps(record))
        except RuntimeError as error:  # a file store raises no DistError
            raise WatchError("watch: rank 0, which brings the records together, is gone") from error


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()  # torch-private, pinned by a test


# -- the tables --------------------------------------------------------------------------------------------


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
            name or type(model).__name__, held_tensors.strategy_name(outer, optimizers), optimizer, implementation,
            precision, first.device.type,
            [ParameterShape(full_numel(p), p.element_size(), p.requires_grad, ROOT) for p in model.parameters()],
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
    machine = provenance.provenance(config) | {
        "commit": provenance.ask_git("rev-parse", "HEAD", where=Path.cwd()),
        "launched_by": "watch",
    }
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
            steps=step_records(rank, "accounted", about.warmup, results, []), schedule=schedule,
        )
        for rank, record in enumerate(plain, 0 if error is None else world.rank)
        if record
    ]  # fmt: skip
    tables = join(row, config, records, theory=False) if records else {}
    if certificate is not None:
        tables["certificate"] = certificate.rows
    with nullcontext(Path(to)) if to is not None else temporary_folder() as folder:
        name = NOT_IN_A_FOLDER_NAME.sub("-", about.name).lstrip(".-") or "loop"
        prefix = f"{name.encode()[:80].decode(errors='ignore')}-{row.cell_id}"
        path = write_run(claim_folder(folder, prefix), prefix, row, config, machine, tables)
        if certificate is not None and to is not None:
            certificate.write(path)
        return load(path), path if to is not None else None
