"""Tables of a sweep's results, sorted, with the best value of each comparison marked: for the terminal, and for a
notebook or a prompt, as text or as HTML with a figure. Names and reasons from a run's folder may contain anything; they
are escaped.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
from rich.text import Text

from ..config.cell import CellConfig
from ..config.flat import name_cells
from ..host.environment import SIMULATED
from ..host.terminal import Output, is_quiet, print_on, stdout_console
from ..records import CATEGORIES, RunRow, SearchRow
from ..sizes import counted, printable, show_bytes, show_count, show_ms
from .frames import Row, frame_of
from .grid import Grid
from .markup import Bar, BarFigure, BarPart, render
from .options import show_price
from .summary import SETTING, busy_words, is_busy, price_columns, summarize

MIB = 2**20


@dataclass(frozen=True)
class SweepColumn:
    """A column of the table: the figure `key` of a run over `scale`, with `digits` after the point, or `text` instead.

    `digits` None: bytes, with three digits below ten and one above. `best`: min or max selects the best of the compared
    strategies, None marks none. `on_host`: the column of bytes in host memory that is added for the ranking without a
    GPU. `is_rare`: shown if a cell has more than 0. `noun`: tokens or samples, for cells that count these.
    """

    key: str = ""
    digits: int | None = None
    scale: float = 1
    best: Callable[..., Any] | None = None
    on_host: str = ""
    is_rare: bool = False
    noun: str = ""
    text: Callable[[Row], str] | None = None

    def is_shown(self, row: Row) -> bool:
        """Returns True if the cell makes the column worth showing."""
        if not self._counts(row):
            return False
        if self.text is None:
            return not self.is_rare or _any(row, self.key)
        # a reference alone is compared with nothing
        return not self.is_rare or self.text(row) not in ("–", TRAINS["reference"])

    def show(self, row: Row) -> str:
        """Formats the cell; a missing figure is a dash."""
        if self.text is not None:
            return self.text(row) if self._counts(row) else "–"
        figure = self._figure(row)
        if pd.isna(figure):
            return "–"
        return "0" if self.is_rare and figure == 0 else f"{figure:.{self._places(figure)}f}"

    def value(self, row: Row) -> float:
        """Returns the figure that is ranked, rounded as shown, NaN if it is missing."""
        figure = self._figure(row)
        if self.on_host and row["device"] == "cpu" and _any(row, self.on_host):
            figure += row[self.on_host] / self.scale
        return figure if pd.isna(figure) else round(figure, self._places(figure))

    def _counts(self, row: Row) -> bool:
        return self.noun in ("", counted([row["sequence"]]))

    def _figure(self, row: Row) -> float:
        return float("nan") if pd.isna(row[self.key]) or not self._counts(row) else float(row[self.key]) / self.scale

    def _places(self, figure: float) -> int:
        return self.digits if self.digits is not None else 1 if figure >= 10 else 3


def _any(row: Row, *keys: str) -> bool:
    return any(pd.notna(row[key]) and row[key] > 0 for key in keys)


def _interval(row: Row) -> str:
    if pd.isna(row["step_s"]):
        return "–"
    if pd.isna(row["step_s_low"]):
        return "too few launches" if row["launches"] > 1 else "too few steps"
    return f"{row['step_s_low'] * 1000:.1f}–{row['step_s_high'] * 1000:.1f}"


def step_interval(row: Row) -> str:
    """Formats the interval of a step with its unit: "95 % interval 51.2–53.4 ms"; empty if there is none."""
    return "" if pd.isna(row["step_s_low"]) else f"95 % interval {_interval(row)} ms"


def _loss(row: Row) -> str:
    if row["backend"] == SIMULATED:
        return "–"
    return "not finite" if pd.isna(row["loss_last"]) else f"{row['loss_last']:.4f}"


TRAINS = {"equal": "= DDP", "close": "≈ DDP", "differs": "≠ DDP", "reference": "is DDP"}
"""Verdict on the training -> its form in the table."""

CODED = ("quantized_gather_share", "quantized_reduction_share")


def _coded(row: Row) -> str:
    """Formats "100 / 0 %": the share of ψ that is gathered, and reduced, quantized."""
    shares = " / ".join("–" if pd.isna(row[key]) else f"{row[key] * 100:.0f}" for key in CODED)
    return f"{shares} %" if _any(row, *CODED) else "–"


COLUMNS: dict[str, SweepColumn] = {
    "peak MiB": SweepColumn("peak_bytes", None, MIB, min, on_host="host_peak_bytes"),
    "host MiB": SweepColumn("host_peak_bytes", None, MIB, is_rare=True),
    "files MiB": SweepColumn("nvme_bytes", None, MIB, is_rare=True),
    "states MiB": SweepColumn("states_bytes", None, MIB, min, on_host="host_states_bytes"),
    "formula": SweepColumn("floor_states_bytes", None, MIB),
    "predicted": SweepColumn("predicted_states_bytes", None, MIB),
    "down MiB": SweepColumn("down_bytes", None, MIB, is_rare=True),
    "up MiB": SweepColumn("up_bytes", None, MIB, is_rare=True),
    "volume ψ": SweepColumn("volume_psi", 3, best=min),
    "predicted ψ": SweepColumn("predicted_volume_psi", 3),
    "between nodes MiB": SweepColumn("between_nodes_bytes", None, MIB, is_rare=True),
    "quantized": SweepColumn(text=_coded, is_rare=True),
    "step ms": SweepColumn("step_s", 1, 1e-3, min),
    "95 % interval": SweepColumn("step_s_low", text=_interval),
    "save ms": SweepColumn("save_s", 1, 1e-3, is_rare=True),
    "save done ms": SweepColumn("save_done_s", 1, 1e-3, is_rare=True),
    "save step ms": SweepColumn("save_step_s", 1, 1e-3, is_rare=True),
    "tokens/s": SweepColumn("tokens_per_s", 0, best=max, noun="tokens"),
    "samples/s": SweepColumn("tokens_per_s", 0, best=max, noun="samples"),
    "energy tokens/J": SweepColumn("tokens_per_j", 2, best=max, is_rare=True, noun="tokens"),
    "energy samples/J": SweepColumn("tokens_per_j", 2, best=max, is_rare=True, noun="samples"),
    "$/M tokens": SweepColumn(text=show_price, is_rare=True, noun="tokens"),
    "$/M samples": SweepColumn(text=show_price, is_rare=True, noun="samples"),
    "last loss": SweepColumn("loss_last", text=_loss),
    "trains": SweepColumn("training", is_rare=True, text=lambda row: TRAINS.get(row["training"], "–")),
}

RIVALS = ("limit_bytes", "model", "world_size", "batch", "sequence", "device", "precision", "optimizer")
"""Searches that agree in these columns compete for the best strategy."""

FIRST_TO_GO = (
    "95 % interval", "save step ms", "save done ms", "save ms", "formula", "predicted ψ", "last loss", "predicted",
    "energy tokens/J", "energy samples/J", "tokens/s", "samples/s", "quantized", "up MiB", "down MiB",
    "between nodes MiB", "files MiB", "trains", "host MiB", "volume ψ", "states MiB", "$/M tokens", "$/M samples",
)  # fmt: skip
"""Columns that a narrow terminal drops, in order. A cell that trains differently gets a line."""

ALL_COLUMNS = ("cell", "status", *COLUMNS)

ONE_MEMORY = "without a GPU device and host are one memory, told apart by the engine's labels"


def print_results(rows: Sequence[Any], chosen: Sequence[str] | None = None, price: float | None = None) -> None:
    """Prints the sweep's table, one line per cell, as wide as the terminal permits, then failed cells with their
    reason. `chosen`: names of columns, instead of those that fit; see Grid. `price`: dollars per GPU hour.
    """
    cells = sorted_cells(frame_of(rows, RunRow))
    cells = cells if price is None else [cell | price_columns(cell, price) for cell in cells]
    console = stdout_console()
    columns = shown_columns(cells)
    if busy := busy_words(cells):
        print_on(console, busy, "bold yellow")
    console.print(cell_grid(cells, COLUMNS if chosen else columns, chosen))
    if not is_quiet() and any(best_rows(cells, column) for column in columns.values()):
        console.print("* the best of the strategies that train the same thing", style="dim")
    if not is_quiet() and shares_memory(cells):
        print_on(console, f"{ONE_MEMORY}: * ranks peaks and states by their sum", "dim")
    print_failures((cell["name"], cell) for cell in cells)
    for cell in cells:
        if cell["training"] == "differs":
            message = f"{cell['name']}: trains differently from DDP: {cell['training_words']}"
            print_on(console, message, "bold red")
    if unchecked := [cell for cell in cells if cell["training"] == "unchecked"]:
        message = f"training unchecked in {len(unchecked)} of {len(cells)} cells: {unchecked[0]['training_words']}"
        print_on(console, message, "dim")


def shown_columns(cells: Sequence[Row]) -> dict[str, SweepColumn]:
    """Returns the columns of the table that any of the cells makes worth showing."""
    return {name: column for name, column in COLUMNS.items() if any(column.is_shown(cell) for cell in cells)}


def shares_memory(cells: list[Row]) -> bool:
    """Returns True if a cell has data in host memory that, without a GPU, is the device's own memory."""
    return any(cell["device"] == "cpu" and _any(cell, "host_peak_bytes") for cell in cells)


def print_failures(rows: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    """Prints a line for each named run that is not ok, with its reason, and for each with unexplained figures."""
    for name, row in rows:
        unexplained = row.get("unexplained")
        if row["status"] != "ok":
            print_on(stdout_console(), f"{name}: {row['status']}: {row['reason']}")
        elif isinstance(unexplained, str) and unexplained:
            print_on(stdout_console(), f"{name}: unexplained: {unexplained}")


ORDER = ("model", "world_size", "batch", "sequence", "precision", "strategy")
"""Columns by which cells are sorted."""


def sorted_cells(runs: pd.DataFrame) -> list[Row]:
    """Returns one row per cell of these runs with its `name`, in the order of tables."""
    cells: list[Row] = summarize(runs).to_dict("records")  # type: ignore[assignment]
    configs = [CellConfig.from_json(cell["config"]) for cell in cells]
    for cell, name in zip(cells, name_cells(configs), strict=True):
        cell["name"] = name
    return sorted(cells, key=in_tables_order)


def in_tables_order(cell: Row) -> list[tuple[bool, Any]]:
    """Returns the key by which cells are sorted; missing values are last."""
    values: list[Any] = [None if pd.isna(cell[column]) else cell[column] for column in ORDER]
    return [(value is None, value or 0) for value in values]


def best_rows(cells: list[Row], column: SweepColumn) -> set[int]:
    """Returns the indices of the best values of each comparison; if all values are equal, none is best. On a busy
    machine no time is.
    """
    if column.best is None:
        return set()
    settings: dict[tuple[Any, ...], dict[int, float]] = {}
    for index, cell in enumerate(cells):
        if cell["status"] == "ok" and not pd.isna(value := column.value(cell)):
            settings.setdefault(tuple(cell[key] for key in SETTING), {})[index] = value
    best: set[int] = set()
    for values in settings.values():
        is_rough = column.key in ("step_s", "tokens_per_s", "tokens_per_j") and any(
            is_busy(cells[index]) for index in values
        )
        if len(set(values.values())) > 1 and not is_rough:
            # values that look equal are equally good
            best |= {index for index, value in values.items() if value == column.best(values.values())}
    return best


def cell_grid(
    cells: list[Row], columns: Mapping[str, SweepColumn], chosen: Sequence[str] | None = None, sign: str = "*"
) -> Grid:
    """Returns the table of cells; the best values are styled, and followed by `sign`."""
    best = {name: best_rows(cells, column) for name, column in columns.items()}
    rows = []
    for index, cell in enumerate(cells):
        status = cell["status"] + (f" ×{cell['launches']}" if cell["launches"] > 1 else "")
        shown = []
        for name, column in columns.items():
            text = column.show(cell) if cell["status"] == "ok" else "–"
            is_best = index in best[name]
            mark = (sign if is_best else " " * len(sign)) if column.best else ""
            shown.append(Text(text + mark, style="bold green" if is_best else ""))
        rows.append([Text(printable(cell["name"])), Text(printable(status)), *shown])
    return Grid(["cell", "status", *columns], rows, 2, FIRST_TO_GO, chosen)


def print_searches(searches: list[SearchRow]) -> None:
    """Prints the results of searches, one line each, by limit; the fastest strategy of each limit is marked."""
    rows = []
    for search in sorted(searches, key=lambda s: (s.model, s.world_size, s.batch, s.limit_bytes, s.strategy)):
        rivals = [s for s in searches if all(getattr(s, key) == getattr(search, key) for key in RIVALS)]
        fastest = max((s.tokens_per_s or 0.0 for s in rivals), default=0.0)
        cell = f"{search.strategy} {search.model} N={search.world_size}"
        cell += f" {search.precision}" * (search.precision != "fp32")
        best = [f"nothing fits: {search.reason}", "–", "–", "–"]
        if search.tokens_per_s is not None and search.peak_bytes is not None:
            how = f"{search.micro_batch} × {search.accumulation}" + ", recomputed" * bool(search.checkpointing)
            rate = f"{search.tokens_per_s:.0f}" + ("*" if search.tokens_per_s == fastest and len(rivals) > 1 else " ")
            low, high = search.tokens_per_s_low, search.tokens_per_s_high
            interval = "too few steps" if low is None or pd.isna(low) else f"{low:.0f}–{high:.0f}"
            best = [how, show_bytes(search.peak_bytes), rate, interval]
        rows.append([show_bytes(search.limit_bytes), cell, *best, str(search.tried)])
    console = stdout_console()
    rate = f"{counted(search.sequence for search in searches)}/s"
    header = ["limit a rank", "cell", "best: micro-batch × accumulation", "peak", rate, "95 % interval", "tried"]
    console.print(Grid(header, rows, left=3))
    if not is_quiet() and any("*" in cell for row in rows for cell in row):
        console.print("* the fastest under this limit", style="dim")


NONE = "–"

MOST_CELLS = 20
"""Most rows that are shown."""

LAST_TO_GO = ("volume ψ", "states MiB", "tokens/s", "samples/s")
"""Columns that an even narrower terminal drops, after those in FIRST_TO_GO."""

UNITS = {"formula": "formula MiB", "predicted": "predicted MiB", "95 % interval": "95 % interval ms"}
"""Column of the sweep's table -> its name with a unit, for columns whose neighbor does not show it."""

SIDES = tuple(f'style="text-align:{side};white-space:nowrap"' for side in ("left", "right"))
"""Attributes of cells of words and of figures."""


def runs_text(runs: pd.DataFrame) -> str:
    """Returns a heading, a line per cell with as many columns as fit, and the number of further cells."""
    if runs.empty:
        return "Results: no runs."
    cells = sorted_cells(runs)
    shown = cells[:MOST_CELLS]
    grid = replace(
        cell_grid(shown, shown_columns(shown), sign=""), first_to_go=(*FIRST_TO_GO, *LAST_TO_GO), hints=False
    )
    # in a notebook rich would display what it prints, captured or not
    console = Output(width=shutil.get_terminal_size().columns, color_system=None, force_jupyter=False)
    with console.capture() as captured:
        console.print(grid)
    lines = [_heading(runs, len(cells)), *(line.rstrip() for line in captured.get().splitlines())]
    lines += [f"... and {show_count(len(cells) - len(shown), 'cell')} more in .runs"] * (len(cells) > len(shown))
    return "\n".join([*lines, *_folded(_failures(shown))])


def runs_html(runs: pd.DataFrame) -> str:
    """Returns a table of the cells, the reasons of failures, and a figure of the peaks."""
    if runs.empty:
        return "<p>Results: no runs.</p>"
    cells = sorted_cells(runs)
    shown = cells[:MOST_CELLS]
    columns = shown_columns(shown)
    more = len(cells) - len(shown)
    notes = [f"{show_count(more, 'cell')} more in .runs."] * bool(more)
    if any(best_rows(shown, column) for column in columns.values()):
        notes.append("Bold: the best of the strategies that train the same thing.")
    notes += filter(None, [busy_words(shown)])
    grid = cell_grid(shown, columns, sign="")
    return _html(_heading(runs, len(cells)), replace(grid, header=[UNITS.get(n, n) for n in grid.header]), notes, shown)


def run_text(runs: pd.DataFrame) -> str:
    """Returns the title of the only run, and its figures with their predictions, one per line."""
    cells = sorted_cells(runs)
    figures, columns = _figures(cells[0]), shutil.get_terminal_size().columns
    width = max((len(name) for name, *_ in figures), default=0)
    lines = [f"  {name:<{width}}  {value:>12}" + f"  {beside}" * bool(beside) for name, value, beside in figures]
    cut = [line if len(line) <= columns else f"{line[: columns - 1]}…" for line in lines]
    return "\n".join([*_folded([_title(cells[0]), *_failures(cells)]), *cut])


def run_html(runs: pd.DataFrame) -> str:
    """Returns the figures of the only run next to their predictions, and its peak by category."""
    cells = sorted_cells(runs)
    rows = [[name.strip(), value, beside] for name, value, beside in _figures(cells[0])]
    return _html(_title(cells[0]), Grid(["figure", "value", ""], rows, ("figure", "")) if rows else None, [], cells)


def _heading(runs: pd.DataFrame, cells: int) -> str:
    """Formats "4 runs of 2 cells, 1 not ok, on cpu and cuda, whose times are not comparable"."""
    parts = [f"{show_count(len(runs), 'run')} of {show_count(cells, 'cell')}"]
    parts += [f"{count} not ok"] if (count := int((runs["status"] != "ok").sum())) else []
    devices = sorted(set(runs["device"].dropna()))
    parts += [f"on {' and '.join(devices)}, whose times are not comparable"] if len(devices) > 1 else []
    return f"Results: {', '.join(parts)}"


def _title(cell: Row) -> str:
    return printable(f"Run {cell['name']}: {cell['status']} ({cell['run_id']})")


def _failures(cells: Sequence[Row]) -> list[str]:
    return [
        printable(f"{cell['name']}: {cell['status']}: {cell['reason']}") for cell in cells if cell["status"] != "ok"
    ]


def _folded(sentences: Sequence[str]) -> list[str]:
    width = shutil.get_terminal_size().columns
    return [line for sentence in sentences for line in textwrap.wrap(sentence, width, subsequent_indent="  ")]


def _figures(row: Row) -> list[tuple[str, str, str]]:
    """Returns name, value with its unit, and a comment, for each figure that a run has."""
    states, volume = show_bytes(row["predicted_states_bytes"]), _number(row["predicted_volume_psi"], ".3f", " ψ")
    rows = [
        ("peak", show_bytes(row["peak_bytes"]), "on the rank with the most"),
        *((f"  {name}", show_bytes(row[f"peak_{name}_bytes"]), "") for name in CATEGORIES),
        ("states", show_bytes(row["states_bytes"]), f"predicted {states}" if states != NONE else ""),
        ("volume", _number(row["volume_psi"], ".3f", " ψ"), f"predicted {volume}" if volume != NONE else ""),
        ("step", show_ms(row["step_s"]), step_interval(row)),
        (f"{counted([row['sequence']])}/s", _number(row["tokens_per_s"], ".0f"), ""),
        ("last loss", _number(row["loss_last"], ".4f"), str(row["training_words"] or "")),
    ]
    return [figure for figure in rows if figure[1] not in (NONE, "0 B")]


def _number(value: Any, form: str, unit: str = "") -> str:
    return NONE if pd.isna(value) else f"{value:{form}}{unit}"


def _html(heading: str, grid: Grid | None, notes: Sequence[str], cells: Sequence[Row]) -> str:
    figure = BarFigure("Memory at the peak by category, on the rank with the most", "", [_bar(cell) for cell in cells])
    values = {"heading": heading, "grid": grid, "notes": notes, "failures": _failures(cells), "figure": figure}
    return render("results/notebook.html", sides=SIDES, **values)


def _bar(cell: Row) -> Bar:
    sizes = {name: cell[f"peak_{name}_bytes"] for name in CATEGORIES} if cell["status"] == "ok" else {}
    measured = {name: int(size) for name, size in sizes.items() if not pd.isna(size)}
    parts = [BarPart(name, size, f"{cell['name']}: {name} {show_bytes(size)}") for name, size in measured.items()]
    absent = "" if measured else cell["status"] if cell["status"] != "ok" else "not measured"
    text = absent or show_bytes(sum(measured.values()))
    return Bar(cell["name"], text, f"{cell['name']}: {text}", parts, absent=absent)
