"""The ground truth: bytes on the loopback interface, in a network namespace of the test's own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cells import cell
from zerobench.theory.shapes import Schedule
from zerobench.theory.traffic import predict_volume
from zerobench.worker import build_model, shapes_of


def namespaces_work() -> bool:
    try:
        return subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not namespaces_work(), reason="needs the right to make a network namespace")
@pytest.mark.parametrize(("strategy", "n"), [("ddp", 2), ("zero1", 2), ("zero2", 3), ("zero3", 2), ("zero3", 4)])
def test_the_wire_carries_what_the_formula_says(tmp_path, strategy: str, n: int) -> None:
    """The bytes that 10 further steps put on the wire, against the ring optimum of the predicted volume."""

    def carried(steps: int) -> int:
        command = [
            "unshare",
            "-n",
            sys.executable,
            "-m",
            "tests.distributed.wire",
            strategy,
            str(n),
            str(steps),
            str(tmp_path),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    config = cell(strategy, n, "wide").config
    volume = predict_volume(config["strategy"], Schedule.sequential(shapes_of(build_model(config))), n)
    expected = 4 * volume * (n - 1) / n * n
    per_step = (carried(14) - carried(4)) / 10
    assert per_step == pytest.approx(expected, rel=0.02)
