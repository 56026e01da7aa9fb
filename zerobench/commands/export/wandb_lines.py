"""Runs as Weights & Biases names them, without its package: a folder per run, every file written whole.

wandb-history.jsonl    a JSON object per step: `_step`, `_timestamp`, `_runtime` (seconds), and the values by tag
wandb-summary.json     the numbers of the run's row
config.yaml            key: {value: ...}
wandb-metadata.json    start, command, commit
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from ...results.tables import Results
from .scalars import choices_of, rows_of, said, scalars_of, summary_of

HISTORY, SUMMARY, CONFIG, METADATA = "wandb-history.jsonl", "wandb-summary.json", "config.yaml", "wandb-metadata.json"


def write(results: Results, out: Path) -> str:
    """Writes the runs that are ok below the folder `out`. Raises ValueError where there are none."""
    rows = rows_of(results)
    words = said(results, len(rows), f"{len(rows)} runs in {out}, each with {HISTORY}, {SUMMARY} and {CONFIG}")
    for run in rows:
        folder = out / run["run_id"]
        folder.mkdir(parents=True, exist_ok=True)
        lines = list(history_of(results, run))
        last = {key: lines[-1][key] for key in ("_step", "_timestamp", "_runtime")} if lines else {}
        choices = {key: {"desc": None, "value": value} for key, value in choices_of(run).items()}
        metadata = {"startedAt": run["started"], "args": run["command"], "git": {"commit": run["commit"]}}
        texts = {
            HISTORY: "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines),
            SUMMARY: json.dumps(summary_of(run) | last, indent=1, allow_nan=False),
            CONFIG: yaml.safe_dump({"wandb_version": 1, **choices}, sort_keys=False),
            METADATA: json.dumps(metadata, indent=1),
        }
        for name, text in texts.items():
            aside = folder / f".{name}"
            aside.write_text(text, encoding="utf-8")
            aside.replace(folder / name)
    return words


def history_of(results: Results, run: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields a line per step. Memory within a step is left out: it has another axis."""
    lines: dict[int, dict[str, Any]] = {}
    began = None
    for one in scalars_of(results, run):
        if one.tag.startswith("memory/"):
            continue
        began = one.time if began is None else min(began, one.time)
        line = lines.setdefault(one.step, {"_step": one.step, "_timestamp": one.time})
        line["_timestamp"] = max(line["_timestamp"], one.time)
        line[one.tag] = one.value
    for number in sorted(lines):
        yield lines[number] | {"_runtime": lines[number]["_timestamp"] - (began or 0.0)}
