"""Results folders on a file system without locks, whose clients see late and whose server loses answers."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import filelock
import pytest

import zerobench
from tests.unit.test_status_show_prune import make
from zerobench.host import temporary
from zerobench.host.temporary import is_claimed
from zerobench.results.folders import PARTIAL, TURN, claim_folder, turn
from zerobench.zero.offload.disk import Scratch, sweep

from .shared_folder import LOSE, clients, missing

REMEMBER_S = 1.0


@dataclass
class Shared:
    """Clients of one folder. `disk`: the folder itself, on the server."""

    disk: Path
    a: Path
    b: Path

    def age(self, name: str, seconds: float) -> None:
        """Makes files of the server older."""
        for path in self.disk.rglob(name):
            os.utime(path, (path.stat().st_mtime - seconds,) * 2)


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Shared]:
    """Two clients whose clocks are an hour behind the server's."""
    if why := missing():
        pytest.skip(f"no shared folder can be mounted here: {why}")
    found = Shared(tmp_path / "disk", tmp_path / "a", tmp_path / "b")
    found.disk.mkdir()
    with clients(found.disk, found.a, found.b, remember_s=REMEMBER_S, skew_s=3600.0):
        yield found


@pytest.fixture
def on_another_machine(shared: Shared, monkeypatch) -> Iterator[Callable[[], Path]]:
    """Claims a folder as a process of another machine does; returns it."""
    held = []

    def claim_it() -> Path:
        with monkeypatch.context() as there:
            there.setattr(filelock._marker, "host_name", lambda: "another")
            held.append(claim_folder(shared.a, "zero1-tiny-n2"))
        return held[-1].path

    yield claim_it
    for aside in held:
        aside.release()


def test_a_dead_owner_on_this_machine_is_known_at_once_without_locks(tmp_path: Path) -> None:
    claiming = f"""
import sys
from pathlib import Path
from zerobench.host.temporary import claim
aside = claim(Path({str(tmp_path)!r}), {PARTIAL!r}, "zero1")
print(aside.path, flush=True)
sys.stdin.read()"""
    with subprocess.Popen(
        [sys.executable, "-c", claiming], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as one:
        seen = Path(one.stdout.readline().strip())
        assert is_claimed(seen)
        one.kill()
        one.wait()
        assert not is_claimed(seen)


def test_lease_of_another_machine_is_free_once_old(shared: Shared, on_another_machine) -> None:
    theirs = on_another_machine()
    seen = shared.b / theirs.name
    assert is_claimed(seen), "its owner cannot be asked"
    shared.age(f".*{temporary.LEASE}", 2 * temporary.OLD_S)  # the server's clock is an hour ahead
    claim_folder(shared.b, "zero2-tiny-n2").release()
    assert not (shared.disk / theirs.name).exists()


def test_a_turn_is_for_one_process_of_all_machines(shared: Shared, monkeypatch) -> None:
    waited = []
    with monkeypatch.context() as there:
        there.setattr(filelock._marker, "host_name", lambda: "another")
        theirs = turn(shared.a, "a launch")
        theirs.__enter__()
    (lease,) = shared.disk.glob(f"{TURN}*")

    def grow_old(waits: bool) -> None:
        if waits:
            waited.append(lease.read_text())
            shared.age(lease.name, 2 * temporary.OLD_S)

    with turn(shared.b, "a launch", grow_old), turn(shared.b, "another launch", lambda _: waited.append("")):
        assert len(waited) == 1
        assert not temporary.acquire(temporary.lease_at(shared.a / lease.name))
        theirs.__exit__(None, None, None)
        assert lease.read_text() not in waited, "who has lost a turn does not end that of the next"
    assert list(shared.disk.iterdir()) == []


def test_names_that_are_seen_late_cost_no_run(shared: Shared) -> None:
    """Each client believes that the next number is free, while the other may have taken it."""
    first = make(shared.a, "zero1")
    names = [first.name, *(make(where, "zero1").name for where in (shared.b, shared.a, shared.b))]
    assert sorted(names) == sorted({path.name for path in shared.disk.iterdir()})
    assert len(set(names)) == 4
    assert {json.loads((shared.disk / name / "run.json").read_text())["run_id"] for name in names} == set(names)
    assert list(shared.disk.rglob(".*")) == []


def test_what_is_removed_by_an_old_name_is_no_run_that_was_finished_meanwhile(shared: Shared) -> None:
    aside = claim_folder(shared.a, "zero1-tiny-n2")
    (aside.path / "logs.txt").write_text("said")
    assert (shared.b / aside.path.name / "logs.txt").exists()
    aside.path.rename(shared.a / "zero1-tiny-n2-1")
    aside.release()
    assert (shared.b / aside.path.name).exists(), "it is seen by its old name"
    temporary.remove(shared.b / aside.path.name)
    assert (shared.disk / "zero1-tiny-n2-1/logs.txt").read_text() == "said"


def test_a_rename_that_was_done_though_it_failed_is_one_run(shared: Shared) -> None:
    (shared.disk.parent / LOSE).touch()
    run = make(shared.a, "zero1")
    assert not (shared.disk.parent / LOSE).exists()
    assert json.loads((shared.disk / run.name / "run.json").read_text())["run_id"] == run.name
    assert list(zerobench.load(shared.disk).runs.run_id) == [run.name]


def test_scratch_folders_stay_on_other_machines_and_without_locks(shared: Shared, tmp_path: Path) -> None:
    theirs, other = Scratch(shared.a), Scratch(tmp_path)
    for folder in (theirs, other):
        (folder.path / "lock").write_text("another machine")
    time.sleep(REMEMBER_S)
    assert sweep(shared.a) == sweep(tmp_path) == []
    for folder in (theirs, other):
        folder._end()
    assert [*shared.disk.iterdir(), *tmp_path.glob("zerobench-*")] == []
