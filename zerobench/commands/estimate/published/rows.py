"""A file of published runs: a CSV with a row per run, in the columns of docs/reference/validated.md.

empty cell       the source does not say
columns          those of Run, in any order; others are ignored, those of NEEDED must be there
peak_kind        which figure was published: allocated, reserved, or `?` where the source does not say
"""

from __future__ import annotations

import csv
import io
import math
import types
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from ....config.unknown_keys import nearest
from ....host.files import read_text
from ....sizes import printable

KINDS = ("allocated", "reserved", "?")
"""Values of peak_kind, where there is a peak."""

NEEDED = ("id", "strategy", "model", "gpus", "seq", "micro_batch", "peak_mem_gib", "peak_kind")
"""Columns without which a file is of another schema."""


@dataclass(frozen=True)
class Run:
    """A published run. Numbers are None, texts empty, where the source does not say; the units are the file's."""

    id: str = ""
    source: str = ""
    system: str = ""
    strategy: str = ""
    model: str = ""
    params: int | None = None
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    ffn: int | None = None
    vocab: int | None = None
    seq: int | None = None
    micro_batch: int | None = None
    grad_accum: int | None = None
    gpus: int | None = None
    gpu: str = ""
    gpu_mem_gib: float | None = None
    precision: str = ""
    optimizer: str = ""
    act_ckpt: str = ""
    compile: str = ""
    peak_mem_gib: float | None = None
    peak_kind: str = ""
    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    notes: str = ""
    date: str = ""


def read(path: Path) -> list[Run]:
    """Reads the runs of a file. Raises ValueError, one sentence with row and column, for what is not of the schema."""
    try:
        table = list(csv.reader(io.StringIO(read_text(path), newline=""), strict=True))
    except csv.Error as error:
        raise ValueError(f"{path}: this is no CSV file in UTF-8: {error}") from error
    if not table:
        raise ValueError(f"{path}: the file is empty; its first row names the columns {', '.join(NEEDED)} and others")
    header = table[0]
    for name in NEEDED:
        if name not in header:
            raise ValueError(
                f"{path}: there is no column {name}{nearest(name, header) or f'; {len(header)} others are'}"
            )
    runs = [_run(path, number, header, row) for number, row in enumerate(table[1:], 2) if any(row)]
    seen: set[str] = set()
    for number, run in enumerate(runs, 2):
        if not run.id or run.id in seen:
            raise ValueError(f"{path}, row {number}, id={printable(run.id)}: each row needs an id of its own")
        seen.add(run.id)
    return runs


def _run(path: Path, number: int, header: Sequence[str], row: Sequence[str]) -> Run:
    where = f"{path}, row {number}"
    if len(row) != len(header):
        raise ValueError(f"{where}: it has {len(row)} cells, and the header {len(header)}; quote texts with commas")
    cells = dict(zip(header, (text.strip() for text in row), strict=True))
    hints = get_type_hints(Run)
    values = {one.name: _value(where, one.name, cells.get(one.name, ""), hints[one.name]) for one in fields(Run)}
    run = Run(**values)
    if run.peak_mem_gib is not None and run.peak_kind not in KINDS:
        words = f"peak_kind={printable(run.peak_kind)}: use one of {', '.join(KINDS)}"
        raise ValueError(f"{where}, {words}")
    return run


def _value(where: str, column: str, text: str, hint: Any) -> Any:
    if hint is str:
        return text
    if not text:
        return None
    whole = isinstance(hint, types.UnionType) and int in get_args(hint)
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number <= 0 or (whole and number != int(number)):
        right = "a whole number above 0" if whole else "a number above 0"
        raise ValueError(f"{where}, {column}={printable(text)}: write {right}, or nothing where the source says none")
    return int(number) if whole else number
