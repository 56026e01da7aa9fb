"""The largest model for each strategy and device: bars, and a table with ZeRO's Table 2 beside it.

    python -m analysis largest_model [FOLDER] --out DIR

FOLDER has the plans of `make largest-model` as JSON, one per device and strategy. Each bar is an executed cell that
fits; the next shape of the family does not: executed as well, or its states alone are too large. Full fine-tuning in
bf16 with fp32 masters and AdamW, batch 1, blocks recomputed, sequence 1,024.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from validation.published.figure import states_per_parameter
from zerobench.plots.marks import absent, number, patches
from zerobench.plots.page import Sheet, key
from zerobench.records.palette import BLUE, ORANGE, SKY
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
    usable_bytes: int
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
    found = []
    for path in sorted(folder.glob("*.json")):
        plan = json.loads(path.read_text())
        sizes = plan["device_bytes"], plan["usable_bytes"]
        fitting = [row for row in plan["rows"] if row["best"] is not None]
        names = ("strategy", "offload", "best", "beyond", "at_end")
        found += [Largest(row["best"]["gpus"], *sizes, **{name: row.get(name) for name in names}) for row in fitting]
    if not found:
        raise ValueError(f"no plan in {folder} has a model that fits; `make largest-model` makes some")
    return sorted(found, key=lambda one: (one.gpus, one.device_bytes, *one.place))


def draw(rows: list[Largest]) -> Figure:
    """Draws bars by strategy, a color for each device; billions of parameters on a logarithmic scale. The devices of
    Table 2 are in the table alone.
    """
    rows = [one for one in rows if one.gpus != TABLE_2_GPUS]
    devices = list(dict.fromkeys(one.device for one in rows))
    labels = list(dict.fromkeys(one.label for one in sorted(rows, key=lambda one: one.place)))
    figure = Sheet(1, 2.4, CAPTION)
    axes = figure.subplots()
    width = 0.8 / len(devices)
    for n, device in enumerate(devices):
        color, hatch = FILLS[n % len(FILLS)]
        for one in (one for one in rows if one.device == device):
            place = labels.index(one.label) + (n - (len(devices) - 1) / 2) * width
            axes.bar(place, one.billions, width, color=color, hatch=hatch, edgecolor="white", lw=0.4)
            words = f"{one.billions:,.0f}" if one.billions >= 1000 else f"{one.billions:.3g}"
            number(axes, place, one.billions, "≥ " * bool(one.at_end) + words, 2)
        there = {one.label for one in rows if one.device == device}
        for place in (place for place, label in enumerate(labels) if label not in there):
            absent(axes, place + (n - (len(devices) - 1) / 2) * width, "missing")
    axes.set(yscale="log", ylabel="largest model, billion parameters (log)")
    axes.set_yticks(TICKS, [str(tick) for tick in TICKS])
    axes.minorticks_off()
    axes.set_ylim(1, 1.4 * max(one.billions for one in rows))
    axes.set_xticks(range(len(labels)), [label.replace(" ", "\n") for label in labels], fontsize="small")
    fills = {device: FILLS[n % len(FILLS)] for n, device in enumerate(devices)}
    key(figure, patches(fills))
    return figure


HEADER = [
    "GPUs", "strategy", "largest model", "layers × hidden", "peak", "reserved", "host per GPU", "binds",
    "the next, which does not fit",
]  # fmt: skip


def table(rows: list[Largest]) -> str:
    """Returns the table of all rows in markdown."""
    lines = []
    for one in rows:
        best, beyond = one.best, one.beyond
        host = show_bytes(best["host_bytes"]) if best["host_bytes"] else "–"
        why = "the family's largest" if one.at_end else "the states alone"
        then = f"{_shape(beyond)}: {show_bytes(beyond['reserved_bytes'])} reserved" if beyond else f"– ({why})"
        sizes = [f"{one.billions:.2f}B", _shape(best), show_bytes(best["peak_bytes"])]
        sizes += [show_bytes(best["reserved_bytes"]), host]
        lines.append([one.device, one.label, *sizes, best["binds"], then])
    return Grid(HEADER, lines).markdown(sides=False)


def table_2(rows: list[Largest]) -> str:
    """Returns ZeRO's Table 2 in markdown, row of 64 GPUs, with what was executed beside it; empty without such rows."""
    same = {one.strategy: one for one in rows if one.gpus == TABLE_2_GPUS and one.offload == "none"}
    if not same:
        return ""
    header = ["strategy", "formula", "paper, theoretical", "paper, measured", "simulated"]
    lines = []
    for strategy, (theoretical, measured) in TABLE_2.items():
        one = same.get(strategy)
        shown = f"{measured}B" if measured else "–"
        executed = f"{one.billions:.2f}B ({_shape(one.best)})" if one else "–"
        lines.append([strategy, f"{by_formula(strategy):.1f}B", f"{theoretical}B", shown, executed])
    return Grid(header, lines).markdown(sides=False)


def by_formula(strategy: str) -> float:
    """Returns the billions of parameters whose 2 + 2 + 12 bytes fill a device of Table 2."""
    return 32 / states_per_parameter(strategy, TABLE_2_GPUS)


def _shape(probe: dict[str, Any]) -> str:
    return str(probe["shape"]).replace(" x ", " × ")


def write_tables(rows: list[Largest], out: Path) -> None:
    """Writes the tables as markdown and prints them."""
    text = "\n".join(filter(None, [table(rows), table_2(rows)]))
    (out / "largest_model.md").write_text(text)
    print(text)


FIGURES = {"largest_model": draw}
