"""Builds the site from docs/ into build/docs, without a network: `make docs`.

Pages link to files outside of docs/, as a forge shows them. The generator knows only the folder that it builds, so the
pages are built from a copy in build/pages: a linked figure is copied beside them, and a linked text file becomes a page
under source/.
"""

from __future__ import annotations

import os.path
import re
import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename

HERE = Path(__file__).resolve().parents[2]
PAGES = HERE / "build/pages"
SITE = HERE / "build/docs"

FIGURES = (".png", ".svg")

LINK = re.compile(r"\]\((?![a-z]+:)([^)#\s]+)(#[^)\s]*)?\)")
STYLE = "body {font-family: sans-serif; margin: 2em} pre {line-height: 1.35}"
REMOTE = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=["']?(?:https?:)?//[^"'\s>]*""")


def copy_pages() -> None:
    """Copies docs/ into PAGES, with the files outside of it that pages link to, directly or through one of these."""
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.copytree(HERE / "docs", PAGES)
    pending = [str(page.relative_to(HERE)) for page in (HERE / "docs").rglob("*.md")]
    written = set()
    while pending:
        path = pending.pop()
        if path not in written:
            written.add(path)
            pending += write_page(path)


def write_page(path: str) -> list[str]:
    """Writes a file of the repository into PAGES. Returns the paths of the files outside of docs/ that it links to."""
    target = PAGES / in_site(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.suffix in FIGURES:
        shutil.copy(HERE / path, target)
        return []
    text = (HERE / path).read_text()
    if target.suffix == ".html":
        target.write_text(as_html(path, text))
        return []
    linked: list[str] = []
    text = LINK.sub(lambda link: relink(link, PurePosixPath(path).parent, target.parent, linked), text)
    search = "" if path.startswith("docs/") else "---\nsearch:\n  exclude: true\n---\n\n"
    target.write_text(search + text)
    return linked


def relink(link: re.Match[str], folder: PurePosixPath, target: Path, linked: list[str]) -> str:
    """The link of a page of `folder` from its copy in `target`. Raises ValueError if a linked file is missing."""
    path = os.path.normpath(folder / link[1])
    if not (HERE / path).is_file():
        if link[1].startswith("../"):
            raise ValueError(f"{path}: a page of {folder} links to this file, and it does not exist")
        return link[0]  # the generator names a page that is missing
    if not path.startswith("docs/"):
        linked.append(path)
    return f"]({os.path.relpath(PAGES / in_site(path), target)}{link[2] or ''})"


def in_site(path: str) -> str:
    suffix = PurePosixPath(path).suffix
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return path if suffix in FIGURES else f"source/{path}" + ".html" * (suffix != ".md")


def as_html(path: str, text: str) -> str:
    """A text file as a whole page, with a link to each line."""
    look = HtmlFormatter(lineanchors="L", linenos="inline", anchorlinenos=True)
    lexer = TextLexer() if path.endswith((".csv", ".txt")) else get_lexer_for_filename(path, text)
    head = f'<meta charset="utf-8"><title>{path}</title><style>{STYLE}{look.get_style_defs()}</style>'
    return f'<!doctype html><html lang="en">{head}<h1>{path}</h1>{highlight(text, lexer, look)}</html>'


def check_site() -> None:
    """The site opens from the disk. Raises ValueError if a page loads from a network, or if the search has no index."""
    for page in SITE.rglob("*.html"):
        if remote := [tag for tag in REMOTE.findall(page.read_text()) if 'rel="canonical"' not in tag]:
            raise ValueError(f"{page.relative_to(SITE)}: loads {remote[0]}, which is not of the site")
    if not (SITE / "search.js").is_file():
        raise ValueError("search.js: missing, so that a search from the disk finds nothing")


if __name__ == "__main__":
    copy_pages()
    if code := subprocess.run([sys.executable, "-m", "zensical", "build", "--clean", "--strict"], cwd=HERE).returncode:
        sys.exit(code)
    check_site()
