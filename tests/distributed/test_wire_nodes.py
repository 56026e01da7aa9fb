"""The proof at the interface: bytes that cross from a node to the other, nodes being network namespaces."""

import json
import shlex
import subprocess
import sys

import pytest

from tests.distributed.wire_nodes import CASES, MEASURED, NAMESPACES, NODE_SIZE, cell_of
from zerobench.predict.build import build_model, shapes_of
from zerobench.predict.estimate import training_shapes
from zerobench.strategies import shape_of as strategy_shape
from zerobench.theory.groups import Moved
from zerobench.theory.replay.traffic import predict_traffic
from zerobench.theory.shapes import Schedule


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
    command = f"{shlex.quote(sys.executable)} -m tests.distributed.wire_nodes"
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
@pytest.mark.parametrize("case", MEASURED)
def test_what_crosses_from_node_to_node(sent: dict[str, float], case: str) -> None:
    """6 bytes a parameter, and 1.5 plus scales, (Z-1)/Z of it; segments bring headers, and receipts go back."""
    moved, psi = predicted(case)
    assert moved.between * NODE_SIZE / psi == pytest.approx({"plain": 3, "all": 0.78}[case], rel=0.02)
    assert sent[case] == pytest.approx(moved.between * NODE_SIZE, rel=0.05)


def test_every_part_sends_less_between_nodes() -> None:
    sizes = {case: predicted(case)[0].between for case in CASES if case != "groups"}
    assert sizes["all"] < sizes["hpz"] < sizes["qgz"] < sizes["plain"]
    assert sizes["all"] < sizes["qwz"] < sizes["plain"]
