"""README and docs/: links lead somewhere; names of code and paths exist, in code too."""

import csv
import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from tools.docs.pages import pages
from tools.docs.references import OTHER_SYSTEMS
from zerobench.config.keys import GROUPS, KEYS

ROOT = Path(__file__).parents[2]
PAGES = [*pages(), ROOT / "SECURITY.md"]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
MADE = ("results/runs", "results/mlp", "results/calibration", "build/", "results/budgets/")
"""Paths that a reader's own commands make."""


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(params=PAGES, ids=name)
def page(request: pytest.FixtureRequest) -> Path:
    return request.param  # type: ignore[no-any-return]


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


# -- links ---------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ +(.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", head).lower()).strip().replace(" ", "-") for head in heads}


def test_every_link_leads_to_a_file_and_a_heading_that_exist(page: Path) -> None:
    wrong = []
    for link in LINK.findall(prose(page)):
        target, _, anchor = link.partition("#")
        file = page.parent / target if target else page
        there = target.startswith(("http:", "https:")) or file.exists()
        if not there or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            wrong.append(link)
    assert wrong == []


# -- code ----------------------------------------------------------------------------------------------


def test_python_on_a_page_compiles_and_its_names_of_ours_exist(page: Path) -> None:
    text = page.read_text()
    for language, block in FENCE.findall(text):
        if language == "python":
            compile(block, name(page), "exec")
    named = set(re.findall(r"(?<!\.)\bzerobench(?:\.\w+)+", " ".join(INLINE.findall(prose(page)))))
    named |= {
        n for language, b in FENCE.findall(text) if language == "python" for n in re.findall(r"\bzerobench\.[\w.]+", b)
    }
    assert [one for one in sorted(named) if not exists(one)] == []


def exists(dotted: str) -> bool:
    """True for a module below zerobench, or an attribute of one."""
    parts = dotted.rstrip(".").split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        return all(hasattr(found, part) and (found := getattr(found, part), True) for part in parts[cut:])
    return False


def test_every_path_on_a_page_exists(page: Path) -> None:
    paths = re.compile(r"(?:zerobench|analysis|tools/docs|tests|conf|examples|docs|results|build)/[\w./-]*")
    named = {code for code in INLINE.findall(prose(page)) if paths.fullmatch(code)}
    assert [one for one in sorted(named) if not (ROOT / one).exists() and not one.startswith(MADE)] == []


# -- references ----------------------------------------------------------------------------------------


def test_every_page_is_in_the_navigation() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = set(re.findall(r"([\w/-]+\.md)$", nav, re.MULTILINE))
    assert listed == {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}


def test_other_systems_names_belong_to_keys() -> None:
    with OTHER_SYSTEMS.open(newline="") as file:
        assert {row["key"] for row in csv.DictReader(file)} <= {*KEYS, *GROUPS}


MENTION = re.compile(r"(?<![\w./{*<-])[\w/]+\.py\b")
OF_USERS = {
    "tests/test_memory.py", "mine.py", "train.py", "train_zero.py", "model.py", "test_memory.py", "shard.py",
    "resume.py",
}  # fmt: skip
"""Scripts of a reader's own, in examples; `zerobench plan` writes shard.py."""

RECORDED = re.compile(r"[\w/]+\.py(:\d+)? in\b")
"""Lines of code as a committed run recorded them; later code may have moved them."""

OF_OTHERS = {"pretrain_gpt.py", "megatron/training/arguments.py"}
"""Files of Megatron-LM."""


def test_every_file_that_is_named_is_there() -> None:
    code = [
        path
        for folder in ("zerobench", "validation", "analysis", "tools/docs", "examples", "requirements", "tests")
        for path in (ROOT / folder).rglob("*.py")
    ]
    pages = [ROOT / "Makefile", *ROOT.glob("[RC]*.md"), *(ROOT / "docs").rglob("*.md")]
    pages += (ROOT / "conf").rglob("*.yaml")
    found = {"/".join(path.relative_to(ROOT).parts[-n:]) for path in code for n in range(1, len(path.parts))}
    there = found | OF_USERS | OF_OTHERS
    named = {
        (mention, f"{path.relative_to(ROOT)}:{number}")
        for path in [*(p for p in code if p.parts[len(ROOT.parts)] != "tests"), *pages]
        if path.name != "CHANGELOG.md"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for mention in MENTION.findall(RECORDED.sub("", line))
    }
    assert sorted(where for mention, where in named if mention not in there) == []
