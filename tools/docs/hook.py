"""Files outside of docs/ that its pages link to, in the site that mkdocs builds; mkdocs.yml names this file.

These links work on a forge as they are. In the site figures are copied, and each text file that is linked becomes a
page under source/.
"""

from __future__ import annotations

import os.path
import re
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename

HERE = Path(__file__).resolve().parents[2]

LINK = re.compile(r"\]\((\.\./[^)#\s]+)(#[^)\s]*)?\)")
STYLE = "body {font-family: sans-serif; margin: 2em} pre {line-height: 1.35}"


@cache
def markdown_of(uri: str) -> str:
    """The text of a page of docs/."""
    return (HERE / "docs" / uri).read_text()


def outside(uri: str, link: str) -> str | None:
    """The path below the repository's root that `link` on the page `uri` leads to, if that is outside of docs/."""
    path = os.path.normpath(PurePosixPath("docs") / PurePosixPath(uri).parent / link)
    return None if path.startswith("docs/") else path


def in_site(path: str) -> str:
    """The uri in the site of a file that lies outside of docs/."""
    suffix = PurePosixPath(path).suffix
    return path if suffix in (".png", ".svg") else f"source/{path}" + ".html" * (suffix != ".md")


def on_files(files: Files, config: Any) -> Files:
    """Adds figures and linked files."""
    linked = set()
    for file in files.documentation_pages():
        for found in LINK.finditer(markdown_of(file.src_uri)):
            if path := outside(file.src_uri, found[1]):
                linked.add(path)
    for path in sorted(linked):
        if not (HERE / path).is_file():
            raise ValueError(f"{path}: a page links to this file, and it does not exist")
        if in_site(path) == path:
            files.append(File.generated(config, path, abs_src_path=str(HERE / path)))
        else:
            files.append(File.generated(config, in_site(path), content=source_page(path)))
    return files


def source_page(path: str) -> str:
    """A text file of the repository: Markdown for a page that the search leaves out, else a whole HTML page."""
    text = (HERE / path).read_text()
    if path.endswith(".md"):
        return f"---\nsearch:\n  exclude: true\n---\n\n{text}"
    look = HtmlFormatter(lineanchors="L", linenos="inline", anchorlinenos=True)
    lexer = TextLexer() if path.endswith((".csv", ".txt")) else get_lexer_for_filename(path, text)
    code = highlight(text, lexer, look)
    head = f"<title>{path}</title><style>{STYLE}{look.get_style_defs()}</style>"
    return f'<!doctype html><html lang="en"><meta charset="utf-8">{head}<h1>{path}</h1>{code}</html>'


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """The page as mkdocs is to render it."""
    uri = page.file.src_uri
    if page.file.generated_by:
        return markdown

    def relinked(found: re.Match[str]) -> str:
        path = outside(uri, found[1])
        if path is None:
            return found[0]
        return f"]({os.path.relpath(in_site(path), str(PurePosixPath(uri).parent))}{found[2] or ''})"

    return LINK.sub(relinked, markdown_of(uri))


REMOTE = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=["']?(?:https?:)?//[^"'\s>]*""")


@event_priority(-200)  # after the plugin `offline`, which writes the search's index at -100
def on_post_build(config: Any) -> None:
    """Raises ValueError if a page would load something from a network: it is to open from the disk."""
    site = Path(config.site_dir)
    for page in site.rglob("*.html"):
        if found := [one for one in REMOTE.findall(page.read_text()) if 'rel="canonical"' not in one]:
            raise ValueError(f"{page.relative_to(site)}: loads {found[0]}, which is not of the site")
    if not (site / "search/search_index.js").is_file():
        raise ValueError("search/search_index.js: missing, so that a search from the disk finds nothing")
