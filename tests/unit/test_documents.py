"""README and docs/: links lead somewhere, names of code and paths exist, in code too; references are complete."""

import csv
import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from tools.docs import quoted, references
from tools.docs.pages import pages
from tools.docs.references import OTHER_SYSTEMS
from zerobench.config.compose import compose_cells
from zerobench.config.keys import GROUPS, KEYS

ROOT = Path(__file__).parents[2]
PAGES = [*pages(), ROOT / "SECURITY.md"]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
MADE = ("results/runs", "results/mlp", "results/calibration", "build/docs", "results/budgets/")
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


def wrong_links(page: Path, text: str) -> list[str]:
    """Links of `text`, on `page`, to files or headings that are not there."""
    wrong = []
    for link in LINK.findall(text):
        target, _, anchor = link.partition("#")
        file = page.parent / target if target else page
        there = target.startswith(("http:", "https:")) or file.exists()
        if not there or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            wrong.append(link)
    return wrong


def test_every_link_leads_to_a_file_and_a_heading_that_exist(page: Path) -> None:
    assert wrong_links(page, prose(page)) == []


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


CITED = re.compile(r"(zerobench/[\w/]+\.py)(?::(\d+))?(?: in ([\w.]+))?")


def wrong_citations(text: str) -> list[str]:
    """Citations of our code in `text` whose file, function or line is not there."""
    wrong = []
    for found in CITED.finditer(text):
        path, line, function = found.groups()
        lines = (ROOT / path).read_text().splitlines() if (ROOT / path).is_file() else []
        try:
            excerpt = quoted.excerpt(path, function) if function else "\n".join(lines)
        except ValueError:
            excerpt = ""
        here = lines[int(line) - 1].strip() if line and int(line) <= len(lines) else ""
        if not excerpt or (line and (not here or here not in excerpt)):
            wrong.append(found[0])
    return wrong


def test_code_that_a_page_cites_is_there(page: Path) -> None:
    assert wrong_citations(page.read_text()) == []


# -- references ----------------------------------------------------------------------------------------


def test_every_page_is_in_the_navigation() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = set(re.findall(r"([\w/-]+\.md)$", nav, re.MULTILINE))
    assert listed == {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}


def test_every_key_has_a_row_with_a_default_and_a_range() -> None:
    page = (ROOT / "docs/reference/keys.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if re.match(r"\| `[\w.]+` \|", line)]
    assert sorted(row[0].strip("| `") for row in rows) == sorted(KEYS)
    assert [row[0] for row in rows if not row[1] or not row[2].strip()] == []


def test_other_systems_names_belong_to_keys() -> None:
    with OTHER_SYSTEMS.open(newline="") as file:
        assert {row["key"] for row in csv.DictReader(file)} <= {*KEYS, *GROUPS}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_words_of_a_key_are_what_its_sentence_lists(strategy: str) -> None:
    """Several wrong words in one config; those that name the backend or belong to a stage in the other."""
    other = {"device", "strategy.reduce_with"}
    elsewhere = {"draw_on", "tensors", "measure.passes", "measure.save", "huggingface.loss", "model.routing"}
    worded = {key for key, one in KEYS.items() if one.words and one.limits is None} - elsewhere
    tried = sorted(worded & other if strategy == "zero1" else worded - other - {"backend"})
    (wrong,) = compose_cells([f"strategy={strategy}", "world_size=2", *(f"{key}=nonsense" for key in tried)])
    said = {problem.split("=")[0]: problem for problem in wrong.problems}
    for key in tried:
        assert all(re.search(rf"\b{word}\b", said[key].split("use ")[1]) for word in KEYS[key].words), said[key]


def test_every_package_and_module_says_what_it_is() -> None:
    page = (ROOT / "docs/reference/what-is-where.md").read_text()
    for path in (ROOT / "zerobench").rglob("*.py"):
        if not path.name.startswith("__"):
            assert f"](../../{name(path)}) | " in page, path
            assert len(references.said_of(path)) > 10, path


MENTION = re.compile(r"(?<![\w./{*<-])[\w/]+\.py\b")
OF_USERS = {
    "tests/test_memory.py",
    "mine.py",
    "train.py",
    "train_zero.py",
    "model.py",
    "test_memory.py",
    "shard.py",
    "resume.py",
}
"""Scripts of a reader's own, in examples; `zerobench plan` writes shard.py."""

RECORDED = re.compile(r"`[^`]*\.py:\d+ in [^`]*`")
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
