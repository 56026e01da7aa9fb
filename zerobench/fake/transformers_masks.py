"""Attention masks of transformers' models, which look into positions for packed sequences, and make a mask of S × S
elements where there are any. Of tensors without values they expect them always; here a row is one sequence, so that
there are none, and no mask is made, as in a run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

MODULE, FUNCTION = "transformers.masking_utils", "find_packed_sequence_indices"
"""The function returns None where no sequences are packed."""


@contextmanager
def as_with_values() -> Iterator[None]:
    """Answers as for rows of one sequence each, where a model of transformers asks."""
    module = sys.modules.get(MODULE)
    if not hasattr(module, FUNCTION):  # no such model, or transformers of another release
        yield
        return
    ask = getattr(module, FUNCTION)

    def none_packed(positions: Any) -> None:
        (ask(positions)[:, -1] == 0).all()  # what it computes takes memory, for a moment

    with mock.patch.object(module, FUNCTION, none_packed):
        yield
