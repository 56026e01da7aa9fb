"""Time of a step per strategy, split into forward, backward and update, with the step's 95 % interval.

    python analysis/step_time.py [RUNS ...] --out DIR

The dot is the step of the slowest rank: the median over the steps of one launch with the interval of that median; or,
of several launches, the geometric mean of their medians with a t-interval in which the launch is the unit. The figure
says which. A bar is as high as the dot, and split in the proportions of the phases' own medians, which do not add up to
the step's. Where there are too few steps for an interval there is none. A cell that failed, or was not run, is drawn as
such.

A cell that was traced (measure.trace=true) has a second bar, the step of the traced pass, which the profiler slows
down: where nothing communicates, where computation hides communication, and where communication is exposed.
"""

from __future__ import annotations

import sys

from analysis.common import script
from zerobench.plots.step_time import draw


def main(arguments: list[str] | None = None) -> int:
    """Draws the figure. Exit code 2 where there is nothing to draw."""
    return script("step_time", __doc__, draw, arguments)


if __name__ == "__main__":
    sys.exit(main())
