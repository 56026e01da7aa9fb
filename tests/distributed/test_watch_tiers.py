"""A watched engine has the bytes of a measured run in every tier, watched from its first step or from a later one."""

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

import zerobench
from tests.cells import sound
from tests.distributed.test_watch_ranks import batch_of
from tests.distributed.variants import engine_of
from tests.ranks import run_ranks
from zerobench import worker
from zerobench.config.cell import CellConfig
from zerobench.config.schema_memory import CpuOffload, NvmeOffloadConfig, PartsOfZeropp
from zerobench.config.schema_training import Bf16
from zerobench.watching.held_tensors import leave_out
from zerobench.zero.parameters import access

WARMUP, STEPS, LATE = 2, 2, 3
CPU = torch.device("cpu")
FILES: dict[str, Any] = {"block_bytes": 8192, "buffers": 10, "depth": 2}
DIFFERENCES = PartsOfZeropp(secondary_shards=True, differences=True)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "zero2, host": ("zero2", {"offload": CpuOffload()}),
    "zero2, a part, late updates": ("zero2", {"offload": CpuOffload(delayed=True, delayed_after=1)}),
    "zero1, a part": ("zero1", {"offload": CpuOffload(gradients=False, fraction=0.4)}),
    "zero3, host, bf16": ("zero3", {"offload": CpuOffload(parameters=True), "precision": Bf16()}),
    "zero2, files": ("zero2", {"offload": NvmeOffloadConfig(**FILES)}),
    "zero3, files, bf16": ("zero3", {"offload": NvmeOffloadConfig(parameters=True, **FILES), "precision": Bf16()}),
    "zero3, differences": ("zero3", {"zeropp": DIFFERENCES, "precision": Bf16(), "node_size": 1}),
}
SHOWN = "zero2, host"
"""In every run, with a checkpoint loaded on the way."""
Sizes = dict[tuple[str, str], tuple[int, int | None]]
"""Tier and category -> largest bytes, and bytes at the peak."""


def train(rank: int, config: CellConfig, engine: Any, steps: int) -> None:
    for step in range(steps):
        tokens, targets = batch_of(config, rank, step)
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        del loss, tokens, targets


def sizes_of(rows: list[Any]) -> Sizes:
    kept = [row for row in rows if row.phase == "step" and row.category not in ("allocated", "outside_ledger")]
    return {(row.tier, row.category): (row.max_bytes, row.at_peak_bytes) for row in kept}


def watched(rank: int, config: CellConfig, folder: str, before: int, saves: bool = False) -> Sizes:
    access._nan.clear()  # a process has them once, and an engine before would have made them
    with leave_out():
        engine = engine_of(config, folder)
        train(rank, config, engine, before)
        if saves:
            engine.save(f"{folder}/saved")
            engine = engine_of(config, folder)
            engine.load(f"{folder}/saved")
        with zerobench.watch(engine, warmup=WARMUP, steps=STEPS) as watch:
            train(rank, config, engine, WARMUP + STEPS + 1)
    return sizes_of(watch.probe.memory_rows(rank))


def measured(rank: int, config: CellConfig, folder: str) -> Sizes:
    access._nan.clear()
    job = worker.RankJob(config, "accounted", rank, None, folder)
    with mock.patch.object(worker, "rank_environment", return_value=nullcontext(CPU)):
        return sizes_of(worker.run_rank(job, lambda _: None).memory)


def all_sizes(rank: int, n: int, cases: list[str], folder: str) -> dict[str, list[Sizes]]:
    found = {}
    for name in cases:
        strategy, options = CASES[name]
        config = sound(strategy, n, "one_block", **options).config
        found[name] = [measured(rank, config, folder)]
        found[name] += [watched(rank, config, folder, before) for before in (0, LATE)]
        if name == SHOWN:
            found[name].append(watched(rank, config, folder, LATE, saves=True))
    return found


@pytest.fixture(scope="module")
def sizes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[Sizes]]]:
    cases = [item.callspec.params["name"] for item in request.session.items if item.module is request.module]  # type: ignore[attr-defined]
    return run_ranks(2, all_sizes, cases, str(tmp_path_factory.mktemp("files")))


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=() if one == SHOWN else pytest.mark.thorough) for one in CASES]
)
def test_watched_and_measured_runs_agree_to_the_byte(name: str, sizes: list[dict[str, list[Sizes]]]) -> None:
    for of_rank in sizes:
        run, first, late, *loaded = of_rank[name]
        tiers = {tier for (tier, _), (most, _) in run.items() if most}
        expected = {"device"} if "zeropp" in CASES[name][1] else {"device", "host"}
        assert tiers == (expected | {"nvme"} if "files" in name else expected)
        assert first == run
        assert late == run
        for watch in loaded:  # a load leaves a flag, which is temporary
            states = {key: size for key, size in run.items() if key[1] not in ("temporary", "total")}
            assert {key: watch[key] for key in states} == states
