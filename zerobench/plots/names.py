"""Names of cells below an axis: a small table of what differs between them, or, where there is no room, words upright.

A cell's *label* is its strategy and words: `key=value`, or a flag. A *row* of the table is a key with its value for
each cell; what all cells have in common is left out. Strategies are the last row, once for all neighbors of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.textpath import text_to_path
from matplotlib.transforms import offset_copy

from ..sizes import show_bytes

Rows = Mapping[str, Sequence[str]]
"""Key -> its value for each cell."""

NONE = "–"
LINE = 1.25
"""Height of a row, in heights of its text."""

BESIDE, MARGIN = 36, 8
"""Points that an axis and its label take to the left of the axes, and what is left between panels."""


def name_cells(axes: Axes, strategies: Sequence[str], rows: Rows) -> None:
    """Names the places 0, 1 ... of the x axis by their strategies and by what else differs."""
    places, shown = range(len(strategies)), {key: values for key, values in rows.items() if len(set(values)) > 1}
    values = ["\n".join(parts) for parts in zip(*shown.values(), strict=True)] if shown else list(strategies)
    beside = max([BESIDE, *(width_of(key) + MARGIN for key in shown)])
    slot = (_points_wide(axes) - beside - MARGIN) / len(strategies)
    if any(width_of(line) > slot - 2 for value in values for line in value.split("\n")):
        words = [" ".join([one, *(f"{k}={v[i]}" for k, v in shown.items())]) for i, one in enumerate(strategies)]
        axes.set_xticks(places, words if shown else values, rotation=90)
        return
    axes.set_xticks(places, values, linespacing=LINE)
    if shown:
        _head_and_group(axes, list(shown), strategies)


def rows_of_labels(labels: Sequence[str]) -> Rows:
    """Rows of what differs between labels; a flag is a key whose value is "yes"."""
    words = [words_of(label) for label in labels]
    keys = dict.fromkeys(key for mine in words for key in mine)
    return {key: [_show(key, mine.get(key)) for mine in words] for key in keys}


def words_of(label: str) -> dict[str, str]:
    """Words of a label beside the strategy: key -> value; of a flag "yes"."""
    pairs = (word.rstrip(",").partition("=") for word in label.split()[1:])
    return {key: value or "yes" for key, _, value in pairs}


def width_of(text: str) -> float:
    """Of one line of small text, in points."""
    prop = FontProperties(size=mpl.rcParams["xtick.labelsize"])
    return float(text_to_path.get_text_width_height_descent(text, prop, False)[0])


def _show(key: str, value: str | None) -> str:
    if value is None:
        return NONE
    return show_bytes(int(value)) if key.endswith("_bytes") and value.isdecimal() else value


def _points_wide(axes: Axes) -> float:
    spec = axes.get_subplotspec()
    abreast = spec.get_gridspec().ncols if spec is not None else 1
    return float(72 * axes.get_figure(root=True).get_figwidth() / abreast)


def _head_and_group(axes: Axes, keys: Sequence[str], strategies: Sequence[str]) -> None:
    """Writes the keys to the left of their values, and below them each strategy once, below a line."""
    size = FontProperties(size=mpl.rcParams["xtick.labelsize"]).get_size_in_points()
    gap = mpl.rcParams["xtick.major.size"] + mpl.rcParams["xtick.major.pad"]
    how = {"textcoords": "offset points", "va": "top", "fontsize": "small", "annotation_clip": False}
    axes.annotate("\n".join(keys), (0, 0), (-4, -gap), xycoords="axes fraction", ha="right", style="italic",
                  linespacing=LINE, **how)  # fmt: skip
    below, first = -gap - len(keys) * LINE * size * 1.05 - 2, 0
    across = axes.get_xaxis_transform()
    for strategy, mine in groupby(strategies):
        last = first + len(list(mine)) - 1
        shift = offset_copy(across, axes.get_figure(root=True), y=below, units="points")
        axes.add_artist(
            Line2D([first - 0.35, last + 0.35], [0, 0], transform=shift, color="black", lw=0.7, clip_on=False)
        )
        axes.annotate(strategy, ((first + last) / 2, 0), (0, below - 2), xycoords=across, ha="center", **how)
        first = last + 1
