"""Finished runs as one object: `Results`, the tables of one or many runs, and `Run`, those of exactly one.

Frames come typed (typed_frames.py): ordered categories, integer bytes, units. Text, HTML and figures are presentations
of these tables: modules that import them, and are imported here when they are used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any

import pandas as pd

from ..config.flat import swept
from .long_form import long_form
from .pick import pick
from .typed_frames import typed


class Later:
    """A table that is read when it is first used, by whichever Results that has it."""

    def __init__(self, read: Callable[[], pd.DataFrame]) -> None:
        self._read = read

    @cached_property
    def frame(self) -> pd.DataFrame:
        """The table."""
        return self._read()


@dataclass(frozen=True, repr=False)
class Results:
    """Tables of one or many runs. `runs`: one row per run. The others carry `run_id`; their columns: records/.

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
    searches: pd.DataFrame

    def __post_init__(self) -> None:
        for name, table in vars(self).items():
            if not isinstance(table, Later):
                object.__setattr__(self, name, typed(name, table))

    def __getattribute__(self, name: str) -> Any:
        """Reads a table that is used for the first time."""
        found = object.__getattribute__(self, name)
        if isinstance(found, Later):
            found = typed(name, found.frame)
            object.__setattr__(self, name, found)
        return found

    def with_runs(self, runs: pd.DataFrame) -> Results:
        """Returns the same tables with other rows of runs; none is read for it."""
        return Results(**{**vars(self), "runs": runs})

    def of(self, run_ids: Iterable[str]) -> Results:
        """Returns the tables of these runs only."""
        return Results(**self._tables_of(run_ids))

    def run(self, name: str) -> Run:
        """Returns one run: by its run_id, by a part that fits no other, or the newest of the cell of that name
        ("zero2 gpt_tiny N=2 b=8"). Raises ValueError, a sentence, where `name` fits none or several.
        """
        rows: list[dict[str, Any]] = self.runs.to_dict("records")  # type: ignore[assignment]
        return Run(**self._tables_of([str(pick(name, rows, "these results")["run_id"])]))

    def sweep(self) -> pd.DataFrame:
        """`runs` with a leading column for each swept key that has no column of its own, named as on the command line:
        "optimizer.lr", "model.hidden", "offload". It is empty where a run's choices have no such key.
        """
        columns = swept(list(self.runs["config"]), beside=self.runs.columns)
        values = {
            key: pd.Series(one, index=self.runs.index, dtype="object").infer_objects() for key, one in columns.items()
        }
        whole = pd.concat([pd.DataFrame(values, index=self.runs.index), self.runs], axis=1)
        whole.attrs = dict(self.runs.attrs)
        return whole

    def long(self, *metrics: str, beside: Sequence[str] = ()) -> pd.DataFrame:
        """Returns measured figures in tidy form, a row per figure: run_id, rank, metric, value, unit.

        A metric is a column of `runs`, and its row without a rank is that column's value; rows with a rank have the
        rank's own figure (long_form.RANKS says which have one). `metrics`: those wanted, all by default. `beside`:
        columns of `sweep()` to carry along, as "strategy". Raises ValueError, a sentence, for one that is not there.
        """
        return long_form(self.sweep(), self.memory, self.steps, self.traffic, metrics, beside)

    @property
    def plot(self) -> Any:
        """Figures of these runs, each a method that returns matplotlib axes: `results.plot.memory()`."""
        return import_module("zerobench.plots").Plots(self)

    def __repr__(self) -> str:
        return str(import_module(".in_text", __package__).text_of(self))

    def _repr_html_(self) -> str:
        return str(import_module(".in_html", __package__).html_of(self))

    def _tables_of(self, run_ids: Iterable[str]) -> dict[str, pd.DataFrame]:
        kept = set(run_ids)

        def of_kept(frame: pd.DataFrame) -> pd.DataFrame:
            return frame[frame["run_id"].isin(kept)] if "run_id" in frame else frame

        def part(name: str, table: Any) -> Any:
            return Later(lambda: of_kept(getattr(self, name))) if isinstance(table, Later) else of_kept(table)

        return {name: part(name, table) for name, table in vars(self).items()}


class Run(Results):
    """Tables of one run, as `Results.run` returns them."""

    @property
    def row(self) -> pd.Series:
        """Its row of the table of runs."""
        return self.runs.iloc[0]

    @property
    def config(self) -> dict[str, Any]:
        """Its whole resolved config."""
        config: dict[str, Any] = json.loads(self.row["config"])
        return config

    def __repr__(self) -> str:
        return str(import_module(".in_text", __package__).text_of_run(self))

    def _repr_html_(self) -> str:
        return str(import_module(".in_html", __package__).html_of_run(self))
