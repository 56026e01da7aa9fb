"""A sweep tells of itself on a board in its results folder; `status --follow` reads it until it is taken down."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cells import cell
from zerobench import cli
from zerobench.commands.folder_contents import look
from zerobench.commands.follow import Followed, in_words, picture
from zerobench.host.terminal import stdout_console
from zerobench.results.board import BoardLaunch, BoardWriter, board_folders, read_board
from zerobench.results.folders import claim_folder
from zerobench.sweep.progress import Reporter, table_of
from zerobench.sweep.sweep import CellLaunch

OK: dict[str, Any] = {"status": "ok", "loss_last": 2.5, "peak_bytes": 5 * 2**20, "step_s": 0.25, "passes_agree": True}


def launches_of(folder: Path, *strategies: str) -> list[CellLaunch]:
    return [CellLaunch(f"{name} tiny N=2", cell(name, 2, results_dir=str(folder)), 0) for name in strategies]


def test_a_sweep_puts_its_board_up_tells_each_change_and_takes_it_down(tmp_path: Path, capsys) -> None:
    ddp, zero2 = launches_of(tmp_path, "ddp", "zero2")
    with Reporter() as reporter:
        reporter.expect([ddp, zero2], lambda one: one is ddp)
        reporter.start(ddp)
        assert board_folders(tmp_path) == [], "what is reused needs no board"
        reporter.end(ddp, OK, reused=True)
        reporter.start(zero2)
        (folder,) = board_folders(tmp_path)
        reporter.progress({"mode": "timed", "step": 3, "steps": 10, "loss": 4.0, "peak_bytes": None})
        before = read_board(folder)
        reporter.end(zero2, OK, reused=False)
        after = read_board(folder)
        assert look(tmp_path).leftovers == []
    assert before is not None
    assert after is not None
    assert [launch.state for launch in before.launches] == ["reused", "running"]
    assert before.launches[1].step == "", "a step within a second of the last version waits for the next"
    assert before.pid == os.getpid()
    assert [launch.state for launch in after.launches] == ["reused", "ok"]
    assert after.launches[1].peak_bytes == 5 * 2**20
    assert board_folders(tmp_path) == []


def test_a_folder_that_cannot_be_written_to_has_no_board_and_its_sweep_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    writer = BoardWriter()
    writer.put_up(tmp_path / "file" / "results")
    writer.write([BoardLaunch("zero2")], 0, lambda: "", at_once=True)
    assert list(writer.boards.values()) == [None], "known, so that it is not tried again"
    writer.take_down()
    assert writer.boards == {}
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_followers_print_a_line_per_change_and_end_with_the_sweep(tmp_path: Path, capsys) -> None:
    writer = BoardWriter()
    writer.put_up(tmp_path)
    stages = [
        [BoardLaunch("zero1 tiny", "running", "timed"), BoardLaunch("zero2 tiny")],
        [BoardLaunch("zero1 tiny", "ok", peak_bytes=2**20, seconds=4.25), BoardLaunch("zero2 tiny", "running")],
        [BoardLaunch("zero1 tiny", "ok", peak_bytes=2**20, seconds=4.25), BoardLaunch("zero2 tiny", "crash\x1b[2J")],
    ]

    def sweep() -> None:
        for number, stage in enumerate(stages):
            writer.write(stage, min(number, 1), lambda: "about 9 s left", at_once=True)
            time.sleep(0.3)
        writer.take_down()

    thread = threading.Thread(target=sweep)
    thread.start()
    code = cli.run(["status", str(tmp_path), "--follow", "--every", "0.05"])
    thread.join()
    assert code == 0
    assert capsys.readouterr().out.splitlines() == [
        "[1/2] zero1 tiny: running, timed pass; about 9 s left",
        "[1/2] zero1 tiny: ok, 4.2 s, peak 1.0 MiB",
        "[2/2] zero2 tiny: running; about 9 s left",
        "[2/2] zero2 tiny: crash\\x1b[2J; about 9 s left",
        f"{tmp_path}: 0 runs of 0 cells; 0 B on disk",
        "no runs here; `zerobench experiment=stages` makes some",
    ]


def test_a_killed_sweep_and_a_run_without_a_board_are_told(tmp_path: Path, capsys) -> None:
    writer = BoardWriter()
    writer.put_up(tmp_path)
    writer.write([BoardLaunch("zero1", "running")], 0, lambda: "", at_once=True)
    followed = Followed(tmp_path)
    assert followed.read()
    (aside,) = writer.boards.values()
    assert aside is not None
    aside.release()  # as the kernel does for a process that is killed
    assert not followed.read()
    assert followed.killed == [f"sweep {os.getpid()} on {os.uname().nodename}"]
    assert look(tmp_path).leftovers == [aside.path], "`zerobench prune` removes it"
    run = claim_folder(tmp_path, "zero1-tiny-n2")
    assert followed.read()
    assert followed.writing == ["zero1-tiny-n2"]
    run.release()
    capsys.readouterr()
    assert cli.run(["status", str(tmp_path), "--follow", "-q"]) == 0
    assert "no sweep writes here now" in capsys.readouterr().out


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_drawn_boards_fit_the_terminal(width: int, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("LINES", "16")
    name = "zero3 gpt_small N=4 b=4 offload=cpu optimizer=true gradients=true, launch {}"
    writer = BoardWriter()
    writer.put_up(tmp_path)
    launches = [
        BoardLaunch(name.format(n), "running" if n == 20 else "ok", "timed", "3/10", 2.5, 2**30, 9) for n in range(40)
    ]
    writer.write(launches, 20, lambda: "about 9 s left", at_once=True)
    followed = Followed(tmp_path)
    followed.read()
    console = stdout_console()
    console.print(picture(followed, console))
    writer.take_down()
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert lines[-1].strip() == "39 of 40 launches done; about 9 s left"
    assert sum("running" in line for line in lines) == 1, "the current launch is among those that are shown"


@pytest.mark.parametrize("every", ["soon", "0", "nan"])
def test_an_interval_that_is_none_is_one_sentence(every: str, capsys) -> None:
    with pytest.raises(SystemExit):
        cli.run(["status", "--follow", "--every", every])
    assert f"argument --every: '{every}' must be seconds, from 0.05 to 3600" in capsys.readouterr().err


def test_launches_that_run_side_by_side_are_all_in_sight() -> None:
    launches = [BoardLaunch(f"cell {number}") for number in range(40)]
    for number, state in ((2, "running"), (20, "ok"), (30, "running"), (39, "submitted")):
        launches[number].state = state
    console = stdout_console()
    with console.capture() as shown:
        console.print(table_of(launches, 20, "about 9 s left", height=11))
    said = shown.get()
    assert "cell 2 " in said
    assert "cell 30 " in said
    assert "cell 20 " in said
    assert "cell 39 " not in said
    assert "1 of 40 launches done, 2 running, 1 wait for the launcher; about 9 s left" in said
    assert in_words(launches[39]) == "its job waits for the launcher"
