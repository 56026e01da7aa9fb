"""The ground truth: bytes on the loopback interface, in a network namespace of the test's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cells import cell
from tests.distributed.wire import cell_of
from zerobench.predict.build import build_model, shapes_of
from zerobench.theory.replay.traffic import predict_volume
from zerobench.theory.shapes import Schedule
from zerobench.theory.strategies import shape_of


def namespaces_work() -> bool:
    try:
        return subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def carried_in_a_step(case: str, n: int, folder: Path) -> float:
    """Bytes that one of 10 further steps puts on the wire, all ranks together."""

    def carried(steps: int) -> int:
        command = ["unshare", "-n", sys.executable, "-m", "tests.distributed.wire", case, str(n), str(steps)]
        done = subprocess.run([*command, str(folder)], capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    return (carried(14) - carried(4)) / 10


needs_namespaces = pytest.mark.skipif(not namespaces_work(), reason="needs the right to make a network namespace")


@needs_namespaces
@pytest.mark.parametrize(
    ("case", "n"),
    [
        ("zero1", 2),
        ("zero2", 3),
        ("zero3", 4),
        ("zero2 bf16 twice", 2),
        ("zero3 bf16 late", 2),
    ],
)
def test_the_wire_carries_what_the_formula_says(tmp_path, case: str, n: int) -> None:
    """The bytes of a step against the ring optimum of the predicted volume."""
    config = cell_of(case, n).config
    schedule = Schedule.sequential(shapes_of(build_model(config)), config["accumulation"])
    bytes_each = 2 if "bf16" in case else 4
    expected = bytes_each * predict_volume(shape_of(config["strategy"]), schedule, n) * (n - 1)
    assert carried_in_a_step(case, n, tmp_path) == pytest.approx(expected, rel=0.02)


@needs_namespaces
def test_gloo_makes_fsdp2_send_more(tmp_path) -> None:
    """Its reduce-scatter is an all-reduce there: 8 bytes a parameter in place of 6, less the root's regather."""
    shapes = shapes_of(build_model(cell("fsdp2", 2, "wide").config))
    psi, root = sum(s.numel for s in shapes), sum(s.numel for s in shapes if not s.unit)
    assert carried_in_a_step("fsdp2", 2, tmp_path) / 2 == pytest.approx(6 * psi + 2 * (psi - root), rel=0.02)
