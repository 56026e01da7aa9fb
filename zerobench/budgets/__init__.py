"""Limits on figures: judged in budget files, between runs, and in any project's tests.

Commands alone import it. pytest loads plugin.py also in projects that never use it, so neither it nor
this file imports torch or pandas.

    @pytest.mark.zerobench(peak="<= 24 psi", leaks=0)
    def test_step(zerobench_watch):
        with zerobench_watch(model, optimizer):
            train()

judge.py holds a cell to its limits, budget_file.py reads and records them, lines.py folds their tables of source lines,
reports.py tells CI, comparison.py compares runs. For tests: plugin.py has pytest's hooks, limits.py reads a marker and
its limits, verdict.py makes the test's watches and judges them, ranks.py runs a test in several ranks.
"""
