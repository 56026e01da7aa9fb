"""Memory per strategy, stacked by category, with the prediction marked.

    python analysis/memory.py [RUNS ...] --out DIR --capacity "24 GiB"

Two bars a strategy: the model states (and what is in flight) at their own maximum, which formulas bind; and everything
at the instant of the overall peak, with what the allocator has beyond the ledger on top, hatched. Each on the
rank that needs most, of the newest launches. One panel for each set of cells that train the same thing; a cell that
failed, or was not run, is drawn as such.
"""

from __future__ import annotations

import sys

from analysis.common import script
from zerobench.plots.memory import add_capacity, draw


def main(arguments: list[str] | None = None) -> int:
    """Draws the figure. Exit code 2 where there is nothing to draw."""
    return script("memory", __doc__, draw, arguments, add_capacity)


if __name__ == "__main__":
    sys.exit(main())
