"""The largest model for each strategy and device: a table with ZeRO's Table 2 beside it.

    python -m analysis largest_model [FOLDER] --out DIR

FOLDER has the plans of `make largest-model` as JSON, one per device and strategy. Each is an executed cell that
fits; the next shape of the family does not: executed as well, or its states alone are too large. Full fine-tuning in
bf16 with fp32 masters and AdamW, batch 1, blocks recomputed, sequence 1,024.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from validation.published.figure import states_per_parameter
from zerobench.results.grid import Grid
from zerobench.sizes import show_bytes
from zerobench.strategies import spec_of

FOLDER = Path("results/largest_model")

ORDER = ("ddp", "zero1", "zero2", "zero3", "megatron", "fsdp2_no_reshard", "fsdp2")
"""Strategies from left to right: ours, without offload and with it, then the peers from PEERS on."""

PEERS = ORDER.index("megatron")

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
