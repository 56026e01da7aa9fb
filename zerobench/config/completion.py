"""Tab completion: Hydra's own, plus our verbs as first words and minus the schemas, which are not choices.

eval "$(zerobench -sc install=bash)"      bash and zsh      zerobench -sc install=fish | source      fish
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from contextlib import redirect_stdout

from .compose import RefusedError, run_hydra

FLAGS = ("--shell-completion", "-sc")

COMMANDS = ("install", "uninstall", "query")
SHELLS = ("bash", "fish", "zsh")

LINE = "COMP_LINE"
"""Environment variable in which a shell passes the words typed so far."""

USAGE = 'say what to do and for which shell, as in: eval "$(zerobench -sc install=bash)"'


def complete(words: Sequence[str], verbs: Sequence[str]) -> None:
    """Prints the script that installs completion or, when that script asks, the words that may follow."""
    command, _, shell = words[0].partition("=") if len(words) == 1 else ("", "", "")
    if command not in COMMANDS or shell not in SHELLS:
        raise RefusedError([f"-sc: {USAGE} ({', '.join(COMMANDS)}; {', '.join(SHELLS)})"])
    if command != "query":
        run_hydra(["-sc", *words])
        return
    typed = os.environ.get(LINE)
    if typed is None:
        raise RefusedError([f"-sc query: for shells, with the typed line in {LINE}; {USAGE}"])
    found = [word for word in _ask_hydra(shell, _overrides_of(typed, verbs)) if not word.startswith("schema")]
    if len(typed.split()) < 2 or (len(typed.split()) == 2 and not typed.endswith(" ")):
        found += [verb for verb in verbs if verb.startswith(typed.split()[-1] if typed.split()[1:] else "")]
    print(("\n" if shell == "fish" else " ").join(found))


def _ask_hydra(shell: str, line: str) -> list[str]:
    before, said = os.environ[LINE], io.StringIO()
    os.environ[LINE] = line
    try:
        with redirect_stdout(said):
            run_hydra(["-sc", f"query={shell}"])
    finally:
        os.environ[LINE] = before
    return said.getvalue().split()


def _overrides_of(typed: str, verbs: Sequence[str]) -> str:
    """Returns the typed words without our flags, verbs and their arguments, which Hydra does not know."""
    program, *words = typed.split()
    ours = [*verbs, "--dry-run", "record", "check"]
    last = len(words) - 1 if typed[-1] != " " else None
    kept = [word for number, word in enumerate(words) if word not in ours or number == last]
    return " ".join([program, *kept]) + (" " if typed.endswith(" ") or not kept else "")
