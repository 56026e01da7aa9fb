"""The parser of a verb's arguments."""

from __future__ import annotations

import argparse
from typing import NoReturn

from ..sizes import printable


class Parser(argparse.ArgumentParser):
    """A parser whose error messages repeat words of the command line without control of the terminal."""

    def error(self, message: str) -> NoReturn:
        """Prints the usage and the message, and exits with code 2."""
        super().error(printable(message))
