"""A sweep of 200 cells under random kills, compared with an undisturbed one.

calm       the commands of the sweep, undisturbed: the reference
killed     the same commands; a process of the running command is signaled at random instants, and the command is
           started again until it ends as the calm one did
hit        a run of the killed sweep whose status is not the calm one's: a signal was sent while it ran

Both results folders must then be equal in every column that repeats; no finished run is lost, changed or measured
twice; no process, file or shared memory is left. A campaign that was stopped is taken up where it was, from its folder
below --work: `calm/`, `killed/` (results folders), `tmp/` and `state.json`. A row per campaign is written to kills.csv.

    python -m validation kills --seed 3 --every 5
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pandas as pd
import psutil

import zerobench
from zerobench.host.files import replace_text
from zerobench.results import selection
from zerobench.results.provenance import commit_of, source_hash
from zerobench.results.tables import Results

from .store import Store

SMALL = (
    "model.layers=1", "model.hidden=16", "sequence=16", "measure=quick", "measure.steps=2", "launch.threads=1",
    "device=cpu",
)  # fmt: skip
"""One thread per rank and fixed seeds: losses repeat to the bit."""

COMMANDS: dict[str, tuple[str, ...]] = {
    **{
        f"{strategy} {model}": (
            *SMALL, f"strategy={strategy}", f"model={model}", "world_size=1,2,3", "precision=fp32,bf16",
            "accumulation=1,2", "batch=12",
        )
        for model in ("mlp", "gpt_tiny") for strategy in ("ddp", "zero1", "zero2", "zero3", "fsdp2")
    },
    **{
        f"{strategy} tiers": (
            *SMALL, f"strategy={strategy}", "world_size=1,2,3", "model=mlp", "offload=cpu,nvme",
            "offload.block_bytes=64KiB", "precision=fp32,fp16",
        )
        for strategy in ("zero1", "zero2", "zero3")
    },
    "references": (
        *SMALL, "strategy=zero2,zero3", "world_size=1,2", "model=mlp", "seed=7,8,9", "measure.check_training=true",
        "measure.passes=timed",
    ),
    "repeats": (
        *SMALL, "strategy=ddp,zero1", "world_size=1,2", "model=mlp", "clip=0.5", "measure.repeats=2",
        "measure.trace=true",
    ),
    "invalid": (*SMALL, "strategy=ddp,zero1,zero2", "world_size=1,2", "model=mlp,gpt_tiny", "batch=5"),
    "diverged": (*SMALL, "strategy=ddp,zero3", "world_size=1,2", "model=mlp", "optimizer=sgd", "optimizer.lr=1e6"),
    "failing": (
        *SMALL[2:], "strategy=ddp,zero3", "world_size=1,2", "model=raises,grabs,hangs", "launch.timeout_s=8",
    ),
}  # fmt: skip
"""Name -> a command line: 200 cells, 204 launches. 6 cells are refused and 16 fail by design, in the same way."""

MARK = "ZEROBENCH_KILLS"
"""Environment variable that only the processes of a campaign have. Children inherit it, also if their parent dies."""

SIGNALS = {signal.SIGKILL: 4, signal.SIGTERM: 3, signal.SIGINT: 1, signal.SIGSTOP: 2}
"""Signal -> its weight in the draw. A stopped process continues after at most STOPPED_S."""

STOPPED_S = 3.0
AFTER_A_RUN = 0.3
"""Fraction of the signals that are sent right after a run was finished: its verdict and the next launch follow."""

HANG_S = 300.0
"""Seconds without a finished run after which a start hangs: a fault."""

LEAVE_S = 30.0
"""Seconds in which the other processes of a command that has ended must have ended."""

MOST_STARTS = 150
LONGER_AFTER = 8
"""Starts of one command after which pauses double: a command with failing cells needs one start without a signal."""

SLACK = timedelta(seconds=2)
"""Time by which a signal may precede or follow the run that it hits: a row is begun before its first file."""


@dataclass
class KillsRow:
    """A campaign. `runs_hit`: runs with a status that is not the calm one's; `not_explained`: those of them without a
    signal; `differences`: from the calm sweep; `left_behind`: files, processes and shared memory at the end.
    """

    seed: int
    commit: str
    date: str
    cells: int
    launches: int
    signals: int
    starts: int
    runs_hit: int
    not_explained: int
    hung: int
    differences: int
    orphans: int
    duplicated: int
    lost: int
    left_behind: int
    minutes: float


@dataclass
class CampaignState:
    """The contents of state.json. `calm`: command -> its exit code, and cell, repeat and status of its launches.
    `sent`: time and name of each signal; `seen`: finished run -> digest of its files.
    """

    code: str
    mark: str
    calm: dict[str, Any] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    starts: int = 0
    seconds: float = 0.0
    sent: list[tuple[str, str]] = field(default_factory=list)
    seen: dict[str, str] = field(default_factory=dict)
    hung: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    pids: list[int] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=float, default=5.0, metavar="S", help="mean pause between two signals")
    parser.add_argument("--only", default=",".join(COMMANDS), metavar="NAMES", help="some of the commands")
    parser.add_argument("--work", type=Path, default=Path("build/kills"), metavar="FOLDER")
    parser.add_argument("--out", type=Path, default=Path("results/kills/kills.csv"), metavar="FILE")


def run(chosen: argparse.Namespace) -> int:
    """Runs a campaign. Returns 1 if something differs, is lost or is left."""
    names = chosen.only.split(",")
    if unknown := sorted(set(names) - set(COMMANDS)):
        raise ValueError(f"--only {','.join(unknown)}: must be of {', '.join(COMMANDS)}")
    campaign = Campaign(chosen.work / f"seed-{chosen.seed}", chosen.seed, chosen.every)
    try:
        for name in names:
            campaign.run_calm(name)
        for name in names:
            campaign.run_killed(name)
        faults = campaign.run_once_more(names)
    except KeyboardInterrupt:
        campaign.end_all()
        raise
    row, faults = judge(campaign, chosen.seed, names, faults)
    Store(chosen.out, KillsRow, lambda row: row.seed).put([row])
    print("\n".join([*faults, f"{chosen.out}: {row}"]))
    return int(bool(faults))


class Campaign:
    """The calm and the killed sweep of one seed."""

    def __init__(self, work: Path, seed: int, every_s: float) -> None:
        self.work, self.every_s = work.absolute(), every_s
        self.calm, self.killed = self.work / "calm", self.work / "killed"
        for folder in (self.calm, self.killed, self.work / "tmp"):
            folder.mkdir(parents=True, exist_ok=True)
        code, path = source_hash(""), self.work / "state.json"
        kept = json.loads(path.read_text()) if path.exists() else {"code": code, "mark": os.urandom(6).hex()}
        self.state = CampaignState(**kept)
        if self.state.code != code:
            raise ValueError(f"{work}: begun by other code, {self.state.code}; remove it to begin again")
        self.random = Random(f"{seed} {self.state.starts}")

    def run_calm(self, name: str) -> None:
        """Runs a command undisturbed, unless that is on record."""
        if name in self.state.calm:
            return
        before = finished(self.calm)
        code = self._start(name, self.calm).wait()
        rows = [json.loads((self.calm / run / "run.json").read_text()) for run in finished(self.calm) - before]
        launches = sorted([row["cell_id"], row["repeat"], row["status"]] for row in rows)
        self.state.calm[name] = {"code": code, "launches": launches}
        self._save()
        print(f"{name}, undisturbed: exit {code}, {len(launches)} launches", flush=True)

    def run_killed(self, name: str) -> None:
        """Starts a command until it ends as the calm one did. Raises RuntimeError if it never does."""
        starts, wanted = 0, self.state.calm[name]
        while name not in self.state.done:
            starts += 1
            if starts > MOST_STARTS:
                raise RuntimeError(f"{name} is not done after {MOST_STARTS} starts")
            begun, before = time.monotonic(), len(self.state.sent)
            code = self._run_one_start(name, self.every_s * 2 ** (starts // LONGER_AFTER))
            begun_first = sorted(finished(self.killed), key=selection.split)
            rows = [json.loads((self.killed / run / "run.json").read_text()) for run in begun_first]
            statuses = {(row["cell_id"], row["repeat"]): row["status"] for row in rows}
            if code == wanted["code"] and all(statuses.get((c, r)) == s for c, r, s in wanted["launches"]):
                self.state.done.append(name)
            self.state.starts += 1
            self.state.seconds += time.monotonic() - begun
            self._save()
            sent = ", ".join(word for _, word in self.state.sent[before:]) or "no signal"
            print(f"{name}, start {starts}: exit {code}, {sent}", flush=True)

    def run_once_more(self, names: list[str]) -> list[str]:
        """Runs all commands without signals, which must reuse every run; returns what is wrong.

        That sweep removes leftovers without a recorded owner, which are kept for an hour otherwise.
        """
        for folder in (self.killed, self.killed / ".references"):
            for path in folder.glob(".*"):
                os.utime(path, (0, 0))
        calm = {name: self.state.calm[name]["code"] for name in names}
        found = {name: self._start(name, self.killed).wait() for name in names}
        return [f"{name}: ends with {found[name]}, the calm one with {calm[name]}" for name in names
                if found[name] != calm[name]]  # fmt: skip

    def end_all(self) -> None:
        """Kills all processes of the campaign."""
        for process in self.processes():
            _send(process, signal.SIGKILL)

    def processes(self) -> list[psutil.Process]:
        """Returns the living processes of the campaign."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == self.state.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def _start(self, name: str, where: Path) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ, MARK: self.state.mark, "TMPDIR": str(self.work / "tmp"), "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(self.work / "torch"),
        }  # fmt: skip
        line = [sys.executable, "-m", "tests.failing_models", "-m", *COMMANDS[name], f"results_dir={where}"]
        heed_ctrl_c = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
        with (self.work / f"{where.name}.txt").open("ab") as log:
            return subprocess.Popen(
                line, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                preexec_fn=heed_ctrl_c, cwd=Path(__file__).parents[1],
            )  # fmt: skip

    def _run_one_start(self, name: str, every_s: float) -> int:
        """Starts a command and signals its processes until it ends. Returns its exit code."""
        command = self._start(name, self.killed)
        runs, since = finished(self.killed), time.monotonic()
        due = time.monotonic() + self.random.uniform(0, 2 * every_s)
        after_a_run = self.random.random() < AFTER_A_RUN
        while command.poll() is None:
            time.sleep(0.02)
            now, before = finished(self.killed), runs
            if now != before:
                runs, since = now, time.monotonic()
            if time.monotonic() - since > HANG_S:
                self.state.hung.append(f"{name}, start {self.state.starts + 1}")
                self.end_all()
            if time.monotonic() > due and (not after_a_run or now > before):
                self._signal_one(command)
                due = time.monotonic() + self.random.uniform(0, 2 * every_s)
                after_a_run = self.random.random() < AFTER_A_RUN
        self._wait_for_processes(name)
        return command.returncode

    def _signal_one(self, command: subprocess.Popen[bytes]) -> None:
        """Signals the command itself in half of the cases, else one of its processes."""
        processes = self.processes()
        self.state.pids = sorted({*self.state.pids, *(one.pid for one in processes)})
        others = [one for one in processes if one.pid != command.pid]
        is_command = self.random.random() < 0.5 or not others
        if is_command and command.pid not in {one.pid for one in processes}:
            return  # it has just ended
        victim = psutil.Process(command.pid) if is_command else self.random.choice(others)
        number = self.random.choices(list(SIGNALS), list(SIGNALS.values()))[0]
        if _send(victim, number):
            self.state.sent.append((_now(), f"{number.name} {'command' if is_command else 'other'}"))
            if number == signal.SIGSTOP:
                time.sleep(self.random.uniform(0.2, STOPPED_S))
                _send(victim, signal.SIGCONT)

    def _wait_for_processes(self, name: str) -> None:
        """Records the processes that outlive their command, and digests of the runs that it has finished."""
        deadline = time.monotonic() + LEAVE_S
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        self.state.orphans += [f"{name}, start {self.state.starts + 1}: process {one.pid}" for one in left]
        for run_id in sorted(finished(self.killed) - set(self.state.seen)):
            self.state.seen[run_id] = digest(self.killed / run_id)

    def _save(self) -> None:
        replace_text(self.work / "state.json", json.dumps(asdict(self.state), indent=1))


def _send(process: psutil.Process, number: signal.Signals) -> bool:
    """Sends a signal; False if the process has ended, even if another has its number now."""
    try:
        process.send_signal(number)
    except psutil.Error:
        return False
    return True


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def finished(where: Path) -> set[str]:
    """Returns the names of the runs in a results folder."""
    return {entry.name for entry in os.scandir(where) if not entry.name.startswith(".") and entry.is_dir()}


def digest(folder: Path) -> str:
    """Returns a hash of a run's files; of its row, only of the part that a verdict does not add."""
    found = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")):
        data = path.read_bytes()
        if path.name == "run.json":
            verdict = ("training", "training_words", "loss_deviation", "grad_norm_deviation")
            data = json.dumps({key: value for key, value in json.loads(data).items() if key not in verdict}).encode()
        found.update(str(path.relative_to(folder)).encode() + b"\0" + data)
    return found.hexdigest()[:16]


# -- the verdict -----------------------------------------------------------------------------------------------


NOT_REPEATED = (
    "run_id", "started", "seconds", "command", "config", "wall_s", "resident_bytes", "loopback_bytes",
    "reason", "commit", "source_hash", "others_cores", "tokens_per_s", "mfu", "hfu", "overlap", "launcher",
)  # fmt: skip
"""Columns that two sweeps over equal cells need not agree in, besides times."""

LONG_TABLES = ("steps", "memory", "tensors", "lines", "traffic")

OF_THREADS = ("read", "write")
"""Traffic of threads next to the step: the phase is the one that the step is in by then."""

SUMS = ("calls", "elements", "payload_bytes", "wire_bytes", "volume_elements", "within_bytes", "between_bytes")

OF_GLOO = {"fsdp2": ("timed_allocator_peak_bytes",)}
"""Strategy -> columns with bytes that gloo's thread may still hold: the timed pass does not wait for it."""


def judge(campaign: Campaign, seed: int, names: list[str], faults: list[str]) -> tuple[KillsRow, list[str]]:
    """Judges a campaign whose commands are done. Returns its row and a message for each fault, after `faults`."""
    state = campaign.state
    wanted = {(cell, repeat): status for name in names for cell, repeat, status in state.calm[name]["launches"]}
    calm, killed = zerobench.load(campaign.calm), zerobench.load(campaign.killed)
    ok = killed.runs[killed.runs["status"] == "ok"]
    twice = [f"{key}: {n} finished runs" for key, n in ok.groupby(["cell_id", "repeat"]).size().items() if n > 1]
    now = finished(campaign.killed)
    lost = [f"{name}: was finished and is lost, or has changed" for name, was in state.seen.items()
            if name not in now or digest(campaign.killed / name) != was]  # fmt: skip
    unreadable = [f"{name}: cannot be read as a run" for name in sorted(now - set(killed.runs["run_id"]))]
    hit, unexplained = _hit(state, wanted, killed)
    differences, left = _differences(wanted, calm, killed), _left_behind(campaign)
    row = KillsRow(
        seed, commit_of(Path(__file__).parent) or "", _now()[:10], len({cell for cell, _ in wanted}), len(wanted),
        len(state.sent), state.starts, hit, len(unexplained), len(state.hung), len(differences), len(state.orphans),
        len(twice), len(lost) + len(unreadable), len(left), round(state.seconds / 60, 1),
    )  # fmt: skip
    hung = [f"{words}: hung" for words in state.hung]
    return row, [*faults, *twice, *lost, *unreadable, *unexplained, *differences, *hung, *state.orphans, *left]


def _hit(state: CampaignState, wanted: dict[tuple[str, int], str], killed: Results) -> tuple[int, list[str]]:
    """Returns the number of runs with a status that is not the calm one's, and a message for each without a signal."""
    hit, unexplained = 0, []
    times = [datetime.fromisoformat(at) for at, _ in state.sent]
    for row in killed.runs.to_dict("records"):
        if row["status"] in ("ok", wanted.get((row["cell_id"], row["repeat"]))):
            continue
        hit += 1
        begun = datetime.fromisoformat(row["started"])
        ended = begun + timedelta(seconds=row["seconds"])
        if not any(begun - SLACK <= at <= ended + SLACK for at in times):
            unexplained.append(f"{row['run_id']}: {row['status']} without a signal: {row['reason']}")
    return hit, unexplained


def repeated(columns: pd.Index[str]) -> list[str]:
    """Returns the columns that two sweeps over equal cells must agree in."""
    return [name for name in columns if name not in NOT_REPEATED and not name.endswith(("_s", "_s_low", "_s_high"))]


def last_of_each(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns the last run of each cell and repeat, by that index."""
    begun = runs.sort_values("run_id", key=lambda names: names.map(selection.split), kind="stable")
    return begun.drop_duplicates(["cell_id", "repeat"], keep="last").set_index(["cell_id", "repeat"], drop=False)


def _differences(wanted: dict[tuple[str, int], str], calm: Results, killed: Results) -> list[str]:
    ours, theirs = last_of_each(killed.runs), last_of_each(calm.runs)
    found = []
    for key, status in wanted.items():
        if key not in ours.index:
            found.append(f"{key}: no run; the calm one is {status}")
            continue
        one: Any = ours.loc[key]
        other: Any = theirs.loc[key]
        names = repeated(ours.columns) if status == "ok" else ["status"]
        for name in [name for name in names if name not in OF_GLOO.get(one["strategy"], ())]:
            if not (pd.isna(one[name]) and pd.isna(other[name])) and one[name] != other[name]:
                found.append(f"{one['run_id']}: {name} is {one[name]}, calm {other[name]}")
        for table in LONG_TABLES if status == "ok" else ():
            a, b = (_rows_of(getattr(of, table), row["run_id"]) for of, row in ((calm, other), (killed, one)))
            if a != b:
                found.append(f"{one['run_id']}: {table}: {len(a - b)} rows are missing, {len(b - a)} are new")
    return found


def _rows_of(table: pd.DataFrame, run_id: str) -> Counter[str]:
    mine = table[table["run_id"] == run_id]
    if "kind" in mine:
        beside = mine["kind"].isin(OF_THREADS)
        keys = [name for name in mine.columns if name not in (*SUMS, "phase")]
        summed = mine[beside].groupby(keys, dropna=False, observed=True, as_index=False)[list(SUMS)].sum()
        mine = pd.concat([mine[~beside], summed.assign(phase="")])[list(mine.columns)]
    if "tier" in mine and (mine["tier"] == "nvme").any():
        mine = mine[~mine["category"].isin(("allocated", "outside_ledger"))]  # these threads allocate 64 bytes or so
    return Counter(map(repr, mine[repeated(mine.columns)].itertuples(index=False, name=None)))


def _left_behind(campaign: Campaign) -> list[str]:
    found = [f"process {one.pid} is left" for one in campaign.processes()]
    for folder in (campaign.killed, campaign.killed / ".references"):
        paths = [path for path in folder.glob(".*") if not path.name.startswith(".references")]
        found += [f"{path.relative_to(campaign.work)} is left" for path in [*paths, *folder.glob("*/.*")]]
    found += [f"tmp/{path.name} is left" for path in (campaign.work / "tmp").iterdir()]
    pids = set(map(str, campaign.state.pids))
    shared = [path.name for path in Path("/dev/shm").iterdir() if pids & set(path.name.replace("-", "_").split("_"))]
    return found + [f"/dev/shm/{name} is left" for name in shared]
