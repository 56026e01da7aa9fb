"""The page's part on two sets of runs: changes from A to B by category, their size, and whether they exceed noise.

All of it comes from the comparison of `zerobench compare` (budgets/comparison.py), counted over the cells and drawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ...budgets.comparison import NOISE, UNJUDGED, Change, Compared, Comparison
from ...results.grid import Grid
from ...results.markup import WIDTH, Bar, BarFigure, BarPart
from ...sizes import show_bytes
from ..compare import NOT_COMPARABLE, interval, made_up, parts_of_peak, percent, signed, title
from .settings import MOST, NAMED, exactly, undrawn

NONE = "–"
WHY = {UNJUDGED: f"{UNJUDGED}, for launches were not in turns"}
"""Verdict on times -> the verdict with its reason."""
DIFFERING = 6
"""Differences of configs and origin that the summary lists."""
QUESTIONS = {"peak_bytes": "Peak memory", "states_bytes": "Model states", "volume_psi": "Traffic"}
"""Exact metric -> its question in the summary."""


def summary(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """Yields (question, answer) over all pairs of cells."""
    judged = [pair for pair in comparison.pairs if not pair.refused and not pair.failed]
    for metric, question in QUESTIONS.items():
        yield question, _exact(judged, metric)
    yield "Time", _times(judged)
    if judged:
        yield "Losses", _losses(judged)
    if differs := Counter(difference for pair in comparison.pairs for difference in pair.differs):
        cells = f"of {len(comparison.pairs)} cells"
        shared = [f"{difference} (in {number} {cells})" for difference, number in differs.most_common(DIFFERING)]
        shared += [f"and {len(differs) - DIFFERING} more"] if len(differs) > DIFFERING else []
        yield "Differs", "; ".join(shared)
    for pair in comparison.pairs:
        if pair.refused:
            yield "Not comparable", f"{title(pair)}: {'; '.join(pair.refused)}"
        for side, row in pair.failed.items():
            yield f"Failed in {side}", f"{title(pair)}: {row['status']}: {row['reason']}"
    for side, only in (("A", comparison.only_a), ("B", comparison.only_b)):
        if only:
            yield f"Only in {side}", ", ".join(cell.name for cell in only)


def _change(pair: Compared, metric: str) -> Change | None:
    return next((change for change in pair.moved if change.metric == metric), None)


def _exact(pairs: Sequence[Compared], metric: str) -> str:
    if not pairs:
        return NOT_COMPARABLE
    changes = [(pair, change) for pair in pairs if (change := _change(pair, metric)) and change.difference is not None]
    if not changes:
        return f"equal, exactly, in {f'all {len(pairs)} cells' if len(pairs) > 1 else 'the only cell'}"
    answers = []
    for grew, word in ((True, "grew"), (False, "shrank")):
        group = [(pair, change) for pair, change in changes if ((change.difference or 0) > 0) is grew]
        if group:
            pair, most = max(group, key=lambda group_entry: abs(group_entry[1].difference or 0))
            answers.append(f"{word} in {len(group)} of {len(pairs)} cells, most in {title(pair)}: {_by(pair, most)}")
    return "; ".join(answers)


def _by(pair: Compared, change: Change) -> str:
    share = "" if change.relative is None else f" ({percent(change.relative)})"
    if not change.metric.endswith("_bytes"):
        return f"{change.difference or 0:+.6f}{share}"
    parts = parts_of_peak(pair) if change.metric == "peak_bytes" else []
    return signed(change.difference or 0) + share + (f"; {made_up(parts)}" if parts else "")


def _times(pairs: Sequence[Compared]) -> str:
    groups: dict[str, list[str]] = {}
    for pair in pairs:
        if pair.effects:
            step = pair.effects[0]
            ratio = f"{title(pair)} × {step.ratio:.3f}" + (f" ({interval(step)})" if interval(step) else "")
            groups.setdefault(WHY.get(step.verdict, step.verdict), []).append(ratio)
        else:
            groups.setdefault(f"{NOT_COMPARABLE}: {'; '.join(pair.time_refused)}", []).append(title(pair))
    answers = []
    for verdict, cells in sorted(groups.items(), key=lambda group: group[0] == NOISE):
        more = f" and {len(cells) - NAMED} more" if len(cells) > NAMED else ""
        named = "" if verdict == NOISE else f": {', '.join(cells[:NAMED])}{more}"
        answers.append(f"{verdict} in {len(cells)} of {len(pairs)} cells{named}")
    return "; ".join(answers) or NOT_COMPARABLE


def _losses(pairs: Sequence[Compared]) -> str:
    comparable = [pair for pair in pairs if not pair.loss_refused]
    if not comparable:
        return f"{NOT_COMPARABLE}: {'; '.join(dict.fromkeys(w for pair in pairs for w in pair.loss_refused))}"
    other = [title(pair) for pair in comparable if any(change.a != change.b for change in pair.losses)]
    equal = f"equal to the bit in {len(comparable) - len(other)} of {len(comparable)} cells"
    return equal + (f"; not in {', '.join(other)}" if other else "")


def table(comparison: Comparison) -> Grid:
    """Returns a row per pair of cells: exact metrics with their difference, the ratio of steps with its verdict."""
    header = ["cell", "peak A", "peak B", "difference", "states B", "difference", "volume ψ B", "difference",
              "ratio of steps", "95 % interval", "verdict"]  # fmt: skip
    return Grid(header, [[title(pair), *_cells(pair)] for pair in comparison.pairs])


def _cells(pair: Compared) -> list[str]:
    if pair.refused or pair.failed:
        return [NONE] * 9 + [NOT_COMPARABLE if pair.refused else "failed"]
    a, b = pair.a.row, pair.b.row
    shown = [show_bytes(a["peak_bytes"]), show_bytes(b["peak_bytes"]), _moved(pair, "peak_bytes")]
    shown += [show_bytes(b["states_bytes"]), _moved(pair, "states_bytes")]
    shown += [NONE if b["volume_psi"] is None else f"{b['volume_psi']:.3f}", _moved(pair, "volume_psi")]
    if not pair.effects:
        return [*shown, NONE, NONE, f"{NOT_COMPARABLE}: {'; '.join(pair.time_refused)}"]
    step = pair.effects[0]
    return [*shown, f"{step.ratio:.3f}", interval(step) or NONE, step.verdict]


def _moved(pair: Compared, metric: str) -> str:
    change = _change(pair, metric)
    if change is None:
        return "unsteady" if any(text.startswith(f"{metric} ") for text in pair.unsteady) else "equal"
    if change.difference is None:
        return NONE
    return signed(change.difference) if metric.endswith("_bytes") else f"{change.difference:+.6f}"


def difference_figures(comparison: Comparison) -> Iterator[BarFigure]:
    """Yields the differences at the peak by category, and the ratios of steps, of the pairs that have them."""
    moved, timed = [], []
    for pair in comparison.pairs:
        name = title(pair)
        if pair.at_peak:
            sizes = parts_of_peak(pair)
            total = sum(by for _, by in sizes)
            lines = [name, f"at the peak {_exactly(total)}", *(f"{part} {_exactly(by)}" for part, by in sizes)]
            parts = [BarPart(part, by, f"{name}\n{part} {_exactly(by)}") for part, by in sizes if by]
            moved.append(Bar(name, signed(total), "\n".join(lines), parts))
        if pair.effects:
            step = pair.effects[0]
            reach = None if step.low is None or step.high is None else (step.low - 1, step.high - 1)
            certainty = f"95 % interval {interval(step)}" if reach else "too few launches for an interval"
            tip = f"{name}\nratio of steps {step.ratio:.3f}\n{certainty}\n{step.verdict}"
            text = f"× {step.ratio:.3f}, {step.verdict.split(':')[0]}"
            timed.append(Bar(name, text, tip, [BarPart("step", step.ratio - 1, tip)], reach=reach))
    if moved:
        caption = "at the peak from A to B, by category: to the right more, to the left less."
        yield BarFigure("What moved", caption + undrawn(len(moved)), moved[:MOST], WIDTH / 2)
    if timed:
        caption = "ratio of steps, B over A: to the right slower, to the left faster."
        whisker = [("whisker", "95 % interval")]
        yield BarFigure("Time", caption + undrawn(len(timed)), timed[:MOST], WIDTH / 2, whisker)


def _exactly(by: float) -> str:
    return ("+" if by > 0 else "−" if by < 0 else "") + exactly(abs(int(by)))
