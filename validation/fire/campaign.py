"""A campaign: the calm sweep, then the same sweep under fire, each command started again until it is done.

All is kept in a folder, so that a campaign that is stopped is taken up where it was::

    calm/, fired/      results folders
    tmp/, torch/       the sweep's temporary files, and a cache that torch keeps among them otherwise
    calm.json          command -> its exit code, and cell, repeat and status of its launches
    state.json         what the campaign is, commands that are done, starts, seconds; runs that were seen -> digest
    shots.csv          the shots so far

lost     a node of SLURM whose slurmd was killed with all that it had started, as by a loss of power; it comes back
held     a process of a job that SLURM still has: it outlives the command that submitted it, and is no orphan
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from zerobench.cluster.store import JOIN_S
from zerobench.dispatch.slurm import OVER
from zerobench.host.files import PROBE
from zerobench.host.leases import BROKEN
from zerobench.results import selection, tables
from zerobench.results.leftovers import JOBS
from zerobench.results.provenance import source_hash

from ..store import read, write
from .commands import KINDS, FiredCommand, LaunchKind
from .shots import MARK, Marksman, Shot, Victim, finished, send, victims

if TYPE_CHECKING:
    from tests.cluster.slurm import Slurm

LEAVE_S = 30.0
"""Time in which the processes of a start that was shot must have ended."""

LONGER_AFTER = 8
"""Starts of a command after which the pauses between shots are twice as long."""

MOST_STARTS = 150


PATIENCE_S = JOIN_S + 120.0
"""A start that has written nothing for so long hangs: a fault. The processes of a job are waited for, for JOIN_S, where
one was killed before it had come; as long waits torchrun's agent at its end for another.
"""

LOOK_S = 10.0
"""Interval at which a start is looked at for that."""

LEASES = ("lease-", ".lease", PROBE, BROKEN)
"""How names of leases begin, and of the files by which a file server's clock is read."""


@dataclass
class RunningStart:
    """The processes of one start."""

    processes: list[subprocess.Popen[bytes]]
    where: Path

    def wait_all(self, on_hang: Callable[[], None]) -> int:
        """Waits for all; returns the exit code of the first. Calls `on_hang` where the folder stands still."""
        last, since = -1.0, time.monotonic()
        look = since
        while any(process.poll() is None for process in self.processes):
            time.sleep(0.1)
            if time.monotonic() < look:
                continue
            look = time.monotonic() + LOOK_S
            now = newest(self.where)
            if now != last:
                last, since = now, time.monotonic()
            elif time.monotonic() - since > PATIENCE_S:
                on_hang()
                since = time.monotonic()
        return self.processes[0].returncode


def begin(line: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Starts a process of a start, which heeds Ctrl-C whatever its parent does."""

    def heed_ctrl_c() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)

    with log.open("ab") as out:
        return subprocess.Popen(
            line, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
            preexec_fn=heed_ctrl_c, cwd=Path(__file__).parents[2],
        )  # fmt: skip


def newest(where: Path) -> float:
    """Returns the time of the last change in a results folder, of a run or of a file in the hidden folders. Leases do
    not count, which a thread renews whatever the sweep does.
    """
    changes = [0.0]
    for entry in os.scandir(where):
        with suppress(OSError):  # it is removed meanwhile
            changes.append(0.0 if entry.name.startswith(".") else entry.stat().st_ctime)
    for hidden in where.glob(".*"):
        for at, _, names in os.walk(hidden):
            for name in names:
                with suppress(OSError):
                    path = os.path.join(at, name)
                    changes.append(0.0 if name.startswith(LEASES) else os.stat(path).st_mtime)
    return max(changes)


SETTLE_S = 240.0
"""Time for the jobs that killed commands have left in the queue: each begins, finds that it is not wanted, and ends."""


class SlurmNodes:
    """The nodes of a campaign's SLURM."""

    def __init__(self, slurm: Slurm) -> None:
        self.slurm = slurm

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a command that submits jobs."""
        return self.slurm.environment

    def living(self) -> dict[int, str]:
        """Returns process id of the slurmd -> name, of the nodes that are there."""
        return {process.pid: name for name, process in list(self.slurm.nodes.items()) if process.poll() is None}

    def lose(self, name: str, away_s: float) -> None:
        """Kills a node and brings it back after that time, whether SLURM has noticed or not."""
        self.slurm.kill_node(name)
        time.sleep(away_s)
        self.slurm.start_node(name)

    def unfinished(self) -> set[str]:
        """Returns the ids of the jobs that run or wait."""
        return {one for one, (state, _) in self.slurm.jobs().items() if state not in OVER}

    def cancel(self) -> None:
        """Cancels all jobs."""
        self.slurm.ask("scancel", "--quiet", "--me")

    def settle(self) -> set[str]:
        """Waits until no job runs or waits; returns those that still do after SETTLE_S."""
        deadline = time.monotonic() + SETTLE_S
        while (left := self.unfinished()) and time.monotonic() < deadline:
            time.sleep(1.0)
        return left


@contextmanager
def nodes_of(kind: LaunchKind) -> Iterator[SlurmNodes | None]:
    """Runs a SLURM for the duration of the context, where the kind needs one."""
    if not kind.on_slurm:
        yield None
        return
    folder = Path(tempfile.mkdtemp(prefix="fire-slurm-"))  # not below --work: the path of a socket must be short
    from tests.cluster.slurm import Slurm

    slurm = Slurm(folder)
    try:
        slurm.start()
        yield SlurmNodes(slurm)
    finally:
        slurm.stop()
        shutil.rmtree(folder, ignore_errors=True)


@dataclass
class CampaignState:
    """The contents of state.json. `seen`: run -> digest of its files when it was first seen."""

    campaign: str
    code: str
    done: list[str] = field(default_factory=list)
    starts: int = 0
    seconds: float = 0.0
    hung: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    seen: dict[str, str] = field(default_factory=dict)
    pids: list[int] = field(default_factory=list)
    last_codes: dict[str, int] = field(default_factory=dict)


class Campaign:
    """One kind of launch under the shots of one seed."""

    def __init__(
        self, work: Path, kind: str, seed: int, every_s: float, say: Callable[[str], None] = print,
        nodes: SlurmNodes | None = None,
    ) -> None:  # fmt: skip
        self.work, self.kind, self.seed, self.every_s, self.say = work.absolute(), KINDS[kind], seed, every_s, say
        self.nodes = nodes
        for name in ("calm", "fired", "tmp"):
            (work / name).mkdir(parents=True, exist_ok=True)
        self.calm: dict[str, Any] = _read(work / "calm.json", {})
        code = source_hash("")
        self.state = CampaignState(**_read(work / "state.json", {"campaign": uuid.uuid4().hex[:12], "code": code}))
        if self.state.code != code:
            raise ValueError(f"{work}: begun by other code, {self.state.code}; remove it to begin again")
        self.shots: list[Shot] = read(work / "shots.csv", Shot)
        self._save()

    @property
    def fired(self) -> Path:
        """The results folder of the disturbed sweep."""
        return self.work / "fired"

    # -- the calm sweep -------------------------------------------------------------------------------------

    def run_calm(self, commands: tuple[FiredCommand, ...]) -> None:
        """Runs the commands undisturbed, those that are not on record."""
        for one in commands:
            if one.name in self.calm:
                continue
            begun, before = time.monotonic(), finished(self.work / "calm")
            code = self._start(one, self.work / "calm", 0).wait_all(lambda: None)
            rows = [_row(self.work / "calm" / name) for name in sorted(finished(self.work / "calm") - before)]
            launches = [[row["cell_id"], row["repeat"], row["status"]] for row in rows]
            self.calm[one.name] = {"code": code, "launches": launches, "seconds": round(time.monotonic() - begun, 1)}
            (self.work / "calm.json").write_text(json.dumps(self.calm, indent=1))
            self.say(f"calm {one.name}: exit code {code}, {len(launches)} launches, {self.calm[one.name]['seconds']} s")

    # -- under fire -----------------------------------------------------------------------------------------

    def run_fired(self, commands: tuple[FiredCommand, ...]) -> None:
        """Starts each command under fire until it is done. Raises RuntimeError if it never is.

        Cells that fail are run again at each start, and a command of such is done by a start that no shot hits: so
        pauses become longer.
        """
        for one in commands:
            starts = 0
            while one.name not in self.state.done:
                starts += 1
                if starts > MOST_STARTS:
                    raise RuntimeError(f"{one.name} is not done after {MOST_STARTS} starts")
                self._fire_at(one, self.every_s * 2 ** (starts // LONGER_AFTER))

    def _fire_at(self, command: FiredCommand, every_s: float) -> None:
        """One start under fire, with that mean pause between two shots."""
        begun, number = time.monotonic(), self.state.starts + 1
        marksman = Marksman(self.state.campaign, f"{self.seed} {self.kind.name}", self.fired, number, command.name,
                            len(self.shots) + 1, every_s, self.nodes)  # fmt: skip
        running = self._start(command, self.fired, number)
        marksman.start()
        try:
            code = running.wait_all(lambda: self._hangs(number))
        except KeyboardInterrupt:  # the campaign's own end is a shot at all of it
            marksman.stop()
            marksman.shots += marksman.end_all()
            self._take(marksman, number)
            self._save()
            raise
        marksman.stop()
        self._take(marksman, number)
        self._look_after(number, Random(f"{self.seed} {number}").random() < 0.5)
        self.state.last_codes[command.name] = code
        self.state.seconds = round(self.state.seconds + time.monotonic() - begun, 1)
        there, wanted = self._there(command)
        if there == wanted and code == self.calm[command.name]["code"]:
            self.state.done.append(command.name)
        self._save()
        fired = ", ".join(f"{shot.signal} {shot.role} ({shot.phase})" for shot in marksman.shots) or "no shot"
        self.say(f"{command.name} start {number}: exit {code}, {there} of {wanted} launches; {fired}")

    def _take(self, marksman: Marksman, number: int) -> None:
        self.state.starts = number
        self.shots += marksman.shots
        self.state.pids = sorted({*self.state.pids, *marksman.pids})

    def sweep_once_more(self, commands: tuple[FiredCommand, ...]) -> dict[str, int]:
        """Runs all commands once without shots, which must reuse all; returns their exit codes.

        It is the sweep that finds what was left an hour ago: so long nothing tells whose a folder without a lock is.
        """
        self._settle()
        for folder in (self.fired, self.fired / ".references", self.fired / JOBS):
            for path in folder.glob(".*"):
                os.utime(path, (0, 0))
        codes = {}
        for one in commands:
            self.state.starts += 1
            codes[one.name] = self._start(one, self.fired, self.state.starts).wait_all(lambda: None)
        self._settle()
        self._save()
        return codes

    def _settle(self) -> None:
        """Waits for the jobs that killed commands have left in a queue; records those that do not end."""
        if self.nodes is not None:
            self.state.orphans += [f"job {one} of SLURM is not over" for one in sorted(self.nodes.settle())]

    def end_all(self) -> None:
        """Kills what runs of the campaign, which its own end interrupts."""
        for one in victims(self.state.campaign):
            send(self.state.campaign, one.pid, signal.SIGKILL)

    def _there(self, command: FiredCommand) -> tuple[int, int]:
        """Returns how many of the command's launches have ended as in the calm sweep, and their number."""
        rows = latest(self.fired)
        launches = self.calm[command.name]["launches"]
        return sum(rows.get((cell, repeat), {}).get("status") == status for cell, repeat, status in launches), len(
            launches
        )

    def _start(self, command: FiredCommand, where: Path, number: int) -> RunningStart:
        base = os.environ if self.nodes is None else self.nodes.environment
        environment = {
            **base, MARK: f"{self.state.campaign}:{number}", "TMPDIR": str(self.work / "tmp"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.work / "torch"), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        log = self.work / f"log-{where.name}-{command.name}.txt"
        lines = self.kind.command_lines([*command.arguments, f"results_dir={where}"])
        return RunningStart([begin(line, environment, log) for line in lines], where)

    def _hangs(self, number: int) -> None:
        """Records a start that hangs, and ends its processes."""
        mine = [one for one in victims(self.state.campaign) if one.start == number]
        self.state.hung.append(f"start {number}: {', '.join(f'{one.role} {one.pid}' for one in mine)}")
        self.end_all()
        if self.nodes is not None:
            self.nodes.cancel()

    def _look_after(self, number: int, waits: bool) -> None:
        """Records orphans of earlier starts, lost runs, changed runs; half of the starts begin while others end."""
        deadline = time.monotonic() + LEAVE_S
        while (mine := self._left_of(number + waits)) and time.monotonic() < deadline:
            time.sleep(0.1)
        self.state.orphans += [f"start {one.start}: {one.role} {one.pid}" for one in mine]
        now = finished(self.fired)
        self.state.lost += sorted(name for name in self.state.seen if name not in now and name not in self.state.lost)
        for name in sorted(now - set(self.state.seen)):
            self.state.seen[name] = digest(self.fired / name)

    def _left_of(self, number: int) -> list[Victim]:
        """Returns the processes of earlier starts than that; those of jobs that SLURM still has are not left."""
        held = set() if self.nodes is None else self.nodes.unfinished()
        return [one for one in victims(self.state.campaign) if one.start < number and one.job not in held]

    def _save(self) -> None:
        write(self.work / "shots.csv", Shot, self.shots)
        aside = self.work / ".state.json"
        aside.write_text(json.dumps(asdict(self.state), indent=1))
        aside.replace(self.work / "state.json")


def digest(folder: Path) -> str:
    """Returns a hash of a run's files; of its row only what a verdict does not add."""
    found = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")):
        data = path.read_bytes()
        if path.name == "run.json":
            verdict = ("training", "training_words", "loss_deviation", "grad_norm_deviation")
            data = json.dumps({key: value for key, value in json.loads(data).items() if key not in verdict}).encode()
        found.update(str(path.relative_to(folder)).encode() + b"\0" + data)
    return found.hexdigest()[:16]


def latest(where: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Returns (cell, repeat) -> the row of its last run."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a damaged run is a difference, found by the comparison
        for name in sorted(finished(where), key=selection.split):
            row = tables.read_row(where / name)
            if row is not None:
                found[row["cell_id"], row["repeat"]] = row
    return found


def _row(folder: Path) -> dict[str, Any]:
    row: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return row


def _read(path: Path, otherwise: Any) -> Any:
    return json.loads(path.read_text()) if path.exists() else otherwise
