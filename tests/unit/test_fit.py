"""What a cell gets of machines that are made up: the memory that its states fill, a device and a backend."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cells import cell, sound
from zerobench.config import schema_memory, world
from zerobench.config.cell import Cell, CellConfig
from zerobench.config.schema import Launch
from zerobench.host import environment
from zerobench.predict import estimate as needs
from zerobench.predict.build import facts_of
from zerobench.predict.estimate import Fit, closed_form, estimate, fit_of, refuse_unfit
from zerobench.sizes import show_bytes

MACHINE, GPU = 2**34, 2**32


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "machine_bytes", lambda: MACHINE)
    monkeypatch.setattr(needs, "gpu_bytes", lambda: GPU)


def config_of(name: str, ranks: int, **more: Any) -> CellConfig:
    changes = {key: more.pop(key) for key in ("device", "nodes", "ranks_per_gpu") if key in more}
    made = sound(name, ranks, **more)
    return replace(made.config, **changes)


def test_ranks_of_a_machine_share_its_memory_and_a_simulated_world_is_one_rank() -> None:
    states = estimate(config_of("zero2", 4)).states_bytes
    assert fit_of(config_of("zero2", 4)) == Fit("this machine", MACHINE, 4, states)
    assert fit_of(config_of("zero2", 4, nodes=2)) == Fit("this machine", MACHINE, 2, states)
    assert fit_of(config_of("zero2", 4, backend="simulated")) == Fit("this machine", MACHINE, 1, states)
    assert fit_of(config_of("zero2", 4, backend="simulated", tensors="fake")) is None


def test_without_a_gpu_the_tiers_are_one_memory_and_a_gpu_has_its_own() -> None:
    offload = schema_memory.SCHEMAS["offload"]["cpu"]()
    found = estimate(config_of("zero3", 2, offload=offload))
    device, host = found.states_bytes, found.host_bytes
    assert device
    assert host
    assert fit_of(config_of("zero3", 2, offload=offload)) == Fit("this machine", MACHINE, 2, device + host)
    on_gpu = config_of("zero3", 2, offload=offload, device="cuda")
    device = estimate(on_gpu).states_bytes or 0
    assert 0 < device < found.states_bytes, "no slots to receive in"
    assert fit_of(on_gpu) == Fit("a GPU here", GPU, 1, device)
    assert fit_of(replace(on_gpu, ranks_per_gpu=2)) == Fit("a GPU here", GPU, 2, device), "ranks that share it"


def test_the_host_of_gpus_may_be_what_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "machine_bytes", lambda: 1000)
    found = fit_of(config_of("zero3", 2, offload=schema_memory.SCHEMAS["offload"]["cpu"](), device="cuda"))
    assert (found.owner, found.memory_bytes, found.ranks) == ("this machine", 1000, 2)


def test_a_peer_is_known_by_the_papers_formula_and_what_no_theory_knows_is_not_judged(monkeypatch) -> None:
    config = config_of("fsdp2", 2)
    assert fit_of(config) == Fit("this machine", MACHINE, 2, closed_form(config, facts_of(config)))

    def build(_config: CellConfig) -> None:
        raise RuntimeError("it reads values")

    monkeypatch.setattr("zerobench.predict.build._facts", {})
    monkeypatch.setattr("zerobench.predict.build.build_model", build)
    assert fit_of(config) is None


def test_a_cell_that_does_not_fit_has_a_problem_unless_it_is_to_run_anyway(monkeypatch: pytest.MonkeyPatch) -> None:
    fits = cell("ddp", 2)
    states = estimate(fits.config).states_bytes
    monkeypatch.setattr(needs, "machine_bytes", lambda: 2 * states)
    assert refuse_unfit(fits) == fits
    monkeypatch.setattr(needs, "machine_bytes", lambda: 2 * states - 1)
    assert refuse_unfit(fits).problems == (
        f"model=tiny: its states need {show_bytes(states)} per rank, {show_bytes(2 * states)} for 2 ranks, and this"
        f" machine has {show_bytes(2 * states - 1)}; launch.check_memory=false runs it all the same",
    )
    anyway = cell("ddp", 2, launch=Launch(threads=1, check_memory=False))
    assert refuse_unfit(anyway) == anyway
    refused = Cell(fits.config, ("another problem",))
    assert refuse_unfit(refused) == refused


def pretend(root: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> None:
    """Makes the system's files those of `root`, with these texts."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.setattr(environment, "Path", lambda first, *more: Path(root, str(first).strip("/"), *more))


@pytest.mark.parametrize(
    ("groups", "files", "least"),
    [
        ("0::/job/step\n", {"sys/fs/cgroup/job/step/memory.max": "max", "sys/fs/cgroup/job/memory.max": "4096"}, 4096),
        ("0::/\n", {"sys/fs/cgroup/memory.max": "8192"}, 8192),
        ("5:cpu:/x\n4:memory:/x\n", {"sys/fs/cgroup/memory/x/memory.limit_in_bytes": "512"}, 512),
        ("5:cpu:/x\n", {"sys/fs/cgroup/memory/x/memory.limit_in_bytes": "512"}, None),
        (None, {}, None),
    ],
)
def test_the_memory_of_a_machine_is_what_control_groups_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str | None, files: dict[str, str], least: int | None
) -> None:
    pretend(tmp_path, monkeypatch, files if groups is None else {"proc/self/cgroup": groups, **files})
    assert environment.machine_bytes() == (least or psutil.virtual_memory().total)


@pytest.fixture(params=[0, 1, 4])
def gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(world, "_count_gpus", lambda: request.param)
    return int(request.param)


def chosen(strategy: str = "zero2", ranks: int | None = 2, **keys: Any) -> tuple[str, str, int | None, str]:
    one = cell(strategy, ranks, **keys)  # type: ignore[arg-type]
    config, sharing = one.config, one.config.ranks_per_gpu
    return config.device, config.backend, sharing if sharing > 1 else None, "; ".join(one.problems)


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
