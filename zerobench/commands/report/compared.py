"""The page's part on two sets of runs: changes from A to B by category, their size, and whether they exceed noise.

All of it comes from the comparison of `zerobench compare` (judging/comparison.py), counted over the cells and drawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ...judging.comparison import Change, Compared, Comparison
from ...judging.paired import NOISE, UNJUDGED
from ...records import CATEGORIES
from ...results.grid import Grid
from ...results.markup import Bar, BarPart, Html, deltas, details, h, join, legend, parts
from ...sizes import show_bytes
from ..comparison_text import NOT_COMPARABLE, interval, made_up, parts_of_peak, passages, percent, signed, title
from .figures import MOST, exactly, key_to
from .settings import NAMED

NONE = "–"
WHY = {UNJUDGED: f"{UNJUDGED}, for launches were not in turns"}
"""Verdict on times -> the verdict with its reason."""
DIFFERING = 6
"""Differences of configs and origin that the summary lists."""


def summary(found: Comparison) -> Iterator[tuple[str, str]]:
    """Yields (question, answer) over all pairs of cells."""
    judged = [pair for pair in found.pairs if not pair.refused and not pair.failed]
    for metric, question in (
        ("peak_bytes", "Peak memory"),
        ("states_bytes", "Model states"),
        ("volume_psi", "Traffic"),
    ):
        yield question, _exact(judged, metric)
    yield "Time", _times(judged)
    if judged:
        yield "Losses", _losses(judged)
    if differs := Counter(words for pair in found.pairs for words in pair.differs):
        told = [
            f"{words} (in {number} of {len(found.pairs)} cells)" for words, number in differs.most_common(DIFFERING)
        ]
        yield "Differs", "; ".join(told) + f"; and {len(differs) - DIFFERING} more" * (len(differs) > DIFFERING)
    for pair in found.pairs:
        if pair.refused:
            yield "Not comparable", f"{title(pair)}: {'; '.join(pair.refused)}"
        for side, row in pair.failed.items():
            yield f"Failed in {side}", f"{title(pair)}: {row['status']}: {row['reason']}"
    for side, cells in (("A", found.only_a), ("B", found.only_b)):
        if cells:
            yield f"Only in {side}", ", ".join(cell.name for cell in cells)


def _change(pair: Compared, metric: str) -> Change | None:
    return next((change for change in pair.moved if change.metric == metric), None)


def _exact(pairs: Sequence[Compared], metric: str) -> str:
    moved = [(pair, change) for pair in pairs if (change := _change(pair, metric)) and change.difference is not None]
    if not pairs:
        return NOT_COMPARABLE
    if not moved:
        return f"equal, exactly, in {_all(len(pairs))}"
    words = []
    for grew, word in ((True, "grew"), (False, "shrank")):
        mine = [(pair, change) for pair, change in moved if ((change.difference or 0) > 0) is grew]
        if mine:
            pair, most = max(mine, key=lambda one: abs(one[1].difference or 0))
            words.append(f"{word} in {len(mine)} of {len(pairs)} cells, most in {title(pair)}: {_by(pair, most)}")
    return "; ".join(words)


def _all(count: int) -> str:
    return f"all {count} cells" if count > 1 else "the only cell"


def _by(pair: Compared, change: Change) -> str:
    share = "" if change.relative is None else f" ({percent(change.relative)})"
    if not change.metric.endswith("_bytes"):
        return f"{change.difference or 0:+.6f}{share}"
    parts_of = parts_of_peak(pair) if change.metric == "peak_bytes" else []
    return signed(change.difference or 0) + share + (f"; {made_up(parts_of)}" if parts_of else "")


def _times(pairs: Sequence[Compared]) -> str:
    groups: dict[str, list[str]] = {}
    for pair in pairs:
        if pair.effects:
            step = pair.effects[0]
            told = f"{title(pair)} × {step.ratio:.3f}" + (f" ({interval(step)})" if interval(step) else "")
            groups.setdefault(WHY.get(step.verdict, step.verdict), []).append(told)
        else:
            groups.setdefault(f"{NOT_COMPARABLE}: {'; '.join(pair.time_refused)}", []).append(title(pair))
    words = []
    for verdict in sorted(groups, key=lambda one: one == NOISE):
        words.append(f"{verdict} in {len(groups[verdict])} of {len(pairs)} cells{_named(verdict, groups[verdict])}")
    return "; ".join(words) or NOT_COMPARABLE


def _named(verdict: str, told: Sequence[str]) -> str:
    """Lists cells whose change in time is not noise, at most the first NAMED."""
    more = f" and {len(told) - NAMED} more" if len(told) > NAMED else ""
    return "" if verdict == NOISE else f": {', '.join(told[:NAMED])}{more}"


def _losses(pairs: Sequence[Compared]) -> str:
    known = [pair for pair in pairs if not pair.loss_refused]
    equal = [pair for pair in known if all(change.a == change.b for change in pair.losses)]
    if not known:
        return f"{NOT_COMPARABLE}: {'; '.join(dict.fromkeys(w for pair in pairs for w in pair.loss_refused))}"
    other = [title(pair) for pair in known if pair not in equal]
    return f"equal to the bit in {len(equal)} of {len(known)} cells" + (f"; not in {', '.join(other)}" if other else "")


def table(found: Comparison) -> Grid:
    """Returns a row per pair of cells: exact metrics with their difference, the ratio of steps with its verdict."""
    header = ["cell", "peak A", "peak B", "difference", "states B", "difference", "volume ψ B", "difference",
              "ratio of steps", "95 % interval", "verdict"]  # fmt: skip
    return Grid(header, [[title(pair), *_cells(pair)] for pair in found.pairs])


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
        return "unsteady" if any(words.startswith(f"{metric} ") for words in pair.unsteady) else "equal"
    if change.difference is None:
        return NONE
    return signed(change.difference) if metric.endswith("_bytes") else f"{change.difference:+.6f}"


def figures(found: Comparison) -> Html:
    """Builds the differences at the peak by category, and the ratios of steps, for the pairs that have them."""
    moved = [pair for pair in found.pairs if pair.at_peak]
    timed = [pair for pair in found.pairs if pair.effects]
    rows = [_delta(pair) for pair in moved[:MOST]]
    there = {piece.name for row in rows for piece in row.pieces}
    said = "at the peak from A to B, by category: to the right more, to the left less."
    names = [name for name in CATEGORIES if name in there]
    ratios = [_ratio(pair) for pair in timed[:MOST]]
    slower = "ratio of steps, B over A: to the right slower, to the left faster."
    drawn = [_figure("What moved", said, rows, len(moved), names)] * bool(moved)
    drawn += [_figure("Time", slower, ratios, len(timed), ["step"], key_to("whisker", "95 % interval"))] * bool(timed)
    return h("div", *drawn, class_="figures") if drawn else Html("")


def _figure(name: str, said: str, rows: Sequence[Bar], count: int, names: Sequence[str], *more: Html) -> Html:
    left = f" {MOST} of {count} cells are drawn; the table has all." if count > MOST else ""
    return h("figure", h("figcaption", h("b", name), f" {said}{left}"), deltas(rows, name), legend(names, *more))


def _ratio(pair: Compared) -> Bar:
    step = pair.effects[0]
    reach = None if step.low is None or step.high is None else (step.low - 1, step.high - 1)
    known = f"95 % interval {interval(step)}" if reach else "too few launches for an interval"
    told = f"{title(pair)}\nratio of steps {step.ratio:.3f}\n{known}\n{step.verdict}"
    text = f"× {step.ratio:.3f}, {step.verdict.split(':')[0]}"
    return Bar(title(pair), text, told, [BarPart("step", step.ratio - 1, told)], reach=reach)


def _delta(pair: Compared) -> Bar:
    sizes = parts_of_peak(pair)
    pieces = [BarPart(name, by, f"{title(pair)}\n{name} {_exactly(by)}") for name, by in sizes if by]
    total = sum(by for _, by in sizes)
    lines = [title(pair), f"at the peak {_exactly(total)}", *(f"{name} {_exactly(by)}" for name, by in sizes)]
    return Bar(title(pair), signed(total), "\n".join(lines), pieces)


def _exactly(by: float) -> str:
    return ("+" if by > 0 else "−" if by < 0 else "") + exactly(abs(int(by)))


def pairs(found: Comparison, light: int) -> Html:
    """Builds the comparison of each pair of cells as in `zerobench compare`, collapsed."""
    told = passages(found)
    return join(details(one.title, parts(one.parts), len(told) > light) for one in told)
