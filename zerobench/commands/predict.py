"""`zerobench predict`: the time of a step on a described cluster, before any run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..config.cell import Cell
from ..host.pipes import print_note, write_text
from ..host.terminal import print_on, stdout_console
from ..predict.flops import step_flops
from ..results.grid import Grid
from ..results.options import PRICED, Parser, add_cells, add_columns, add_price, refuse_folders, show_price, verb
from ..simulation import hardware
from ..simulation.costs import GpuCosts
from ..simulation.execute import Limits
from ..simulation.prediction import PHASES
from ..sizes import counted
from .estimate import print_problems, shared_texts, training_texts
from .simulated import DEFAULTS, SimulatedCell, ask, setting_of, simulate

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


@verb
def predict(arguments: list[str]) -> int:
    """Runs the verb. Returns the exit code."""
    parser = Parser("zerobench predict", DESCRIPTION, EXAMPLES)
    add = parser.add_argument
    add_cells(parser, Limits().seconds)
    add("--cluster", metavar="NAME", help="cluster to predict for: a name below, or a yaml file of the same form")
    add("--node-gbit-s", type=float, metavar="RATE", help="rate of a node's network")
    add("--format", choices=FORMATS, default=FORMATS[0], help="default: %(default)s")
    out_help = "a file instead of standard output; without --format: csv if it ends in .csv, else JSON"
    add("--out", type=Path, metavar="FILE", help=out_help)
    add("--trace", type=Path, metavar="FILE", help="the predicted steps for https://ui.perfetto.dev")
    add_price(parser)
    add_columns(parser, [*COLUMNS])
    chosen = parser.parse_intermixed_args(arguments)
    if chosen.cluster is None:
        raise ValueError(f"--cluster: name one of {', '.join(hardware.names('cluster'))}, or a yaml file")
    if chosen.node_gbit_s is not None and not chosen.node_gbit_s > 0:
        raise ValueError(f"--node-gbit-s {chosen.node_gbit_s:g}: must be above 0")
    refuse_folders(out=chosen.out, trace=chosen.trace)
    costs = costs_of(chosen.cluster, chosen.node_gbit_s)
    try:
        overrides = [*(["--config-dir", chosen.config_dir] if chosen.config_dir else []), *chosen.overrides]
        question = ask(overrides, "cuda", defaults=DEFAULTS | {"sequence": SEQUENCE})
        cells = tuple(within_rates(cell, costs) for cell in question.cells)
        simulated = simulate("predict", replace(question, cells=cells), chosen.jobs, chosen.timeout, costs=costs)
        rows = [columns_of(cell, chosen.cluster, costs, chosen.price) for cell in simulated]
    except KeyboardInterrupt:
        print_note("zerobench predict: stopped; nothing is written")
        return 130
    if chosen.format == "table" and chosen.out is None:
        _show(rows, chosen.columns)
    else:
        import pandas as pd

        is_csv = chosen.format == "csv" or (chosen.format == "table" and chosen.out.suffix == ".csv")
        frame = pd.DataFrame(rows, dtype="object")
        text = str(frame.to_csv(index=False)) if is_csv else json.dumps(rows, indent=1) + "\n"
        write_text(text, chosen.out)
        if chosen.out is not None:
            print_note(f"{chosen.out}: {len(rows)} cells")
    if chosen.trace is not None:
        _write_trace(chosen.trace, [cell for cell in simulated if cell.step is not None])
    return int(any(cell.problem for cell in simulated))


# -- the prediction --------------------------------------------------------------------------------


def costs_of(cluster: str, node_gbit_s: float | None) -> GpuCosts:
    """Returns the costs on a named cluster. Raises ValueError for an unknown one."""
    resolved = hardware.cluster(cluster)
    if node_gbit_s is not None:
        resolved = replace(resolved, node_gbit_s=node_gbit_s)
    return GpuCosts(hardware.device(resolved.device), resolved)


def within_rates(cell: Cell, costs: GpuCosts) -> Cell:
    """Returns the cell, with a problem if the rates do not cover it."""
    config, per_node = cell.config, costs.cluster.devices_per_node
    if cell.problems:
        return cell
    problems = {
        f"offload={config.offload.name}: no rate of an update on the host is known here; leave offload out":
            config.offload.name != "none",
        f"tensor_parallel={config.tensor_parallel}: no times within a model are known; leave it out":
            config.tensor_parallel > 1,
        f"compile={config.compile}: times of fused kernels are not predicted; use compile=none":
            config.compile != "none",
        f"node_size={config.node_size}: a node of this cluster has {per_node} devices":
            config.node_size not in (None, per_node),
    }  # fmt: skip
    return replace(cell, problems=tuple(problem for problem, applies in problems.items() if applies)[:1])


EXPOSED = ("exposed_forward_s", "exposed_backward_s", "exposed_update_s")

TIMES = (
    "step_s", "low_s", "high_s", "tokens_per_s_gpu", *PRICED, "mfu", "compute_s", "communication_s", *EXPOSED, "host_s",
)  # fmt: skip
"""Columns of a predicted step; None without one."""


def columns_of(cell: SimulatedCell, cluster: str, costs: GpuCosts, price: float | None = None) -> dict[str, Any]:
    """Returns the columns of a prediction. Times are in seconds; exposed: waiting for collectives, by phase.
    `validated`: the basis of the interval. `batch`: of a step over all ranks. `price`: dollars per GPU hour.
    """
    config, setting = cell.config, setting_of(cell.config)
    training = {key: setting.pop(key) for key in ("model", "precision", "optimizer", "systems")}
    row = {"name": cell.name, "cluster": cluster, **setting, **dict.fromkeys(TIMES), "binds": "", "validated": ""}
    row |= {"problem": cell.problem, "model": training.pop("model"), "batch": config.batch, **training}
    if (step := cell.step) is None:
        return row
    time, flops = step.time, step_flops(config)
    exposed = {f"exposed_{name}_s": time.phases[name].exposed_s for name in PHASES if name in time.phases}
    return row | step.columns(price) | exposed | {
        "mfu": flops.model / (time.step_s * costs.peak_flops(config.precision.name)) if flops else None,
        "compute_s": time.compute_s, "communication_s": time.communication_s, "host_s": time.host_s,
        "binds": time.binds, "validated": step.interval.basis,
    }  # fmt: skip


# -- the answer ------------------------------------------------------------------------------------


COLUMNS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "cell": lambda row: row["name"],
    "step": lambda row: show_time(row["step_s"]),
    "90 % interval": lambda row: f"{show_time(row['low_s'])} – {show_time(row['high_s'])}",
    "tokens/s/GPU": lambda row: f"{row['tokens_per_s_gpu']:,.0f}",
    "MFU": lambda row: "–" if row["mfu"] is None else f"{row['mfu']:.1%}",
    "compute": lambda row: show_time(row["compute_s"]),
    "communication": lambda row: show_time(row["communication_s"]),
    "exposed forward": lambda row: show_time(row["exposed_forward_s"]),
    "backward": lambda row: show_time(row["exposed_backward_s"]),
    "update": lambda row: show_time(row["exposed_update_s"]),
    "host": lambda row: show_time(row["host_s"]),
    "$/M tokens": show_price,
    "binds": lambda row: row["binds"],
}
"""Column of the table -> its text for a row."""

FIRST_TO_GO = ("communication", "update", "compute", "host", "exposed forward")


def _show(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None) -> None:
    console = stdout_console()
    predicted = [row for row in rows if row["step_s"] is not None]
    if predicted:
        first = predicted[0]
        setting = {"model": first["model"]} | training_texts(first)
        setting["batch"] = f"batch {first['batch']} over all ranks"
        print_on(console, f"{shared_texts(predicted, setting)}; on {first['cluster']}:")
        noun = counted(row["sequence"] for row in predicted)
        is_priced = first["dollars_per_mtokens"] is not None
        kept = {name: text for name, text in COLUMNS.items() if is_priced or columns or text is not show_price}
        header = [name.replace("tokens", noun) for name in kept]
        lines = [[text(row) for text in kept.values()] for row in predicted]
        columns = columns and [name.replace("tokens", noun) for name in columns]
        console.print(Grid(header, lines, ("cell", "binds"), FIRST_TO_GO, columns))
    for basis in dict.fromkeys(row["validated"] for row in predicted):
        print_on(console, f"interval: {basis}")
    print_problems(console, rows)


def show_time(seconds: float | None) -> str:
    """Formats seconds, or milliseconds below one second."""
    if seconds is None:
        return "–"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def _write_trace(out: Path, cells: Sequence[SimulatedCell]) -> None:
    """Writes the predicted steps as one trace; for a reduced cell, the steps that were simulated."""
    import pandas as pd

    from .perfetto import process

    entries = []
    for number, cell in enumerate(cells, 1):
        events, starts = cell.timed.schedule.events[-1], cell.timed.time.timeline.at
        placed = [asdict(replace(event, seconds=start)) for event, start in zip(events, starts, strict=True)]
        entries += process(number, f"{cell.name}, predicted", pd.DataFrame(placed))
    write_text(json.dumps({"traceEvents": entries, "displayTimeUnit": "ms"}, default=lambda value: value.item()), out)
    print_note(f"{out}: {len(cells)} steps; open it at https://ui.perfetto.dev")
