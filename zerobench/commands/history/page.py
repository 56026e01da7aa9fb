"""A page on a history: the steps, then a figure and tables per metric.

HTML is one file. Markdown has its figures beside it, since viewers of Markdown show no picture that is written into it.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

from .entries import History
from .figures import as_svg, draw, save
from .series import Series
from .tables import HEADER, INEXACT, markdown_table, rows, step_in_words, summary, title, unmoved

STYLE = """\
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: .5rem 0 1.5rem } td, th { padding: .15rem .6rem; text-align: left }
td:nth-child(4) { text-align: right; font-variant-numeric: tabular-nums } tr { border-bottom: 1px solid #ddd }
tr.step { background: #fff3d6; font-weight: 600 } tr.failed { background: #fbe3e0 }
svg { max-width: 100%; height: auto }
"""
STEPS = ["commit", "date", "subject", "metric and cell", "step"]


def write_page(path: Path, history: History, found: list[Series], steps_only: bool) -> None:
    """Writes the page, as HTML or Markdown by its suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    page = _html if path.suffix == ".html" else _markdown
    path.write_text("".join(page(path, history, found, steps_only)), encoding="utf-8")


def by_metric(found: list[Series]) -> dict[str, list[Series]]:
    """Groups series by their metric, in their order."""
    groups: dict[str, list[Series]] = {}
    for one in found:
        groups.setdefault(one.metric, []).append(one)
    return groups


def _says_something(mine: list[Series]) -> bool:
    """Returns False where every value of a metric is 0, as traffic is that of a single rank."""
    return any(point.value or point.value is None for one in mine for point in one.points)


def _steps(history: History, found: list[Series]) -> list[list[str]]:
    """Returns a row per step of any series, in the order of the commits, the newest first."""
    place = {entry.commit.hash: number for number, entry in enumerate(history.entries)}
    steps = [(point, one) for one in found for point in one.steps]
    steps.sort(key=lambda step: -place[step[0].entry.commit.hash])
    return [
        [
            p.entry.commit.short,
            p.entry.commit.date[:10],
            p.entry.commit.subject,
            title(one),
            step_in_words(p, one.metric),
        ]
        for p, one in steps
    ]


def _markdown(path: Path, history: History, found: list[Series], steps_only: bool) -> Iterator[str]:
    yield "# Figures over commits\n\n" + "\n".join(f"{words}  " for words in summary(history, found)) + "\n"
    if steps := _steps(history, found):
        yield f"\n## Steps\n\n{markdown_table(STEPS, steps)}"
    folder = path.parent / f"{path.stem}_figures"
    for metric, mine in by_metric(found).items():
        yield f"\n## {metric}\n"
        if _says_something(mine):
            save(draw(mine, history.entries), folder / f"{metric}.png")
            yield f"\n![{metric} over commits]({folder.name}/{metric}.png)\n"
        for one in mine:
            if words := unmoved(one):
                yield f"\n{one.cell}: {words}\n"
                continue
            yield f"\n### {one.cell}\n\n" + markdown_table(HEADER, rows(one, steps_only))
            yield "" if one.exact else f"\n{INEXACT}\n"


def _html(path: Path, history: History, found: list[Series], steps_only: bool) -> Iterator[str]:
    yield '<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>Figures over commits</title>\n'
    yield f"<style>\n{STYLE}</style>\n"
    yield "<h1>Figures over commits</h1>\n" + "".join(f"<p>{escape(words)}</p>\n" for words in summary(history, found))
    if steps := _steps(history, found):
        yield f"<h2>Steps</h2>\n{_table(STEPS, steps)}"
    for metric, mine in by_metric(found).items():
        yield f"<h2>{escape(metric)}</h2>\n"
        yield as_svg(draw(mine, history.entries)) if _says_something(mine) else ""
        for one in mine:
            if words := unmoved(one):
                yield f"<p>{escape(one.cell)}: {words}</p>\n"
                continue
            yield f"<h3>{escape(one.cell)}</h3>\n{_table(HEADER, rows(one, steps_only))}"
            yield "" if one.exact else f"<p>{INEXACT}</p>\n"
    yield "</html>\n"


def _table(header: list[str], lines: list[list[str]]) -> str:
    def row(cells: list[str]) -> str:
        kind = "step" if cells[-1] else "failed" if ": " in cells[3] and cells[0] != "…" else ""
        return f'<tr class="{kind}">' + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>\n"

    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    return f"<table><tr>{head}</tr>\n{''.join(map(row, lines))}</table>\n"
