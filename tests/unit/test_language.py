"""Plain technical English: none of the patterns that a native reader reads twice, and torch's spelling.

Every finding is a line `file:line: word: text`, so that a failure reads as a list of what to mend.
"""

import ast
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zerobench import initialize

ROOT = Path(__file__).resolve().parents[2]

DONE = (
    "zerobench/", "analysis/", "tools/", "examples/", "validation/", "docs/", "README.md", "CONTRIBUTING.md",
    "SECURITY.md"
)  # fmt: skip
"""Folders whose sentences are held to the rules; the tests' own are not yet."""

PATTERNS: dict[str, str] = {
    r'^\s*"""(Of|Those)\b': "name the thing: Size of a figure, in inches",
    r"\banew\b": "again",
    r", say[,.;)]|\(say [a-z]|, say\)": "for example, such as",
    r"\b(\w+) of (ours|yours|theirs)\b": "our, your, their, or a built-in one",
    r"\b(those|that) of (those|these|which)\b": "repeat the noun",
    r"\bpip3? install (-\S+ )*[\"']?zerobench(?![\w.-])": "zerobench on the package index is another project",
}
"""Patterns that a native reader reads twice -> what to write instead."""

ON_PAGES: dict[str, str] = {
    r"\b(is|are|ends?|ended|refused|ends the \w+) (in|with) (a|one) sentence\b|\bin sentences\b": "an error message",
    r"\bmended\b": "fixed",
    r"\b(is|are) (not )?there\b(?! (a|an|no|any|for|to|already)\b)": "exists, is present",
    r"\bheld against\b": "compared with",
    r"\bless (the|a|half|its|those) \w+('s)?( \w+)?[,.;]": "minus",
    r"\b(Hydra|Optuna)'s\b(?! (plugin|sweepers?|submitit))": "a Hydra sweeper, a Hydra launcher",
    r"\bwhat (differs|binds|moved|fails|follows|belongs)\b": "the noun: the cells that fit, the difference",
    r"\b(of|in|with) what (is|was|has|it|they) ": "the noun",
    r"\bexecuted (cells?|states?|on fake)\b": "simulated on fake tensors",
    r"\btells? (of|its|nothing|no|apart)\b|\btold (apart|of)\b": "report, distinguish",
}
"""Patterns for README and docs/, outside of generated blocks -> what to write instead."""

IN_PACKAGE: dict[str, str] = {
    r"\b(True|False|None|NaN|[Ee]mpty|Raise[sd]|[A-Z]\w*Error),? where\b": "if",
    r"\b(held against|to be held to)\b": "compared with",
    r"\b[Ee]xecuted on fake\b|\bnot executed\b": "simulated on fake tensors",
    r"\bof Hydra's\b(?! config)": "a Hydra sweeper, a Hydra launcher, a Hydra key",
    r"\b(with|in) (a|one) sentence\b|Error, (a|one) sentence\b|\bReturns a sentence (for|if)\b": "an error message",
    r"\bless what\b": "without, minus",
    r"\bgo(es)? on where (it|he|they)\b": "resumes",
    r"\b(is|are|was) there (already|twice)\b": "exists, is given twice",
}
"""Patterns for the texts of the package that people see: messages, helps, docstrings -> what to write instead."""

BLOCK = re.compile(r"<!-- ([^:\n]+): written by.*?<!-- end of \1 -->", re.DOTALL)

BRITISH = re.compile(
    r"("
    r"(synchron|material|quant|initial|optim|normal|serial|recogn|organ|util|minim|maxim|summar|parallel|vector|random"
    r"|special|general|categor|standard|custom|final|prior|visual|discret|capital|orthogonal|util)is(e[drs]?|ing|ation|able)s?"
    r"|behaviour|colour|favour|flavour|honour|neighbour|grey|(label|cancel|model|travel|signal|level|total)l(ed|ing)"
    r"|catalogue|centre|licence|judgement|acknowledgement|analyse[ds]?|whilst|learnt"
    r")(?![a-z])",
    re.IGNORECASE,
)

BRITISH_ON_PURPOSE = {
    "zerobench/zero/parameters/meta_init.py": 'getattr(model, "initialisers", None)',
    "tests/unit/test_language.py": "",
}
"""File -> what stands in a line that may be so: models of users have a method of that name; this list."""


@pytest.mark.slow
def test_no_pattern_that_is_read_twice() -> None:
    """In all that is written, on pages outside of generated blocks, and in the strings of the package."""
    found = []
    for path in _tracked():
        name, text = str(path.relative_to(ROOT)), path.read_text()
        if name.startswith(DONE):
            found += patterns(name, text, PATTERNS)
        if name == "README.md" or name.startswith("docs/"):
            found += patterns(name, BLOCK.sub(lambda block: "\n" * block[0].count("\n"), text), ON_PAGES)
        if name.startswith("zerobench/") and path.suffix == ".py":
            for line, words in texts(text):
                found += patterns(name, words, IN_PACKAGE, line)
    assert not found, "\n".join(found)


@pytest.mark.slow
def test_spelling_is_that_of_torch() -> None:
    lines = [
        (str(path.relative_to(ROOT)), number, line.strip())
        for path in _tracked()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if BRITISH.search(line)
    ]
    found = [f"{name}:{n}: {line}" for name, n, line in lines if BRITISH_ON_PURPOSE.get(name, "no line") not in line]
    assert not found, "\n".join(found)


def test_the_british_name_of_a_models_initializers_is_still_read() -> None:
    """A model written for an older release, built on meta, gets the values that its own steps give it."""

    class Model(nn.Linear):
        def initialisers(self) -> Iterator[tuple[nn.Module, Callable[[nn.Module], Any]]]:
            yield self, lambda module: nn.init.constant_(module.weight, 3.0)

    with torch.device("meta"):
        model = Model(2, 2)
    engine = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "zero1")
    assert (engine.full_state_dict()["weight"] == 3.0).all()


def patterns(name: str, source: str, wrong: dict[str, str], first: int = 1) -> list[str]:
    """Lines with a pattern of `wrong`, each with what to write instead."""
    return [
        f"{name}:{number}: {line} -> {instead}"
        for number, line in enumerate(source.splitlines(), first)
        for pattern, instead in wrong.items()
        if re.search(pattern, line)
    ]


def texts(source: str) -> list[tuple[int, str]]:
    """Docstrings and other strings of several words, each with its line; comments are for those who read the code."""
    tree = ast.parse(source)
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            words = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            words = node.value
        else:
            continue
        if " " in words.strip():
            found.append((node.lineno, words))
    return found


def _tracked() -> list[Path]:
    """Files that people write: the code, tests, configuration and documents, those of a wheel or a checkout alike."""
    kinds = ("*.py", "*.yaml", "*.md", "*.toml", "*.cpp", "Makefile")
    listed = subprocess.run(["git", "ls-files", *kinds], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    skipped = ("results/", "CHANGELOG.md")
    return [ROOT / name for name in listed.splitlines() if not name.startswith(skipped) and (ROOT / name).exists()]
