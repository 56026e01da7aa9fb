"""Results made up for the tests of figures, and what to read off a figure."""

from dataclasses import asdict, replace
from typing import Any

from matplotlib.figure import Figure

from analysis.__main__ import draw_of
from tests.cells import cell
from zerobench.records import ALLOCATOR, CATEGORIES, STATES, MemoryRow, RunRow, StepRow, TimelineRow
from zerobench.results.frames import frame_of
from zerobench.results.tables import ALL_TABLES, Results
from zerobench.sweep.cell import new_row

MIB = 2**20
NUMBERS = {name: (number + 1) * MIB for number, name in enumerate(CATEGORIES)}
"""Bytes by category at the peak; the states' maximum holds half a MiB more of each."""


def run(strategy: str, ranks: int, status: str = "ok", repeat: int = 0, step: float = 0.1, **more: Any) -> RunRow:
    """A row with made-up values; of a failed run, without any."""
    row = new_row(replace(cell(strategy, ranks, micro_batch=more.pop("micro_batch", 2)), repeat=repeat))
    row.run_id, row.status = f"{strategy}-{ranks}-{row.micro_batch}-{repeat}", status
    if status != "ok":
        return row
    sizes = {f"peak_{name}_bytes": size for name, size in NUMBERS.items()}
    values: dict[str, Any] = {
        **sizes, "psi": 10**6, "peak_bytes": sum(NUMBERS.values()), "states_bytes": 30 * MIB // ranks,
        "predicted_states_bytes": 29 * MIB // ranks, "floor_states_bytes": 20 * MIB // ranks, "volume_psi": 3.0,
        "predicted_volume_psi": 2.9, "volume_all_reduce_psi": 0.0, "volume_reduce_scatter_psi": 1.0,
        "volume_all_gather_psi": 2.0, "volume_other_psi": 0.0, "step_s": step, "step_s_low": step * 0.9,
        "step_s_high": step * 1.2, "forward_s": 0.03, "backward_s": 0.05, "update_s": 0.01,
        "tokens_per_s": row.batch * row.sequence / step, "passes_agree": True,
    }  # fmt: skip
    return replace(row, **(values | more))


def results_of(rows: list[RunRow], losses: dict[str, list[float]] | None = None) -> Results:
    """Tables of the runs: two ranks each, of which rank 1 holds more."""
    tables: dict[str, list[dict[str, Any]]] = {name: [] for name in ALL_TABLES}
    tables["runs"] = [asdict(row) for row in rows]
    for row in rows:
        if row.status != "ok":
            continue
        for rank in (0, 1):
            mine: dict[str, list[Any]] = {"memory": _memory(rank), "timeline": _timeline(rank)}
            curve = (losses or {}).get(row.strategy, [3.0, 2.0, 1.0])
            mine["steps"] = [
                StepRow(rank, mode, n, n < 1, loss + rank, 0.1, 0.03, 0.05, 0.01)
                for mode in ("timed", "accounted")
                for n, loss in enumerate(curve)
            ]
            for name, made in mine.items():
                tables[name] += [{"run_id": row.run_id, **asdict(one)} for one in made]
    frames = {}
    for name, kind in ALL_TABLES.items():
        frames[name] = frame_of(tables[name], kind)
        if name not in ("runs", "searches"):
            frames[name].insert(0, "run_id", [one["run_id"] for one in tables[name]])
    return Results(**frames)


def _memory(rank: int) -> list[MemoryRow]:
    def rows(phase: str, scale: int) -> list[MemoryRow]:
        own = [MemoryRow(rank, phase, n, s * scale, s * scale + MIB // 2, s * 9, None) for n, s in NUMBERS.items()]
        states = sum(NUMBERS[name] for name in STATES)
        total = sum(NUMBERS.values())
        return [
            *own,
            MemoryRow(rank, phase, "states", 0, 0, states * scale),
            MemoryRow(rank, phase, "total", 0, 0, total * scale),
            *(MemoryRow(rank, phase, name, None, None, 99 * MIB) for name in ALLOCATOR),  # no part of anything
        ]

    return [*rows("forward", 7), *rows("step", rank + 1)]


def _timeline(rank: int) -> list[TimelineRow]:
    phases = ["data", "forward", "backward", "update"]
    sizes = {f"{name}_bytes": size * (rank + 1) for name, size in NUMBERS.items()}
    return [TimelineRow(rank, n, n * 0.01, phase, **sizes) for n, phase in enumerate(phases)]


def texts(figure: Figure) -> list[str]:
    found = [text.get_text() for axes in figure.axes for text in axes.texts]
    return found + [axes.get_xlabel() for axes in figure.axes]


def figure_of(name: str, results: Results, **options: Any) -> Figure:
    figure: Figure = draw_of(name)(results, **options)
    return figure


def tops(axes: Any) -> dict[float, float]:
    """Where a stacked bar stands -> how high it is."""
    found: dict[float, float] = {}
    for bar in axes.patches:
        middle = round(bar.get_x() + bar.get_width() / 2, 3)
        found[middle] = max(found.get(middle, 0.0), bar.get_y() + bar.get_height())
    return found
