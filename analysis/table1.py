"""Figure 1 of the ZeRO paper: formula, simulated on fake tensors and printed, from `make table1`.

    python -m analysis table1 [FOLDER] --out DIR

7.5B on 64 ranks, without ZeRO and under each stage.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from zerobench.plots.marks import number, patches, rule, seen, stack
from zerobench.plots.page import Sheet, key
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


def draw(cells: pd.DataFrame) -> Sheet:
    """Bars by formula and simulated, and the printed number as a line."""
    cells = cells[(cells["variant"] == "") & (cells["size"] == "7.5B") & (cells["ranks"] == 64)]
    cells = cells.sort_values("strategy")
    figure = Sheet(
        1, 2.6, "Figure 1 of the ZeRO paper: 7.5B, N = 64, K = 12. Left bars: formula. Right bars: simulated."
    )
    axes = figure.subplots()
    for x, cell in enumerate(cells.to_dict("records")):
        printed = float(cell["printed_gb"])
        formula = {name: cell[f"{name}_formula_bytes"] / GB for name in STATES if name != "communication"}
        for side, values in ((-1, formula), (1, {name: cell[f"{name}_bytes"] / GB for name in STATES})):
            at = x + side * WIDTH / 2
            height = stack(axes, at, values, FILLS, WIDTH)
            digits = 0 if height >= 100 else 1 if height >= 10 else 2
            number(axes, at, max(height, printed), f"{height:.{digits}f}", 2)
        axes.hlines(printed, x - WIDTH, x + WIDTH, color="black", lw=1.2)
    axes.set_xticks(range(len(cells)), [spec_of(name).label for name in cells["strategy"]])
    axes.set_xlim(-0.5, len(cells) - 0.5)
    axes.set_ylabel("model states per rank (GB)")
    key(figure, [*patches(seen(figure, FILLS)), rule("printed in the paper", lw=1.2)])
    return figure


STEM = "figure1"
