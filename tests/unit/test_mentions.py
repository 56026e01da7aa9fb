"""Files that docstrings, comments and documents name are there: a move that forgets a mention is found."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
MENTION = re.compile(r"(?<![\w./{*<-])[\w/]+\.py\b")
OF_USERS = {"tests/test_memory.py", "mine.py", "train.py", "model.py", "test_memory.py", "shard.py", "resume.py"}
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
    pages = [
        *(ROOT / "conf").rglob("*.yaml"),
        *ROOT.glob("[RC]*.md"),
        *(ROOT / "docs").rglob("*.md"),
        ROOT / "Makefile",
    ]
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
