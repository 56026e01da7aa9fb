"""A memory gate in anyone's tests: the pytest plugin that `import zerobench` brings.

    @pytest.mark.zerobench(peak="<= 24 psi", leaks=0)
    def test_step(zerobench_watch):
        with zerobench_watch(model, optimizer):
            train()

plugin.py has pytest's hooks and loads nothing, limits.py reads a marker and its limits and records.py recorded ones,
watches.py is the fixture, verdict.py judges, ranks.py runs a test in ranks.
"""

from __future__ import annotations

import pytest

MARKER, FIXTURE = "zerobench", "zerobench_watch"

IN_RANK: pytest.StashKey[int] = pytest.StashKey()
"""Key of a session's stash: its rank, in a process that runs a test of `ranks=N`."""
