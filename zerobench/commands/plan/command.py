"""`zerobench plan`: bounds candidates by theory, simulates them on fake tensors, recommends the best one that fits."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ...config.cell import Cell
from ...config.compose import refuse_senseless
from ...config.schema import Transformer
from ...host.pipes import print_note
from ...host.terminal import LINE_EVERY_S, print_on, progress_console
from ...results.options import Parser, add_columns, add_jobs, add_price, verb
from ...results.provenance import source_hash
from ...simulation.execute import Limits, Target, execute_all, kept_processes
from ...sizes import parse_memory, show_count, show_left
from ..predict import costs_of, within_rates
from .answer import FASTEST, GOALS, HEADER, as_json, print_plan, recommended, result_of
from .candidates import AXES, QUICKEST, TIERS, candidates, compose, split_axes
from .fastest import find_fastest
from .search import RESERVE, Capacity, Plan, PlanRow, family_axis
from .settings import SYSTEMS

LONG_S = 10.0
"""Seconds above which a plan says how much time is left."""

LIMITS = Limits(seconds=3600.0)
"""Time limit, in seconds, for one cell on fake tensors. A model of hundreds of blocks takes half a minute."""

EPILOG = """\
Of the strategies that fit 64 GPUs of 80 GiB, the one that sends the fewest bytes:
  zerobench plan --device-memory "80 GiB" --gpus 64 model=zero_8b sequence=1024
The largest model under each strategy, with recomputed blocks and 192 GiB of host memory per GPU for offload:
  zerobench plan --device-memory "80 GiB" --gpus 8 --host-memory "192 GiB" --goal largest_model \\
    model=gpt model.hidden=4096 model.heads=32 model.vocabulary=50257 sequence=1024 activation=checkpoint
The fewest GPUs that suffice under these strategies, and the matching settings of DeepSpeed:
  zerobench plan --device-memory "40 GiB" --gpus 64 --goal fewest_gpus model=zero_8b strategy=zero2,zero3 \\
    --settings deepspeed --out settings

The fastest strategy that fits, at 512 sequences per step over all GPUs; offload is not tried, since no rate of an
update on the host is known:
  zerobench plan --device-memory "80 GiB" --gpus 64 --goal fastest --cluster a100-80gb-1600 model=zero_8b batch=512

Each candidate is a cell whose code, the engine's own, is simulated on fake tensors, which have sizes and no values.
A candidate whose states alone are too large by the formulas is not simulated, nor, by default, a strategy's candidate
that recomputes or offloads if the strategy fits without it: such rows have a bound, the states. A search, as for the
largest batch, ends with two simulations: the largest value that fits and the first that does not. KEY=VALUE as for a
sweep; defaults here: precision=bf16 data=synthetic micro_batch=1 sequence=1024.
strategy=, offload= and activation= take several values, comma-separated, and restrict the candidates; each value of
offload= and activation= that is given is simulated.
The peak covers training steps only: a model that is built whole before it is partitioned needs more at the start
(strategy.construct=meta avoids that).
"""


@verb
def plan(arguments: list[str]) -> int:
    """Runs the verb. Returns the exit code: 0 something fits, 1 nothing fits, 2 invalid command,
    130 interrupted."""
    chosen = _parser().parse_intermixed_args(arguments)
    capacity, fastest, batch = _capacity(chosen), chosen.goal == FASTEST, None
    overrides, batches = list(chosen.overrides), [word for word in chosen.overrides if word.startswith("batch=")]
    if fastest and batches:
        batch = batches[-1].partition("=")[2]
        if not batch.isdecimal() or int(batch) % chosen.gpus or not int(batch):
            raise ValueError(f"batch={batch}: samples of a step over all GPUs, a multiple of --gpus {chosen.gpus}")
        overrides = [word for word in overrides if word not in batches]
    _check(chosen, [])  # before a line is printed; of cells, when there are any
    overrides, axes = split_axes(overrides, chosen.gpus)
    limits = {"none": 0, "cpu": capacity.host_bytes, "nvme": capacity.disk_bytes}
    bounded = [tier for tier in TIERS if chosen.goal != "largest_model" or limits[tier] is not None]
    rows = candidates(axes, QUICKEST, ("none",)) if fastest else candidates(axes, tiers=bounded)
    print_on(progress_console(), f"{show_count(len(rows), 'candidate')}: theory's bounds first")
    cells = compose(rows, overrides, chosen.device)
    costs = costs_of(chosen.cluster, chosen.node_gbit_s) if fastest else None
    if costs is not None:
        cells = {row: within_rates(cell, costs) for row, cell in cells.items()}
    refuse_senseless(list(cells.values()))
    _check(chosen, list(cells.values()))
    with kept_processes() as processes:
        execute = partial(
            execute_all, target=Target(chosen.device), jobs=chosen.jobs, limits=LIMITS, processes=processes
        )
        answer = Plan(chosen.goal, capacity, execute, costs, chosen.price, chosen.device, overrides, axes)
        with progress(answer):
            if costs is not None:
                given = {word.partition("=")[0] for word in chosen.overrides}
                find_fastest(answer, costs, cells, int(batch) if batch else None, given)
            else:
                answer.search(cells, family_axis if chosen.family else GOALS[chosen.goal].axis)
    best = recommended(answer)
    settings = SYSTEMS[chosen.settings](best.fit.config) if chosen.settings and best else None
    if chosen.format == "json":
        columns = {"torch": version("torch"), "source_hash": source_hash("")} | as_json(answer)
        print(json.dumps(columns | ({"settings": asdict(settings)} if settings else {}), indent=1))
    else:
        print_plan(answer, chosen.columns)
    if settings is not None:
        for name, text in settings.files.items():
            if chosen.out:
                chosen.out.mkdir(parents=True, exist_ok=True)
                (chosen.out / name).write_text(text)
                print_note(f"wrote {chosen.out / name}")
            elif chosen.format == "table":  # JSON already includes them
                print("\n#", name)
                print(text, end="")
        for note in settings.notes:
            print_note(f"note: {note}")
    return 130 if answer.interrupted else int(best is None)


@contextmanager
def progress(plan: Plan) -> Iterator[None]:
    """Reports a candidate whose search has ended as a line on standard error and, on a terminal, counts the rest; says
    how much time is left if the plan takes more than LONG_S, at least every LINE_EVERY_S if simulations end. The block
    ends when the user interrupts it.
    """
    begun = last = time.monotonic()
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=progress_console(),
        transient=True, disable=not sys.stderr.isatty(),
    ) as bar:  # fmt: skip
        task = bar.add_task("theory's bounds first", total=None)

        def report(plan: Plan, row: PlanRow | None) -> None:
            nonlocal last
            now, rows = time.monotonic(), sum(not other.over for other in plan.rows.values())
            left = (now - begun) / plan.ran * (plan.left + plan.later) if plan.ran else 0.0
            time_left = f", {show_left(left)}" if left and now - begun + left > LONG_S else ""
            bar.update(task, description=f"{rows} rows still searched{time_left}")
            if row is not None:
                result = f"{row.candidate.name}: {result_of(row, GOALS[plan.goal])}"
                print_on(bar.console, f"{result}; {rows} to go{time_left}")
            elif not plan.ran:
                more = f"; {rows - plan.due} more only if these do not fit" if rows > plan.due else ""
                print_on(bar.console, f"{plan.due} of {len(plan.rows)} rows to simulate{more}")
            elif time_left and not bar.console.is_terminal and (plan.ran == 1 or now - last >= LINE_EVERY_S):
                print_on(bar.console, f"{rows} to go{time_left}")
            else:
                return
            last = now

        plan.report = report
        try:
            yield
        except KeyboardInterrupt:
            plan.interrupted = True


def _parser() -> argparse.ArgumentParser:
    purpose = "Which strategy fits a device, by how much, and what limits it? Simulated on fake tensors; no GPU needed."
    parser = Parser("zerobench plan", purpose, EPILOG)
    add = parser.add_argument
    add("overrides", nargs="*", metavar="KEY=VALUE", help="the model and its training, as `zerobench` takes them")
    add("--device-memory", required=True, metavar="SIZE", help='memory of one GPU, such as "80 GiB"')
    add("--gpus", type=int, required=True, metavar="N", help="number of GPUs, one data-parallel rank each")
    add("--goal", choices=GOALS, default=next(iter(GOALS)), help="quantity to optimize (default: %(default)s)")
    add("--reserve", type=float, default=RESERVE, metavar="FRACTION",
        help="part kept for the CUDA context and libraries (default: %(default)s)")  # fmt: skip
    add("--cluster", metavar="NAME", help="goal fastest: a cluster of zerobench predict")
    add("--node-gbit-s", type=float, metavar="RATE",
        help="goal fastest: rate of a node's network, if not the cluster's")  # fmt: skip
    add_price(parser, "goal fastest: ")
    add("--host-memory", metavar="SIZE", help="host memory per GPU; by default offload to it is unlimited")
    add("--disk", metavar="SIZE", help="disk per GPU; by default offload=nvme is unlimited")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="device to simulate (default: %(default)s)")
    add("--family", choices=("zero",), help="goal largest_model: layers and hidden sizes of the ZeRO paper's models")
    add_jobs(parser)
    add("--format", choices=("table", "json"), default="table", help="default: %(default)s")
    add("--settings", choices=SYSTEMS, help="also print the recommended cell as settings of this system")
    add("--out", type=Path, metavar="DIR", help="a folder for the settings' files (default: they are printed)")
    add_columns(parser, HEADER)
    return parser


def _capacity(chosen: argparse.Namespace) -> Capacity:
    if not 0 <= chosen.reserve < 1:
        raise ValueError(f"--reserve {chosen.reserve:g}: a fraction of the device, from 0 to below 1")
    if chosen.gpus < 1:
        raise ValueError(f"--gpus {chosen.gpus}: must be at least 1")
    given = {"--device-memory": chosen.device_memory, "--host-memory": chosen.host_memory, "--disk": chosen.disk}
    sizes = (None if text is None else parse_memory(text, f"{flag}: ") for flag, text in given.items())
    device, *tiers = sizes
    if not device:
        raise ValueError(f"--device-memory {chosen.device_memory}: must be above 0")
    return Capacity(device, chosen.reserve, *tiers)


def _check(chosen: argparse.Namespace, cells: Sequence[Cell]) -> None:
    """Raises ValueError if the goal contradicts the rest of the command."""
    goal, given = chosen.goal, {key: value for key, _, value in (word.partition("=") for word in chosen.overrides)}
    keys = given.keys()
    fastest, has_layers = goal == FASTEST, all(isinstance(cell.config.model, Transformer) for cell in cells)
    wrong = {f"{key}: is what --goal {goal} looks for; leave it out": key in keys for key in GOALS[goal].varies} | {
        f"{key}: must divide the number of GPUs, which --goal {goal} looks for; leave it out": goal == "fewest_gpus"
        for key in ("tensor_parallel", "node_size", "shard_group", "strategy.reshard_ranks")
        if given.get(key) not in (None, "1", "null")
    } | {
        f"{word}: name at least one {word[:-1]}": True for word in chosen.overrides if word in {f"{k}=" for k in AXES}
    } | {
        "--goal largest_model: the model needs layers to vary; use model=gpt with model.hidden=WIDTH":
            goal == "largest_model" and not has_layers,
        "--cluster: is what --goal fastest needs, and nothing else takes; zerobench predict --help":
            fastest != (chosen.cluster is not None),
        "--price: is of a time, which --goal fastest predicts": not fastest and chosen.price is not None,
        "offload: no rate of an update on the host is known to --goal fastest; leave it out":
            fastest and "offload" in keys,
        "accumulation: follows from batch= and the micro-batch that fits; leave one of the two out":
            fastest and {"accumulation", "batch"} <= keys,
        "--settings: not with --goal fastest; plan the candidate that it names again": fastest and chosen.settings,
        f"--family {chosen.family}: its shapes are tried by --goal largest_model alone":
            chosen.family and goal != "largest_model",
        "--out: is for settings; say which with --settings": chosen.out and not chosen.settings,
    }  # fmt: skip
    if message := next((message for message, applies in wrong.items() if applies), None):
        raise ValueError(message)
