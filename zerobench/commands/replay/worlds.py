"""The recorded steps of runs, arranged for one page.

stream   events of one rank of one run, in order: rows of the table `events`
panel    a strategy with what is set beside it (an offload, a codec): a stream per recorded rank, and the run's row
world    the panels of one number of ranks N, all of them measured or all executed

All panels of a page train the same thing: they agree in SETTING. A panel has the same key in every world.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from ...config.cell import CellConfig
from ...host.environment import SIMULATED
from ...results.tables import Results, latest
from ...strategies import find, spare_look
from ...strategies.spec import StrategySpec
from ...theory.closed_forms import Formula, from_json
from ...theory.strategy import StrategyTheory

MEASURED, EXECUTED = "measured", "executed"

SETTING = ("model", "device", "precision", "optimizer", "micro_batch", "accumulation", "sequence", "checkpointing")
"""Columns of the table of runs that all panels of a page agree in."""

MOST_PANELS = 8


@dataclass(frozen=True)
class Panel:
    """One strategy at one N. `row`: its row of the table of runs, or what an execution has of one. `streams`: rank ->
    its events. `problem`: why there are none, a sentence.
    """

    key: str
    strategy: str
    row: dict[str, Any]
    streams: dict[int, pd.DataFrame]
    problem: str = ""

    @property
    def config(self) -> CellConfig:
        """The resolved cell."""
        return CellConfig.from_json(self.row["config"])

    @property
    def spec(self) -> StrategySpec | None:
        """The strategy's row in the table of strategies; None for one that a user's script knows."""
        return find(self.strategy)

    @property
    def label(self) -> str:
        """Its name for people."""
        name = self.strategy if self.spec is None else self.spec.label
        return f"{name} {self.row.get('systems') or ''}".strip()

    @property
    def color(self) -> str:
        """Its color, as in figures."""
        return (spare_look(0) if self.spec is None else self.spec.look).color

    @property
    def theory(self) -> StrategyTheory | None:
        """The theory of the strategy, or of the stage that partitions the same states."""
        if self.spec is None:
            return None
        stage = self.spec if self.spec.theory or not self.spec.partitions_as else find(self.spec.partitions_as)
        return stage.theory if stage is not None else None

    @property
    def formulas(self) -> dict[str, Formula]:
        """Category -> the closed form of its bytes; empty where theory has none."""
        text = self.row.get("formulas")
        return from_json(text) if isinstance(text, str) else {}


@dataclass(frozen=True)
class World:
    """Panels at one number of ranks. `how`: MEASURED or EXECUTED."""

    ranks: int
    how: str
    panels: tuple[Panel, ...]


def recorded_worlds(results: Results) -> list[World]:
    """Returns the worlds of finished runs that recorded their events, by N and MEASURED before EXECUTED.

    Raises ValueError, a sentence, where there are none, and where they do not train the same thing.
    """
    runs = results.runs[results.runs["run_id"].isin(results.events["run_id"]) & (results.runs["status"] == "ok")]
    if runs.empty:
        raise ValueError(how_to_record(results.runs))
    runs = latest(runs).drop_duplicates("cell_id", keep="last")
    _check_setting(runs)
    worlds = []
    of = runs["world_size"], runs["backend"] == SIMULATED
    for (ranks, simulated), mine in runs.groupby([*of], sort=True):
        panels = _panels(mine, results.events)
        worlds.append(World(int(str(ranks)), EXECUTED if simulated else MEASURED, panels))
    return worlds


def how_to_record(runs: pd.DataFrame) -> str:
    """Returns a sentence with the command that records a step: that of the last finished run, if there is one."""
    finished = runs[runs["status"] == "ok"]
    given = (
        finished["command"].iloc[-1] if len(finished) else "zerobench -m strategy=ddp,zero1,zero2,zero3 world_size=2"
    )
    return f"no finished run has a table of events; record one with: {given} measure.events=true"


def _check_setting(runs: pd.DataFrame) -> None:
    for column in SETTING:
        found = runs[column].astype("object").where(runs[column].notna(), None).unique().tolist()
        if len(found) > 1:
            values = " and ".join(map(str, found))
            raise ValueError(f"runs differ in {column}, which is {values}; choose one with --where {column}={found[0]}")


def _panels(runs: pd.DataFrame, events: pd.DataFrame) -> tuple[Panel, ...]:
    rows: list[dict[str, Any]] = runs.astype("object").where(runs.notna(), None).to_dict("records")  # type: ignore[assignment]
    rows.sort(key=_place)
    if len(rows) > MOST_PANELS:
        raise ValueError(
            f"{len(rows)} cells at N={rows[0]['world_size']}; a page shows {MOST_PANELS}: choose with --where"
        )
    found = [_panel(row, events[events["run_id"] == row["run_id"]]) for row in rows]
    keys = [panel.key for panel in found]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise ValueError(f"several cells of {twice[0]} at N={rows[0]['world_size']}; choose one with --where KEY=VALUE")
    return tuple(found)


def _place(row: dict[str, Any]) -> tuple[str, str]:
    """Sorts DDP, then the stages, then peers by name."""
    return str(row["strategy"]), str(row.get("systems") or "")


def _panel(row: dict[str, Any], events: pd.DataFrame) -> Panel:
    key = f"{row['strategy']} {row.get('systems') or ''}".strip()
    return Panel(key, row["strategy"], row, streams_of(events))


def streams_of(events: pd.DataFrame) -> dict[int, pd.DataFrame]:
    """Returns rank -> its events in order."""
    return {
        int(str(rank)): mine.sort_values("index", ignore_index=True) for rank, mine in events.groupby("rank", sort=True)
    }


def setting_words(panels: Sequence[Panel]) -> str:
    """Returns the setting of a page as words."""
    row = panels[0].row
    psi = f"ψ = {row['psi']:,} parameters, " if row.get("psi") else ""
    batch = f"{row['micro_batch']} sequences of {row['sequence']} tokens per rank and micro-batch"
    return f"{row['model']}, {psi}{row['optimizer']}, {row['precision']}, {batch}, {row['device']}"
