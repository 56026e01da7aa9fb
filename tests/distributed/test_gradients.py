"""Gradients that are read and changed between backward and step, on real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import gradients
from tests.ranks import run_ranks


@pytest.mark.parametrize("n", [*(pytest.param(n, marks=pytest.mark.thorough) for n in (1, 2)), 3])
def test_gradients_are_the_mean_and_edits_of_them_count(n: int, tmp_path: Path) -> None:
    assert run_ranks(n, gradients.read_and_change, str(tmp_path)) == [len(gradients.kinds(n, ""))] * n
