"""Parts that all figure scripts share: their command line, and the experiments that their runs come from."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import matplotlib as mpl
from matplotlib.figure import Figure

from zerobench.commands.plot import FIGURES as PLOTTED
from zerobench.commands.plot import add_figure_options, plot, save_figure
from zerobench.plots.page import SETTINGS, add_page_options, page_of
from zerobench.results.options import refuse

mpl.rcParams.update(SETTINGS)  # a script's process draws nothing but its figures

FIGURES = {
    "memory": "stages",
    "volume": "stages",
    "timeline": "stages",
    "step_time": "step_time",
    "scaling": "scaling",
    "throughput": "scaling",
    "losses": "losses",
    "pareto": "frontier",
    "memory_cap": "memory_cap",
    **{same: same for same in ("offload", "offload_time", "infinity", "delayed")},
    **{
        same: same
        for same in ("activation", "partition", "buffers", "arena", "tiling", "zeropp", "shard_group", "nodes")
    },
    **{same: same for same in ("muon", "compile", "long_sequences", "low_bit")},
}
"""Figure -> the experiment that produces its runs. Figures of `zerobench plot` have no script here."""

DRAWN_AS = {"muon": "memory", "compile": "memory", "long_sequences": "memory"}
"""Figure without a script of its own -> the figure that it is, of runs of its own."""

WITHOUT_FIGURE = ("zeropp_error", "settings", "accumulation")
"""Experiments whose runs make a table on a page and no figure."""


UNTIMED = (
    "losses", "offload", "infinity", "delayed", "partition", "buffers", "arena", "tiling", "zeropp", "shard_group",
    "nodes", "muon", "long_sequences", "low_bit", "zeropp_error", "settings", "accumulation",
)  # fmt: skip
"""Experiments of bytes, traffic or losses alone: `make experiments` runs two of them at a time."""


def module_of(figure: str) -> ModuleType:
    """Returns the module with a figure's `draw`: its script here, or the module of `zerobench plot`."""
    figure = DRAWN_AS.get(figure, figure)
    return import_module(f"zerobench.plots.{figure}" if figure in PLOTTED else f"analysis.{figure}")


def main_of(figure: str) -> Callable[[list[str]], int]:
    """Returns a figure's command, to be called with its arguments: its script's, or `zerobench plot`."""
    if figure in PLOTTED:
        return lambda arguments: plot([figure, *arguments])
    if figure in DRAWN_AS:
        return lambda arguments: script(figure, None, module_of(figure).draw, arguments)
    main: Callable[[list[str]], int] = module_of(figure).main
    return main


REFERENCE = Path("results/reference/cpu")

FIGURES_OUT = Path("results/figures")
"""Where figures go that have no place of their own."""

T = TypeVar("T")

Options = Callable[[argparse.ArgumentParser], object]


def script(name: str, doc: str | None, draw: Callable[..., Figure], arguments: list[str] | None, *more: Options) -> int:
    """A figure's command. `more` adds arguments, which go to `draw` by name. Exit code 2: there is nothing to draw."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(f"analysis/{name}.py", description=doc, formatter_class=raw)
    default = REFERENCE / FIGURES[name]
    words = f"results folders, runs or collections; `zerobench experiment={FIGURES[name]}` makes some"
    parser.add_argument("runs", nargs="*", default=[default], type=Path, help=f"{words} (default: {default})")
    add_figure_options(parser, FIGURES_OUT)
    for add_to in more:
        add_to(parser)
    options = vars(parser.parse_args(arguments))
    return save_figure(f"{name}.py", name, draw, options.pop("runs"), options)


def folder_script(
    name: str, doc: str | None, read: Callable[[Path], T], figures: Mapping[str, Callable[[T], Figure]],
    usual: Path, arguments: list[str] | None, out: Path | None = None, also: Callable[[T, Path], object] | None = None,
) -> int:  # fmt: skip
    """A command that draws `figures` from what `read` finds in one folder, as a rule `usual`.

    `out`: where figures go by default, else the folder; `also` writes more there. Exit code 2: there is nothing.
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(f"analysis/{name}.py", description=doc, formatter_class=raw)
    parser.add_argument("folder", nargs="?", default=usual, type=Path, help="what to draw (default: %(default)s)")
    parser.add_argument("--out", default=out, type=Path, help=f"folder for figures (default: {out or 'the same'})")
    add_page_options(parser)
    options = vars(parser.parse_args(arguments))
    page, folder, out = page_of(options), options["folder"], options["out"] or options["folder"]
    try:
        found = read(folder)
    except (OSError, ValueError, KeyError) as error:
        return refuse(error, f"{name}.py")
    with page.used():
        for figure, draw in figures.items():
            page.save(draw(found), out, figure)
    if also is not None:
        also(found, out)
    return 0
