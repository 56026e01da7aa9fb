"""Settings: cells that train the same thing, each with a distinguishing label, in a fixed order; and the verdict on a
setting: which cell needs the least memory, at what price, which is fastest, and how certain that is.

Best values are the ones marked in the table of a sweep (results/printed_table.py); ratios of times and their verdicts
are the ones of `zerobench compare` (budgets/comparison.py), so that both always agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from ...budgets.comparison import FASTER, NOISE, SLOWER, Compared, Judge, Measured, compare_cells, measured
from ...config.flat import name_strategies
from ...records import CATEGORIES, COLLECTIVES
from ...results.frames import Row
from ...results.grid import Grid
from ...results.markup import Bar, BarFigure, BarPart
from ...results.printed_table import COLUMNS, ONE_MEMORY, best_rows, in_tables_order, shares_memory, step_interval
from ...results.summary import LEAST_LAUNCHES, SETTING, busy_words
from ...sizes import show_bytes, show_count, show_length, show_ms, show_rate
from ...strategies import find
from ..compare import interval, percent

NONE = "–"
TRAINED = {
    "reference": "the reference", "equal": "equal to DDP to the bit", "close": "DDP's but for rounding",
    "differs": "NOT as DDP does", "unchecked": "not checked", "": "without a verdict",
}  # fmt: skip
"""Verdict on the training -> text before the cells that have it."""

NAMED = 5
"""Most cells that a message names."""


@dataclass(frozen=True)
class Setting:
    """Cells that train the same thing, named by what tells them apart. `reference`: the cell to compare costs with,
    None without one.
    """

    title: str
    cells: list[Measured]
    reference: Measured | None

    @property
    def ok(self) -> list[Measured]:
        """The cells that have figures."""
        return [cell for cell in self.cells if cell.row["status"] == "ok"]

    def best(self, column: str) -> list[Measured]:
        """Returns the best cells in a column of the sweep's table; a single ok cell is the best."""
        best = sorted(best_rows([cell.row for cell in self.cells], COLUMNS[column]))
        if best or len(self.ok) > 1:
            return [self.cells[index] for index in best]
        return [cell for cell in self.ok if not pd.isna(COLUMNS[column].value(cell.row))]


def group_by_setting(runs: pd.DataFrame) -> list[Setting]:
    """Groups the cells of these runs, each with its newest launches, by setting."""
    groups: dict[tuple[Any, ...], list[Measured]] = {}
    for cell in sorted(measured(runs, None), key=lambda cell: in_tables_order(cell.row)):
        groups.setdefault(tuple(cell.row[key] for key in SETTING), []).append(cell)
    titles = _titles([group[0].row for group in groups.values()])
    settings = []
    for title, group in zip(titles, groups.values(), strict=True):
        names = name_strategies([cell.config for cell in group])
        cells = [replace(cell, name=name) for cell, name in zip(group, names, strict=True)]
        ok = [cell for cell in cells if cell.row["status"] == "ok"]
        named = [cell for cell in ok if (spec := find(cell.row["strategy"])) and spec.reference is not None]
        settings.append(Setting(title, cells, next(iter([*named, *ok]), None)))
    return settings


def _titles(rows: list[Row]) -> list[str]:
    """Returns a title per setting: the fixed keys, and the other keys in which settings differ."""
    keys = ("precision", "optimizer", "data", "seed", "device")
    differing = [key for key in keys if len({str(row[key]) for row in rows}) > 1]
    titles = []
    for row in rows:
        title = f"{row['model']}, N = {row['world_size']}, batch {row['batch']}{show_length(row['sequence'])}"
        titles.append(title + "".join(f", {'seed ' if key == 'seed' else ''}{row[key]}" for key in differing))
    shapes = [row["shape"].split() for row in rows]
    own = [[word for word in shape if not all(word in other for other in shapes)] for shape in shapes]
    return [
        title + ("".join(f", {word}" for word in parts) if titles.count(title) > 1 else "")
        for title, parts in zip(titles, own, strict=True)
    ]


def setting_verdict(setting: Setting, judge: Judge) -> Iterator[tuple[str, str]]:
    """Yields (question, answer): memory, time, training, predictions, and failures."""
    if setting.ok:
        yield "Least memory", _memory(setting)
        if price := _price(setting, judge):
            yield "Its price", price
        yield "Fastest", _fastest(setting, judge)
        groups: dict[str, list[Measured]] = {}
        for cell in setting.ok:
            groups.setdefault(cell.row["training"] or "", []).append(cell)
        trained = [f"{TRAINED.get(verdict, verdict)}: {_names(cells)}" for verdict, cells in groups.items()]
        differ = (str(cell.row["training_words"]) for cell in groups.get("differs", []))
        yield "Training", "; ".join([*trained, *differ])
        yield "Predictions", _predictions(setting)
    bad = [f"{c.name}: {c.row['status']}: {c.row['reason']}" for c in setting.cells if c.row["status"] != "ok"]
    if bad:
        yield "Not ok", "; ".join(bad)


def _memory(setting: Setting) -> str:
    best, reference = setting.best("peak MiB"), setting.reference
    known = [cell.row["peak_bytes"] for cell in setting.ok if cell.row["peak_bytes"] is not None]
    if not known:
        return "unknown: no cell has an accounted pass"
    if not best:
        return f"no cell differs: {show_bytes(known[0])} at the peak of the largest rank"
    row = best[0].row
    host = f", and {show_bytes(row['host_peak_bytes'])} in host memory" if row["host_peak_bytes"] else ""
    answer = f"{_names(best)}: {show_bytes(row['peak_bytes'])} at the peak of the largest rank{host}"
    if reference is None or reference in best or not reference.row["peak_bytes"]:
        return answer
    ranked = COLUMNS["peak MiB"].value  # with host memory, if that is the device's own
    less = 1 - ranked(row) / ranked(reference.row)
    note = f"; {ONE_MEMORY}, and their sum is compared" if shares_memory([row, reference.row]) else ""
    return f"{answer}, {less * 100:.0f} % less than {reference.name} ({show_bytes(reference.row['peak_bytes'])}){note}"


def _price(setting: Setting, judge: Judge) -> str:
    """The traffic and the time of the cell with the least memory; empty if that cell is the reference."""
    best, base = setting.best("peak MiB"), setting.reference
    if not best or base is None or base in best or len(setting.ok) < 2:
        return ""
    cell, comparisons = best[0], []
    ours, theirs = cell.row["volume_psi"], base.row["volume_psi"]
    if ours is not None and theirs:
        times = "as much traffic as" if ours == theirs else f"{ours / theirs:.3g} times the traffic of"
        comparisons.append(f"{times} {base.name} ({ours:.3f} ψ against {theirs:.3f} ψ)")
    pair = compare_cells(base, cell, judge)
    if pair.effects:
        step = pair.effects[0]
        certainty = f"95 % interval {interval(step)}, " if interval(step) else ""
        comparisons.append(f"{step.ratio:.3f} times the step of {base.name} ({certainty}{step.verdict})")
    is_refused = pair.refused or pair.time_refused
    refused = f"; times are not comparable: {_refused(pair, base.name, cell.name)}" if is_refused else ""
    return f"{cell.name} takes {' and '.join(comparisons)}{refused}" if comparisons else ""


def _refused(pair: Compared, a: str, b: str) -> str:
    """Returns why times are not comparable, with the cells' names instead of A and B."""
    if pair.a.row["step_s"] is None or pair.b.row["step_s"] is None:
        return "there are none"
    reasons = "; ".join(pair.refused or pair.time_refused)
    return reasons.replace(" in A and ", f" in {a} and ").replace(" in B", f" in {b}")


def _timed(setting: Setting) -> list[Measured]:
    return [cell for cell in setting.ok if cell.row["step_s"] is not None]


def _fastest(setting: Setting, judge: Judge) -> str:
    timed = _timed(setting)
    if not timed:
        return "no cell has times: one rank of a simulated world, ranks that share a GPU, or measure.passes=accounted"
    if busy := busy_words([cell.row for cell in timed]):
        return f"not judged: {busy}"
    best = setting.best("step ms") or timed[:1]
    row = best[0].row
    step = f"{show_ms(row['step_s'])} a step ({step_interval(row) or 'too few for an interval'})"
    answer = f"{_names(best)}: {step}, {show_rate(row['tokens_per_s'], row['sequence'])}"
    groups: dict[str, list[Measured]] = {}
    for cell in timed:
        if cell not in best:
            groups.setdefault(_against(best[0], cell, judge), []).append(cell)
    answer += "".join(f"; {against}: {_names(cells)}" for against, cells in groups.items())
    fewest = min(len(cell.launches) for cell in timed)
    if fewest >= LEAST_LAUNCHES:
        return f"{answer}. Intervals are over {fewest} launches or more"
    # intervals over one launch's steps hide how much launches differ
    return (
        f"{answer}. Intervals are over the steps of {'one launch' if fewest == 1 else 'few launches'}; launches of the "
        f"same code differ by more, and measure.repeats={LEAST_LAUNCHES} measures by how much"
    )


SLOWER_THAN_IT = "slower"


def _against(fastest: Measured, other: Measured, judge: Judge) -> str:
    """Returns compare's verdict on a slower cell or, if it has none, a comparison of the cells' own intervals."""
    pair = compare_cells(fastest, other, judge)
    if not pair.effects:
        return "not comparable in time"
    apart = "not told apart from it"
    verdicts = {SLOWER: SLOWER_THAN_IT, FASTER: "faster, launch by launch", NOISE: apart}
    high, low = fastest.row["step_s_high"], other.row["step_s_low"]
    disjoint = high is not None and low is not None and high < low
    return verdicts.get(pair.effects[0].verdict, "slower here, with disjoint intervals" if disjoint else apart)


def _predictions(setting: Setting) -> str:
    counted = [cell for cell in setting.ok if cell.row["states_bytes"] is not None]
    predicted = [cell for cell in counted if cell.row["predicted_states_bytes"] is not None]
    if not predicted:
        return "none: theory does not cover these strategies" if counted else "none: no pass counted bytes"
    off = [(cell.name, cell.row["states_bytes"] - cell.row["predicted_states_bytes"]) for cell in predicted]
    wrong = [f"{label} {by:+,} B" for label, by in off if by]
    answer = "states " + (f"differ by {', '.join(wrong)}" if wrong else "are met to the byte")
    volumes = [cell for cell in predicted if None not in (cell.row["volume_psi"], cell.row["predicted_volume_psi"])]
    moved = [(cell.name, cell.row["volume_psi"] - cell.row["predicted_volume_psi"]) for cell in volumes]
    wrong = [f"{label} {by:+.4f} ψ" for label, by in moved if abs(by) > 1e-9]
    answer += ", volumes " + (f"differ by {', '.join(wrong)}" if wrong else "to the element") if volumes else ""
    unknown = [cell for cell in setting.ok if cell not in predicted]
    return answer + (f"; without a prediction: {_names(unknown)}" if unknown else "")


def _names(cells: Sequence[Measured]) -> str:
    """Lists labels; if there are many, the first ones and the number of others."""
    names = [cell.name for cell in cells]
    if len(names) > NAMED + 1:
        names = [*names[:NAMED], f"{len(names) - NAMED} more"]
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def costs(setting: Setting, judge: Judge) -> Grid | None:
    """Compares each cell with the reference: bytes and volumes exactly, step times as ratios with their verdict."""
    base = setting.reference
    if base is None or len(setting.ok) < 2:
        return None
    header = ["", "peak", f"against {base.name}", "states", f"against {base.name}", "volume ψ", "step ms",
              "95 % interval", "ratio of steps", "95 % interval", "verdict"]  # fmt: skip
    rows = []
    for cell in setting.ok:
        row, shown = cell.row, [cell.name]
        for key in ("peak_bytes", "states_bytes"):
            comparable = row[key] and base.row[key] and cell is not base
            shown += [show_bytes(row[key]), percent(row[key] / base.row[key] - 1) if comparable else NONE]
        shown += [COLUMNS[name].show(row) for name in ("volume ψ", "step ms", "95 % interval")]
        pair = compare_cells(base, cell, judge)
        if cell is base or not pair.effects:
            shown += [NONE, NONE, "is the reference" if cell is base else _refused(pair, "the reference", "it")]
        else:
            step = pair.effects[0]
            shown += [f"{step.ratio:.3f}", interval(step) or NONE, step.verdict]
        rows.append(shown)
    return Grid(header, rows)


def overall(settings: Sequence[Setting], judge: Judge) -> Iterator[str]:
    """Yields sentences over all settings: what was compared, and how often each strategy comes first."""
    rows = [cell.row for setting in settings for cell in setting.cells]
    if busy := busy_words(rows):
        yield f"{busy[0].upper()}{busy[1:]}."
    ok = [setting for setting in settings if setting.ok]
    if not ok:
        ended = ", ".join(f"{number} {status}" for status, number in Counter(r["status"] for r in rows).most_common())
        yield f"No run is ok, so there is nothing to compare: of {show_count(len(rows), 'cell')} {ended}."
        return
    devices = {str(cell.row["device_class"]) for setting in ok for cell in setting.cells}
    if len(devices) > 1:
        yield f"Runs of {len(devices)} devices, {', '.join(sorted(devices))}: times are compared on one device only."
    if len(rows) == 1:
        yield "One cell: there is nothing to compare it with."
    if len(settings) == 1:
        return
    several = [setting for setting in ok if len(setting.ok) > 1]
    yield f"{show_count(len(rows), 'cell')} in {len(settings)} settings; cells of a setting train the same thing."
    among = f"of {show_count(len(several), 'setting')} with two cells or more"
    if least := [cell for setting in several for cell in setting.best("peak MiB")]:
        yield f"Least memory, {among}: {_counted(least)}."
    if any(map(_timed, several)):
        fastest = []  # cells that are proven faster than every other timed cell of their setting
        for setting in several:
            timed, best = _timed(setting), setting.best("step ms")
            others = [cell for cell in timed if cell not in best]
            if len(best) == 1 < len(timed) and all(_against(best[0], o, judge) == SLOWER_THAN_IT for o in others):
                fastest += best
        unproven = f"not proven in {len(several) - len(fastest)}" if len(fastest) < len(several) else ""
        yield f"Fastest, {among}: {', '.join(filter(None, [_counted(fastest), unproven]))}."


def _counted(cells: Sequence[Measured]) -> str:
    counts = Counter(cell.row["strategy"] for cell in cells)
    return ", ".join(f"{strategy} in {number}" for strategy, number in counts.most_common())


MOST = 24
"""Most bars in a figure."""


def setting_figures(setting: Setting) -> Iterator[BarFigure]:
    """Yields all figures of a setting, without those that have no value."""
    for title, caption, bar, marks in KINDS:
        bars = []
        for label, row in ((cell.name, cell.row) for cell in setting.cells):
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


def _memory_figure(label: str, row: Row) -> Bar | None:
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


def _traffic_figure(label: str, row: Row) -> Bar | None:
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


def _time_figure(label: str, row: Row) -> Bar | None:
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
        _memory_figure, [("mark", "states predicted")],
    ),
    (
        "Traffic", "elements that a rank moves in a step, over ψ, by collective.",
        _traffic_figure, [("mark", "predicted")],
    ),
    (
        "Time", "of a step on the slowest rank; the thin line below: phases, each its own median.",
        _time_figure, [("whisker", "95 % interval")],
    ),
)  # fmt: skip
"""Title, caption, bar of a cell (None if it has no value), and the marks of each figure."""
