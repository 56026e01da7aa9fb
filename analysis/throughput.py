"""Tokens/s against the number of ranks, what of it is lost in per cent, and the memory that pays for it.

    python analysis/throughput.py [RUNS ...] --out DIR --drop-from ddp|linear

Left: tokens/s of all ranks together, with their 95 % interval where there is one. Middle: the drop,
100 · (1 - tokens/s ÷ reference), where the reference is
    ddp      what DDP reaches at the same N: the price of a stage (the default), or
    linear   N times what the same strategy reaches at N = 1: the price of scaling.
Where the reference was not measured there is no drop, and the panel says so. Right: peak memory on the fullest rank.
Where ranks are processes of one CPU, the caption says how many cores they have, and the shade begins where there are
more ranks than cores. A cell that failed, or that has no run where others have, is named at its N.
"""

from __future__ import annotations

import sys

from analysis.common import script
from zerobench.plots.throughput import add_drop_from, draw


def main(arguments: list[str] | None = None) -> int:
    """Draws the figure. Exit code 2 where there is nothing to draw."""
    return script("throughput", __doc__, draw, arguments, add_drop_from)


if __name__ == "__main__":
    sys.exit(main())
