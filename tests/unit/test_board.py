"""A sweep reports its progress on a board in its results folder, which `status` reads."""

import os
from pathlib import Path
from typing import Any

from tests.cells import cell
from zerobench import cli
from zerobench.commands.folder_contents import look
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


def test_status_shows_a_sweep_that_runs_and_a_killed_one_is_a_leftover(tmp_path: Path, capsys) -> None:
    writer = BoardWriter()
    writer.put_up(tmp_path)
    launches = [BoardLaunch("zero1\x1b[2J", "ok"), BoardLaunch("zero2", "running", "timed", "3/10")]
    writer.write(launches, 1, lambda: "about 9 s left", at_once=True)
    alive = claim_folder(tmp_path, "zero1-tiny-n2")
    assert cli.run(["status", str(tmp_path)]) == 0
    title = f"sweep {os.getpid()} on {os.uname().nodename}"
    lines = capsys.readouterr().out.replace("\n", " ")
    assert f"{title}: 1 of 2 launches done; now zero2 running timed 3/10; about 9 s left being written" in lines
    assert "being written now: zero1-tiny-n2" in lines
    (aside,) = writer.boards.values()
    aside.release()  # as the kernel does for a process that is killed
    assert look(tmp_path).leftovers == [aside.path], "`zerobench prune` removes it"
    assert cli.run(["status", str(tmp_path)]) == 0
    assert title not in capsys.readouterr().out
    alive.release()


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
