"""Writes the generated parts of README, CONTRIBUTING and docs/ into the files: tables, references, excerpts of code.

    python tools/docs/pages.py [--check]

A *block* of a page stands between `<!-- NAME: ... -->` and `<!-- end of NAME -->`. SOURCES in blocks.py says what makes
each of them: the committed tables, or the package itself. A block may be on several pages, and is on one at least. A
block whose name has arguments (`source FILE NAME`, `api NAME`, `output NUMBER`) is made by QUOTED.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.docs import blocks, questions, quoted

HERE = Path(__file__).resolve().parents[2]

BEGIN = re.compile(r"<!-- (\w+(?: [^\s:>]+)*): written by `make pages` -->")

QUOTED: dict[str, Callable[..., str]] = {"source": quoted.fenced, "api": quoted.entry, "output": questions.output}
"""First word of a block's name -> what makes it from the other words."""


def pages() -> list[Path]:
    """README, CONTRIBUTING and every page of docs/."""
    return [HERE / "README.md", HERE / "CONTRIBUTING.md", *sorted((HERE / "docs").rglob("*.md"))]


def rewritten(text: str, made: dict[str, str], depth: int = 0) -> str:
    """`text`, a page that lies `depth` folders below the repository's root, with every block made again.

    `made` keeps blocks from page to page. Raises ValueError for a block that is unknown or has no end.
    """
    for name in BEGIN.findall(text):
        word, *arguments = name.split()
        if word not in blocks.SOURCES and word not in QUOTED:
            raise ValueError(f"a page has a block {word}, which is none of {', '.join([*blocks.SOURCES, *QUOTED])}")
        begin, end = f"<!-- {name}: written by `make pages` -->", f"<!-- end of {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"a page must hold {begin} and {end} once each")
        if name not in made:
            made[name] = QUOTED[word](*arguments) if word in QUOTED else blocks.block(word)
        links = re.sub(r"\]\((results|zerobench|docs)/", lambda link: f"]({'../' * depth}{link[1]}/", made[name])
        block = f"{begin}\n\n{links}\n\n{end}"
        text = re.sub(f"{re.escape(begin)}.*{re.escape(end)}", lambda _, block=block: block, text, flags=re.DOTALL)
    return text


def outdated() -> dict[Path, str]:
    """Page -> what it should be, of the pages that are not. Raises ValueError if a block is on no page."""
    made: dict[str, str] = {}
    new = {}
    for page in pages():
        text = page.read_text()
        should = rewritten(text, made, len(page.relative_to(HERE).parts) - 1)
        if should != text:
            new[page] = should
    if missing := set(blocks.SOURCES) - set(made):
        raise ValueError(f"no page has the block {', '.join(sorted(missing))}")
    return new


def main() -> int:
    """Rewrites the pages; with --check only names those that would change. Exit code 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a block is out of date")
    chosen = parser.parse_args()
    new = outdated()
    for page, text in new.items():
        print(f"{'out of date' if chosen.check else 'written'}: {page.relative_to(HERE)}")
        if not chosen.check:
            page.write_text(text)
    return int(chosen.check and bool(new))


if __name__ == "__main__":
    sys.exit(main())
