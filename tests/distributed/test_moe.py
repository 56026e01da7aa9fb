"""Mixtures of experts on two ranks: trained as in one process, and simulated to the byte.

A rank has 4 tokens and 2 experts for each: of 16 experts at least 8 get no token, others on each rank.
"""

from pathlib import Path
from statistics import fmean

import pytest

from tests.cells import MODELS, cell
from tests.distributed.variants import account
from validation.equality import hold
from zerobench.config.cell import CellConfig
from zerobench.config.schema import GptMoe, Huggingface, HuggingfaceModel, Measure
from zerobench.config.schema_memory import CheckpointActivations
from zerobench.config.schema_training import Bf16

SHAPE = {"layers": 2, "hidden": 32, "heads": 2}
ALL = ("ddp", "zero1", "zero2", "zero3", "fsdp2", "megatron")

BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
OPTIONS = {
    "mixtral": {"num_local_experts": 16, "intermediate_size": 16},
    "qwen3_moe": {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16},
}
CASES = {
    "together": (*ALL, "zero3, meta"),
    "separate": ("ddp", "zero3", "fsdp2", "zero3, meta"),
    "mixtral": ALL,
    "qwen3_moe": ("zero2", "zero3", "fsdp2"),
}


def moe(**more: object) -> GptMoe:
    return GptMoe(**SHAPE | {"experts": 16, "expert_hidden": 16, "balance": 0.1} | more)


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
        more["huggingface"] = Huggingface(**SHAPE, architecture=model, options=OPTIONS[model] | BALANCED)
    measure = Measure(steps=1, warmup=2, passes="accounted")
    batch = {"sequence": 4, "micro_batch": 1, "accumulation": 2 // n}
    one = cell(strategy, n, model, bucket_bytes=4096, measure=measure, **batch | more)
    assert not one.problems
    return one.config


def test_every_strategy_trains_as_one_process_does(tmp_path: Path) -> None:
    """The loss that balances the experts is that of a micro-batch, whatever rank it is on."""
    pytest.importorskip("transformers")
    expected = dict(
        zip(CASES, account([config("ddp", 1, model, clip=0.5) for model in CASES], tmp_path / "one"), strict=True)
    )
    keys = [(model, strategy) for model, mine in CASES.items() for strategy in mine]
    found = account([config(strategy, 2, model, clip=0.5) for model, strategy in keys], tmp_path / "two")
    for (model, strategy), ranks in zip(keys, found, strict=True):
        alone = expected[model][0].steps
        for number, step in enumerate(alone):
            mine = [rank.steps[number] for rank in ranks]
            assert fmean(one.loss for one in mine) == pytest.approx(step.loss, rel=1e-6), (model, strategy)
            assert mine[0].clip_norm == pytest.approx(step.clip_norm, rel=1e-5), (model, strategy)


def test_a_simulation_is_exact_to_the_byte(tmp_path: Path) -> None:
    """Separate experts if the routing is fixed; together they have the same bytes for every routing."""
    keys = [("ddp", "even"), ("fsdp2", "even"), ("zero3", "even"), ("zero3", "skewed"), ("zero3", "wide_experts")]
    keys += [("fsdp2", "alone"), ("zero3", "alone")]
    chosen = {f"{strategy}, {model}": config(strategy, 2, model, sequence=64) for strategy, model in keys}
    chosen["zero3, again"] = config("zero3", 2, "skewed", activation=CheckpointActivations())
    chosen["zero3, bf16"] = config("zero3", 2, "together", precision=Bf16())
    rows = hold(chosen, tmp_path)
    assert [row for row in rows if not row.is_none] == []
    peaks = {row.cell: row.fake_peak_bytes for row in rows if row.rank == 0}
    sent = {row.cell: row.fake_wire_bytes for row in rows}
    assert sent["fsdp2, alone"] > 1.5 * sent["zero3, alone"], "FSDP2 cuts along the experts, which it pads to N"
    expert_bytes = 2 * 32 * 512 * 4
    assert peaks["zero3, even"] < peaks["zero3, skewed"] < peaks["zero3, wide_experts"] - 16 * expert_bytes
