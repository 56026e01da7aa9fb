"""The figures of a setting: memory by category, traffic by collective, time; a bar per cell, all values recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ...records import CATEGORIES, COLLECTIVES
from ...results.markup import Bar, BarFigure, BarPart
from ...results.printed_table import step_interval
from ...sizes import show_bytes, show_ms, show_rate
from .settings import Row, Setting

MOST = 24
"""Most bars in a figure."""


def figures_of(setting: Setting) -> Iterator[BarFigure]:
    """Yields all figures of a setting, without those that have no value."""
    for title, caption, bar, marks in KINDS:
        bars = []
        for label, row in ((cell.label, cell.row) for cell in setting.cells):
            word = row["status"] if row["status"] != "ok" else "none"
            absent = Bar(label, f"× {word}", f"{label}\n{word}: {row['reason'] or 'not recorded'}", absent=word)
            bars.append((bar(label, row) if word == "none" else None) or absent)
        if not all(drawn.absent for drawn in bars):
            yield BarFigure(title, caption + undrawn(len(bars)), bars[:MOST], marks=marks)


def undrawn(count: int) -> str:
    """Returns the end of a caption if not all cells are drawn."""
    return f" {MOST} of {count} cells are drawn; the table has all." if count > MOST else ""


def exactly(size: int) -> str:
    """Formats bytes both rounded and exact."""
    return f"{show_bytes(size)} ({size:,} B)"


def _memory(label: str, row: Row) -> Bar | None:
    if row["peak_bytes"] is None or row["states_bytes"] is None:
        return None
    sizes = {name: row[f"peak_{name}_bytes"] or 0 for name in CATEGORIES}
    states, predicted = row["states_bytes"], row["predicted_states_bytes"]
    lines = [label, f"at the peak {exactly(row['peak_bytes'])}"]
    lines += [f"{name} {exactly(size)}" for name, size in sizes.items() if size]
    lines.append(f"states at most {exactly(states)}")
    if predicted is not None:
        lines.append(f"predicted {exactly(predicted)}, residual {states - predicted:+,} B")
    parts = [BarPart(name, size, f"{label}\n{name} {exactly(size)}") for name, size in sizes.items()]
    below = [BarPart("states", states, f"{label}\nstates at most {exactly(states)}")]
    return Bar(label, show_bytes(row["peak_bytes"]), "\n".join(lines), parts, below, predicted)


def _traffic(label: str, row: Row) -> Bar | None:
    if not row["volume_psi"]:
        return None
    volumes = {name: row[f"volume_{name}_psi"] or 0.0 for name in COLLECTIVES}
    texts = {name: f"{name.replace('_', '-')} {volume:.6g} ψ" for name, volume in volumes.items()}
    lines = [label, f"volume {row['volume_psi']:.6g} ψ", *(texts[name] for name, volume in volumes.items() if volume)]
    predicted = row["predicted_volume_psi"]
    if predicted is not None:
        lines.append(f"predicted {predicted:.6g} ψ, residual {row['volume_psi'] - predicted:+.3g} ψ")
    if row["wire_bytes"] is not None:
        lines.append(f"a rank sends {exactly(row['wire_bytes'])}")
    parts = [BarPart(name, volume, f"{label}\n{texts[name]}") for name, volume in volumes.items()]
    return Bar(label, f"{row['volume_psi']:.3f} ψ", "\n".join(lines), parts, (), predicted)


def _time(label: str, row: Row) -> Bar | None:
    step, low, high = row["step_s"], row["step_s_low"], row["step_s_high"]
    if step is None:
        return None
    head = [label, f"step {show_ms(step)}", step_interval(row) or "too few for an interval"]
    times = {name: row[f"{name}_s"] for name in ("forward", "backward", "update") if row[f"{name}_s"] is not None}
    lines = [*head, *(f"{name} {show_ms(s)}" for name, s in times.items())]
    lines.append(show_rate(row["tokens_per_s"], row["sequence"]))
    below = [BarPart(name, s, f"{label}\n{name} {show_ms(s)}, the median of its own") for name, s in times.items()]
    part, reach = BarPart("step", step, "\n".join(head)), None if low is None else (low, high)
    return Bar(label, show_ms(step), "\n".join(lines), [part], below, reach=reach)


KINDS: Sequence[tuple[str, str, Callable[[str, Row], Bar | None], list[tuple[str, str]]]] = (
    (
        "Memory", "at the peak by category, on the rank with the most; the thin line below: largest sum of states.",
        _memory, [("mark", "states predicted")],
    ),
    (
        "Traffic", "elements that a rank moves in a step, over ψ, by collective.",
        _traffic, [("mark", "predicted")],
    ),
    (
        "Time", "of a step on the slowest rank; the thin line below: phases, each its own median.",
        _time, [("whisker", "95 % interval")],
    ),
)  # fmt: skip
"""Title, caption, bar of a cell (None if it has no value), and the marks of each figure."""
