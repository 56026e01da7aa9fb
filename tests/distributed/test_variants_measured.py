"""Bytes that every variant of our stages holds and sends, to the byte and the element, against theory and the
documents.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

import pytest

from tests.distributed.variants import BUCKET_BYTES, VARIANTS, account
from zerobench.config.schema import Measure
from zerobench.predict.estimate import training_shapes
from zerobench.records import MemoryRow
from zerobench.strategies import shape_of
from zerobench.theory.closed_forms import floor_bytes
from zerobench.theory.groups import GroupShape
from zerobench.theory.replay.states import Prediction, predict_states
from zerobench.theory.replay.traffic import predict_traffic

STEADY, FROM_THE_START = Measure(steps=1, warmup=2), Measure(steps=1, warmup=0)
"""The measured step: a step once the optimizer's states exist, or construction and the very first step."""

PLAIN = [name for name in VARIANTS if name.endswith(("fp32", "bf16"))]
"""Variants that are measured from the start too, at N = 4: below, the plain model alone weighs more than shards."""


class Measured(NamedTuple):
    """One variant at N ranks. `volume`: elements that a rank moved in a step, the mean."""

    prediction: Prediction
    floor_bytes: int
    predicted_volume: int
    psi: int
    memory: list[MemoryRow]
    volume: float

    def most(self, phase: str, category: str) -> int:
        """Bytes of the fullest rank."""
        return max(m.max_bytes for m in self.memory if (m.phase, m.category) == (phase, category))


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.thorough)])
def ranks(request) -> int:
    return request.param


@pytest.fixture(scope="module")
def measured(ranks: int, request, tmp_path_factory) -> dict[tuple[str, bool], Measured]:
    """(variant, whether from the start) -> what was measured."""
    names = PLAIN if ranks == 4 and not request.config.getoption("--thorough") else VARIANTS
    configs = {(name, False): replace(VARIANTS[name].config(ranks), measure=STEADY) for name in names}
    if ranks == 4:
        configs |= {(name, True): replace(VARIANTS[name].config(ranks), measure=FROM_THE_START) for name in PLAIN}
    found = {}
    for (key, config), records in zip(
        configs.items(), account(list(configs.values()), tmp_path_factory.mktemp("ranks")), strict=True
    ):
        schedule = records[0].schedule
        sent = [sum(t.volume_elements for t in record.traffic if not t.control) for record in records]
        strategy, trained = shape_of(config.strategy.values()), training_shapes(config)
        found[key] = Measured(
            predict_states(strategy, schedule, ranks, *trained),
            floor_bytes(strategy, schedule.shapes, GroupShape(ranks), *trained),
            round(predict_traffic(strategy, schedule, ranks).volume),
            sum(shape.numel for shape in schedule.shapes if shape.trainable),
            [m for record in records for m in record.memory],
            round(fmean(sent), 6),  # a mean over the ranks of thirds and the like
        )
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("name", VARIANTS)
def test_states_and_volume_are_those_of_the_theory(measured, ranks: int, name: str) -> None:
    one, variant = measured[name, False], VARIANTS[name]
    assert one.most("step", "states") == one.prediction.states_bytes
    for category, size in one.prediction.highest.items():
        assert one.most("step", category) == size, category
    assert one.volume == one.predicted_volume
    if variant.floor is not None:
        assert one.floor_bytes == pytest.approx(variant.floor(ranks) * one.psi, abs=3)
    if variant.volume is not None:
        assert one.volume == pytest.approx(variant.volume * one.psi, rel=1e-3)


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [4], indirect=True)
@pytest.mark.parametrize("name", PLAIN)
def test_construction_and_the_first_step_need_no_more(measured, ranks: int, name: str) -> None:
    """From the plain model on, which moves a unit at a time: nothing of its size is ever made beside it."""
    one, allowed = measured[name, True], measured[name, False].prediction.states_bytes
    assert one.most("init", "total") <= allowed
    assert one.most("step", "states") <= allowed
    whole = one.psi * (4 if "fp32" in name.split(",")[0] else 2)
    assert one.most("init", "parameters") <= 1.25 * whole  # one of five blocks, or a bucket
    if whole == 4 * one.psi:  # below, the cell itself casts a model that was built in fp32
        assert one.most("init", "temporary") <= BUCKET_BYTES
