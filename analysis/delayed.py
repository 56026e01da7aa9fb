"""Loss curves with the delayed parameter update, and their difference from those without.

    python analysis/delayed.py [RUNS ...] --out DIR

As analysis/losses.py; the first curve, thick, is the one without delay.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.common import script
from analysis.losses import draw


def main(arguments: list[str] | None = None) -> int:
    """Draws the figure. Exit code 2 where there is nothing to draw."""
    return script("delayed", __doc__, draw, arguments)


if __name__ == "__main__":
    sys.exit(main())
