"""`zerobench bisect GOOD BAD -- COMMAND`: the commit that moved a metric.

A *target* is one metric of one cell. A commit is *old* for a target where it has the value of GOOD, or is on GOOD's
side of a threshold; GOOD is old, BAD is not. A commit is *found* where it is not old and its parent is.

    search.py    halves the commits between, in git's order of halving
    measure.py   a commit measured, or remembered from an earlier search
    launch.py    the command, run in a worktree, to its end
    moved.py     what moved from the parent to the commit: category, lines of code
    report.py    the output
"""
