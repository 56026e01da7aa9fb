"""`zerobench report`: the verb, and the parts of a page on runs: table, accounts, failures with logs, origin, commands.

The table has the columns of a sweep's table first, then swept keys, then every column for which any run has a value. A
column has `texts`, which are shown, and `values`, by which it is sorted and filtered.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import pandas as pd

from ...budgets.comparison import Judge, compare_runs
from ...config.cell import CellConfig
from ...config.flat import name_cells, show_value, swept
from ...host.pipes import print_line, print_note, write_text
from ...host.revisions import installed_version
from ...host.terminal import progress_bar
from ...records.describe import columns_of
from ...results.frames import Row, show_figure
from ...results.grid import Grid
from ...results.markup import render
from ...results.options import Parser, add_options, add_price, verb
from ...results.printed_table import COLUMNS
from ...results.summary import price_columns
from ...results.tables import Results, load, of_run, run_folders
from ...sizes import counted, show_bytes, show_count
from ..compare import add_judge, judge_of, passages
from ..folder_contents import warnings_to
from ..show import passages_of, setting_of
from . import compared
from .settings import costs, group_by_setting, overall, setting_figures, setting_verdict

VALUES = 8
"""Most values of a key that are listed."""

ORIGIN = {
    "commit": "commit", "source_hash": "code", "torch_version": "torch", "device_class": "device",
    "processor": "processor", "cores": "cores", "backend": "backend",
}  # fmt: skip
"""Columns of a run on the code and the machine that made it -> their headings."""

LONG = ("config", "formulas")
"""Columns that are documents of their own, shown elsewhere: in the differences between configs and in each account."""


@dataclass(frozen=True, eq=False)
class ReportedRun:
    """A run with its cell's name, its folder if it has one, and its index among the runs of `whole`."""

    row: Row
    name: str
    folder: Path | None
    whole: Results
    index: int

    def results(self) -> Results:
        """Returns the tables of this run alone."""
        if self.folder is not None:
            return of_run(self.whole, self.index, self.folder)
        return self.whole.of([self.row["run_id"]])


def split_runs(results: Results, folders: Sequence[Path]) -> list[ReportedRun]:
    """Splits results by run; `folders`: where they were read."""
    by_name = {folder.name: folder for where in folders for folder in run_folders(where)}
    rows: list[Row] = results.runs.to_dict("records")  # type: ignore[assignment]
    names = name_cells([CellConfig.from_json(row["config"]) for row in rows])
    return [
        ReportedRun(row, name, by_name.get(row["run_id"]), results, index)
        for index, (row, name) in enumerate(zip(rows, names, strict=True))
    ]


def differing(runs: pd.DataFrame) -> Grid | None:
    """Returns the keys in which configs differ, each with its values and the number of runs that have them."""
    rows = []
    for key, values in swept(list(runs["config"])).items():
        counts = Counter("not a key of it" if value is None else show_value(value) for value in values)
        listed = ", ".join(f"{value} ({number})" for value, number in counts.most_common(VALUES))
        listed += f" and {len(counts) - VALUES} more" if len(counts) > VALUES else ""
        rows.append([key, listed, str(len(counts))])
    return Grid(["key", "values, and the runs that have them", "values"], rows, left=2) if rows else None


def origin(runs: pd.DataFrame) -> Grid:
    """Returns the code and the machines that made the runs, a row each, with number of runs and days."""
    rows = []
    for key, group in runs.groupby(list(ORIGIN), sort=False, dropna=False):
        commit, *others = ("not known" if pd.isna(value) else str(value) for value in cast("tuple[Any, ...]", key))
        rows.append([commit if commit == "not known" else commit[:12], *others, day_range(group), str(len(group))])
    return Grid([*ORIGIN.values(), "recorded", "runs"], rows, left=8)


def day_range(runs: pd.DataFrame) -> str:
    """Formats the day, or the first and the last one, on which runs began."""
    days = sorted({str(started)[:10] for started in runs["started"]})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"


def commands(runs: pd.DataFrame) -> Iterator[list[str]]:
    """Yields the commands that made the runs, by commit."""
    for commit, group in runs.groupby("commit", sort=False, dropna=False):
        yield [*([f"git checkout {commit}"] if isinstance(commit, str) else []), *dict.fromkeys(group["command"])]


@dataclass(frozen=True)
class PageColumn:
    """A column with a value and a text per run; `shown` initially, or only when selected. `number`: its values are."""

    name: str
    meaning: str
    number: bool
    shown: bool
    values: list[Any]
    texts: list[str]


def columns_of_runs(results: Results, sides: Sequence[str] | None = None) -> list[PageColumn]:
    """Returns the columns of the runs, in order. `sides`: in a comparison, the side of each run."""
    rows: list[Row] = results.runs.assign(launches=1).astype("object").to_dict("records")  # type: ignore[assignment]
    leading = {"cell": ("Name of the run's cell", name_cells([CellConfig.from_json(row["config"]) for row in rows]))}
    if sides is not None:
        leading["side"] = ("A before, B after", list(sides))
    leading["status"] = ("How the run ended", [str(row["status"]) for row in rows])
    columns = [PageColumn(name, meaning, False, True, texts, texts) for name, (meaning, texts) in leading.items()]
    ok = [row for row in rows if row["status"] == "ok"]
    all_columns = {column.name: column for column in columns_of("runs")}
    for name, column in COLUMNS.items():
        if any(map(column.is_shown, ok)):
            meaning = all_columns[column.key].meaning if column.key else name
            texts = [column.show(row) if row["status"] == "ok" else "–" for row in rows]
            exact = [
                _plain(row[column.key]) if column.key
                else float(text.split()[0]) if text[0].isdigit()  # of a price with its interval, or of a pair
                else text
                for row, text in zip(rows, texts, strict=True)
            ]  # fmt: skip
            values = [None if text == "–" else value for value, text in zip(exact, texts, strict=True)]
            columns.append(PageColumn(name, meaning, name != "trains", True, values, texts))
    sweep, taken = results.sweep(), {column.name for column in columns}
    for key in (str(key) for key in sweep.columns if key not in results.runs.columns and key not in taken):
        values = [_plain(value) for value in sweep[key]]
        texts = ["–" if value is None else str(value) for value in values]
        columns.append(PageColumn(key, f"Key {key} of the config", False, False, values, texts))
    rate = f"{counted(row['sequence'] for row in rows)} /"
    for key, described in all_columns.items():
        values = [_plain(row[key]) for row in rows]
        if key not in (*LONG, "status") and any(value is not None for value in values):
            unit = f" ({described.unit})".replace("tokens /", rate) if described.unit else ""
            texts = [show_figure(value, described.unit) for value in values]
            number = described.kind in ("int", "float")
            columns.append(PageColumn(key, described.meaning + unit, number, False, values, texts))
    return columns


def _plain(value: Any) -> Any:
    """Converts a value to one that JSON can represent."""
    if value is None or pd.isna(value):
        return None
    value = value.item() if hasattr(value, "item") else value
    return value if not isinstance(value, float) or math.isfinite(value) else None


def as_json(columns: Sequence[PageColumn]) -> str:
    """Formats the columns for the page's script: texts only if they differ from the values; for a column with many
    repeats, its distinct values and texts, with their index (`of`) for each run.
    """
    written = []
    for column in columns:
        pairs = list(zip(column.values, column.texts, strict=True))
        index = {pair: number for number, pair in enumerate(dict.fromkeys(pairs))}
        repeats = 2 * len(index) < len(pairs)
        values, texts = map(list, zip(*(index if repeats else pairs), strict=True))
        record = {"name": column.name, "meaning": column.meaning, "number": column.number, "shown": column.shown}
        record |= {"values": values} | ({"texts": texts} if texts != values else {})
        written.append(record | ({"of": [index[pair] for pair in pairs]} if repeats else {}))
    # "<" would end the element that contains it
    return json.dumps(written, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


DESCRIPTION = """\
Writes finished runs as one page of HTML: the verdict in words, the table of runs, figures,
accounts with predictions and residuals, failures with their logs, provenance, commands.
Of two folders: what moved.
"""

EXAMPLES = """\
examples:
  zerobench report results/runs --out report.html
  zerobench report results/runs --where model=gpt_small --where world_size=2 --title "ZeRO on two ranks"
  zerobench report results/runs/before results/runs/after --out moved.html

The page opens from the disk and asks for nothing: style, script and figures are in it. Print it for a PDF.
A folder is a results folder, a run, or a collection (zerobench export --format parquet), which has no logs.
"""


@verb
def report(arguments: list[str]) -> int:
    """Runs the verb. Returns the exit code: 0, or 2 if there is nothing to report."""
    parser = Parser("zerobench report", DESCRIPTION, EXAMPLES)
    runs_help = "a results folder, a run or a collection; two of them, before and after, are compared"
    parser.add_argument("runs", nargs="*", type=Path, default=[Path("results/runs")], metavar="RUNS", help=runs_help)
    out = Path("report.html")
    parser.add_argument("--out", type=Path, default=out, metavar="FILE", help="default: %(default)s, here")
    parser.add_argument("--title", metavar="TEXT", help="heading of the page (default: the folders' names)")
    add_judge(parser)
    add_price(parser)
    add_options(parser, attempts=False)
    chosen = parser.parse_args(arguments)
    if len(chosen.runs) > 2:
        given = show_count(len(chosen.runs), "folder")
        raise ValueError(f"RUNS: {given} given; name one, or two to compare, or a folder of collections")
    if chosen.out.is_dir():
        raise ValueError(f"--out {chosen.out}: is a folder; name a file, as {chosen.out / 'report.html'}")
    judge = judge_of(chosen)
    sides = [_load(where, chosen) for where in chosen.runs]
    if len(sides) == 2:
        values = of_two(sides[0], sides[1], chosen.runs, judge)
    else:
        values = of_runs(sides[0], chosen.runs[0], judge)
    made_by = installed_version("zerobench") or "of a checkout"
    values["facts"].append(f"written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC by zerobench {made_by}")
    values |= {"own": shlex.join(["zerobench", "report", *arguments])} | (
        {"title": chosen.title} if chosen.title else {}
    )
    write_text(render("commands/report/page.html", **values), chosen.out)
    counted = " and ".join(show_count(len(side.runs), "run") for side in sides)
    print_line(f"report: {chosen.out}, {counted}, {show_bytes(chosen.out.stat().st_size)}")
    return 0


def _load(where: Path, options: argparse.Namespace) -> Results:
    """Reads one folder. Raises ValueError if no run is left."""
    problems: list[str] = []
    with warnings_to(problems):
        results = load(where)
    for problem in problems:
        print_note(f"zerobench report: {problem}")
    if not results.runs.empty:
        results = results.chosen(options.where)[0]
        if options.price is not None:
            results = results.with_runs(results.runs.assign(**price_columns(results.runs, options.price)))
        return results
    inside = [path.name for path in sorted(where.glob("*/")) if any(path.glob("*/run.json"))]
    if problems and not inside:
        raise ValueError(f"{where}: no run can be read")
    hint = f"experiment=stages results_dir={where}` makes some"
    hint = f"report {where / inside[0]}` reports those in it" if inside else hint
    raise ValueError(f"{where}: no runs here; `zerobench {hint}")


MOST = 24
"""Most settings that a page draws."""

MOST_RUNS = 60
"""Most accounts, and most failures with their logs, on a page: the newest."""

LIGHT = 40
"""Most accounts that a page stores as elements; if there are more, they stay text until they are opened."""


def of_runs(results: Results, folder: Path, judge: Judge) -> dict[str, Any]:
    """Returns the values of the page on one folder."""
    settings = group_by_setting(results.runs)
    cards = [
        {"title": setting.title, "answers": list(setting_verdict(setting, judge)), "costs": costs(setting, judge),
         "figures": list(setting_figures(setting))}
        for setting in settings[:MOST]
    ]  # fmt: skip
    undrawn = len(settings) - len(cards)
    verdict = {"overall": list(overall(settings, judge)), "settings": cards, "undrawn": undrawn}
    ended = ", ".join(f"{number} {status}" for status, number in Counter(results.runs["status"]).most_common())
    cells = show_count(results.runs["cell_id"].nunique(), "cell")
    facts = [f"{show_count(len(results), 'run')} of {cells}: {ended}", f"recorded {day_range(results.runs)}"]
    about = _about_runs(results, split_runs(results, [folder]))
    return about | {"title": f"Report on {_name(folder)}", "facts": facts, "verdict": verdict, "moved": None}


def of_two(a: Results, b: Results, folders: Sequence[Path], judge: Judge) -> dict[str, Any]:
    """Returns the values of the page on the changes between two folders. Raises ValueError if they have no cell in
    common.
    """
    comparison = compare_runs(a.runs, b.runs, judge, (a.lines, b.lines))
    if not comparison.pairs:
        raise ValueError(f"no cell of {folders[0]} is also in {folders[1]}; `zerobench report` of each shows its cells")
    moved = {
        "answers": list(compared.summary(comparison)), "figures": list(compared.difference_figures(comparison)),
        "table": compared.table(comparison), "passages": passages(comparison),
    }  # fmt: skip
    both = a.with_runs(pd.concat([a.runs, b.runs], ignore_index=True))
    runs = [*split_runs(a, folders[:1]), *split_runs(b, folders[1:])]  # apart: equal code names runs alike
    facts = [f"A: {folders[0]}, {show_count(len(a), 'run')}", f"B: {folders[1]}, {show_count(len(b), 'run')}"]
    title = f"{_name(folders[0])} against {_name(folders[1])}"
    about = _about_runs(both, runs, ["A"] * len(a) + ["B"] * len(b))
    return about | {"title": title, "facts": facts, "verdict": None, "moved": moved}


def _name(folder: Path) -> str:
    return folder.resolve().name


def _about_runs(results: Results, runs: Sequence[ReportedRun], sides: Sequence[str] | None = None) -> dict[str, Any]:
    """Returns the values of the parts that both pages have. `runs`: of `results`; `sides`: the side of each."""
    anchors = {run: f"run-{number}" for number, run in enumerate(runs)}
    ok = [run for run in runs if run.row["status"] == "ok"]
    failed = [run for run in runs if run.row["status"] != "ok"]
    shown, shown_failed = ok[-MOST_RUNS:], failed[-MOST_RUNS:]
    columns, accounts = columns_of_runs(results, sides), []
    with progress_bar("accounts", len(shown), "runs") as advance:
        for run in shown:
            account = passages_of(run.row, run.results(), run.folder)
            accounts.append((anchors[run], run, list(setting_of(run.row)), account))
            advance()
    return {
        "columns": columns, "data": as_json(columns), "accounts": accounts, "failed": len(failed),
        "links": [anchors[run] if run in shown or run in shown_failed else "" for run in runs],
        "failures": [(anchors[run], run, passages_of(run.row, run.whole, run.folder)) for run in shown_failed],
        "differing": differing(results.runs), "origin": origin(results.runs), "commands": list(commands(results.runs)),
        "most": MOST_RUNS, "light": LIGHT,
    }  # fmt: skip
