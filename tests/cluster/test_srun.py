"""Plain `srun … zerobench …` and `mpirun … zerobench …` join by the launcher's own variables."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.listeners import Listener, watch_listeners

from .slurm import Slurm, missing

pytestmark = pytest.mark.thorough

CELL = ("strategy=zero1", "model=gpt_tiny", "measure.steps=1", "measure.passes=accounted")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A controller and two nodes on this machine."""
    if why := missing():
        pytest.skip(f"no SLURM can be started here: {why}")
    cluster = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def run(start: list[str], *more: str, folder: Path, environment: dict[str, str]) -> tuple[str, int, str, int]:
    """Returns status, world size, launcher and nodes of the run."""
    command = [sys.executable, "-m", "zerobench", *CELL, *more, f"results_dir={folder}"]
    done = subprocess.run([*start, *command], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    [written] = folder.glob("*/run.json")
    row, origin = (json.loads((written.parent / name).read_text()) for name in ("run.json", "provenance.json"))
    return row["status"], row["world_size"], origin["launched_by"], origin["nodes"]


def tasks_in(folder: Path) -> list[int]:
    """Processes of Python whose command names the folder; srun's own command does so too."""
    return [
        one.pid
        for one in psutil.process_iter(["cmdline"])
        if f"results_dir={folder}" in (words := one.info["cmdline"] or []) and words[0] == sys.executable
    ]


@pytest.mark.parametrize(("tasks", "nodes"), [(("-N2", "-n2"), 2), (("-N1", "-n2"), 1)])
def test_srun_joins_by_itself(slurm: Slurm, tasks: tuple[str, ...], nodes: int, tmp_path: Path) -> None:
    """And listens on the nodes' address alone, which is loopback here; SLURM's own programs listen everywhere."""
    over, heard = threading.Event(), set[Listener]()
    watching = threading.Thread(target=lambda: heard.update(watch_listeners(lambda: tasks_in(tmp_path), over.is_set)))
    watching.start()
    try:
        found = run(["srun", *tasks], folder=tmp_path, environment=slurm.environment)
    finally:
        over.set()
        watching.join()
    assert found == ("ok", 2, "srun", nodes)
    assert heard
    assert all(one.is_loopback for one in heard), heard


def test_a_step_of_one_task_starts_its_ranks_itself(slurm: Slurm, tmp_path: Path) -> None:
    found = run(["srun", "-n1"], "world_size=2", folder=tmp_path, environment=slurm.environment)
    assert found == ("ok", 2, "zerobench", 1)


def test_mpirun_joins_by_itself(tmp_path: Path) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed: apt-get install openmpi-bin")
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = run(["mpirun", *root, "--oversubscribe", "-n", "2"], folder=tmp_path, environment=environment)
    assert found == ("ok", 2, "mpirun", 1)
