"""Communication volume of a step per strategy, in ψ (elements moved over parameters), stacked by collective.

    python analysis/volume.py [RUNS ...] --out DIR

By the paper's convention: an all-reduce of ψ elements counts 2, a reduce-scatter or an all-gather 1. The black mark is
the prediction. One panel for each set of cells that train the same thing; a cell that failed, or was not run, is
drawn as such.
"""

from __future__ import annotations

import sys

from analysis.common import script
from zerobench.plots.volume import draw


def main(arguments: list[str] | None = None) -> int:
    """Draws the figure. Exit code 2 where there is nothing to draw."""
    return script("volume", __doc__, draw, arguments)


if __name__ == "__main__":
    sys.exit(main())
