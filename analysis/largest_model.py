"""The largest model for each strategy and device: bars, and a table with ZeRO's Table 2 beside it.

    python -m analysis largest_model [FOLDER] --out DIR

FOLDER has the plans of `make largest-model` as JSON, one per device and strategy. Each bar is an executed cell that
fits; the next shape of the family does not: executed as well, or its states alone are too large. Full fine-tuning in
bf16 with fp32 masters and AdamW, batch 1, blocks recomputed, sequence 1,024.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from validation.published.figure import states_per_parameter
from zerobench.plots.marks import BLUE, ORANGE, SKY, absent, number, patches
from zerobench.plots.page import Sheet, key
from zerobench.results.grid import Grid
from zerobench.sizes import show_bytes
from zerobench.strategies import spec_of

FOLDER = Path("results/largest_model")

CAPTION = (
    "The largest model whose reserved memory fits 92 % of a GPU, simulated: AdamW, bf16 with fp32 masters, batch 1, "
    "blocks recomputed, sequence 1,024. ≥ marks the largest shape that was tried."
)

ORDER = ("ddp", "zero1", "zero2", "zero3", "megatron", "fsdp2_no_reshard", "fsdp2")
"""Strategies from left to right: ours, without offload and with it, then the peers from PEERS on."""

PEERS = ORDER.index("megatron")

FILLS = [(SKY, ""), (BLUE, "//"), (ORANGE, "..")]

TICKS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
"""Billions of parameters on the axis."""

TABLE_2 = {"ddp": (2.0, 1.3), "zero1": (7.6, 6.2), "zero2": (14.4, None), "zero3": (128.0, None)}
"""Strategy -> the largest model in billions by the paper's analysis, and as it measured (ZeRO, arXiv 1910.02054v3,
Table 2, row of 64 GPUs of 32 GB without model parallelism).
"""

TABLE_2_GPUS = 64


@dataclass(frozen=True)
class Largest:
    """One plan's row. `device_bytes`: of one GPU. `best`, `beyond`: executed cells, the last that fits and the next."""

    gpus: int
    device_bytes: int
    strategy: str
    offload: str
    best: dict[str, Any]
    beyond: dict[str, Any] | None
    at_end: bool
    """True if the largest shape of the family fits."""

    @property
    def label(self) -> str:
        """The strategy as it is called, with its tier."""
        name = spec_of(self.strategy).label
        return f"{name} + {self.offload}" if self.offload != "none" else name

    @property
    def device(self) -> str:
        """The device in words: "8 x 80 GiB"."""
        binary = self.device_bytes % 2**30 == 0
        size = f"{self.device_bytes // 2**30} GiB" if binary else f"{self.device_bytes / 1e9:g} GB"
        return f"{self.gpus} × {size}"

    @property
    def place(self) -> tuple[bool, bool, int]:
        """Sorts the strategies: a peer, with offload, its place in ORDER."""
        number = ORDER.index(self.strategy)
        return number >= PEERS, self.offload != "none", number

    @property
    def billions(self) -> float:
        """Parameters of the largest model."""
        return float(self.best["psi"]) / 1e9


def read(folder: Path) -> list[Largest]:
    """Returns the rows of all plans in a folder, by device and strategy. Raises ValueError if there are none."""
    names = ("strategy", "offload", "best", "beyond", "at_end")
    plans = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    rows = [
        Largest(row["best"]["gpus"], plan["device_bytes"], **{name: row.get(name) for name in names})
        for plan in plans for row in plan["rows"] if row["best"] is not None
    ]  # fmt: skip
    if not rows:
        raise ValueError(f"no plan in {folder} has a model that fits; `make largest-model` makes some")
    return sorted(rows, key=lambda row: (row.gpus, row.device_bytes, *row.place))


def draw(rows: list[Largest]) -> Figure:
    """Draws bars by strategy, a color for each device; billions of parameters on a logarithmic scale. The devices of
    Table 2 are in the table alone.
    """
    rows = [row for row in rows if row.gpus != TABLE_2_GPUS]
    labels = list(dict.fromkeys(row.label for row in sorted(rows, key=lambda row: row.place)))
    fills = dict(zip(dict.fromkeys(row.device for row in rows), cycle(FILLS), strict=False))
    figure = Sheet(1, 2.4, CAPTION)
    axes = figure.subplots()
    width = 0.8 / len(fills)
    for n, (device, (color, hatch)) in enumerate(fills.items()):
        of_device = {row.label: row for row in rows if row.device == device}
        for x, label in enumerate(labels):
            at = x + (n - (len(fills) - 1) / 2) * width
            if row := of_device.get(label):
                axes.bar(at, row.billions, width, color=color, hatch=hatch, edgecolor="white", lw=0.4)
                size = f"{row.billions:,.0f}" if row.billions >= 1000 else f"{row.billions:.3g}"
                number(axes, at, row.billions, "≥ " * bool(row.at_end) + size, 2)
            else:
                absent(axes, at, "missing")
    axes.set(yscale="log", ylabel="largest model, billion parameters (log)")
    axes.set_yticks(TICKS, [str(tick) for tick in TICKS])
    axes.minorticks_off()
    axes.set_ylim(1, 1.4 * max(row.billions for row in rows))
    axes.set_xticks(range(len(labels)), [label.replace(" ", "\n") for label in labels], fontsize="small")
    key(figure, patches(fills))
    return figure


HEADER = [
    "GPUs", "strategy", "largest model", "layers × hidden", "peak", "reserved", "host per GPU", "binds",
    "the next, which does not fit",
]  # fmt: skip


def table(rows: list[Largest]) -> str:
    """Returns the table of all rows in markdown."""
    lines = []
    for row in rows:
        best, beyond = row.best, row.beyond
        sizes = [show_bytes(best[f"{name}_bytes"]) for name in ("peak", "reserved")]
        host = show_bytes(best["host_bytes"]) if best["host_bytes"] else "–"
        following = "– (the family's largest)" if row.at_end else "– (the states alone)"
        if beyond:
            following = f"{_shape(beyond)}: {show_bytes(beyond['reserved_bytes'])} reserved"
        size = f"{row.billions:.2f}B"
        lines.append([row.device, row.label, size, _shape(best), *sizes, host, best["binds"], following])
    return Grid(HEADER, lines).markdown(sides=False)


def table_2(rows: list[Largest]) -> str:
    """Returns ZeRO's Table 2 in markdown, row of 64 GPUs, with what was executed beside it; empty without such rows."""
    same = {row.strategy: row for row in rows if row.gpus == TABLE_2_GPUS and row.offload == "none"}
    if not same:
        return ""
    header = ["strategy", "formula", "paper, theoretical", "paper, measured", "simulated"]
    lines = []
    for strategy, (theoretical, measured) in TABLE_2.items():
        row = same.get(strategy)
        formula = 32 / states_per_parameter(strategy, TABLE_2_GPUS)  # 2 + 2 + 12 bytes a parameter fill the device
        executed = f"{row.billions:.2f}B ({_shape(row.best)})" if row else "–"
        printed = f"{measured}B" if measured else "–"
        lines.append([strategy, f"{formula:.1f}B", f"{theoretical}B", printed, executed])
    return Grid(header, lines).markdown(sides=False)


def _shape(probe: dict[str, Any]) -> str:
    return str(probe["shape"]).replace(" x ", " × ")


def write_tables(rows: list[Largest], out: Path) -> None:
    """Writes the tables as markdown and prints them."""
    text = "\n".join(filter(None, [table(rows), table_2(rows)]))
    (out / "largest_model.md").write_text(text)
    print(text)


FIGURES = {"largest_model": draw}
