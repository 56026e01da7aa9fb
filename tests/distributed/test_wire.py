"""The ground truth: bytes on the loopback interface, in a network namespace of the test's own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.cells import cell
from tests.distributed.wire import MEASURED, cell_of
from zerobench.predict.build import build_model, shapes_of
from zerobench.strategies import shape_of
from zerobench.theory.replay.traffic import predict_traffic
from zerobench.theory.shapes import Schedule


def namespaces_work() -> bool:
    try:
        return subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def carried(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Bytes that one of 10 further steps puts on the wire, all ranks together, by case."""
    cases = [case for case, _ in MEASURED]
    command = ["unshare", "-n", sys.executable, "-m", "tests.distributed.wire", str(tmp_path_factory.mktemp("wire"))]
    done = subprocess.run([*command, *cases], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


needs_namespaces = pytest.mark.skipif(not namespaces_work(), reason="needs the right to make a network namespace")


@pytest.mark.thorough
@needs_namespaces
@pytest.mark.parametrize(("case", "n"), [one for one in MEASURED if one[0] != "fsdp2"])
def test_the_wire_carries_what_the_formula_says(carried: dict[str, float], case: str, n: int) -> None:
    """The bytes of a step against the ring optimum of the predicted volume."""
    config = cell_of(case, n).config
    schedule = Schedule.sequential(shapes_of(build_model(config)), config.accumulation)
    bytes_each = 2 if "bf16" in case else 4
    expected = bytes_each * predict_traffic(shape_of(config.strategy.values()), schedule, n).volume * (n - 1)
    assert carried[case] == pytest.approx(expected, rel=0.02)


@pytest.mark.thorough
@needs_namespaces
def test_gloo_makes_fsdp2_send_more(carried: dict[str, float]) -> None:
    """Its reduce-scatter is an all-reduce there: 8 bytes a parameter in place of 6, less the root's regather."""
    shapes = shapes_of(build_model(cell("fsdp2", 2, "wide").config))
    psi, root = sum(s.numel for s in shapes), sum(s.numel for s in shapes if not s.unit)
    assert carried["fsdp2"] / 2 == pytest.approx(6 * psi + 2 * (psi - root), rel=0.02)
