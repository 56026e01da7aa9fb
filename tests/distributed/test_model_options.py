"""Adapters, mixtures of experts and tensor parallelism on ranks: trained as in one process, simulated to the byte.

Of experts a rank has 4 tokens and 2 for each: of 16 experts at least 8 get no token, others on each rank.
"""

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from tests.cells import MODELS, cell, sound
from tests.distributed.training import train_on
from tests.distributed.variants import account, assert_as_predicted
from tests.ranks import run_ranks
from validation.equality import hold
from zerobench import strategies
from zerobench.config.cell import CellConfig
from zerobench.config.schema import SCHEMAS, Gpt, GptMoe, Huggingface, HuggingfaceModel, Measure
from zerobench.config.schema_memory import CheckpointActivations
from zerobench.config.schema_training import Bf16
from zerobench.data import build_batches
from zerobench.predict.build import build_model, connect_axis
from zerobench.predict.estimate import tensor_axis_bytes, training_shapes
from zerobench.records import DATA_AXIS, TENSOR_AXIS
from zerobench.strategies import shape_of
from zerobench.theory.replay.states import predict_states
from zerobench.theory.replay.traffic import predict_traffic
from zerobench.zero.modules.wrapping import default_units

SHAPE = {"layers": 2, "hidden": 48, "heads": 4}
MODELS["lora"] = Gpt(**SHAPE, lora=4)
MODELS["lora in parts"] = Gpt(**SHAPE, lora=4, loss_chunks=4, mlp_chunks=2)
MODELS["parts"] = Gpt(**SHAPE, loss_chunks=4, mlp_chunks=2)
MODELS["large head in parts"] = Gpt(**SHAPE, vocabulary=2048, tied=False, loss_chunks=4)
META = {"strategy": {"construct": "meta"}}

STEADY = Measure(steps=1, warmup=2, passes="accounted")

CASES = {"lora": {"zero3, meta": META}, "lora in parts": {"zero3": {"accumulation": 2}}}
THOROUGH = {"lora": {"zero2": {}, "zero3": {}}, "parts": {"zero3, again": {"activation": CheckpointActivations()}}}
"""Model -> strategy, with what else is said of the cell -> keys. Meta and parts under zero3 are in every run."""


def cells(thorough: bool) -> dict[tuple[str, str], CellConfig]:
    found = {}
    for model, cases in [*CASES.items(), *(THOROUGH.items() if thorough else ())]:
        accumulation = max(more.get("accumulation", 1) for more in cases.values())
        for name, more in {"ddp": {"accumulation": accumulation}, **cases}.items():
            found[model, name] = cell(
                name.partition(",")[0], 2, model, bucket_bytes=4096, clip=0.1, measure=STEADY, **more
            ).config
    found["large head", "zero3"] = cell("zero3", 2, "large head in parts", measure=STEADY).config
    if thorough:
        found["bf16", "zero3"] = cell("zero3", 2, "lora", bucket_bytes=4096, precision=Bf16(), measure=STEADY).config
    return found


@pytest.fixture(scope="module")
def measured(tmp_path_factory, thorough: bool) -> dict[tuple[str, str], tuple[CellConfig, Any]]:
    configs = cells(thorough)
    records = account(list(configs.values()), Path(tmp_path_factory.mktemp("ranks")))
    return {key: (config, mine) for (key, config), mine in zip(configs.items(), records, strict=True)}


def test_stages_train_as_ddp_does(measured) -> None:
    """Losses equal to the bit; with two micro-batches, which are summed elsewhere, to rounding."""
    for (model, name), (config, records) in measured.items():
        if (model, "ddp") not in measured:
            continue
        expected = measured[model, "ddp"][1]
        assert len({step.loss for step in expected[0].steps}) == len(expected[0].steps)
        for one, other in zip(records, expected, strict=True):
            losses = [s.loss for s in other.steps]
            same = losses if config.accumulation == 1 else pytest.approx(losses, rel=1e-6)
            assert [s.loss for s in one.steps] == same, (model, name)
            assert [s.clip_norm for s in one.steps] == pytest.approx([s.clip_norm for s in other.steps], rel=1e-6)


def test_states_and_volume_are_those_of_the_theory(measured) -> None:
    """To the byte and the element: frozen units are gathered and never reduced, parts of a sequence gather nothing."""
    for key, (config, records) in measured.items():
        assert_as_predicted(config, records, key)


SMALL = {"layers": 2, "hidden": 32, "heads": 2}
ALL = ("ddp", "zero1", "zero2", "zero3", "fsdp2", "megatron")

BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
OPTIONS = {
    "mixtral": {"num_local_experts": 16, "intermediate_size": 16},
    "qwen3_moe": {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16},
}
STRATEGIES = {
    "together": (*ALL, "zero3, meta"),
    "separate": ("ddp", "zero3", "fsdp2", "zero3, meta"),
    "mixtral": ALL,
    "qwen3_moe": ("zero2", "zero3", "fsdp2"),
}


def moe(**more: object) -> GptMoe:
    return GptMoe(**SMALL | {"experts": 16, "expert_hidden": 16, "balance": 0.1} | more)


MODELS["together"], MODELS["separate"] = moe(), moe(separate_experts=True)
MODELS["even"] = moe(separate_experts=True, expert_hidden=512, routing="balanced")
MODELS["skewed"] = moe(separate_experts=True, expert_hidden=512, routing="skewed")
MODELS["wide_experts"] = moe(expert_hidden=512)
MODELS["alone"] = moe(experts=1, top_k=1, expert_hidden=512)
MODELS |= dict.fromkeys(OPTIONS, HuggingfaceModel())


def config(strategy: str, n: int, model: str, **more: object) -> CellConfig:
    """A cell with the same two sequences in a step for every N."""
    strategy, _, way = strategy.partition(", ")
    more |= {"strategy": {"construct": way}} if way else {}
    if model in OPTIONS:
        more["huggingface"] = Huggingface(**SMALL, architecture=model, options=OPTIONS[model] | BALANCED)
    batch = {"sequence": 4, "micro_batch": 1, "accumulation": 2 // n}
    one = cell(strategy, n, model, bucket_bytes=4096, measure=STEADY, **batch | more)
    assert not one.problems
    return one.config


def test_every_strategy_trains_as_one_process_does(tmp_path: Path, thorough: bool) -> None:
    """The loss that balances the experts is that of a micro-batch, whatever rank it is on."""
    if thorough:
        pytest.importorskip("transformers")
        keys = [(model, strategy) for model, names in STRATEGIES.items() for strategy in names]
    else:  # the stage that cuts parameters, of experts that are units of their own
        keys = [("separate", "zero3")]
    models = list(dict(keys))
    alone = account([config("ddp", 1, model, clip=0.5) for model in models], tmp_path / "one")
    expected = {model: ranks[0].steps for model, ranks in zip(models, alone, strict=True)}
    found = account([config(strategy, 2, model, clip=0.5) for model, strategy in keys], tmp_path / "two")
    for (model, strategy), ranks in zip(keys, found, strict=True):
        for number, step in enumerate(expected[model]):
            mine = [rank.steps[number] for rank in ranks]
            assert fmean(one.loss for one in mine) == pytest.approx(step.loss, rel=1e-6), (model, strategy)
            assert mine[0].clip_norm == pytest.approx(step.clip_norm, rel=1e-5), (model, strategy)


def test_a_simulation_is_exact_to_the_byte(tmp_path: Path, thorough: bool) -> None:
    """Separate experts if the routing is fixed; together they have the same bytes for every routing."""
    keys = [("zero3", "skewed")]
    if thorough:
        keys += [(strategy, "even") for strategy in ("ddp", "zero3", "fsdp2")]
        keys += [("zero3", "alone"), ("fsdp2", "alone"), ("zero3", "wide_experts")]
    sequence = 64 if thorough else 16
    chosen = {f"{strategy}, {model}": config(strategy, 2, model, sequence=sequence) for strategy, model in keys}
    if thorough:
        chosen["zero3, again"] = config("zero3", 2, "skewed", activation=CheckpointActivations())
        chosen["zero3, bf16"] = config("zero3", 2, "together", precision=Bf16())
    rows = hold(chosen, tmp_path)
    assert [row for row in rows if not row.is_none] == []
    if thorough:
        peaks = {row.cell: row.fake_peak_bytes for row in rows if row.rank == 0}
        assert peaks["zero3, even"] < peaks["zero3, skewed"]
        sent = {row.cell: row.fake_wire_bytes for row in rows}
        assert sent["fsdp2, alone"] > 1.5 * sent["zero3, alone"], "FSDP2 cuts along the experts, which it pads to N"
        expert_bytes = 2 * 32 * 512 * 4
        assert peaks["zero3, skewed"] < peaks["zero3, wide_experts"] - 16 * expert_bytes


def test_separate_experts_are_units_of_their_own() -> None:
    """Else all experts of a block would be gathered with it, also those without a token."""
    names = [name for name, _ in default_units(build_model(config("zero3", 2, "separate")))]
    assert sum(".experts." in name for name in names) == 2 * 16


STEPS, CPU = 3, torch.device("cpu")
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
    batches = build_batches(config.batching, rank // config.tensor_parallel, CPU)
    losses = train_on(engine, (batches.batch(step, 0) for step in range(STEPS)))
    engine.settle()
    whole = engine.full_state_dict() if hasattr(engine, "full_state_dict") else model.state_dict()
    return losses, {key: value.detach().clone() for key, value in whole.items()}


def part_of(name: str, whole: torch.Tensor, ranks: int, place: int) -> torch.Tensor:
    """A rank's part of a parameter, by another way than the model's own."""
    ends = [cut for end, cut in CUT.items() if name.endswith(end)]
    for dim, parts in ends:
        return torch.cat([one.chunk(ranks, dim)[place] for one in whole.chunk(parts, dim)], dim)
    return whole


@pytest.mark.parametrize(("n", "ranks"), [(4, 2), *(pytest.param(n, n, marks=pytest.mark.thorough) for n in (2, 4))])
def test_a_model_in_parts_trains_as_the_whole_one(n: int, ranks: int, thorough: bool) -> None:
    names = ("ddp", "zero1", "zero2", "zero3") if thorough else ("ddp", "zero3")
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


def test_activations_in_parts_change_no_bit(thorough: bool) -> None:
    policies = POLICIES if thorough else ("none", "partition_offload")
    configs = [config_of("zero2", 4, activation=policy) for policy in policies]
    for outcomes in run_ranks(4, train, configs):
        for policy, (losses, parameters) in zip(policies, outcomes, strict=True):
            assert losses == outcomes[0][0], policy
            assert all(torch.equal(value, outcomes[0][1][key]) for key, value in parameters.items()), policy


@pytest.fixture(scope="module")
def accounted(tmp_path_factory, thorough: bool) -> dict[tuple[str, str], tuple[CellConfig, Any]]:
    policies = POLICIES if thorough else ("partition_offload",)
    keys = [(name, "none") for name in ("ddp", "zero3") if thorough] + [("zero2", policy) for policy in policies]
    configs = [config_of(name, 4, activation=policy, accumulation=2, measure=STEADY) for name, policy in keys]
    records = account(configs, tmp_path_factory.mktemp("ranks"))
    return dict(zip(keys, zip(configs, records, strict=True), strict=True))


def test_bytes_of_both_axes_and_of_a_part_of_the_model_are_predicted(accounted) -> None:
    for key, (config, records) in accounted.items():
        moved: dict[tuple[str, str], float] = {}
        for traffic in (one for record in records for one in record.traffic if not one.control):
            place = traffic.axis, traffic.kind if traffic.axis == TENSOR_AXIS else ""
            moved[place] = moved.get(place, 0) + traffic.wire_bytes / len(records) / config.measure.steps
        expected = {(TENSOR_AXIS, kind): size for kind, size in tensor_axis_bytes(config).items() if size}
        strategy, schedule, shapes = shape_of(config.strategy.values()), records[0].schedule, training_shapes(config)
        sent = predict_traffic(strategy, schedule, config.groups, shapes[1])
        expected[DATA_AXIS, ""] = sent.within + sent.between
        moved = {place: size for place, size in moved.items() if place[1] not in ("down", "up")}
        assert moved == pytest.approx(expected), key
        volume = fmean(sum(one.volume_elements for one in record.traffic) for record in records)
        assert volume / config.measure.steps == pytest.approx(sent.volume), key
        states = predict_states(strategy, schedule, config.groups, *shapes).states_bytes
        rows = [m for record in records for m in record.memory if (m.phase, m.tier) == ("step", "device")]
        largest = max(m.max_bytes for m in rows if m.category == "states")
        assert largest == pytest.approx(states, rel=0.01), key


@pytest.mark.thorough
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
