"""Model states and peak memory against the number of ranks, at a fixed micro-batch.

    python analysis/scaling.py [RUNS ...] --out DIR

Left: the states and what is in flight, at their maximum. Markers are measured, dashed lines predicted, dotted lines the
paper's formula alone. Right: everything at the peak, measured. Each on the rank that needs most. One row of panels for
each model and micro-batch; a cell that failed, or that has no run where others have, is named at its N.
"""

from __future__ import annotations

import sys

from analysis.common import script
from zerobench.plots.scaling import draw


def main(arguments: list[str] | None = None) -> int:
    """Draws the figure. Exit code 2 where there is nothing to draw."""
    return script("scaling", __doc__, draw, arguments)


if __name__ == "__main__":
    sys.exit(main())
