"""Tensor parallelism: the same training as of the whole model, P_a to the bit, and bytes of both axes to the byte."""

from statistics import fmean
from typing import Any

import pytest
import torch

from tests.cells import cell, sound
from tests.distributed.variants import account
from tests.ranks import run_ranks
from zerobench import strategies
from zerobench.config.cell import CellConfig
from zerobench.config.schema import SCHEMAS, Measure
from zerobench.data import build_batches
from zerobench.predict.build import build_model, connect_axis
from zerobench.predict.estimate import tensor_axis_bytes, training_shapes
from zerobench.records import DATA_AXIS, TENSOR_AXIS
from zerobench.strategies import shape_of
from zerobench.theory.replay.states import predict_states
from zerobench.theory.replay.traffic import predict_traffic

STEPS, CPU = 4, torch.device("cpu")
ACCOUNTED = Measure(steps=1, warmup=2, passes="accounted")
CUT = {"attention_in.weight": (0, 3), "attention_in.bias": (0, 3), "attention_out.weight": (1, 1),
       "mlp_in.weight": (0, 1), "mlp_in.bias": (0, 1), "mlp_out.weight": (1, 1)}  # fmt: skip
"""End of a parameter's name -> the dimension along which it is cut, and the parts that are cut apart."""

POLICIES = ("none", "checkpoint", "offload", "checkpoint_offload", "partition", "partition_offload")

Outcome = tuple[list[float], dict[str, torch.Tensor]]


def config_of(name: str, n: int, ranks: int = 2, activation: str = "none", **more: Any) -> CellConfig:
    chosen = SCHEMAS["activation"][activation]()
    if hasattr(chosen, "least_bytes"):
        chosen.least_bytes = 1024
    return sound(name, n, tensor_parallel=ranks, activation=chosen, micro_batch=2, **more).config


def train(rank: int, n: int, configs: list[CellConfig]) -> list[Outcome]:
    """(losses, parameters at the end) of each cell on this rank."""
    return [_train(rank, config) for config in configs]


def _train(rank: int, config: CellConfig) -> Outcome:
    torch.manual_seed(0)
    axis = connect_axis(config, CPU)
    model = build_model(config, axis)
    group = {} if axis is None else {"group": axis.data_group}
    options = config.precision.engine_options(config) | group
    engine = strategies.wrap(config.strategy.values(), model, config.optimizer.build_for(model), **options)
    batches, losses = build_batches(config.batching, rank // config.tensor_parallel, CPU), []
    for step in range(STEPS):
        loss = engine(*batches.batch(step, 0))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.settle()
    whole = engine.full_state_dict() if hasattr(engine, "full_state_dict") else model.state_dict()
    return losses, {key: value.detach().clone() for key, value in whole.items()}


def part_of(name: str, whole: torch.Tensor, ranks: int, place: int) -> torch.Tensor:
    """A rank's part of a parameter, by another way than the model's own."""
    ends = [cut for end, cut in CUT.items() if name.endswith(end)]
    for dim, parts in ends:
        return torch.cat([one.chunk(ranks, dim)[place] for one in whole.chunk(parts, dim)], dim)
    return whole


@pytest.mark.parametrize(("n", "ranks"), [(2, 2), (4, 2), pytest.param(4, 4, marks=pytest.mark.thorough)])
def test_a_model_in_parts_trains_as_the_whole_one(n: int, ranks: int) -> None:
    names = ("ddp", "zero1", "zero2", "zero3")
    found = run_ranks(n, train, [config_of(name, n, ranks) for name in names])
    wholes = run_ranks(n // ranks, train, [cell("ddp", n // ranks, micro_batch=2).config])
    for rank, outcomes in enumerate(found):
        expected, parameters = wholes[rank // ranks][0]
        for name, (losses, parts) in zip(names, outcomes, strict=True):
            assert losses == pytest.approx(expected, abs=2e-6), name
            assert parts.keys() == parameters.keys()
            for key, part in parts.items():
                torch.testing.assert_close(part, part_of(key, parameters[key], ranks, rank % ranks), atol=2e-4, rtol=0)
            first = found[rank - rank % ranks][names.index(name)]
            assert losses == first[0], "ranks that share a model have one loss"
            whole = [key for key in parts if not any(key.endswith(end) for end in CUT)]
            assert all(torch.equal(parts[key], first[1][key]) for key in whole), "what is whole stays equal"
            assert losses == outcomes[0][0], "every strategy trains the same"


def test_activations_in_parts_change_no_bit() -> None:
    configs = [config_of("zero2", 4, activation=policy) for policy in POLICIES]
    for outcomes in run_ranks(4, train, configs):
        for policy, (losses, parameters) in zip(POLICIES, outcomes, strict=True):
            assert losses == outcomes[0][0], policy
            assert all(torch.equal(value, outcomes[0][1][key]) for key, value in parameters.items()), policy


@pytest.fixture(scope="module")
def accounted(tmp_path_factory, thorough: bool) -> dict[tuple[str, str], tuple[CellConfig, Any]]:
    policies = POLICIES if thorough else ("checkpoint_offload", "partition", "partition_offload")
    keys = [(name, "none") for name in ("ddp", "zero3")[not thorough :]] + [("zero2", policy) for policy in policies]
    configs = [config_of(name, 4, activation=policy, accumulation=2, measure=ACCOUNTED) for name, policy in keys]
    records = account(configs, tmp_path_factory.mktemp("ranks"))
    return dict(zip(keys, zip(configs, records, strict=True), strict=True))


def test_bytes_of_both_axes_are_predicted(accounted) -> None:
    for key, (config, records) in accounted.items():
        moved: dict[tuple[str, str], float] = {}
        for traffic in (one for record in records for one in record.traffic if not one.control):
            place = traffic.axis, traffic.kind if traffic.axis == TENSOR_AXIS else ""
            moved[place] = moved.get(place, 0) + traffic.wire_bytes / len(records) / config.measure.steps
        expected = {(TENSOR_AXIS, kind): size for kind, size in tensor_axis_bytes(config).items() if size}
        strategy, schedule = shape_of(config.strategy.values()), records[0].schedule
        sent = predict_traffic(strategy, schedule, 2, config.groups, training_shapes(config)[1])
        expected[DATA_AXIS, ""] = sent.within + sent.between
        moved = {place: size for place, size in moved.items() if place[1] not in ("down", "up")}
        assert moved == pytest.approx(expected), key
        volume = fmean(sum(one.volume_elements for one in record.traffic) for record in records)
        assert volume / config.measure.steps == pytest.approx(sent.volume), key


def test_states_are_those_of_a_part_of_the_model(accounted) -> None:
    for key, (config, records) in accounted.items():
        strategy, schedule = shape_of(config.strategy.values()), records[0].schedule
        states = predict_states(strategy, schedule, 2, *training_shapes(config), config.groups)
        rows = [m for record in records for m in record.memory if (m.phase, m.tier) == ("step", "device")]
        assert max(m.max_bytes for m in rows if m.category == "states") == pytest.approx(
            states.states_bytes, rel=0.01
        ), key


def test_ranks_keep_a_part_of_the_inputs_each(accounted) -> None:
    """Three blocks keep their inputs, whole under checkpoint; the last one stays on the device."""

    def largest(policy: str, tier: str) -> int:
        _, records = accounted["zero2", policy]
        rows = [m for m in records[0].memory if (m.phase, m.tier, m.category) == ("step", tier, "activations")]
        return max((m.max_bytes for m in rows), default=0)

    config, _ = accounted["zero2", "checkpoint_offload"]
    one = config.micro_batch * config.sequence * config.model.hidden * 4
    assert largest("checkpoint_offload", "host") == 2 * one
    assert largest("partition_offload", "host") == one
    assert largest("partition", "host") == 0
