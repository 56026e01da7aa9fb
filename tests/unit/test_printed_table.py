"""Tables fit the terminal: a narrow one loses columns, never digits, and says which. Host memory, files,
links and nodes have columns where anything is there, in the sweep's table, in what is exported and before a run.
"""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.cells import cell
from tests.made_up import MIB, results_of, run
from zerobench import cli
from zerobench.commands.dry_run import print_plan
from zerobench.config.schema_memory import CpuOffload, NvmeOffloadConfig
from zerobench.host.pipes import patient
from zerobench.host.terminal import is_quiet, progress_console, quiet
from zerobench.results import printed_table
from zerobench.results.options import choose
from zerobench.results.printed_table import runs_html
from zerobench.sweep.cell import new_row


def rows() -> list[dict]:
    ok = asdict(new_row(cell("zero2", 2)))
    figures = {"peak_bytes": 255036216, "states_bytes": 175085872, "predicted_states_bytes": 175079728}
    ok |= figures | {"volume_psi": 2.0, "predicted_volume_psi": 2.0, "step_s": 0.3521, "step_s_low": 0.3462}
    ok |= {"status": "ok", "step_s_high": 0.3687, "tokens_per_s": 2909.0, "loss_last": 2.8601}
    other = asdict(new_row(cell("zero1", 2)))
    return [ok, {**other, "status": "crash", "reason": "timed pass: rank 1 was killed"}]


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_a_table_of_any_width_shows_whole_figures_and_names_what_it_leaves_out(width: int, monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    printed_table.print_results(rows())
    shown = capsys.readouterr().out
    table, _, below = shown.partition("left out at ")
    heading = table.split("──")[0].split()
    assert max(map(len, table.splitlines())) <= width
    assert "…" not in shown
    assert shown.index("zero1") < shown.index("zero2"), "sorted"
    assert "243.2" in shown
    assert "352.1" in shown
    assert ("2.8601" in table) == (width > 80)
    assert ("loss" in heading) != ("last loss" in below), "shown or named"
    assert ("--columns" in below) == (width < 120)
    assert "zero1 tiny N=2 b=8: crash: timed pass: rank 1 was killed" in shown


def test_columns_that_are_chosen_are_all_shown_one_table_below_the_other(monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    printed_table.print_results(rows(), choose("95, step,peak,tokens/s,last loss", printed_table.ALL_COLUMNS))
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines()[:14])) <= 60
    assert shown.index("346.2–368.7") < shown.index("352.1") < shown.index("243.2") < shown.index("2.8601")
    assert shown.count("zero2 tiny N=2 b=8 ") == 2, "cells' names stand again beside the columns that go on below"
    assert "left out" not in shown
    printed_table.print_results(rows(), choose("all", printed_table.ALL_COLUMNS))
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("167.0", "346.2–368.7", "2.8601", "2909"))


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["status", "--columns", "pek"], "'pek' is no column; did you mean peak?"),
        (["status", "--columns", "s"], "'s' begins several columns: status, step; name one"),
        (["strategy=zero2", "--columns=qqq"], "zerobench: --columns: 'qqq' is no column; use cell, status, peak MiB"),
        (["--dry-run", "--columns", "qqq"], "zerobench: --columns: 'qqq' is no column; use cell, plan, ψ"),
    ],
)
def test_a_name_that_is_no_column_is_one_sentence_before_anything_runs(words: list[str], why: str, capfd) -> None:
    try:
        code = cli.run(words)
    except SystemExit as ended:  # argparse's own
        code = int(str(ended.code))
    assert code == 2
    said = capfd.readouterr()
    assert why in said.err
    assert said.out == ""


def test_quiet_leaves_notes_out_and_nothing_that_is_wrong(monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with quiet():
        printed_table.print_results(rows())
        progress_console().print("[1/2] running")
    said = capsys.readouterr()
    assert "zero1 tiny N=2 b=8: crash: timed pass: rank 1 was killed" in said.out
    assert "left out" not in said.out
    assert said.err == ""


IN_FILES = {"peak_bytes": 2 * MIB, "host_peak_bytes": 64 * MIB, "nvme_bytes": 80 * MIB, "down_bytes": 3 * MIB,
            "up_bytes": 5 * MIB, "states_bytes": MIB, "host_states_bytes": 4 * MIB}  # fmt: skip
AT_HOME = {"peak_bytes": 30 * MIB, "host_peak_bytes": 0, "nvme_bytes": 0, "down_bytes": 0, "up_bytes": 0,
           "states_bytes": 8 * MIB, "host_states_bytes": 0}  # fmt: skip


def table_of(rows: list[Any], capsys) -> tuple[dict[str, list[str]], str]:
    """Strategy -> its cells by column, and the lines below the table."""
    printed_table.print_results([asdict(row) for row in rows])
    shown = capsys.readouterr().out
    lines = {line.split()[0]: line.split() for line in shown.splitlines() if " ok " in line}
    return lines, shown


def test_what_lies_elsewhere_has_columns_and_no_free_star(capsys) -> None:
    lines, shown = table_of([run("zero2", 2, **AT_HOME), run("zero3", 2, **IN_FILES)], capsys)
    assert shown.index("peak MiB") < shown.index("host MiB") < shown.index("files MiB") < shown.index("down MiB")
    assert {"30.0*", "0"} <= set(lines["zero2"])
    assert {"2.000", "64.0", "80.0", "3.000", "5.000"} <= set(lines["zero3"]), "66 MiB of one memory are not the best"
    assert "1.000*" in lines["zero3"], "its states, 5 MiB of one memory, are"
    assert printed_table.ONE_MEMORY in shown


@pytest.mark.slow
def test_on_a_busy_machine_no_time_is_the_best_and_it_is_said_above_the_table(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    rows = [run("zero2", 2, step=0.1), run("zero3", 2, step=0.2, peak_bytes=2 * MIB)]
    for row in rows:
        row.cores, row.threads, row.others_cores = 2, 1, 0.3
    lines, shown = table_of(rows, capsys)
    assert ("100.0*" in lines["zero2"], "busy" in shown) == (True, False)
    rows[1].others_cores = 1.74
    lines, shown = table_of(rows, capsys)
    busy = "the machine was busy while 1 of 2 cells ran: other processes took up to 1.7 of its 2 cores;"
    assert shown.startswith(busy)
    assert "100.0" in lines["zero2"]
    assert "2.000*" in lines["zero3"], "bytes are exact on any machine"
    assert "the machine was busy" in runs_html(results_of(rows).runs)
    rows[1].cores = 64
    assert "busy" not in table_of(rows, capsys)[1], "cores were left"


def test_a_plan_tells_what_will_be_elsewhere(monkeypatch, capsys) -> None:
    monkeypatch.setattr("zerobench.commands.dry_run.find_reusable", lambda *_: None)
    assert print_plan([cell("zero3", 2), cell("zero3", 2, offload=CpuOffload())]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in (" host ", " down ", " up ", printed_table.ONE_MEMORY))
    assert "files" not in shown
    assert print_plan([cell("zero3", 4, node_size=2, offload=NvmeOffloadConfig())]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in (" host ", " files ", " between nodes "))
    assert print_plan([cell("zero3", 2)]) == 0
    assert not any(name in capsys.readouterr().out for name in ("host", "files", "nodes", "memory"))


def test_a_terminal_whose_encoding_lacks_a_character_shows_another(tmp_path: Path, monkeypatch) -> None:
    """The locale C, where Python is kept from taking UTF-8 for it."""
    with (tmp_path / "out").open("w", encoding="ascii", errors="surrogateescape") as of_c:
        monkeypatch.setattr(sys, "__stdout__", of_c)
        with patient(of_c) as shown:
            print("ψ and –", file=shown)
    assert (tmp_path / "out").read_text() == "? and ?\n"


def test_a_command_after_two_dashes_keeps_its_own_flags(monkeypatch) -> None:
    seen: list[tuple[list[str], bool]] = []
    monkeypatch.setattr("zerobench.commands.show.show", lambda words: seen.append((words, is_quiet())) or 0)
    assert cli.run(["show", "a", "b", "-q", "--", "make", "-q"]) == 0
    assert seen == [(["a", "b", "--", "make", "-q"], True)]
    assert not is_quiet()
