"""Engines of cells, accounted passes of many cells in one launch of ranks, and a model that is frozen in part."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zerobench
from tests import zoo
from tests.cells import MODELS, sound
from zerobench import strategies
from zerobench.config.cell import CellConfig
from zerobench.config.combinations import engine_options
from zerobench.config.schema import Model
from zerobench.predict.build import build_model
from zerobench.predict.estimate import training_shapes
from zerobench.ranks.start_ranks import launch
from zerobench.records import RunRow
from zerobench.registry import MODELS as REGISTRY
from zerobench.results.tables import Results, load
from zerobench.strategies import shape_of
from zerobench.sweep.cell import run_cell
from zerobench.theory.replay.states import predict_states
from zerobench.theory.replay.traffic import predict_traffic
from zerobench.worker import RankJob, RankRecord, run_rank

BUCKET_BYTES = 256 * 1024


class HalfFrozen(zoo.Chain):
    """Nothing of the first two blocks and of what lies before them is trained: backward never comes to them."""

    def __init__(self, vocabulary: int) -> None:
        blocks = (nn.Sequential(nn.Linear(40, 40), nn.LayerNorm(40)) for _ in range(4))
        super().__init__(*blocks, words=vocabulary, width=40)
        for part in (self.embedding, *self.blocks[:2], self.blocks[2][1]):
            part.requires_grad_(False)

    def run(self, h):
        for block in (*self.blocks, self.blocks[2]):
            h = h + block(h)
        return h


def half_frozen(vocabulary: int = 256) -> nn.Module:
    return HalfFrozen(vocabulary)


zerobench.register_model("half_frozen", half_frozen)
MODELS["half_frozen"] = REGISTRY.schema_of("half_frozen", half_frozen, Model)()


def engine_of(config: CellConfig, folder: str | None = None) -> Any:
    """The engine that a run of the cell has on a rank, over the weights of seed 0. `folder`: for files of a tier."""
    torch.manual_seed(0)
    model = build_model(config)
    options = config.precision.options_of(config.strategy.name) | engine_options(config, folder)
    return strategies.wrap(config.strategy.values(), model, config.optimizer.build_for(model), **options)


def account(
    configs: list[CellConfig], folder: Path, mode: str = "accounted", run: Any = None
) -> list[list[RankRecord]]:
    """A pass of each config on all ranks, one after the other in one launch; the configs share N.

    `run`: `run_all` from a module that registers models, which the ranks import for it.
    """
    jobs = [(configs, mode, rank, str(folder)) for rank in range(configs[0].world_size)]
    results = launch(run or run_all, jobs, folder / "logs", timeout_s=200)
    return [list(records) for records in zip(*results, strict=True)]


def measured(folder: Path, *arguments: Any, **more: Any) -> tuple[RunRow, Results]:
    """The row and the tables of a run of `sound(...)` that ends well."""
    row = run_cell(sound(*arguments, results_dir=str(folder), **more), lambda _: None)
    assert row.status == "ok", row.reason
    return row, load(folder / row.run_id)


def assert_as_predicted(config: CellConfig, records: list[RankRecord], about: object = "") -> None:
    """Holds the states on the device and the volume of all ranks against the theory, to the byte and the element."""
    strategy, schedule, trained = shape_of(config.strategy.values()), records[0].schedule, training_shapes(config)
    states = predict_states(strategy, schedule, config.groups, *trained)
    memory = [m for record in records for m in record.memory if (m.phase, m.tier) == ("step", "device")]
    for category, size in {"states": states.states_bytes, **states.highest}.items():
        assert max(m.max_bytes for m in memory if m.category == category) == size, (about, category)
    volume = predict_traffic(strategy, schedule, config.groups, trained[1]).volume
    found = max(sum(t.volume_elements for t in record.traffic if not t.control) for record in records)
    assert math.isclose(found, volume, rel_tol=1e-12), about


def run_all(job: tuple[list[CellConfig], str, int, str], tell: Any) -> list[RankRecord]:
    configs, mode, rank, folder = job
    return [
        run_rank(RankJob(config, mode, rank, f"{folder}/rendezvous-{number}", folder), tell)
        for number, config in enumerate(configs)
    ]
