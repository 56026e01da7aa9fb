"""A signal ends a command, even where the exception that it raises is lost on its way."""

import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.cells import sound
from zerobench import cli
from zerobench.config import compose
from zerobench.host.signals import HANG_UP, INTERRUPT, TERMINATE, interrupt_on, raise_if_interrupted
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
        monkeypatch.setattr(compose, "raise_if_interrupted", note)
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
