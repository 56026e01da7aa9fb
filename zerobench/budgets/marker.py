"""Names that pytest's hooks and the tests' ranks share, without torch and pandas."""

from __future__ import annotations

import pytest

MARKER, FIXTURE = "zerobench", "zerobench_watch"

IN_RANK: pytest.StashKey[int] = pytest.StashKey()
"""Key of a session's stash: the rank, in a process that runs a test of `ranks=N`."""
