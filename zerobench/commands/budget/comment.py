"""Markdown of a budget's verdict and of its changes: a comment on a pull request, a step's summary.

A comment begins with a hidden *marker*, by which a bot finds its own comment and replaces it. Every text of a run or of
a budget file is escaped: names come from the pull request.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from pathlib import Path

from .changes import HEADER, Change
from .judge import Limit, show_value
from .report import Verdicts

MARKER = "<!-- zerobench budget check -->"
MARKER_OF_CHANGES = "<!-- zerobench budget record -->"
MOST_OF_COMMENT = 65_536
"""Characters that a comment on GitHub may have."""
MOST_OF_SUMMARY = 1_000_000
"""Bytes, less some, that a step's summary may have."""

CUT = "\n\n(cut: the whole account is in the log of the check)\n"

KINDS = {"regression": "worse", "missing": "missing", "unjudged": "not measured", "improvement": "better"}
"""Kinds of findings in words, the gravest first."""


def escaped(text: str) -> str:
    """Returns a text that Markdown shows as it is, in one line: no table, link, mention, HTML or code comes of it."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    shown = re.sub(r"([\\`*\[\]|~#!])", r"\\\1", html.escape(line, quote=False))
    shown = re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", shown)
    return shown.replace("@", "&#64;").replace("://", ":&#47;&#47;")


def grid(header: Sequence[str], rows: list[list[str]]) -> list[str]:
    """Returns the lines of a Markdown table of plain texts."""
    ruler = "| " + " | ".join("---" for _ in header) + " |"
    return [_pipes(header), ruler, *map(_pipes, rows)]


def _pipes(cells: Sequence[str]) -> str:
    return "| " + " | ".join(escaped(cell) for cell in cells) + " |"


def folded(title: str, lines: list[str]) -> list[str]:
    """Returns lines that are shown when their title is clicked."""
    return [f"<details><summary>{escaped(title)}</summary>", "", *lines, "", "</details>", ""] if lines else []


def fitted(body: list[str], most: int) -> str:
    """Joins the lines of a body, with as many as fit; an open fold is closed."""
    text = "\n".join(body) + "\n"
    if len(text) <= most and len(text.encode()) <= most:
        return text
    kept: list[str] = []
    left = most - len(CUT) - len("\n</details>")
    for line in body:
        left -= len(line.encode()) + 1
        if left < 0:
            break
        kept.append(line)
    is_open = sum("<details>" in line for line in kept) > sum("</details>" in line for line in kept)
    return "\n".join(kept) + "\n" + "\n</details>" * is_open + CUT


def verdict(verdicts: Verdicts) -> str:
    """Returns the verdict in words: "3 worse, 1 better", or "every limit holds"."""
    kinds = [one.kind for one in verdicts.findings]
    words = [f"{kinds.count(kind)} {word}" for kind, word in KINDS.items() if kind in kinds]
    return ", ".join(words) or ("every limit holds" if verdicts.judged else "nothing was judged")


def check_body(verdicts: Verdicts) -> list[str]:
    """Returns the Markdown of a check: the verdict, a table of what moved, lines of code and sentences folded."""
    found = sorted(verdicts.findings, key=lambda one: list(KINDS).index(one.kind))
    body = [MARKER, f"### Memory and traffic: {verdict(verdicts)}", ""]
    body += [f"{verdicts.held} of {len(verdicts.judged)} limits hold.", ""]
    rows = []
    for one in found:
        limit, value = verdicts.measured.get((one.cell, one.metric), (None, 0.0))
        kind = KINDS[one.kind]
        if limit is None:
            rows.append([kind, one.cell, one.metric or "–", "–", "–", "–"])
            continue
        by = value - limit.value
        signed = f"{'+' if by > 0 else '−'}{show_value(one.metric, abs(by))}"
        rows.append([kind, one.cell, one.metric, _limit(one.metric, limit), show_value(one.metric, value), signed])
    if rows:
        body += [*grid(["", "cell", "metric", "limit", "now", "difference"], rows), ""]
    places = [
        f"- {escaped(one.cell)}, {escaped(one.metric)}: {escaped(p.sentence)}" for one in found for p in one.places
    ]
    body += folded("Lines of code that moved it", places)
    return [*body, *folded("In sentences", [f"- {escaped(one.kind)}: {escaped(one.sentence)}" for one in found])]


def _limit(metric: str, limit: Limit) -> str:
    tolerance = f" ± {limit.tolerance * 100:g} %" if limit.tolerance else ""
    return f"{limit.bound} {show_value(metric, limit.value)}{tolerance}".strip()


def write_check(path: Path, verdicts: Verdicts) -> None:
    """Writes the body of a comment on a check."""
    write(path, fitted(check_body(verdicts), MOST_OF_COMMENT))


def changes_body(file: str, changes: list[Change]) -> list[str]:
    """Returns the Markdown of a recording: each changed limit, what moved it, and the line."""
    if not changes:
        return [MARKER_OF_CHANGES, f"### Budget {escaped(file)}: no limit changes", ""]
    count = "1 limit changes" if len(changes) == 1 else f"{len(changes)} limits change"
    return [MARKER_OF_CHANGES, f"### Budget {escaped(file)}: {count}", "", *grid(HEADER, [one.row for one in changes])]


def write_changes(path: Path, file: str, changes: list[Change]) -> None:
    """Writes the account of a recording."""
    write(path, fitted(changes_body(file, changes), MOST_OF_COMMENT))


def write(path: Path, text: str) -> None:
    """Writes a report, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
