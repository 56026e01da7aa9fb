"""Draws figures: `python -m analysis NAME ...`; `make plots` draws those of the committed tables of experiments."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import matplotlib as mpl

from zerobench.commands.plot import add_figure_options, plot, save_figure
from zerobench.config.keys import nearest
from zerobench.plots import MODULES as PLOTTED
from zerobench.plots import figure_function
from zerobench.plots.page import SETTINGS, Sheet, add_page_options, pop_page
from zerobench.results.options import Parser, refuse

HELP = """\
usage: python -m analysis FIGURE [RUNS ...] [OPTION ...]   a figure of an experiment's runs
       python -m analysis FOLDER_FIGURE [FOLDER] ...       a figure of a folder of tables that a make target writes, or
                                                           more tables
       python -m analysis all [ROOT] [OPTION ...]          every FIGURE, from ROOT/stages, ROOT/scaling ...

FIGURE: {figures}
FOLDER_FIGURE: {folders}

Each explains itself: python -m analysis NAME --help. Exit code 2: there is nothing to draw.
"""

FIGURES = {
    "memory": "stages", "volume": "stages", "timeline": "stages", "step_time": "step_time", "scaling": "scaling",
    "throughput": "scaling", "losses": "losses", "pareto": "frontier", "offload": "offload", "delayed": "delayed",
    "activation": "activation", "muon": "muon", "compile": "compile", "long_sequences": "long_sequences",
    "lora": "lora",
}  # fmt: skip
"""Figure -> the experiment that produces its runs."""

DRAWN_AS = {
    **dict.fromkeys(("muon", "compile", "long_sequences", "offload", "activation", "lora"), "memory"),
    "delayed": "losses",
}
"""Figure -> the figure of `zerobench plot` that draws its runs."""

OF_FOLDERS = ("compare", "table1", "calibration", "predicted_maps")
"""Modules with FOLDER and `read`, and either `draw` and STEM, the name of the figure's files, or `write_tables`."""

WITHOUT_FIGURE = (
    "memory_cap", "offload_time", "partition", "arena", "tiling", "shard_group", "nodes", "low_bit", "zeropp_error",
    "settings", "accumulation", "gradient_dtype", "save", "infinity", "buffers", "zeropp",
)  # fmt: skip
"""Experiments whose runs make a table on a page and no figure."""

UNTIMED = (
    "losses", "offload", "infinity", "delayed", "partition", "buffers", "arena", "tiling", "zeropp", "shard_group",
    "nodes", "muon", "long_sequences", "low_bit", "zeropp_error", "settings", "accumulation",
    "gradient_dtype", "lora",
)  # fmt: skip
"""Experiments of bytes, traffic or losses alone: `make experiments` runs two of them at a time."""

REFERENCE = Path("results/reference/cpu")
FIGURES_OUT = Path("results/figures")
"""Where figures go that have no place of their own."""


def main(arguments: list[str]) -> int:
    """Draws a figure, or all. Returns the exit code."""
    mpl.rcParams.update(SETTINGS)  # this process draws nothing but its figures
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help"):
        print(HELP.format(figures=", ".join(FIGURES), folders=", ".join(OF_FOLDERS)), end="")
        return 0
    if name == "all":
        return draw_all(rest)
    if name in OF_FOLDERS:
        return draw_folder(name, rest)
    if name in PLOTTED:
        return plot([name, *rest])
    if name in FIGURES:
        return draw_runs(name, rest)
    print(f"analysis {name}: no such figure{nearest(name, [*FIGURES, *OF_FOLDERS])}", file=sys.stderr)
    return 2


def draw_of(figure: str) -> Callable[..., Sheet]:
    """Returns the function that draws a figure of runs."""
    return figure_function(DRAWN_AS.get(figure, figure))


def draw_runs(name: str, arguments: list[str]) -> int:
    """Draws a figure of runs, by default of the committed ones of its experiment."""
    draw, default = draw_of(name), REFERENCE / FIGURES[name]
    parser = Parser(f"python -m analysis {name}", draw.__doc__)
    words = f"results folders, runs or collections; `zerobench experiment={FIGURES[name]}` makes some"
    parser.add_argument("runs", nargs="*", default=[default], type=Path, help=f"{words} (default: {default})")
    add_figure_options(parser, FIGURES_OUT)
    options = vars(parser.parse_args(arguments))
    return save_figure(f"analysis {name}", name, draw, options.pop("runs"), options)


def draw_folder(name: str, arguments: list[str]) -> int:
    """Draws the figures of a folder of tables, or writes other tables, by default into it."""
    module = import_module(f"analysis.{name}")
    parser = Parser(f"python -m analysis {name}", module.__doc__)
    out = FIGURES_OUT if name == "calibration" else None
    parser.add_argument("folder", nargs="?", default=module.FOLDER, type=Path, help="the tables (default: %(default)s)")
    parser.add_argument("--out", default=out, type=Path, help=f"folder for figures (default: {out or 'the same'})")
    add_page_options(parser)
    options = vars(parser.parse_args(arguments))
    page, folder, out = pop_page(options), options["folder"], options["out"] or options["folder"]
    try:
        tables = module.read(folder)
    except (OSError, ValueError, KeyError) as error:
        return refuse(error, f"analysis {name}")
    if hasattr(module, "draw"):
        with page.used():
            page.save(module.draw(tables), out, module.STEM)
    else:
        module.write_tables(tables, out)
    return 0


def draw_all(arguments: list[str]) -> int:
    """Draws the figures of every experiment that has runs; a figure whose runs are missing is named and left out."""
    parser = Parser("python -m analysis all", draw_all.__doc__)
    parser.add_argument("root", nargs="?", type=Path, default=REFERENCE, help="a folder of folders (%(default)s)")
    parser.add_argument("--out", type=Path, help="folder for the figures (default: ROOT/figures)")
    words = "only print the names of the experiments; untimed: of those whose times nobody reads"
    parser.add_argument("--experiments", nargs="?", choices=("all", "untimed"), const="all", help=words)
    add_page_options(parser)
    chosen = parser.parse_args(arguments)
    if chosen.experiments:
        named = [*dict.fromkeys(FIGURES.values()), *WITHOUT_FIGURE]
        print(*(one for one in named if chosen.experiments == "all" or one in UNTIMED))
        return 0
    page = ["--format", ",".join(chosen.format), "--width", chosen.width, "--style", chosen.style]
    out, codes = chosen.out or chosen.root / "figures", []
    for figure, experiment in FIGURES.items():
        runs = chosen.root / experiment
        if runs.is_dir():
            codes.append(main([figure, str(runs), "--out", str(out), *page]))
        else:
            words = f"{figure} is left out: no folder {runs}; experiment={experiment} makes it"
            print(f"analysis all: {words}", file=sys.stderr)
    return max(codes, default=2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
