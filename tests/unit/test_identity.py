"""The identity of a cell: what changes it, what does not; recorded ids are reproduced, both written forms are read."""

import pickle
from pathlib import Path

import pandas as pd
import pytest

from tests.cells import cell, sound
from zerobench.config import schema_training
from zerobench.config.cell import VERSION, CellConfig, work_id
from zerobench.config.schema import Launch, Measure
from zerobench.config.schema_memory import CpuOffload, Hpz, OffloadActivations
from zerobench.config.schema_training import Fp16, Rprop
from zerobench.host.job import rebuild, to_plain

ROOT = Path(__file__).parents[2]

CELLS = [
    cell("zero2", 2),
    cell("fsdp2", 2, tuned=True, measure=Measure(steps=3, warmup=2, repeats=2, trace=True), rerun=True),
    cell("zero3", 4, offload=CpuOffload(), activation=OffloadActivations(), precision=Fp16(), clip=1.0, arena=True),
    cell("zero3", 4, "mlp", zeropp=Hpz(), node_size=2, optimizer=Rprop(), backend="simulated", rank=3),
]


@pytest.mark.parametrize("one", CELLS, ids=lambda one: one.cell_id)
def test_a_cell_survives_every_form_that_it_is_written_in(one) -> None:
    written = one.config.written()
    assert written["schema_version"] == VERSION
    older = {key: value for key, value in written.items() if key != "schema_version"}
    for found in (
        CellConfig.from_dict(written),
        CellConfig.from_dict(older),
        pickle.loads(pickle.dumps(one.config)),
        rebuild(CellConfig, to_plain(one.config)),
    ):
        assert found == one.config
        assert found.cell_id == one.cell_id


def test_a_form_of_a_later_version_is_refused_and_unknown_options_are_kept() -> None:
    written = CELLS[0].config.written()
    with pytest.raises(ValueError, match="schema_version=9: this code reads up to 2; use a newer zerobench"):
        CellConfig.from_dict(written | {"schema_version": 9})
    strange = CellConfig.from_dict(written | {"model": {"kind": "theirs", "name": "theirs", "width": 3}})
    assert strange.section("model") == {"kind": "theirs", "width": 3, "name": "theirs"}


def test_the_ids_of_recorded_runs_are_reproduced() -> None:
    rows = [pd.read_parquet(path) for path in sorted((ROOT / "results").glob("*/cpu/*/runs.parquet"))]
    recorded = pd.concat([frame[["cell_id", "config"]] for frame in rows]).drop_duplicates()
    assert len(recorded) > 50
    other = [row.cell_id for row in recorded.itertuples() if CellConfig.from_json(row.config).cell_id != row.cell_id]
    assert other == []


PLAIN = cell("zero2", 2)


@pytest.mark.parametrize(
    ("is_other", "more"),
    [
        (True, {"seed": 1}),
        (True, {"clip": 1.0}),
        (True, {"accumulation": 2}),
        (True, {"micro_batch": 2}),
        (True, {"optimizer": schema_training.AdamW(lr=0.5)}),
        (True, {"strategy": {"mode": "vendor"}}),
        (True, {"draw_on": "device"}),
        (True, {"deterministic": True}),
        (True, {"measure": Measure(steps=3, warmup=2)}),
        (False, {"results_dir": "elsewhere"}),
        (False, {"rerun": True}),
        (False, {"measure": Measure(steps=2, warmup=2, repeats=3)}),
        (False, {"measure": Measure(steps=2, warmup=2, check_training="true")}),
        (False, {"launch": Launch(threads=1, check_memory=False)}),
        (False, {"draw_on": "cpu"}),
        (False, {"deterministic": False}),
        (False, {"batch": 8}),
    ],
)
def test_what_is_measured_makes_another_cell_not_where_it_goes_or_how_often(is_other: bool, more: dict) -> None:
    other = sound("zero2", 2, **more)
    assert (other.cell_id != PLAIN.cell_id) == is_other
    assert (work_id(other.config) != work_id(PLAIN.config)) == is_other


def test_a_batch_is_divided_by_ranks_and_micro_batches() -> None:
    divided = sound("zero2", 2, batch=24, accumulation=3)
    assert divided.cell_id == cell("zero2", 2, micro_batch=4, accumulation=3).cell_id
    assert cell("zero2", 2, batch=7).problems == (
        "batch=7: world_size=2 must divide it: every rank must get as many samples",
    )
    (problem,) = cell("zero2", 2, batch=8, accumulation=3).problems
    assert problem.startswith("batch=8: world_size=2 times accumulation=3 must divide it")
