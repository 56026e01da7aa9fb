"""A comparison as text (commands/passages.py): a passage for each pair of cells that judging/comparison.py finds."""

from __future__ import annotations

from collections.abc import Sequence

from ..judging.comparison import ROUGH_NOISE, Change, Compared, Comparison, Measured
from ..judging.lines import Lines, MovedLine, moved_lines
from ..judging.paired import Effect, Pair, detectable, interleaved, pairs_needed, same_runs
from ..results.grid import Grid
from ..sizes import counted, show_bytes
from .passages import Part, Passage

MINIMUM_EFFECT = 3.0
"""Smallest relevant effect, in percent."""
NOT_COMPARABLE = "not comparable"
NO_FLOOR = "no noise floor is recorded for this machine; zerobench noise record measures it"
DRIFT = "not interleaved: what drifted in between would count as change, so there is no verdict on times"
IN_TURNS = (
    "zerobench compare --interleave REV_A REV_B -- OVERRIDES measures two revisions in turns; launches by hand need a "
    "results_dir each, in turns a0 b0 b1 a1 a2 b2, and zerobench compare 'a*' 'b*'"
)
ONE_PAIR = (
    f"1 pair of launches, so there is no verdict on times. More pairs: measure.repeats=6 in one sweep; {IN_TURNS}"
)


def passages(found: Comparison) -> list[Passage]:
    """Returns a passage per pair of cells, and one on the cells that only one side has."""
    sections = [Passage(title(pair), _parts(pair)) for pair in found.pairs]
    for side, cells in (("A", found.only_a), ("B", found.only_b)):
        if cells:
            sections.append(Passage(f"only in {side}", [_name(cell) for cell in cells]))
    return sections


def _name(cell: Measured) -> str:
    return cell.name if cell.row["status"] == "ok" else f"{cell.name}: {cell.row['status']}: {cell.row['reason']}"


def title(pair: Compared) -> str:
    """Returns the name of a pair of cells."""
    if pair.a.row["cell_id"] == pair.b.row["cell_id"]:  # names tell from neighbors, which may be others in A and B
        return min(pair.a.name, pair.b.name, key=len)
    return pair.a.name if pair.a.name == pair.b.name else f"{pair.a.name} against {pair.b.name}"


def _parts(pair: Compared) -> list[Part]:
    differs = [f"differs: {words}" for words in pair.differs]
    if pair.refused:
        return [*differs, f"{NOT_COMPARABLE}: {'; '.join(pair.refused)}"]
    if pair.failed:
        return [*differs, *(f"{side} is {row['status']}: {row['reason']}" for side, row in pair.failed.items())]
    return [*differs, *_exact(pair), *_rough(pair), *_losses(pair), *_times(pair)]


def _exact(pair: Compared) -> list[Part]:
    parts: list[Part] = []
    if pair.moved:
        header = ["bytes and volumes", "A", "B", "difference", ""]
        parts += [Grid(header, [_moved(change) for change in pair.moved])]
    parts += _peak(pair)
    for at, title in HEADER.items():
        rows = rows_of(at, pair.a.lines, pair.b.lines)
        parts += [Grid([title, "A", "B", "difference"], rows)] * bool(rows)
    parts += [f"{words}: noise" for words in pair.unsteady]
    count = len(pair.equal) + len(pair.moved) + len(pair.unsteady)
    return [*parts, f"{len(pair.equal)} of {count} bytes and volumes are equal, exactly"]


def _moved(change: Change) -> list[str]:
    signed = "–" if change.difference is None else _figure(change.difference, sign="+")
    share = "" if change.relative is None else percent(change.relative, 2)
    return [change.metric, _figure(change.a), _figure(change.b), signed, share]


def percent(share: float, digits: int = 1) -> str:
    """Formats a signed percentage; a value that rounds to zero is +0, never −0."""
    return f"{round(100 * share, digits) + 0.0:+.{digits}f} %"


def _figure(value: float | None, sign: str = "") -> str:
    return "–" if value is None else f"{value:{sign}.6f}" if isinstance(value, float) else f"{value:{sign},}"


def _peak(pair: Compared) -> list[str]:
    parts = parts_of_peak(pair)
    made_of = f": {made_up(parts)} at the peak" if parts else ""
    by = next((change.difference for change in pair.moved if change.metric == "peak_bytes"), None)
    if by:
        return [f"peak_bytes {'grew' if by > 0 else 'shrank'} by {show_bytes(abs(by))}{made_of}"]
    return [f"peak_bytes did not move and is made up differently{made_of}"] if parts else []


def parts_of_peak(pair: Compared) -> list[tuple[str, float]]:
    """Returns the categories whose share of the peak has changed, each with its difference in bytes."""
    return [(one.metric.removeprefix("peak_").removesuffix("_bytes"), one.difference or 0) for one in pair.at_peak]


def made_up(parts: Sequence[tuple[str, float]]) -> str:
    """Formats differences by category, the largest first: "gradients +1.0 MiB, inputs −512 B"."""
    return ", ".join(f"{name} {signed(by)}" for name, by in sorted(parts, key=lambda part: -abs(part[1])))


def _rough(pair: Compared) -> list[str]:
    lines = []
    for change in pair.rough:
        if change.relative is None:
            continue
        verdict = f"noise, below {100 * ROUGH_NOISE:.0f} %" if abs(change.relative) < ROUGH_NOISE else "moved"
        shown = (
            f"{change.metric} {show_bytes(change.a or 0)} → {show_bytes(change.b or 0)} ({percent(change.relative)})"
        )
        lines.append(f"{shown}: {verdict}; the system's figure is not exact")
    return lines


def _losses(pair: Compared) -> list[str]:
    if pair.loss_refused:
        return [f"losses {NOT_COMPARABLE}: {'; '.join(pair.loss_refused)}"]
    return [
        f"{change.metric} is equal to the bit"
        if change.a == change.b
        else f"{change.metric} is {change.a} in A and {change.b} in B, a difference of {change.difference or 0:+.3g}"
        for change in pair.losses
    ]


def _times(pair: Compared) -> list[Part]:
    if pair.time_refused:
        return [f"times {NOT_COMPARABLE}: {'; '.join(pair.time_refused)}"]
    header = ["times", "A ms", "B ms", "ratio B/A", "95 % interval", "least effect", "verdict"]
    step = pair.effects[0]
    ours, theirs = (side.row["tokens_per_s"] for side in (pair.a, pair.b))
    rates = f"{counted([pair.a.row['sequence']])}/s {ours:.0f} → {theirs:.0f} ({percent(theirs / ours - 1)})"
    return [
        Grid(header, [_effect(effect) for effect in pair.effects]),
        f"{rates}: {step.verdict}",
        _launches(pair),
        *(f"noise floor: of {floor.title}" for floor in pair.floors),
        *([] if pair.floors else [NO_FLOOR]),
    ]


def _effect(effect: Effect) -> list[str]:
    shown = [f"{effect.a * 1000:.2f}", f"{effect.b * 1000:.2f}", f"{effect.ratio:.3f}", interval(effect) or "–"]
    return [effect.metric, *shown, f"{100 * effect.threshold:.1f} %", effect.verdict]


def interval(effect: Effect) -> str:
    """Formats the interval of a ratio: "0.981–1.024"; empty if there is none."""
    return "" if effect.low is None or effect.high is None else f"{effect.low:.3f}–{effect.high:.3f}"


def _launches(pair: Compared) -> str:
    count = len(pair.pairs)
    words = f"{count} pair{'s' * (count != 1)} of launches"
    pairs = list(pair.pairs)
    if same_runs(pairs):
        return f"{words}: the same on both sides"
    if count == 1:
        return ONE_PAIR
    return f"{words}, interleaved{_power(pairs)}" if interleaved(pairs) else f"{words}, {DRIFT}; {IN_TURNS}"


def _power(pairs: list[Pair]) -> str:
    """Reports the effect that this many pairs detect, and how many pairs would detect the smallest relevant effect."""
    found, needed = detectable(pairs), pairs_needed(pairs, MINIMUM_EFFECT / 100)
    if found is None:
        return ""
    more = f"{MINIMUM_EFFECT:g} % needs {needed} pairs" if needed else f"{MINIMUM_EFFECT:g} % needs a quieter machine"
    return f": in 80 of 100 cases a change of {percent(found)} is found; {more}"


SHOWN = 8
"""Most lines of a table that a comparison lists."""

HEADER = {"peak": "lines of code at the peak", "growth": "lines of code that grow over the steps"}


def rows_of(at: str, a: Lines, b: Lines) -> list[list[str]]:
    """Returns a row per line that moved: line, bytes in A, in B, difference; none if a side has no lines.

    Lines beyond SHOWN are combined into one row, so that the differences add up to the table's total.
    """
    if at not in a or at not in b:
        return []
    moved = moved_lines(a[at], b[at])
    rows = [[_words(one), show_bytes(one.before), show_bytes(one.after), signed(one.difference)] for one in moved]
    left = moved[SHOWN:]
    if len(left) <= 1:
        return rows
    before, after = sum(one.before for one in left), sum(one.after for one in left)
    others = [f"{len(left)} other lines", show_bytes(before), show_bytes(after), signed(after - before)]
    return [*rows[:SHOWN], others]


def _words(one: MovedLine) -> str:
    return f"{one.line} ({one.about})" if one.about else one.line


def signed(size: float) -> str:
    """Formats a difference of bytes: "+1.0 MiB", "−512 B"."""
    return f"{'+' if size > 0 else '−' if size < 0 else ''}{show_bytes(abs(size))}"
