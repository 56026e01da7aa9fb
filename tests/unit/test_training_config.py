"""Optimizers, precisions, clipping as a user configures them: what theory is told of them, and what is refused."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.cells import cell, sound
from zerobench.config import schema_training as training
from zerobench.config.resolve import _resolve_strategy
from zerobench.strategies import options, spec_of
from zerobench.zero.optim.segments import ELEMENTWISE

VARIANTS: list[training.Optimizer] = [
    *(schema() for name, schema in training.OPTIMIZERS.items() if name != "muon"),
    training.Sgd(momentum=0.9),
    training.Sgd(momentum=0.9, nesterov=True),
    training.Adam(amsgrad=True),
    training.AdamW(amsgrad=True, implementation="loop"),
    training.AdamW(implementation="foreach"),
    training.RMSprop(momentum=0.9),
    training.RMSprop(momentum=0.9, centered=True),
    training.NAdam(decoupled_weight_decay=True),
    training.RAdam(decoupled_weight_decay=True),
    training.Adagrad(initial_accumulator_value=0.1, implementation="loop"),
]


@pytest.mark.parametrize("optimizer", VARIANTS, ids=lambda o: f"{o.name}-{o.implementation}")
def test_what_theory_is_told_of_an_optimizer_is_what_torch_keeps(optimizer: training.Optimizer) -> None:
    chosen = sound("zero2", 2, optimizer=optimizer).config.optimizer
    section = chosen.values()
    parameters = [nn.Parameter(torch.randn(7, 111)), nn.Parameter(torch.randn(13))]
    built = chosen.build(parameters)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        built.step()
    kept = [value for state in built.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    expected = sum(chosen.theory_shape().bytes_of(parameter.numel(), 4) for parameter in parameters)
    assert sum(value.numel() * value.element_size() for value in kept) == expected
    fused = training.KINDS[chosen.name].fused and optimizer.implementation in ("auto", "fused")
    assert bool(built.param_groups[0].get("fused")) == fused
    for key in ("lr", "weight_decay", "momentum", "amsgrad", "centered", "nesterov", "rho", "t0", "lr_decay"):
        assert built.param_groups[0].get(key) == section.get(key) or key not in section


def test_every_elementwise_optimizer_of_torch_has_a_name_a_schema_and_a_choice() -> None:
    assert {kind.make for kind in training.KINDS.values()} == set(ELEMENTWISE)
    assert training.KINDS.keys() == training.OPTIMIZERS.keys()
    assert all(schema().name == name for name, schema in training.OPTIMIZERS.items())


def test_fused_is_claimed_exactly_where_torch_has_it() -> None:
    for name, kind in training.KINDS.items():
        try:
            kind.make([nn.Parameter(torch.ones(3))], lr=0.1, fused=True)
        except TypeError:
            assert not kind.fused, name
        else:
            assert kind.fused, name
    assert training.default_implementation("adamw", "cuda") == "fused"
    assert training.default_implementation("nadam", "cuda") == "foreach"
    assert training.default_implementation("adagrad", "cuda") == "foreach", "torch 2.11 has it for the CPU alone"
    assert training.default_implementation("adagrad", "cpu") == "fused"
    assert training.default_implementation("nadam", "cpu") == "loop"


def test_ddp_has_no_gradient_or_wire_dtype_of_its_own() -> None:
    for more, key in (({"gradient_dtype": "fp32"}, "gradient_dtype"), ({"wire_dtype": "fp32"}, "wire_dtype")):
        problems = cell("ddp", 2, precision=training.Bf16(**more)).problems
        assert f"precision.{key}=fp32: strategy=ddp keeps and sends gradients in the model's dtype, bf16" in problems[0]


def strategy_of(section: options.StrategyOptions) -> tuple[dict[str, Any], list[str]]:
    problems: list[str] = []
    _resolve_strategy(section, spec_of(section.name), "gpt", problems)
    return section.values(), problems


def test_a_mode_fills_in_what_is_left_open_and_nothing_else() -> None:
    own, _ = strategy_of(options.Zero3())
    assert (own["keep_root"], own["reshard_after_forward"], own["persistence_numel"]) == ("auto", True, 0)
    paper, _ = strategy_of(options.Zero3(mode="paper"))
    assert (paper["keep_root"], paper["reshard_after_forward"], paper["persistence_numel"]) == (False, True, 0)
    vendor, _ = strategy_of(options.Zero3(mode="vendor", persistence_numel=7))
    assert (vendor["reshard_after_forward"], vendor["persistence_numel"]) == (False, 7)
    assert strategy_of(options.Zero3(mode="vendor"))[0]["keep_root"] is True
    assert strategy_of(options.Zero3(keep_root="yes"))[1] == ["strategy.keep_root=yes: use true, false or auto"]
    assert (own["shards"], paper["shards"], vendor["shards"]) == ("masters", "parameters", "parameters")
    assert strategy_of(options.Zero3(shards="all"))[1] == ["strategy.shards=all: use masters or parameters"]
    assert strategy_of(options.Zero1())[0]["reduce_with"] == "reduce_scatter"
    assert strategy_of(options.Zero2())[0]["bucket_bytes"] == "auto"
    assert {strategy_of(options.Zero2(mode=one))[0]["bucket_bytes"] for one in ("paper", "vendor")} == {25 * 2**20}
    assert strategy_of(options.Zero2(mode="vendor"))[0]["reduce_with"] == "all_reduce"
    assert strategy_of(options.Zero2(mode="vendor", reduce_with="reduce_scatter"))[0]["reduce_with"] == "reduce_scatter"


def test_strategies_say_which_micro_batches_they_reduce() -> None:
    sections = [options.Ddp(), options.Zero1(), options.Zero2(), options.Zero3()]
    assert [section.accumulate for section in sections] == ["last", "last", "every", "every"]
    assert strategy_of(options.Ddp(accumulate="some"))[1] == ["strategy.accumulate=some: use every or last"]
    assert strategy_of(options.Zero3(mode="best"))[1] == ["strategy.mode=best: use one of own, paper, vendor"]
    reduced = strategy_of(options.Zero1(reduce_with="reduce"))[1]
    assert reduced == ["strategy.reduce_with=reduce: use reduce_scatter or all_reduce"]


def test_dtypes_left_open_are_made_explicit_so_that_saying_them_is_the_same_cell() -> None:
    plain = cell("zero2", 2, precision=training.Bf16())
    assert plain.config.precision.wire_dtype == "bf16"
    assert plain.cell_id == cell("zero2", 2, precision=training.Bf16(gradient_dtype="bf16")).cell_id
    assert plain.cell_id != cell("zero2", 2, precision=training.Bf16(gradient_dtype="fp32")).cell_id


def test_megatron_has_fp32_gradients_and_no_tiles_unless_told() -> None:
    section = cell("megatron", 2, precision=training.Bf16()).config.precision
    assert (section.gradient_dtype, section.wire_dtype, section.tile_bytes) == ("fp32", "fp32", None)
    section = cell("megatron", 2, precision=training.Bf16(gradient_dtype="bf16", tile_bytes=4096)).config.precision
    assert (section.gradient_dtype, section.wire_dtype, section.tile_bytes) == ("bf16", "bf16", 4096)
    assert cell("zero1", 2, precision=training.Bf16()).config.precision.tile_bytes == 4 * 2**20


def test_a_model_not_built_in_fp32_is_refused_and_one_that_is_is_cast_with_its_ties() -> None:
    section = cell("zero2", 2, precision=training.Bf16()).config.precision
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model.add_module("tied", model[0])
    assert {t.dtype for t in section.cast(model, "zero2").state_dict().values()} == {torch.bfloat16, torch.int64}
    assert model[0].weight is model.tied.weight
    with pytest.raises(ValueError, match=r"0.weight is torch.float64: build the model in float32"):
        section.cast(nn.Sequential(nn.Linear(3, 3)).double(), "zero2")
