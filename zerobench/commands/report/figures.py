"""The figures of a setting: memory by category, traffic by collective, time; a bar per cell, all values recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...records import CATEGORIES, COLLECTIVES
from ...results.markup import Bar, BarPart, Html, bars, h, legend
from ...sizes import show_bytes, show_ms, show_rate
from .settings import Row, Setting

MOST = 24
"""Most bars in a figure."""

PHASES = ("forward", "backward", "update")


def figures_of(setting: Setting) -> Html:
    """Builds all figures of a setting, side by side, without those that have no value."""
    drawn = [_figure(one, setting) for one in KINDS if any(one.is_there(row) for row in _rows(setting))]
    return h("div", *drawn, class_="figures")


@dataclass(frozen=True)
class FigureKind:
    """A figure: its title, its caption, its bars, and the parts that its legend may name."""

    title: str
    said: str
    is_there: Callable[[Row], bool]
    bar: Callable[[str, Row], Bar]
    parts: Sequence[str]
    more: Sequence[Html] = ()


def _rows(setting: Setting) -> list[Row]:
    return [setting.cells[place].row for place in setting.ok]


def _figure(kind: FigureKind, setting: Setting) -> Html:
    rows = [
        kind.bar(label, cell.row)
        if cell.row["status"] == "ok" and kind.is_there(cell.row)
        else _absent(label, cell.row)
        for label, cell in zip(setting.labels, setting.cells, strict=True)
    ]
    there = {piece.name for row in rows for piece in (*row.pieces, *row.below) if piece.value > 0}
    left = f" {MOST} of {len(rows)} cells are drawn; the table has all." if len(rows) > MOST else ""
    return h(
        "figure",
        h("figcaption", h("b", kind.title), " ", kind.said + left),
        bars(rows[:MOST], f"{kind.title}: {setting.title}"),
        legend([name for name in kind.parts if name in there], *kind.more),
    )


def _absent(label: str, row: Row) -> Bar:
    word = row["status"] if row["status"] != "ok" else "none"
    return Bar(label, f"× {word}", f"{label}\n{word}: {row['reason'] or 'not recorded'}", absent=word)


def exactly(size: int) -> str:
    """Formats bytes both rounded and exact."""
    return f"{show_bytes(size)} ({size:,} B)"


def _memory(label: str, row: Row) -> Bar:
    sizes = [(name, row[f"peak_{name}_bytes"] or 0) for name in CATEGORIES]
    pieces = [BarPart(name, size, f"{label}\n{name} {exactly(size)}") for name, size in sizes]
    lines = [label, f"at the peak {exactly(row['peak_bytes'])}", *(f"{n} {exactly(s)}" for n, s in sizes if s)]
    states, predicted = row["states_bytes"], row["predicted_states_bytes"]
    lines.append(f"states at most {exactly(states)}")
    if predicted is not None:
        lines.append(f"predicted {exactly(predicted)}, residual {states - predicted:+,} B")
    below = [BarPart("states", states, f"{label}\nstates at most {exactly(states)}")]
    return Bar(label, show_bytes(row["peak_bytes"]), "\n".join(lines), pieces, below, predicted)


def _traffic(label: str, row: Row) -> Bar:
    volumes = [(name, row[f"volume_{name}_psi"] or 0.0) for name in COLLECTIVES]
    pieces = [BarPart(name, size, f"{label}\n{name.replace('_', '-')} {size:.6g} ψ") for name, size in volumes]
    lines = [label, f"volume {row['volume_psi']:.6g} ψ", *(f"{n.replace('_', '-')} {s:.6g} ψ" for n, s in volumes if s)]
    predicted = row["predicted_volume_psi"]
    if predicted is not None:
        lines.append(f"predicted {predicted:.6g} ψ, residual {row['volume_psi'] - predicted:+.3g} ψ")
    if row["wire_bytes"] is not None:
        lines.append(f"a rank sends {exactly(row['wire_bytes'])}")
    return Bar(label, f"{row['volume_psi']:.3f} ψ", "\n".join(lines), pieces, (), predicted)


def _time(label: str, row: Row) -> Bar:
    step = row["step_s"]
    reach = None if row["step_s_low"] is None else (row["step_s_low"], row["step_s_high"])
    interval = f"95 % interval {reach[0] * 1000:.1f}–{reach[1] * 1000:.1f} ms" if reach else "too few for an interval"
    parts = [(name, row[f"{name}_s"]) for name in PHASES if row[f"{name}_s"] is not None]
    lines = [label, f"step {show_ms(step)}", interval,
             *(f"{name} {show_ms(s)}" for name, s in parts),
             show_rate(row["tokens_per_s"], row["sequence"])]  # fmt: skip
    below = [BarPart(name, s, f"{label}\n{name} {show_ms(s)}, the median of its own") for name, s in parts]
    return Bar(
        label, show_ms(step), "\n".join(lines), [BarPart("step", step, "\n".join(lines[:3]))], below, reach=reach
    )


def key_to(kind: str, words: str) -> Html:
    """Builds a legend entry for a mark or a whisker."""
    drawn = {
        "mark": h("line", x1=7, x2=7, y1=0, y2=12, class_="mark"),
        "whisker": h("path", d="M1,6 H13 M1,2 v8 M13,2 v8", class_="whisker"),
    }
    return h("li", h("svg", drawn[kind], width=14, height=12, aria_hidden="true"), words)


def _has(*keys: str) -> Callable[[Row], bool]:
    return lambda row: all(row[key] is not None for key in keys)


KINDS = (
    FigureKind(
        "Memory", "at the peak by category, on the rank with the most; the thin line below: largest sum of states.",
        _has("peak_bytes", "states_bytes"), _memory, (*CATEGORIES, "states"), (key_to("mark", "states predicted"),),
    ),
    FigureKind(
        "Traffic", "elements that a rank moves in a step, over ψ, by collective.",
        lambda row: bool(row["volume_psi"]), _traffic, COLLECTIVES, (key_to("mark", "predicted"),),
    ),
    FigureKind(
        "Time", "of a step on the slowest rank; the thin line below: phases, each its own median.",
        _has("step_s"), _time, ("step", *PHASES), (key_to("whisker", "95 % interval"),),
    ),
)  # fmt: skip
