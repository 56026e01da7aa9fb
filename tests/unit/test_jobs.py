"""Sweeps through a launcher's jobs, and jobs side by side: requests, commands, rows, lost jobs."""

import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cells import cell, sound
from zerobench.commands.dry_run import print_plan
from zerobench.config.cell import Cell
from zerobench.config.compose import compose, compose_cells, in_hydras_form, propose
from zerobench.config.plugins import LauncherChoice, Resources, at_once, job_nodes, requested_resources
from zerobench.config.schema import Huggingface, HuggingfaceModel, Launch, Measure, Search
from zerobench.host import environment
from zerobench.ranks.start_ranks import Interrupted, launch_each
from zerobench.records import SearchRow
from zerobench.results import provenance
from zerobench.results.folders import JOBS, write_search
from zerobench.results.tables import load
from zerobench.simulation.execute import Limits, execute, execute_all, kept_processes
from zerobench.strategies.table import _SPECS
from zerobench.sweep import jobs
from zerobench.sweep.cell import _write_run, find_elsewhere, new_row
from zerobench.sweep.command import run_cells
from zerobench.sweep.jobs import JobSweep, job_command, resources_for, run_job
from zerobench.sweep.progress import Reporter
from zerobench.sweep.search import BatchSearch, _conclude

SLURM = {"nodes": 1, "tasks_per_node": 1, "cpus_per_task": None, "gpus_per_node": None, "array_parallelism": 256}


def choice(name: str = "jobs", asked: dict[str, Any] | None = None, **settings: Any) -> LauncherChoice:
    return LauncherChoice(name, settings | (asked or {}), asked or {})


End = Callable[[str, Path], object]
"""Ends a job of a strategy; its rows go into the file."""


def row(strategy: str = "zero1", status: str = "ok", repeat: int = 0, **more: Any) -> str:
    """A line with the row of a run."""
    one = {"status": status, "reason": "because", "run_id": f"x{repeat}", "seconds": 1.0, "loss_last": 1.0,
           "peak_bytes": 5, "step_s": 1.0, "passes_agree": True, "repeat": repeat}  # fmt: skip
    return json.dumps(vars(new_row(cell(strategy, 2, **more))) | one) + "\n"


def run(
    monkeypatch: pytest.MonkeyPatch, cells: list[Cell], end: End, exits: int | None = None, **settings: Any
) -> tuple[JobSweep, list[str]]:
    """Runs the cells through a launcher whose jobs end so. Returns the sweep, and the strategy of each job.

    `exits`: runs them as a command does, which ends with this code.
    """
    launched: list[str] = []

    def launcher(composer: Any, own: Any, folder: Path, number: int, settings: Any, task: Any) -> Any:
        strategy = task.args[2]

        def launch(overrides: Any, initial_job_idx: int) -> list[Any]:
            launched.append(strategy)
            end(strategy, folder / f"rows-{number}.jsonl")
            return []

        return SimpleNamespace(launch=launch)

    monkeypatch.setattr(jobs, "POLL_S", 0.01)
    monkeypatch.setattr(jobs, "instantiate_launcher", launcher)
    monkeypatch.setattr(jobs, "job_command", lambda cell, composed: cell.config.strategy.name)
    composed: Any = SimpleNamespace(launcher=choice(**{"n_jobs": 1, **settings}), composer=None, own=())
    sweeps: list[JobSweep] = []

    def kind(reporter: Reporter, **more: Any) -> JobSweep:
        sweeps.append(JobSweep(reporter, composed=composed, **more))
        return sweeps[-1]

    if exits is not None:
        assert run_cells(cells, kind=kind, here=False)[0] == exits
        return sweeps[0], launched
    with Reporter() as reporter:
        kind(reporter).run(cells)
    return sweeps[0], launched


def cells_of(where: Path, *strategies: str, **more: Any) -> list[Cell]:
    return [cell(name, 2, results_dir=str(where), **more) for name in strategies]


def test_a_job_runs_all_repeats_of_a_cell_and_its_rows_are_taken_once(monkeypatch, tmp_path: Path, capsys) -> None:
    def end(strategy: str, rows: Path) -> None:
        rows.write_text(row(strategy) * 2 + row(strategy, repeat=1) + row(strategy)[:9])  # requeued, and cut off

    cells = cells_of(tmp_path, "ddp", "zero1", measure=Measure(2, 2, repeats=2))
    sweep, launched = run(monkeypatch, cells, end)
    assert launched == ["ddp", "zero1"]
    assert [one.repeat for one in sweep.rows] == [0, 1, 0, 1]
    assert "job 1 of jobs: ddp tiny N=2 b=8 and 1 more" in capsys.readouterr().err
    assert not list(tmp_path.glob(f"{JOBS}*")), "the folder of jobs that are over goes"


LOST = {
    "raises": "failed: OSError: the node is gone; the same command runs it again",
    "silent": "ended without a row for it; the same command runs it again",
    "strays": "ran another cell, with seed=5; give such a key a plain value, without ${...}",
}


@pytest.mark.parametrize(("ends", "why"), LOST.items())
def test_a_lost_job_is_a_row_and_the_others_go_on(monkeypatch, tmp_path: Path, ends: str, why: str) -> None:
    def end(strategy: str, rows: Path) -> None:
        rows.write_text(row() if strategy == "zero1" else row("ddp", seed=5) if ends == "strays" else "")
        if strategy == "ddp":
            rows.with_name("log-1-0.txt").write_text("the last words")
            if ends == "raises":
                raise OSError("the node\nis gone")

    cells = cells_of(tmp_path, "ddp", "zero1", measure=Measure(2, 2, repeats=2))
    sweep, launched = run(monkeypatch, cells, end)
    assert launched == ["ddp", "zero1"]
    assert (sweep.rows[0].status, sweep.rows[0].reason) == ("crash", f"its job of jobs {why}")
    lost = next(one for one in load(tmp_path).runs.to_dict("records") if one["strategy"] == "ddp")
    assert (lost["status"], lost["launcher"]) == ("crash", "jobs")
    assert "the last words" in (tmp_path / lost["run_id"] / "logs/job.log").read_text()
    assert [entry.state for entry in sweep.reporter.entries if "ddp" in entry.name] == ["crash", "skipped"]


def test_fail_fast_begins_no_other_job(monkeypatch, tmp_path: Path) -> None:
    cells = cells_of(tmp_path, "ddp", "zero1", fail_fast=True)
    wrong = cell("zero2", 2, clip=-1.0, fail_fast=True)
    for begun, given in ((["ddp"], cells), ([], [wrong, *cells])):
        sweep, launched = run(monkeypatch, given, lambda name, rows: rows.write_text(row(name, "oom")))
        assert (launched, sweep.failed_fast) == (begun, True)


def searching(where: Path, batch: int = 4) -> tuple[Cell, SearchRow]:
    """Returns a search, and its result on another machine, where its id is another one."""
    asked = sound("zero1", 2, batch=batch, search=Search(memory_limit="1 GiB"), results_dir=str(where))
    blank = vars(_conclude(BatchSearch(asked)))
    return asked, SearchRow(**blank | {"search_id": f"elsewhere{batch}", "status": "found", "micro_batch": 1})


def combination(asked: Cell, status: str) -> str:
    blank = vars(new_row(asked)) | {"status": status, "reason": "made up", "run_id": "x", "peak_bytes": 5}
    return json.dumps(blank) + "\n"


def ran(one: Cell) -> Cell:
    """Writes an earlier run of a cell, as by a job."""
    _write_run(one, replace(new_row(one), status="ok", launcher="jobs"), lambda _: {}, print)
    return one


def test_a_run_with_another_version_of_a_package_is_not_reused(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setitem(_SPECS, "zero2", replace(_SPECS["zero2"], requires="pytest"))
    plain, requiring = (ran(sound(name, 2, results_dir=str(tmp_path))) for name in ("zero1", "zero2"))
    theirs = ran(plain.changed(model=HuggingfaceModel(), huggingface=Huggingface()))
    assert None not in (find_elsewhere(one, ("ok",), "jobs") for one in (plain, requiring, theirs))
    real = provenance.installed_version
    monkeypatch.setattr(provenance, "installed_version", lambda name: real(name) if name == "torch" else "0.1")
    assert [find_elsewhere(one, ("ok",), "jobs") is None for one in (plain, requiring, theirs)] == [False, True, True]


def test_the_result_of_a_search_is_that_of_its_job(monkeypatch, tmp_path: Path) -> None:
    asked, result = searching(tmp_path)
    ran(asked)  # a combination, which has the id of the search
    write_search(tmp_path, searching(tmp_path, batch=8)[1])
    write_search(tmp_path, replace(result, search_id="earlier"))

    def end(strategy: str, rows: Path) -> None:
        lines = [json.dumps(vars(result)) + "\n"] * 2  # the job was started again
        rows.write_text(combination(asked, "oom") + "".join(lines))

    sweep, _ = run(monkeypatch, [asked], end, exits=0)
    assert (sweep.searches, sweep.rows) == ([result], [])
    assert [entry.state for entry in sweep.reporter.entries] == ["found"]


def test_a_job_ends_with_its_sweep_and_does_not_begin_without_it(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    sleeper = [sys.executable, "-c", f"import time; open({str(begun)!r}, 'w'); time.sleep(600)"]
    run_job(str(tmp_path / "gone"), 1, sleeper, "jobs", str(tmp_path))
    assert not begun.exists()
    job = threading.Thread(target=run_job, args=(str(tmp_path), 1, sleeper, "jobs", str(tmp_path)))
    job.start()
    while not begun.exists():
        time.sleep(0.05)
    (tmp_path / "stop").touch()
    job.join(60)
    assert not job.is_alive()
    begun.unlink()
    (tmp_path / "closed").touch()
    run_job(str(tmp_path), 2, sleeper, "jobs", str(tmp_path))
    assert not begun.exists()


@pytest.mark.slow
def test_a_job_runs_the_words_of_its_cell_as_they_were_resolved() -> None:
    words = ["-m", "strategy=ddp,zero3", "strategy.keep_root=true", "model=mlp", "hydra/launcher=joblib"]
    composed = compose([*words, "seed=${hydra:job.num}", "results_dir='~/runs'", "offload=nvme", "offload.path='~'"])
    ddp, zero3 = (job_command(one, composed) for one in composed.cells)
    home = Path.home()
    assert {"strategy.keep_root=true", "seed=1", f'results_dir="{home}/runs"', f'offload.path="{home}"'} <= {*zero3}
    assert not any("keep_root" in word for word in ddp), "ddp has no such key"
    assert {"model=mlp", "world_size=2", "device=cpu", "backend=gloo", "hydra.mode=RUN"} <= set(ddp)


LAUNCHED = "# @package _global_\ndefaults: [{override /hydra/launcher: joblib}"


@pytest.mark.shown(1)
@pytest.mark.parametrize(
    "experiment",
    [
        "]\nhydra: {mode: MULTIRUN, launcher: {n_jobs: 3}, sweeper: {params: {seed: '1,2'}}}\n",
        ", {override /hydra/sweeper: optuna}]\nobjective: -tokens_per_s\n"
        "hydra: {launcher: {n_jobs: 3}, sweeper: {n_trials: 2, params: {micro_batch: 'choice(1, 2)'}}}\n",
    ],
    ids=["launcher", "sweeper"],
)
def test_a_job_of_an_experiment_runs_the_cell_that_was_planned(tmp_path: Path, experiment: str) -> None:
    if "optuna" in experiment:
        pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text(LAUNCHED + experiment)
    composed = compose(["--config-dir", str(tmp_path), "-m", "experiment=mine", "model=mlp", "hydra/launcher=joblib"])
    planned = list(composed.cells)
    if composed.proposes:
        propose(composed, lambda batch: [planned.append(one) or [1.0] for one in batch])
    assert len(planned) == 2
    for one in planned:
        words = job_command(one, composed)[1 + len(jobs.program()) :]
        assert [run.cell_id for run in compose_cells(words)] == [one.cell_id]
        assert "experiment=mine" in words


def test_nodes_tasks_and_gpus_follow_the_cell() -> None:
    def asked(world_size: int, node_size: int | None = None, device: str = "cpu", **settings: int) -> Resources:
        return requested_resources(choice("submitit_slurm", settings, **SLURM), world_size, node_size, 1, device)

    assert asked(4) == Resources(1, 1, 4, None)  # one task starts its ranks itself
    assert asked(4, node_size=2) == asked(4, tasks_per_node=2) == Resources(2, 2, 1, None)
    assert asked(1, tasks_per_node=2) == Resources(1, 1, 1, None)
    assert asked(4, device="cuda") == Resources(1, 1, 4, 4)
    assert asked(16, device="cuda", gpus_per_node=8) == Resources(2, 8, 1, 8)
    assert asked(2, device="cuda", gpus_per_node=8) == Resources(1, 1, 2, 2)
    assert job_nodes(choice("submitit_slurm", {"nodes": 4, "gpus_per_node": 8}, **SLURM), 8, None) == 4
    slurm, wanted = choice("submitit_slurm", **SLURM), cell("ddp", 4, launch=Launch(threads=2))
    assert resources_for(wanted, slurm).settings(slurm) == {"nodes": 1, "tasks_per_node": 1, "cpus_per_task": 8}


def test_jobs_on_this_machine_are_as_many_as_its_cores_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    wanted = [Resources(1, 1, 2, None), Resources(1, 1, 3, None)]
    assert at_once(choice("submitit_local", **SLURM | {"array_parallelism": None}), wanted) == 2
    assert at_once(choice("joblib", n_jobs=-1), wanted) == 2
    assert at_once(choice("joblib", n_jobs=5), wanted) == 5, "as it is asked for"
    assert at_once(choice("submitit_slurm", **SLURM), wanted) == 256
    assert at_once(choice("ray", ray={"remote": {}}), wanted) is None, "Ray's own scheduler bounds them"


def test_commas_in_a_list_of_words_make_no_sweep() -> None:
    assert in_hydras_form("launch.retry=crash,timeout") == "launch.retry=[crash,timeout]"
    for word in ("launch.retry=[crash]", "launch.retry=null", "strategy=ddp,zero2"):
        assert in_hydras_form(word) == word


def test_a_dry_run_shows_jobs_and_what_they_ask_for(tmp_path: Path, capsys) -> None:
    cells = [cell(name, ranks, results_dir=str(tmp_path), launch=Launch(threads=2))
             for name in ("ddp", "zero2") for ranks in (1, 2)]  # fmt: skip
    slurm = choice("submitit_slurm", {"gpus_per_node": 4}, **SLURM | {"array_parallelism": 1})
    print_plan(cells, ["cell", "plan", "job", "asks for"], slurm)
    said = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in said.splitlines() if "tiny" in line]
    assert lines[1].endswith("run 2 nodes=1 tasks_per_node=1 cpus_per_task=4 gpus_per_node=2")
    assert [line.split(" run ")[1].split()[0] for line in lines] == ["1", "2", "3", "4"]
    assert "submitit_slurm: 4 jobs, at most 1 at once" in said


def forever(job: int, tell: Callable[[Any], None]) -> None:
    tell(job)
    time.sleep(600)


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


@pytest.mark.slow
def test_an_interruption_leaves_no_process(tmp_path: Path) -> None:
    def interrupt(number: int, news: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        launch_each(forever, range(3), tmp_path, 60.0, at_once=3, heard=interrupt)
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_a_process_that_is_kept_simulates_the_next_call_s_cell() -> None:
    with kept_processes() as processes:
        (first,) = execute_all([cell("zero1", 4).config], jobs=1, processes=processes)
        (kept,) = processes
        (second,) = execute_all([cell("zero2", 4).config], jobs=1, processes=processes)
        assert (processes, first.problem, second.problem) == ([kept], "", "")
        assert kept.process.is_alive()
    assert not kept.process.is_alive()
    assert not multiprocessing.active_children()


@pytest.mark.thorough
def test_cells_side_by_side_are_as_executed_here_and_one_that_fails_has_a_sentence() -> None:
    configs = [cell(name, 4).config for name in ("zero1", "fsdp2")]
    ended: list[int] = []
    found = execute_all(configs, tell=lambda number, news: None if isinstance(news, dict) else ended.append(number))
    assert ([one.problem for one in found], sorted(ended)) == (["", ""], [0, 1])
    here = execute(configs[1])
    assert (found[1].peak_bytes, found[1].at_peak, found[1].tensors) == (here.peak_bytes, here.at_peak, here.tensors)
    (starved,) = execute_all([cell("zero2", 4).config], limits=Limits(memory_bytes=2**20))
    assert starved.problem == "its execution takes more than 1.0 MiB of this machine's memory"
