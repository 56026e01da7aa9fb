"""Parts that all figure scripts share: their command line, and runs as panels of cells that belong side by side.

A *cell* is a row of `zerobench.results.summary.summarize`, with the `label` that tells it from its neighbors. A
combination that other cells lead one to expect, and that was not run, is a cell too: its status is "missing". Of a
cell that is not ok a figure draws its status, as a word (`absent`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
import yaml
from matplotlib.figure import Figure

from analysis.page import add_page_options, page_of
from analysis.style import learn_colors
from zerobench.config.cell import CellConfig
from zerobench.config.names import name_cells
from zerobench.config.schema import config_dir
from zerobench.host.environment import SIMULATED
from zerobench.results.conditions import add_options
from zerobench.results.selection import chosen
from zerobench.results.summary import SETTING, summarize
from zerobench.results.tables import Results, latest, load

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
    **{same: same for same in ("activation", "buffers", "arena", "tiling", "zeropp", "shard_group", "nodes")},
}
"""Figure (and script) -> the experiment that produces its runs."""

REFERENCE, MOST_PANELS = Path("results/reference/cpu"), 12

FAMILY = [key for key in SETTING if key not in ("world_size", "batch")]
"""Cells that agree in these may stand in one panel, whatever their N and batch."""

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
    add = parser.add_argument
    add("--out", type=Path, default=FIGURES_OUT, help="folder for figures (default: %(default)s)")
    add("--panels", type=_positive, default=MOST_PANELS, help="panels drawn at most (default: %(default)s)")
    for add_to in (add_page_options, add_options, *more):
        add_to(parser)
    options = vars(parser.parse_args(arguments))
    runs, out, page = options.pop("runs"), options.pop("out"), page_of(options)
    try:
        results, left_out = chosen(load_all(runs), options.pop("where"), options.pop("all"))
        if left_out:
            print(f"{name}.py: {left_out}", file=sys.stderr)
        if results.runs.empty:
            raise ValueError(f"no runs in {', '.join(map(str, runs))}")
        learn_colors(results, runs)
        with page.used():
            page.save(draw(results, **options), out, name)
    except (FileNotFoundError, ValueError) as error:
        print(f"{name}.py: {error}", file=sys.stderr)
        return 2
    return 0


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
        print(f"{name}.py: {error}", file=sys.stderr)
        return 2
    with page.used():
        for figure, draw in figures.items():
            page.save(draw(found), out, figure)
    if also is not None:
        also(found, out)
    return 0


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of panels; give 1 or more")
    return int(text)


def load_all(paths: Sequence[Path]) -> Results:
    """The tables of all folders below one another, less what stands in two of them."""
    parts = {path.resolve(): load(path) for path in paths}.values()
    tables = {}
    for field in fields(Results):
        frames = [getattr(part, field.name) for part in parts]
        filled = [frame for frame in frames if len(frame)]
        tables[field.name] = pd.concat(filled, ignore_index=True).drop_duplicates() if filled else frames[0]
    return Results(**tables)


def families(results: Results) -> list[pd.DataFrame]:
    """Labeled cells by model, sequence, device and the like; strategies in a fixed order."""
    cells = summarize(results.runs).sort_values("strategy", kind="stable")
    return [_labeled(mine) for _, mine in cells.groupby(FAMILY, sort=False, dropna=False)]


def comparisons(results: Results) -> list[pd.DataFrame]:
    """A panel a setting: cells that train the same thing, in every panel of a family the same labels."""
    panels: list[pd.DataFrame] = []
    for cells in families(results):
        whole = completed(cells, ["label", "strategy"], ["world_size", "batch"])
        panels += [mine for _, mine in whole.groupby(["world_size", "batch"], dropna=False)]
    return panels


def grids(results: Results) -> list[pd.DataFrame]:
    """A panel a family and micro-batch: every label at every N, in the order of N."""
    panels = []
    for cells in families(results):
        for _, mine in cells.groupby(["micro_batch", "accumulation"], dropna=False):
            whole = completed(mine, ["label", "strategy"], ["world_size"])
            panels.append(whole.sort_values("world_size", kind="stable"))
    return panels


def with_times(settings: list[pd.DataFrame]) -> list[pd.DataFrame]:
    """Panels with the status "no times" for what ran without: simulated worlds, ranks that share a GPU."""
    return [
        cells.assign(status=cells["status"].mask((cells["status"] == "ok") & cells["step_s"].isna(), "no times"))
        for cells in settings
    ]


def completed(cells: pd.DataFrame, one: list[str], other: list[str]) -> pd.DataFrame:
    """The cells of a family, with a row of status "missing" for every combination of what one command has under `one`
    with what it has under `other` that no cell has.
    """
    every = _of_one_sweep(cells, one, other)
    whole = every.merge(cells, how="left", on=[*one, *other])
    whole["status"] = whole["status"].fillna("missing")
    for key in FAMILY:
        whole[key] = cells[key].iloc[0]
    return whole


def rows_of(results: Results, table: str, cell: Any) -> pd.DataFrame:
    """The rows of a long table that belong to a cell's newest launches."""
    runs = latest(results.runs[results.runs["cell_id"] == cell.cell_id])
    frame: pd.DataFrame = getattr(results, table)
    return frame[frame["run_id"].isin(runs["run_id"])]


def _labeled(cells: pd.DataFrame) -> pd.DataFrame:
    """`label`: the strategy, and the keys in which cells of this strategy differ beside N and batch; what was measured
    of them only where nothing else tells two cells apart.
    """
    for beside in ({"measure": {}}, {}):
        whole = cells.assign(label=_labels(cells, beside))
        if not whole.duplicated(["label", "world_size", "batch", "micro_batch"]).any():
            break
    return whole


def _labels(cells: pd.DataFrame, beside: dict[str, Any]) -> list[str]:
    written = [json.loads(text) | {"world_size": 0, "batch": 0, "threads": 0} | beside for text in cells["config"]]
    configs = [CellConfig.from_dict(one) for one in written]
    pairs = zip(configs, name_cells(configs), strict=True)
    return [config.strategy.name + name.split("b=0", 1)[1] for config, name in pairs]


def cores_of(cells: pd.DataFrame) -> float:
    """Cores that all ranks of a panel have together; infinite where ranks are no processes of one CPU."""
    known = cells[(cells["device"] == "cpu") & (cells["backend"] != SIMULATED)]["cores"].dropna()
    return float(known.min()) if len(known) else float("inf")


def on_cores(panels: Sequence[pd.DataFrame]) -> str:
    """Words of a caption for where times were measured; empty where not on a CPU."""
    known = sorted({cores_of(cells) for cells in panels} - {float("inf")})
    return f", all ranks on {' or '.join(f'{count:.0f}' for count in known)} cores" if known else ""


def title(cells: pd.DataFrame, panels: Sequence[pd.DataFrame], of: Sequence[str] = ("world_size", "batch")) -> str:
    """Title of a panel: what its cells have in common: the model, the keys `of`, and in what else the panels differ."""
    first, psi = cells.iloc[0], cells["psi"].dropna()
    shown = {"world_size": "N = {}", "batch": "batch {} ×", "micro_batch": "micro-batch {} ×"}
    parts = [shown[key].format(cells[key].dropna().iloc[0]) for key in of]
    words = ", ".join([model_of(first.model, first["shape"]), *parts]) + (
        f" {first.sequence}" if parts else f", sequence {first.sequence}"
    )
    where = "simulated" if "simulated" in set(cells["backend"].dropna()) else first.device
    words += f", {where}" + (f", ψ = {psi.iloc[0] / 1e6:.3g} M" if len(psi) else "")
    differing = [k for k in ("precision", "optimizer", "data") if len({panel[k].iloc[0] for panel in panels}) > 1]
    alike = [panel for panel in panels if panel["model"].iloc[0] == first.model]
    return words + "".join(f", {first[key]}" for key in differing) + _own_options(first["shape"], alike)


def model_of(name: str, shape: str) -> str:
    """A model's name, and with which options other than those that the name stands for it ran."""
    file, options = config_dir() / "model" / f"{name}.yaml", dict(word.split("=", 1) for word in shape.split())
    usual = yaml.safe_load(file.read_text()) if file.is_file() else {}
    others = [f"{key}={options[key]}" for key, value in usual.items() if options.get(key, str(value)) != str(value)]
    return " ".join([name, *(["with"] if others else []), *others])


def _own_options(shape: str, panels: Sequence[pd.DataFrame]) -> str:
    """Of the model's options those that are not the same in all panels of the model."""
    others = [set(panel["shape"].iloc[0].split()) for panel in panels]
    return "".join(f", {option}" for option in shape.split() if not all(option in other for other in others))


def _of_one_sweep(cells: pd.DataFrame, one: list[str], other: list[str]) -> pd.DataFrame:
    """Every combination that a command would have run, of the commands that made these cells."""
    products = [
        mine[one].drop_duplicates().merge(mine[other].drop_duplicates(), how="cross")
        for _, mine in cells.groupby("command", sort=False)
    ]
    return pd.concat(products, ignore_index=True).drop_duplicates()
