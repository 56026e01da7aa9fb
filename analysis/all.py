"""Every figure, each from the folder of its experiment under a common root.

    python analysis/all.py [ROOT] --out DIR       from ROOT/stages, ROOT/scaling ...; DIR: ROOT/figures
    python analysis/all.py --experiments          names the experiments that produce the committed tables
    python analysis/all.py --experiments untimed  only those whose times nobody reads; timed: only the others
    python analysis/all.py --format pdf --width column      of a paper in two columns, each as PDF

Which figure is of which experiment: FIGURES in analysis/common.py. A figure whose runs are not there is named and left
out. Exit code 2 if a figure could not be drawn, or none.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.common import FIGURES, REFERENCE, UNTIMED, WITHOUT_FIGURE, main_of
from zerobench.plots.page import add_page_options


def main(arguments: list[str] | None = None) -> int:
    """Draws what there are runs of."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", type=Path, default=REFERENCE, help="a folder of folders (%(default)s)")
    parser.add_argument("--out", type=Path, help="folder for the figures (default: ROOT/figures)")
    kinds, words = ("all", "timed", "untimed"), "only print the experiments' names"
    parser.add_argument("--experiments", nargs="?", choices=kinds, const=kinds[0], help=words)
    add_page_options(parser)
    chosen = parser.parse_args(arguments)
    page = ["--format", ",".join(chosen.format), "--width", chosen.width, "--style", chosen.style]
    if chosen.experiments:
        named = [*dict.fromkeys(FIGURES.values()), *WITHOUT_FIGURE]
        print(*(one for one in named if chosen.experiments in ("all", "untimed" if one in UNTIMED else "timed")))
        return 0
    out = chosen.out or chosen.root / "figures"
    codes = []
    for figure, experiment in FIGURES.items():
        runs = chosen.root / experiment
        if runs.is_dir():
            codes.append(main_of(figure)([str(runs), "--out", str(out), *page]))
        else:
            print(f"all.py: {figure} is left out: no folder {runs}; experiment={experiment} makes it", file=sys.stderr)
    return max(codes, default=2)


if __name__ == "__main__":
    sys.exit(main())
