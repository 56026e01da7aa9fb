"""Finished runs: `load` reads their tables into `Results`, the tables of one or many runs; `Run` is one of them.

A run's folder (written by results/folders.py)::

    config.yaml  provenance.json  run.json  logs/  and steps, memory, timeline, tensors, lines, traffic as parquet,
    and events if they were requested

A *collection* (`zerobench export --format parquet`) has the same tables for many runs, one parquet file each.
`load` reads a run, a results folder, a collection, or a folder of collections. Frames are typed (frames.py): ordered
categories, integer bytes, units.

`Results.long` has measured figures in tidy form, a row per figure, with the columns run_id, rank, metric, value, unit:

    of a run     rank is missing; metric is a column of the table of runs, and value is its value
    of a rank    rank is a number; metric is the run's column that is derived from the ranks' figures: for bytes and
                 volumes their maximum, for times the median over the steps of the slowest rank in each

A figure that was not measured has no row, so a failed run has none at all. Values are float64, in which bytes are exact
up to 2**53.
"""

from __future__ import annotations

import difflib
import json
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pandas as pd
import pyarrow as pa

from ..config.cell import VERSION, VERSION_KEY, CellConfig
from ..config.flat import name_cells, swept
from ..host.files import read_text
from ..records import CATEGORIES, COLLECTIVES, LINKS, SCHEMA_VERSION, RunRow, SearchRow
from ..records.describe import LONG, ROWS, columns_of
from ..records.run_row import RunSetting
from .frames import Units, check_table, concatenate, read_table, to_frame, typed, write_frame
from .options import Where
from .printed_table import run_html, run_text, runs_html, runs_text
from .selection import by_number, in_order, pick, select

Row = TypeVar("Row", RunRow, SearchRow)


@dataclass(frozen=True, repr=False)
class Results:
    """Tables of one or many runs. `runs`: one row per run. The others carry `run_id`; their columns: records/. A table
    may be given as a function, which is called when the table is first used.

    strategy, category, phase and tier are ordered categories; bytes are integers; `frame.attrs["units"]` is column ->
    unit. In a notebook it shows itself as a table and a figure.
    """

    runs: pd.DataFrame
    steps: pd.DataFrame
    memory: pd.DataFrame
    timeline: pd.DataFrame
    tensors: pd.DataFrame
    lines: pd.DataFrame
    traffic: pd.DataFrame
    events: pd.DataFrame
    certificate: pd.DataFrame
    searches: pd.DataFrame

    plot: ClassVar[Any]
    """Figures of these runs, each a method that returns matplotlib axes: `results.plot.memory()`; plots/ adds it."""

    def __post_init__(self) -> None:
        for name, table in vars(self).items():
            if not callable(table):
                object.__setattr__(self, name, typed(name, table))

    def __getattribute__(self, name: str) -> Any:
        """Loads a table when it is first used."""
        value = object.__getattribute__(self, name)
        if name in ALL_TABLES and callable(value):
            value = typed(name, value())
            object.__setattr__(self, name, value)
        return value

    def with_runs(self, runs: pd.DataFrame) -> Results:
        """Returns the same tables with other rows of runs, without reading any."""
        return Results(**{**vars(self), "runs": runs})

    def of(self, run_ids: Iterable[str]) -> Results:
        """Returns the tables of these runs only."""
        return Results(**self._selected_tables(run_ids))

    def chosen(self, where: Sequence[Where], everything: bool = True) -> tuple[Results, str]:
        """Returns the tables of the runs that `select` keeps, and its message on the others."""
        kept, left_out = select(self.runs, where, everything)
        return (self if len(kept) == len(self.runs) else self.of(kept["run_id"])), left_out

    def run(self, name: str) -> Run:
        """Returns one run: by its run_id, by a part that fits no other, or the newest of the cell of that name
        ("zero2 gpt_tiny N=2 b=8"). Raises ValueError if `name` fits none or several.
        """
        rows: list[dict[str, Any]] = self.runs.to_dict("records")  # type: ignore[assignment]
        return Run(**self._selected_tables([str(pick(name, rows, "these results")["run_id"])]))

    def __len__(self) -> int:
        """The number of runs."""
        return len(self.runs)

    def __iter__(self) -> Iterator[Run]:
        """Yields each run with its tables."""
        return (Run(**self._selected_tables([str(name)])) for name in self.runs["run_id"])

    @property
    def cell(self) -> Any:
        """The name of each run's cell, as tables show it, with the index of `runs`: "zero2 gpt_tiny N=2 b=8"."""
        configs = [CellConfig.from_json(config) for config in self.runs["config"]]
        return pd.Series(name_cells(configs), index=self.runs.index, dtype="object", name="cell")

    def sweep(self) -> pd.DataFrame:
        """`runs` with leading columns: `cell`, and each swept key that has no column of its own, named as on the
        command line: "optimizer.lr", "model.hidden", "offload". It is empty if a run's choices have no such key.
        """
        columns = swept(list(self.runs["config"]), beside=self.runs.columns)
        keys = pd.DataFrame(columns, index=self.runs.index, dtype="object").infer_objects()
        whole: pd.DataFrame = pd.concat([self.cell, keys, self.runs], axis=1)
        whole.attrs = dict(self.runs.attrs)
        return whole

    def long(self, *metrics: str, beside: Sequence[str] = ()) -> pd.DataFrame:
        """Returns measured figures in tidy form, a row per figure: run_id, rank, metric, value, unit.

        A metric is a column of `runs`, and its row without a rank is that column's value; rows with a rank have the
        rank's own figure (RANKS says which have one). `metrics`: those wanted, all by default. `beside`:
        columns of `sweep()` to carry along, as "strategy". Raises ValueError for an unknown one.
        """
        runs, steps = self.sweep(), self.steps
        for kind, names, valid in (
            ("metric", metrics, list(FIGURES)),
            ("column", beside, list(map(str, runs.columns))),
        ):
            for name in names:
                if name not in valid:
                    near = difflib.get_close_matches(name, valid, n=3, cutoff=0.5)
                    hint = f"do you mean {' or '.join(near)}?" if near else "docs/reference/columns.md lists them"
                    raise ValueError(f"long: {name!r} is not a {kind} of the runs; {hint}")
        wanted = list(dict.fromkeys(metrics)) or list(FIGURES)
        measured = steps[(steps["mode"] == "timed") & ~steps["warmup"].fillna(True)]
        timed = set(runs.loc[runs["step_s"].notna(), "run_id"])  # simulated worlds have no times
        times = measured[measured["run_id"].isin(timed)].groupby(["run_id", "rank"])[list(OF_STEPS)].median()
        of_steps = times.rename(columns=OF_STEPS).reset_index()
        wide = (runs[["run_id", *wanted]].assign(rank=None), of_steps, _of_traffic(runs, self.traffic))
        columns = ["at_peak_bytes", "max_bytes"]
        step = self.memory[self.memory["phase"] == "step"].astype(dict.fromkeys(columns, "float64"))
        figures = step.melt(["run_id", "rank", "tier", "category"], columns, var_name="column")
        keys = zip(figures["tier"], figures["category"], figures["column"], strict=True)
        ids = ["run_id", "rank"]
        parts = [
            frame.astype({name: "float64" for name in frame.columns if name not in ids}).melt(ids, var_name="metric")
            for frame in wide
        ]
        parts = [*parts, figures.assign(metric=[OF_MEMORY.get(key, "") for key in keys])]
        long = pd.concat([part for part in parts if len(part)] or parts[:1], ignore_index=True)
        long = long[long["metric"].isin(wanted)].dropna(subset=["value"])
        long["unit"] = long["metric"].map(FIGURES)
        long["metric"] = long["metric"].astype(pd.CategoricalDtype([n for n in FIGURES if n in wanted], ordered=True))
        long = long.astype({"rank": "Int64", "value": "float64"})[list(COLUMNS)]
        order = {run_id: number for number, run_id in enumerate(runs["run_id"])}
        ordered = long.assign(order=long["run_id"].map(order)).sort_values(
            ["order", "metric", "rank"], na_position="first"
        )
        long = long.loc[ordered.index].reset_index(drop=True)
        long = runs[["run_id", *beside]].merge(long, on="run_id", how="right") if beside else long
        long.attrs = {"units": Units({name: unit for name, unit in runs.attrs["units"].items() if name in beside})}
        return long

    def __repr__(self) -> str:
        return runs_text(self.runs)

    def _repr_html_(self) -> str:
        return runs_html(self.runs)

    def _selected_tables(self, run_ids: Iterable[str]) -> dict[str, pd.DataFrame]:
        kept = set(run_ids)

        def of_kept(frame: pd.DataFrame) -> pd.DataFrame:
            return frame[frame["run_id"].isin(kept)] if "run_id" in frame else frame

        def part(name: str, table: Any) -> Any:
            return cache(lambda: of_kept(getattr(self, name))) if callable(table) else of_kept(table)

        return {name: part(name, table) for name, table in vars(self).items()}


class Run(Results):
    """Tables of one run, as `Results.run` returns them."""

    @property
    def row(self) -> pd.Series:
        """Its row of the table of runs."""
        return self.runs.iloc[0]

    @property
    def cell(self) -> str:
        """The name of its cell."""
        return str(super().cell.iloc[0])

    @property
    def config(self) -> dict[str, Any]:
        """Its whole resolved config."""
        config: dict[str, Any] = json.loads(self.row["config"])
        return config

    def __repr__(self) -> str:
        return run_text(self.runs)

    def _repr_html_(self) -> str:
        return run_html(self.runs)


TABLES = {name: ROWS[name] for name in LONG}
"""The long tables, whose rows have a `run_id`."""
OPTIONAL = ("events", "certificate")
"""Tables that have no file if they have no rows."""

ALL_TABLES = {name: ROWS[name] for name in ("runs", "searches", *LONG)}

SEARCHES = "searches"
"""The folder, in a results folder, with the results of searches, a JSON file each."""

MANY = 64
"""Number of runs from which on a long table is read when it is first used; before that only its footer is."""


def load(path: str | Path) -> Results:
    """Reads a run's folder, all runs in a results folder, or a collection; runs are in the order in which they began.

    Damaged runs, and those of a newer version, are left out with a warning. Of 64 runs or more the long tables are read
    when they are first used, and a run with a damaged page has no rows in its table, with a warning. Raises
    FileNotFoundError if there is no such folder.
    """
    where = Path(path)
    if not where.is_dir():
        raise FileNotFoundError(f"{where}: there is no such results folder")
    folders = run_folders(where)
    is_large = len(folders) >= MANY
    rows, table_of_runs = _read_runs(folders, is_large)
    read, collected = set(rows["run_id"]), []
    for folder in collections_in(where):
        if (collection := _read_collection(folder, read)) is not None:
            collected.append(collection)
            read |= {*collection["runs"]["run_id"]}

    def long_table(name: str) -> pd.DataFrame:
        return to_frame([table_of_runs(name), *(collection[name] for collection in collected)], TABLES[name], "run_id")

    tables: Any = {name: cache(partial(long_table, name)) if is_large else long_table(name) for name in TABLES}
    runs = to_frame([in_order([rows, *(collection["runs"] for collection in collected)])], RunRow)
    search_rows = (_read_json_row(path, SearchRow) for path in sorted((where / SEARCHES).glob("*.json")))
    searches = [pd.DataFrame([vars(row) for row in search_rows if row is not None])]
    searches += [collection["searches"] for collection in collected]
    return Results(runs, **tables, searches=to_frame(searches, SearchRow).drop_duplicates(ignore_index=True))


def merge(parts: Sequence[Results]) -> Results:
    """Concatenates the tables of all parts; runs in the order in which they began."""
    tables = {name: to_frame([getattr(p, name) for p in parts], kind, "run_id") for name, kind in TABLES.items()}
    runs = to_frame([in_order([p.runs for p in parts])], RunRow)
    return Results(runs, **tables, searches=to_frame([p.searches for p in parts], SearchRow))


def of_run(results: Results, index: int, folder: Path) -> Results:
    """Returns the results of the run at `index` of `results.runs`, without reading other runs' tables."""
    run = results.runs.iloc[[index]]

    def long_table(name: str) -> pd.DataFrame:
        table = _read_or_warn(folder, name, str(run["run_id"].iloc[0]))
        rows = concatenate([] if table is None else [table], TABLES[name])
        return to_frame([rows], TABLES[name], "run_id")

    tables: Any = {name: cache(partial(long_table, name)) for name in TABLES}
    return Results(run, **tables, searches=results.searches.iloc[:0])


def is_whole(folder: Path) -> bool:
    """Returns True if every table of a run can be read."""
    return not _read_runs([folder], is_large=False)[0].empty


def _read_runs(folders: list[Path], is_large: bool) -> tuple[pd.DataFrame, Callable[[str], pd.DataFrame]]:
    """Returns the rows of the runs without a damaged table, in the order of their numbers, and the function that
    returns a long table of these runs. `is_large`: that function reads the files, and only their footers are read here.
    """
    rows, used = [], list[tuple[Path, str]]()
    read: dict[str, list[pa.Table]] = {name: [] for name in TABLES}
    for folder in folders:
        if (row := read_row(folder)) is None:
            continue
        paths = {name: folder / f"{name}.parquet" for name in TABLES}
        try:
            if is_large:
                for path in paths.values():
                    check_table(path)
            else:
                tables_of_run = {name: read_table(path, row.run_id) for name, path in paths.items()}
                for name, table in tables_of_run.items():
                    read[name].append(table)
        except ValueError as error:
            warnings.warn(f"{folder} has a damaged table and is left out: {error}", stacklevel=3)
            continue
        rows.append(row)
        used.append((folder, row.run_id))

    def table_of_runs(name: str) -> pd.DataFrame:
        tables = [_read_or_warn(folder, name, run_id) for folder, run_id in used] if is_large else read[name]
        return concatenate([table for table in tables if table is not None], TABLES[name])

    frame = to_frame([pd.DataFrame(map(vars, rows))], RunRow)
    return by_number(frame) if len(frame) else frame, table_of_runs


def _read_or_warn(folder: Path, name: str, run_id: str) -> pa.Table | None:
    """Reads a long table of a run; None, with a warning, if it is damaged or the run was removed."""
    try:
        if not folder.is_dir():
            raise ValueError("the run was removed meanwhile")
        return read_table(folder / f"{name}.parquet", run_id)
    except ValueError as error:
        warnings.warn(f"{folder}: rows of {name} are left out: {error}", stacklevel=4)
        return None


def _read_collection(folder: Path, others: Collection[str]) -> dict[str, pd.DataFrame] | None:
    """Reads the tables of a collection without runs of a later version and those with the ids `others`, which an export
    into the runs' own folder repeats; None, with a warning, if a table is damaged.
    """
    try:
        tables = {name: read_table(folder / f"{name}.parquet").to_pandas() for name in ALL_TABLES}
    except ValueError as error:
        warnings.warn(f"{folder} has a damaged table and is left out: {error}", stacklevel=3)
        return None
    runs = tables["runs"]
    problems = [problem_of_config(config) for config in runs["config"]]
    for run_id, problem in zip(runs["run_id"], problems, strict=True):
        if problem:
            warnings.warn(f"{folder}: {run_id} is left out: {problem}", stacklevel=3)
    kept = {run for run, problem in zip(runs["run_id"], problems, strict=True) if not problem and run not in others}
    return {
        name: table[table["run_id"].isin(kept)] if "run_id" in table and name != "searches" else table
        for name, table in tables.items()
    }


def run_folders(where: Path) -> list[Path]:
    """Returns `where` itself if it is a run, else the runs in it."""
    return _folders_with("run.json", where)


def collections_in(where: Path) -> list[Path]:
    """Returns `where` itself if it is a collection, else the collections directly in it."""
    return _folders_with("runs.parquet", where)


def _folders_with(file: str, where: Path) -> list[Path]:
    if (where / file).is_file():
        return [where]
    return sorted(path for path in where.iterdir() if not path.name.startswith(".") and (path / file).is_file())


def read_row(folder: Path) -> RunRow | None:
    """Reads a run's row; None, with a warning, if its run.json cannot be used: other runs must not be affected.

    A copy next to its original is skipped too, since its rows would count twice.
    """
    row = _read_json_row(folder / "run.json", RunRow)
    if row is not None and folder.name != row.run_id and (folder.parent / row.run_id / "run.json").is_file():
        warnings.warn(f"{folder} is left out: it is a copy of {row.run_id}", stacklevel=2)
        return None
    return row


def _read_json_row(path: Path, kind: type[Row]) -> Row | None:
    """Reads a row. A row of an earlier version may lack columns with a default, which are None."""
    try:
        row: dict[str, Any] = dict(json.loads(read_text(path)))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        warnings.warn(f"{path} cannot be read and is left out: {error}", stacklevel=3)
        return None
    version = int(row.get("schema_version") or 0)
    is_older = 0 < version < SCHEMA_VERSION
    needed = [column.name for column in fields(kind) if not is_older or column.default is MISSING]
    problem = ""
    if version > SCHEMA_VERSION:
        problem = f"schema_version {version} is newer than {SCHEMA_VERSION}; update zerobench"
    elif missing := [name for name in needed if name not in row]:
        problem = f"it lacks {', '.join(missing[:3])}; an older zerobench wrote it"
    elif kind is RunRow:
        problem = problem_of_config(row["config"])
    if problem:
        warnings.warn(f"{path} is left out: {problem}", stacklevel=3)
        return None
    values: dict[str, Any] = {column.name: row.get(column.name) for column in fields(kind)}
    return kind(**values)


def problem_of_config(text: str) -> str:
    """Returns the end of a message if a run's config is damaged or of a later version, else ""."""
    try:
        version = json.loads(text).get(VERSION_KEY, 1)
    except (ValueError, TypeError, AttributeError, RecursionError):
        return f"config is {text!r:.60}, which is not a JSON object"
    return f"config has version {version}, where {VERSION} is the newest; update zerobench" if version > VERSION else ""


def collect(results: Results, folder: Path) -> None:
    """Writes a collection: every table as one parquet file. Replaces an existing one."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, kind in ALL_TABLES.items():
        if name in OPTIONAL and getattr(results, name).empty:
            (folder / f"{name}.parquet").unlink(missing_ok=True)
        else:
            write_frame(folder / f"{name}.parquet", getattr(results, name), kind, with_run_id=name in TABLES)


COLUMNS = ("run_id", "rank", "metric", "value", "unit")

_CHOSEN = {field.name for field in fields(RunSetting)}

FIGURES = {
    column.name: column.unit
    for column in columns_of("runs")
    if column.unit and column.name not in _CHOSEN | {"schema_version"}
}
"""Metric -> unit: the measured or predicted numbers in the table of runs, in its order."""

OF_MEMORY: dict[tuple[str, str, str], str] = {
    ("device", "total", "max_bytes"): "peak_bytes",
    ("device", "states", "max_bytes"): "states_bytes",
    **{("device", name, "at_peak_bytes"): f"peak_{name}_bytes" for name in CATEGORIES},
    **{("device", name, "max_bytes"): f"max_{name}_bytes" for name in CATEGORIES},
    ("device", "allocated", "max_bytes"): "allocator_peak_bytes",
    ("device", "outside_ledger", "max_bytes"): "outside_ledger_bytes",
    ("host", "total", "max_bytes"): "host_peak_bytes",
    ("host", "states", "max_bytes"): "host_states_bytes",
    ("nvme", "total", "max_bytes"): "nvme_bytes",
}
"""Tier, category and column of a memory row of a whole step -> the corresponding metric."""

OF_STEPS = {"seconds": "step_s", "forward_s": "forward_s", "backward_s": "backward_s", "update_s": "update_s"}
"""Column of steps -> the metric that is its median over the measured steps of the timed pass."""

RANKS = (
    *OF_MEMORY.values(), *OF_STEPS.values(), "payload_bytes", "volume_psi", *(f"volume_{n}_psi" for n in COLLECTIVES),
)  # fmt: skip
"""Metrics for which ranks have their own figures."""


def _of_traffic(runs: pd.DataFrame, traffic: pd.DataFrame) -> pd.DataFrame:
    """Sums per step: those of all measured steps divided by their number, as in the run's own figures."""
    runs = runs.set_index("run_id")
    traffic = traffic[~traffic["kind"].isin(LINKS) & ~traffic["control"].fillna(True)]
    steps = traffic["run_id"].map({name: json.loads(text)["measure"]["steps"] for name, text in runs["config"].items()})
    psi = traffic["run_id"].map(runs["psi"].astype("float64"))
    moved = traffic[["run_id", "rank"]].assign(
        payload_bytes=traffic["payload_bytes"] / steps, volume_psi=traffic["volume_elements"] / psi / steps
    )
    for name in COLLECTIVES:
        moved[f"volume_{name}_psi"] = moved["volume_psi"].where(traffic["kind"] == name, 0.0)
    return moved.groupby(["run_id", "rank"]).sum().reset_index()
