"""The estimate of the time left, on a clock of the test's own: launches whose truth is known."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.cells import cell
from zerobench.config.compose import compose_cells
from zerobench.sweep import progress
from zerobench.sweep.progress import interruption_of, seconds_left
from zerobench.sweep.sweep import CellLaunch, rounds

START_S, FIRST_S, END_S = 3.0, 20.0, 0.5
"""Until a pass's first step, what the very first pass takes longer, and what follows a launch's last step."""


class Clock:
    """Stands for time.monotonic."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)


def launches_of(*arguments: str) -> list[CellLaunch]:
    return list(rounds(compose_cells(["-m", "device=cpu", "launch.threads=1", "measure.steps=7", *arguments])))


def step_s(launch: CellLaunch) -> float:
    """As a model's own steps: with the work in them."""
    config = launch.cell.config
    return 1e-10 * config.batch * config.sequence * config.model.hidden**2 * config.model.layers


OK = {"status": "ok", "loss_last": 1.0, "peak_bytes": 5, "step_s": 1.0, "passes_agree": True}


def run(
    clock: Clock, reporter: progress.Reporter, launches: list[CellLaunch], alike: float = 1.0
) -> Iterator[tuple[int, Any]]:
    """Plays the launches; yields (launch number, estimate) after each. `alike`: by how much passes differ."""
    for number, launch in enumerate(launches):
        reporter.start(launch)
        for mode, factor in (("timed", 1.0), ("accounted", alike)):
            clock.now += START_S + (FIRST_S if number == 0 and mode == "timed" else 0.0)
            for step in range(10):
                clock.now += step_s(launch) * factor if step else 0.0
                reporter.progress({"mode": mode, "step": step + 1, "steps": 10, "loss": 1.0})
        clock.now += END_S
        reporter.end(launch, OK, False)
        yield number, seconds_left([entry.timing for entry in reporter.entries if entry.timing is not None])


def truth(launches: list[CellLaunch], alike: float = 1.0) -> float:
    return sum(2 * START_S + 9 * step_s(one) * (1 + alike) + END_S for one in launches)


@pytest.mark.thorough
def test_larger_models_take_longer_and_the_first_pass_pays_for_starting(monkeypatch) -> None:
    """A mean of whole launches would be off by a factor of three after the first."""
    clock, reporter = Clock(monkeypatch), progress.Reporter()
    launches = launches_of("model=gpt_tiny,gpt_small,gpt_medium", "batch=8,32", "strategy=zero1")
    reporter.expect(launches)
    assert reporter._left() == "time left unknown"
    for number, estimate in run(clock, reporter, launches, alike=2.0):
        assert estimate == pytest.approx(truth(launches[number + 1 :], 2.0), rel=0.15), number
    assert estimate == 0


@pytest.mark.slow
def test_a_launch_under_way_counts_for_its_rest(monkeypatch) -> None:
    clock, reporter = Clock(monkeypatch), progress.Reporter()
    launches = launches_of("model=gpt_tiny", "seed=0,1")
    reporter.expect(launches)
    reporter.start(launches[0])
    clock.now += START_S
    for step in range(5):
        clock.now += 2.0 if step else 0.0
        reporter.progress({"mode": "timed", "step": step + 1, "steps": 10, "loss": None})
    left = seconds_left([entry.timing for entry in reporter.entries])
    assert left == pytest.approx(5 * 2 + (START_S + 10 * 2) + 2 * (START_S + 10 * 2))


@pytest.mark.slow
def test_what_is_reused_invalid_skipped_or_failed_at_once_takes_no_time(monkeypatch) -> None:
    clock, reporter = Clock(monkeypatch), progress.Reporter()
    good = launches_of("model=gpt_tiny", "seed=0,1,2,3")
    invalid = launches_of("model=gpt_tiny", "world_size=1000")
    assert [bool(one.cell.problems) for one in good + invalid] == [False] * 4 + [True]
    reporter.expect(good + invalid, lambda one: one is good[1])
    list(run(clock, reporter, good[:1]))
    reporter.start(good[1])
    reporter.end(good[1], OK, True)
    reporter.start(good[2])
    reporter.end(good[2], {"status": "crash", "reason": "no"}, False)
    reporter.skip(good[3])
    assert seconds_left([entry.timing for entry in reporter.entries if entry.timing is not None]) == 0


@pytest.mark.slow
def test_a_sweep_that_is_stopped_tells_no_time_left_and_what_is_done(monkeypatch, capsys) -> None:
    clock, reporter = Clock(monkeypatch), progress.Reporter()
    launches = launches_of("model=gpt_tiny", "seed=0,1,2")
    reporter.expect(launches)
    assert interruption_of(reporter.entries) == "0 of 3 done, interrupted; the same command resumes"
    list(run(clock, reporter, launches[:1]))
    reporter.start(launches[1])
    name = reporter.entry.name
    wanted = f"1 of 3 done, {name} interrupted; the same command resumes"
    assert interruption_of(reporter.entries) == wanted, "it has no row yet"
    reporter.end(launches[1], {"status": "interrupted", "reason": "stopped by the user"}, False, stopped=True)
    assert capsys.readouterr().err.endswith(f"[2/3] {name}: interrupted: stopped by the user\n")
    assert interruption_of(reporter.entries) == wanted


def test_launches_of_jobs_are_timed_whole_and_run_side_by_side(monkeypatch, tmp_path) -> None:
    """Steps of another machine are not seen one by one: a launch takes what the most similar one has taken."""
    clock, reporter = Clock(monkeypatch), progress.Reporter()
    where = str(tmp_path)
    launches = list(
        rounds(
            [cell("zero1", 2, seed=seed, micro_batch=size, results_dir=where) for size in (1, 4) for seed in (0, 1, 2)]
        )
    )
    small, large = launches[:3], launches[3:]
    reporter.expect(launches)
    reporter.submit(small, "job 1")
    reporter.submit(large, "job 2")
    assert reporter._left() == "time left unknown"
    for one in (small[0], large[0]):
        reporter.start(one)
    assert [entry.state for entry in reporter.entries] == ["running", "submitted", "submitted"] * 2
    clock.now += 10
    reporter.end(small[0], OK | {"seconds": 10.0}, False)
    clock.now += 40
    reporter.end(large[0], OK | {"seconds": 50.0}, False)
    for one in (small[1], large[1]):
        reporter.start(one)
    assert reporter._left() == "about 60 s left", "10 + 10 + 50 + 50 s, two at a time"
    clock.now += 8
    assert reporter._left() == "about 52 s left"
    reporter.end(small[1], OK | {"seconds": 8.0}, False)
    assert reporter._left() == "about 51 s left", "10 + 42 + 50 s: another takes its place at once"
    reporter.again(large[1], {"status": "crash", "reason": "no"})
    assert reporter._left() == "about 55 s left", "from its beginning"
