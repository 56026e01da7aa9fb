"""Bytes in each tier and between tiers in a step, of two real ranks, to the byte against theory."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cells import sound
from tests.distributed.variants import account
from zerobench.config.schema import Measure
from zerobench.config.schema_memory import (
    CheckpointOffloadActivations,
    CpuOffload,
    NvmeOffloadConfig,
    OffloadActivations,
)
from zerobench.config.schema_training import Adagrad, Bf16, Fp16
from zerobench.records import LINKS, RunRow
from zerobench.sweep.aggregate import join
from zerobench.sweep.cell import _blank_row

BF16, WIDE = Bf16(), Bf16(gradient_dtype="bf16", wire_dtype="fp32")
ALL, HALF, SHARDS = CpuOffload(), CpuOffload(fraction=0.3), CpuOffload(parameters=True)
INPUTS, SAVED = CheckpointOffloadActivations(least_bytes=64), OffloadActivations(least_bytes=256)
SHARDS_ONLY = CpuOffload(optimizer=False, gradients=False, parameters=True)


def files(**more: Any) -> NvmeOffloadConfig:
    """Files of many cuts, through the page cache, which every file system has."""
    return NvmeOffloadConfig(block_bytes=4096, **{"direct": False, **more})


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "zero1 fp32": ("zero1", {"offload": ALL}),
    "zero2 fp32": ("zero2", {"offload": ALL}),
    "zero2 bf16, wide wire, clipped": ("zero2", {"offload": ALL, "precision": WIDE, "clip": 0.1}),
    "zero2 bf16, a part": ("zero2", {"offload": HALF, "precision": BF16, "accumulation": 2}),
    "zero2 bf16, optimizer": ("zero2", {"offload": CpuOffload(gradients=False), "precision": BF16}),
    "zero2 bf16, gradients": ("zero2", {"offload": CpuOffload(optimizer=False), "precision": BF16}),
    "zero3 fp32": ("zero3", {"offload": ALL}),
    "zero3 fp32, shards": ("zero3", {"offload": SHARDS, "strategy": {"persistence_numel": 600}}),
    "zero3 bf16, shards alone": ("zero3", {"offload": SHARDS_ONLY, "precision": BF16, "model": "half_frozen"}),
    "zero2 bf16, delayed": (
        "zero2", {"offload": CpuOffload(delayed=True, delayed_after=0), "precision": BF16}
    ),
    "zero2 fp32, files": ("zero2", {"offload": files()}),
    "zero2 bf16, files, fp16 clipped": ("zero2", {"offload": files(), "precision": Fp16(), "clip": 0.1}),
    "zero1 bf16, files, optimizer": ("zero1", {"offload": files(gradients=False), "optimizer": Adagrad()}),
    "zero3 fp32, files": ("zero3", {"offload": files(), "strategy": {"persistence_numel": 600}}),
    "zero3 bf16, files": ("zero3", {"offload": files(), "precision": WIDE, "accumulation": 2, "clip": 0.1}),
    "zero3 bf16, a part in files": ("zero3", {"offload": files(fraction=0.3), "precision": BF16}),
    "zero2 fp32, blocks' inputs alone": ("zero2", {"activation": INPUTS, "accumulation": 2}),
    "zero3 bf16, and all that blocks save": ("zero3", {"offload": SHARDS, "activation": SAVED, "precision": BF16}),
    "zero3 bf16, past the page cache": ("zero3", {"offload": files(direct=True), "precision": BF16}),
}  # fmt: skip


REPEATED = ("zero2 fp32", "zero2 bf16, optimizer", "zero2 bf16, gradients", "zero3 fp32", "zero2 fp32, files",
            "zero1 bf16, files, optimizer", "zero3 bf16, files", "zero3 bf16, past the page cache",
            "zero3 bf16, shards alone", "zero2 bf16, files, fp16 clipped", "zero3 bf16, a part in files",
            "zero2 fp32, blocks' inputs alone")  # fmt: skip
"""Cases that wait for `make test-all`: another stage has what each moves."""


def goes_past_the_page_cache(folder: Path) -> bool:
    try:
        os.close(os.open(folder / "tried", os.O_CREAT | os.O_RDWR | os.O_DIRECT))
    except OSError:
        return False
    return True


@pytest.fixture(scope="module")
def rows(thorough: bool, tmp_path_factory) -> dict[str, RunRow]:
    folder = tmp_path_factory.mktemp("tiers")
    cells = {}
    for name, (strategy, more) in CASES.items():
        if name in REPEATED and not thorough:
            continue
        options = {"micro_batch": 1, **more}
        one = sound(strategy, 2, **options)
        one = one.changed(measure=Measure(1, 2))
        if one.config.offload.name == "nvme":
            one = one.changed(offload=replace(one.config.offload, path=str(folder)))
        cells[name] = one
    found = {name: _blank_row(one) for name, one in cells.items()}
    accounts = account([one.config for one in cells.values()], folder)
    for (name, one), records in zip(cells.items(), accounts, strict=True):
        join(found[name], one.config, records)
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=pytest.mark.thorough if one in REPEATED else ()) for one in CASES]
)
def test_bytes_in_tiers_and_between_them_are_those_of_the_theory(rows, name: str, tmp_path) -> None:
    if "past the page cache" in name and not goes_past_the_page_cache(tmp_path):
        pytest.skip("this file system reads and writes through the page cache alone")
    row = rows[name]
    columns = ["states_bytes", "host_states_bytes", "nvme_bytes", *(f"{link}_bytes" for link in LINKS)]
    measured = {column: getattr(row, column) for column in columns}
    predicted = {column: getattr(row, f"predicted_{column}") for column in columns}
    assert measured == predicted
    assert row.down_bytes or row.up_bytes


def test_in_half_precision_it_is_two_bytes_a_parameter_each_way(rows) -> None:
    """ZeRO-Offload, arXiv 2101.06840, section 4.1: 2ψ down and 2ψ up; files take all that is kept."""
    row = rows["zero2 bf16, a part"]
    assert row.down_bytes == pytest.approx(0.3 * 2 * 2 * row.psi, rel=0.02)  # both micro-batches are reduced
    assert row.up_bytes == pytest.approx(0.3 * 2 * row.psi, rel=0.02)
    row = rows["zero3 fp32, files"]
    assert row.write_bytes == pytest.approx((12 + 4 + 4) * row.psi, rel=0.05)
