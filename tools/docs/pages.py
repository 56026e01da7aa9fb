"""Writes the generated parts of README, CONTRIBUTING and docs/ into the files: tables, references, excerpts of code.

    python tools/docs/pages.py [--check]

A *block* of a page stands between `<!-- NAME: ... -->` and `<!-- end of NAME -->`. SOURCES says what makes each of
them: most are tables of committed rows, and have a template in blocks.md; rows that need more than the columns of a
summary are made in measured.py and predicted.py. A block may be on several pages, and is on one at least. A block whose
name has arguments (`source FILE NAME`, `api NAME`, `output NUMBER`) is made by QUOTED.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.docs import measured, predicted, quoted, references
from tools.docs.recorded import COMPARED, REFERENCE, RESULTS, cells, list_older, recorded
from tools.docs.render import render
from validation.certificates.command import CertificateCount
from validation.kernel_ulps import UlpsRow
from validation.predicted_maps import BreakEvenRow
from validation.store import read
from validation.update_traffic import TrafficRow
from validation.watch_cost import WatchCostRow
from zerobench.results.options import Parser

HERE = Path(__file__).resolve().parents[2]

# -- the table of blocks -----------------------------------------------------------------------------


def pasted(name: str) -> str:
    """A file below results/ that is Markdown already."""
    return (RESULTS / name).read_text().rstrip()


CELLS = {
    "stages": (REFERENCE / "stages",), "stage_bytes": (REFERENCE / "stages",), "tiling": (REFERENCE / "tiling",),
    "infinity": (REFERENCE / "infinity", "psi"), "partition": (REFERENCE / "partition", "strategy"),
    "muon": (REFERENCE / "muon",), "save": (REFERENCE / "save", "strategy", "world_size"),
    "lora": (REFERENCE / "lora", "started"), "peer_bytes": (COMPARED / "compare",),
    "peer_volume": (COMPARED / "compare",),
}  # fmt: skip
"""Block whose rows are cells as they are -> their folder, and the columns that they are sorted by."""

ROWS: dict[str, tuple[str, type]] = {
    "map_break_even": ("predicted_maps/break_even.csv", BreakEvenRow),
    "kernel_ulps": ("kernel_ulps.csv", UlpsRow),
    "update_traffic": ("update_traffic.csv", TrafficRow), "watch_cost": ("watch_cost.csv", WatchCostRow),
    "certificates": ("certificates/summary.csv", CertificateCount),
}  # fmt: skip
"""Block whose rows are those of a file as they are -> the file and its kind of row."""

GPU_SECTIONS = {
    "gpu_largest": ("largest", "cell", "layers × hidden", "ψ", "predicted need", "peak", "allocated"),
    "gpu_speed": ("speed", "cell", "step ms", "over DDP", "tokens/s", "MFU", "allocated", "last loss"),
    "gpu_tiers": ("tiers", "what", "kept", "paper", "step ms", "allocated", "pinned"),
    "gpu_bus": ("bus", "size", "up GB/s", "down GB/s", "both GB/s", "best of the raw rate"),
}
"""Block -> a section of the GPU suite's summary, and its columns."""


def is_block(module: Any, value: Any) -> bool:
    """True for a public function of the module that needs no argument: it is named as its block."""
    if not inspect.isfunction(value) or value.__module__ != module.__name__ or value.__name__.startswith("_"):
        return False
    return all(parameter.default is not parameter.empty for parameter in inspect.signature(value).parameters.values())


SOURCES: dict[str, Callable[[], Any]] = {
    **{name: partial(cells, *folder) for name, folder in CELLS.items()},
    **{
        name: make
        for module in (measured, predicted, references)
        for name, make in vars(module).items()
        if is_block(module, make)
    },
    **{name: partial(predicted.gpu_section, *section) for name, section in GPU_SECTIONS.items()},
    **{name: partial(read, RESULTS / path, kind) for name, (path, kind) in ROWS.items()},
    "compare": partial(pasted, "compare/cpu/ratios.md"),
    "published": partial(pasted, "published/published.md"),
}
"""Block -> what makes its Markdown, or the rows of its template."""

EXPERIMENT = {"stage_bytes": "stages", "stage_traffic": "stages", "compile_blocks": "compile"}
"""Block -> the experiment that its runs are of, if the block has another name."""


def block(name: str) -> str:
    """Returns the Markdown of a block. That of an experiment ends with the date and the commit of its runs."""
    made = SOURCES[name]()
    text = made if isinstance(made, str) else render(name, made)
    experiment = EXPERIMENT.get(name, name)
    is_dated = (REFERENCE / experiment).is_dir()
    return f"{text}\n\n{recorded(experiment)}" if is_dated else text


# -- the pages ---------------------------------------------------------------------------------------

BEGIN = re.compile(r"<!-- (\w+(?: [^\s:>]+)*): written by `make pages` -->")

QUOTED: dict[str, Callable[..., str]] = {"source": quoted.fenced, "api": quoted.entry, "output": quoted.output}
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
        if word not in SOURCES and word not in QUOTED:
            raise ValueError(f"a page has a block {word}, which is none of {', '.join([*SOURCES, *QUOTED])}")
        begin, end = f"<!-- {name}: written by `make pages` -->", f"<!-- end of {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"a page must hold {begin} and {end} once each")
        if name not in made:
            made[name] = QUOTED[word](*arguments) if word in QUOTED else block(word)
        links = re.sub(r"\]\((results|zerobench|docs)/", lambda link: f"]({'../' * depth}{link[1]}/", made[name])
        whole = f"{begin}\n\n{links}\n\n{end}"
        text = re.sub(f"{re.escape(begin)}.*{re.escape(end)}", lambda _, whole=whole: whole, text, flags=re.DOTALL)
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
    if missing := set(SOURCES) - set(made):
        raise ValueError(f"no page has the block {', '.join(sorted(missing))}")
    return new


def main() -> int:
    """Rewrites the pages, and lists the tables that older code recorded. With --check only names the pages that would
    change. Returns 1 if there are any.
    """
    parser = Parser("tools/docs/pages.py", __doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a block is out of date")
    chosen = parser.parse_args()
    new = outdated()
    for page, text in new.items():
        print(f"{'out of date' if chosen.check else 'written'}: {page.relative_to(HERE)}")
        if not chosen.check:
            page.write_text(text)
    list_older()
    return int(chosen.check and bool(new))


if __name__ == "__main__":
    sys.exit(main())
