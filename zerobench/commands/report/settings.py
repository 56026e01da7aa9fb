"""Settings: cells that train the same thing, each with a distinguishing label, in a fixed order; and the verdict on a
setting: which cell needs the least memory, at what price, which is fastest, and how certain that is.

Best values are the ones marked in the table of a sweep (results/printed_table.py); ratios of times and their verdicts
are the ones of `zerobench compare` (judging/comparison.py), so that both always agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from ...config.flat import name_strategies
from ...judging.comparison import Compared, Measured, measured
from ...judging.paired import FASTER, NOISE, SLOWER, Effect
from ...results.grid import Grid
from ...results.printed_table import COLUMNS, best_rows
from ...results.summary import LEAST_LAUNCHES, SETTING, busy_words
from ...sizes import show_bytes, show_count, show_length, show_ms, show_rate
from ...strategies import find
from ..compare import Judge
from ..comparison_text import interval, percent

Row = dict[str, Any]

ORDER = ("model", "world_size", "batch", "sequence", "precision", "strategy")
"""Columns by which cells are sorted."""


@dataclass(frozen=True)
class Setting:
    """`cells` and their `labels`; `reference`: the place of the cell to compare costs with, None without one."""

    title: str
    cells: list[Measured]
    labels: list[str]
    reference: int | None

    @property
    def ok(self) -> list[int]:
        """Places of the cells that have figures."""
        return [place for place, cell in enumerate(self.cells) if cell.row["status"] == "ok"]


def settings_of(runs: pd.DataFrame) -> list[Setting]:
    """Groups the cells of these runs, each with its newest launches, by setting."""
    cells = sorted(measured(runs, None), key=_order)
    groups: dict[tuple[Any, ...], list[Measured]] = {}
    for cell in cells:
        groups.setdefault(tuple(cell.row[key] for key in SETTING), []).append(cell)
    titles = _titles([mine[0] for mine in groups.values()])
    return [
        Setting(title, mine, name_strategies([cell.config for cell in mine]), _reference(mine))
        for title, mine in zip(titles, groups.values(), strict=True)
    ]


def _order(cell: Measured) -> tuple[Any, ...]:
    return tuple((cell.row[key] is None, cell.row[key] or 0) for key in ORDER)


def _reference(cells: list[Measured]) -> int | None:
    """Returns the place of the strategy that training is compared with, or else of the first ok cell."""
    ok = [place for place, cell in enumerate(cells) if cell.row["status"] == "ok"]
    named = [place for place in ok if (spec := find(cells[place].row["strategy"])) and spec.reference is not None]
    return next(iter([*named, *ok]), None)


def _titles(firsts: list[Measured]) -> list[str]:
    """Returns a title per setting: the fixed keys, and the other keys in which settings differ."""
    rows = [cell.row for cell in firsts]
    more = [key for key in ("precision", "optimizer", "data", "seed", "device", "shape")
            if len({str(row[key]) for row in rows}) > 1]  # fmt: skip
    named = [_title(row) + "".join(f", {_told(key, row[key])}" for key in more if key != "shape") for row in rows]
    shapes = [row["shape"].split() for row in rows]
    own = [[word for word in mine if not all(word in other for other in shapes)] for mine in shapes]
    return [
        title + ("".join(f", {word}" for word in words) if named.count(title) > 1 else "")
        for title, words in zip(named, own, strict=True)
    ]


def _told(key: str, value: object) -> str:
    return f"{key} {value}" if key == "seed" else str(value)


def _title(row: Row) -> str:
    return f"{row['model']}, N = {row['world_size']}, batch {row['batch']}{show_length(row['sequence'])}"


NONE = "–"
TRAINED = {
    "reference": "the reference", "equal": "equal to DDP to the bit", "close": "DDP's but for rounding",
    "differs": "NOT as DDP does", "unchecked": "not checked", "": "without a verdict",
}  # fmt: skip
"""Verdict on the training -> text before the cells that have it."""
NAMED = 5
"""Most cells that a message names."""


def verdict_of(setting: Setting, judge: Judge) -> Iterator[tuple[str, str]]:
    """Yields (question, answer): memory, time, training, predictions, and failures."""
    if setting.ok:
        yield "Least memory", _memory(setting)
        if price := _price(setting, judge):
            yield "Its price", price
        yield "Fastest", _fastest(setting, judge)
        yield "Training", _training(setting)
        yield "Predictions", _predictions(setting)
    bad = [(label, cell.row) for label, cell in zip(setting.labels, setting.cells, strict=True)
           if cell.row["status"] != "ok"]  # fmt: skip
    if bad:
        yield "Not ok", "; ".join(f"{label}: {row['status']}: {row['reason']}" for label, row in bad)


def best(setting: Setting, column: str) -> list[int]:
    """Returns the places of the best cells in a column of the sweep's table; a single ok cell is the best."""
    ok = setting.ok
    found = best_rows([cell.row for cell in setting.cells], COLUMNS[column])
    if found or len(ok) > 1:
        return sorted(found)
    return [place for place in ok if not pd.isna(_value(setting.cells[place].row, column))]


def _value(row: Row, column: str) -> float:
    value = COLUMNS[column].value
    return float("nan") if value is None or row[_KEY[column]] is None else float(value(row))


_KEY = {"peak MiB": "peak_bytes", "step ms": "step_s"}


def _memory(setting: Setting) -> str:
    places = best(setting, "peak MiB")
    rows = [cell.row for cell in setting.cells]
    if not places:
        return f"no cell differs: {show_bytes(rows[setting.ok[0]]['peak_bytes'])} at the peak of the largest rank"
    row = rows[places[0]]
    host = f", and {show_bytes(row['host_peak_bytes'])} in host memory" if row["host_peak_bytes"] else ""
    words = f"{_names(setting, places)}: {show_bytes(row['peak_bytes'])} at the peak of the largest rank{host}"
    at = setting.reference
    if at is None or at in places or not rows[at]["peak_bytes"]:
        return words
    less = 1 - row["peak_bytes"] / rows[at]["peak_bytes"]
    return f"{words}, {less * 100:.0f} % less than {setting.labels[at]} ({show_bytes(rows[at]['peak_bytes'])})"


def _price(setting: Setting, judge: Judge) -> str:
    """The traffic and the time of the cell with the least memory; empty if that cell is the reference."""
    places, at = best(setting, "peak MiB"), setting.reference
    if not places or at is None or at in places or len(setting.ok) < 2:
        return ""
    cell, base = setting.cells[places[0]], setting.cells[at]
    name = setting.labels[at]
    words = []
    if cell.row["volume_psi"] is not None and base.row["volume_psi"]:
        ours, theirs = cell.row["volume_psi"], base.row["volume_psi"]
        against = f"({ours:.3f} ψ against {theirs:.3f} ψ)" if f"{ours:.3f}" != f"{theirs:.3f}" else f"({ours:.3f} ψ)"
        times = "as much traffic as" if ours == theirs else f"{ours / theirs:.3g} times the traffic of"
        words.append(f"{times} {name} {against}")
    pair = judge.compare_cells(base, cell)
    if pair.effects:
        step = pair.effects[0]
        known = f"95 % interval {interval(step)}, " if interval(step) else ""
        words.append(f"{step.ratio:.3f} times the step of {name} ({known}{step.verdict})")
    refused = (
        f"; times are not comparable: {_refused(pair, name, setting.labels[places[0]])}" if pair.time_refused else ""
    )
    return f"{setting.labels[places[0]]} takes {' and '.join(words)}{refused}" if words else ""


def _refused(pair: Compared, a: str, b: str) -> str:
    """Returns why times are not comparable, with the cells' names instead of A and B."""
    if pair.a.row["step_s"] is None or pair.b.row["step_s"] is None:
        return "there are none"
    words = "; ".join(pair.time_refused)
    return words.replace(" in A and ", f" in {a} and ").replace(" in B", f" in {b}")


def _fastest(setting: Setting, judge: Judge) -> str:
    timed = [place for place in setting.ok if setting.cells[place].row["step_s"] is not None]
    if not timed:
        return "no cell has times: one rank of a simulated world, or ranks that share a GPU"
    if busy := busy_words([setting.cells[place].row for place in timed]):
        return f"not judged: {busy}"
    places = best(setting, "step ms") or timed[:1]
    first = setting.cells[places[0]]
    row = first.row
    words = f"{_names(setting, places)}: {show_ms(row['step_s'])} a step{_interval(row)}, "
    words += show_rate(row["tokens_per_s"], row["sequence"])
    groups: dict[str, list[int]] = {}
    for place in timed:
        if place not in places:
            groups.setdefault(_against(first, setting.cells[place], judge), []).append(place)
    words += "".join(f"; {said}: {_names(setting, mine)}" for said, mine in groups.items())
    return words + _sureness([setting.cells[place] for place in timed])


SLOWER_THAN_IT = "slower"


def _against(first: Measured, other: Measured, judge: Judge) -> str:
    """Returns a description of a cell compared with the fastest."""
    pair = judge.compare_cells(first, other)
    return _beside(pair.effects[0], first.row, other.row) if pair.effects else "not comparable in time"


def proven_fastest(setting: Setting, judge: Judge) -> int | None:
    """Returns the place of the cell that is proven faster than every other timed cell; None if there is none."""
    timed = [place for place in setting.ok if setting.cells[place].row["step_s"] is not None]
    firsts = best(setting, "step ms")
    if len(firsts) != 1 or len(timed) < 2:
        return None
    first = firsts[0]
    cells = [setting.cells[place] for place in timed if place != first]
    return first if all(_against(setting.cells[first], one, judge) == SLOWER_THAN_IT for one in cells) else None


def _beside(effect: Effect, fastest: Row, other: Row) -> str:
    """Returns compare's verdict on a slower cell or, if it has none, a comparison of the cells' own intervals."""
    said = {SLOWER: SLOWER_THAN_IT, FASTER: "faster, launch by launch", NOISE: "not told apart from it"}
    if effect.verdict in said:
        return said[effect.verdict]
    ends = fastest["step_s_high"], other["step_s_low"]
    disjoint = None not in ends and ends[0] < ends[1]
    return "slower here, with disjoint intervals" if disjoint else "not told apart from it"


def _sureness(cells: list[Measured]) -> str:
    """The number of launches behind the intervals: intervals over one launch's steps hide how much launches differ."""
    fewest = min(len(cell.launches) for cell in cells)
    if fewest >= LEAST_LAUNCHES:
        return f". Intervals are over {fewest} launches or more"
    return (
        f". Intervals are over the steps of {'one launch' if fewest == 1 else 'few launches'}; launches of the same "
        f"code differ by more, and measure.repeats={LEAST_LAUNCHES} measures by how much"
    )


def _interval(row: Row) -> str:
    if row["step_s_low"] is None:
        return " (too few for an interval)"
    return f" (95 % interval {row['step_s_low'] * 1000:.1f}–{row['step_s_high'] * 1000:.1f} ms)"


def _training(setting: Setting) -> str:
    """The cells with each verdict on the training."""
    groups: dict[str, list[int]] = {}
    for place in setting.ok:
        groups.setdefault(setting.cells[place].row["training"] or "", []).append(place)
    words = [f"{TRAINED.get(verdict, verdict)}: {_names(setting, places)}" for verdict, places in groups.items()]
    wrong = [setting.cells[place].row["training_words"] for place in groups.get("differs", [])]
    return "; ".join([*words, *map(str, wrong)])


def _predictions(setting: Setting) -> str:
    rows = [(setting.labels[place], setting.cells[place].row) for place in setting.ok]
    known = [(label, row) for label, row in rows if row["predicted_states_bytes"] is not None]
    if not known:
        return "none: theory does not cover these strategies"
    off = [(label, row["states_bytes"] - row["predicted_states_bytes"]) for label, row in known]
    wrong = [f"{label} {by:+,} B" for label, by in off if by]
    said = "states " + (f"differ by {', '.join(wrong)}" if wrong else "are met to the byte")
    volumes = [(label, row["volume_psi"] - row["predicted_volume_psi"]) for label, row in known
               if row["predicted_volume_psi"] is not None]  # fmt: skip
    moved = [f"{label} {by:+.4f} ψ" for label, by in volumes if abs(by) > 1e-9]
    said += ", volumes " + (f"differ by {', '.join(moved)}" if moved else "to the element") if volumes else ""
    unknown = [place for place in setting.ok if setting.cells[place].row["predicted_states_bytes"] is None]
    return said + (f"; without a prediction: {_names(setting, unknown)}" if unknown else "")


def _names(setting: Setting, places: Sequence[int]) -> str:
    """Lists labels; if there are many, the first ones and the number of others."""
    names = [setting.labels[place] for place in places]
    if len(names) > NAMED + 1:
        names = [*names[:NAMED], f"{len(names) - NAMED} more"]
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def costs(setting: Setting, judge: Judge) -> Grid | None:
    """Compares each cell with the reference: bytes and volumes exactly, step times as ratios with their verdict."""
    if setting.reference is None or len(setting.ok) < 2:
        return None
    beside = setting.cells[setting.reference]
    name = setting.labels[setting.reference]
    header = ["", "peak", f"against {name}", "states", f"against {name}", "volume ψ", "step ms", "95 % interval",
              "ratio of steps", "95 % interval", "verdict"]  # fmt: skip
    rows = [
        [setting.labels[place], *_cost(setting.cells[place], judge.compare_cells(beside, setting.cells[place]))]
        for place in setting.ok
    ]
    return Grid(header, rows)


def _cost(cell: Measured, pair: Compared) -> list[str]:
    row, base, shown = cell.row, pair.a.row, []
    for key in ("peak_bytes", "states_bytes"):
        known = row[key] and base[key] and pair.a is not pair.b
        shown += [show_bytes(row[key]), percent(row[key] / base[key] - 1) if known else NONE]
    shown.append(COLUMNS["volume ψ"].show(row))
    shown += [COLUMNS[name].show(row) for name in ("step ms", "95 % interval")]
    if pair.a is pair.b or not pair.effects:
        return [*shown, NONE, NONE, "is the reference" if pair.a is pair.b else _refused(pair, "the reference", "it")]
    step = pair.effects[0]
    return [*shown, f"{step.ratio:.3f}", interval(step) or NONE, step.verdict]


def overall(settings: Sequence[Setting], judge: Judge) -> Iterator[str]:
    """Yields sentences over all settings: what was compared, and how often each strategy comes first."""
    if busy := busy_words([cell.row for setting in settings for cell in setting.cells]):
        yield f"{busy[0].upper()}{busy[1:]}."
    ok = [setting for setting in settings if setting.ok]
    cells = sum(len(setting.cells) for setting in settings)
    if not ok:
        statuses = Counter(cell.row["status"] for setting in settings for cell in setting.cells)
        ended = ", ".join(f"{number} {status}" for status, number in statuses.most_common())
        yield f"No run is ok, so there is nothing to compare: of {show_count(cells, 'cell')} {ended}."
        return
    devices = {str(cell.row["device_class"]) for setting in ok for cell in setting.cells}
    if len(devices) > 1:
        yield f"Runs of {len(devices)} devices, {', '.join(sorted(devices))}: times are compared on one device only."
    if cells == 1:
        yield "One cell: there is nothing to compare it with."
    if len(settings) == 1:
        return
    several = [setting for setting in ok if len(setting.ok) > 1]
    yield f"{show_count(cells, 'cell')} in {len(settings)} settings; cells of a setting train the same thing."
    least = Counter(s.cells[place].row["strategy"] for s in several for place in best(s, "peak MiB"))
    proven = [(s, place) for s in several if (place := proven_fastest(s, judge)) is not None]
    fastest = Counter(s.cells[place].row["strategy"] for s, place in proven)
    of = f"of {show_count(len(several), 'setting')} with two cells or more"
    if least:
        yield f"Least memory, {of}: {_counted(least)}."
    if any(cell.row["step_s"] is not None for s in several for cell in s.cells):
        unproven = f"not proven in {len(several) - len(proven)}" * (len(proven) < len(several))
        yield f"Fastest, {of}: {', '.join(filter(None, [_counted(fastest), unproven]))}."


def _counted(firsts: Counter[str]) -> str:
    return ", ".join(f"{strategy} in {number}" for strategy, number in firsts.most_common())
