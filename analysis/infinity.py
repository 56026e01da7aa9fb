"""Files take what grows: host memory at its peak, states on the device and in files, against the model's size.

    python analysis/infinity.py [RUNS ...] --out DIR

Of the fullest rank, one panel. Dashed: the pool through which files are read and written; host memory is to stay near
it. The marks on the line of the files are the prediction.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.common import script
from zerobench.plots.page import Sheet, key
from zerobench.plots.panels import MOST_PANELS
from zerobench.plots.style import BLUE, GREEN, SKY, rule
from zerobench.results.selection import latest
from zerobench.results.summary import summarize
from zerobench.results.tables import Results

MIB = 2**20
CAPTION = "States by tier as the model grows: files take the growth, host memory stays near the pool. Logarithmic axes."
LINES = {
    "nvme_bytes": ("in files", GREEN, "D"),
    "host_peak_bytes": ("host memory, peak", SKY, "s"),
    "states_bytes": ("states on the device", BLUE, "o"),
}
"""Column -> what it is called, its color and marker."""


def draw(results: Results, panels: int = MOST_PANELS) -> Figure:
    """One line a tier. `panels`: there is one. Raises ValueError if no run has anything in files."""
    newest = latest(results.runs)
    runs = newest[(newest["status"] == "ok") & (newest["nvme_bytes"] > 0)].sort_values("psi")
    if runs.empty:
        raise ValueError("no finished run with states in files; offload=nvme makes some")
    figure = Sheet(1, 2.6, CAPTION)
    axes = figure.subplots()
    psi = runs["psi"].astype("float64") / 1e6
    for column, (_, color, marker) in LINES.items():
        sizes = runs[column].astype("float64") / MIB
        axes.plot(psi, sizes, color=color, marker=marker, ms=5.5)
        for x, y in zip(psi, sizes, strict=True):
            axes.annotate(f"{y:.0f}", (x, y), (-9, 4), textcoords="offset points", ha="right", fontsize="small")
    axes.plot(psi, runs["predicted_nvme_bytes"].astype("float64") / MIB, "k_", ms=14)
    for size in sorted({pool_bytes(config) for config in runs["config"]}):
        axes.axhline(size / MIB, color="black", ls="--", lw=1.2)
    axes.set(xscale="log", yscale="log", xlabel="ψ, million parameters (log)", ylabel="MiB, largest rank (log)")
    axes.set_xticks(list(psi), [f"{x:.3g}" for x in psi])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.margins(x=0.1, y=0.15)
    axes.set_title(_title(runs.iloc[0]), loc="left")
    failed = [
        f"× {one.model} {one.shape}: {one.status}" for one in summarize(newest).itertuples() if one.status != "ok"
    ]
    axes.text(0.02, 0.03, "\n".join(failed), transform=axes.transAxes, style="italic", fontsize="small")
    lines = [rule(name, color=color, marker=marker) for name, color, marker in LINES.values()]
    key(figure, [*lines, rule("predicted", "", marker="_", ms=14), rule("the pool", "--", lw=1.2)])
    return figure


def pool_bytes(config: str) -> int:
    """Returns the total size of the buffers in a run's config (JSON), in bytes."""
    offload = json.loads(config)["offload"]
    return int(offload["block_bytes"] * offload["buffers"])


def _title(run: pd.Series) -> str:
    where = "a simulated world" if run["backend"] == "simulated" else run["device"]
    return f"{run['strategy']} {run['systems']}, {run['precision']}, N = {run['world_size']} ({where})"


def main(arguments: list[str] | None = None) -> int:
    """Draws the figure. Exit code 2 if there is nothing to draw."""
    return script("infinity", __doc__, draw, arguments)


if __name__ == "__main__":
    sys.exit(main())
