"""`zerobench estimate`: memory and traffic of strategies, side by side, before any run.

Simulates one rank of each cell of a command line (simulated.py). The figures are shown as tables, a line per figure,
with the largest tensors at each peak below; or written as JSON with everything, or as CSV with a line per cell, both
with the columns of SimulatedCell.as_dict; and drawn: a bar per cell with the parts of its peak stacked.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from ..fake.as_gpu import ATTENTION_KERNELS
from ..host.pipes import print_note, write_text
from ..host.terminal import file_console, print_on, stdout_console
from ..records.palette import CATEGORIES
from ..results.grid import Grid
from ..results.options import Parser, add_cells, refuse_folders, verb
from ..results.provenance import versions
from ..simulation.execute import KINDS, PARTS, Limits
from ..sizes import SIZES, parse_memory, printable, show_bytes
from .reserved import reserved_table
from .simulated import DEFAULTS, DEVICE, LARGEST, SimulatedCell, ask, simulate

DESCRIPTION = """\
Will it fit, and under which strategy? Simulates the rank of each cell that needs the most memory, on fake tensors, with
the code of a run: our engine, DDP, FSDP2. Offline; no weights, no GPU, no results folder; seconds per cell.
"""

EXAMPLES = f"""\
KEY=VALUE as for a sweep, several values comma-separated; `zerobench --help KEY` explains each key. Defaults here:
  {"  ".join(f"{key}={value}" for key, value in DEFAULTS.items() if key != "data")}

  zerobench estimate model=gpt2_124m precision=bf16 sequence=1024
  zerobench estimate model=zero_7_5b world_size=64 precision=bf16 activation=checkpoint --device-memory "80 GiB"
  zerobench estimate model=gpt2_1_5b strategy=zero2,zero3 offload=none,cpu micro_batch=1,8 precision=bf16
  zerobench estimate model=llama_8b world_size=64 precision=bf16 sequence=4096 micro_batch=1 activation=checkpoint
  zerobench estimate model=huggingface huggingface.config=path/to/config.json precision=bf16 --attention flash
  zerobench estimate model=gpt2_124m --format json --out estimates.json --figure estimates.svg
  python mine.py estimate model=mine strategy=ddp,zero3            (a script that registers your model)

How to read it: peak is the largest sum of live bytes at any instant, on the rank with the largest sum; the parts below
it add up to it. states have an instant of their own; formula is the paper's closed form for them, in flight the rest:
gathered units, buckets, temporaries of the update. volume is elements sent per step over the number of parameters.
Exit code: 0 all cells were simulated, 1 a cell was not, 2 the command is invalid, 130 interrupted.
"""


@verb
def estimate(arguments: list[str]) -> int:
    """Runs the verb. Returns the exit code."""
    parser = Parser("zerobench estimate", DESCRIPTION, EXAMPLES)
    add = parser.add_argument
    add_cells(parser, Limits().seconds)
    add("--device", choices=KINDS, help=f"device to estimate for; this machine need not have it (default: {DEVICE})")
    attention_help = "attention kernel on a GPU (default: the one that torch chooses)"
    add("--attention", choices=ATTENTION_KERNELS, help=attention_help)
    memory_help = 'memory of one GPU, such as "80 GiB": shows which cells fit, and by how much'
    add("--device-memory", metavar="SIZE", help=memory_help)
    tensors_help = "show the K largest tensors at the peak of each cell (default: %(default)s)"
    add("--tensors", type=int, default=LARGEST, metavar="K", help=tensors_help)
    add("--format", choices=FORMATS, default="table", help="default: %(default)s")
    add("--out", type=Path, metavar="FILE", help="write to FILE instead of standard output")
    add("--figure", type=Path, metavar="FILE", help="stacked bars by part: .svg, .png or .pdf")
    chosen = parser.parse_intermixed_args(arguments)
    memory = parse_memory(chosen.device_memory, "--device-memory: ") if chosen.device_memory else None
    if memory == 0:
        raise ValueError(f"--device-memory {chosen.device_memory}: must be above 0")
    if chosen.tensors < 0:
        raise ValueError(f"--tensors {chosen.tensors}: must be at least 0")
    refuse_folders(out=chosen.out, figure=chosen.figure)
    if chosen.figure is not None and chosen.figure.suffix not in (".svg", ".png", ".pdf"):
        raise ValueError(f"--figure {chosen.figure}: name a file that ends in .svg, .png or .pdf")
    try:
        overrides = [*(["--config-dir", chosen.config_dir] if chosen.config_dir else []), *chosen.overrides]
        question = ask(overrides, chosen.device, chosen.attention)
        cells = simulate("estimate", question, chosen.jobs, chosen.timeout, chosen.tensors)
    except KeyboardInterrupt:
        print_note("zerobench estimate: stopped; nothing is written")
        return 130
    if chosen.format == "table" and chosen.out is None:
        show(cells, memory)
    else:
        write_text(FORMATS[chosen.format](cells, memory), chosen.out)
    if chosen.figure is not None:
        estimated = [cell for cell in cells if not cell.problem]
        draw(estimated, chosen.figure, heading(estimated) if estimated else "", memory)
    return int(any(cell.problem for cell in cells))


# -- tables ----------------------------------------------------------------------------------------


ABREAST = 7
"""Cells in one table, if the terminal is wide enough; further cells are shown in tables below."""

SOMETIMES = {
    "host memory": "host_bytes",
    "files": "file_bytes",
    "allocated": "allocated_bytes",
    "reserved, at least": "reserved_low_bytes",
    "reserved, at most": "reserved_high_bytes",
}
"""Line -> column of its bytes; shown if any cell has some."""


def show(cells: Sequence[SimulatedCell], memory: int | None = None, console: Console | None = None) -> None:
    """Prints the tables, and a message for each cell that has no estimate or for which `memory` is too small."""
    console = console or stdout_console()
    estimated = [cell for cell in cells if not cell.problem]
    if estimated:
        print_on(console, f"{heading(estimated)}; the rank with the most:")
    for start in range(0, len(estimated), ABREAST):
        console.print(_side_by_side(estimated[start : start + ABREAST], memory))
    if memories := {cell.name: cell.reserved for cell in estimated if cell.reserved is not None}:
        console.print(reserved_table(memories))
    if any(cell.tensors for cell in estimated):
        header = ["", "largest at the peak", "part", "shape", "made by"]
        body = []
        for cell in estimated:
            for number, (tensor, times) in enumerate(Counter(cell.tensors).items()):
                where = " ".join(filter(None, [tensor.where, f"({tensor.source})" if tensor.source else ""]))
                size = (f"{times} × " if times > 1 else "") + show_bytes(tensor.bytes)
                body.append(["" if number else cell.name, size, tensor.part, tensor.shape, where])
        console.print(Grid(header, body, left=("", *header[2:])))
    print_problems(console, [vars(cell) for cell in cells])
    for cell in estimated:
        if memory and (message := verdict(cell, memory)):
            print_on(console, message)


def heading(cells: Sequence[SimulatedCell]) -> str:
    """Returns the settings that all cells share; the others are in the cells' names."""
    rows = [cell.as_dict() for cell in cells]
    first = rows[0]
    model = {
        "model": first["model"], "psi": f"{first['psi']:,} parameters" if first["psi"] else "",
        "frozen": f"{first['frozen']:,} frozen ones" if first["frozen"] else "",
    }  # fmt: skip
    target = {
        "device": f"for {first['device']}",
        "attention": f"{first['attention']} attention" if first["attention"] else "",
    }
    return shared_texts(rows, model | training_texts(first) | target)


def training_texts(row: Mapping[str, Any]) -> dict[str, str]:
    """Returns column -> the setting of the training of an estimate or a prediction as text."""
    accumulation, sequence = row["accumulation"], row["sequence"]
    return {
        "world_size": f"N = {row['world_size']}",
        "micro_batch": f"micro-batch {row['micro_batch']}", "sequence": f"sequence {sequence}" if sequence != 1 else "",
        "accumulation": f"{accumulation} micro-batches per step" if accumulation != 1 else "",
        "precision": row["precision"], "optimizer": row["optimizer"], "systems": row["systems"],
    }  # fmt: skip


def shared_texts(rows: Sequence[Mapping[str, Any]], texts: dict[str, str]) -> str:
    """Returns the texts of the columns that are the same in all rows."""
    return ", ".join(text for key, text in texts.items() if text and len({row[key] for row in rows}) == 1)


def print_problems(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints each problem once, after the names of its cells."""
    for problem in dict.fromkeys(row["problem"] for row in rows if row["problem"]):
        print_on(console, f"{', '.join(row['name'] for row in rows if row['problem'] == problem)}: {problem}")


def verdict(cell: SimulatedCell, memory: int) -> str:
    """Returns a message if a cell does not fit a device, with the shortfall and the largest part; empty if it fits."""
    needed, low = cell.held_bytes, cell.reserved_low_bytes
    if needed <= memory:
        return ""
    part = max(cell.parts_bytes, key=lambda name: cell.parts_bytes[name])
    needs = "its allocator reserves up to" if cell.reserved_high_bytes else "its peak is"
    fewer = ""
    if low and low <= memory:
        fewer = f"; at least {show_bytes(low)}, as a rule with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    return (
        f"{cell.name}: does not fit {show_bytes(memory)}: {needs} {show_bytes(needed)},"
        f" {show_bytes(needed - memory)} too much{fewer};"
        f" the largest part of its peak: {part}, {show_bytes(cell.parts_bytes[part])}"
    )


def _side_by_side(cells: Sequence[SimulatedCell], memory: int | None) -> Grid:
    def sizes(column: str) -> list[str]:
        return [show_bytes(getattr(cell, column)) for cell in cells]

    lines = {"peak": sizes("peak_bytes")}
    for part in PARTS:
        if any(cell.parts_bytes[part] for cell in cells):
            lines[f"  {part}"] = [show_bytes(cell.parts_bytes[part]) for cell in cells]
    for line, column in SOMETIMES.items():
        if any(getattr(cell, column) for cell in cells):
            lines[line] = [show_bytes(getattr(cell, column) or None) for cell in cells]
    if memory is not None:
        lines[f"left of {show_bytes(memory)}"] = [show_bytes(memory - cell.held_bytes) for cell in cells]
    lines["states"] = sizes("states_bytes")
    lines["  formula"] = sizes("formula_bytes")
    lines["  in flight"] = sizes("in_flight_bytes")
    lines["volume ψ"] = [f"{cell.volume_psi:.3f}" if cell.psi else "–" for cell in cells]
    lines["sent a step"] = sizes("wire_bytes")
    lines["seconds"] = [f"{cell.seconds:.1f}" for cell in cells]
    header = ["", *(printable(cell.name).replace(" ", "\n") for cell in cells)]
    style = {name: "" if name.startswith(" ") else "bold" for name in lines}
    return Grid(header, [[Text(text, style[name]) for text in (name, *texts)] for name, texts in lines.items()])


# -- the figure ------------------------------------------------------------------------------------


LOOKS = {**CATEGORIES, "logits": ("#F5D5E5", ""), "loss": ("#8B4A72", "//")}
"""Part -> color and hatch; two parts of the activations have their own."""

VISIBLE = 1e-3
"""A part is drawn from this fraction of the highest peak on."""


def draw(cells: Sequence[SimulatedCell], path: Path, title: str, memory: int | None = None) -> None:
    """Draws cells that have an estimate into `path`, and a device's memory as a line. Raises ValueError if there is no
    cell.
    """
    from matplotlib.figure import Figure  # takes a second

    from ..plots.page import Page

    if not cells:
        raise ValueError("--figure: no cell has an estimate to draw")
    peaks = [cell.peak_bytes for cell in cells]
    highest = max([*peaks, memory or 0])
    name = next((name for name in ("tib", "gib", "mib") if highest >= SIZES[name]), "kib")
    unit, bottoms = SIZES[name], [0.0] * len(cells)
    with Page().used():
        figure = Figure(figsize=(max(4.5, 2.5 + 0.95 * len(cells)), 4.0), layout="constrained")
        axes = figure.subplots()
        for part in PARTS:
            heights = [cell.parts_bytes[part] / unit for cell in cells]
            if max(heights) > VISIBLE * max(peaks) / unit:
                color, hatch = LOOKS[part]
                style: dict[str, Any] = {"color": color, "hatch": hatch, "edgecolor": "white", "lw": 0.4}
                axes.bar(range(len(cells)), heights, 0.6, bottoms, label=part, **style)
            bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
        for bar in zip(range(len(cells)), bottoms, strict=True):
            label = show_bytes(peaks[bar[0]])
            axes.annotate(label, bar, (0, 3), textcoords="offset points", ha="center", fontsize=7)
        axes.set_xticks(range(len(cells)), [cell.name.replace(" ", "\n") for cell in cells], fontsize=7)
        if memory is not None:
            axes.axhline(memory / unit, color="black", linestyle="--", linewidth=1, label=show_bytes(memory))
        axes.set_ylabel(f"peak ({name[0].upper()}iB)")
        axes.set_title(title, loc="left", fontsize=8, wrap=True)
        axes.set_ylim(0, 1.08 * highest / unit)
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), reverse=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        # without a date the same data give the same file
        figure.savefig(path, bbox_inches="tight", metadata={"Date": None} if path.suffix == ".svg" else None)


# -- files -----------------------------------------------------------------------------------------


FORM = 1
"""Version of the JSON format."""


def as_json(cells: Sequence[SimulatedCell], memory: int | None) -> str:
    """Returns `{"form", "versions", "device_memory_bytes", "estimates": [a cell's columns, ...]}`."""
    made_by = {"form": FORM, "versions": versions(("zerobench", "torch")), "device_memory_bytes": memory}
    return json.dumps(made_by | {"estimates": [cell.as_dict() for cell in cells]}, indent=1, ensure_ascii=False) + "\n"


def as_csv(cells: Sequence[SimulatedCell], memory: int | None) -> str:
    """Returns a line per cell: its columns, each part of the peak as PART_bytes, and the largest tensor."""
    import pandas as pd  # takes a third of a second, which the other formats need not wait for

    lines = []
    for cell in cells:
        columns = cell.as_dict() | {f"{part}_bytes": cell.parts_bytes.get(part) for part in PARTS}
        largest = cell.tensors[0] if cell.tensors else None
        lines.append(columns | {"largest_bytes": largest and largest.bytes, "largest": largest and largest.where})
    frame = pd.DataFrame(lines, dtype="object").drop(columns=["parts_bytes", "reserved", "tensors", "config"])
    return str(frame.to_csv(index=False))


def as_table(cells: Sequence[SimulatedCell], memory: int | None) -> str:
    """Returns the tables as they are printed, without color."""
    text = io.StringIO()
    show(cells, memory, file_console(text))
    return text.getvalue()


FORMATS: dict[str, Callable[[Sequence[SimulatedCell], int | None], str]]
FORMATS = {"table": as_table, "json": as_json, "csv": as_csv}
