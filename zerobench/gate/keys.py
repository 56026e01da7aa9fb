"""Names that the plugin's parts have in common; it imports pytest alone."""

from __future__ import annotations

import pytest

MARKER, FIXTURE = "zerobench", "zerobench_watch"

IN_RANK: pytest.StashKey[int] = pytest.StashKey()
"""Of a session: its rank, in a process that runs a test of `ranks=N`."""
