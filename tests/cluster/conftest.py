"""The SLURM of this folder's tests: a controller and two nodes on this machine, started once per module."""

from collections.abc import Iterator

import pytest

from .slurm import Slurm, missing


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if why := missing():
        pytest.skip(f"no SLURM can be started here: {why}")
    cluster = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
