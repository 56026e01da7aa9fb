"""Jobs and cells side by side, each in a process of its own: one's end is no other's, and none is left."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cells import cell
from zerobench.fake_execution import Limits, execute, execute_all
from zerobench.host import environment
from zerobench.launch.start_ranks import Interrupted, launch_each

WORK: dict[str, Callable[[], Any]] = {
    "done": lambda: 7,
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "raises": lambda: {}["key"],
    "forever": lambda: time.sleep(600),
    "process": os.getpid,
}


def work(name: str, tell: Callable[[Any], None]) -> Any:
    tell(name)
    return WORK[name]()


def test_a_system_without_linuxs_files_has_cores_and_sizes_too(monkeypatch) -> None:
    linux = environment.usable_cores(), environment.data_bytes()
    assert linux[0] == len(os.sched_getaffinity(0))
    assert linux[1] > 2**20

    def missing(path: Path, *_: Any) -> str:
        raise FileNotFoundError(path)

    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(Path, "read_text", missing)
    assert environment.usable_cores() == os.cpu_count()
    assert environment.data_bytes() >= linux[1], "the whole address space"
    assert environment.resident_peak_bytes() is None


def test_tracebacks_have_no_prefix_that_grows_with_each_execution(monkeypatch) -> None:
    hook = sys.excepthook
    monkeypatch.setattr("zerobench.worker._build", lambda *_: {}["no model"])
    assert execute(cell("zero1", 4).config).problem == "KeyError: 'no model'"
    assert sys.excepthook is hook


@pytest.mark.slow
def test_an_interruption_leaves_no_process(tmp_path: Path) -> None:
    def interrupt(number: int, news: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        launch_each(work, ["forever"] * 3, tmp_path, 60.0, at_once=3, heard=interrupt)
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_a_job_that_is_added_begins_while_another_still_runs(tmp_path: Path) -> None:
    """The second job ends first and adds the third, which interrupts the first: it would run for ten minutes."""
    jobs, ended = ["forever", "done"], list[int]()

    def add(number: int, news: Any) -> None:
        if not isinstance(news, str):
            ended.append(number)
            jobs.extend(["done"] * (number == 1))
            if number == 2:
                raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        launch_each(work, jobs, tmp_path, 60.0, at_once=2, heard=add)
    assert ended == [1, 2]


def is_process(result: Any) -> bool:
    return result > 7


@pytest.mark.slow
def test_a_process_that_goes_on_after_a_job_takes_the_next_until_one_fails(tmp_path: Path) -> None:
    jobs = ["process", "process", "done", "process", "killed", "process"]
    outcomes = launch_each(work, jobs, tmp_path, 60.0, at_once=1, goes_on=is_process)
    assert [one.status for one in outcomes] == ["ok", "ok", "ok", "ok", "crash", "ok"]
    first, second, _, third, fourth = (one.results[0] for one in outcomes if one.results)
    assert first == second != third != fourth
    assert not multiprocessing.active_children()


@pytest.mark.thorough
def test_cells_side_by_side_are_as_executed_here_and_one_that_fails_has_a_sentence() -> None:
    configs = [cell(name, 4).config for name in ("zero1", "fsdp2")]
    ended: list[int] = []
    found = execute_all(configs, tell=lambda number, news: None if isinstance(news, dict) else ended.append(number))
    assert [one.problem for one in found] == ["", ""]
    assert sorted(ended) == [0, 1]
    here = execute(configs[1])
    assert (found[1].peak_bytes, found[1].at_peak, found[1].tensors) == (here.peak_bytes, here.at_peak, here.tensors)
    (starved,) = execute_all([cell("zero2", 4).config], limits=Limits(memory_bytes=2**20))
    assert starved.problem == "its execution takes more than 1.0 MiB of this machine's memory"
