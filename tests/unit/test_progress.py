"""A sweep's progress: the time left, on a clock of the test's own."""

import os
from dataclasses import replace

import psutil
import pytest

from tests.cells import cell
from tests.unit.test_clock import Clock
from zerobench.config.cell import Cell
from zerobench.config.compose import compose_cells
from zerobench.host.environment import exported_threads
from zerobench.host.terminal import stdout_console
from zerobench.sweep import progress
from zerobench.sweep.cell import new_row
from zerobench.sweep.progress import Entry, Reporter, interruption_message, progress_table, seconds_left
from zerobench.sweep.sweep import rounds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(progress, "time", made := Clock())
    return made


def launches_of(*arguments: str) -> list[Cell]:
    return list(rounds(compose_cells(["-m", "device=cpu", "launch.threads=1", "measure.steps=7", *arguments])))


OK = replace(new_row(cell("ddp", 2)), status="ok", loss_last=1.0, peak_bytes=5 * 2**20, step_s=1.0, passes_agree=True)


def play(clock: Clock, reporter: Reporter, launch: Cell, step_s: float, first_s: float) -> None:
    """Runs both passes of a launch; `first_s`: until a pass's first step."""
    reporter.start(launch)
    for mode in ("timed", "accounted"):
        for step in range(10):
            clock.now += step_s if step else first_s
            reporter.progress({"mode": mode, "step": step + 1, "steps": 10, "loss": 1.0})
    reporter.end(launch, OK, False)


@pytest.mark.slow
def test_the_rest_takes_as_long_as_the_part_that_is_done(clock: Clock) -> None:
    reporter = Reporter()
    launches = launches_of("model=gpt_tiny", "strategy=zero1,zero2", "micro_batch=2,4")
    reporter.expect(launches)
    assert reporter._left() == "time left unknown"
    play(clock, reporter, launches[0], 1.0, 3.0)
    assert reporter._left() == "about 2 min left", "24 s, and for the others 24 + 48 + 48"
    play(clock, reporter, launches[1], 10.0, 3.0)
    assert seconds_left(reporter.entries, 1, clock.now) == pytest.approx(24 + 186)


@pytest.mark.slow
def test_what_is_reused_invalid_skipped_or_failed_at_once_takes_no_time(clock: Clock) -> None:
    reporter = Reporter()
    good = launches_of("model=gpt_tiny", "seed=0,1,2,3")
    invalid = launches_of("model=gpt_tiny", "world_size=1000")
    assert [bool(one.problems) for one in good + invalid] == [False] * 4 + [True]
    reporter.expect(good + invalid, lambda one: one is good[1])
    play(clock, reporter, good[0], 1.0, 3.0)
    reporter.start(good[1])
    reporter.end(good[1], OK, True)
    reporter.start(good[2])
    reporter.end(good[2], replace(OK, status="crash", reason="no", peak_bytes=None), False)
    reporter.skip(good[3])
    assert seconds_left(reporter.entries, 1, clock.now) == 0


@pytest.mark.slow
def test_a_sweep_that_is_stopped_tells_no_time_left_and_what_is_done(clock: Clock, capsys) -> None:
    reporter = Reporter()
    launches = launches_of("model=gpt_tiny", "seed=0,1,2")
    reporter.expect(launches)
    assert interruption_message(reporter.entries) == "0 of 3 done, interrupted; the same command resumes"
    play(clock, reporter, launches[0], 1.0, 3.0)
    reporter.start(launches[1])
    name = reporter.entry.name
    wanted = f"1 of 3 done, {name} interrupted; the same command resumes"
    assert interruption_message(reporter.entries) == wanted, "it has no row yet"
    reporter.end(
        launches[1],
        replace(OK, status="interrupted", reason="stopped by the user", peak_bytes=None),
        False,
        stopped=True,
    )
    assert capsys.readouterr().err.endswith(f"[2/3] {name}: interrupted: stopped by the user\n")
    assert interruption_message(reporter.entries) == wanted


def test_launches_of_jobs_are_timed_whole_and_run_side_by_side(clock: Clock, tmp_path) -> None:
    """Steps of another machine are not seen one by one."""
    reporter = Reporter()
    where = str(tmp_path)
    launches = list(
        rounds(
            [cell("zero1", 2, seed=seed, micro_batch=size, results_dir=where) for size in (1, 4) for seed in (0, 1, 2)]
        )
    )
    small, large = launches[:3], launches[3:]
    reporter.expect(launches)
    reporter.submit(small, "job 1", 1)
    reporter.submit(large, "job 2", 2)
    assert reporter._left() == "time left unknown"
    for one in (small[0], large[0]):
        reporter.start(one)
    assert [entry.state for entry in reporter.entries] == ["running", "submitted", "submitted"] * 2
    clock.now += 10
    reporter.end(small[0], replace(OK, seconds=10.0), False)
    clock.now += 40
    reporter.end(large[0], replace(OK, seconds=50.0), False)
    for one in (small[1], large[1]):
        reporter.start(one)
    assert reporter._left() == "about 60 s left", "10 + 10 + 50 + 50 s, two at a time"
    clock.now += 8
    assert reporter._left() == "about 52 s left"
    reporter.end(small[1], replace(OK, seconds=8.0), False)
    assert reporter._left() == "about 47 s left", "68 s for 6 of 15, and 8 s of what is under way"
    reporter.again(large[1], replace(OK, status="crash", reason="no", peak_bytes=None))
    assert reporter._left() == "about 51 s left", "from its beginning"


def test_launches_that_run_side_by_side_are_all_in_sight() -> None:
    launches = [Entry(f"cell {number}") for number in range(40)]
    for number, state in ((2, "running"), (20, "ok"), (30, "running"), (39, "submitted")):
        launches[number].state = state
    console = stdout_console()
    with console.capture() as shown:
        console.print(progress_table(launches, 20, "about 9 s left", height=11))
    said = shown.get()
    assert "cell 2 " in said
    assert "cell 30 " in said
    assert "cell 20 " in said
    assert "cell 39 " not in said
    assert "1 of 40 launches done, 2 running, 1 submitted; about 9 s left" in said


@pytest.mark.parametrize(("exported", "threads"), [("3", 3), ("5,2", 5), ("", None), ("all", None), ("0", None)])
def test_exported_thread_count_is_used_and_reported_once(
    exported: str, threads: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", exported)
    launches = list(rounds(compose_cells(["-m", "device=cpu", "model=mlp", "world_size=1,2"])))
    cores = os.cpu_count() or 1
    wanted = [threads or cores, threads or max(1, cores // 2)]
    assert [one.config.launch.threads for one in launches] == wanted
    Reporter().expect(launches)
    words = f"OMP_NUM_THREADS={exported} is exported: a rank has {threads} threads; launch.threads=N takes precedence\n"
    assert capsys.readouterr().err == (words if threads else "")
    given = compose_cells(["device=cpu", "model=mlp", "launch.threads=4", "world_size=1"])
    assert given[0].config.launch.threads == 4
    Reporter().expect(list(rounds(given)))
    assert capsys.readouterr().err == ""


def test_thread_count_that_torchrun_sets_itself_is_not_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    environments = {"torchrun": {}, "user": {"OMP_NUM_THREADS": "1"}}
    found = {}
    for who, environment in environments.items():
        monkeypatch.setattr(psutil.Process, "environ", lambda process, of=environment: of)
        found[who] = exported_threads()
    assert found == {"torchrun": None, "user": 1}
