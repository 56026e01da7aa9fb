"""Where a run listens: on loopback on one machine; between machines, on the job's interface and no other. And the bytes
that cross from a machine to the other.

Machines are network namespaces that a veth pair joins, for listeners with a second one of another network. As a program
this module is a machine's ranks, with GLOO_SOCKET_IFNAME naming its interface, and prints what they sent:

python -m tests.distributed.test_interfaces NODE FOLDER
"""

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cells import cell
from tests.listeners import Listener, listeners_of, watch_listeners
from tests.ranks import free_port, on_ranks
from zerobench.config import schema_memory
from zerobench.config.cell import Cell
from zerobench.config.schema import Measure
from zerobench.config.schema_training import Bf16
from zerobench.host import store as interface
from zerobench.host.store import JobStore, LostError
from zerobench.predict.build import build_model, shapes_of
from zerobench.predict.estimate import training_shapes
from zerobench.ranks.start_ranks import launch
from zerobench.strategies import shape_of as strategy_shape
from zerobench.theory.groups import Moved
from zerobench.theory.replay.traffic import predict_traffic
from zerobench.theory.shapes import Schedule
from zerobench.worker import RankJob, run_rank

NAMESPACES = """
set -e
ip link set lo up
unshare -n sleep 1200 &
other=$!
trap 'kill $other' EXIT
while [ $(readlink /proc/$other/ns/net) = $(readlink /proc/self/ns/net) ]; do sleep 0.05; done
ip link add node0 type veth peer name node1 netns $other
ip addr add 10.77.0.1/24 dev node0
ip link set node0 up
there="nsenter -t $other -n"
$there ip link set lo up
$there ip addr add 10.77.0.2/24 dev node1
$there ip link set node1 up
"""
"""A shell's beginning, run in a namespace of its own: the first node is there, the second where `$there` leads."""

SECOND_NETWORK = """
ip link add other0 type veth peer name other1 netns $other
ip addr add 10.78.0.1/24 dev other0
ip link set other0 up
$there ip addr add 10.78.0.2/24 dev other1
$there ip link set other1 up
"""

CELL = [
    sys.executable, "-m", "zerobench", "strategy=zero2", "model=gpt_tiny", "measure.steps=1",
    "measure.passes=accounted", "launch.threads=1", "device=cpu",
]  # fmt: skip


@pytest.fixture(scope="module")
def two_nodes() -> None:
    try:
        done = subprocess.run(["unshare", "-n", "bash", "-c", NAMESPACES], capture_output=True, timeout=20)
        works = done.returncode == 0
    except (FileNotFoundError, subprocess.TimeoutExpired):
        works = False
    if not works:
        pytest.skip("needs the right to make network namespaces and a veth pair")


def watched(command: list[str], cwd: Path, **environment: str) -> set[Listener]:
    """Runs a command, which must succeed; returns where it and its descendants listened."""
    with subprocess.Popen(
        command, cwd=cwd, env=os.environ | environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as running:
        found = watch_listeners(lambda: [running.pid], lambda: running.poll() is not None)
        assert running.returncode == 0, running.stdout and running.stdout.read()
    return found


@on_ranks(2)
def test_ranks_of_one_machine_listen_on_loopback_alone(rank: int, n: int) -> None:
    found = listeners_of(psutil.Process())
    assert found  # gloo's
    assert all(listener.is_loopback for listener in found), found


LAUNCHERS = {
    "zerobench": [*CELL, "world_size=2"],
    "mpirun": ["mpirun", *["--allow-run-as-root"] * (os.geteuid() == 0), "--oversubscribe", "-n", "2", *CELL],
    "torchrun": [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1",
        "--master-port", "PORT", "-m", *CELL[2:],
    ],
}  # fmt: skip
PROGRAMS = {"zerobench": "no other", "mpirun": r"(mpirun|orted|prted)", "torchrun": r".*torch\.distributed\.run"}


@pytest.mark.thorough
@pytest.mark.usefixtures("two_nodes")
def test_between_machines_only_the_jobs_interface_listens(tmp_path: Path) -> None:
    """The store on rank 0's machine, gloo on both."""
    job = f"env WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=10.77.0.1 MASTER_PORT={free_port()}"
    command = f"{shlex.join(CELL)} results_dir=runs"
    script = (
        f"{NAMESPACES}{SECOND_NETWORK}$there {job} RANK=1 GROUP_RANK=1 {command} &\nsecond=$!\n"
        f"{job} RANK=0 GROUP_RANK=0 {command}\nwait $second\n"
    )
    found = watched(["unshare", "-n", "bash", "-c", script], tmp_path)
    assert {str(one.address) for one in found} == {"10.77.0.1", "10.77.0.2"}
    assert '"nodes": 2' in next((tmp_path / "runs").glob("*/provenance.json")).read_text()


def test_the_jobs_store_listens_at_its_address_alone() -> None:
    port = free_port()
    with socket.socket() as other:
        other.bind(("127.0.0.2", port))  # another address of this machine: torch's own way would take it as well
        other.listen()
        store = JobStore("127.0.0.1", port, "test", host=True)
        store.post("key", 1)
        assert JobStore("127.0.0.1", port, "test").read("key") == 1
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", port), timeout=1)


def test_an_address_of_another_machine_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LostError, match=r"^MASTER_ADDR=203.0.113.7: is no address of rank 0's machine .*ZEROBENCH_INT"):
        JobStore("203.0.113.7", free_port(), "test", host=True)
    monkeypatch.setenv(interface.LISTEN_AT, "lo")  # where packets to that address come out, say
    with interface.listening_socket("203.0.113.7", 0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_a_name_that_is_loopback_at_home_is_its_outer_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Debian's /etc/hosts has it. A number, and localhost, are taken as they are."""

    def resolve(name: str, *_: object, **__: object) -> list[object]:
        return [(0, 0, 0, "", ({"node1": "127.0.1.1", "node2": "10.0.0.2"}.get(name, name), 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(interface, "_own_address", lambda peer: "10.0.0.1" if peer == interface.ELSEWHERE else None)
    names = ("node1", "node2", "127.0.1.1", "localhost", "::1")
    assert [interface.reachable(name) for name in names] == ["10.0.0.1", "node2", "127.0.1.1", "localhost", "::1"]


def test_missing_interface_of_gloo_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "_addresses_of_interfaces", lambda: {"eth0": ["10.0.0.1"]})
    monkeypatch.setenv(interface.GLOO_AT, "eth0,lo")
    with pytest.raises(RuntimeError, match=r"=eth0,lo: no network interface lo with .*an address are eth0"):
        interface.check_gloo_interface()
    monkeypatch.setenv(interface.GLOO_AT, "eth0")
    interface.check_gloo_interface()


def test_the_interface_toward_an_address() -> None:
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    assert interface.interface_toward("127.0.0.1") == loopback
    assert interface.interface_toward("localhost") == loopback


# -- the proof at the interface: bytes that cross from a node to the other -----------------------------------------

NODES, NODE_SIZE = 2, 2
CASES: dict[str, dict[str, Any]] = {"plain": {}, "all": {"zeropp": schema_memory.AllOfZeropp()}}
"""Run in one process a node."""


def cell_of(case: str, **more: Any) -> Cell:
    keys = {"strategy": {"mode": "paper"}, "precision": Bf16(), "node_size": NODE_SIZE, **CASES[case], **more}
    return cell("zero3", NODES * NODE_SIZE, "wide", **keys)


def sent_bytes(interface: str) -> int:
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith(interface))
    return int(line.split(":")[1].split()[8])


def sent_in(case: str, node: int, steps: int, folder: str) -> int:
    """Bytes that this node puts on the wire in a run of so many steps."""
    config = cell_of(case, measure=Measure(steps=steps, warmup=2)).config
    mine = range(node * NODE_SIZE, (node + 1) * NODE_SIZE)
    jobs = [RankJob(config, "timed", rank, f"{folder}/rendezvous-{case}-{steps}", folder) for rank in mine]
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    before = sent_bytes(interface)
    launch(run_rank, jobs, Path(folder) / f"logs-{case}-{steps}", 120, first=mine[0])
    return sent_bytes(interface) - before


def main(node: int, folder: str) -> None:
    """Bytes of one of 10 further steps, by case."""
    print(json.dumps({case: (sent_in(case, node, 14, folder) - sent_in(case, node, 4, folder)) / 10 for case in CASES}))


@pytest.fixture(scope="module")
def sent(two_nodes: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Bytes that node 0 puts on the wire in one of 10 further steps, by case."""
    where = shlex.quote(str(tmp_path_factory.mktemp("nodes")))
    command = f"{shlex.quote(sys.executable)} -m tests.distributed.test_interfaces"
    script = (
        f"{NAMESPACES}\nGLOO_SOCKET_IFNAME=node1 $there {command} 1 {where} >/dev/null &\nsecond=$!\n"
        f"GLOO_SOCKET_IFNAME=node0 {command} 0 {where}\nwait $second\n"
    )
    done = subprocess.run(["unshare", "-n", "bash", "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def predicted(case: str) -> tuple[Moved, int]:
    """Predicts the traffic of a rank in a step; returns it with the number of parameters."""
    config = cell_of(case).config
    schedule = Schedule.sequential(shapes_of(build_model(config)))
    groups, shapes = config.groups, training_shapes(config)
    moved = predict_traffic(strategy_shape(config.strategy.values()), schedule, groups, shapes[1])
    return moved, sum(shape.numel for shape in schedule.shapes)


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_what_crosses_from_node_to_node(sent: dict[str, float], case: str) -> None:
    """6 bytes a parameter, and 1.5 plus scales, (Z-1)/Z of it; segments bring headers, and receipts go back."""
    moved, psi = predicted(case)
    assert moved.between * NODE_SIZE / psi == pytest.approx({"plain": 3, "all": 0.78}[case], rel=0.02)
    assert sent[case] == pytest.approx(moved.between * NODE_SIZE, rel=0.05)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
