"""The table of all blocks of the pages: what makes each of them.

Most are tables of committed rows, and have a template in blocks.md. Rows that need more than the columns of a summary
are made in measured.py and predicted.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tools.docs import measured, predicted, references
from tools.docs.recorded import COMPARED, REFERENCE, RESULTS, cells, recorded
from tools.docs.render import render
from validation.kills import KillsRow
from validation.predicted_maps import BreakEvenRow, OptionRow
from validation.store import read


def pasted(name: str) -> str:
    """A file below results/ that is Markdown already."""
    return (RESULTS / name).read_text().rstrip()


def compare() -> str:
    """The ratios to the peers, and their figure."""
    return f"{pasted('compare/cpu/ratios.md')}\n\n![Ours over the peers](results/compare/cpu/compare.png)"


CELLS = {
    "stages": (REFERENCE / "stages",), "stage_bytes": (REFERENCE / "stages",), "tiling": (REFERENCE / "tiling",),
    "infinity": (REFERENCE / "infinity", "psi"), "partition": (REFERENCE / "partition", "strategy"),
    "muon": (REFERENCE / "muon",), "lora": (RESULTS / "lora", "started"), "peer_bytes": (COMPARED / "compare",),
    "peer_volume": (COMPARED / "compare",),
}  # fmt: skip
"""Block whose rows are cells as they are -> their folder, and the columns that they are sorted by."""

MEASURED = (
    "answer", "memory_cap", "stage_traffic", "versions", "offload", "offload_time",
    "delayed", "low_bit", "nodes", "shard_group", "zeropp", "zeropp_error", "activation", "buffers", "arena",
    "settings", "accumulation", "outside_ledger",
)  # fmt: skip
"""Functions of measured.py that are named as their blocks."""

PREDICTED = (
    "strategies", "table1", "table1_in_flight", "largest_model", "validated", "compiled_runs", "not_compared",
    "predicted_by_source", "predicted_intervals", "predicted_misses", "predicted_runs",
    "predicted_here", "map_fastest", "map_scaling",
    "interpolation", "gpu_summary", "gpu_memory", "gpu_reserved", "gpu_steps",
)  # fmt: skip
"""Functions of predicted.py that are named as their blocks."""

ROWS: dict[str, tuple[str, type]] = {
    "kills": ("kills/kills.csv", KillsRow), "map_options": ("predicted_maps/options.csv", OptionRow),
    "map_break_even": ("predicted_maps/break_even.csv", BreakEvenRow),
}  # fmt: skip
"""Block whose rows are those of a file as they are -> the file and its kind of row."""

GPU_SECTIONS = {
    "gpu_largest": ("largest", "cell", "layers × hidden", "ψ", "predicted need", "peak", "allocated"),
    "gpu_speed": ("speed", "cell", "step ms", "over DDP", "tokens/s", "MFU", "allocated", "last loss"),
    "gpu_tiers": ("tiers", "what", "kept", "paper", "step ms", "allocated", "pinned"),
    "gpu_bus": ("bus", "size", "up GB/s", "down GB/s", "both GB/s", "best of the raw rate"),
}
"""Block -> a section of the GPU suite's summary, and its columns."""

SOURCES: dict[str, Callable[[], Any]] = {
    **{name: partial(cells, *folder) for name, folder in CELLS.items()},
    **{name: getattr(measured, name) for name in MEASURED},
    **{name: getattr(predicted, name) for name in PREDICTED},
    **{name: partial(predicted.gpu_section, *section) for name, section in GPU_SECTIONS.items()},
    "compile": measured.compile_blocks,
    **{name: partial(read, RESULTS / path, kind) for name, (path, kind) in ROWS.items()},
    "compare": compare,
    "published": partial(pasted, "published/published.md"),
    "keys": references.keys,
    "columns": references.columns,
    "commands": references.commands,
    "estimates": references.estimates,
    "packages": references.packages,
    "where": references.where,
}
"""Block -> what makes its Markdown, or the rows of its template."""

EXPERIMENT = {"stage_bytes": "stages", "stage_traffic": "stages"}
"""Block -> the experiment that its runs are of, if the block has another name."""


def block(name: str) -> str:
    """Returns the Markdown of a block. That of an experiment ends with the date and the commit of its runs."""
    made = SOURCES[name]()
    text = made if isinstance(made, str) else render(name, made)
    experiment = EXPERIMENT.get(name, name)
    is_dated = (REFERENCE / experiment).is_dir()
    return f"{text}\n\n{recorded(experiment)}" if is_dated else text
