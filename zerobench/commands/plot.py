"""`zerobench plot`: a figure of finished runs as a file, the figures of `results.plot`."""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path

from ..plots import Plots
from ..plots.memory import add_capacity
from ..plots.script import add_figure_options, save_figure
from ..plots.throughput import add_drop_from
from ..results.options import RESULTS

FIGURES = tuple(name for name in vars(Plots) if not name.startswith("_") and callable(getattr(Plots, name)))

OWN = {"capacity": "memory", "drop_from": "throughput"}
"""Option -> the figure that it is for."""

EXAMPLES = """
examples:
  zerobench plot memory results/runs --out memory.pdf --capacity "24 GiB"
  zerobench plot pareto results/runs --where model=gpt_small --out figures --format pdf,pgf --width column
"""


def plot(arguments: list[str]) -> int:
    """Runs the verb. Returns the exit code: 0, or 2 if there is nothing to draw."""
    parser = _parser()
    chosen = vars(parser.parse_args(arguments))
    figure, runs = chosen.pop("figure"), chosen.pop("runs")
    for option, of in OWN.items():
        if of != figure and chosen.pop(option) != parser.get_default(option):
            parser.error(f"--{option.replace('_', '-')} is an option of {of}, not of {figure}")
    draw = import_module(f"...plots.{figure}", __name__).draw
    return save_figure(f"zerobench plot {figure}", figure, draw, runs, chosen)


def _parser() -> argparse.ArgumentParser:
    lines = [f"  {name:<12}{str(getattr(Plots, name).__doc__).splitlines()[0]}" for name in FIGURES]
    parser = argparse.ArgumentParser(
        prog="zerobench plot",
        description="Draws a figure of finished runs, as `results.plot` does in Python:\n" + "\n".join(lines),
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("figure", choices=FIGURES, metavar="FIGURE", help="one of these")
    words = "results folders, runs or collections (default: %(default)s)"
    parser.add_argument("runs", nargs="*", default=[Path(RESULTS)], type=Path, help=words)
    add_figure_options(parser, out=None)
    for add in (add_capacity, add_drop_from):
        add(parser)
    return parser
