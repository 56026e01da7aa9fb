"""Snapshots of CUDA's allocator: when one is written, and what a run says of it. torch's functions are played."""

import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cells import cell
from tests.unit.test_memory_viz import peak_of
from zerobench.config import world
from zerobench.config.schema import Measure
from zerobench.launch.start_ranks import Outcome
from zerobench.probes.snapshot import FOLDER, snapshots, written
from zerobench.sweep import cell as cells
from zerobench.worker import RankJob

GPU = torch.device("cuda", 0)


def test_torch_has_the_private_functions() -> None:
    impl = inspect.signature(torch.cuda.memory._record_memory_history_impl).parameters
    assert {"enabled", "stacks", "max_entries"} <= set(impl)
    assert "enabled" in inspect.signature(torch.cuda.memory._record_memory_history).parameters
    assert callable(torch.cuda.memory._snapshot)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda **how: calls.append(how.get("enabled", "all"))
    )
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"segments": [], "device_traces": [[]]})
    return calls


def test_a_history_is_recorded_and_written_when_it_is_asked_for(told: list[Any], tmp_path: Path) -> None:
    with snapshots(tmp_path, 3, GPU, asked=True):
        assert told == ["all"]
    assert told == ["all", None]
    assert written(tmp_path) == ["snapshots/rank3.pickle"]


def test_nothing_is_written_unasked(told: list[Any], tmp_path: Path) -> None:
    with snapshots(tmp_path, 0, GPU, asked=False):
        pass
    with pytest.raises(RuntimeError, match="another"), snapshots(tmp_path, 0, GPU, asked=False):
        raise RuntimeError("another")
    with snapshots(tmp_path, 0, torch.device("cpu"), asked=True):  # no step was measured
        pass
    with snapshots(tmp_path / "of another machine", 0, GPU, asked=True):
        pass
    assert (told, list(tmp_path.iterdir())) == ([], [])


def test_out_of_memory_leaves_a_snapshot_in_any_case(told: list[Any], tmp_path: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError), snapshots(tmp_path, 1, GPU, asked=False):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert (told, written(tmp_path)) == ([], ["snapshots/rank1.pickle"])


def test_a_snapshot_that_fails_does_not_hide_the_error(told: list[Any], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(torch.OutOfMemoryError) as raised, snapshots(tmp_path, 1, GPU, asked=True):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert raised.value.__notes__ == ["no snapshot of the allocator could be written: disk full"]
    assert (told, written(tmp_path)) == (["all", None], [])


def test_the_row_of_a_run_out_of_memory_names_the_snapshot(tmp_path: Path, monkeypatch) -> None:
    def launch(_worker: Any, jobs: list[RankJob], *_: Any) -> Outcome:
        for job in jobs:
            (Path(job.folder) / FOLDER).mkdir(exist_ok=True)
            (Path(job.folder) / FOLDER / f"rank{job.rank}.pickle").write_bytes(b"")
        return Outcome("oom", "rank 0 raised OutOfMemoryError: CUDA out of memory", [])

    monkeypatch.setattr(cells, "launch", launch)
    row = cells.run_cell(cell("ddp", 2, results_dir=str(tmp_path)), lambda _: None)
    assert row.status == "oom"
    assert row.reason.endswith("CUDA out of memory; the allocator then: snapshots/rank0.pickle")
    assert written(tmp_path / row.run_id) == ["snapshots/rank0.pickle", "snapshots/rank1.pickle"]


@pytest.mark.slow
def test_a_run_on_cpus_writes_the_step_of_its_peak(tmp_path: Path) -> None:
    asked = Measure(steps=1, warmup=2, snapshot=True, passes="accounted")
    row = cells.run_cell(cell("zero3", 1, results_dir=str(tmp_path), measure=asked), lambda _: None)
    assert written(tmp_path / row.run_id) == ["snapshots/rank0.pickle"]
    made = pickle.loads((tmp_path / row.run_id / FOLDER / "rank0.pickle").read_bytes())
    assert peak_of(made["device_traces"][0]) == row.peak_bytes


def test_the_key_is_for_the_accounted_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Measure(steps=2, warmup=2, snapshot=True)
    here = cell("ddp", 2, measure=asked)
    assert here.problems == ()
    monkeypatch.setattr(world, "_count_gpus", lambda: 2)
    assert cell("ddp", 2, measure=asked, device="cuda").problems == ()
    jobs = [RankJob(here.config, mode, 0, "/nowhere/rendezvous", "/nowhere") for mode in ("timed", "accounted")]
    assert [job.records_history for job in jobs] == [False, True]
    assert "snapshot" not in cell("ddp", 2).config.section(
        "measure"
    )  # the cell is the one that it was before there was a key
