"""Adapters, and the loss and MLPs in parts, on two ranks: trained as under DDP, bytes as predicted."""

from pathlib import Path

import pytest

from tests.cells import MODELS, cell
from tests.distributed.variants import account
from zerobench.config.cell import CellConfig
from zerobench.config.schema import Gpt, Measure
from zerobench.config.schema_memory import CheckpointActivations
from zerobench.config.schema_training import Bf16
from zerobench.predict.estimate import training_shapes
from zerobench.strategies import shape_of
from zerobench.theory.replay.states import predict_states
from zerobench.theory.replay.traffic import predict_traffic
from zerobench.worker import RankRecord

SHAPE = {"layers": 3, "hidden": 48, "heads": 4}
MODELS["lora"] = Gpt(**SHAPE, lora=4)
MODELS["lora in parts"] = Gpt(**SHAPE, lora=4, loss_chunks=4, mlp_chunks=2)
MODELS["parts"] = Gpt(**SHAPE, loss_chunks=4, mlp_chunks=2)
META = {"strategy": {"construct": "meta"}}

STEADY = Measure(steps=1, warmup=2, passes="accounted")

CASES = {
    "lora": {"zero1": {}, "zero2": {}, "zero3": {}, "zero3, meta": META},
    "lora in parts": {"zero2": {"accumulation": 2}, "zero3": {"accumulation": 2}},
    "parts": {"zero1": {}, "zero3": {}, "zero3, again": {"activation": CheckpointActivations()}},
}
"""Model -> strategy, with what else is said of the cell -> keys."""


def cells() -> dict[tuple[str, str], CellConfig]:
    found = {}
    for model, mine in CASES.items():
        accumulation = max(more.get("accumulation", 1) for more in mine.values())
        for name, more in {"ddp": {"accumulation": accumulation}, **mine}.items():
            found[model, name] = cell(
                name.partition(",")[0], 2, model, bucket_bytes=4096, clip=0.1, measure=STEADY, **more
            ).config
    for name in ("zero2", "zero3"):
        found["bf16", name] = cell(name, 2, "lora", bucket_bytes=4096, precision=Bf16(), measure=STEADY).config
    return found


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[CellConfig, list[RankRecord]]]:
    configs = cells()
    records = account(list(configs.values()), Path(tmp_path_factory.mktemp("ranks")))
    return {key: (config, mine) for (key, config), mine in zip(configs.items(), records, strict=True)}


def test_stages_train_as_ddp_does(measured) -> None:
    """Losses equal to the bit; with two micro-batches, which are summed elsewhere, to rounding."""
    for model, mine in CASES.items():
        expected = measured[model, "ddp"][1]
        assert len({step.loss for step in expected[0].steps}) == len(expected[0].steps)
        for name in mine:
            for one, other in zip(measured[model, name][1], expected, strict=True):
                losses = [s.loss for s in other.steps]
                same = losses if measured[model, name][0].accumulation == 1 else pytest.approx(losses, rel=1e-6)
                assert [s.loss for s in one.steps] == same, (model, name)
                assert [s.clip_norm for s in one.steps] == pytest.approx([s.clip_norm for s in other.steps], rel=1e-6)


def test_states_and_volume_are_those_of_the_theory(measured) -> None:
    """To the byte and the element: frozen units are gathered and never reduced, parts of a sequence gather nothing."""
    for key, (config, records) in measured.items():
        schedule, strategy = records[0].schedule, shape_of(config.strategy.values())
        states = predict_states(strategy, schedule, 2, *training_shapes(config))
        memory = [m for record in records for m in record.memory if m.phase == "step"]
        for category, size in {"states": states.states_bytes, **states.highest}.items():
            assert max(m.max_bytes for m in memory if m.category == category) == size, (key, category)
        volume = predict_traffic(strategy, schedule, 2, precision=training_shapes(config)[1]).volume
        assert max(sum(t.volume_elements for t in r.traffic if not t.control) for r in records) == volume, key


def test_frozen_units_are_not_reduced(measured) -> None:
    for name in ("ddp", "zero2", "zero3"):
        config, records = measured["lora", name]
        psi = sum(s.numel for s in records[0].schedule.shapes if s.trainable)
        moved = sum(t.volume_elements for t in records[0].traffic if t.kind != "all_gather" and not t.control)
        assert moved <= 1.05 * psi * (2 if config.strategy.name == "ddp" else 1)
