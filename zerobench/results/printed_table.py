"""Tables for the terminal: a sweep's results, sorted, with the best value of each comparison marked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from rich.text import Text

from ..config.cell import CellConfig
from ..config.flat import base_name, name_cells
from ..host.environment import SIMULATED
from ..host.terminal import is_quiet, print_on, stdout_console
from ..records import RunRow, SearchRow
from ..sizes import counted, printable, show_bytes
from .frames import frame_of
from .grid import Grid
from .summary import SETTING, busy_words, is_busy, summarize

MIB = 2**20

Row = dict[str, Any]


@dataclass(frozen=True)
class SweepColumn:
    """A column of the table. `value`: the value that is ranked, rounded as shown. `best`: min or max selects the best
    of the compared strategies, None marks none. `there`: True if a cell makes the column worth showing. `times`: True
    for a time, which is not ranked on a busy machine.
    """

    show: Callable[[Row], str]
    value: Callable[[Row], Any] | None = None
    best: Callable[..., Any] | None = None
    there: Callable[[Row], bool] = lambda row: True
    times: bool = False


def _mib(key: str, best: Callable[..., Any] | None = None, on_host: str | None = None) -> SweepColumn:
    """Builds a column of MiB. `on_host`: the column of bytes in host memory, added for the ranking without a GPU."""

    def show(row: Row) -> str:
        return "–" if pd.isna(row[key]) else f"{row[key] / MIB:.{1 if row[key] >= 10 * MIB else 3}f}"

    def value(row: Row) -> float:
        more = row[on_host] if on_host and row["device"] == "cpu" and _any(row, on_host) else 0
        if pd.isna(row[key]):
            return float("nan")
        size: float = (row[key] + more) / MIB
        return round(size, 1 if size >= 10 else 3)

    return SweepColumn(show, value, best)


def _some(key: str) -> SweepColumn:
    """Builds a column of bytes that most sweeps lack."""
    shown = _mib(key).show
    return SweepColumn(lambda row: "0" if _is_zero(row[key]) else shown(row), there=lambda row: _any(row, key))


def _is_zero(value: Any) -> bool:
    return bool(pd.notna(value) and value == 0)


def _any(row: Row, *keys: str) -> bool:
    return any(pd.notna(row[key]) and row[key] > 0 for key in keys)


def _figure(
    key: str, best: Callable[..., Any] | None = None, digits: int = 3, scale: float = 1, of: str = ""
) -> SweepColumn:
    """Builds a column of numbers, rounded for the ranking as well; a dash if a number is missing. `of`: tokens or
    samples, for cells that count these.
    """

    def there(row: Row) -> bool:
        return of in ("", counted([row["sequence"]]))

    def value(row: Row) -> float:
        return float("nan") if pd.isna(row[key]) or not there(row) else round(row[key] * scale, digits)

    def show(row: Row) -> str:
        return "–" if pd.isna(value(row)) else f"{value(row):.{digits}f}"

    return SweepColumn(show, value, best, there, times=key in ("step_s", "tokens_per_s"))


def _interval(row: Row) -> str:
    if pd.isna(row["step_s"]):
        return "–"
    if pd.isna(row["step_s_low"]):
        return "too few launches" if row["launches"] > 1 else "too few steps"
    return f"{row['step_s_low'] * 1000:.1f}–{row['step_s_high'] * 1000:.1f}"


def _loss(row: Row) -> str:
    if row["backend"] == SIMULATED:
        return "–"
    return "not finite" if pd.isna(row["loss_last"]) else f"{row['loss_last']:.4f}"


TRAINS = {"equal": "= DDP", "close": "≈ DDP", "differs": "≠ DDP", "reference": "is DDP"}
"""Verdict on the training -> its form in the table."""


def _trains(row: Row) -> str:
    return TRAINS.get(row["training"], "–")


CODED = ("quantized_gather_share", "quantized_reduction_share")


def _coded(row: Row) -> str:
    """Formats "100 / 0 %": the share of ψ that is gathered, and reduced, quantized."""
    return " / ".join("–" if pd.isna(row[key]) else f"{row[key] * 100:.0f}" for key in CODED) + " %"


COLUMNS: dict[str, SweepColumn] = {
    "peak MiB": _mib("peak_bytes", min, on_host="host_peak_bytes"),
    "host MiB": _some("host_peak_bytes"),
    "files MiB": _some("nvme_bytes"),
    "states MiB": _mib("states_bytes", min, on_host="host_states_bytes"),
    "formula": _mib("floor_states_bytes"),
    "predicted": _mib("predicted_states_bytes"),
    "down MiB": _some("down_bytes"),
    "up MiB": _some("up_bytes"),
    "volume ψ": _figure("volume_psi", min),
    "predicted ψ": _figure("predicted_volume_psi"),
    "between nodes MiB": _some("between_nodes_bytes"),
    "quantized": SweepColumn(_coded, there=lambda row: _any(row, *CODED)),
    "step ms": _figure("step_s", min, digits=1, scale=1000),
    "95 % interval": SweepColumn(_interval),
    "tokens/s": _figure("tokens_per_s", max, digits=0, of="tokens"),
    "samples/s": _figure("tokens_per_s", max, digits=0, of="samples"),
    "last loss": SweepColumn(_loss),
    "trains": SweepColumn(_trains, there=lambda row: row["training"] in ("equal", "close", "differs")),
}

RIVALS = ("limit_bytes", "model", "world_size", "batch", "sequence", "device", "precision", "optimizer")
"""Searches that agree in these columns compete for the best strategy."""

FIRST_TO_GO = (
    "95 % interval", "formula", "predicted ψ", "last loss", "predicted", "tokens/s", "samples/s", "quantized", "up MiB",
    "down MiB", "between nodes MiB", "files MiB", "trains", "host MiB", "volume ψ", "states MiB",
)  # fmt: skip
"""Columns that a narrow terminal drops, in order. A cell that trains differently gets a line."""

ALL_COLUMNS = ("cell", "status", *COLUMNS)

ONE_MEMORY = "without a GPU device and host are one memory, told apart by the engine's labels"


def print_results(
    rows: list[Row], chosen: Sequence[str] | None = None, more: Mapping[str, SweepColumn] | None = None
) -> None:
    """Prints the sweep's table, one line per cell, as wide as the terminal permits, then failed cells with their
    reason. `chosen`: names of columns, instead of those that fit; see Grid. `more`: columns of this sweep only, before
    the others.
    """
    cells = sorted_cells(rows)
    console = stdout_console()
    columns = columns_of(cells)
    shown = COLUMNS if chosen else columns
    if words := busy_words(cells):
        print_on(console, words, "bold yellow")
    console.print(grid_of(cells, {**(more or {}), **shown}, [*(more or {}), *chosen] if chosen else chosen))
    if not is_quiet() and any(best_rows(cells, column) for column in columns.values()):
        console.print("* the best of the strategies that train the same thing", style="dim")
    if not is_quiet() and shares_memory(cells):
        print_on(console, f"{ONE_MEMORY}: * ranks peaks and states by their sum", "dim")
    print_failures(cells)
    print_other_training(cells)


def columns_of(cells: Sequence[Row]) -> dict[str, SweepColumn]:
    """Returns the columns of the table that any of the cells makes worth showing."""
    return {name: column for name, column in COLUMNS.items() if any(column.there(cell) for cell in cells)}


def print_other_training(rows: list[Row]) -> None:
    """Prints a line for each cell that does not train like DDP, and a note if cells had no reference."""
    for row in rows:
        if row["training"] == "differs":
            words = f"{row.get('name') or name_of(row)}: trains otherwise than DDP: {row['training_words']}"
            print_on(stdout_console(), words, "bold red")
    unchecked = [row for row in rows if row["training"] == "unchecked"]
    if unchecked:
        words = f"training unchecked in {len(unchecked)} of {len(rows)} cells: {unchecked[0]['training_words']}"
        print_on(stdout_console(), words, "dim")


def shares_memory(cells: list[Row]) -> bool:
    """Returns True if a cell has data in host memory that, without a GPU, is the device's own memory."""
    return any(cell["device"] == "cpu" and _any(cell, "host_peak_bytes") for cell in cells)


def print_failures(rows: list[Row]) -> None:
    """Prints a line for each run that is not ok, with its reason, and for each with unexplained figures."""
    for row in rows:
        if row["status"] == "ok" and isinstance(said := row.get("unexplained"), str) and said:
            words = f"{row.get('name') or name_of(row)}: unexplained: {said}"
            print_on(stdout_console(), words)
        if row["status"] != "ok":
            words = f"{row.get('name') or name_of(row)}: {row['status']}: {row['reason']}"
            print_on(stdout_console(), words)


def sorted_cells(rows: list[Row]) -> list[Row]:
    """Returns one row per cell with its `name`: by model and world size, then batch, strategies in a fixed order."""
    frame = summarize(frame_of(rows, RunRow))
    cells: list[Row] = frame.to_dict("records")  # type: ignore[assignment]
    configs = [CellConfig.from_json(cell["config"]) for cell in cells]
    for cell, name in zip(cells, name_cells(configs), strict=True):
        cell["name"] = name
    order = ["model", "world_size", "batch", "sequence", "precision", "strategy"]
    return sorted(cells, key=lambda c: tuple((pd.isna(c[k]), 0 if pd.isna(c[k]) else c[k]) for k in order))


def best_rows(cells: list[Row], column: SweepColumn) -> set[int]:
    """Returns the indices of the best values of each comparison; if all values are equal, none is best."""
    places: dict[tuple[Any, ...], list[int]] = {}
    for place, cell in enumerate(cells):
        if cell["status"] == "ok":
            places.setdefault(tuple(cell[key] for key in SETTING), []).append(place)
    found: set[int] = set()
    for mine in places.values():
        values = {place: column.value(cells[place]) for place in mine} if column.value and column.best else {}
        values = {place: value for place, value in values.items() if not pd.isna(value)}
        if column.times and any(is_busy(cells[place]) for place in values):
            continue
        if len(set(values.values())) > 1 and column.best is not None:
            best = column.best(values.values())
            # Values that look equal are equally good.
            found |= {place for place, value in values.items() if value == best}
    return found


def grid_of(
    cells: list[Row], columns: Mapping[str, SweepColumn], chosen: Sequence[str] | None = None, sign: str = "*"
) -> Grid:
    """Returns the table of cells; the best values are styled, and followed by `sign`."""
    best = {name: best_rows(cells, column) for name, column in columns.items()}
    rows = []
    for place, cell in enumerate(cells):
        status = cell["status"] + (f" ×{cell['launches']}" if cell["launches"] > 1 else "")
        shown = []
        for name, column in columns.items():
            text = column.show(cell) if cell["status"] == "ok" else "–"
            is_best = place in best[name]
            mark = (sign if is_best else " " * len(sign)) if column.best else ""
            shown.append(Text(text + mark, style="bold green" if is_best else ""))
        rows.append([Text(printable(cell["name"])), Text(status), *shown])
    return Grid(["cell", "status", *columns], rows, 2, FIRST_TO_GO, chosen)


def print_searches(found: list[SearchRow]) -> None:
    """Prints the results of searches, one line each, by limit; the fastest strategy of each limit is marked."""
    order = sorted(found, key=lambda s: (s.model, s.world_size, s.batch, s.limit_bytes, s.strategy))
    rows = []
    for search in order:
        rivals = [s for s in found if all(getattr(s, key) == getattr(search, key) for key in RIVALS)]
        fastest = max((s.tokens_per_s or 0.0 for s in rivals), default=0.0)
        mark = "*" if search.tokens_per_s == fastest and len(rivals) > 1 else " "
        start = [
            show_bytes(search.limit_bytes),
            f"{search.strategy} {search.model} N={search.world_size}{_numbers(search)}",
        ]
        rows.append([*start, *_show_found(search, mark), str(search.tried)])
    console = stdout_console()
    rate = f"{counted(search.sequence for search in found)}/s"
    header = ["limit a rank", "cell", "best: micro-batch × accumulation", "peak", rate, "95 % interval", "tried"]
    console.print(Grid(header, rows, left=3))
    if not is_quiet() and any("*" in cell for row in rows for cell in row):
        console.print("* the fastest under this limit", style="dim")


def _numbers(search: SearchRow) -> str:
    return "" if search.precision == "fp32" else f" {search.precision}"


def _show_found(search: SearchRow, mark: str) -> list[str]:
    if search.tokens_per_s is None or search.peak_bytes is None:
        return [f"nothing fits: {search.reason}", "–", "–", "–"]
    how = f"{search.micro_batch} × {search.accumulation}" + ", recomputed" * bool(search.checkpointing)
    low, high = search.tokens_per_s_low, search.tokens_per_s_high
    interval = "too few steps" if low is None or pd.isna(low) else f"{low:.0f}–{high:.0f}"
    return [how, show_bytes(search.peak_bytes), f"{search.tokens_per_s:.0f}{mark}", interval]


def name_of(row: Row) -> str:
    """Returns a run's display name."""
    return base_name(CellConfig.from_json(row["config"]))
