"""Figures as PGF, which a document in LaTeX sets in its own font, written where no TeX is installed.

matplotlib's backend asks a running LaTeX how wide every text is, to lay a figure out. Here the widths of matplotlib's
own font are taken for it, which is wider than Computer Modern: no text leaves its place when the document sets it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.backends.backend_pgf import RendererPgf
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties

SIGNS = {
    "_": r"\_", "#": r"\#", "&": r"\&", "–": "--", "ψ": r"\ensuremath{\psi}", "×": r"\ensuremath{\times}",
    "÷": r"\ensuremath{\div}", "·": r"\ensuremath{\cdot}", "≥": r"\ensuremath{\geq}", "≤": r"\ensuremath{\leq}",
    "…": r"\ldots{}",
}  # fmt: skip
"""Signs that pdfLaTeX does not take as they are, outside of formulas."""

HEAD = r"""%% \usepackage{pgf} and \input this file.
%% {caption}
\begingroup
\makeatletter
\providecommand{\mathdefault}[1]{#1}
\begin{pgfpicture}
\pgfpathrectangle{\pgfpointorigin}{\pgfqpoint{WIDEin}{HIGHin}}
\pgfusepath{use as bounding box, clip}
"""
TAIL = r"""\end{pgfpicture}
\makeatother
\endgroup
"""


class RendererWithoutTex(RendererPgf):
    """Measures text in matplotlib's font."""

    def __init__(self, figure: Figure, file: Any) -> None:
        super().__init__(figure, file)
        self._measure = RendererAgg(*figure.bbox.size, figure.dpi)

    def get_text_width_height_descent(self, s: str, prop: FontProperties, ismath: Any) -> tuple[float, float, float]:
        """Width, height and descent of a text, in dots."""
        return self._measure.get_text_width_height_descent(s, prop, ismath)

    def draw_text(self, gc: Any, x: float, y: float, s: str, *more: Any, **named: Any) -> None:
        """Writes a text for the document to set."""
        super().draw_text(gc, x, y, escaped(s), *more, **named)


def escaped(text: str) -> str:
    """A text with SIGNS written for LaTeX; formulas, between dollars, stay as they are."""
    parts = text.split("$")
    for place in range(0, len(parts), 2):
        parts[place] = "".join(SIGNS.get(sign, sign) for sign in parts[place])
    return "$".join(parts)


def write_pgf(figure: Figure, path: Path, caption: str) -> None:
    """Writes a figure as PGF, with its caption in a comment."""
    wide, high = figure.get_size_inches()
    head = HEAD.replace("{caption}", caption).replace("WIDE", f"{wide:f}").replace("HIGH", f"{high:f}")
    with path.open("w") as file:
        file.write(head)
        figure.draw(RendererWithoutTex(figure, file))
        file.write(TAIL)
