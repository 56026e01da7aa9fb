"""Fills in pages while mkdocs builds the site; mkdocs.yml names this file.

A page may hold `<!-- generated: NAME -->`, which becomes what GENERATED makes of today's schemas and docstrings, and
marks of excerpts (excerpts.py). Links from a page to files outside of docs/ work on a forge as they are; in the site
figures are copied, and each text file that is linked becomes a page under source/.
"""

from __future__ import annotations

import os.path
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from documents import commands, excerpts, keys, where
from zerobench.commands.columns import as_markdown
from zerobench.records.describe import ROWS, columns_of

HERE = Path(__file__).resolve().parents[1]

GENERATED: dict[str, Callable[[], str]] = {
    "keys": keys.page,
    "columns": lambda: as_markdown([column for table in ROWS for column in columns_of(table)]),
    "commands": commands.page,
    "where": where.everything,
}

MARK = re.compile(r"<!-- generated: (\w+) -->")
LINK = re.compile(r"\]\((\.\./[^)#\s]+)(#[^)\s]*)?\)")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".cpp": "cpp", ".csv": "text", "": "make"}


@cache
def markdown_of(uri: str) -> str:
    """A page of docs/ with what is generated filled in; links are still those of the file."""
    text = (HERE / "docs" / uri).read_text()
    return excerpts.expanded(MARK.sub(lambda found: GENERATED[found[1]](), text))


def outside(uri: str, link: str) -> str | None:
    """The path below the repository's root of what `link` on the page `uri` means, if that is outside of docs/."""
    path = os.path.normpath(PurePosixPath("docs") / PurePosixPath(uri).parent / link)
    return None if path.startswith("docs/") else path


def in_site(path: str) -> str:
    """The uri in the site of a file that lies outside of docs/."""
    return path if path.endswith((".png", ".svg")) else f"source/{path}.md"


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
    """A file of the repository as a page that the search leaves out."""
    text, suffix = (HERE / path).read_text(), PurePosixPath(path).suffix
    body = text if suffix == ".md" else f"# {path}\n\n````{LANGUAGES.get(suffix, 'text')}\n{text}\n````\n"
    return f"---\nsearch:\n  exclude: true\nhide: [navigation, toc]\n---\n\n{body}"


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
