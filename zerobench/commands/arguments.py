"""The arguments of a verb: their parser, and the message and exit code of a command that is refused."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import update_wrapper
from typing import Concatenate, NoReturn, ParamSpec

from ..sizes import printable

P = ParamSpec("P")


class Parser(argparse.ArgumentParser):
    """A parser whose error messages repeat words of the command line without control of the terminal."""

    def error(self, message: str) -> NoReturn:
        """Prints the usage and the message, and exits with code 2."""
        super().error(printable(message))


def verb(act: Callable[Concatenate[list[str], P], int]) -> Callable[Concatenate[list[str], P], int]:
    """Makes a verb of a function of its name: an error in what was asked for is a message, and exit code 2.

    These errors are ValueError, RefusedError with its `problems`, and OSError for a file that cannot be read or
    written; anything else is a fault of the program's and comes through.
    """
    name = act.__name__.replace("_", "-")

    def answered(arguments: list[str], /, *more: P.args, **options: P.kwargs) -> int:
        try:
            return act(arguments, *more, **options)
        except (OSError, ValueError) as error:
            return refuse(error, name)

    update_wrapper(answered, act)
    return answered


def refuse(error: Exception, name: str = "") -> int:
    """Prints an error on standard error, a line for each of its `problems`; a list in a message, of lines with an
    indent, stays one. Returns exit code 2. `name`: of the verb, "" for a run or a sweep.
    """
    for problem in getattr(error, "problems", [error]):
        lines = f"{f'zerobench {name}'.strip()}: {problem}".split("\n  ")
        print(*map(printable, lines), sep="\n  ", file=sys.stderr)
    return 2
