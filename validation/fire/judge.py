"""The verdict on a campaign: equal to the calm sweep, nothing lost, nothing twice, nothing left, every bad run shot.

What repeats, and so must be equal, is every column but those of NOT_REPEATED: times, the process's memory as the system
sees it, and the names, dates, commands and code of runs.
The config names the results folder; the cell's hash is of the rest of it.
"""

from __future__ import annotations

import json
import platform
import subprocess
from collections import Counter
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import psutil

import zerobench
from zerobench.cluster.store import JOIN_S
from zerobench.results import selection
from zerobench.results.board import BOARD
from zerobench.results.folders import PARTIAL
from zerobench.results.run_files import PREFIX as CACHE
from zerobench.results.tables import Results

from ..store import write as write_rows
from .campaign import Campaign, digest
from .commands import COMMANDS
from .shots import Shot, finished, victims

NOT_REPEATED = (
    "run_id", "started", "seconds", "command", "config", "wall_s", "resident_bytes", "loopback_bytes", "heap_bytes",
    "reason", "commit", "source_hash", "others_cores", "tokens_per_s", "mfu", "hfu", "overlap", "launcher",
)  # fmt: skip
"""Columns beside those that end with _s or _s_low, _s_high."""

TIMES = ("_s", "_s_low", "_s_high")

OF_THREADS = ("read", "write")
"""Kinds of traffic that threads beside the step do: the phase is the one that the step is in by then."""

SUMS = ("calls", "elements", "payload_bytes", "wire_bytes", "volume_elements", "within_bytes", "between_bytes")
"""Columns of the table `traffic` that add up."""

OF_ALLOCATOR = ("allocated", "outside_ledger")
"""Categories that hold what those threads allocate meanwhile, some 64 bytes at a time."""

OF_GLOO = {"fsdp2": ("timed_allocator_peak_bytes",)}
"""Strategy -> columns that hold what gloo's thread may or may not still hold: of the timed pass, which does not wait
for it, where the strategy makes new buffers for each collective.
"""

LONG_TABLES = ("steps", "memory", "tensors", "lines", "traffic")

STAYS = (".references", CACHE)
"""How hidden entries of a results folder begin that are meant to stay: reading many runs makes a cache."""

OF_TORCHRUN = "torchelastic_"
"""How folders begin that each agent of torchrun makes for its logs, and leaves, shot or not."""

SLACK = timedelta(seconds=2)
"""Time by which a shot may precede or follow the run that it hits: a row is begun before its first file."""

LOST = timedelta(seconds=JOIN_S + 60.0)
"""Time within which a job of several tasks ends where one of them was shot: the others wait for it, for JOIN_S."""


@dataclass
class CampaignVerdict:
    """`differences`, `leftovers`, `faults`: sentences; none if all is as it should be. `counts`: what happened."""

    counts: dict[str, Any] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """True if nothing differs, is left or went wrong."""
        return not (self.differences or self.leftovers or self.faults)


def judge(campaign: Campaign, codes: dict[str, int]) -> CampaignVerdict:
    """Judges the commands of a campaign that are done; `codes` are of the one sweep more of these."""
    verdict = CampaignVerdict()
    wanted = {
        (cell, repeat): status for name in codes for cell, repeat, status in campaign.calm[name]["launches"]
    }  # fmt: skip
    calm, fired = zerobench.load(campaign.work / "calm"), zerobench.load(campaign.fired)
    _compare(verdict, wanted, calm, fired)
    _count(verdict, campaign, wanted, fired)
    _account(verdict, campaign, wanted, fired)
    _look_for_leftovers(verdict, campaign)
    for name, code in codes.items():
        if code != campaign.calm[name]["code"]:
            verdict.faults.append(f"{name}: one more sweep ended with {code}, the calm one with {campaign.calm[name]}")
    verdict.faults += [f"hung: {words}" for words in campaign.state.hung]
    verdict.faults += [f"orphan: {words}" for words in campaign.state.orphans]
    return verdict


# -- equality -----------------------------------------------------------------------------------------------


def repeated(columns: pd.Index[str]) -> list[str]:
    """Returns the columns that two sweeps over equal cells must agree in."""
    return [name for name in columns if name not in NOT_REPEATED and not name.endswith(TIMES)]


def last_of_each(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns the last run of each cell and repeat, by that index."""
    order = sorted(range(len(runs)), key=[selection.split(name) for name in runs["run_id"]].__getitem__)
    return (
        runs.iloc[order]
        .drop_duplicates(["cell_id", "repeat"], keep="last")
        .set_index(["cell_id", "repeat"], drop=False)
    )


def _compare(verdict: CampaignVerdict, wanted: dict[tuple[str, int], str], calm: Results, fired: Results) -> None:
    one, other = last_of_each(calm.runs), last_of_each(fired.runs)
    verdict.counts["launches"], verdict.counts["compared_tables"] = len(wanted), 0
    verdict.counts["compared_columns"] = len(repeated(one.columns))
    for key, status in wanted.items():
        if key not in other.index:
            verdict.differences.append(f"{key}: no run; the calm one is {status}")
            continue
        ours: Any = other.loc[key]
        theirs: Any = one.loc[key]
        names = repeated(one.columns) if status == "ok" else ["status"]
        names = [name for name in names if name not in OF_GLOO.get(ours["strategy"], ())]
        off = [name for name in names if not _same(ours[name], theirs[name])]
        verdict.differences += [f"{ours['run_id']}: {name} is {ours[name]}, calm {theirs[name]}" for name in off]
        if status == "ok":
            for table in LONG_TABLES:
                verdict.counts["compared_tables"] += 1
                a, b = (_rows(getattr(part, table), row["run_id"]) for part, row in ((calm, theirs), (fired, ours)))
                if a != b:
                    words = f"{len(a - b)} rows of the calm one are not there, {len(b - a)} others are"
                    verdict.differences.append(f"{ours['run_id']}: {table}: {words}")


def _same(one: Any, other: Any) -> bool:
    missing = bool(pd.isna(one)), bool(pd.isna(other))
    return all(missing) if any(missing) else bool(one == other)


def _rows(table: pd.DataFrame, run_id: str) -> Counter[str]:
    mine = table[table["run_id"] == run_id]
    if "kind" in mine:
        mine = _without_phases(mine)
    if "tier" in mine and (mine["tier"] == "nvme").any():
        mine = mine[~mine["category"].isin(OF_ALLOCATOR)]
    return Counter(map(repr, mine[repeated(mine.columns)].itertuples(index=False, name=None)))


def _without_phases(traffic: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows with those of threads added up over phases."""
    beside = traffic["kind"].isin(OF_THREADS)
    keys = [name for name in traffic.columns if name not in (*SUMS, "phase")]
    summed = traffic[beside].groupby(keys, dropna=False, observed=True, as_index=False)[list(SUMS)].sum()
    return pd.concat([traffic[~beside], summed.assign(phase="")])[list(traffic.columns)]


# -- runs and shots -----------------------------------------------------------------------------------------


def _count(verdict: CampaignVerdict, campaign: Campaign, wanted: dict[tuple[str, int], str], fired: Results) -> None:
    runs, state, shots = fired.runs, campaign.state, campaign.shots
    finished_ok = runs[runs.status == "ok"]
    twice = finished_ok.groupby(["cell_id", "repeat"]).size()
    verdict.faults += [f"{key}: {count} finished runs" for key, count in twice[twice > 1].items()]
    verdict.faults += [f"{name}: the run was there, and is not" for name in state.lost]
    changed = [name for name, was in state.seen.items() if name in finished(campaign.fired)
               and digest(campaign.fired / name) != was]  # fmt: skip
    verdict.faults += [f"{name}: the run has changed since it was written" for name in changed]
    folders = finished(campaign.fired)
    verdict.faults += [f"{name}: a folder that cannot be read as a run" for name in folders - set(runs.run_id)]
    verdict.counts |= {
        "cells": len({cell for cell, _ in wanted}), "failing_by_design": sum(s != "ok" for s in wanted.values()),
        "shots": len(shots), "signals": dict(Counter(shot.signal for shot in shots)),
        "roles": dict(Counter(shot.role for shot in shots)), "aims": dict(Counter(shot.aim for shot in shots)),
        "phases": dict(Counter(shot.phase for shot in shots)), "starts": state.starts, "runs": len(runs),
        "statuses": dict(Counter(runs.status)), "orphans": len(state.orphans), "hung": len(state.hung),
        "lost": len(state.lost), "duplicated": int((twice > 1).sum()), "seconds": state.seconds,
        "calm_seconds": round(sum(one["seconds"] for one in campaign.calm.values()), 1),
        "cells_of_all": sum(one.cells for one in COMMANDS),
    }  # fmt: skip


def _account(verdict: CampaignVerdict, campaign: Campaign, wanted: dict[tuple[str, int], str], fired: Results) -> None:
    """Finds the shot of each bad run, and fills in the outcome of every shot."""
    names = set(fired.runs.run_id)
    for shot in campaign.shots:
        shot.outcome = "none"
        if shot.launch and shot.role == "command" and shot.signal == "SIGKILL":
            shot.outcome = "its partial run was removed"
    unshot = 0
    for row in fired.runs.to_dict("records"):
        if row["status"] in ("ok", wanted.get((row["cell_id"], row["repeat"]))):
            continue
        begun = datetime.fromisoformat(row["started"])
        ended = begun + timedelta(seconds=row["seconds"])
        if row["seconds"] == 0.0:  # its job was lost before it began
            begun -= LOST
        mine = [shot for shot in campaign.shots if begun - SLACK <= datetime.fromisoformat(shot.at) <= ended + SLACK]
        mine = [shot for shot in mine if not shot.launch or row["run_id"].startswith(shot.launch)] or mine
        for shot in mine:
            shot.outcome = f"{row['status']}: {row['run_id']}"
        if not mine:
            unshot += 1
            verdict.faults.append(f"{row['run_id']}: {row['status']}, and was not shot: {row['reason']}")
    verdict.counts |= {
        "bad_runs": sum(r["status"] not in ("ok", wanted.get((r["cell_id"], r["repeat"])))
                        for r in fired.runs.to_dict("records")),
        "bad_runs_not_shot": unshot, "outcomes": dict(Counter(str(s.outcome).split(":")[0] for s in campaign.shots)),
    }  # fmt: skip
    verdict.counts["runs_read"] = len(names)


# -- what is left -------------------------------------------------------------------------------------------


def _look_for_leftovers(verdict: CampaignVerdict, campaign: Campaign) -> None:
    mine = victims(campaign.state.campaign)
    verdict.leftovers += [f"process {one.pid}, {one.role} of start {one.start}" for one in mine]
    for folder in (campaign.fired, campaign.fired / ".references"):
        left = [path for path in folder.glob(".*") if not path.name.startswith(STAYS)]
        verdict.leftovers += [f"{path.relative_to(campaign.work)}" for path in left]
        verdict.leftovers += [f"{path.relative_to(campaign.work)}" for path in folder.glob("*/.*")]
    temporary = [path.name for path in (campaign.work / "tmp").iterdir() if not path.name.startswith(OF_TORCHRUN)]
    verdict.leftovers += [f"tmp/{name}" for name in temporary]
    pids = set(map(str, campaign.state.pids))
    shared = [path.name for path in Path("/dev/shm").iterdir() if pids & set(path.name.replace("-", "_").split("_"))]
    verdict.leftovers += [f"/dev/shm/{name}" for name in shared]
    held = {one.pid for one in mine}
    ports = [one for one in psutil.net_connections("inet") if one.status == "LISTEN" and one.pid in held]
    verdict.leftovers += [f"port {getattr(one.laddr, 'port', '')} of process {one.pid}" for one in ports]
    kinds = {"partial": PARTIAL, "board": BOARD}
    verdict.counts["leftovers"] = len(verdict.leftovers)
    verdict.counts["left_kinds"] = {name: sum(word in one for one in verdict.leftovers) for name, word in kinds.items()}


# -- the record -------------------------------------------------------------------------------------------------


SHOWN = 20
"""Sentences of a kind that the summary shows."""


def write(campaign: Campaign, verdict: CampaignVerdict, folder: Path) -> None:
    """Writes the record of a campaign into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "shots.csv", Shot, campaign.shots)
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


def summary(told: dict[str, Any], verdict: CampaignVerdict) -> str:
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
