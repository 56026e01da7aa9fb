"""One node of two: its ranks in a network namespace that a veth pair alone joins to the other's. Prints what it sent.

python -m tests.distributed.wire_nodes NODE FOLDER      with GLOO_SOCKET_IFNAME naming the node's interface
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.cells import cell
from zerobench.config import schema_memory
from zerobench.config.cell import Cell
from zerobench.config.schema import Measure
from zerobench.config.schema_training import Bf16
from zerobench.launch.start_ranks import launch
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
    "qwz": {"zeropp": schema_memory.Qwz()},
    "hpz": {"zeropp": schema_memory.Hpz()},
    "qgz": {"zeropp": schema_memory.Qgz()},
    "all": {"zeropp": schema_memory.AllOfZeropp()},
    "groups": {"shard_group": NODE_SIZE},
}

MEASURED = ("plain", "all")
"""Cases that are run, all in one process a node."""


def cell_of(case: str, **more: Any) -> Cell:
    size = {} if case == "groups" else {"node_size": NODE_SIZE}
    return cell("zero3", NODES * NODE_SIZE, "wide", strategy={"mode": "paper"}, precision=Bf16(), **size,
                **CASES[case], **more)  # fmt: skip


def sent_bytes(interface: str) -> int:
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith(interface))
    return int(line.split(":")[1].split()[8])


def sent(case: str, node: int, steps: int, folder: str) -> int:
    """Bytes that this node puts on the wire in a run of so many steps."""
    config = cell_of(case, measure=Measure(steps=steps, warmup=2)).config
    mine = range(node * NODE_SIZE, (node + 1) * NODE_SIZE)
    jobs = [RankJob(config, "timed", rank, f"{folder}/rendezvous-{case}-{steps}", folder) for rank in mine]
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    before = sent_bytes(interface)
    outcome = launch(run_rank, jobs, Path(folder) / f"logs-{case}-{steps}", 120, first=mine[0])
    assert outcome.status == "ok", f"{case}: {outcome.reason}"
    return sent_bytes(interface) - before


def main(node: int, folder: str) -> None:
    """Bytes of one of 10 further steps, by case."""
    print(json.dumps({case: (sent(case, node, 14, folder) - sent(case, node, 4, folder)) / 10 for case in MEASURED}))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
