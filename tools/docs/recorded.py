"""The date and the code of the runs that a table is made of, and those of their defaults that are others today.

A run's folder keeps its commit and its whole config, so nothing here is typed by hand. A *default* is an option of the
strategy that neither the run's command nor its experiment chose.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pandas as pd

from tools.docs.committed import load
from zerobench.sizes import show_bytes
from zerobench.zero.options import Options

EXPERIMENTS = Path(__file__).resolve().parents[2] / "conf/experiment"

SAME_BYTES = ("overlap_gather",)
"""Options that move time and no byte: a table of other defaults is still right about memory and volume."""

SEARCHES = ("memory_cap",)
"""Experiments that search: their dry run has no predictions."""


def recorded(root: Path, experiment: str) -> str:
    """Says when and by which commit the tables of an experiment were recorded, and which defaults are others today."""
    runs = load(root / experiment).runs
    when = " to ".join(sorted({str(runs["started"].min())[:10], str(runs["started"].max())[:10]}))
    commits = ", ".join(sorted({f"`{commit[:7]}`" for commit in runs["commit"]}))
    chosen = (EXPERIMENTS / f"{experiment}.yaml").read_text() + " ".join(runs["command"])
    others = other_defaults(runs, chosen)
    if not others:
        return f"Recorded on {when} (commit {commits})."
    told = ", ".join(
        f"`strategy.{key}` was {_shown(key, then)} (now {_shown(key, now)})" for key, (then, now) in others.items()
    )
    find = "` finds them" if experiment in SEARCHES else " --dry-run` predicts them"
    what = f"Recorded on {when} by earlier code (commit {commits}), with other defaults: {told}."
    return f"{what} Today's states and peaks differ: `zerobench experiment={experiment}{find}."


def other_defaults(runs: pd.DataFrame, chosen: str) -> dict[str, tuple[Any, Any]]:
    """Returns option -> its value in these runs and today's default, where they differ and `chosen`, the text of the
    command and of the experiment, does not name the option.
    """
    today = {one.name: one.default for one in fields(Options)}
    found: dict[str, tuple[Any, Any]] = {}
    for text in runs["config"]:
        section = json.loads(text)["strategy"]
        if section.get("mode") != "own":  # a peer, or our engine by the table of another system's defaults
            continue
        for key in set(section) & set(today) - set(found) - set(SAME_BYTES):
            if section[key] != today[key] and key not in chosen:
                found[key] = section[key], today[key]
    return dict(sorted(found.items()))


def _shown(key: str, value: Any) -> str:
    sized = key.endswith("_bytes") and isinstance(value, int)
    return show_bytes(value) if sized else f"`{str(value).lower()}`"
