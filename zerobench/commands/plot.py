"""`zerobench plot`: writes a figure of finished runs, one of `results.plot`, to a file. The scripts in analysis/ share
its options and its way of writing files.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..host.pipes import print_note
from ..plots import MODULES, Plots, figure_function
from ..plots.marks import learn_colors
from ..plots.page import CAPTIONED, FORMATS, Page, Sheet, add_page_options, pop_page
from ..plots.panels import MOST_PANELS
from ..plots.scaling import DDP, REFERENCES
from ..results.options import RESULTS, Parser, add_options, number_type, refuse
from ..results.tables import ALL_TABLES, Results, load, merge
from ..sizes import parse_memory

OWN = {"capacity": "memory", "drop_from": "throughput"}
"""Option -> the figure that it applies to."""

EXAMPLES = """
examples:
  zerobench plot memory results/runs --out memory.pdf --capacity "24 GiB"
  zerobench plot pareto results/runs --where model=gpt_small --out figures --format pdf,svg --width column
"""


def plot(arguments: list[str]) -> int:
    """Runs the verb. Returns the exit code: 0, or 2 if there is nothing to draw."""
    lines = [f"  {name:<12}{str(getattr(Plots, name).__doc__).splitlines()[0]}" for name in MODULES]
    description = "Draws a figure of finished runs, as `results.plot` does in Python:\n" + "\n".join(lines)
    parser = Parser("zerobench plot", description, EXAMPLES)
    parser.add_argument("figure", choices=MODULES, metavar="FIGURE", help="a name of the list above")
    runs_help = f"results folders, runs or collections (default: {RESULTS})"
    parser.add_argument("runs", nargs="*", default=[Path(RESULTS)], type=Path, help=runs_help)
    add_figure_options(parser, out=None)
    parser.add_argument("--capacity", type=_capacity, help="memory: bytes of a rank, as in 24GiB, drawn as a line")
    drop_help = "throughput: reference of the drop (default: %(default)s)"
    parser.add_argument("--drop-from", choices=tuple(REFERENCES), default=DDP, help=drop_help)
    chosen = vars(parser.parse_args(arguments))
    figure, runs = chosen.pop("figure"), chosen.pop("runs")
    for option, of in OWN.items():
        if of != figure and chosen.pop(option) != parser.get_default(option):
            parser.error(f"--{option.replace('_', '-')} is an option of {of}, not of {figure}")
    return save_figure(f"zerobench plot {figure}", figure, figure_function(figure), runs, chosen)


def _capacity(text: str) -> int:
    try:
        return parse_memory(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_figure_options(parser: argparse.ArgumentParser, out: Path | None) -> None:
    """Adds --out, --panels, the page's options, --where and --all. `out`: default of --out; None: required."""
    add = parser.add_argument
    told = "required" if out is None else f"default: {out}"
    out_help = f"a file, whose suffix is its format ({', '.join(FORMATS)}), or a folder ({told})"
    add("--out", type=Path, default=out, required=out is None, help=out_help)
    panels = number_type(int, lambda value: value >= 1, "is no number of panels; give 1 or more")
    add("--panels", type=panels, default=MOST_PANELS, help="panels drawn at most (default: %(default)s)")
    add_page_options(parser)
    add_options(parser)


def save_figure(
    program: str, name: str, draw: Callable[..., Sheet], runs: Sequence[Path], options: dict[str, Any]
) -> int:
    """Draws the runs and writes the files. `options`: of add_figure_options; the others are passed to `draw` by name.

    Exit code 2, with an error message, if there is nothing to draw.
    """
    page, out = pop_page(options), options.pop("out")
    try:
        page, folder, stem = _place(page, out, name)
        results, left_out = load_all(runs).chosen(options.pop("where"), options.pop("all"))
        if left_out:
            print_note(f"{program}: {left_out}")
        if results.runs.empty:
            raise ValueError(f"no runs in {', '.join(map(str, runs))}")
        learn_colors(results, runs)
        with page.used():
            page.save(draw(results, **options), folder, stem)
    except (OSError, ValueError) as error:
        return refuse(error, program)
    return 0


def _place(page: Page, out: Path, name: str) -> tuple[Page, Path, str]:
    """Returns the page with its formats, the folder, and the file name without suffix. Raises ValueError if `out` is
    neither a figure nor a folder.
    """
    ending = out.suffix.removeprefix(".")
    if not ending or out.is_dir():
        return page, out, name
    if ending not in FORMATS:
        endings = f"a figure ends in .{', .'.join(FORMATS)}"
        raise ValueError(f"--out {out}: {endings}; anything else must be a folder that exists, or a name without a dot")
    if page.formats not in (CAPTIONED, (ending,)):
        raise ValueError(f"--out {out} with --format {','.join(page.formats)}: give a folder, or no --format")
    return replace(page, formats=(ending,)), out.parent, out.stem


def load_all(paths: Sequence[Path]) -> Results:
    """Returns the concatenated tables of all folders, without duplicate rows."""
    whole = merge([*{path.resolve(): load(path) for path in paths}.values()])
    tables = {name: getattr(whole, name) for name in ALL_TABLES}
    return Results(**{name: table.drop_duplicates(ignore_index=True) for name, table in tables.items()})
