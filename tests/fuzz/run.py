"""Runs slices of cases side by side, each in a process of its own, and keeps what they found.

journal     a line of JSON per case that ended, in FOLDER/seed-S.jsonl; a run goes on after what its seed has there
slice       begins where nothing is; a process that hangs, dies or takes too much memory costs its slice's rest, which
            is begun again behind the case that did it, and that case is a finding
"""

from __future__ import annotations

import gc
import json
import random
import resource
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from zerobench.host.environment import data_bytes
from zerobench.launch.side_by_side import launch_each
from zerobench.launch.start_ranks import Outcome

from . import watch
from .commands import command
from .files import damaged, read_damaged
from .oracle import Verdict, judge, quick

CONFIG, FILE = "config", "file"
AT_ONCE = 250
"""Cases of a slice."""

SLICE_S = 3600.0
"""Seconds after which a slice hangs."""

MEMORY_BYTES = 4 * 2**30
"""Memory that a slice may take on top of what it begins with."""


@dataclass(frozen=True)
class Slice:
    """Cases `numbers` of a `kind`, run in `room`."""

    seed: int
    kind: str
    numbers: tuple[int, ...]
    room: str


@dataclass
class Ended:
    """A case that ended. `drawn`: the way it was drawn, as valid or damaged; the reader, for a file."""

    name: str
    drawn: str
    outcome: str
    cells: int = 0
    sound: int = 0
    executed: int = 0
    seconds: float = 0.0
    findings: tuple[str, ...] = ()


def run_case(seed: int, kind: str, number: int, room: Path) -> Ended:
    """Runs one case in this process, which watch.begin has prepared."""
    draw = random.Random(f"{seed} {kind} {number} judged")
    if kind == CONFIG:
        drawn = command(seed, number)
        return _ended(f"{kind}:{number}", drawn.kind, judge(drawn, draw, room))
    reader, content = damaged(seed, number)
    return _ended(f"{kind}:{number}", reader, read_damaged(reader, content, room))


def _ended(name: str, drawn: str, verdict: Verdict) -> Ended:
    facts = {key: value for key, value in asdict(verdict).items() if key != "findings"}
    return Ended(name, drawn, **facts, findings=tuple(verdict.findings))


def work(job: Slice, tell: Callable[[Any], None]) -> int:
    """Runs a slice in a process of its own, and tells of each case that it begins and that has ended."""
    room = Path(tempfile.mkdtemp(dir=job.room)) / "room"
    watch.begin(room)
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + MEMORY_BYTES, most))
    gc.set_threshold(50_000)  # composing leaves much behind, a hundred times in a second
    with quick():
        for number in job.numbers:
            tell({"begun": f"{job.kind}:{number}"})
            tell(asdict(run_case(job.seed, job.kind, number, room)))
    return len(job.numbers)


class Journal:
    """Cases of a seed that ended, of this version of the fuzz and of what it is held against."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.path = folder / f"seed-{seed}.jsonl"
        lines = self.path.read_text().splitlines() if self.path.is_file() else []
        self.ended = {one["name"]: Ended(**one) for one in map(json.loads, lines)}

    def add(self, ended: Ended) -> None:
        """Keeps a case at once: the next run goes on behind it."""
        self.ended[ended.name] = ended
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(ended)) + "\n")

    def left(self, kind: str, count: int) -> list[int]:
        """Returns the numbers below `count` of cases that have not ended."""
        return [number for number in range(count) if f"{kind}:{number}" not in self.ended]


def slices(seed: int, kind: str, numbers: Sequence[int], room: str) -> Iterator[Slice]:
    """Cuts cases into slices."""
    for begin in range(0, len(numbers), AT_ONCE):
        yield Slice(seed, kind, tuple(numbers[begin : begin + AT_ONCE]), room)


@dataclass
class Listener:
    """Keeps each case that ended, and the one in which a slice's process ended. `begun`: slice -> its last case."""

    journal: Journal
    heard: Callable[[Ended], None]
    begun: dict[int, str] = field(default_factory=dict)

    def __call__(self, place: int, news: Any) -> None:
        """Takes news of a slice."""
        if isinstance(news, Outcome):
            if news.status != "ok" and place in self.begun:
                findings = (f"ends its process: {news.reason}",)
                self._keep(Ended(self.begun[place], "", "crash", findings=findings))
        elif "begun" in news:
            self.begun[place] = news["begun"]
        else:
            self._keep(Ended(**news))

    def _keep(self, ended: Ended) -> None:
        self.journal.add(ended)
        self.heard(ended)


def run(seed: int, counts: dict[str, int], journal: Journal, at_once: int, heard: Callable[[Ended], None]) -> None:
    """Runs all cases that the journal lacks. `counts`: kind -> cases. Raises RuntimeError where none can be run."""
    with tempfile.TemporaryDirectory(prefix="zerobench-fuzz-") as room:
        while jobs := [one for kind, n in counts.items() for one in slices(seed, kind, journal.left(kind, n), room)]:
            before = len(journal.ended)
            outcomes = launch_each(work, jobs, Path(room) / "logs", SLICE_S, at_once, Listener(journal, heard))
            if len(journal.ended) == before:
                raise RuntimeError(f"no case can be run: {outcomes[0].reason}")
