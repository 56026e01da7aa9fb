"""A memory gate for any project's tests: the pytest plugin that comes with zerobench.

    @pytest.mark.zerobench(peak="<= 24 psi", leaks=0)
    def test_step(zerobench_watch):
        with zerobench_watch(model, optimizer):
            train()

plugin.py has pytest's hooks and imports lazily, limits.py reads a marker and its limits, records.py reads recorded
limits, verdict.py makes the test's watches and judges them, ranks.py runs a test in several ranks.
"""

from __future__ import annotations

import pytest

MARKER, FIXTURE = "zerobench", "zerobench_watch"

IN_RANK: pytest.StashKey[int] = pytest.StashKey()
"""Key of a session's stash: the rank, in a process that runs a test of `ranks=N`."""
