"""Estimates as tables and files.

tables   strategies side by side, a line per figure; below, the largest tensors at each peak
files    JSON with everything, CSV with a line per cell; both have the columns of EstimateRow
"""

from __future__ import annotations

import io
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from ...fake_execution.parts import PARTS
from ...host.terminal import file_console, print_on, stdout_console
from ...results.grid import Grid
from ...results.provenance import versions
from ...sizes import printable, show_bytes
from .row import EstimateRow

ABREAST = 7
"""Cells in one table, if the terminal is wide enough; further cells are shown in tables below."""

Figure = Callable[[EstimateRow], float | None]

SOMETIMES: dict[str, Figure] = {
    "host memory": lambda row: row.host_bytes or None,
    "files": lambda row: row.file_bytes or None,
    "allocated": lambda row: row.allocated_bytes,
    "reserved, at least": lambda row: row.reserved_low_bytes,
    "reserved, at most": lambda row: row.reserved_high_bytes,
}
"""Line -> bytes; shown if any cell has some."""


def show(rows: Sequence[EstimateRow], memory: int | None = None, console: Console | None = None) -> None:
    """Prints the tables, and a message for each cell that has no estimate or for which `memory` is too small."""
    console = console or stdout_console()
    known = [row for row in rows if row.peak_bytes is not None]
    if known:
        print_on(console, heading(known))
    for start in range(0, len(known), ABREAST):
        console.print(_side_by_side(known[start : start + ABREAST], memory))
    if any(row.tensors for row in known):
        header = ["", "largest at the peak", "part", "shape", "made by"]
        body = []
        for row in known:
            for number, (tensor, times) in enumerate(Counter(row.tensors).items()):
                where = " ".join(filter(None, [tensor.where, f"({tensor.source})" if tensor.source else ""]))
                size = f"{times} × " * (times > 1) + show_bytes(tensor.bytes)
                body.append(["" if number else row.name, size, tensor.part, tensor.shape, where])
        console.print(Grid(header, body, left=("", *header[2:])))
    problems = dict.fromkeys(row.problem for row in rows if row.problem)
    sentences = [f"{', '.join(row.name for row in rows if row.problem == one)}: {one}" for one in problems]
    for sentence in sentences + [words for row in known if memory and (words := verdict(row, memory))]:
        print_on(console, sentence)


def heading(rows: Sequence[EstimateRow]) -> str:
    """Returns the settings that all cells share; the others are in the cells' names."""
    first = rows[0]
    model = {
        "model": first.model, "psi": f"{first.psi:,} parameters" * bool(first.psi),
        "frozen": f"{first.frozen or 0:,} frozen ones" * bool(first.frozen),
    }  # fmt: skip
    more = {
        "device": f"for {first.device}",
        "attention": f"{first.attention} attention" * (first.attention is not None),
    }
    return shared_words(rows, model | training_words(first) | more) + "; the rank with the most:"


def training_words(row: Any) -> dict[str, str]:
    """Returns field -> setting of the training of an estimate or a prediction, in words."""
    return {
        "world_size": f"N = {row.world_size}",
        "micro_batch": f"micro-batch {row.micro_batch}", "sequence": f"sequence {row.sequence}" * (row.sequence != 1),
        "accumulation": f"{row.accumulation} micro-batches per step" * (row.accumulation != 1),
        "precision": row.precision, "optimizer": row.optimizer, "systems": row.systems,
    }  # fmt: skip


def shared_words(rows: Sequence[object], words: dict[str, str]) -> str:
    """Returns the words of the fields that are the same in all rows."""
    return ", ".join(said for key, said in words.items() if said and len({getattr(row, key) for row in rows}) == 1)


def verdict(row: EstimateRow, memory: int) -> str:
    """Returns a message if a cell does not fit a device, with the shortfall and the largest part; empty if it fits."""
    needed = row.needed_bytes or 0
    if needed <= memory:
        return ""
    part = max(row.parts_bytes, key=lambda name: row.parts_bytes[name])
    needs = "its allocator reserves up to" if row.reserved_high_bytes else "its peak is"
    fewer = ""
    if row.reserved_low_bytes and row.reserved_low_bytes <= memory:
        way = "as a rule with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        fewer = f"; at least {show_bytes(row.reserved_low_bytes)}, {way}"
    return (
        f"{row.name}: does not fit {show_bytes(memory)}: {needs} {show_bytes(needed)},"
        f" {show_bytes(needed - memory)} too much{fewer};"
        f" the largest part of its peak: {part}, {show_bytes(row.parts_bytes[part])}"
    )


def _side_by_side(rows: Sequence[EstimateRow], memory: int | None) -> Grid:
    def sizes(figure: Figure) -> list[str]:
        return [show_bytes(figure(row)) for row in rows]

    lines = {"peak": sizes(lambda row: row.peak_bytes)}
    for part in PARTS:
        if any(row.parts_bytes[part] for row in rows):
            lines[f"  {part}"] = [show_bytes(row.parts_bytes[part]) for row in rows]
    lines |= {name: sizes(figure) for name, figure in SOMETIMES.items() if any(map(figure, rows))}
    if memory is not None:
        lines[f"left of {show_bytes(memory)}"] = [show_bytes(memory - (row.needed_bytes or 0)) for row in rows]
    lines["states"] = sizes(lambda row: row.states_bytes)
    lines["  formula"] = sizes(lambda row: row.formula_bytes)
    lines["  in flight"] = sizes(lambda row: row.in_flight_bytes)
    lines["volume ψ"] = ["–" if row.volume_psi is None else f"{row.volume_psi:.3f}" for row in rows]
    lines["sent a step"] = sizes(lambda row: row.wire_bytes)
    lines["seconds"] = [f"{row.seconds or 0:.1f}" for row in rows]
    header = ["", *(printable(row.name).replace(" ", "\n") for row in rows)]
    style = {name: "" if name.startswith(" ") else "bold" for name in lines}
    return Grid(header, [[Text(text, style[name]) for text in (name, *cells)] for name, cells in lines.items()])


# -- files -----------------------------------------------------------------------------------------


FORM = 1
"""Version of the JSON format."""


def as_json(rows: Sequence[EstimateRow], memory: int | None) -> str:
    """Returns `{"form", "versions", "device_memory_bytes", "estimates": [a row's fields, ...]}`."""
    made_by = {"form": FORM, "versions": versions(("zerobench", "torch")), "device_memory_bytes": memory}
    estimates = [row.as_dict() for row in rows]
    return json.dumps(made_by | {"estimates": estimates}, indent=1, ensure_ascii=False) + "\n"


def as_csv(rows: Sequence[EstimateRow], memory: int | None) -> str:
    """Returns a line per cell: its fields, each part of the peak as PART_bytes, and the largest tensor."""
    import pandas as pd  # takes a third of a second, which the other formats need not wait for

    lines = []
    for row in rows:
        fields = {key: value for key, value in row.as_dict().items() if key not in ("parts_bytes", "tensors", "config")}
        parts = {f"{part}_bytes": row.parts_bytes.get(part) for part in PARTS}
        largest = row.tensors[0] if row.tensors else None
        ends = {"largest_bytes": largest and largest.bytes, "largest": largest and largest.where}
        lines.append(fields | parts | ends)
    return str(pd.DataFrame(lines, dtype="object").to_csv(index=False))


def as_table(rows: Sequence[EstimateRow], memory: int | None) -> str:
    """Returns the tables as they are printed, without color."""
    text = io.StringIO()
    show(rows, memory, file_console(text))
    return text.getvalue()


FORMS: dict[str, Callable[[Sequence[EstimateRow], int | None], str]] = {
    "table": as_table,
    "json": as_json,
    "csv": as_csv,
}
FORMATS = tuple(FORMS)


def write(rows: Sequence[EstimateRow], form: str, out: Path | None, memory: int | None = None) -> None:
    """Writes the rows to `out`, or to standard output."""
    text = FORMS[form](rows, memory)
    if out is None:
        sys.stdout.write(text)
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text)
