"""The suite's results, written to its folder as they come: a run that is cut short keeps its finished parts.

summary.md        the short table so far
suite.json        the table with every launch: status, reason, seconds, its run's folder, a task's result
runs/SECTION/     the runs' own folders
*.parquet         all runs as one collection, which zerobench.load(FOLDER) reads
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ...host.files import read_text
from ...results import tables
from ...results.provenance import machine, source_hash
from .section import WAITING, Done, Section, Setup, Table

Told = dict[str, Any]
"""A section in suite.json: title, asks, cells, table."""

TRIED = ("code", "torch", "device_class", "small")
"""Fields of suite.json that must agree for an earlier suite's results to count."""


class Record:
    """The record. `sections`: results so far, including those of an earlier, cut suite in this folder."""

    def __init__(self, setup: Setup, order: Iterable[str]) -> None:
        self.setup = setup
        self.order = list(order)
        setup.out.mkdir(parents=True, exist_ok=True)
        where = machine(setup.device, "gloo")
        self.about = {
            "code": source_hash("gpt"), "torch": where["versions"]["torch"], "device_class": where["device_class"],
            "small": setup.small, "began": datetime.now(UTC).isoformat(timespec="seconds"), "machine": where,
        }  # fmt: skip
        earlier = _read(setup.out / "suite.json")
        alike = all(earlier.get("about", {}).get(key) == self.about[key] for key in TRIED)
        self.sections: dict[str, Told] = earlier["sections"] if alike else {}
        self._runs = tables.merge(
            [tables.load(folder) for folder in sorted(setup.out.glob("runs/*")) if folder.is_dir()]
        )

    def earlier(self, section: str, name: str) -> Told | None:
        """Returns the results of an earlier suite in this folder for a task."""
        cells = self.sections.get(section, {}).get("cells", [])
        return next((cell for cell in cells if cell["name"] == name), None)

    def add_run(self, results_dir: Path, run_id: str) -> None:
        """Adds a new or reused run to the collection."""
        if run_id not in set(self._runs.runs["run_id"]):
            self._runs = tables.merge([self._runs, tables.load(results_dir / run_id)])
            tables.collect(self._runs, self.setup.out)

    def write(self, section: Section, done: list[Done], table: Table) -> None:
        """Replaces the results of a section."""
        self.sections[section.name] = {
            "title": section.title, "asks": section.asks, "cells": [_told(one) for one in done],
            "table": {"header": table.header, "rows": table.rows, "notes": table.notes}, "differs": table.differs,
        }  # fmt: skip
        ordered = {name: self.sections[name] for name in self.order if name in self.sections}
        text = json.dumps({"about": self.about, "sections": ordered}, indent=1)
        _replace(self.setup.out / "suite.json", text + "\n")
        _replace(self.setup.out / "summary.md", markdown(self.about, ordered))


def _told(one: Done) -> Told:
    told = {"name": one.name, "status": one.status, "reason": one.reason, "seconds": round(one.seconds, 3)}
    told |= {"reused": one.reused, "run_id": one.row["run_id"] if one.row else None}
    return told | ({"result": one.result} if one.result is not None else {})


def _read(path: Path) -> dict[str, Any]:
    """Reads an earlier suite.json; empty where there is none, or it is incomplete."""
    try:
        found = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) and "sections" in found else {}


def _replace(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.partial")
    aside.write_text(text)
    aside.replace(path)


def markdown(about: Told, sections: dict[str, Told]) -> str:
    """Formats the short table, one part per section."""
    where = about["machine"]
    lines = [
        "# The GPU suite",
        "",
        f"{about['device_class']}; {where['processor']}, {where['cores']} cores; torch {about['torch']}, began"
        f" {about['began']}; `{where['command']}`, commit {where['commit'] or 'unknown'}",
    ]
    for told in sections.values():
        header, rows = told["table"]["header"], told["table"]["rows"]
        lines += ["", f"## {told['title']}", "", told["asks"], ""]
        lines += ["| " + " | ".join(header) + " |", "| --- |" + " --: |" * (len(header) - 1)]
        lines += ["| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows]
        words = [*told["table"]["notes"], *(f"**{sentence}**" for sentence in told["differs"])]
        lines += ["", *(f"- {one}" for one in words)] if words else []
        waiting = sum(cell["status"] == WAITING for cell in told["cells"])
        lines += ["", f"Still to come: {waiting}."] if waiting else []
    return "\n".join(lines) + "\n"
