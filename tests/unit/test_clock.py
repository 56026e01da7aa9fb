"""The time of a step: not the drawing of batches, not garbage; tokens/s are of the time on the wall."""

import gc
import weakref

import pytest
import torch

from zerobench.probes import TimedPass, timed_pass
from zerobench.probes.intervals import ASIDE


class Clock:
    """Stands for the module `time`: a sleep takes exactly its time, on a busy machine too."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    monotonic = perf_counter

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Knot:
    """An object that only the garbage collector frees."""

    def __init__(self) -> None:
        self.me = self


def test_a_step_s_time_is_its_work_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed_pass, "time", time := Clock())
    with TimedPass(torch.device("cpu")) as probe:
        for number in range(4):
            measured = number >= 2
            with probe.step(measured):
                for _ in range(2):
                    with probe.phase("data"):
                        time.sleep(0.1)
                with probe.phase("forward"):
                    time.sleep(0.01)
                assert probe.may_read_gradients(measured) == (not measured)
                if not measured:
                    with probe.phase(ASIDE):
                        time.sleep(0.1)
            time.sleep(0.05)  # what comes between steps
        probe.end_steps()
    assert len(probe.results.times) == 4
    for times in probe.results.times:
        assert times["forward"] == pytest.approx(0.01)
        assert times["step"] == pytest.approx(0.01)
        assert times["data"] == pytest.approx(0.2)
    assert probe.results.wall_s == pytest.approx(2 * 0.21 + 0.05)


@pytest.mark.parametrize("measured", [False, True])
def test_garbage_is_collected_between_measured_steps_and_not_within(measured: bool) -> None:
    gc.unfreeze()
    with TimedPass(torch.device("cpu")) as probe:
        for _ in range(2):
            with probe.step(measured):
                assert gc.isenabled() == (not measured)
                knot = weakref.ref(Knot())
                if measured:
                    assert knot() is not None
            if measured:
                assert knot() is None
        probe.end_steps()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_bytes_of_the_interface_are_of_as_many_gathers_as_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gather that overlaps the next forward is in flight between steps, not before the warm-up or at the end."""
    carried = 100
    monkeypatch.setattr(timed_pass, "loopback_bytes", lambda: carried)
    with TimedPass(torch.device("cpu")) as probe:
        for number in range(4):
            with probe.step(measured=number >= 1):
                carried += 10 if number else 5
        carried += 5  # the last step's gather arrives
        probe.end_steps()
    assert probe.results.process_memory["loopback_bytes"] == 4 * 10
