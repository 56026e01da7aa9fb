"""The record of a campaign: shots.csv, summary.json and summary.md, written by the run itself."""

from __future__ import annotations

import json
import platform
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.csv_rows import write_rows

from .campaign import Campaign
from .judge import Verdict
from .marksman import Shot

SHOWN = 20
"""Sentences of a kind that the summary shows."""


def write(campaign: Campaign, verdict: Verdict, folder: Path) -> None:
    """Writes the record of a campaign into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(Shot, campaign.shots, folder / "shots.csv")
    told = {"kind": campaign.kind.name, "seed": campaign.seed, "every_s": campaign.every_s, **_code(campaign)}
    record = told | asdict(verdict)
    (folder / "summary.json").write_text(json.dumps(record, indent=1) + "\n")
    (folder / "summary.md").write_text(summary(told, verdict))


def _code(campaign: Campaign) -> dict[str, Any]:
    head, common = (_git("rev-parse", "HEAD"), _git("merge-base", "HEAD", "origin/main"))
    commit = common[:8] + (" and changes of its own" if head != common else "")
    return {
        "commit": commit, "source_hash": campaign.state.code, "machine": platform.processor(),
        "commands": campaign.state.done,
        "calm_source_hash": sorted(set(calm_code(campaign))),
    }  # fmt: skip


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def calm_code(campaign: Campaign) -> list[str]:
    """Returns the code of each undisturbed run."""
    return [json.loads(path.read_text())["source_hash"] for path in (campaign.work / "calm").glob("*/run.json")]


def summary(told: dict[str, Any], verdict: Verdict) -> str:
    """Returns the record for people."""
    counts = verdict.counts
    word = "equal to the undisturbed sweep" if verdict.is_clean else "NOT as the undisturbed sweep"
    lines = [
        f"# A sweep under fire: {told['kind']}, seed {told['seed']}",
        "",
        f"Written by `make fire` at commit {told['commit']}, code {told['source_hash']};"
        f" undisturbed by code {', '.join(told['calm_source_hash'])}.",
        "",
        f"**{counts['cells']} cells of {counts['cells_of_all']}, {counts['launches']} launches: {word}.**"
        f" {counts['failing_by_design']} launches fail by design, each in its own way.",
        "",
        f"- {counts['shots']} shots: {_list(counts['signals'])}; at {_list(counts['roles'])}",
        f"- while the sweep was: {_list(counts['phases'])}",
        f"- outcomes of the shots: {_list(counts['outcomes'])}",
        f"- {counts['starts']} starts of the commands in {counts['seconds']:.0f} s;"
        f" undisturbed {counts['calm_seconds']:.0f} s",
        f"- {counts['runs']} runs: {_list(counts['statuses'])};"
        f" {counts['bad_runs']} bad ones, of which {counts['bad_runs_not_shot']} were not shot",
        f"- equal in {counts['compared_columns']} columns of each finished run and in"
        f" {counts['compared_tables']} tables: {len(verdict.differences)} differences",
        f"- orphans {counts['orphans']}, duplicated {counts['duplicated']}, lost {counts['lost']},"
        f" hung {counts['hung']}, left behind {counts['leftovers']}",
    ]
    for title, sentences in (
        ("Differences", verdict.differences), ("Left behind", verdict.leftovers), ("Faults", verdict.faults),
    ):  # fmt: skip
        if sentences:
            more = [f"- and {len(sentences) - SHOWN} more"] if len(sentences) > SHOWN else []
            lines += ["", f"## {title}", "", *(f"- {one}" for one in sentences[:SHOWN]), *more]
    return "\n".join([*lines, ""])


def _list(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items(), key=lambda one: -one[1]))
