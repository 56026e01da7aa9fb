"""A file of published runs: a CSV with a row per run and the columns of docs/reference/validated.md.

empty cell       the source does not say
columns          those of PublishedRun, in any order; others are ignored, and the required ones depend on the proof
peak_kind        the kind of published figure: allocated, reserved, or `?` if the source does not say
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from zerobench.config.keys import nearest
from zerobench.host.files import read_text
from zerobench.sizes import printable

KINDS = ("allocated", "reserved", "?")
"""Values of peak_kind, if there is a peak."""

SIMULATED = ("id", "strategy", "model", "gpus", "seq", "micro_batch")
"""Columns that every simulation of a run needs."""


@dataclass(frozen=True)
class PublishedRun:
    """A published run. Numbers are None and texts empty if the source does not give them; units are the file's."""

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
    gpus_per_node: int | None = None
    gpu: str = ""
    gpu_mem_gib: float | None = None
    interconnect: str = ""
    precision: str = ""
    optimizer: str = ""
    act_ckpt: str = ""
    compile: str = ""
    tokens_s_gpu: float | None = None
    peak_mem_gib: float | None = None
    peak_kind: str = ""
    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    notes: str = ""
    date: str = ""


class NotGivenError(Exception):
    """The configuration of a run is incomplete or not supported here; the message says which."""


def read(path: Path, needed: Sequence[str]) -> list[PublishedRun]:
    """Reads the runs of a file, which must have the columns `needed`. Raises ValueError, with row and column, for
    anything that does not match the schema.
    """
    table = csv.DictReader(io.StringIO(read_text(path), newline=""), strict=True)
    try:
        header, rows = list(table.fieldnames or ()), list(table)
    except csv.Error as error:
        raise ValueError(f"{path}: this is no CSV file in UTF-8: {error}") from error
    for name in needed:
        if name not in header:
            raise ValueError(f"{path}: there is no column {name}{nearest(name, header)}")
    runs: dict[str, PublishedRun] = {}
    for number, row in enumerate(rows, 2):
        if not any(row.values()):
            continue
        where = f"{path}, row {number}"
        if None in row or None in row.values():
            raise ValueError(f"{where}: it has not as many cells as the header; quote texts with commas")
        values: dict[str, Any] = {
            field.name: _value(where, field.name, row.get(field.name, "").strip(), str(field.type))
            for field in fields(PublishedRun)
        }
        run = PublishedRun(**values)
        if run.peak_mem_gib is not None and run.peak_kind not in KINDS:
            raise ValueError(f"{where}, peak_kind={printable(run.peak_kind)}: use one of {', '.join(KINDS)}")
        if not run.id or run.id in runs:
            raise ValueError(f"{where}, id={printable(run.id)}: each row needs an id of its own")
        runs[run.id] = run
    return list(runs.values())


def _value(where: str, column: str, text: str, kind: str) -> str | float | None:
    if kind == "str" or not text:
        return text if kind == "str" else None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    is_whole = kind.startswith("int")
    if not math.isfinite(number) or number <= 0 or (is_whole and number != int(number)):
        right = "a whole number above 0" if is_whole else "a number above 0"
        raise ValueError(f"{where}, {column}={printable(text)}: write {right}, or nothing if the source gives none")
    return int(number) if is_whole else number
