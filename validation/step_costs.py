"""Where the time of a training step goes, by kind of work and by thread: DDP and each stage, on ranks of this machine.

Two ranks on two cores have no idle core that could hide work, so a step is as long as the work of a rank plus the time
in which it waits. Each strategy is launched `--rounds` times, in turns. Of each launch:

wall      time of a step, ms, median over the measured steps
cpu       CPU time of a rank's whole process per step, ms
kind      CPU time per step, ms, of a rank's main thread and of the engine's own threads, exclusive: a call that is
          inside another counts once, as its own kind
backend   CPU time per step, ms, of all other threads: gloo's, which move bytes, and autograd's
waiting   wall - CPU of the main thread, ms: for other ranks, and for a core

"alone" is the same model and optimizer without any communication, in as many processes. A strategy with "free:" before
its name runs in as many simulated worlds of one executed rank: transfers take no time, all else is done, so that it
bounds what any faster transport can bring. The reducer of DDP is C++: what
it copies is in its backward. A strategy may have options of its own behind a colon, so that each lever stands beside
what it changes, in the same rounds. Times by kind cost time themselves, about 1 % of our step: ratios between
engines are made by `make compare`.

    python -m validation step-costs --rounds 3
    python -m validation step-costs --strategies ddp,zero1,zero1:bucket_bytes=25MiB:overlap_gather=true --rounds 6
    python -m validation step-costs --link 1 --strategies ddp,zero1,zero1:overlap_gather=false
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import wraps
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch

from zerobench import strategies
from zerobench.config.cell import CellConfig
from zerobench.config.compose import RefusedError, compose_cells
from zerobench.data import build_batches
from zerobench.host.environment import SIMULATED, rank_environment, seed_everything
from zerobench.host.terminal import stdout_console
from zerobench.launch.start_ranks import launch
from zerobench.models.contract import loss_of
from zerobench.predict.build import build_model
from zerobench.results.grid import Grid
from zerobench.results.provenance import machine

from .link import run_on_nodes
from .store import write

CELL = ("model=gpt_small", "micro_batch=4", "sequence=128", "world_size=2", "device=cpu", "launch.threads=1")
ALONE = "alone"
FREE = "free:"
ZERO = "zerobench.zero."

KINDS: dict[str, tuple[str, ...]] = {
    "copies": (
        "gradients.bucket_base:GradientBucket.fill", "gradients.bucket_base:GradientBucket._zero_missing",
        "gradients.bucket_base:GradientBucket.keep", "stage1:WholeBucket.wait", "stage2:ShardedBucket.wait",
        "units.gathered_unit:GatheredUnit.launch_unshard",
    ),
    "transfers": ("comm.gloo:send", "comm.gloo:receive", "comm.gloo:PairwiseReduction._take"),
    "sums": ("comm.gloo:PairwiseReduction._sum",),
    "optimizer": ("torch.optim:AdamW.step",),
    "checks": (
        "parameters.writes:Writes.check_places", "parameters.writes:Writes.follow", "parameters.writes:Writes.note",
        "parameters.writes:Writes.check", "parameters.writes:Writes.follow_unseen", "optim.update:Update.agree",
        "comm.hang_watch:HangWatch.launch", "optim.update:Update._check_held", "optim.update:Update._check_groups",
    ),
    "engine": (
        "gradients.flow:GradientFlow._arrive", "gradients.flow:GradientFlow._take_use",
        "gradients.flow:GradientFlow.reduce", "gradients.flow:GradientFlow.wait_all", "comm.gloo:GlooComm._reduce",
        "comm.gloo:GlooComm.all_gather", "units.gathers_after_update:OverlappedParamGathers.launch",
        "units.gathers_after_update:OverlappedParamGathers.wait", "optim.delayed_update:UpdateSchedule.run",
        "units.gathered_unit:GatheredUnit.unshard", "units.gathered_unit:GatheredUnit.reshard",
        "gradients.flow:GradientFlow.end_backward", "gradients.flow:GradientFlow.release",
    ),
}  # fmt: skip
"""Kind -> the functions whose own time it is; below zerobench.zero but for torch's."""


@dataclass(frozen=True)
class StepCost:
    """A launch of one strategy on a machine: ms per step, of the slowest rank in wall time.

    `link`: Gbit/s between two halves of the ranks; 0: all are on one machine.
    """

    processor: str
    torch: str
    commit: str
    strategy: str
    link: float
    launch: int
    wall: float
    cpu: float
    forward: float
    backward: float
    update: float
    copies: float
    transfers: float
    sums: float
    optimizer: float
    checks: float
    engine: float
    backend: float
    waiting: float


class KindClock:
    """CPU seconds by kind, exclusive, on whichever thread of Python runs it."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._open: dict[int, list[tuple[str, float]]] = defaultdict(list)

    @contextmanager
    def of(self, kind: str) -> Iterator[None]:
        """Counts what runs inside as `kind`."""
        stack = self._open[threading.get_ident()]
        self._charge(stack)
        stack.append((kind, time.thread_time()))
        try:
            yield
        finally:
            self._charge(stack)
            stack.pop()
            if stack:
                stack[-1] = (stack[-1][0], time.thread_time())

    def _charge(self, stack: list[tuple[str, float]]) -> None:
        if stack:
            kind, since = stack[-1]
            self.seconds[kind] += time.thread_time() - since

    def wrapped(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `function`, counted."""

        @wraps(function)
        def call(*args: Any, **named: Any) -> Any:
            with self.of(kind):
                return function(*args, **named)

        return call


@contextmanager
def kinds_counted() -> Iterator[KindClock]:
    """Counts the functions of KINDS inside. Raises AttributeError for one that is not there any more."""
    clock = KindClock()
    with ExitStack() as stack:
        for kind, names in KINDS.items():
            for name in names:
                module, _, path = name.partition(":")
                owner: Any = import_module(module if module.startswith("torch") else ZERO + module)
                *above, last = path.split(".")
                for one in above:
                    owner = getattr(owner, one)
                stack.enter_context(mock.patch.object(owner, last, clock.wrapped(kind, getattr(owner, last))))
        yield clock


@dataclass(frozen=True)
class CostJob:
    """One rank of one launch. `name`: the strategy with its options, perhaps behind FREE, or ALONE."""

    name: str
    config: CellConfig
    rank: int
    rendezvous: str
    steps: int


def measure(job: CostJob, _tell: Any) -> StepCost:
    """Trains on this rank and returns its costs; the caller fills in the launch's number and the machine."""
    config, ranks = job.config, 1 if job.name == ALONE else job.config.world_size
    rank = job.rank if ranks > 1 else 0
    backend = SIMULATED if job.name.startswith(FREE) else "gloo"
    with (
        rank_environment(rank, ranks, "cpu", backend, job.rendezvous, 1, config.launch.timeout_s),
        kinds_counted() as clock,
    ):
        seed_everything(config.seed)
        model = build_model(config)
        optimizer = config.optimizer.build(model.parameters())
        options = config.precision.engine_options(config)
        engine: Any = strategies.wrap(config.strategy.values(), model, optimizer, **options)
        batches = build_batches(config.batching, job.rank, torch.device("cpu"))
        walls, phases = list[float](), defaultdict[str, float](float)
        began, main, others = 0.0, 0.0, 0.0
        for step in range(-config.measure.warmup, job.steps):
            if step == 0:
                clock.seconds.clear()
                began, main, others = time.process_time(), time.thread_time(), _other_threads_s()
            start = time.perf_counter()
            seconds = _one_step(engine, batches.batch(step + config.measure.warmup, 0), config, clock)
            if step >= 0:
                walls.append(time.perf_counter() - start)
                for name, one in seconds.items():
                    phases[name] += one
        engine.settle()
        cpu, on_main = time.process_time() - began, time.thread_time() - main
        elsewhere = _other_threads_s() - others

    def ms(seconds: float) -> float:
        return round(1000 * seconds / job.steps, 2)

    parts = {name: ms(seconds) for name, seconds in (phases | {kind: clock.seconds[kind] for kind in KINDS}).items()}
    return StepCost(
        "", "", "", strategy=job.name, link=0.0, launch=0, wall=round(1000 * median(walls), 2), cpu=ms(cpu),
        backend=ms(elsewhere), waiting=ms(sum(walls) - on_main), **parts,
    )  # fmt: skip


PHASES = ("forward", "backward", "update")
"""Own CPU time of the main thread in a phase: the model's, the optimizer's around its kernels, what no kind names."""


def _one_step(engine: Any, batch: Any, config: CellConfig, clock: KindClock) -> dict[str, float]:
    """Runs a step; returns the CPU seconds of its phases less those of any kind."""
    before = dict(clock.seconds)
    with clock.of("forward"):
        loss = loss_of(engine, batch, config.called)
    with clock.of("backward"):
        engine.backward(loss)
    with clock.of("update"):
        engine.step()
    return {name: clock.seconds[name] - before.get(name, 0.0) for name in PHASES}


def _other_threads_s() -> float:
    """CPU seconds so far of this process's threads that are not Python's."""
    ours = {str(one.native_id) for one in threading.enumerate()}
    ticks = 0
    for task in Path("/proc/self/task").iterdir():
        if task.name not in ours:
            fields_of = (task / "stat").read_text().rpartition(")")[2].split()
            ticks += int(fields_of[11]) + int(fields_of[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=f"of the cells; before them {' '.join(CELL)}")
    parser.add_argument(
        "--strategies", default="ddp,zero1,zero2,zero3", metavar="[free:]NAME[:OPTION=VALUE...],...",
        help="default: %(default)s",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3, help="launches of each (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=12, help="measured per launch (default: %(default)s)")
    parser.add_argument(
        "--link", type=float, default=0.0, metavar="GBIT", help="half of the ranks on each of two nodes"
    )
    parser.add_argument("--out", type=Path, help="a csv file with a row per launch")


def run(chosen: argparse.Namespace) -> int:
    """Measures, and prints the medians over the launches of each strategy."""
    names = [ALONE, *chosen.strategies.split(",")]
    if chosen.rounds < 1 or chosen.steps < 1 or chosen.link < 0:
        raise ValueError("--rounds, --steps: at least 1; --link: at least 0")
    configs = {name: _config_of(name, chosen.overrides) for name in names}
    rows: list[StepCost] = []
    for number in range(chosen.rounds):
        for name, config in configs.items():
            with tempfile.TemporaryDirectory() as folder:
                if chosen.link and name != ALONE and not name.startswith(FREE):
                    found = _launch_on_nodes(name, chosen, config, folder)
                else:
                    found = _launch(name, config, range(config.world_size), chosen.steps, folder)
            rows.append(replace(found, launch=number, link=chosen.link))
            if chosen.out is not None:
                write(chosen.out, StepCost, rows)
    _print(names, rows)
    return 0


def _config_of(name: str, overrides: Sequence[str]) -> CellConfig:
    strategy, *options = (strategies.reference().name if name == ALONE else name.removeprefix(FREE)).split(":")
    own = [one for one in overrides if strategy != "ddp" or not one.startswith("strategy.")]
    cells = compose_cells([*CELL, f"strategy={strategy}", *own, *(f"strategy.{option}" for option in options)])
    problems = [problem for cell in cells for problem in cell.problems]
    if problems or len(cells) != 1:
        raise RefusedError(problems or ["each strategy is one cell: no lists of values"])
    return cells[0].config


def _launch(name: str, config: CellConfig, ranks: range, steps: int, folder: str) -> StepCost:
    """Launches some or all ranks of a cell and returns the costs of the slowest of them."""
    jobs = [
        CostJob(name, config, rank, f"{folder}/rendezvous-{rank if name == ALONE else 'all'}", steps) for rank in ranks
    ]
    outcome = launch(measure, jobs, Path(folder) / f"logs-{ranks[0]}", config.launch.timeout_s, first=ranks[0])
    if outcome.status != "ok":
        raise ValueError(f"{name}: {outcome.status}: {outcome.reason}")
    slowest: StepCost = max(outcome.results, key=lambda one: one.wall)
    about = machine("cpu", "gloo")
    return replace(slowest, processor=about["processor"], torch=torch.__version__, commit=about["commit"] or "")


def _launch_on_nodes(name: str, chosen: argparse.Namespace, config: CellConfig, folder: str) -> StepCost:
    """Launches half of the ranks on each node of a link (`_main` below) and returns the costs of the slowest."""
    words = [name, str(chosen.steps), folder, *chosen.overrides]
    run_on_nodes([sys.executable, "-m", "validation.step_costs", *words], chosen.link, config.launch.timeout_s)
    found = [StepCost(**json.loads(path.read_text())) for path in Path(folder).glob("node-*.json")]
    return max(found, key=lambda one: one.wall)


def _main(name: str, steps: str, folder: str, *words: str) -> None:
    """One node of two: half of the ranks. Leaves the costs of its slowest in a file of the folder."""
    *overrides, node = words
    config = _config_of(name, overrides)
    half = config.world_size // 2
    found = _launch(name, config, range(int(node) * half, (int(node) + 1) * half), int(steps), folder)
    (Path(folder) / f"node-{node}.json").write_text(json.dumps(asdict(found)))


def ratios(rows: Sequence[StepCost], name: str, base: str) -> list[float]:
    """Returns, for each round, the step of strategy `name` over that of `base`."""
    walls = {(row.strategy, row.launch): row.wall for row in rows}
    return [walls[name, launch] / wall for (one, launch), wall in walls.items() if one == base]


def _print(names: Sequence[str], rows: Sequence[StepCost]) -> None:
    columns = [one.name for one in fields(StepCost) if one.type == "float" and one.name != "link"]
    shown = []
    for name in names:
        mine = [row for row in rows if row.strategy == name]
        found = ratios(rows, name, names[1])
        ratio = f"{median(found):.3f} ({min(found):.3f} to {max(found):.3f})"
        shown.append([name, ratio, *(f"{median(getattr(row, column) for row in mine):.1f}" for column in columns)])
    stdout_console().print(Grid(["ms per step", f"step / {names[1]}", *columns], shown, left=1))


if __name__ == "__main__":
    _main(*sys.argv[1:])
