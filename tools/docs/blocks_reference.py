"""Blocks of the references: keys, columns, commands, modules, and the example of an estimate (see blocks.py).

They are made of schemas and docstrings; the folder of tables that each block is given is not needed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tools.docs import commands, estimates, keys, where
from zerobench.commands.columns import as_markdown
from zerobench.records.describe import ROWS, columns_of


def columns() -> str:
    """Every column of every table."""
    return as_markdown([column for table in ROWS for column in columns_of(table)])


PAGES: dict[str, Callable[[], str]] = {
    "keys": keys.page,
    "columns": columns,
    "commands": commands.page,
    "where": where.everything,
    "packages": where.packages,
    "estimate": estimates.example,
    "estimates": estimates.schema,
}


def _of_no_tables(make: Callable[[], str]) -> Callable[[Path], str]:
    return lambda root: make()


BLOCKS = {name: _of_no_tables(make) for name, make in PAGES.items()}
"""Block -> what makes it."""
