"""Elements of HTML and SVG. Text is escaped by default, so that nothing of a run's folder becomes markup.

*Html* is text that is markup already; every other object is shown as its text, control characters escaped.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from ...sizes import printable
from ..text_blocks import Grid, Part

VOID = ("meta", "input", "br", "rect", "line", "circle", "path", "use")
"""Elements without content."""


class Html(str):
    """Markup: it is not escaped again."""


def h(name: str, /, *inside: object, **attributes: object) -> Html:
    """Builds an element. `data_tip=` is the attribute data-tip, `class_=` is class; None and False leave one out."""
    words = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in VOID:
        return Html(f"<{name}{words}>" if name in ("meta", "input", "br") else f"<{name}{words}/>")
    return Html(f"<{name}{words}>{join(inside)}</{name}>")


def join(parts: Iterable[object], between: str = "") -> Html:
    """Concatenates parts, those escaped that are not markup."""
    return Html(between.join(part if isinstance(part, Html) else escape(_plain(part)) for part in parts))


def _attribute(key: str, value: object) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape(_plain(value))}"'


def _plain(value: object) -> str:
    return "\n".join(map(printable, str(value).split("\n")))


def grid(one: Grid, caption: str | None = None) -> Html:
    """Builds a table in a box that scrolls by itself: a wide table never widens the page."""

    def row(cells: list[str], kind: str) -> Html:
        return h("tr", *(h(kind, cell, class_=None if n < one.left else "n") for n, cell in enumerate(cells)))

    head = h("thead", row(one.header, "th"))
    body = h("tbody", *(row(cells, "td") for cells in one.rows))
    name = caption or f"table of {', '.join(filter(None, one.header))}"
    return h("div", h("table", head, body), class_="box", role="region", tabindex=0, aria_label=name)


def parts(told: Iterable[Part]) -> Html:
    """Builds paragraphs and tables of a passage's parts."""
    return join(grid(part) if isinstance(part, Grid) else h("p", part) for part in told)


def listing(lines: Iterable[object]) -> Html:
    """Builds lines of a log or of commands, as they are."""
    return h("pre", h("code", "\n".join(map(str, lines))), tabindex=0)


def details(summary: object, inside: Html, lazy: bool, **attributes: object) -> Html:
    """Builds a part that opens. `lazy`: its content is text until then, which costs a browser nothing."""
    held = h("script", Html(inside), type="text/html") if lazy else inside
    return h("details", h("summary", summary), held, **attributes)
