"""Sizes in words on a command line: the value of a key that ends in _bytes may be 25MiB, and is bytes from here on."""

from __future__ import annotations

import re

from ..sizes import parse_bytes

SUFFIX = "_bytes"

_SIZE = re.compile(r"""(?<![\w.])(['"]?)([0-9]*\.?[0-9]+\s*[kmgt]i?b)\1(?![\w.])""", re.IGNORECASE)
"""A number and a unit, in quotes or not, as one value or one of several."""


def in_bytes(argument: str) -> str:
    """Returns an override with the sizes of a key in bytes as whole numbers, and any other override as it is."""
    key, equals, value = argument.partition("=")
    if not equals or not key.endswith(SUFFIX):
        return argument
    return f"{key}={_SIZE.sub(lambda found: str(parse_bytes(found[2])), value)}"
