"""Options that verbs share, such as --where KEY=VALUE (results/selection.py applies it) and --columns peak,step; their
parser; and the message and exit code of a refused command.
Imports no heavy module: a verb's --help must not wait for pandas.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import update_wrapper
from pathlib import Path
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar

from ..sizes import printable

P = ParamSpec("P")
N = TypeVar("N", int, float)

RESULTS = "results/runs"
"""The default results folder of a verb."""


@dataclass(frozen=True)
class Where:
    """A condition on runs: the key has one of these values or, if `is_not`, none of them."""

    key: str
    values: tuple[str, ...]
    is_not: bool = False

    @classmethod
    def parse(cls, text: str) -> Where:
        """Parses "KEY=VALUE,VALUE" or "KEY!=VALUE". Raises ArgumentTypeError."""
        key, equals, values = text.partition("=")
        if not equals or not key.strip("!") or not values:
            raise argparse.ArgumentTypeError(f"{text!r} is no condition; write KEY=VALUE,VALUE or KEY!=VALUE")
        return cls(key.removesuffix("!"), tuple(values.split(",")), key.endswith("!"))

    def __str__(self) -> str:
        return f"{self.key}{'!' * self.is_not}={','.join(self.values)}"


def add_options(parser: argparse.ArgumentParser, attempts: bool = True) -> None:
    """Adds --where and, for verbs that leave out failed and superseded runs by default, --all."""
    where_help = "only runs with this key or column, such as strategy=zero1,zero2 or optimizer.lr=1e-3; may be repeated"
    parser.add_argument("--where", action="append", default=[], type=Where.parse, metavar="KEY=VALUE", help=where_help)
    if attempts:
        parser.add_argument("--all", action="store_true", help="failed attempts and superseded runs, too")


STATUS = ["cell", "status", "ago", "code", "peak", "step"]
"""Columns of the table of `zerobench status`."""

ALL = "all"
"""Replaces the names: every column, including those that do not fit side by side."""

HELP = (
    "columns of the printed table, after the first: names or their beginnings, comma-separated, or all;"
    " columns that do not fit the terminal follow below"
)


def add_columns(parser: argparse.ArgumentParser, columns: Sequence[str]) -> None:
    """Adds --columns. `columns`: names of the columns of all tables that the verb prints."""
    names = ", ".join(name for name in dict.fromkeys(columns) if name)
    columns_help = f"{HELP}. Here: {names}".replace("%", "%%")
    parser.add_argument("--columns", type=lambda text: choose(text, columns), metavar="NAME,NAME", help=columns_help)


def refuse_folders(**files: Path | None) -> None:
    """Raises ValueError for an output file that is a folder. `files`: flag -> path."""
    for flag, path in files.items():
        if path is not None and path.is_dir():
            raise ValueError(f"--{flag} {path}: is a folder; name a file")


def choose(text: str, columns: Sequence[str]) -> tuple[str, ...]:
    """Returns the columns that `text` names, ignoring case, or begins, in its order; empty for "all". Raises
    ArgumentTypeError for a name that is not a column, or is the beginning of several.
    """
    if text.strip() == ALL:
        return ()
    chosen, columns = [], [name for name in dict.fromkeys(columns) if name]
    for word in map(str.strip, text.split(",")):
        same = [name for name in columns if name.lower() == word.lower()]
        fitting = same or [name for name in columns if word and name.lower().startswith(word.lower())]
        if len(fitting) > 1:
            raise argparse.ArgumentTypeError(f"{word!r} begins several columns: {', '.join(fitting)}; name one")
        if not fitting:
            near = get_close_matches(word.lower(), columns, n=3, cutoff=0.6)
            hint = f"did you mean {' or '.join(near)}?" if near else f"use {', '.join(columns)}, or {ALL}"
            raise argparse.ArgumentTypeError(f"{word!r} is no column; {hint}")
        chosen.append(fitting[0])
    return tuple(chosen)


def number_type(kind: Callable[[str], N], is_valid: Callable[[N], bool], wanted: str) -> Callable[[str], N]:
    """Returns a parser of numbers, which raises ArgumentTypeError for any other. `wanted`: the end of the message."""

    def parse(text: str) -> N:
        with suppress(ValueError):
            if is_valid(number := kind(text)):
                return number
        raise argparse.ArgumentTypeError(f"{text!r} {wanted}")

    return parse


time_limit = number_type(float, lambda value: 0.001 <= value <= 1e7, "must be seconds, from 0.001 to 1e+07")
"""Parses seconds, in the range of launch.timeout_s: the system's timers take no more."""

price = number_type(float, lambda value: 0 < value < math.inf, "must be dollars per GPU hour, above 0, such as 2.50")


def add_cells(parser: argparse.ArgumentParser, timeout: float) -> None:
    """Adds the cells, and how they are simulated. `timeout`: the default, in seconds."""
    add = parser.add_argument
    add("overrides", nargs="*", metavar="KEY=VALUE", help="the cells, as for a sweep")
    multirun_help = "accepted as in a sweep; several values always make several cells"
    add("-m", "--multirun", action="store_true", help=multirun_help)
    add("--config-dir", help="your own folder, which adds choices, as for a sweep")
    add_jobs(parser)
    timeout_help = "seconds per cell (default: %(default)g)"
    add("--timeout", type=time_limit, default=timeout, metavar="S", help=timeout_help)


def add_jobs(parser: argparse.ArgumentParser) -> None:
    """Adds --jobs."""
    jobs = number_type(int, lambda value: value >= 1, "must be a number of cells, at least 1")
    parser.add_argument("--jobs", type=jobs, metavar="N", help="cells simulated at a time (default: one per core)")


def add_price(parser: argparse.ArgumentParser, where: str = "") -> None:
    """Adds --price. `where`: the condition of the option in its help."""
    price_help = "dollars per GPU hour: adds the price of a million tokens, with the interval that the time has"
    parser.add_argument("--price", type=price, metavar="DOLLARS", help=where + price_help)


PRICED = ("dollars_per_mtokens", "dollars_per_mtokens_low", "dollars_per_mtokens_high")


def dollars_per_million(price: float, rate: Any, low: Any, high: Any) -> dict[str, Any]:
    """Returns the columns PRICED: the price of a million tokens, with its interval. `price`: dollars per GPU hour.
    `rate`: tokens/s of one GPU. `low`, `high`: ends of the interval of a step, over its time. All may be columns.
    """
    middle = price * 1e6 / (3600 * rate)
    return dict(zip(PRICED, (middle, middle * low, middle * high), strict=True))


def show_price(priced: Any) -> str:
    """Formats "0.412 (0.398–0.431)" from a mapping with the columns PRICED; a dash if it has none."""
    middle, low, high = (priced.get(name) for name in PRICED)
    if middle is None or math.isnan(middle):
        return "–"
    return f"{middle:.3g}" + ("" if low is None or math.isnan(low) else f" ({low:.3g}–{high:.3g})")


class Parser(argparse.ArgumentParser):
    """A parser whose error messages escape control characters from the command line, and whose help keeps the line
    breaks of a description or epilog.
    """

    def __init__(self, prog: str, description: str | None = None, epilog: str | None = None) -> None:
        has_lines = "\n" in f"{description}{epilog}"
        kind = argparse.RawDescriptionHelpFormatter if has_lines else argparse.HelpFormatter
        super().__init__(prog, None, description, epilog, formatter_class=kind)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raises ArgumentError, which names the nearest choice, for a value that is none."""
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        near = get_close_matches(str(value), choices, n=1)
        hint = f"did you mean {near[0]}?" if near else f"use {', '.join(choices)}"
        raise argparse.ArgumentError(action, f"no such choice: {value!r}; {hint}")

    def error(self, message: str) -> NoReturn:
        """Prints the usage and the message, and exits with code 2."""
        super().error(printable(message))


def verb(act: Callable[Concatenate[list[str], P], int]) -> Callable[Concatenate[list[str], P], int]:
    """Turns a function into the verb of its name: an error in the command becomes a message and exit code 2.

    These errors are ValueError, RefusedError with its `problems`, and OSError for a file that cannot be read or
    written; any other exception is a bug and is not caught.
    """
    name = act.__name__.replace("_", "-")

    def answered(arguments: list[str], /, *more: P.args, **options: P.kwargs) -> int:
        try:
            return act(arguments, *more, **options)
        except (OSError, ValueError) as error:
            return refuse(error, f"zerobench {name}")

    update_wrapper(answered, act)
    return answered


def refuse(error: Exception, program: str = "zerobench") -> int:
    """Prints an error on standard error, a line for each of its `problems`; an indented list in a message stays a list.
    Returns exit code 2. `program`: with its verb, if there is one.
    """
    for problem in getattr(error, "problems", [error]):
        lines = f"{program}: {problem}".split("\n  ")
        print(*map(printable, lines), sep="\n  ", file=sys.stderr)
    return 2
