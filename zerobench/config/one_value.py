"""Keys that are lists of words and not worth a sweep: commas in their values separate words, not cells.

Hydra reads `launch.group_by=model,world_size` as a sweep over two values.
"""

from __future__ import annotations

ONE_VALUE = {"launch.group_by": "'{}'", "launch.retry": "[{}]", "objective": "'{}'"}
"""Key -> its value for Hydra, around the words."""

OPENINGS = ("'", '"', "[", "$", "null")
"""Beginnings of values that are written as Hydra wants them."""


def in_one(word: str) -> str:
    """Returns an override of the command line, with the words of such a key as one value."""
    key, equals, value = word.partition("=")
    around = ONE_VALUE.get(key.lstrip("+"))
    if around is None or not value.strip() or value.lstrip().startswith(OPENINGS):
        return word
    return f"{key}{equals}{around.format(value)}"
