"""Tab completion: Hydra's own, plus our verbs as first words and minus the schemas, which are not choices.

eval "$(zerobench -sc install=bash)"      bash and zsh      zerobench -sc install=fish | source      fish
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from contextlib import redirect_stdout
from unittest import mock

from .compose import RefusedError, run_hydra

FLAGS = ("--shell-completion", "-sc")

COMMANDS = ("install", "uninstall", "query")
SHELLS = ("bash", "fish", "zsh")

LINE = "COMP_LINE"
"""Environment variable in which a shell passes the words typed so far."""

USAGE = 'say what to do and for which shell, as in: eval "$(zerobench -sc install=bash)"'


def complete(arguments: Sequence[str], verbs: Sequence[str]) -> None:
    """Prints the script that installs completion or, when that script asks, the words that may follow."""
    command, _, shell = arguments[0].partition("=") if len(arguments) == 1 else ("", "", "")
    if command not in COMMANDS or shell not in SHELLS:
        raise RefusedError([f"-sc: {USAGE} ({', '.join(COMMANDS)}; {', '.join(SHELLS)})"])
    if command != "query":
        run_hydra(["-sc", *arguments])
        return
    typed = os.environ.get(LINE)
    if typed is None:
        raise RefusedError([f"-sc query: for shells, with the typed line in {LINE}; {USAGE}"])
    program, *others = typed.split()
    unknown = [*verbs, "--dry-run", "record", "check"]  # to Hydra
    last = len(others) - 1 if typed[-1] != " " else None
    kept = [word for number, word in enumerate(others) if word not in unknown or number == last]
    line, said = " ".join([program, *kept]) + (" " if typed.endswith(" ") or not kept else ""), io.StringIO()
    with mock.patch.dict(os.environ, {LINE: line}), redirect_stdout(said):
        run_hydra(["-sc", f"query={shell}"])
    candidates = [word for word in said.getvalue().split() if not word.startswith("schema")]
    if len(typed.split()) < 2 or (len(typed.split()) == 2 and not typed.endswith(" ")):
        candidates += [verb for verb in verbs if verb.startswith(typed.split()[-1] if typed.split()[1:] else "")]
    print(("\n" if shell == "fish" else " ").join(candidates))
