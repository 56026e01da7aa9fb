"""A job's environment, who runs where in it, and what its processes tell one another; the passes of a joined job."""

import json
import math
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import PrefixStore, TCPStore

from tests.cells import cell
from tests.ranks import free_port, wait_until
from tests.unit.test_clock import Clock
from zerobench.host import job
from zerobench.host import store as job_store
from zerobench.host.job import Job, JobContext, JobError, Membership, RankInfo, find_job, rebuild, to_plain
from zerobench.host.store import Heartbeat, HeartbeatMonitor, JobStore, LostError
from zerobench.probes.energy import GpuState
from zerobench.probes.probe import EventOrder
from zerobench.rank_record import RankRecord
from zerobench.ranks import over_cluster
from zerobench.ranks.over_cluster import interruption
from zerobench.ranks.start_ranks import Interrupted, LaunchError
from zerobench.records import MemoryRow, StepRow
from zerobench.theory.shapes import ParameterShape, Schedule

BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
BY_TORCHRUN = Job(1, 2, 1, "127.0.0.1", 29500, True, "7", "host/0")


def info(rank: int, machine: str, gpus: tuple[str, ...] = (), local_rank: int = 0, world_size: int = 4) -> RankInfo:
    return RankInfo(rank, world_size, local_rank, machine, gpus, "code", "2.13")


TWO_MACHINES = Membership(
    (info(0, "a", ("x", "y")), info(1, "a", ("x", "y"), 1), info(2, "b", ("z",)), info(3, "b", ("z",), 1))
)


def test_no_job_where_nothing_says_so_or_a_step_has_one_task() -> None:
    assert find_job({}) is None
    assert find_job({"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}) is None  # many shells have these
    assert find_job(BY_SRUN | {"SLURM_STEP_NUM_TASKS": "1"}, scontrol) is None
    assert find_job({name: value for name, value in BY_SRUN.items() if "STEP" not in name}, scontrol) is None  # sbatch


def test_a_job_by_hand_and_torchruns() -> None:
    found = find_job(BY_HAND)
    assert (found.rank, found.world_size, found.local_rank, found.address, found.port) == (1, 2, 1, "10.0.0.1", 29500)
    assert (found.agent, found.launched_by) == (False, "the environment")
    more = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "7", "TORCHELASTIC_RESTART_COUNT": "1"}
    by_torchrun = find_job(BY_HAND | more | {"GROUP_RANK": "1"})
    assert (by_torchrun.agent, by_torchrun.launched_by, by_torchrun.run) == (True, "torchrun", "7")
    assert by_torchrun.machine == found.machine + "/1"


BY_SRUN = {
    "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1", "SLURMD_NODENAME": "n2",
    "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0",
}  # fmt: skip
BY_MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "7",
}  # fmt: skip


def scontrol(*command: str) -> str:
    return "n1\nn2\n" if "hostnames" in command else "NodeName=n1 Arch=x86_64\n  NodeAddr=10.0.0.7 Port=1"


def no_scontrol(*command: str) -> str:
    raise FileNotFoundError("scontrol")


def test_a_job_in_slurms_own_words_with_and_without_scontrol() -> None:
    found = find_job(BY_SRUN, scontrol)
    assert (found.rank, found.world_size, found.local_rank, found.address) == (3, 4, 1, "10.0.0.7")
    assert found.machine.endswith("/n2")
    assert found.launched_by == "srun"
    other = find_job(BY_SRUN | {"SLURM_STEP_ID": "1"}, scontrol)
    assert other.port != found.port  # two steps of a job at once
    by_port = find_job(BY_SRUN | {"MASTER_PORT": "4321"}, scontrol)
    assert by_port.port == 4321
    found = find_job(BY_SRUN | {"SLURM_STEP_NODELIST": "n1,n2"}, no_scontrol)
    assert found.address == "n1"
    with pytest.raises(JobError, match=r"^MASTER_ADDR is not set and SLURM_PROCID is"):
        find_job(BY_SRUN, no_scontrol)


def test_a_job_in_open_mpis_words() -> None:
    found = find_job(BY_MPIRUN)
    assert (found.rank, found.world_size, found.address, found.launched_by) == (1, 2, "127.0.0.1", "mpirun")
    with pytest.raises(JobError, match=r"^MASTER_ADDR is not set and OMPI_COMM_WORLD_RANK is"):
        find_job(BY_MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"})


@pytest.mark.parametrize("name", BY_HAND)
def test_half_a_job_is_refused_by_the_missing_name(name: str) -> None:
    with pytest.raises(JobError, match=f"^{name} is not set and (RANK|WORLD_SIZE) is"):
        find_job({key: value for key, value in BY_HAND.items() if key != name})


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("RANK", "2", "RANK=2: must be below WORLD_SIZE=2"),
        ("LOCAL_RANK", "5", "LOCAL_RANK=5: must be below WORLD_SIZE=2"),
        ("MASTER_PORT", "http", "MASTER_PORT=http: must be a whole number"),
        ("MASTER_PORT", "99999", "MASTER_PORT=99999: must be a port, 1 to 65535"),
        ("MASTER_PORT", "0", "MASTER_PORT=0: must be a port, 1 to 65535"),
        ("RANK", "-1", "RANK=-1: must be a whole number from 0"),
    ],
)
def test_a_wrong_job_is_refused(name: str, value: str, words: str) -> None:
    with pytest.raises(JobError, match=words):
        find_job(BY_HAND | {name: value})


def test_who_runs_where_and_shares_a_gpu() -> None:
    assert [TWO_MACHINES.machines(n) for n in (0, 1, 2, 3, 4)] == [1, 1, 1, 2, 2]
    assert [TWO_MACHINES.most_per_host(n) for n in (1, 2, 3, 4)] == [1, 2, 2, 2]
    assert [TWO_MACHINES.ranks_per_gpu(n) for n in (1, 2, 3, 4)] == [1, 1, 1, 2]
    assert Membership((*TWO_MACHINES.members[:3], info(3, "b", (), 1))).ranks_per_gpu(4) == 0
    where = [("a", 0), ("a", 1), ("a", 2), ("a", 3), ("b", 0), ("b", 1)]  # srun --gpus-per-task=1, 4 + 2 ranks
    own = Membership(tuple(info(n, machine, (f"gpu{n}",), local) for n, (machine, local) in enumerate(where)))
    assert (own.machines(6), own.most_per_host(6), own.ranks_per_gpu(6)) == (2, 4, 1)
    both = Membership(
        (info(0, "a/0", ("x", "y")), info(1, "a/1", ("x", "y")))
    )  # each agent's first rank takes its cuda:0
    assert (both.machines(2), both.most_per_host(2), both.ranks_per_gpu(2)) == (2, 2, 2)
    apart = Membership((info(0, "a/0", ("x",)), info(1, "a/1", ("y",))))  # each agent with GPUs of its own
    assert apart.ranks_per_gpu(2) == 1


def test_ranks_that_contradict_one_another_are_refused() -> None:
    TWO_MACHINES.check()
    first, second = TWO_MACHINES.members[:2]
    for wrong, words in (
        (replace(second, code="other"), "rank 1 of the job has code other and rank 0 has code"),
        (replace(second, world_size=3), "rank 1 of the job has world_size 3 and rank 0 has 4"),
        (replace(second, local_rank=0), "ranks 0 and 1 on a both have LOCAL_RANK=0"),
    ):
        with pytest.raises(JobError, match=words):
            Membership((first, wrong)).check()


def test_a_second_process_of_a_rank_is_refused(store: TCPStore) -> None:
    mine = replace(BY_TORCHRUN, agent=False, port=store.port)
    JobStore("127.0.0.1", store.port, "zerobench/7").increment("came/1")
    with pytest.raises(JobError, match=r"RANK=1: another process .* has that rank, or an earlier command of it had; "):
        JobContext(mine, "code")


def test_a_cell_follows_the_job_it_runs_in(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = cell("zero2", 2)
    mine = SimpleNamespace(job=SimpleNamespace(world_size=4), membership=TWO_MACHINES)
    monkeypatch.setattr(job, "current_job", lambda: mine)
    whole = cell("zero2", None).config  # type: ignore[arg-type]
    assert (whole.world_size, whole.nodes) == (4, 2)
    assert cell("zero2", 2).cell_id == alone.cell_id  # the same measurement as without a job
    gpus = cell("zero2", 4, device="cuda").config
    assert (gpus.backend, gpus.ranks_per_gpu) == ("gloo", 2)  # machine b has one for two ranks
    assert cell("zero2", 2, device="auto").config.backend == "nccl"
    assert "world_size=8: the job that was joined has 4 ranks" in "; ".join(cell("zero2", 8).problems)
    assert not cell("zero2", 8, backend="simulated").problems


def test_records_survive_json_to_the_bit() -> None:
    shapes = (ParameterShape(10, 4, True, "", 1, None), ParameterShape(10, 2, False, "block", 2, 0))
    losses = [0.1 + 0.2, 5e-324, math.inf]
    steps = [StepRow(1, "timed", n, False, loss, None, 1.0, 2.0, 3.0) for n, loss in enumerate(losses)]
    schedule = Schedule(shapes, (1, 0), ("block",), 2, (True,))
    memory = {"resident_bytes": 3, "loopback_bytes": None}
    states = [GpuState(1755, 1980, 61, 688.5, ("power cap",)), GpuState(None, None, None, None, None)]
    beside = [MemoryRow(1, "step", "outside_ledger", None, None, -512)]
    order = EventOrder((1, 0), (("block", True), ("", False)))
    record = RankRecord(
        rank=1, mode="timed", steps=steps, process_memory=memory, schedule=schedule, memory=beside, gpu_states=states,
        times=[{"step": 0.1}], order=order,
    )  # fmt: skip
    assert rebuild(RankRecord, json.loads(json.dumps(to_plain(record)))) == record
    nothing = json.loads(json.dumps(to_plain(replace(record, steps=[replace(steps[0], loss=math.nan)]))))
    assert math.isnan(rebuild(RankRecord, nothing).steps[0].loss)
    for wrong in (nothing | {"rank": "1"}, nothing | {"more": 1}, nothing | {"steps": [3]}):
        with pytest.raises(ValueError):
            rebuild(RankRecord, wrong)


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.mark.slow
def test_a_pulse_that_stands_still_is_heard(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock of its own: a thread of a busy machine may be late by any time."""
    monkeypatch.setattr(job_store, "BEAT_S", 0.05)
    mine = JobStore("127.0.0.1", store.port, "test")
    heartbeat = Heartbeat(JobStore("127.0.0.1", store.port, "test"), 3)
    monitor = HeartbeatMonitor(mine, silence_s=0.6)
    monkeypatch.setattr(job_store, "time", clock := Clock())
    assert not monitor.silent(3)
    for _ in range(10):
        clock.sleep(0.5)
        wait_until(lambda: (mine.read("heartbeat/3") or 0) > monitor._heard[3].beat)
        assert not monitor.silent(3)
    heartbeat.stop()
    clock.sleep(0.1)
    assert not monitor.silent(3), "and a last beat is heard"
    clock.sleep(0.4)
    assert not monitor.silent(3)
    clock.sleep(0.3)
    assert monitor.silent(3)


@pytest.mark.slow
def test_rank_without_store_prints_one_line_and_no_stack(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("zerobench.host.store.NOTE_S", 0.2)
    port = free_port()
    with pytest.raises(LostError, match=rf"^there is no store at 127.0.0.1:{port} \(Connection refused\); do all"):
        JobStore("127.0.0.1", port, "test", patience_s=1)
    (line,) = capfd.readouterr().err.splitlines()
    expected = rf"zerobench: there is no store at 127.0.0.1:{port} after \d s; this process tries for another [01] s"
    assert re.fullmatch(expected, line)


def test_port_that_is_taken_is_named(store: TCPStore) -> None:
    with pytest.raises(LostError, match=r"MASTER_PORT=\d+: rank 0 cannot keep the job's store there"):
        JobStore("127.0.0.1", store.port, "test", host=True)


@pytest.mark.parametrize("value", ["", "2 QQ==", "x QQ==", "1 no base 64", "-1 QQ==", "1 QQ=="])
def test_a_value_of_another_program_is_refused(store: TCPStore, value: str) -> None:
    PrefixStore("test", store).set("order/1", value)
    words = r"^the value of order/1 in the job's store at 127.* is not one that zerobench has written: another program"
    with pytest.raises(LostError, match=words):
        JobStore("127.0.0.1", store.port, "test").read("order/1")


def double(job: int, tell: Callable[[Any], None]) -> int:
    return 2 * job


def follow(mine: JobContext) -> None:
    """over_cluster.follow without its signals, which a thread cannot have."""
    while (order := over_cluster._next_order(mine)) is not None:
        if mine.job.rank < len(order["jobs"]):
            mine.store.post(f"end/{mine.passes}/{mine.job.rank}", to_plain(over_cluster._run_own_rank(mine, order)))


class Died(BaseException):
    """Ends a follower's thread as SIGKILL ends a process: without a word."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_lost_rank_crashes_its_cell_and_later_cells_that_need_it(tmp_path: Path, monkeypatch) -> None:
    """Four ranks on three nodes; the disk of rank 1 is full in a pass; the node of rank 2 dies in one of all four."""
    contexts: list[JobContext] = []

    def launch(worker: Any, jobs: Sequence[int], log_dir: Path, *_: Any, first: int = 0, **__: Any) -> list[Any]:
        if first == 2:
            contexts[2].heartbeat.stop()
            raise Died
        if jobs[0] == 9:
            raise OSError(28, "No space left on device")
        return [worker(job, print) for job in jobs]

    monkeypatch.setattr(over_cluster.here, "launch", launch)
    monkeypatch.setattr(over_cluster, "POLL_S", 0.005)
    monkeypatch.setattr(job_store, "BEAT_S", 0.05)
    monkeypatch.setitem(over_cluster.WORKERS, "double", double)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    nodes = ("a/0", "a/1", "a/2", "a/1")
    jobs = [Job(rank, 4, rank // 3, "127.0.0.1", store.port, True, "run/0", at) for rank, at in enumerate(nodes)]
    contexts += [JobContext(each, "code") for each in jobs]
    monkeypatch.setattr(job, "_contexts", [contexts[0]])
    # at once, but only of a rank whose heartbeat has ended: on a busy machine any may be late
    monkeypatch.setattr(contexts[0].monitor, "silent", lambda rank: not contexts[rank].heartbeat._thread.is_alive())
    threads = [threading.Thread(target=follow, args=(context,), daemon=True) for context in contexts[1:]]
    for thread in threads:
        thread.start()

    def run(*jobs: int) -> list[Any]:
        return over_cluster._Pass(contexts[0], double, jobs, tmp_path, 20).run(print)

    try:
        with pytest.raises(LaunchError, match=r"rank 1 could not run its part: OSError: \[Errno 28\] No space left"):
            run(8, 9)
        for lost in ((2, 3, 4, 5), (2, 3, 4)):
            with pytest.raises(LaunchError) as raised:
                run(*lost)
            assert str(raised.value) == "crash: rank 2 is lost: its process says nothing (rank 2 of the job, on a/2)"
        assert (run(6), run(4, 5)) == ([12], [8, 10])
        with pytest.raises(JobError, match="world_size=5: the job that was joined has 4 ranks"):
            over_cluster.places(5, tmp_path)
        contexts[3].leave(f"was {interruption()}")
        with pytest.raises(Interrupted, match="rank 3 of the job was stopped by the user"):
            run(2, 3, 4, 5)
    finally:
        over_cluster._dismiss(contexts[0])
        for thread in threads:
            thread.join(20)
        for context in contexts:
            context.heartbeat.stop()
