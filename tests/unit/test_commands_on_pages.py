"""Commands on README's and docs/' pages parse: verbs by their own argparse, sweeps by the check of overrides."""

import argparse
import importlib
import importlib.util
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_documents import FENCE, INLINE, PAGES, ROOT, name
from zerobench.cli import VERBS
from zerobench.config.compose import RefusedError, check_line, make_composer
from zerobench.config.composer import Composer
from zerobench.config.flags import split_arguments, unknown_flags
from zerobench.config.keys import GROUPS, KEYS

PLACEHOLDER = re.compile(r"\b[A-Z]{3,}\b|\.\.\.")
"""In inline code: FILE, PATH, KEY=VALUE."""
VALUED = ("--where", "--tolerance", "--packages", "--python")
"""Options whose value looks like an override."""
SWEEP_ANYWAY = ("estimate", "plan", "predict")
"""Verbs whose overrides are a sweep's without -m."""
OF_READERS = ("mine.py", "train.py", "train_zero.py")
LAUNCHERS = ("srun", "mpirun", "watch", "torchrun")
SHELL = ("source", "patch", "pip", "cd", "git", "eval", "pytest", "fio", "rsync", "#")
"""What else a block of commands may begin with."""


class ParsedError(Exception):
    """argparse has accepted a command line; the command itself is not run."""


@pytest.fixture(scope="module", autouse=True)
def parse_only() -> Iterator[None]:
    """argparse parses, and what it was asked for stops there."""
    patch = pytest.MonkeyPatch()
    real = argparse.ArgumentParser.parse_known_args

    def parse_known_args(self: argparse.ArgumentParser, *arguments: Any, **named: Any) -> Any:
        found = real(self, *arguments, **named)
        if flags := [word for word in found[1] if word.startswith("-") and word not in ("-m", "--")]:
            self.error(f"unrecognized arguments: {flags}")
        raise ParsedError(found[1])

    def parse_args(self: argparse.ArgumentParser, *arguments: Any, **named: Any) -> Any:
        try:
            return parse_known_args(self, *arguments, **named)[0]
        except ParsedError as accepted:
            if accepted.args[0]:
                self.error(f"unrecognized arguments: {accepted.args[0]}")
            raise

    patch.setattr(argparse.ArgumentParser, "parse_known_args", parse_known_args)
    patch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    yield
    patch.undo()


def lines_of(page: Path) -> Iterator[str]:
    """Commands of the page's bash blocks, and inline ones without placeholders."""
    text = page.read_text()
    for language, block in FENCE.findall(text):
        if language in ("bash", "sh"):
            yield from filter(None, map(str.strip, block.replace("\\\n", " ").splitlines()))
    for code in INLINE.findall(FENCE.sub("", text)):
        is_command = code.startswith(("zerobench ", "make ")) and not PLACEHOLDER.search(code)
        if is_command and code.removeprefix("zerobench ") not in VERBS:  # a verb alone is only named
            yield code


@cache
def problem_of(line: str) -> str:
    """Why a command line would be refused; empty where it would not."""
    words = shlex.split(line.partition(" | ")[0], comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)
    if not words or words[0] in SHELL:
        return ""
    if words[0] in LAUNCHERS:
        if script := next((word for word in words if word.endswith(".py")), ""):
            return "" if is_script(script) else f"{script}: no such script"
        return problem_of(shlex.join(words[words.index("zerobench") :]) if "zerobench" in words else words[-1])
    if "zerobench" in words[: words.index("-m") + 2 if "-m" in words[1:] else 1]:
        return problem_of_arguments(words[words.index("zerobench") + 1 :])
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return " ".join(word for word in words[1:] if "=" not in word and word not in targets)
    if words[0] in ("python", "python3"):
        exists = is_script(words[1]) or (words[1] == "-m" and importlib.util.find_spec(words[2]) is not None)
        return "" if exists else f"{words[1]}: no such script"
    return f"{words[0]}: no such command"


def is_script(name: str) -> bool:
    return name in OF_READERS or (ROOT / name).is_file()


def problem_of_arguments(words: list[str]) -> str:
    """Returns the problem of `zerobench WORDS`."""
    if words and words[0] in VERBS:
        problem = parsed(lambda: importlib.import_module("zerobench.cli")._run(words))
        rest = words[words.index("--") + 1 :] if "--" in words else words
        overrides = [w for w, before in zip(rest, ["", *rest], strict=False) if is_override(w) and before not in VALUED]
        return problem or problem_of_overrides(overrides, "-m" in words or words[0] in SWEEP_ANYWAY)
    flags, overrides, dirs = split_arguments(words)
    if "--help" in flags:
        return "; ".join(word for word in overrides if word.partition("=")[0] not in {*GROUPS, *KEYS})
    return "; ".join(unknown_flags(flags)) or problem_of_overrides(overrides, "-m" in flags, dirs)


def is_override(word: str) -> bool:
    return re.match(r"[a-z_.]+=", word) is not None


def problem_of_overrides(overrides: list[str], multirun: bool, dirs: list[Path] | None = None) -> str:
    try:
        check_line(make_composer(dirs) if dirs else shared_composer(), overrides, multirun, list(VERBS))
    except RefusedError as refused:
        return "; ".join(one for one in refused.problems if "Could not find 'hydra/" not in one)  # a plugin is an extra
    return ""


@cache
def shared_composer() -> Composer:
    """One that has composed what it was asked for before."""
    return make_composer([])


def parsed(run: Any) -> str:
    """Empty where argparse accepts it; what it says else."""
    try:
        run()
    except ParsedError:
        return ""
    except SystemExit as stop:
        return "" if stop.code == 0 else "argparse refuses it"
    return "it has parsed nothing"


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "what-is-where.md"], ids=name)
def test_every_command_on_a_page_parses(page: Path) -> None:
    assert {line: problem for line in lines_of(page) if (problem := problem_of(line))} == {}
