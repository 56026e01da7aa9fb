"""SLURM's queue as it is read, the end of a lost job, requests that are refused: with stand-ins for its programs."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from zerobench.config.launcher import LauncherChoice, Resources, nodes_of, resources_of
from zerobench.dispatch import slurm
from zerobench.dispatch.job_folder import JobFolder
from zerobench.dispatch.slurm import Queue, Seen, SlurmWatch
from zerobench.dispatch.watch import JobWatch

SINFO = "all*|2|4\ngpu|1|8+\ngpu|3|16\n"


def choice(**asked: object) -> LauncherChoice:
    settings = {"nodes": 1, "tasks_per_node": 1, "partition": None, "timeout_min": 60} | asked
    return LauncherChoice("submitit_slurm", (), settings, asked)


def stand_in(folder: Path, name: str, says: str = "", code: int = 0, error: str = "") -> None:
    words = f"echo \"$@\" >> {folder}/{name}.asked; printf '{says}'; printf '{error}' >&2; exit {code}"
    (folder / name).write_text(f"#!/bin/sh\n{words}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of SLURM's programs, before others on the path."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in slurm.PROGRAMS:
        stand_in(folder, name)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def job_folder(results: Path, job_id: int) -> JobFolder:
    path = results / ".jobs" / f"{job_id}-abc"
    (path / ".submitit").mkdir(parents=True, exist_ok=True)
    (path / f".submitit/{job_id}_submission.sh").touch()
    return JobFolder(path)


def test_nodes_tasks_and_gpus_follow_the_cell() -> None:
    def asked(world_size: int, node_size: int | None = None, device: str = "cpu", **settings: int) -> Resources:
        return resources_of(choice(**settings), world_size, node_size, 1, device)

    assert asked(4) == Resources(1, 1, 4, None)  # one task starts its ranks itself
    assert asked(4, node_size=2) == asked(4, tasks_per_node=2) == Resources(2, 2, 1, None)
    assert asked(1, tasks_per_node=2) == Resources(1, 1, 1, None)
    assert asked(4, device="cuda") == Resources(1, 1, 4, 4)
    assert asked(16, device="cuda", gpus_per_node=8) == Resources(2, 8, 1, 8)
    assert asked(2, device="cuda", gpus_per_node=8) == Resources(1, 1, 2, 2)
    assert nodes_of(choice(nodes=4, gpus_per_node=8), 8, None) == 4


def test_a_job_is_over_once_two_looks_agree(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "LOOK_S", 0.0)
    monkeypatch.setattr(slurm, "SLOWNESS", 0.0)
    monkeypatch.setattr(slurm, "APART_S", 0.0)
    queue = Queue()
    stand_in(programs, "squeue", "7|RUNNING|n1|None|a\\n8|PENDING||Priority|b\\n")
    assert [queue.is_over(one) for one in ("7", "8") * 3] == [False] * 6
    stand_in(programs, "squeue", "7|FAILED|n1|NonZeroExitCode|a\\n8|NODE_FAIL|n2|None|b\\n")
    assert not queue.is_over("7")  # the look before had it running
    assert queue.is_over("7")
    stand_in(programs, "squeue", "8|PENDING||BeginTime|b\\n")  # requeued
    assert not queue.is_over("8")
    stand_in(programs, "squeue", code=1, error="Unable to contact slurm controller\\n")
    assert not any(queue.is_over("9") for _ in range(3)), "looks of before it was asked for tell nothing"
    assert queue.trouble == "Unable to contact slurm controller"


def test_a_look_is_not_taken_more_often_than_it_may(programs: Path) -> None:
    queue = Queue()
    for _ in range(5):
        queue.jobs()
    assert len((programs / "squeue.asked").read_text().splitlines()) == 1


def test_the_end_of_a_job_names_it_its_node_and_state(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("submitit", reason="SLURM's plugin is not installed: pip install hydra-submitit-launcher")
    stand_in(
        programs, "squeue",
        "5|CANCELLED|n1|None|x\\n6|TIMEOUT|n[1-2]|TimeLimit|x\\n7|OUT_OF_MEMORY|n2|OutOfMemory|x\\n8|RUNNING|n2|None|x\\n"
        "9|NODE_FAIL|n2|None|x\\n10|PENDING||Resources|zerobench-10-abc\\n",
    )  # fmt: skip
    monkeypatch.setattr(slurm, "SETTLE_S", 0.0)  # of job 8, which runs
    watch = SlurmWatch(choice())
    ends = {one: watch.fate(job_folder(tmp_path, one), None, None) for one in (5, 6, 7, 8, 9, 11)}
    assert {one: end.status for one, end in ends.items()} == {
        5: "interrupted", 6: "timeout", 7: "oom", 8: "crash", 9: "crash", 11: "crash"
    }  # fmt: skip
    assert "SLURM job 6 on n[1-2] reached its time limit (TIMEOUT, TimeLimit)" in ends[6].reason
    assert "SLURM job 9 on n2 lost a node (NODE_FAIL)" in ends[9].reason
    assert "SLURM job 11 left the SLURM queue" in ends[11].reason
    early = watch.fate(job_folder(tmp_path, 12), RuntimeError("not requeued because: timed-out too many times"), None)
    assert early.status == "timeout"
    assert "time limit" in early.reason
    requeue = subprocess.CalledProcessError(1, ["scontrol", "requeue", "5"])
    warned = watch.fate(job_folder(tmp_path, 5), requeue, None)
    assert warned.status == "interrupted"
    assert warned.reason.startswith("SLURM job 5 on n1 was warned by SLURM, of preemption or of a time limit")
    folders = [JobFolder(tmp_path / ".jobs/10-abc"), job_folder(tmp_path, 8)]
    assert watch.waiting(folders) == "SLURM: 1 job waiting (Resources 1), 1 running"
    assert watch.withdraw(folders) == []
    assert (programs / "scancel.asked").read_text() == "--quiet --state=PENDING 10\n"


def test_submitit_asks_our_queue_and_never_sacct(programs: Path, tmp_path: Path) -> None:
    submitit = pytest.importorskip("submitit.slurm.slurm", reason="hydra-submitit-launcher is not installed")
    stand_in(programs, "sacct", code=1)
    stand_in(programs, "squeue", "5|FAILED|n1|None|x\\n")
    watch = SlurmWatch(choice())
    watch.queue._first_asked["5"] = 0.0
    watch.queue._looks = [(time.monotonic(), {"5": Seen("FAILED")})] * 2
    watch.queue._next = time.monotonic() + 60
    job = submitit.SlurmJob(tmp_path / "%j", "5")
    (tmp_path / "5").mkdir()
    assert job.done(force_check=True)
    assert job.state == "FAILED"
    assert not (programs / "sacct.asked").exists()


@pytest.mark.parametrize(
    ("asked", "wanted", "sentence"),
    [
        ({"partition": "nope"}, (1, 1, 1), "partition=nope: SLURM has no such partition; it has all, gpu"),
        ({}, (3, 2, 1), "nodes: a job needs 3 nodes, and partition all has 2"),
        ({"partition": "gpu"}, (5, 2, 1), "nodes: a job needs 5 nodes, and partition gpu has 4"),
        (
            {},
            (1, 2, 4),
            "cpus_per_task: a job needs 2 tasks of 4 CPUs on a node, and a node of partition all has 4 CPUs",
        ),
        ({"partition": "all,gpu"}, (4, 2, 8), ""),
    ],
)
def test_a_request_that_is_too_large_is_one_sentence(
    programs: Path, asked: dict[str, object], wanted: tuple[int, int, int], sentence: str
) -> None:
    stand_in(programs, "sinfo", SINFO)
    found = slurm.problems_of(choice(**asked), [Resources(*wanted, None)] * 2)
    assert found == ([f"hydra.launcher.{sentence}"] if sentence else [])


def test_sbatch_has_the_last_word_on_a_request(programs: Path) -> None:
    stand_in(programs, "sinfo", SINFO)
    asked = choice(account="x", mem_gb=2, additional_parameters={"mail_type": "END", "exclusive": True})
    refused = (
        "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified\\n"
    )
    stand_in(programs, "sbatch", code=1, error=refused)
    [sentence] = slurm.problems_of(asked, [Resources(2, 2, 1, 1)])
    assert sentence == (
        "hydra/launcher=submitit_slurm: sbatch refuses a job of 2 nodes with 2 tasks each: "
        "Invalid account or account/partition combination specified"
    )
    assert (programs / "sbatch.asked").read_text().split() == [
        "--test-only", "--account=x", "--time=60", "--mem=2048M", "--nodes=2", "--ntasks-per-node=2",
        "--cpus-per-task=1", "--gpus-per-node=1", "--mail-type=END", "--exclusive", "--wrap=true",
    ]  # fmt: skip
    stand_in(programs, "sbatch", code=1, error="allocation failure: Requested nodes are busy\\n")
    assert slurm.problems_of(asked, [Resources(2, 2, 1, 1)]) == []
    stand_in(programs, "sinfo", code=1, error="slurm_load_partitions: Unable to contact slurm controller\\n")
    [silent] = slurm.problems_of(asked, [Resources(2, 2, 1, 1)])
    assert "SLURM does not answer: slurm_load_partitions: Unable to contact slurm controller" in silent


def test_without_sbatch_a_sweep_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    [sentence] = slurm.problems_of(choice(), [Resources(1, 1, 1, None)])
    assert sentence.startswith("hydra/launcher=submitit_slurm: sbatch is not on this machine")


def test_a_launcher_that_tells_nothing_has_a_fate_too(tmp_path: Path) -> None:
    watch, folder = JobWatch(choice()), JobFolder(tmp_path)
    assert watch.fate(folder, None, 130).status == "interrupted"
    assert watch.fate(folder, ValueError("no\nway"), None).reason.endswith("failed: ValueError: no way")
