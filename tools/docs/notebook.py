"""Executes the tutorial notebook and writes it as a page, with the outputs of that run.

    python tools/docs/notebook.py          or: make notebook

In git the *notebook* has no outputs: they would change with each execution. The *page* beside it has the same cells,
as Markdown, with the outputs and figures of the execution that it was written by, and says when that was. Tests hold
that the page has today's cells, and execute the notebook.
"""

from __future__ import annotations

import base64
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[2]
NOTEBOOK = HERE / "docs/tutorials/notebook.ipynb"
PAGE, FIGURES = NOTEBOOK.with_suffix(".md"), NOTEBOOK.with_suffix("")

PARTS = re.compile(r"^<!-- (text|code) -->\n(.*?)\n<!-- end of \1 -->$", re.MULTILINE | re.DOTALL)
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
STYLE = re.compile(r"<style.*?</style>", re.DOTALL)
SCROLLED = re.compile(r'<div style="overflow-x:auto">(<table>.*?</table>)</div>', re.DOTALL)
TIMEOUT_S = 300


def main() -> int:
    import torch

    notebook, day = executed(read(NOTEBOOK)), datetime.now(UTC).date().isoformat()
    for old in FIGURES.glob("*.png"):
        old.unlink()
    said = f"Executed on {day} with torch {torch.__version__} on {len(os.sched_getaffinity(0))} cores."
    PAGE.write_text(page_of(notebook, said, FIGURES))
    print(f"page: {PAGE.relative_to(HERE)}")
    return 0


def read(path: Path) -> Any:
    import nbformat

    return nbformat.read(path, as_version=4)


def executed(notebook: Any, where: Path | None = None) -> Any:
    """Executes all cells in a kernel, in a folder of their own. Raises CellExecutionError for a cell that fails."""
    from nbclient import NotebookClient

    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": str(where or folder)}}
        NotebookClient(notebook, timeout=TIMEOUT_S, kernel_name="python3", resources=resources).execute()
    return notebook


def sources_on(page: str) -> list[tuple[str, str]]:
    """Returns kind and source of each cell that a page was written from."""
    return [(kind, re.sub(r"^```\w*\n|\n```$", "", source)) for kind, source in PARTS.findall(page)]


def page_of(notebook: Any, said: str, figures: Path) -> str:
    """Returns the page; writes figures as PNG into the folder `figures`, named by the method that draws them."""
    cells = []
    for cell in notebook["cells"]:
        source = shown = cell["source"].strip()
        kind = "code" if cell["cell_type"] == "code" else "text"
        if kind == "code":
            shown = f"```python\n{source}\n```"
        parts = [f"<!-- {kind} -->\n{shown}\n<!-- end of {kind} -->", *_outputs(cell, source, figures)]
        cells.append("\n\n".join(parts))
    link = f"[The notebook itself]({NOTEBOOK.name}) has no outputs: download it and run it. {said}"
    head = f"<!-- written by `make notebook` from {NOTEBOOK.name} -->"
    return "\n\n".join([head, cells[0], link, *cells[1:]]) + "\n"


def _outputs(cell: Any, source: str, figures: Path) -> Iterator[str]:
    """Yields the outputs of a cell as Markdown: text of one kind together, tables as HTML, figures as files."""
    text = ""
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        shown = _table(data.get("text/html", "")) or _figure(data.get("image/png", ""), source, figures)
        if shown:
            yield from (*_text(text), shown)
            text = ""
        else:
            text += ESCAPES.sub("", output.get("text") or data.get("text/plain", ""))
    yield from _text(text)


def _text(text: str) -> list[str]:
    return [f"```text\n{text.rstrip()}\n```"] if text.strip() else []


def _table(html: str) -> str:
    """Returns HTML that holds a table in the site's own style, without lines that end a block of Markdown."""
    if "<table" not in html:
        return ""
    plain = SCROLLED.sub(r"\1", re.sub(r"<table[^>]*>", "<table>", STYLE.sub("", html)))
    return "\n".join(line for line in plain.splitlines() if line.strip())


def _figure(png: str, source: str, figures: Path) -> str:
    if not png:
        return ""
    name = found[1] if (found := re.search(r"\.plot\.(\w+)", source)) else "figure"
    figures.mkdir(exist_ok=True)
    (figures / f"{name}.png").write_bytes(base64.b64decode(png))
    return f"![{name.replace('_', ' ')}]({figures.name}/{name}.png)"


if __name__ == "__main__":
    sys.exit(main())
