"""Loss curves of the strategies on top of one another, and their differences from DDP.

    python analysis/losses.py [RUNS ...] --out DIR

Left: the loss of every step of the timed pass, warm-up included, as the mean over the ranks; the first curve is the
widest and each that follows lies on top of it, so that equal curves show as one band of several colors. Right: the
curves less DDP's (or the first one's, where DDP did not run). Where all are equal to the bit a sentence says so, and
where they are in every setting there is no right panel. A loss that is not finite is a gap, with a cross at the axis;
a cell that failed, or was not run, is named.
"""

from __future__ import annotations

import sys

from analysis.common import script
from zerobench.plots.losses import draw


def main(arguments: list[str] | None = None) -> int:
    """Draws the figure. Exit code 2 where there is nothing to draw."""
    return script("losses", __doc__, draw, arguments)


if __name__ == "__main__":
    sys.exit(main())
