"""Conditions on runs, as given on a command line: --where KEY=VALUE. results/selection.py applies them.

Imports no heavy module: a verb's --help must not wait for pandas.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

RESULTS = "results/runs"
"""The default results folder of a verb."""


@dataclass(frozen=True)
class Where:
    """One condition on runs: the key has one of these values, or none of them."""

    key: str
    values: tuple[str, ...]
    is_not: bool = False

    @classmethod
    def parse(cls, text: str) -> Where:
        """Parses "KEY=VALUE,VALUE" or "KEY!=VALUE". Raises ArgumentTypeError, a sentence."""
        key, equals, values = text.partition("=")
        if not equals or not key.strip("!") or not values:
            raise argparse.ArgumentTypeError(f"{text!r} is no condition; write KEY=VALUE,VALUE or KEY!=VALUE")
        return cls(key.removesuffix("!"), tuple(values.split(",")), key.endswith("!"))

    def __str__(self) -> str:
        return f"{self.key}{'!' * self.is_not}={','.join(self.values)}"


def add_options(parser: argparse.ArgumentParser, attempts: bool = True) -> None:
    """Adds --where and, where failed and superseded runs are left out by default, --all."""
    words = "only runs whose config or column says so, as strategy=zero1,zero2 or optimizer.lr=1e-3; may be given again"
    parser.add_argument("--where", action="append", default=[], type=Where.parse, metavar="KEY=VALUE", help=words)
    if attempts:
        parser.add_argument("--all", action="store_true", help="failed attempts and superseded runs, too")
