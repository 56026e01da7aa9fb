"""One table of finished runs as text, swept keys among the columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any

import pandas as pd
from pandas.api.types import is_numeric_dtype

from ...config.cell import CellConfig
from ...config.names import name_cells
from ...results import selection, tables
from ...results.printed_table import CODED, ONE_MEMORY, shares_memory
from ...sizes import escape_control

SHORT = (
    "cell", "repeat", "status", "peak_bytes", "states_bytes", "predicted_states_bytes",
    "volume_psi", "wire_bytes", "step_s", "tokens_per_s", "loss_last",
)  # fmt: skip

ELSEWHERE = {
    "peak_bytes": ("host_peak_bytes", "nvme_bytes"),
    "predicted_states_bytes": ("down_bytes", "up_bytes"),
    "wire_bytes": ("between_nodes_bytes", *CODED),
}
"""Column of SHORT -> columns that follow it where any run has values for them."""


def select(
    results: tables.Results, table: str, columns: str | None, latest: bool, short: bool
) -> tuple[pd.DataFrame, list[str]]:
    """Returns the table as a frame, and the requested columns. Raises ValueError for one that it does not have."""
    frame: pd.DataFrame = results.sweep() if table == "runs" else getattr(results, table)
    if latest and "run_id" in frame:
        kept = selection.latest(results.runs)["run_id"]
        frame = frame[frame["run_id"].isin(kept)]
    if table == "runs" and len(frame):
        frame = frame.assign(cell=name_cells([CellConfig.from_json(config) for config in frame["config"]]))
    elif table == "runs":
        frame = frame.assign(cell=pd.Series(dtype="object"))
    usual = short_columns(frame) if short and table == "runs" else list(frame.columns)
    wanted = columns.split(",") if columns else usual
    for column in wanted:
        if column not in frame.columns:
            near = get_close_matches(column, frame.columns, n=3, cutoff=0.6)
            hint = f"did you mean {' or '.join(near)}?" if near else f"zerobench columns --table {table} lists them"
            raise ValueError(f"--columns: {column} is no column of {table}; {hint}")
    return frame, wanted


def short_columns(runs: pd.DataFrame) -> list[str]:
    """Returns SHORT, and those of ELSEWHERE that any of these runs has."""
    there = [name for more in ELSEWHERE.values() for name in more if runs[name].astype("float64").gt(0).any()]
    return [name for column in SHORT for name in (column, *(n for n in ELSEWHERE.get(column, ()) if n in there))]


def note_of(frame: pd.DataFrame, columns: list[str]) -> str:
    """Returns what a reader of these columns must know, as text to follow the table; empty where there is nothing."""
    shared = "host_peak_bytes" in columns and shares_memory(frame.to_dict("records"))  # type: ignore[arg-type]
    return f"\n{ONE_MEMORY}\n" if shared else ""


def to_markdown(frame: pd.DataFrame) -> str:
    """Formats a pipe table; floats with four significant digits, missing values as a dash."""

    def show(value: object) -> str:
        if pd.isna(value):  # type: ignore[call-overload]
            return "–"
        return (
            f"{value:.4g}"
            if isinstance(value, float) and value < 1e4
            else f"{value:.0f}"
            if isinstance(value, float)
            else str(value)
        )

    lines = [_pipes(frame.columns), "|" + " --- |" * len(frame.columns)]
    lines += [_pipes(show(v) for v in row) for row in frame.itertuples(index=False)]
    return "\n".join(lines) + "\n"


def _pipes(cells: Iterable[str]) -> str:
    return "| " + " | ".join(escape_control(cell).replace("|", "\\|") for cell in cells) + " |"


FORMULA = ("=", "+", "-", "@")
"""First characters of a text that a spreadsheet computes."""


def to_csv(frame: pd.DataFrame) -> str:
    """Formats comma-separated values, floats in full, a line per row: others may have written the texts, so control
    characters are escaped, and a text that begins like a formula gets an apostrophe before it.
    """
    plain = frame.copy(deep=False)
    for name in plain.columns[[not is_numeric_dtype(dtype) for dtype in plain.dtypes]]:
        plain[name] = pd.Series([_cell(value) for value in plain[name]], index=plain.index, dtype="object")
    text: str = plain.rename(columns=_cell).to_csv(index=False)
    return text


def _cell(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return f"'{escape_control(value)}" if value.startswith(FORMULA) else escape_control(value)


TEXTS: dict[str, Callable[[pd.DataFrame], str]] = {"csv": to_csv, "markdown": to_markdown}
"""Format -> function that makes a text of a table."""
