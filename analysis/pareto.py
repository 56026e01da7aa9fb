"""All runs as memory against throughput, with the Pareto front.

    python analysis/pareto.py [RUNS ...] --out DIR

Up and to the left is better. Filled points are on the front: no other cell needs less memory without being slower. The
staircase is the most tokens/s that any cell reaches within a peak. One panel, with a front of its own, for each set of
cells that train the same thing on as many ranks; whiskers are 95 % intervals, where there are any. Labels: in what
cells of one strategy differ. Cells that failed, or that have no run where another strategy has, have no place in the
plane: they stand below it.
"""

from __future__ import annotations

import sys

from analysis.common import script
from zerobench.plots.pareto import draw


def main(arguments: list[str] | None = None) -> int:
    """Draws the figure. Exit code 2 where there is nothing to draw."""
    return script("pareto", __doc__, draw, arguments)


if __name__ == "__main__":
    sys.exit(main())
