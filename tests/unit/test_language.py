"""Plain technical English: none of the patterns that a native reader reads twice.

Every finding is a line `file:line: word: text`, so that a failure reads as a list of what to mend.
"""

import re
import subprocess
from pathlib import Path

import pytest

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


@pytest.mark.slow
def test_no_pattern_that_is_read_twice() -> None:
    """In all that is written, on pages outside of generated blocks, and in the package outside of comments."""
    found = []
    for path in _tracked():
        name, text = str(path.relative_to(ROOT)), path.read_text()
        if name.startswith(DONE):
            found += patterns(name, text, PATTERNS)
        if name == "README.md" or name.startswith("docs/"):
            found += patterns(name, BLOCK.sub(lambda block: "\n" * block[0].count("\n"), text), ON_PAGES)
        if name.startswith("zerobench/") and path.suffix == ".py":
            found += patterns(name, re.sub("#.*", "", text), IN_PACKAGE)
    assert not found, "\n".join(found)


def patterns(name: str, source: str, wrong: dict[str, str]) -> list[str]:
    """Lines with a pattern of `wrong`, each with what to write instead."""
    return [
        f"{name}:{number}: {line} -> {instead}"
        for number, line in enumerate(source.splitlines(), 1)
        for pattern, instead in wrong.items()
        if re.search(pattern, line)
    ]


def _tracked() -> list[Path]:
    """Files that people write: the code, tests, configuration and documents, those of a wheel or a checkout alike."""
    kinds = ("*.py", "*.yaml", "*.md", "*.toml", "*.cpp", "Makefile")
    listed = subprocess.run(["git", "ls-files", *kinds], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    skipped = ("results/", "CHANGELOG.md")
    return [ROOT / name for name in listed.splitlines() if not name.startswith(skipped) and (ROOT / name).exists()]
