"""The proof at the interface: bytes that cross from a node to the other, nodes being network namespaces.

A node of the two is a process: its ranks are in a namespace that a veth pair alone joins to the other's. It prints what
it sent:

python -m tests.distributed.test_wire_nodes NODE FOLDER   with GLOO_SOCKET_IFNAME naming the node's interface
"""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cells import cell
from zerobench.config import schema_memory
from zerobench.config.cell import Cell
from zerobench.config.schema import Measure
from zerobench.config.schema_training import Bf16
from zerobench.predict.build import build_model, shapes_of
from zerobench.predict.estimate import training_shapes
from zerobench.ranks.start_ranks import launch
from zerobench.strategies import shape_of as strategy_shape
from zerobench.theory.groups import Moved
from zerobench.theory.replay.traffic import predict_traffic
from zerobench.theory.shapes import Schedule
from zerobench.worker import RankJob, run_rank

NODES, NODE_SIZE = 2, 2

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

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {"zeropp": schema_memory.AllOfZeropp()},
}
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


def two_nodes_work() -> bool:
    try:
        return (
            subprocess.run(["unshare", "-n", "bash", "-c", NAMESPACES], capture_output=True, timeout=20).returncode == 0
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return False


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Bytes that node 0 puts on the wire in one of 10 further steps, by case."""
    where = shlex.quote(str(tmp_path_factory.mktemp("nodes")))
    command = f"{shlex.quote(sys.executable)} -m tests.distributed.test_wire_nodes"
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
@pytest.mark.skipif(not two_nodes_work(), reason="needs the right to make network namespaces and a veth pair")
@pytest.mark.parametrize("case", CASES)
def test_what_crosses_from_node_to_node(sent: dict[str, float], case: str) -> None:
    """6 bytes a parameter, and 1.5 plus scales, (Z-1)/Z of it; segments bring headers, and receipts go back."""
    moved, psi = predicted(case)
    assert moved.between * NODE_SIZE / psi == pytest.approx({"plain": 3, "all": 0.78}[case], rel=0.02)
    assert sent[case] == pytest.approx(moved.between * NODE_SIZE, rel=0.05)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
