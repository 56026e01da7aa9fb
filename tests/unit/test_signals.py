"""A signal ends a command, even where the exception that it raises is lost on its way."""

import signal
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.cells import sound
from zerobench import cli
from zerobench.config import compose
from zerobench.host.signals import (
    ENDING,
    HANG_UP,
    INTERRUPT,
    TERMINATE,
    interrupt_on,
    raise_if_interrupted,
    repeat_interruption,
    unclaimed,
)
from zerobench.ranks import over_cluster
from zerobench.sweep import cell


def test_a_lost_interruption_is_raised_again_until_its_command_ends() -> None:
    with interrupt_on([TERMINATE]):
        raise_if_interrupted()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(TERMINATE)
        signal.raise_signal(TERMINATE)  # while tidying up
        with pytest.raises(KeyboardInterrupt):
            raise_if_interrupted()
    raise_if_interrupted()
    assert signal.getsignal(TERMINATE) is signal.SIG_DFL


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a callback may lose it as well
def test_a_command_is_ended_in_the_midst_of_code_that_loses_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    late = []

    def lose_one(*_arguments) -> None:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(TERMINATE)
        end = time.monotonic() + 60
        while time.monotonic() < end:
            time.sleep(0.01)
        late.append(end)

    def replace_one(*_arguments) -> None:
        try:
            signal.raise_signal(TERMINATE)
        finally:
            raise UnboundLocalError("a name")

    for note in (lose_one, replace_one):
        monkeypatch.setattr(compose, "_compose_cell", note)
        assert cli.run(["-m", "seed=1,2", "strategy=zero1", "--dry-run"]) == 130
    assert late == []
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL


@pytest.mark.parametrize(
    ("number", "launcher", "reason"),
    [
        (INTERRUPT, "torchrun", "stopped by the user"),
        (HANG_UP, "", "stopped by SIGHUP: its terminal was closed"),
        (TERMINATE, "", "stopped by SIGTERM, from kill or a scheduler"),
        (TERMINATE, "torchrun", "stopped by SIGTERM, from torchrun, which ends all ranks after one has failed"),
        (TERMINATE, "srun", "stopped by SIGTERM, from scancel, a time limit, srun after it lost a rank or a node"),
    ],
)
def test_reason_of_interrupted_row_names_signal_and_its_senders(
    number: signal.Signals, launcher: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = SimpleNamespace(job=SimpleNamespace(launched_by=launcher))
    monkeypatch.setattr(over_cluster, "current_job", lambda: job if launcher else None)
    monkeypatch.setattr(cell, "_run_passes", lambda *_: signal.raise_signal(number))
    with interrupt_on([INTERRUPT, TERMINATE, HANG_UP]), pytest.raises(cell.StoppedError) as stop:
        cell.run_cell(sound("zero1", 2, results_dir=str(tmp_path)), lambda _: None)
    assert stop.value.row.status == "interrupted"
    assert stop.value.row.reason.startswith(reason)


def test_once_interrupted_a_command_comes_to_its_end_whatever_follows(monkeypatch, capsys) -> None:
    """Two Ctrl-C within a moment: the second one finds the command on its way out."""

    def again() -> None:
        try:
            signal.raise_signal(INTERRUPT)
        except KeyboardInterrupt:
            pytest.fail("it was interrupted twice")

    def act(_arguments: list[str]) -> int:
        try:
            signal.raise_signal(INTERRUPT)
        finally:
            again()
        return 0

    before = {one: signal.getsignal(one) for one in ENDING}
    for name, value in (("stdout", sys.stdout), ("stderr", sys.stderr)):
        monkeypatch.setattr(sys, name, value)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setattr(cli, "_run", act)
    monkeypatch.setattr(cli.fork_server, "end", again)
    monkeypatch.setattr(sys, "argv", ["zerobench", "strategy=zero1"])
    try:
        signal.signal(INTERRUPT, signal.default_int_handler)
        with pytest.raises(SystemExit) as ended:
            cli.main()
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    assert ended.value.code == 130
    assert capsys.readouterr().err == "zerobench: interrupted; no launch was under way\n"


def test_what_others_ignore_or_heed_is_left_to_them() -> None:
    before = {HANG_UP: signal.signal(HANG_UP, signal.SIG_IGN)}
    before[INTERRUPT] = signal.signal(INTERRUPT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        assert unclaimed([INTERRUPT, TERMINATE, HANG_UP]) == [INTERRUPT, TERMINATE]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_callers_own_timeout_stays() -> None:
    def own(*_arguments) -> None:
        """The caller's."""

    before = signal.signal(signal.SIGALRM, own)
    signal.setitimer(signal.ITIMER_REAL, 60)
    try:
        with repeat_interruption():
            assert signal.getsignal(signal.SIGALRM) is own
        assert 50 < signal.getitimer(signal.ITIMER_REAL)[0] <= 60
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
