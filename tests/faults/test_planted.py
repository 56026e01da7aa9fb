"""Mistakes that somebody could write by accident are planted one at a time: each must be seen, and its category or
collective named.

Seen by a sentence of `unexplained`, which needs nothing to compare with, or by the budget of an honest run. What is
wrong with the training itself (a rank's gradients lost, gradients doubled) is not memory's or traffic's to see. A
simulated rank is a process: many runs, one after the other, share one.
"""

import gc
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.cells import cell
from zerobench import strategies, worker
from zerobench.budgets.judge import Limit, judge_cell, recorded
from zerobench.config import schema_memory
from zerobench.config.cell import Cell, CellConfig
from zerobench.config.schema_training import Bf16, Precision
from zerobench.models.gpt import Block
from zerobench.probes.accounted_pass import AccountedPass
from zerobench.probes.allocator import PhasePeaks
from zerobench.probes.ledger import Ledger
from zerobench.probes.traffic import Operation, TrafficMeter
from zerobench.ranks.start_ranks import launch
from zerobench.strategies.ddp import DdpEngine
from zerobench.sweep import aggregate
from zerobench.sweep.cell import new_row
from zerobench.worker import RankJob, run_rank
from zerobench.zero import labels
from zerobench.zero.bucket import GradientBucket
from zerobench.zero.gradients.flow import GradientFlow
from zerobench.zero.offload.cpu import Upload
from zerobench.zero.offload.disk import Region
from zerobench.zero.stage2 import ShardedBucket
from zerobench.zero.strategy import Strategy
from zerobench.zero.units.gathered_unit import GatheredUnit
from zerobench.zero.units.unit import Unit

MIB = 2**20
Plant = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Fault:
    """`named`: words of which one must be in what is said of it. `config`: more of the cell (tests/cells.py)."""

    name: str
    strategy: str
    plant: Plant
    named: tuple[str, ...]
    config: dict[str, Any] = field(default_factory=dict)


def run_planted(jobs: list[tuple[str | None, RankJob]], tell: Any) -> list[Any]:
    """The records of a simulated rank for each job, with the fault of that name planted, or without one."""
    by_name = {fault.name: fault for fault in FAULTS}
    records, foretold = [], worker.predict_activations
    known: dict[str, int | None] = {}

    def once(config: CellConfig, *rest: Any) -> int | None:
        """All runs of one precision are of one model."""
        key = config.precision.name
        if key not in known:
            known[key] = foretold(config, *rest)
        return known[key]

    for name, job in jobs:
        with by_name[name].plant() if name else ExitStack(), patch.object(worker, "predict_activations", once):
            records.append(run_rank(job, lambda _: None))
        gc.collect()  # what one run leaves is not to be freed in the next
    return records


# -- ways to plant ------------------------------------------------------------------------------------------


def wrapping(owner: Any, name: str, act: Callable[..., Any]) -> AbstractContextManager[Any]:
    """`act(original, *arguments)` in place of a method of a class, or of a function of a module."""
    original = getattr(owner, name)

    def planted(*args: Any, **kwargs: Any) -> Any:
        return act(original, *args, **kwargs)

    return patch.object(owner, name, planted)


def in_place_of(owner: Any, name: str) -> Callable[[Callable[..., Any]], Plant]:
    """Makes a function of the original and its arguments a plant in its place."""
    return lambda act: lambda: wrapping(owner, name, act)


def after_step(act: Callable[[Any], None]) -> AbstractContextManager[Any]:
    """`act(engine)` at the end of every step, within the update."""

    def stepped(step: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        result = step(self, *args, **kwargs)
        act(self)
        return result

    return wrapping(Strategy, "step", stepped)


def keeping(make: Callable[[], Any], times: int | None = None) -> Plant:
    """Something is made at the end of each step, the first `times` of them, and kept."""

    def plant() -> AbstractContextManager[Any]:
        kept: list[Any] = []

        def act(_: Any) -> None:
            if times is None or len(kept) < times:
                kept.append(make())

        return after_step(act)

    return plant


def sending(make: Callable[[], torch.Tensor], send: Callable[[torch.Tensor], Any] = dist.all_reduce) -> Plant:
    """Something is sent at the end of every step."""
    return lambda: after_step(lambda _: send(make()))


def bucket() -> torch.Tensor:
    return labels.label(torch.zeros(16 * 1024), labels.COMMUNICATION, "bucket")


def as_control(tensor: torch.Tensor) -> None:
    with labels.collective("control"):
        dist.all_reduce(tensor)


def by_backend(tensor: torch.Tensor) -> None:
    dist.group.WORLD._get_backend(torch.device("cpu")).allreduce([tensor]).wait()


def in_thread(act: Callable[[], Any]) -> None:
    thread = threading.Thread(target=act, name="stray")
    thread.start()
    thread.join()


def made_in_thread() -> torch.Tensor:
    made: list[torch.Tensor] = []
    in_thread(lambda: made.append(torch.zeros(MIB)))
    return made[0]


# -- mistakes of the engine's -------------------------------------------------------------------------------


def gradients_stay() -> AbstractContextManager[Any]:
    return patch.object(ShardedBucket, "release", GradientBucket.release)


@in_place_of(GatheredUnit, "unshard")
def unshards_twice(unshard: Any, self: GatheredUnit) -> None:
    launched = self.gather is not None
    unshard(self)
    if launched:
        self.comm.all_gather(self.full_parameters, self.name).wait()


@in_place_of(strategies, "wrap")
def larger_buckets(wrap: Any, strategy: dict[str, Any], *args: Any, **options: Any) -> Any:
    return wrap(strategy | {"bucket_bytes": 2 * strategy["bucket_bytes"]}, *args, **options)


def one_more_state(engine: Any) -> None:
    for parameter, state in engine.optimizer.state.items():
        state.setdefault("double", torch.zeros_like(parameter, dtype=torch.float64))


@in_place_of(GatheredUnit, "free")
def never_resharded(free: Any, self: GatheredUnit) -> None:
    if self.name != "blocks.1":
        free(self)


@in_place_of(GradientFlow, "reduce")
def never_reduced(reduce: Any, self: GradientFlow, units: Iterable[Unit]) -> None:
    for unit in units:
        if unit.gradients is not self.buckets[0]:
            reduce(self, [unit])
            continue
        unit.gradients.filled.clear()
        unit.gradients.is_reduced = True


def sent_in_fp32() -> AbstractContextManager[Any]:
    return wrapping(Precision, "options_of", lambda made, *args: made(*args) | {"wire_dtype": torch.float32})


@contextmanager
def activations_kept() -> Iterator[None]:
    kept: list[torch.Tensor] = []

    def keeps(forward: Any, self: Block, x: torch.Tensor) -> torch.Tensor:
        kept.append(torch.zeros(4, *x.shape))
        return forward(self, x)

    with wrapping(Block, "forward", keeps), after_step(lambda _: kept.clear()):
        yield


@in_place_of(Block, "forward")
def output_kept(forward: Any, self: Block, x: torch.Tensor) -> torch.Tensor:
    """Until the next forward, in which as much was alive anyway."""
    mixed = forward(self, x)
    self.last = mixed.detach()
    return mixed


def every_fourth_step() -> AbstractContextManager[Any]:
    kept: list[torch.Tensor] = []
    number = count(1)
    return after_step(lambda _: kept.append(torch.zeros(MIB // 4 if next(number) % 4 == 0 else 1)))


@in_place_of(Ledger, "_bury")
def frees_missed(bury: Any, self: Ledger, key: int) -> None:
    """The ledger does not hear that large storages die."""
    stored = self._live.get(key)
    if stored is None or stored.bytes < 16 * 1024:
        bury(self, key)


@in_place_of(TrafficMeter, "_record")
def wrong_element_size(record: Any, self: TrafficMeter, operation: Operation, times: int) -> None:
    """The meter counts two bytes of every element of four."""
    sizes = {name: getattr(operation, name) / 2 for name in ("wire_bytes", "within_bytes", "between_bytes")}
    record(self, operation._replace(payload_bytes=operation.payload_bytes // 2, **sizes), times)


def warm_up_counted() -> AbstractContextManager[Any]:
    """What the last warm-up step has sent is not forgotten."""

    def kept(step: Any, self: AccountedPass, measured: bool) -> AbstractContextManager[None]:
        @contextmanager
        def stepped() -> Iterator[None]:
            with step(self, measured):
                if measured and not self._measured:
                    self.meter.operations += last
                yield
                if not measured:
                    last[:] = self.meter.operations

        return stepped()

    last: list[Any] = []
    return wrapping(AccountedPass, "step", kept)


@in_place_of(PhasePeaks, "enter_phase")
def peak_reset(enter: Any, self: PhasePeaks, phase: str) -> None:
    """The allocator's peaks until the update are forgotten."""
    enter(self, phase)
    if phase == "update":
        self._stretch.clear()


@in_place_of(DdpEngine, "step")
def clones_gradients(step: Any, self: DdpEngine, *args: Any, **kwargs: Any) -> Any:
    _until_the_end = [p.grad.clone() for p in self.module.parameters()]
    return step(self, *args, **kwargs)


def mislabeled() -> torch.Tensor:
    return labels.label(torch.zeros(MIB // 4), labels.ACTIVATIONS, "a third momentum")


@in_place_of(Upload, "send")
def uploads_twice(send: Any, self: Upload, place: torch.Tensor, master: torch.Tensor) -> Any:
    send(self, place, master)
    return send(self, place, master)


@in_place_of(Region, "read")
def reads_twice(read: Any, self: Region, tensor: torch.Tensor, at: int = 0) -> Any:
    read(self, tensor, at).wait()
    return read(self, tensor, at)


BF16: dict[str, Any] = {"precision": "bf16"}
FAULTS = [
    Fault("a bucket leaked once", "zero2", keeping(bucket, 1), ("communication",)),
    Fault("a gradient shard kept after the update", "zero2", gradients_stay, ("gradients",)),
    Fault("a second gather of every unit", "zero3", unshards_twice, ("all_gather",)),
    Fault("buckets of double size, zero2", "zero2", larger_buckets, ("communication",)),
    Fault("an fp64 state added", "zero2", partial(after_step, one_more_state), ("optimizer",)),
    Fault("a unit not resharded", "zero3", never_resharded, ("parameters", "all_gather")),
    Fault("a bucket never reduced", "zero1", never_reduced, ("reduce_scatter",)),
    Fault("a host upload twice", "zero2", uploads_twice, ("up:",), {"offload": "cpu"}),
    Fault("a file read twice", "zero2", reads_twice, ("read:",), {"offload": "nvme"}),
    Fault("fp32 on the wire, zero2", "zero2", sent_in_fp32, ("reduce_scatter",), BF16),
    Fault("an all-reduce of 1 element", "zero2", sending(lambda: torch.zeros(1)), ("control:",)),
    Fault("an all-reduce of 1 MiB called control", "zero2", sending(lambda: torch.zeros(MIB // 4), as_control),
          ("all_reduce",)),
    Fault("an int32 all-reduce of 1 MiB", "zero2", sending(lambda: torch.zeros(MIB // 4, dtype=torch.int32)),
          ("all_reduce",)),
    Fault("activations kept", "zero2", activations_kept, ("activations: ",)),
    Fault("outputs kept until the next forward", "zero2", output_kept, ("between_steps_activations_bytes",)),
    Fault("a leak on every 4th step", "zero2", every_fourth_step, ("more after the measured steps than before them",)),
    Fault("the ledger misses frees", "zero2", frees_missed, ("outside the ledger: -",)),
    Fault("a meter of a wrong element size", "zero2", wrong_element_size, ("the meter: ",)),
    Fault("a warm-up step counted", "zero2", warm_up_counted, ("the meter: step 0 has 2 ×",)),
    Fault("the allocator's peak reset at the update", "zero2", peak_reset, ("so the allocator's peak was reset",)),
    Fault("a temporary of 4 MiB", "zero2", lambda: after_step(lambda _: torch.zeros(MIB)), ("temporary",)),
    Fault("DDP's gradients cloned", "ddp", clones_gradients, ("gradients",)),
    Fault("1 MiB of states mislabeled", "zero2", keeping(mislabeled, 1), ("a third momentum",)),
    Fault("an all-reduce by the raw backend", "zero2", sending(lambda: torch.zeros(MIB // 4), by_backend),
          ("all_reduce",)),
    Fault("a tensor of 4 MiB made in a thread", "zero2", keeping(made_in_thread, 1), ("thread stray",)),
    Fault("an all-reduce of 1 MiB in a thread", "zero2",
          lambda: after_step(lambda _: in_thread(lambda: dist.all_reduce(torch.zeros(MIB // 4)))), ("all_reduce",)),
]  # fmt: skip


NAMED = {
    "bf16": Bf16(),
    "cpu": schema_memory.CpuOffload(),
    "nvme": schema_memory.NvmeOffloadConfig(block_bytes=64 * 1024, buffers=8, depth=2),
}


REPEATED = (
    "an int32 all-reduce of 1 MiB", "an all-reduce by the raw backend", "DDP's gradients cloned",
    "buckets of double size, zero2", "an fp64 state added", "a host upload twice", "a file read twice",
    "fp32 on the wire, zero2", "an all-reduce of 1 element",
    "activations kept", "a temporary of 4 MiB", "an all-reduce of 1 MiB in a thread", "a meter of a wrong element size",
)  # fmt: skip
"""Faults that only `make test-all` plants; their messages have unit tests."""


def cell_of(fault: Fault) -> Cell:
    more = {key: NAMED[value] for key, value in fault.config.items()}
    one = cell(fault.strategy, 2, backend="simulated", **more)
    assert not one.problems, one.problems
    return one


def setting(fault: Fault) -> tuple[str, ...]:
    return (fault.strategy, *fault.config.values())


@cache
def records(folder: Path, thorough: bool) -> dict[tuple[str, ...] | str, Any]:
    """Returns the record of every fault by its name, and of an honest run by its setting; one process makes all."""
    chosen = [fault for fault in FAULTS if thorough or fault.name not in REPEATED]
    honest = {setting(fault): cell_of(fault) for fault in chosen}
    jobs: dict[tuple[str, ...] | str, Cell] = {**honest, **{fault.name: cell_of(fault) for fault in chosen}}
    planted = [
        (key if isinstance(key, str) else None, RankJob(one.config, "accounted", 0, str(folder / "meet"), str(folder)))
        for key, one in jobs.items()
    ]
    (found,) = launch(run_planted, [planted], folder / "logs", 300)
    rows = {}
    for (key, one), record in zip(jobs.items(), found, strict=True):
        rows[key] = row = new_row(one)
        row.status = "ok"
        aggregate.join(row, one.config, [record])
    return rows


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory, thorough: bool) -> dict[tuple[str, ...] | str, Any]:
    return records(tmp_path_factory.mktemp("planted"), thorough)


def said_of(row: Any, honest: Any, config: CellConfig) -> tuple[list[str], list[str]]:
    """Returns the row's own sentences, and those of the budget of an honest run."""
    limits = {name: Limit(value) for name in recorded(config) if (value := getattr(honest, name)) is not None}
    found = judge_cell("cell", limits, vars(row))
    return [one for one in row.unexplained.split("; ") if one], [one.sentence for one in found]


@pytest.mark.parametrize(
    "fault",
    [pytest.param(one, marks=pytest.mark.thorough if one.name in REPEATED else (), id=one.name) for one in FAULTS],
)
def test_a_planted_mistake_is_seen_and_named(rows: dict[Any, Any], fault: Fault) -> None:
    row, honest = rows[fault.name], rows[setting(fault)]
    alone, held = said_of(row, honest, cell_of(fault).config)
    assert any(word in sentence for word in fault.named for sentence in [*alone, *held]), (alone, held)
    blamed = ("reduce_scatter:", "reduce_scatter moved most", "control:", "missed a free")
    if fault.plant in (wrong_element_size, warm_up_counted, peak_reset):
        assert not any(word in sentence for word in blamed for sentence in [*alone, *held]), (alone, held)


def test_an_honest_run_has_nothing_unexplained(rows: dict[Any, Any]) -> None:
    for key, row in rows.items():
        assert isinstance(key, str) or row.unexplained == "", key
