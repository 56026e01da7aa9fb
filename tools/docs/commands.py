"""The reference of commands: what each of them says of itself under --help."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator

from zerobench import cli

ACTIONS = {"noise": ("record",), "budget": ("record", "check")}
"""Commands that have others below them."""


def page() -> str:
    """A section for runs and sweeps, and for each command."""
    usage = cli.HELP.split("\n\nGroups (")[0]
    sections = [f"## zerobench\n\n```text\n{usage}\n```"]
    for verb in cli.VERBS:
        sections.append(f"## zerobench {verb}\n\n```text\n{help_of(verb)}\n```")
        for action in ACTIONS.get(verb, ()):
            sections.append(f"### zerobench {verb} {action}\n\n```text\n{help_of(verb, action)}\n```")
    return "\n\n".join(sections)


def help_of(*words: str) -> str:
    """The output of `zerobench WORDS --help` in lines of at most 110 characters where argparse folds them."""
    said = io.StringIO()
    with _columns(110), contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        cli.run([*words, "--help"])
    return said.getvalue().strip()


@contextlib.contextmanager
def _columns(number: int) -> Iterator[None]:
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(number)
    try:
        yield
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before
