"""A sweep's progress: the time left, on a clock of the test's own."""

import os
from dataclasses import replace

import pytest

from tests.cells import cell
from tests.unit.test_clock import Clock
from zerobench.config.cell import Cell
from zerobench.config.compose import compose_cells
from zerobench.sweep import progress
from zerobench.sweep.cell import new_row
from zerobench.sweep.progress import Reporter, interruption_message, seconds_left
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
