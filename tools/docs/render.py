"""Renders tables of the pages: rows, and a template of that name in blocks.md.

A template is Markdown. Its last line of a table is repeated for each row; the text around the table is filled in from
the first row. A field is an expression of the row's columns and of NAMES, with a format as in an f-string and a unit
after it: `{peak_bytes/MiB:.1f MiB}`. A missing value is a dash.
"""

from __future__ import annotations

import re
import string
import textwrap
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd

from validation.table1 import GB, STAGES
from zerobench.results.grid import Grid
from zerobench.sizes import show_bytes
from zerobench.strategies import spec_of

TEMPLATES = Path(__file__).with_name("blocks.md")


def interval(value: float, low: float, high: float) -> str:
    """Formats a median with its interval, if it has one: "566 (532–665)"."""
    if pd.isna(value):
        return "–"
    return f"{value:.0f}" if pd.isna(low) else f"{value:.0f} ({low:.0f}–{high:.0f})"


def gigabytes(size: float) -> str:
    """Formats bytes as GB, with as many digits as table 1 of ZeRO can be read to."""
    digits = 0 if size >= 1000 * GB else 1 if size >= 100 * GB else 2
    return f"{size / GB:,.{digits}f}"


def function_of(source: str) -> str:
    """Formats a source without its line, which any edit above it changes: "zero/bucket.py in Heap.take"."""
    return re.sub(r":\d+(?= in )", "", source)


MiB = 2**20

FORMULAS = {
    "ddp": "4ψ + 4ψ + 8ψ", "zero1": "4ψ + 4ψ + 8ψ/N", "zero2": "4ψ + 4ψ/N + 8ψ/N", "zero3": "4ψ/N + 4ψ/N + 8ψ/N",
}  # fmt: skip
"""The ZeRO paper's states in fp32 under Adam: parameters, gradients, optimizer states, in bytes."""

CONFIGURATIONS = {
    ("zero1", "checkpoint"): "C1", ("zero1", "partition"): "C2", ("zero2", "checkpoint"): "C3",
    ("zero2", "partition"): "C4", ("zero2", "partition_offload"): "C5",
}  # fmt: skip
"""Strategy and policy -> the configuration's name in table 3 of ZeRO."""


NAMES = {
    "MiB": MiB, "M": 1e6, "ms": 1e-3, "CONFIGURATIONS": CONFIGURATIONS, "FORMULAS": FORMULAS, "STAGES": STAGES,
    "function_of": function_of, "gigabytes": gigabytes, "interval": interval, "median": median,
    "quantile": np.quantile, "show_bytes": show_bytes, "spec_of": spec_of,
}  # fmt: skip
"""Names that the fields of templates may use beside the columns."""


def table(header: Iterable[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """Returns a table in Markdown whose first columns, `words` of them, are words; the others are numbers."""
    return Grid([*header], [*rows], words).markdown(is_markdown=True).rstrip()


def render(name: str, rows: Iterable[Any]) -> str:
    """Returns the template `name`, filled in from rows: any objects with attributes."""
    rows = list(rows)
    lines: list[str] = []
    for line in templates()[name].splitlines():
        is_row = line.startswith("|") and bool(lines) and lines[-1].startswith("| -")
        lines += [_Template().vformat(line, (), _Columns(row)) for row in (rows if is_row else rows[:1])]
    return "\n".join(lines)


def paragraph(template: str, /, **values: Any) -> str:
    """Returns a template, filled in from values, as lines of a page."""
    return textwrap.fill(render(template, [SimpleNamespace(**values)]), 130)


@cache
def templates() -> dict[str, str]:
    """Returns name -> template."""
    _, *parts = re.split(r"^# (\w+)\n", TEMPLATES.read_text(), flags=re.MULTILINE)
    return {name: text.strip() for name, text in zip(parts[::2], parts[1::2], strict=True)}


class _Columns(dict[str, Any]):
    """The attributes of a row, as the local names of an expression."""

    def __init__(self, row: Any) -> None:
        self.row = row

    def __missing__(self, name: str) -> Any:
        try:
            return getattr(self.row, name)
        except AttributeError:
            raise KeyError(name) from None  # Python then looks in NAMES


class _Template(string.Formatter):
    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, str]:
        return eval(field_name, NAMES, kwargs), field_name  # the templates are ours, as code is

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None or value is pd.NA or value != value:
            return "–"
        digits, space, unit = format_spec.partition(" ")
        return format(value, digits) + space + unit
