"""Mistakes that are planted in the engine and beside it, one at a time, and a rank that runs with them.

Each is what somebody could write by accident. A simulated rank is a process: many runs, one after the other, share one.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from zerobench import strategies
from zerobench.config.cell import CellConfig
from zerobench.config.schema_training import Precision
from zerobench.models.gpt import Block
from zerobench.predict import activations
from zerobench.probes.ledger import Ledger
from zerobench.strategies.ddp import DdpEngine
from zerobench.worker import RankJob, run_rank
from zerobench.zero import labels, stage1
from zerobench.zero.gradients.bucket_base import GradientBucket
from zerobench.zero.gradients.flow import GradientFlow
from zerobench.zero.layout import Layout
from zerobench.zero.stage1 import Stage1
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
    records, foretold = [], activations.of
    known: dict[str, int | None] = {}

    def once(config: CellConfig, *rest: Any) -> int | None:
        """All runs of one precision are of one model."""
        key = config.precision.name
        if key not in known:
            known[key] = foretold(config, *rest)
        return known[key]

    for name, job in jobs:
        with by_name[name].plant() if name else ExitStack(), patch.object(activations, "of", once):
            records.append(run_rank(job, lambda _: None))
        gc.collect()  # what one run leaves is not to be freed in the next
    return records


# -- ways to plant ------------------------------------------------------------------------------------------


@contextmanager
def after_step(act: Callable[[Any], None], engine: type = Strategy) -> Iterator[None]:
    """`act(engine)` at the end of every step, within the update."""
    step = engine.step

    def stepped(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = step(self, *args, **kwargs)
        act(self)
        return result

    with patch.object(engine, "step", stepped):
        yield


@contextmanager
def before_step(act: Callable[[Any], None], engine: type) -> Iterator[None]:
    """`act(engine)` where a step begins."""
    step = engine.step

    def stepped(self: Any, *args: Any, **kwargs: Any) -> Any:
        kept = act(self)
        result = step(self, *args, **kwargs)
        del kept
        return result

    with patch.object(engine, "step", stepped):
        yield


def keeping(make: Callable[[], Any], times: int | None = None) -> Plant:
    """Something is made at the end of each step, the first `times` of them, and kept."""

    @contextmanager
    def plant() -> Iterator[None]:
        kept: list[Any] = []

        def act(_: Any) -> None:
            if times is None or len(kept) < times:
                kept.append(make())

        with after_step(act):
            yield

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


@contextmanager
def gathers_twice() -> Iterator[None]:
    after_update = Stage1.after_update

    def twice(self: Stage1) -> None:
        after_update(self)
        self.comm.all_gather(self.units[0].full_parameters, self.units[0].name).wait()

    with patch.object(Stage1, "after_update", twice):
        yield


@contextmanager
def unshards_twice() -> Iterator[None]:
    unshard = GatheredUnit.unshard

    def twice(self: GatheredUnit) -> None:
        launched = self.gather is not None
        unshard(self)
        if launched:
            self.comm.all_gather(self.full_parameters, self.name).wait()

    with patch.object(GatheredUnit, "unshard", twice):
        yield


@contextmanager
def larger_buckets() -> Iterator[None]:
    wrap = strategies.wrap

    def doubled(strategy: dict[str, Any], *args: Any, **options: Any) -> Any:
        return wrap(strategy | {"bucket_bytes": 2 * strategy["bucket_bytes"]}, *args, **options)

    with patch.object(strategies, "wrap", doubled):
        yield


def one_more_state(engine: Any) -> None:
    for parameter, state in engine.optimizer.state.items():
        state.setdefault("double", torch.zeros_like(parameter, dtype=torch.float64))


@contextmanager
def never_resharded() -> Iterator[None]:
    reshard = GatheredUnit.reshard

    def but_one(self: GatheredUnit, keeps: bool = True) -> None:
        if self.name != "blocks.1":
            reshard(self, keeps)

    with patch.object(GatheredUnit, "reshard", but_one):
        yield


@contextmanager
def padded(numel: int) -> Iterator[None]:
    cut = stage1.buckets

    def longer(*args: Any, **kwargs: Any) -> list[list[Layout]]:
        runs = cut(*args, **kwargs)
        last = runs[-1][-1]
        runs[-1][-1] = Layout(last.pieces, last.world_size, last.align, last.tail + numel)
        return runs

    with patch.object(stage1, "buckets", longer):
        yield


@contextmanager
def never_reduced() -> Iterator[None]:
    reduce = GradientFlow.reduce

    def but_one(self: GradientFlow, units: Iterable[Unit]) -> None:
        for unit in units:
            if unit.gradients is not self.buckets[0]:
                reduce(self, [unit])
                continue
            unit.gradients.filled.clear()
            unit.gradients.is_reduced = True

    with patch.object(GradientFlow, "reduce", but_one):
        yield


@contextmanager
def sent_in_fp32() -> Iterator[None]:
    options_of = Precision.options_of

    def wide(*args: Any) -> dict[str, Any]:
        return options_of(*args) | {"wire_dtype": torch.float32}

    with patch.object(Precision, "options_of", wide):
        yield


@contextmanager
def activations_kept() -> Iterator[None]:
    kept: list[torch.Tensor] = []
    forward = Block.forward

    def keeps(self: Block, x: torch.Tensor) -> torch.Tensor:
        kept.append(torch.zeros(4, *x.shape))
        return forward(self, x)

    with patch.object(Block, "forward", keeps), after_step(lambda _: kept.clear()):
        yield


@contextmanager
def output_kept() -> Iterator[None]:
    """Until the next forward, in which as much was alive anyway."""
    forward = Block.forward

    def keeps(self: Block, x: torch.Tensor) -> torch.Tensor:
        mixed = forward(self, x)
        self.last = mixed.detach()
        return mixed

    with patch.object(Block, "forward", keeps):
        yield


def every_fourth_step() -> AbstractContextManager[Any]:
    kept: list[torch.Tensor] = []
    number = count(1)
    return after_step(lambda _: kept.append(torch.zeros(MIB // 4 if next(number) % 4 == 0 else 1)))


@contextmanager
def frees_missed() -> Iterator[None]:
    """The ledger does not hear that large storages die."""
    bury = Ledger._bury

    def deaf(self: Ledger, key: int) -> None:
        stored = self._live.get(key)
        if stored is None or stored.bytes < 16 * 1024:
            bury(self, key)

    with patch.object(Ledger, "_bury", deaf):
        yield


def cloned_gradients(engine: Any) -> list[torch.Tensor]:
    return [p.grad.clone() for p in engine.module.parameters()]


def mislabeled() -> torch.Tensor:
    return labels.label(torch.zeros(MIB // 4), labels.ACTIVATIONS, "a third momentum")


@contextmanager
def uploads_twice() -> Iterator[None]:
    from zerobench.zero.offload.cpu import Upload

    send = Upload.send

    def twice(self: Upload, place: torch.Tensor, master: torch.Tensor) -> Any:
        send(self, place, master)
        return send(self, place, master)

    with patch.object(Upload, "send", twice):
        yield


@contextmanager
def larger_pool() -> Iterator[None]:
    from zerobench.zero.offload.disk.direct_io import Pool

    make = Pool.__init__

    def doubled(self: Pool, buffer_bytes: int, count: int, pinned: bool = False) -> None:
        make(self, buffer_bytes, 2 * count, pinned)

    with patch.object(Pool, "__init__", doubled):
        yield


@contextmanager
def reads_twice() -> Iterator[None]:
    from zerobench.zero.offload.disk.file_store import Region

    read = Region.read

    def twice(self: Region, tensor: torch.Tensor, at: int = 0) -> Any:
        read(self, tensor, at).wait()
        return read(self, tensor, at)

    with patch.object(Region, "read", twice):
        yield


BF16: dict[str, Any] = {"precision": "bf16"}
FAULTS = [
    Fault("a bucket leaked once", "zero2", keeping(bucket, 1), ("communication",)),
    Fault("a bucket leaked each step", "zero2", keeping(bucket), ("communication",)),
    Fault("a gradient shard kept after the update", "zero2", gradients_stay, ("gradients",)),
    Fault("a second gather of one bucket", "zero1", gathers_twice, ("all_gather",)),
    Fault("a second gather of every unit", "zero3", unshards_twice, ("all_gather",)),
    Fault("an extra all-reduce of 64 KiB", "zero2", sending(lambda: torch.zeros(16 * 1024)), ("all_reduce",)),
    Fault("buckets of double size, zero1", "zero1", larger_buckets, ("communication",)),
    Fault("buckets of double size, zero2", "zero2", larger_buckets, ("communication",)),
    Fault("an fp64 state added", "zero2", partial(after_step, one_more_state), ("optimizer",)),
    Fault("a unit not resharded", "zero3", never_resharded, ("parameters", "all_gather")),
    Fault("padding of 1 MiB", "zero1", partial(padded, MIB // 4), ("parameters", "gradients", "reduce_scatter")),
    Fault("padding of 16 elements", "zero1", partial(padded, 16), ("reduce_scatter", "all_gather")),
    Fault("a bucket never reduced", "zero1", never_reduced, ("reduce_scatter",)),
    Fault("a host upload twice", "zero2", uploads_twice, ("up:",), {"offload": "cpu"}),
    Fault("a host upload twice, updates late", "zero2", uploads_twice, ("up:",), {"offload": "cpu_delayed"} | BF16),
    Fault("a file pool of double size", "zero2", larger_pool, ("communication",), {"offload": "nvme"}),
    Fault("a file read twice", "zero2", reads_twice, ("read:",), {"offload": "nvme"}),
    Fault("fp32 on the wire, zero1", "zero1", sent_in_fp32, ("reduce_scatter",), BF16),
    Fault("fp32 on the wire, zero2", "zero2", sent_in_fp32, ("reduce_scatter",), BF16),
    Fault("fp32 on the wire, zero3", "zero3", sent_in_fp32, ("reduce_scatter",), BF16),
    Fault("an all-reduce of 1 element", "zero2", sending(lambda: torch.zeros(1)), ("control:",)),
    Fault("an all-reduce of 1 MiB called control", "zero2", sending(lambda: torch.zeros(MIB // 4), as_control),
          ("all_reduce",)),
    Fault("an int32 all-reduce of 1 MiB", "zero2", sending(lambda: torch.zeros(MIB // 4, dtype=torch.int32)),
          ("all_reduce",)),
    Fault("activations kept", "zero2", activations_kept, ("activations: ",)),
    Fault("outputs kept until the next forward", "zero2", output_kept, ("between_steps_activations_bytes",)),
    Fault("a leak on every 4th step", "zero2", every_fourth_step, ("more after the measured steps than before them",)),
    Fault("the ledger misses frees", "zero2", frees_missed, ("outside the ledger: -",)),
    Fault("a temporary of 4 MiB", "zero2", lambda: after_step(lambda _: torch.zeros(MIB)), ("temporary",)),
    Fault("DDP's gradients cloned", "ddp", lambda: before_step(cloned_gradients, DdpEngine), ("gradients",)),
    Fault("1 MiB of states mislabeled", "zero2", keeping(mislabeled, 1), ("a third momentum",)),
    Fault("an all-reduce by the raw backend", "zero2", sending(lambda: torch.zeros(MIB // 4), by_backend),
          ("all_reduce",)),
    Fault("8 MiB kept in numpy", "zero2", keeping(lambda: np.ones(8 * MIB, dtype=np.uint8), 1), ("not torch's",)),
    Fault("a tensor of 4 MiB made in a thread", "zero2", keeping(made_in_thread, 1), ("thread stray",)),
    Fault("an all-reduce of 1 MiB in a thread", "zero2",
          lambda: after_step(lambda _: in_thread(lambda: dist.all_reduce(torch.zeros(MIB // 4)))), ("all_reduce",)),
]  # fmt: skip
