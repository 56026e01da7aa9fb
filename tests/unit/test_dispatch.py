"""Sweeps through a launcher: groups, attempts, lost jobs. The plugin is the test's own: its jobs write rows at once."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.cells import cell
from tests.ranks import wait_until
from zerobench.commands.dry_run import print_plan
from zerobench.commands.folder_contents import look
from zerobench.config.cell import Cell
from zerobench.config.grouping import group_of, problems_of_groups
from zerobench.config.launcher import LauncherChoice, Resources, problem_of_setting
from zerobench.config.schema import Launch, Measure
from zerobench.config.size_limits import in_one
from zerobench.dispatch import sweep as dispatched_sweep
from zerobench.dispatch.job_folder import JobFolder
from zerobench.dispatch.plugin import at_once, groups_of, resources_for, settings_for
from zerobench.dispatch.sweep import DispatchedSweep
from zerobench.dispatch.task import _leased, run_job
from zerobench.dispatch.threads import StayingThreads
from zerobench.dispatch.watch import JobWatch
from zerobench.host.signals import end_with_parent
from zerobench.results.board import BoardWriter, read_board
from zerobench.results.leftovers import JOBS, abandoned_jobs, boards_of_orphans, tidy
from zerobench.results.rescue import Unwritten, sentences
from zerobench.results.tables import load
from zerobench.sweep.progress import Reporter
from zerobench.sweep.sweep import rounds

SLURM = {"nodes": 1, "tasks_per_node": 1, "cpus_per_task": None, "gpus_per_node": None, "array_parallelism": 256}


def choice(name: str = "jobs", asked: dict[str, Any] | None = None, **settings: Any) -> LauncherChoice:
    return LauncherChoice(name, (), settings | (asked or {}), asked or {})


class Jobs:
    """Stands for the plugin. `end`: ends a job of these launches, after its number so far, in its folder."""

    def __init__(self, end: Callable[[int, JobFolder], None], chosen: LauncherChoice | None = None) -> None:
        self.choice = chosen or choice(n_jobs=1)
        self.end = end
        self.jobs: list[list[str]] = []

    def launch(self, folder: JobFolder, *_: Any) -> None:
        self.jobs.append([f"{one.cell.config.strategy.name} {one.repeat}" for one in folder.launches()])
        self.end(len(self.jobs), folder)


def row(launch: Any, status: str = "ok") -> dict[str, Any]:
    """A row as far as a sweep looks at it."""
    return {"status": status, "reason": "because", "run_id": launch.name, "seconds": 1.0, "loss_last": 1.0,
            "peak_bytes": 5, "step_s": 1.0, "passes_agree": True}  # fmt: skip


def run(
    monkeypatch: pytest.MonkeyPatch, cells: list[Cell], end: Callable[[int, JobFolder], None], n_jobs: int = 1
) -> tuple[Any, Jobs]:
    """Runs the cells through a launcher whose jobs end so."""
    monkeypatch.setattr(dispatched_sweep, "POLL_S", 0.01)
    plugin = Jobs(end, choice(n_jobs=n_jobs))
    with Reporter() as reporter:
        sweep = DispatchedSweep(reporter, plugin=plugin)  # type: ignore[arg-type]
        sweep.run(cells)
    return sweep, plugin


def ok(_: int, folder: JobFolder) -> None:
    folder.write_rows([row(one) for one in folder.launches()])


def cells_of(where: Path, *strategies: str, **more: Any) -> list[Cell]:
    launch = Launch(threads=1, **more.pop("launch", {}))
    return [cell(name, 2, results_dir=str(where), launch=launch, **more) for name in strategies]


def test_a_job_runs_a_group_interleaved_and_a_group_asks_for_the_most() -> None:
    cells = [
        cell(name, ranks, launch=Launch(threads=2, group_by=keys), measure=Measure(2, 2, repeats=2))
        for keys in ("strategy, world_size",) for name in ("ddp", "zero2") for ranks in (1, 4)
    ]  # fmt: skip
    assert len({group_of(one) for one in cells}) == 4
    launches = list(rounds([one.changed(launch=Launch(threads=2, group_by="strategy")) for one in cells]))
    groups = groups_of(launches)
    assert [[(one.cell.config.world_size, one.repeat) for one in group] for group in groups] == [
        [(1, 0), (4, 0), (1, 1), (4, 1)]
    ] * 2, "rounds, as in a sweep of one machine"
    (whole,) = groups_of(list(rounds([one.changed(launch=Launch(threads=2, group_by="all")) for one in cells])))
    assert len(whole) == 8
    slurm = choice("submitit_slurm", **SLURM)
    assert resources_for(groups[0], slurm) == Resources(1, 1, 8, None), "4 ranks of 2 threads in a task"
    assert settings_for(resources_for(groups[0], slurm), slurm) == {"nodes": 1, "tasks_per_node": 1, "cpus_per_task": 8}
    assert len(groups_of(list(rounds([one.changed(launch=Launch(threads=2)) for one in cells])))) == 4, "a job per cell"


def test_keys_of_groups_are_checked() -> None:
    def told(group_by: str) -> list[str]:
        return problems_of_groups([cell("ddp", 2, launch=Launch(threads=1, group_by=group_by))], choice(), [])

    assert told("model,world_size") == told("all") == told("optimizer.lr") == told("launch.threads") == []
    assert told("modle") == ["launch.group_by=modle: no such key; did you mean model?"]
    assert told(",") == ["launch.group_by=,: name keys, as model,world_size, or all"]
    assert "not both" in told("all,model")[0]
    without = problems_of_groups([cell("ddp", 2)], None, ["launch.group_by=all", "seed=1"])
    words = "it groups the cells of a launcher's jobs, and none is chosen; add hydra/launcher= or leave it out"
    assert without == [f"launch.group_by=all: {words}"]


def test_jobs_on_this_machine_are_as_many_as_its_cores_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    wanted = [Resources(1, 1, 2, None), Resources(1, 1, 3, None)]
    assert at_once(choice("submitit_local", **SLURM | {"array_parallelism": None}), wanted) == 2
    assert at_once(choice("joblib", n_jobs=-1), wanted) == 2
    assert at_once(choice("joblib", n_jobs=5), wanted) == 5, "as it is asked for"
    assert at_once(choice("submitit_slurm", **SLURM), wanted) == 256
    assert at_once(choice("ray", ray={"remote": {}}), wanted) is None, "Ray's own scheduler bounds them"


def test_ray_is_asked_for_the_cores_and_gpus_of_a_cell() -> None:
    wanted = Resources(1, 1, 4, 2)
    assert settings_for(wanted, choice("ray", ray={"remote": {}})) == {
        "ray.remote.num_cpus": 4,
        "ray.remote.num_gpus": 2,
    }
    assert settings_for(wanted, choice("ray", ray={"remote": {"num_cpus": 1}})) == {"ray.remote.num_gpus": 2}
    assert settings_for(wanted, choice("joblib", n_jobs=1)) == {}


def test_an_attempt_is_a_job_and_takes_along_what_was_left_out(monkeypatch, tmp_path: Path, capsys) -> None:
    """ddp fails twice, with its second repeat left out by the job; zero2 fails once, which is not to be retried."""
    cells = cells_of(tmp_path, "ddp", "zero2", launch={"retry": ["crash"], "retries": 2, "group_by": "all"},
                     measure=Measure(2, 2, repeats=2))  # fmt: skip

    def end(number: int, folder: JobFolder) -> None:
        launches = folder.launches()
        assert all(one.cell.config.launch.retry == () for one in launches), "not within the job, too"
        if number == 1:
            first, second, _, _ = launches
            folder.write_rows([row(first, "crash"), row(second, "diverged"), None, None])
        elif number == 2:
            folder.write_rows([row(launches[0], "crash"), None])
        else:
            ok(number, folder)

    sweep, plugin = run(monkeypatch, cells, end)
    assert plugin.jobs == [["ddp 0", "zero2 0", "ddp 1", "zero2 1"], ["ddp 0", "ddp 1"], ["ddp 0", "ddp 1"]]
    assert [one["status"] for one in sweep.rows] == ["diverged", "ok", "ok"]
    assert [entry.state for entry in sweep.reporter.entries] == ["ok", "diverged", "ok", "skipped"]
    said = capsys.readouterr().err
    assert "job 1 of jobs: ddp tiny N=2 b=8 and 3 more" in said
    assert said.count("it is run again, as launch.retry has it") == 2
    assert not (tmp_path / JOBS).exists(), "folders of jobs that are over go"


def test_what_a_lost_job_had_not_begun_gets_another_and_what_it_was_at_a_row(monkeypatch, tmp_path: Path) -> None:
    cells = cells_of(tmp_path, "ddp", "zero1", "zero2", launch={"group_by": "all"})

    def end(number: int, folder: JobFolder) -> None:
        if number > 1:
            return ok(number, folder)
        first = folder.launches()[0]
        folder.write_rows([row(first)])
        aside = tmp_path / "aside"
        aside.mkdir()
        with Reporter(board_in=aside) as reporter:
            reporter.expect(folder.launches())
            reporter.start(list(reporter._places)[1])
            shutil.copytree(next(aside.glob(".sweep-*/")), aside / "killed")  # the board of a killed job
        (board,) = aside.glob("killed/*.json")
        told = json.loads(board.read_text())
        told["launches"][1]["seconds"] = 60.0
        board.write_text(json.dumps(told))
        (aside / "killed").rename(folder.path / ".sweep-killed")
        aside.rmdir()
        (folder.path / "log-0.txt").write_text("the last words\n")
        raise OSError("the node is gone")

    sweep, plugin = run(monkeypatch, cells, end)
    assert plugin.jobs == [["ddp 0", "zero1 0", "zero2 0"], ["zero2 0"]]
    assert [one["status"] for one in sweep.rows] == ["ok", "crash", "ok"]
    assert "the node is gone" in sweep.rows[1]["reason"]
    (lost,) = load(tmp_path).runs.to_dict("records")
    assert (lost["status"], lost["launcher"], lost["strategy"]) == ("crash", "jobs", "zero1")
    assert "the last words" in (tmp_path / lost["run_id"] / "logs/job.log").read_text()
    assert 60.0 <= lost["seconds"] < 90.0, "since it began, as the job's board had it"
    assert 60.0 <= (datetime.now(UTC) - datetime.fromisoformat(lost["started"])).total_seconds() < 90.0


@pytest.mark.parametrize("done", [0, 1])
def test_a_lost_job_that_awaited_another_sweeps_launch_leaves_it_to_the_next(
    monkeypatch, tmp_path: Path, done: int
) -> None:
    """It had not begun it, though it was seen before it waited: a row would be an attempt that never was."""
    heard, listen = threading.Event(), DispatchedSweep._listen
    monkeypatch.setattr(DispatchedSweep, "_listen", lambda sweep, job: (listen(sweep, job), heard.set()))

    def end(number: int, folder: JobFolder) -> None:
        if number > 1:
            return ok(number, folder)
        folder.write_rows([row(one) for one in folder.launches()[:done]])
        with Reporter(board_in=folder.path) as reporter:
            reporter.expect(folder.launches())
            reporter.start(list(reporter._places)[done])
            for _ in range(2):  # the first time may have begun before
                heard.clear()
                assert heard.wait(120)
            reporter.wait(True)
            shutil.copytree(next(folder.path.glob(".sweep-*/")), folder.path / ".sweep-killed")
        raise OSError("the node is gone")

    sweep, plugin = run(monkeypatch, cells_of(tmp_path, "ddp", "zero1", launch={"group_by": "all"}), end)
    assert plugin.jobs == [["ddp 0", "zero1 0"], ["ddp 0", "zero1 0"][done:]]
    assert [one["status"] for one in sweep.rows] == ["ok", "ok"]
    assert not list(tmp_path.glob("*/run.json"))


def test_a_job_that_is_lost_before_it_began_takes_what_another_sweep_has_finished(monkeypatch, tmp_path: Path) -> None:
    """The job waited in a queue; the jobs of an earlier, killed command ran its first launch there meanwhile."""
    finished: dict[str, Any] = {}

    def end(_: int, folder: JobFolder) -> None:
        finished.update(row(folder.launches()[0]))
        raise OSError("the node is gone")

    def find(_: DispatchedSweep, launch: Any) -> dict[str, Any] | None:
        return finished if finished and launch.cell.config.strategy.name == "ddp" else None

    monkeypatch.setattr(DispatchedSweep, "_find", find)
    sweep, plugin = run(monkeypatch, cells_of(tmp_path, "ddp", "zero1", launch={"group_by": "all"}), end)
    assert plugin.jobs == [["ddp 0", "zero1 0"]]
    assert [one["status"] for one in sweep.rows] == ["ok", "crash"]
    assert [path.parent.name.split("-")[0] for path in tmp_path.glob("*/run.json")] == ["zero1"]


@pytest.mark.parametrize("raises", [True, False])
def test_a_job_that_the_launcher_refuses_is_a_row_for_each_and_is_not_tried_again(
    monkeypatch, tmp_path, raises
) -> None:
    def end(_: int, folder: JobFolder) -> None:
        if raises:
            raise ValueError("no such\npartition")

    sweep, plugin = run(monkeypatch, cells_of(tmp_path, "ddp", "zero1", launch={"group_by": "all"}), end)
    assert len(plugin.jobs) == 1
    words = "its job of jobs failed: ValueError: no such partition" if raises else "its job of jobs ended without a row"
    assert [one["status"] for one in sweep.rows] == ["crash", "crash"]
    assert all(one["reason"].startswith(words) for one in sweep.rows)


def test_fail_fast_counts_the_last_attempt_and_starts_no_other_job(monkeypatch, tmp_path: Path) -> None:
    cells = cells_of(tmp_path, "ddp", "zero1", "zero2", launch={"retry": ["crash"]}, fail_fast=True)

    def end(number: int, folder: JobFolder) -> None:
        folder.write_rows([row(one, {1: "crash", 3: "oom"}.get(number, "ok")) for one in folder.launches()])

    sweep, plugin = run(monkeypatch, cells, end)
    assert plugin.jobs == [["ddp 0"], ["zero1 0"], ["zero2 0"]]
    assert [one["status"] for one in sweep.rows] == ["ok", "oom", "crash"], "ddp's next attempt does not begin"
    assert sweep.failed_fast


def test_fail_fast_takes_jobs_from_the_queue_that_wait_there(monkeypatch, tmp_path: Path) -> None:
    """zero1's job waits until it is canceled; zero2's is at work, and its row counts."""
    canceled = threading.Event()

    class Queue(JobWatch):
        def withdraw(self, folders: Any, whole: bool = False) -> list[JobFolder]:
            mine = [one for one in folders if one.launches()[0].cell.config.strategy.name == "zero1"]
            if mine and not whole:
                canceled.set()
            return mine

    def end(_: int, folder: JobFolder) -> None:
        (launch,) = folder.launches()
        fails = launch.cell.config.strategy.name == "ddp"
        assert fails or canceled.wait(120)
        if launch.cell.config.strategy.name != "zero1":
            folder.write_rows([row(launch, "crash" if fails else "ok")])

    monkeypatch.setattr(dispatched_sweep, "JobWatch", Queue)
    sweep, plugin = run(monkeypatch, cells_of(tmp_path, "ddp", "zero1", "zero2", "zero3", fail_fast=True), end, 3)
    assert sorted(plugin.jobs) == [["ddp 0"], ["zero1 0"], ["zero2 0"]]
    assert [one["status"] for one in sweep.rows] == ["crash", "ok"]
    assert not list(tmp_path.glob(f"{JOBS}/*")), "nothing of them stays"


def test_a_run_that_a_job_could_not_write_is_told_with_its_machine(monkeypatch, tmp_path: Path) -> None:
    kept = tmp_path / "rescued"

    def end(_: int, folder: JobFolder) -> None:
        folder.write_unwritten([Unwritten(tmp_path, "No space left on device", kept)])
        ok(0, folder)

    sweep, _ = run(monkeypatch, cells_of(tmp_path, "ddp"), end)
    words = f"1 run could not be written to {tmp_path} (No space left on device, on {socket.gethostname()})"
    assert sentences(sweep.unwritten) == [f"{words}; it is kept in {kept} instead: zerobench status {kept}"]


@pytest.mark.parametrize(
    ("word", "whole"),
    [
        ("launch.group_by=model,world_size", "launch.group_by='model,world_size'"),
        ("launch.group_by='model,world_size'", "launch.group_by='model,world_size'"),
        ("launch.group_by=null", "launch.group_by=null"),
        ("launch.retry=crash,timeout", "launch.retry=[crash,timeout]"),
        ("launch.retry=[crash]", "launch.retry=[crash]"),
        ("strategy=ddp,zero2", "strategy=ddp,zero2"),
    ],
)
def test_commas_in_a_list_of_words_make_no_sweep(word: str, whole: str) -> None:
    assert in_one(word) == whole


def test_a_dry_run_shows_jobs_and_what_they_ask_for(tmp_path: Path, capsys) -> None:
    cells = [cell(name, ranks, results_dir=str(tmp_path), launch=Launch(threads=2, group_by="world_size"))
             for name in ("ddp", "zero2") for ranks in (1, 2)]  # fmt: skip
    slurm = choice("submitit_slurm", {"gpus_per_node": 4}, **SLURM | {"array_parallelism": 1})
    print_plan(cells, ["cell", "plan", "job", "asks for"], slurm)
    said = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in said.splitlines() if "tiny" in line]
    assert lines[1].endswith("run 2 nodes=1 tasks_per_node=1 cpus_per_task=4 gpus_per_node=2")
    assert [line.split(" run ")[1].split()[0] for line in lines] == ["1", "2", "1", "2"]
    assert "submitit_slurm: 2 jobs, at most 1 at once" in said


def test_jobs_of_a_killed_sweep_are_followed_while_they_live_and_their_folders_go_then(tmp_path: Path, capsys) -> None:
    """The sweep's lease is released as a kill does it; a task's is held by a thread, as of another process."""
    launches = list(rounds(cells_of(tmp_path, "ddp")))
    writer = BoardWriter()
    writer.put_up(tmp_path)
    living, dead = (JobFolder.make(tmp_path, n, launches, "jobs", writer.name_in(tmp_path)) for n in (1, 2))
    assert abandoned_jobs(tmp_path) == []
    for folder in (living, dead):
        assert folder.lease is not None
        folder.lease.release()
    with _leased(living.path / "lease-0"), Reporter(board_in=living.path) as reporter:
        reporter.expect(launches)
        reporter.start(launches[0])
        assert boards_of_orphans(tmp_path) == [], "on the sweep's board"
        writer.take_down()
        assert [path.parent for path in boards_of_orphans(tmp_path)] == [living.path]
        board = read_board(boards_of_orphans(tmp_path)[0])
        assert board is not None
        assert [launch.name for launch in board.launches] == ["ddp tiny N=2 b=8"]
        assert abandoned_jobs(tmp_path) == [dead.path]
        assert dead.path in look(tmp_path).leftovers
        tidy(tmp_path)  # as a sweep does that needs no job
        assert list((tmp_path / JOBS).iterdir()) == [living.path]
    assert boards_of_orphans(tmp_path) == []
    assert abandoned_jobs(tmp_path) == [living.path]
    tidy(tmp_path)
    assert not (tmp_path / JOBS).exists()
    assert run_job(str(tmp_path / JOBS / "3-removed"), ["false"], str(tmp_path)) is None, "its folder is gone"


@pytest.mark.parametrize("end", ["exit 130", "kill -TERM $$"])
def test_a_task_that_slurm_has_ended_leaves_no_result(end: str, tmp_path: Path, monkeypatch) -> None:
    """With one the job would be over for submitit, and SLURM may run it again."""
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    with pytest.raises(SystemExit) as ended:
        run_job(str(tmp_path), ["sh", "-c", end], str(tmp_path))
    assert ended.value.code == 130
    assert run_job(str(tmp_path), ["sh", "-c", "exit 1"], str(tmp_path)) == 1


def test_only_folders_of_jobs_are_taken_for_abandoned_ones(tmp_path: Path) -> None:
    """Neither others' nor those behind a link."""
    (tmp_path / "runs" / JOBS / "2024-01").mkdir(parents=True)
    assert abandoned_jobs(tmp_path / "runs") == []
    folder = JobFolder.make(tmp_path / "runs", 1, [], "jobs")
    assert folder.lease is not None
    folder.lease.release()
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / JOBS).symlink_to(tmp_path / "runs" / JOBS)
    assert abandoned_jobs(tmp_path / "linked") == []
    assert abandoned_jobs(tmp_path / "runs") == [folder.path]


def test_a_setting_that_the_launcher_does_not_have_is_one_sentence() -> None:
    @dataclass
    class Queue:
        _target_: str = "hydra_plugins.x"
        partition: str | None = None
        more: dict[str, Any] = field(default_factory=dict)

    def told(word: str) -> str:
        return problem_of_setting(word, OmegaConf.structured(Queue))

    assert told("hydra.launcher.partition=gpu") == told("+hydra.launcher.more.exclusive=true") == ""
    assert told("hydra.launcher.partion=gpu") == (
        "hydra.launcher.partion: no such key; did you mean hydra.launcher.partition?"
    )
    assert "valid: partition, more" in told("+hydra.launcher.xyz=1")
    assert told("hydra.launcher.more.exclusive=true").endswith("with a plus: +hydra.launcher.more.exclusive=true")


def test_jobs_side_by_side_here_are_said_to_disturb_times(monkeypatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr(dispatched_sweep, "POLL_S", 0.01)
    for cells, told in ((cells_of(tmp_path, "ddp", "zero1"), 1), (cells_of(tmp_path, "ddp"), 0)):
        with Reporter() as reporter:
            DispatchedSweep(reporter, plugin=Jobs(ok, choice("submitit_local", n_jobs=2))).run(cells)  # type: ignore[arg-type]
        assert capsys.readouterr().err.count("jobs run side by side on this machine") == told


def test_a_reference_of_a_check_is_a_job_and_no_row_of_the_sweep(monkeypatch, tmp_path: Path, capsys) -> None:
    sweep, plugin = run(monkeypatch, cells_of(tmp_path, "zero2"), ok)
    (reference,) = cells_of(tmp_path / ".references", "ddp")
    assert sweep.run_apart(reference)["status"] == "ok"
    assert plugin.jobs == [["zero2 0"], ["ddp 0"]]
    assert len(sweep.rows) == 1
    assert "job 2 of jobs: ddp tiny N=2 b=8, for a check" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal at the death of a parent is Linux's")
def test_servers_that_end_with_their_thread_outlive_the_job_that_started_them() -> None:
    """Ray's cluster is one: it must still be there for the next job."""
    started: list[subprocess.Popen[bytes]] = []
    done = threading.Event()

    def start() -> None:
        started.append(subprocess.Popen(["sleep", "60"], preexec_fn=end_with_parent))
        done.set()

    threads = StayingThreads()
    threads.run(start)
    assert done.wait(120)
    wait_until(lambda: threads._free)
    (server,) = started
    with pytest.raises(subprocess.TimeoutExpired):
        server.wait(0.5)
    before = threading.active_count()
    for _ in range(3):
        again = threading.Event()
        threads.run(again.set)
        assert again.wait(120)
        wait_until(lambda: threads._free)
    assert threading.active_count() == before, "a free thread is used again"
    server.kill()
    server.wait()
