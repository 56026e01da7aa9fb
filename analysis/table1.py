"""Table 1 and figure 1 of the ZeRO paper: formula, simulated on fake tensors and printed, from `make table1`.

    python -m analysis table1 [FOLDER] --out DIR

table1      a panel for each size and stage: states per rank against N; bars by formula and simulated, and the printed
            number
figure1     the paper's figure: 7.5B on 64 ranks, without ZeRO and under each stage
in_flight   the simulated states beyond the formula, and how they shrink with other options
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from zerobench.plots.marks import absent, number, patches, rule, seen, stack
from zerobench.plots.page import Sheet, key, room_for
from zerobench.records import STATES
from zerobench.records.palette import CATEGORIES
from zerobench.strategies import spec_of

FOLDER = Path("results/table1")
FILLS = {name: CATEGORIES[name] for name in STATES}
GB = 1e9
WIDTH = 0.38


def read(folder: Path) -> pd.DataFrame:
    """Returns the executed cells. Raises ValueError if there are none."""
    file = folder / "cells.csv"
    if not file.is_file():
        raise ValueError(f"{file}: is not there; `make table1` writes it")
    return pd.read_csv(file, keep_default_na=False, dtype={"printed_gb": str})


def draw_table(cells: pd.DataFrame) -> Figure:
    """A panel for each size and stage."""
    mine = cells[(cells["variant"] == "") & (cells["strategy"] != "ddp")]
    sizes = list(dict.fromkeys(mine["size"]))
    ranks, abreast = sorted(set(mine["ranks"])), 3 if room_for(2.3) >= 3 else 1
    rows = len(sizes) * 3 // abreast
    words = "Left bars: the formula at the model's own ψ. Right bars: simulated, with buffers in flight."
    figure = Sheet(rows, 1.6, words)
    places = figure.subplots(rows, abreast, squeeze=False).reshape(len(sizes), 3)
    for size, row in zip(sizes, places, strict=True):
        for stage, axes in zip(("zero1", "zero2", "zero3"), row, strict=True):
            here = mine[(mine["size"] == size) & (mine["strategy"] == stage)].set_index("ranks").reindex(ranks)
            _bars(axes, here, [f"{n}" for n in ranks])
            axes.set_title(f"{size}, {spec_of(stage).label}", loc="left")
            axes.set_xlabel("ranks N")
            if axes.get_subplotspec().is_first_col():
                axes.set_ylabel("model states per rank (GB)")
    _legend(figure)
    return figure


def draw_figure_1(cells: pd.DataFrame) -> Figure:
    """7.5B on 64 ranks."""
    mine = cells[(cells["variant"] == "") & (cells["size"] == "7.5B") & (cells["ranks"] == 64)]
    mine = mine.sort_values("strategy")
    figure = Sheet(
        1, 2.6, "Figure 1 of the ZeRO paper: 7.5B, N = 64, K = 12. Left bars: formula. Right bars: simulated."
    )
    axes = figure.subplots()
    _bars(axes, mine, [spec_of(name).label for name in mine["strategy"]])
    axes.set_ylabel("model states per rank (GB)")
    _legend(figure)
    return figure


def draw_in_flight(cells: pd.DataFrame) -> Figure:
    """The simulated states at 7.5B on the most ranks, by default and with each variant."""
    most = cells["ranks"].max()
    mine = cells[(cells["size"] == "7.5B") & (cells["ranks"] == most) & cells["strategy"].isin(["zero2", "zero3"])]
    abreast = min(2, room_for(3.2))
    figure = Sheet(2 // abreast, 2.4, "Left bars: the formula. Right bars: simulated, with buffers in flight.")
    places = figure.subplots(2 // abreast, abreast, squeeze=False).flat
    for axes, stage in zip(places, ("zero3", "zero2"), strict=True):
        here = mine[mine["strategy"] == stage]
        _bars(axes, here, [(name or "as it is").replace(", ", "\n") for name in here["variant"]])
        axes.set_title(f"7.5B, N = {most}, {spec_of(stage).label}", loc="left")
    figure.axes[0].set_ylabel("model states per rank (GB)")
    _legend(figure)
    return figure


def _bars(axes: Axes, cells: pd.DataFrame, names: list[str]) -> None:
    for place, cell in enumerate(cells.to_dict("records")):
        if pd.isna(cell["psi"]):
            absent(axes, place, "missing")
            continue
        printed = float(cell["printed_gb"] or "nan")
        formula = {name: cell[f"{name}_formula_bytes"] / GB for name in STATES if name != "communication"}
        for side, values in ((-1, formula), (1, {name: cell[f"{name}_bytes"] / GB for name in STATES})):
            at = place + side * WIDTH / 2
            height = stack(axes, at, values, FILLS, WIDTH)
            number(axes, at, max(height, printed if printed == printed else 0), _number(height), 2)
        axes.hlines(printed, place - WIDTH, place + WIDTH, color="black", lw=1.2)
    axes.set_xticks(range(len(names)), names)
    axes.set_xlim(min(-0.5, len(names) / 2 - 2), max(len(names) - 0.5, len(names) / 2 + 1))


def _number(gigabytes: float) -> str:
    return f"{gigabytes:.0f}" if gigabytes >= 100 else f"{gigabytes:.1f}" if gigabytes >= 10 else f"{gigabytes:.2f}"


def _legend(figure: Figure) -> None:
    handles = [*patches(seen(figure, FILLS)), rule("printed in the paper", lw=1.2)]
    key(figure, handles)


FIGURES = {"table1": draw_table, "figure1": draw_figure_1, "in_flight": draw_in_flight}
