"""Memory against time within one step, stacked by category, with the phases of the step marked.

    python analysis/timeline.py [RUNS ...] --out DIR

The last measured step of the accounted pass, on the rank that needs most. That pass carries the instrument and is
slower than the timed one: the milliseconds order the instants, they are no step time. One panel a cell, with one scale
for cells that train the same thing; a cell that failed, or was not run, is an empty panel that says so.
"""

from __future__ import annotations

import sys

from analysis.common import script
from zerobench.plots.timeline import draw


def main(arguments: list[str] | None = None) -> int:
    """Draws the figure. Exit code 2 where there is nothing to draw."""
    return script("timeline", __doc__, draw, arguments)


if __name__ == "__main__":
    sys.exit(main())
