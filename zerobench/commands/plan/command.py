"""`zerobench plan`: bounds candidates by theory, simulates them on fake tensors, recommends the best one that fits."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ...config.cell import Cell
from ...config.compose import refuse_senseless
from ...config.schema import Gpt
from ...fake_execution import Limits, Target, execute_all
from ...host.pipes import print_note
from ...host.terminal import print_on, progress_console, stdout_console
from ...results.grid import Grid
from ...results.options import Parser, add_columns, verb
from ...results.provenance import source_hash
from ...sizes import parse_bytes, show_count
from ..predict import costs_of
from .candidates import QUICKEST, RESERVE, Candidate, Capacity, candidates, compose, words_of
from .fastest import FastestSearch, batch_of, find
from .fastest import as_json as fastest_as_json
from .fastest import sentence as fastest_sentence
from .fastest import table_of as fastest_table
from .recommend import (
    CUT_SHORT,
    FASTEST,
    FIRST_TO_GO,
    GOALS,
    HEADER,
    LEAST_TRAFFIC,
    WORDS,
    Goal,
    as_json,
    commands_of,
    found_words,
    is_interrupted,
    notes_of,
    nothing_fits,
    recommended,
    rule_of,
    sentence,
    table_of,
)
from .search import Execute, PlanRow, Tell, family_axis, run_searches
from .settings import SYSTEMS, settings_of

LIMITS = Limits(seconds=3600.0)
"""Time limit, in seconds, for one cell on fake tensors. A model of hundreds of blocks takes minutes."""

BYTES_ALONE = (
    "Bytes alone were compared, at one micro-batch for all. Which is fastest depends on the cluster, and on the "
    "micro-batch that each leaves room for: add --goal fastest --cluster NAME (names: zerobench predict --help)"
)

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
Candidates whose states alone are too large by the formulas are skipped. For each other one the search ends with two
simulations: the largest value that fits and the first that does not. KEY=VALUE as for a sweep; defaults here:
precision=bf16 data=synthetic micro_batch=1 sequence=1024.
strategy=, offload= and activation= take several values, comma-separated, and restrict the candidates.
The peak covers training steps only: a model that is built whole before it is partitioned needs more at the start
(strategy.construct=meta avoids that).
"""


@verb
def plan(arguments: list[str]) -> int:
    """Runs the verb. Returns the exit code: 0 something fits, 1 nothing fits, 2 invalid command,
    130 interrupted."""
    parser = _parser()
    chosen = parser.parse_intermixed_args(arguments)
    goal = GOALS[chosen.goal]
    capacity = _capacity(chosen)
    overrides, batch = batch_of(chosen.overrides, chosen.gpus) if goal.name == FASTEST else (chosen.overrides, None)
    words, axes = words_of(overrides, chosen.gpus)
    cells = compose(_candidates(axes, goal, capacity), words)
    refuse_senseless(list(cells.values()))
    _check(goal, chosen, [cell.config.model for cell in cells.values()], chosen.overrides)
    execute = partial(execute_all, target=Target(chosen.device), jobs=chosen.jobs, limits=LIMITS)
    if goal.name == FASTEST:
        return _fastest(cells, chosen, capacity, batch, partial(execute, operators=True))
    axis = family_axis() if chosen.family else goal.axis(chosen.gpus)
    with progress(goal) as tell:
        rows = run_searches(cells, axis, capacity, execute, tell)
    best = recommended(rows, goal)
    found = settings_of(chosen.settings, best.best.cell.config) if chosen.settings and best and best.best else None
    if chosen.format == "json":
        made = {"torch": version("torch"), "source_hash": source_hash("")}
        told = made | as_json(rows, capacity, goal, words, chosen.device)
        print(json.dumps(told | ({"settings": asdict(found)} if found else {}), indent=1))
    else:
        _print(rows, capacity, goal, words, chosen.device, chosen.columns)
    if found is not None:
        # writes the settings of the recommended cell, or prints them; JSON already includes them
        for name, text in found.files.items():
            if chosen.out:
                chosen.out.mkdir(parents=True, exist_ok=True)
                (chosen.out / name).write_text(text)
                print_note(f"wrote {chosen.out / name}")
            elif chosen.format == "table":
                print("\n#", name)
                print(text, end="")
        for note in found.notes:
            print_note(f"note: {note}")
    return 130 if is_interrupted(rows) else int(best is None)


@contextmanager
def progress(goal: Goal) -> Iterator[Tell]:
    """Reports a candidate whose search has ended as a line on standard error and, on a terminal, counts the rest."""
    console = progress_console()
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console, transient=True,
        disable=not sys.stderr.isatty(),
    ) as bar:  # fmt: skip
        task = bar.add_task("theory's bounds first", total=None)

        def tell(executed: int, open_: int, row: PlanRow | None) -> None:
            bar.update(task, description=f"{executed} cells simulated, {open_} rows still searched")
            if row is not None:
                print_on(bar.console, f"{row.candidate.name}: {found_words(row, goal)}; {open_} to go")

        yield tell


def _fastest(
    cells: dict[Candidate, Cell], chosen: argparse.Namespace, capacity: Capacity, batch: int | None, run: Execute
) -> int:
    """Prints the fastest candidate that fits. Returns the exit code."""
    costs = costs_of(chosen.cluster, chosen.node_gbit_s)
    given = frozenset(word.partition("=")[0] for word in chosen.overrides)
    with progress(GOALS[FASTEST]) as tell:
        found = find(cells, FastestSearch(costs, capacity, batch, given, run, tell))
    none = CUT_SHORT if found.interrupted else "" if found.timed else nothing_fits(found.rows, capacity)
    code = 130 if found.interrupted else int(not found.timed)
    if chosen.format == "json":
        told = {"torch": version("torch"), "source_hash": source_hash("")} | fastest_as_json(found, costs, none)
        print(json.dumps(told, indent=1))
        return code
    console = stdout_console()
    if found.timed:
        console.print(fastest_table(found.timed))
    for line in (rule_of(capacity, chosen.device), *notes_of(found.rows), *found.notes):
        print_on(console, line)
    print_on(console, none or fastest_sentence(found, costs))
    return code


def _parser() -> argparse.ArgumentParser:
    words = "Which strategy fits a device, by how much, and what limits it? Simulated on fake tensors; no GPU needed."
    parser = Parser("zerobench plan", words, EPILOG)
    add = parser.add_argument
    add("overrides", nargs="*", metavar="KEY=VALUE", help="the model and its training, as `zerobench` takes them")
    add("--device-memory", required=True, metavar="SIZE", help='memory of one GPU, such as "80 GiB"')
    add("--gpus", type=int, required=True, metavar="N", help="number of GPUs, one data-parallel rank each")
    add("--goal", choices=GOALS, default=next(iter(GOALS)), help="quantity to optimize (default: %(default)s)")
    add("--reserve", type=float, default=RESERVE, metavar="FRACTION",
        help="part kept for the CUDA context and libraries (default: %(default)s)")  # fmt: skip
    add("--cluster", metavar="NAME", help="goal fastest: a cluster of zerobench predict")
    add(
        "--node-gbit-s",
        type=float,
        metavar="RATE",
        help="goal fastest: rate of a node's network, if not the cluster's",
    )
    add("--host-memory", metavar="SIZE", help="host memory per GPU; by default offload to it is unlimited")
    add("--disk", metavar="SIZE", help="disk per GPU; by default offload=nvme is unlimited")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="device to simulate (default: %(default)s)")
    add("--family", choices=("zero",), help="goal largest_model: layers and hidden sizes of the ZeRO paper's models")
    add("--jobs", type=int, metavar="N", help="cells simulated at a time (default: one per core)")
    add("--format", choices=("table", "json"), default="table", help="default: %(default)s")
    add("--settings", choices=SYSTEMS, help="also print the recommended cell as settings of this system")
    add("--out", type=Path, metavar="DIR", help="a folder for the settings' files (default: they are printed)")
    add_columns(parser, HEADER)
    return parser


def _capacity(chosen: argparse.Namespace) -> Capacity:
    def size(key: str) -> int | None:
        text = getattr(chosen, key)
        try:
            return None if text is None else parse_bytes(text)
        except ValueError as error:
            raise ValueError(f"--{key.replace('_', '-')}: {error}") from error

    if not 0 <= chosen.reserve < 1:
        raise ValueError(f"--reserve {chosen.reserve:g}: a fraction of the device, from 0 to below 1")
    if chosen.gpus < 1:
        raise ValueError(f"--gpus {chosen.gpus}: must be at least 1")
    if chosen.jobs is not None and chosen.jobs < 1:
        raise ValueError(f"--jobs {chosen.jobs}: must be at least 1")
    device = size("device_memory")
    if not device:
        raise ValueError(f"--device-memory {chosen.device_memory}: must be above 0")
    return Capacity(device, chosen.reserve, size("host_memory"), size("disk"))


def _candidates(axes: dict[str, tuple[str, ...]], goal: Goal, capacity: Capacity) -> list[Candidate]:
    """Returns the rows to try. The largest model has no bound in an offload tier without a limit: skips these."""
    rows = candidates(axes)
    if goal.name == FASTEST and "strategy" not in axes:
        rows = [row for row in rows if row.strategy in QUICKEST]
    if goal.name == FASTEST and "offload" not in axes:
        return [row for row in rows if not row.offloads]
    if goal.name != "largest_model" or "offload" in axes:
        return rows
    limited = {"none": True, "cpu": capacity.host_bytes is not None, "nvme": capacity.disk_bytes is not None}
    return [row for row in rows if limited[row.offload]]


def _check(goal: Goal, chosen: argparse.Namespace, models: list[object], overrides: list[str]) -> None:
    """Raises ValueError if the goal contradicts the rest of the command."""
    keys = {word.partition("=")[0] for word in overrides}
    if goal.name == "largest_model" and not all(isinstance(model, Gpt) for model in models):
        raise ValueError("--goal largest_model: the model needs layers to vary; use model=gpt with model.hidden=WIDTH")
    if goal.name == "largest_model" and "model.layers" in keys:
        raise ValueError("model.layers: is what --goal largest_model looks for; leave it out")
    if goal.name == "largest_batch" and keys & {"micro_batch", "batch"}:
        raise ValueError("micro_batch, batch: are what --goal largest_batch looks for; leave them out")
    if goal.name == "fewest_gpus" and "batch" in keys:
        raise ValueError("batch: changes with the number of GPUs that --goal fewest_gpus looks for; use micro_batch")
    if (goal.name == FASTEST) != (chosen.cluster is not None):
        raise ValueError("--cluster: is what --goal fastest needs, and nothing else takes; zerobench predict --help")
    if goal.name == FASTEST and "offload" in keys:
        raise ValueError("offload: no rate of an update on the host is known to --goal fastest; leave it out")
    if goal.name == FASTEST and "micro_batch" in keys:
        raise ValueError("micro_batch: is what --goal fastest looks for; leave it out, or give batch=")
    if goal.name == FASTEST and {"accumulation", "batch"} <= keys:
        raise ValueError("accumulation: follows from batch= and the micro-batch that fits; leave one of the two out")
    if goal.name == FASTEST and chosen.settings:
        raise ValueError("--settings: not with --goal fastest; plan the candidate that it names again")
    if chosen.family and goal.name != "largest_model":
        raise ValueError(f"--family {chosen.family}: its shapes are tried by --goal largest_model alone")
    if chosen.out and not chosen.settings:
        raise ValueError("--out: is for settings; say which with --settings")


def _print(
    rows: list[PlanRow], capacity: Capacity, goal: Goal, words: list[str], device: str, columns: Sequence[str] | None
) -> None:
    console = stdout_console()
    console.print(Grid(*table_of(rows, capacity, goal), WORDS, FIRST_TO_GO, columns))
    executed = sum(len(row.probes) for row in rows)
    lines = [
        f"{rule_of(capacity, device)}; {show_count(executed, 'cell')} simulated",
        *notes_of(rows),
    ]
    best = recommended(rows, goal)
    if best is None or best.best is None:
        lines += [nothing_fits(rows, capacity)]
    else:
        lines += ["", sentence(rows, goal, capacity.usable_bytes), "", "To confirm it, one rank of it, then all:"]
        lines += [f"  {command}" for command in commands_of(best.best, best, words, goal, device)]
    if goal.name == LEAST_TRAFFIC:
        lines += ["", BYTES_ALONE]
    for line in lines:
        print_on(console, line)
