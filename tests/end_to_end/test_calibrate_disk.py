"""`zerobench calibrate --disk`: rows of every way, shares of the plain calls', one sentence for what is wrong."""

from __future__ import annotations

import errno
import itertools
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import zerobench as package
from analysis import disk as figure
from tests.end_to_end.command import zerobench
from zerobench.calibrate import disk
from zerobench.calibrate.disk import rates_of
from zerobench.commands.calibrate import calibrate

SMALL = ["--file", "1MiB", "--blocks", "64KiB,256KiB", "--depths", "1,3", "--repetitions", "3"]


def test_a_disk_is_measured_and_drawn(tmp_path: Path) -> None:
    done = zerobench("calibrate", "--disk", *SMALL, "--out", "here", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["here"], "its files are gone"
    found = package.load_disk_calibration(tmp_path / "here")
    assert len(found.transfers) == (3 * 3 + 2) * 4 * 3
    assert (found.transfers["seconds"] > 0).all()
    assert {(rate.via, rate.kind, rate.block_bytes, rate.depth) for rate in found.rates} == {
        (via, kind, block, depth)
        for via, kind in [
            *itertools.product(("raw", "store", "checked"), ("mixed", "read", "write")),
            ("update", "mixed"), ("in memory", "mixed"),
        ]
        for block in (2**16, 2**18) for depth in (1, 3)
    }  # fmt: skip
    assert {"date", "versions", "processor", "commit", "disk"} <= set(found.provenance)
    rate = found.rate("mixed", 2**18, 3)
    assert rate.of_raw_low <= rate.of_raw <= rate.of_raw_high
    with pytest.raises(KeyError, match=r"checked mixed 5 × 3 is not calibrated; there is raw mixed 65536 × 1"):
        found.rate("mixed", 5, 3)
    assert figure.main([str(tmp_path / "here"), "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "disk.png").stat().st_size > 10_000


def test_shares_are_of_the_same_repetition() -> None:
    """The disk becomes slower from one repetition to the next, and the share is found all the same."""
    rows = [
        {"via": via, "kind": "mixed", "block_bytes": 4096, "depth": 2, "direct": True, "file_bytes": 2**30,
         "repetition": n, "moved_bytes": 2**30, "seconds": (1 + n) / share, "cpu_seconds": 0.5 / share}
        for n in range(5) for via, share in (("raw", 1.0), ("store", 0.8), ("checked", 0.5))
    ]  # fmt: skip
    raw, store, checked = rates_of(pd.DataFrame(rows))
    assert (raw.of_raw, store.of_raw, checked.of_raw) == pytest.approx((1, 0.8, 0.5))
    assert (store.of_raw_low, store.of_raw_high) == pytest.approx((0.8, 0.8))
    assert raw.bytes_per_s == pytest.approx(2**30 / 3)
    assert raw.bytes_per_s_low < raw.bytes_per_s < raw.bytes_per_s_high
    assert checked.cpu_s_per_gib == pytest.approx(1.0)


@pytest.mark.parametrize("direct", [True, False])
def test_all_ways_move_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
    """Every system call is counted: a file each, half of it read and half written where it is mixed."""
    moved: list[tuple[str, int]] = []

    def counted(name: str):
        real = getattr(os, name)

        def call(fd: int, parts: list, offset: int) -> int:
            n: int = real(fd, parts, offset)
            moved.append((name, n))
            return n

        return call

    for name in ("preadv", "pwritev"):
        monkeypatch.setattr(os, name, counted(name))
    seen = {}
    real_round = disk._round

    def one_way(plan, ways, *more):
        for via, way in ways.items():
            for kind, kinds in disk.KINDS.items():
                way.prepare()
                moved.clear()
                way.carry(kinds)
                seen[via, kind] = {name: sum(n for what, n in moved if what == name) for name in ("preadv", "pwritev")}
        return real_round(plan, ways, *more)

    monkeypatch.setattr(disk, "_round", one_way)
    size = 2**20
    disk.measure(disk.DiskPlan(tmp_path, size, (2**16,), (3,), 0, direct), lambda _: None)
    share = {"mixed": (0.5, 0.5), "read": (1, 0), "write": (0, 1)}
    updates = {via: np.array(list(seen.pop((via, kind)).values())) for via in ("update", "in memory") for kind in share}
    for (_, kind), bytes_moved in seen.items():
        assert tuple(np.array(list(bytes_moved.values())) / size) == share[kind]
    assert len(seen) == 9
    more = updates["update"] - size // 24 * 12
    assert ((more >= 0) & (more < 3 * 4096)).all(), "master and two states, in whole pages"
    assert updates["in memory"].sum() == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--blocks", "1000"], "--blocks 1000: must be multiples of 4096 bytes"),
        (["--blocks", "many"], "'many' is no size"),
        (["--depths", "0,2"], "--depths 0,2: must be whole numbers from 1 on"),
        (["--file", "1MiB", "--blocks", "1MiB"], "--file 1MiB: must be two blocks at least"),
        (["--repetitions", "2"], "--repetitions 2: must be at least 3"),
        (["--disk", "/no/such/folder"], "--disk /no/such/folder: there is no such folder"),
    ],
)
def test_a_wrong_command_is_one_sentence(arguments: list[str], words: str, capsys) -> None:
    assert calibrate(["--disk", *arguments] if "--disk" not in arguments else arguments) == 2
    told = capsys.readouterr().err
    assert words in told
    assert len(told.splitlines()) == 1


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), OSError(errno.EIO, "Input/output error")])
def test_what_stops_it_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, stop) -> None:
    def fails(*_: object) -> None:
        assert list(tmp_path.glob("zerobench-scratch-*/*.bin"))
        raise stop

    monkeypatch.setattr(disk, "_round", fails)
    code = calibrate(["--disk", str(tmp_path), *SMALL, "--out", str(tmp_path / "out")])
    assert code == (130 if isinstance(stop, KeyboardInterrupt) else 1)
    assert "nothing is recorded" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_no_calibration_is_a_sentence(tmp_path: Path, capsys) -> None:
    assert figure.main([str(tmp_path)]) == 2
    assert "no calibration of a disk" in capsys.readouterr().err


def test_an_update_is_bound_by_the_slower_of_disk_and_computing() -> None:
    """It moves half as many bytes as the others; in repetition 1 the disk is slower than what is computed, then not."""
    rows = [
        {"via": via, "kind": "mixed", "block_bytes": 4096, "depth": 2, "direct": True, "file_bytes": 2**30,
         "moved_bytes": moved, "repetition": n, "seconds": seconds[n], "cpu_seconds": 1.0}
        for via, moved, seconds in (
            ("raw", 2**30, (4.0, 1.0, 1.0)), ("update", 2**29, (2.5, 1.25, 1.25)),
            ("in memory", 2**29, (1.0, 1.0, 1.0)),
        )
        for n in range(3)
    ]  # fmt: skip
    raw, update, memory = rates_of(pd.DataFrame(rows))
    assert update.of_raw == pytest.approx(0.4)
    assert update.of_bound == pytest.approx(0.8)
    assert (raw.of_raw, memory.of_bound) == pytest.approx((1, 1))
