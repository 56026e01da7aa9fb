"""Which device and backend a cell gets, by what the machine has."""

from typing import Any

import pytest

from tests.cells import cell
from zerobench.config import world


@pytest.fixture(params=[0, 1, 4])
def gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(world, "_count_gpus", lambda: request.param)
    return int(request.param)


def chosen(strategy: str = "zero2", ranks: int | None = 2, **keys: Any) -> tuple[str, str, int | None, str]:
    one = cell(strategy, ranks, **keys)  # type: ignore[arg-type]
    config = one.config
    return (
        config.device,
        config.backend,
        config.ranks_per_gpu if config.ranks_per_gpu > 1 else None,
        "; ".join(one.problems),
    )


def test_auto_takes_gpus_where_each_rank_can_have_one(gpus: int) -> None:
    expected = ("cuda", "nccl", None, "") if gpus >= 2 else ("cpu", "gloo", None, "")
    assert chosen(device="auto") == expected
    assert chosen(device="auto", backend="gloo")[:2] == ("cpu", "gloo")


def test_ranks_share_a_gpu_if_they_must(gpus: int) -> None:
    device, backend, shared, problems = chosen(device="cuda")
    assert device == "cuda"
    assert (backend, shared) == {0: ("gloo", None), 1: ("gloo", 2), 4: ("nccl", None)}[gpus]
    assert ("no GPU" in problems) == (gpus == 0)
    assert chosen(ranks=6, device="cuda")[2] == {0: None, 1: 6, 4: 2}[gpus]


def test_nccl_wants_a_gpu_a_rank(gpus: int) -> None:
    problems = chosen(device="cuda", backend="nccl")[3]
    assert {0: "no GPU", 1: "NCCL wants a GPU a rank, and here 2 would share one", 4: ""}[gpus] in problems
    assert bool(problems) == (gpus < 2)
    assert "on device=cpu use gloo" in chosen(device="cpu", backend="nccl")[3]


@pytest.mark.parametrize("gpus", [1], indirect=True)
def test_nccl_may_share_where_it_can_and_is_told_to(gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = (((2, 30, 7), "1", False), ((2, 28, 9), "1", True), (None, "1", True), ((2, 30, 7), "", True))
    for version, told, refused in tried:
        monkeypatch.setattr(world, "nccl_version", lambda version=version: version)
        monkeypatch.setenv(world.NCCL_SHARES, told)
        _, backend, shared, problems = chosen(device="cuda", backend="nccl")
        assert (backend, shared, bool(problems)) == ("nccl", 2 * gpus, refused)


def test_a_simulated_world_needs_one_device(gpus: int) -> None:
    assert chosen(ranks=64, device="auto", backend="simulated") == ("cuda" if gpus else "cpu", "simulated", None, "")
    assert bool(chosen(ranks=64, device="cuda", backend="simulated")[3]) == (gpus == 0)
    assert "give world_size" in chosen(ranks=None, device="auto", backend="simulated")[3]
    assert "peers need a real one" in chosen("fsdp2", device="auto", backend="simulated")[3]
