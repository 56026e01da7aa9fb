"""Runs as panels of cells to be shown side by side.

A *cell* is a row of results/summary.py, with a `label` that distinguishes it from its neighbors. A combination that
other cells suggest but that was not run is a cell too, with the status "missing". For a cell that is not ok a figure
shows its status, as a word (`absent`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pandas as pd
import yaml

from ..config.cell import CellConfig
from ..config.flat import name_cells
from ..config.schema import config_dir
from ..host.environment import SIMULATED
from ..results.selection import latest
from ..results.summary import SETTING, summarize
from ..results.tables import Results
from ..sizes import show_length

MOST_PANELS = 12

FAMILY = [key for key in SETTING if key not in ("world_size", "batch")]
"""Cells that agree in these keys may share a panel, whatever their N and batch."""


def families(results: Results) -> list[pd.DataFrame]:
    """Labeled cells, grouped by model, sequence, device and the like; strategies in a fixed order."""
    cells = summarize(results.runs).sort_values("strategy", kind="stable")
    return [_labeled(family) for _, family in cells.groupby(FAMILY, sort=False, dropna=False)]


def comparisons(results: Results) -> list[pd.DataFrame]:
    """A panel per setting: cells that train the same thing, with the same labels in every panel of a family."""
    panels: list[pd.DataFrame] = []
    for cells in families(results):
        whole = completed(cells, ["label", "strategy"], ["world_size", "batch"])
        panels += [setting for _, setting in whole.groupby(["world_size", "batch"], dropna=False)]
    return panels


def grids(results: Results) -> list[pd.DataFrame]:
    """A panel per family and micro-batch: every label at every N, ordered by N."""
    panels = []
    for cells in families(results):
        for _, setting in cells.groupby(["micro_batch", "accumulation"], dropna=False):
            whole = completed(setting, ["label", "strategy"], ["world_size"])
            panels.append(whole.sort_values("world_size", kind="stable"))
    return panels


def with_values(settings: list[pd.DataFrame], column: str, status: str) -> list[pd.DataFrame]:
    """Panels with another status for cells that are ok without a value in a column."""
    return [
        cells.assign(status=cells["status"].mask((cells["status"] == "ok") & cells[column].isna(), status))
        for cells in settings
    ]


def completed(cells: pd.DataFrame, rows: list[str], columns: list[str]) -> pd.DataFrame:
    """The cells of a family, plus a row with the status "missing" for every combination of a command's values in the
    columns `rows` and its values in the columns `columns` that no cell has.
    """
    # every combination that a command would have run, over all commands that made these cells
    products = [
        same[rows].drop_duplicates().merge(same[columns].drop_duplicates(), how="cross")
        for _, same in cells.groupby("command", sort=False)
    ]
    every = pd.concat(products, ignore_index=True).drop_duplicates()
    whole = every.merge(cells, how="left", on=[*rows, *columns])
    whole["status"] = whole["status"].fillna("missing")
    for key in FAMILY:
        whole[key] = cells[key].iloc[0]
    return whole


def cell_rows(results: Results, table: str, cell: Any) -> pd.DataFrame:
    """The rows of a long table that belong to a cell's newest launches."""
    runs = latest(results.runs[results.runs["cell_id"] == cell.cell_id])
    frame: pd.DataFrame = getattr(results, table)
    return frame[frame["run_id"].isin(runs["run_id"])]


def _labeled(cells: pd.DataFrame) -> pd.DataFrame:
    """Adds `label`: the strategy, and the keys other than N and batch in which cells of this strategy differ;
    measurement keys only if nothing else distinguishes two cells.
    """
    shared = {"world_size": 0, "batch": 0}
    choices: tuple[dict[str, Any], ...] = ({"measure": {}, "threads": 0}, {"threads": 0}, {})
    for ignored in choices:
        configs = [CellConfig.from_dict(json.loads(text) | shared | ignored) for text in cells["config"]]
        pairs = zip(configs, name_cells(configs), strict=True)
        whole = cells.assign(label=[config.strategy.name + name.split("b=0", 1)[1] for config, name in pairs])
        if not whole.duplicated(["label", "world_size", "batch", "micro_batch"]).any():
            break
    return whole


def shared_cores(cells: pd.DataFrame) -> float:
    """Total number of cores for all ranks of a panel; infinite if ranks are not processes on one CPU."""
    cores = cells[(cells["device"] == "cpu") & (cells["backend"] != SIMULATED)]["cores"].dropna()
    return float(cores.min()) if len(cores) else float("inf")


def on_cores(panels: Sequence[pd.DataFrame]) -> str:
    """Caption text on the cores on which times were measured; empty if not on a CPU."""
    counts = sorted({shared_cores(cells) for cells in panels} - {float("inf")})
    return f", all ranks on {' or '.join(f'{count:.0f}' for count in counts)} cores" if counts else ""


def title(cells: pd.DataFrame, panels: Sequence[pd.DataFrame], of: Sequence[str] = ("world_size", "batch")) -> str:
    """Title of a panel, shared by its cells: the model, the keys `of`, and the keys in which panels differ."""
    first, psi = cells.iloc[0], cells["psi"].dropna()
    shown = {"world_size": "N = {}", "batch": "batch {}", "micro_batch": "micro-batch {}"}
    parts = [shown[key].format(cells[key].dropna().iloc[0]) for key in of]
    parts = [model_of(first.model, first["shape"]), *parts]
    parts[-1] += show_length(first.sequence)
    parts.append("simulated" if SIMULATED in set(cells["backend"].dropna()) else first.device)
    parts += [f"ψ = {psi.iloc[0] / 1e6:.3g} M"] if len(psi) else []
    keys = ("precision", "optimizer", "data", "seed")
    differing = [key for key in keys if len({panel[key].iloc[0] for panel in panels}) > 1]
    shapes = [set(panel["shape"].iloc[0].split()) for panel in panels if panel["model"].iloc[0] == first.model]
    own = [option for option in first["shape"].split() if not all(option in shape for shape in shapes)]
    return ", ".join([*parts, *(f"seed {first[key]}" if key == "seed" else str(first[key]) for key in differing), *own])


def model_of(name: str, shape: str) -> str:
    """A model's name, and the options that differ from the defaults of that name."""
    file, options = config_dir() / "model" / f"{name}.yaml", dict(word.split("=", 1) for word in shape.split())
    defaults = yaml.safe_load(file.read_text()) if file.is_file() else {}
    others = [f"{key}={options[key]}" for key, value in defaults.items() if options.get(key, str(value)) != str(value)]
    return " ".join([name, "with", *others] if others else [name])
