"""`zerobench predict`: the time of a step on a described cluster, before any run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..config.cell import CellConfig
from ..config.flat import name_strategies
from ..fake_execution import Limits
from ..host.files import replace_text
from ..host.pipes import print_note
from ..host.terminal import print_on, stdout_console
from ..predict.flops import step_flops
from ..results.grid import Grid
from ..results.options import Parser, add_cells, add_columns, add_price, dollars_per_million, show_price, verb
from ..sizes import counted
from ..timing import hardware
from ..timing.costs import GpuCosts
from ..timing.interval import StepInterval, interval_of
from ..timing.prediction import PHASES, StepSchedule, StepTime, execute_schedules, reduced, step_time
from .estimate.command import DEFAULTS, ask
from .estimate.row import model_of
from .estimate.show import shared_words, training_words

FORMATS = ("table", "json", "csv")

SEQUENCE = "1024"
"""The default sequence on a cluster, in tokens: one that people train with."""

DESCRIPTION = """\
How long does a step take on that cluster, and what binds? Executes the schedule of each strategy on fake tensors, the
engine's own code, and lays it out in time with measured rates of the device and its network. No GPU is needed.
"""

EXAMPLES = f"""\
KEY=VALUE are a sweep's own keys, several values with commas; `zerobench --help KEY` explains each. Left out:
strategy=ddp,zero1,zero2,zero3,fsdp2 world_size=8 data=synthetic sequence=1024, since models are trained on sequences
of a thousand tokens and more (a sweep's default is 128)

  zerobench predict --cluster h100-3200 model=gpt2_1_5b precision=bf16 sequence=1024 micro_batch=8
  zerobench predict --cluster a100-80gb-1600 model=zero_7_5b world_size=64 precision=bf16 activation=checkpoint
  zerobench predict --cluster a100-80gb-1600 --node-gbit-s 100 model=zero_7_5b world_size=64 precision=bf16
  zerobench predict --cluster h100-3200 model=gpt2_1_5b precision=bf16 strategy=zero3 --trace step.json

Clusters: {", ".join(hardware.names("cluster"))}
They are described in zerobench/hardware/clusters.yaml, with the source of each figure.

How to read it: compute, exposed and host add up to the step. compute is the time of the model's stream;
copies on other streams, as FSDP2 makes them, run beside it, or on one GPU in turn with it. exposed is the time in which
the model waits for collectives; host the time in which the device waits for Python. The interval held 90 % of the
published runs that were left out; "not validated" means that no run of that kind was among them, or that the time of an
operator, which it names, is not known.
Exit code: 0 all cells were predicted, 1 one was not, 2 the command itself was wrong, 130 interrupted.
"""


@dataclass(frozen=True)
class PredictionRow:
    """A cell's predicted step. Times in seconds; exposed: waiting for collectives, by phase. `problem`: why there is no
    prediction, an error message; `validated`: the basis of the interval. `batch`: of a step over all ranks.
    `dollars_per_mtokens`: the price of a million tokens, with --price."""

    name: str
    cluster: str
    strategy: str
    world_size: int
    micro_batch: int
    accumulation: int
    sequence: int
    step_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    tokens_per_s_gpu: float | None = None
    dollars_per_mtokens: float | None = None
    dollars_per_mtokens_low: float | None = None
    dollars_per_mtokens_high: float | None = None
    mfu: float | None = None
    compute_s: float | None = None
    communication_s: float | None = None
    exposed_forward_s: float | None = None
    exposed_backward_s: float | None = None
    exposed_update_s: float | None = None
    host_s: float | None = None
    binds: str = ""
    validated: str = ""
    problem: str = ""
    model: str = ""
    batch: int | None = None
    precision: str = ""
    optimizer: str = ""
    systems: str = ""


@verb
def predict(arguments: list[str]) -> int:
    """Runs the verb. Returns the exit code."""
    chosen = _parser().parse_intermixed_args(arguments)
    try:
        _check(chosen)
        rows, schedules = _predict(chosen)
    except KeyboardInterrupt:
        print_note("zerobench predict: stopped; nothing is written")
        return 130
    _give(rows, chosen)
    if chosen.trace is not None:
        _write_trace(chosen.trace, schedules)
    return int(any(row.problem for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = Parser("zerobench predict", DESCRIPTION, EXAMPLES)
    add = parser.add_argument
    add_cells(parser, Limits().seconds)
    add("--cluster", metavar="NAME", help="cluster to predict for: a name below, or a yaml file of the same form")
    add("--node-gbit-s", type=float, metavar="RATE", help="rate of a node's network")
    add("--format", choices=FORMATS, default=FORMATS[0], help="default: %(default)s")
    words = "a file instead of standard output; without --format: csv if it ends in .csv, else JSON"
    add("--out", type=Path, metavar="FILE", help=words)
    add("--trace", type=Path, metavar="FILE", help="the predicted steps for https://ui.perfetto.dev")
    add_price(parser)
    add_columns(parser, HEADER)
    return parser


def _check(chosen: argparse.Namespace) -> None:
    """Raises ValueError, naming the option, if options contradict each other."""
    if chosen.cluster is None:
        raise ValueError(f"--cluster: name one of {', '.join(hardware.names('cluster'))}, or a yaml file")
    if chosen.node_gbit_s is not None and not chosen.node_gbit_s > 0:
        raise ValueError(f"--node-gbit-s {chosen.node_gbit_s:g}: must be above 0")


# -- the prediction --------------------------------------------------------------------------------


def costs_of(cluster: str, node_gbit_s: float | None) -> GpuCosts:
    """Returns the costs on a named cluster. Raises ValueError for an unknown one."""
    found = hardware.cluster(cluster)
    if node_gbit_s is not None:
        found = replace(found, node_gbit_s=node_gbit_s)
    return GpuCosts(hardware.device(found.device), found)


def _beyond(costs: GpuCosts, config: CellConfig) -> str:
    """Returns an error message if the rates do not cover a cell; else empty."""
    if config.offload.name != "none":
        return f"offload={config.offload.name}: no rate of an update on the host is known here; leave offload out"
    if config.tensor_parallel > 1:
        return f"tensor_parallel={config.tensor_parallel}: no times within a model are known; leave it out"
    if config.compile != "none":
        return f"compile={config.compile}: times of fused kernels are not predicted; use compile=none"
    if config.node_size not in (None, costs.cluster.devices_per_node):
        return f"node_size={config.node_size}: a node of this cluster has {costs.cluster.devices_per_node} devices"
    return ""


def _predict(chosen: argparse.Namespace) -> tuple[list[PredictionRow], list[tuple[str, StepSchedule, StepTime]]]:
    costs = costs_of(chosen.cluster, chosen.node_gbit_s)
    arguments = [*(["--config-dir", chosen.config_dir] if chosen.config_dir else []), *chosen.overrides]
    question = ask(arguments, "cuda", defaults=DEFAULTS | {"sequence": SEQUENCE})
    names = name_strategies([cell.config for cell in question.cells])
    sound = {cell.cell_id: reduced(cell.config) for cell in question.cells if not cell.problems}
    name_of = {cell.cell_id: name for cell, name in zip(question.cells, names, strict=True)}
    schedules = execute_schedules(
        "predict", list(sound.values()), question.target, chosen.jobs, Limits(seconds=chosen.timeout),
        [name_of[cell_id] for cell_id in sound],
    )  # fmt: skip
    by_cell = dict(zip(sound, schedules, strict=True))
    rows, told = [], []
    for cell, name in zip(question.cells, names, strict=True):
        config = cell.config
        row = PredictionRow(
            name, chosen.cluster, config.strategy.name, config.world_size, config.micro_batch, config.accumulation,
            config.sequence, model=model_of(config), batch=config.batch, precision=config.precision.label,
            optimizer=config.optimizer_label, systems=config.systems_label,
        )  # fmt: skip
        problem = "; ".join(cell.problems) or _beyond(costs, config) or by_cell[cell.cell_id].problem
        if problem:
            rows.append(replace(row, problem=problem))
            continue
        schedule = by_cell[cell.cell_id]
        found, interval = step_time(schedule, costs), interval_of(costs, config, schedule.without_formula)
        rows.append(priced(filled(row, found, costs, interval, config), chosen.price))
        told.append((name, schedule, found))
    return rows, told


def filled(row: PredictionRow, found: StepTime, costs: GpuCosts, interval: StepInterval, config: Any) -> PredictionRow:
    """Returns a row with the figures of its predicted step."""
    flops = step_flops(config)
    peak = costs.peak_flops(config.precision.name)
    exposed: dict[str, Any] = {
        f"exposed_{name}_s": found.phases[name].exposed_s for name in PHASES if name in found.phases
    }
    return replace(
        row, step_s=found.step_s, low_s=found.step_s * interval.low, high_s=found.step_s * interval.high,
        tokens_per_s_gpu=config.micro_batch * config.accumulation * config.sequence / found.step_s,
        mfu=flops.model / (found.step_s * peak) if flops else None, compute_s=found.compute_s,
        communication_s=found.communication_s, host_s=found.host_s, binds=found.binds, validated=interval.words,
        **exposed,
    )  # fmt: skip


def priced(row: PredictionRow, price: float | None) -> PredictionRow:
    """Returns a predicted row with the price of its tokens. `price`: dollars per GPU hour."""
    if price is None or row.step_s is None or row.low_s is None or row.high_s is None:
        return row
    low, high = row.low_s / row.step_s, row.high_s / row.step_s
    return replace(row, **dollars_per_million(price, row.tokens_per_s_gpu, low, high))


# -- the answer ------------------------------------------------------------------------------------


HEADER = [
    "cell", "step", "90 % interval", "tokens/s/GPU", "MFU", "compute", "communication", "exposed forward", "backward",
    "update", "host", "$/M tokens", "binds",
]  # fmt: skip
FIRST_TO_GO = ("communication", "update", "compute", "host", "exposed forward")


def _give(rows: Sequence[PredictionRow], chosen: argparse.Namespace) -> None:
    if chosen.format == "table" and chosen.out is None:
        _show(rows, chosen.columns)
        return
    import pandas as pd

    is_csv = chosen.format == "csv" or (chosen.format == "table" and chosen.out.suffix == ".csv")
    written = [asdict(row) for row in rows]
    frame = pd.DataFrame(written, dtype="object")
    text = str(frame.to_csv(index=False)) if is_csv else json.dumps(written, indent=1) + "\n"
    if chosen.out is None:
        print(text, end="")
        return
    _write(chosen.out, text)
    print_note(f"{chosen.out}: {len(rows)} cells")


def _write(out: Path, text: str) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    replace_text(out, text)


def _show(rows: Sequence[PredictionRow], columns: Sequence[str] | None) -> None:
    console = stdout_console()
    there = [row for row in rows if row.step_s is not None]
    if there:
        first = there[0]
        setting = {"model": first.model} | training_words(first) | {"batch": f"batch {first.batch} over all ranks"}
        print_on(console, f"{shared_words(there, setting)}; on {first.cluster}:")
        noun = counted(row.sequence for row in there)
        kept = [name for name in HEADER if first.dollars_per_mtokens is not None or columns or name != "$/M tokens"]
        header = [name.replace("tokens", noun) for name in kept]
        columns = columns and [name.replace("tokens", noun) for name in columns]
        lines = [dict(zip(HEADER, _line(row), strict=True)) for row in there]
        shown = [[line[name] for name in kept] for line in lines]
        console.print(Grid(header, shown, ("cell", "binds"), FIRST_TO_GO, columns))
    for words in dict.fromkeys(row.validated for row in there):
        print_on(console, f"interval: {words}")
    for problem in dict.fromkeys(row.problem for row in rows if row.problem):
        print_on(console, f"{', '.join(row.name for row in rows if row.problem == problem)}: {problem}")


def _line(row: PredictionRow) -> list[str]:
    assert row.step_s is not None
    times = (row.compute_s, row.communication_s, row.exposed_forward_s, row.exposed_backward_s, row.exposed_update_s)
    return [
        row.name, show_time(row.step_s), f"{show_time(row.low_s)} – {show_time(row.high_s)}",
        f"{row.tokens_per_s_gpu:,.0f}", "–" if row.mfu is None else f"{row.mfu:.1%}",
        *map(show_time, times), show_time(row.host_s), show_price(vars(row)), row.binds,
    ]  # fmt: skip


def show_time(seconds: float | None) -> str:
    """Formats seconds, or milliseconds below one second."""
    if seconds is None:
        return "–"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def _write_trace(out: Path, told: Sequence[tuple[str, StepSchedule, StepTime]]) -> None:
    """Writes the predicted steps as one trace; for a reduced cell, the steps that were simulated."""
    import pandas as pd

    from .export.perfetto import process

    entries = []
    for number, (name, schedule, found) in enumerate(told, 1):
        events = [replace(event, seconds=at) for event, at in zip(schedule.events[-1], found.timeline.at, strict=True)]
        entries += process(number, f"{name}, predicted", pd.DataFrame([asdict(event) for event in events]))
    _write(out, json.dumps({"traceEvents": entries, "displayTimeUnit": "ms"}, default=lambda one: one.item()))
    print_note(f"{out}: {len(told)} steps; open it at https://ui.perfetto.dev")
