"""The page: its parts in order, with embedded style and script.

Its policy forbids every request, so it can be opened from a disk and passed on safely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...results.markup import Html, h, join, patterns
from .runs import PageColumn, as_json

HERE = Path(__file__).parent
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"

SHORT = 60
"""Characters of a short answer."""


@dataclass(frozen=True)
class PagePart:
    """A part of the page under a heading, listed by `word` in the contents."""

    name: str
    word: str
    title: str
    inside: Html


def page(title: str, facts: Sequence[str], parts: Sequence[PagePart]) -> Html:
    """Builds the document."""
    links = [h("a", part.word, href=f"#{part.name}") for part in parts]
    sections = [h("section", h("h2", part.title), part.inside, id=part.name) for part in parts]
    head = h(
        "head",
        h("meta", charset="utf-8"),
        h("meta", http_equiv="Content-Security-Policy", content=POLICY),
        h("meta", name="viewport", content="width=device-width, initial-scale=1"),
        h("meta", name="color-scheme", content="light dark"),
        h("title", title),
        h("style", Html((HERE / "page.css").read_text(encoding="utf-8"))),
    )
    body = h(
        "body",
        h("a", "To the verdict", href="#verdict", class_="skip"),
        patterns(),
        h("header", h("h1", title), h("p", " · ".join(facts), class_="facts"), h("nav", *links, aria_label="Parts")),
        h("main", *sections),
        h("div", id="tip", role="tooltip", hidden=True),
        h("script", Html((HERE / "page.js").read_text(encoding="utf-8"))),
    )
    return Html("<!doctype html>\n" + h("html", head, body, lang="en") + "\n")


def answers(told: Sequence[tuple[str, str]]) -> Html:
    """Builds the questions of a verdict with their answers; the text before a colon is the short answer."""

    def shown(answer: str) -> Html:
        short, colon, rest = answer.partition(": ")
        return join([h("b", short), colon, rest, "."]) if colon and len(short) <= SHORT else join([answer, "."])

    return h("dl", *(h("div", h("dt", question), h("dd", shown(one))) for question, one in told), class_="verdict")


def runs_table(columns: Sequence[PageColumn], links: Sequence[str | None]) -> Html:
    """Builds the table of runs with its controls. `links`: the page's part on each run; None if it has none."""
    shown = [column for column in columns if column.shown]
    heads = [
        h("th", h("button", column.name, type="button", title=column.meaning), scope="col", aria_sort="none",
          class_="n" if column.is_number else None)
        for column in shown
    ]  # fmt: skip
    rows = [
        h("tr", *(_cell(column, place, links[place]) for column in shown)) for place in range(len(columns[0].values))
    ]
    counted = f"{len(rows)} of {len(rows)} runs"
    hint = "words, or conditions such as states_bytes<200e6 status=ok"
    return join([
        h("div",
          h("label", "Filter ", h("input", type="search", id="filter", placeholder=hint, aria_describedby="count")),
          h("span", counted, id="count", role="status"),
          h("details", h("summary", "Columns"), h("fieldset", h("legend", "Columns that are shown"), id="columns")),
          class_="controls"),
        h("div",
          h("table", h("thead", h("tr", *heads)), h("tbody", *rows), id="runs-table"),
          class_="box tall", role="region", tabindex=0, aria_label="Table of runs"),
        h("script", Html(as_json(columns)), type="application/json", id="data"),
    ])  # fmt: skip


def _cell(column: PageColumn, place: int, link: str | None) -> Html:
    text = column.texts[place]
    inside = h("a", text, href=f"#{link}") if column.name == "cell" and link else text
    return h("td", inside, class_="n" if column.is_number else None)
