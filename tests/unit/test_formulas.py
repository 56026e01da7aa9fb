"""The closed forms against the figures that their papers print, and in a run's account; and the FLOPs of a step."""

from dataclasses import asdict, replace
from typing import Any

import pandas as pd
import pytest

from tests.cells import cell
from zerobench.commands.show import table_of_formulas, traffic_lines
from zerobench.config.schema import Gpt
from zerobench.predict import flops
from zerobench.predict.flops import step_flops, utilization
from zerobench.records import MemoryRow
from zerobench.theory import closed_forms
from zerobench.theory.closed_forms import (
    REST,
    Formula,
    Term,
    between_nodes_formula,
    explained_volume,
    floor_bytes,
    from_json,
    state_formulas,
    to_json,
    volume_formula,
)
from zerobench.theory.groups import GroupShape
from zerobench.theory.replay.states import explained, predict_states
from zerobench.theory.replay.traffic import predict_traffic
from zerobench.theory.shapes import OptimizerShape, ParameterShape, PrecisionShape, Schedule, TierShape
from zerobench.theory.strategy import DDP, MEGATRON, ZERO1, ZERO2, ZERO3, StrategyShape, StrategyTheory

ADAM, HALF = OptimizerShape(2, 1), PrecisionShape(2, 2, 4 * 2**20)
WIDE, AT_ONCE = PrecisionShape(4, 4), PrecisionShape(2, 2, None)


def model(psi: int, element_bytes: int = 2, frozen: int = 0) -> list[ParameterShape]:
    return [ParameterShape(psi, element_bytes, True, "blocks.0"), ParameterShape(frozen, element_bytes, False, "")]


def states(theory: StrategyTheory, psi: int, n: int, precision: PrecisionShape = HALF, **more: int) -> Formula:
    return state_formulas(StrategyShape(theory), model(psi, **more), GroupShape(n), ADAM, precision)["states"]


@pytest.mark.parametrize(
    ("n", "row"),
    [
        (1, (120, 120, 120, 2048, 2048, 2048, 16000, 16000, 16000)),
        (4, (52.5, 41.3, 30, 896, 704, 512, 7000, 5500, 4000)),
        (16, (35.6, 21.6, 7.5, 608, 368, 128, 4750, 2875, 1000)),
        (64, (31.4, 16.6, 1.88, 536, 284, 32, 4187, 2218, 250)),
        (256, (30.4, 15.4, 0.47, 518, 263, 8, 4046, 2054, 62.5)),
        (1024, (30.1, 15.1, 0.12, 513, 257, 2, 4011, 2013, 15.6)),
    ],
)
def test_states_are_those_of_the_papers_table(n: int, row: tuple[float, ...]) -> None:
    """ZeRO, table 1, GB per device; it rounds some cells and cuts others off: within a unit of the last digit."""
    cells = [(size, theory) for size in (7.5e9, 128e9, 1e12) for theory in (ZERO1, ZERO2, ZERO3)]
    for (psi, theory), printed in zip(cells, row, strict=True):
        digits = len(str(printed).partition(".")[2]) if printed % 1 else 0
        assert states(theory, int(psi), n).value / 1e9 == pytest.approx(printed, abs=10.0**-digits)


@pytest.mark.parametrize(
    ("theory", "equation"),
    [(DDP, "(2 + 2 + K)ψ"), (ZERO1, "(2 + 2)ψ + Kψ/N"), (ZERO2, "2ψ + (2 + K)ψ/N"), (ZERO3, "(2 + 2 + K)ψ/N")],
)
def test_equations_read_as_the_paper_prints_them(theory: StrategyTheory, equation: str) -> None:
    found = states(theory, 1000, 4)
    assert found.equation == equation
    assert found.numbers == {"ψ": 1000, "K": 12} | ({"N": 4} if theory.optimizer else {})


def test_masters_as_the_only_shards_are_two_bytes_less() -> None:
    shape = StrategyShape(ZERO3, shards="masters")
    found = state_formulas(shape, model(1000, frozen=300), GroupShape(4), ADAM, HALF)["states"]
    assert (found.equation, found.value) == ("2φ/N + (2 + K)ψ/N", 150 + 14 * 250)
    for other, tiers in ((4, TierShape()), (2, TierShape("host", optimizer=True))):  # fp32, and an offload
        both = [state_formulas(one, model(1000, other), GroupShape(4), ADAM, HALF, tiers)
                for one in (shape, StrategyShape(ZERO3))]  # fmt: skip
        assert both[0] == both[1]


@pytest.mark.parametrize(
    ("precision", "size", "each"), [(AT_ONCE, 2, (4, 16)), (WIDE, 2, (6, 12)), (PrecisionShape(), 4, (8, 8))]
)
def test_megatrons_distributed_optimizer_is_that_of_its_table(precision, size: int, each: tuple[int, int]) -> None:
    for d in (1, 4, 64):
        found = states(MEGATRON, 64_000, d, precision, element_bytes=size)
        assert found.value == each[0] * 64_000 + each[1] * 64_000 // d


def test_a_model_with_frozen_parameters_or_of_several_dtypes_has_other_symbols() -> None:
    assert states(ZERO2, 1000, 4, frozen=300).equation == "2ψ + 2φ + (2 + K)ψ/N"
    mixed = [*model(1000), ParameterShape(10, 8, True, "")]
    found = state_formulas(StrategyShape(ZERO2), mixed, GroupShape(4), ADAM, HALF)["states"]
    assert (found.equation, dict(found.numbers)) == ("P + (G + O)/N", {"P": 2080, "G": 2080, "O": 12160, "N": 4})
    grouped = state_formulas(StrategyShape(ZERO3), model(1000), GroupShape(8, shard_group=2), ADAM, HALF)["states"]
    assert (grouped.equation, grouped.numbers["k"]) == ("(2 + 2 + K)ψ/k", 2)


@pytest.mark.parametrize(("optimizer", "gradients", "left"), [(False, True, 14), (True, False, 4), (True, True, 2)])
def test_what_leaves_the_device_is_that_of_zero_offloads_table(optimizer: bool, gradients: bool, left: int) -> None:
    """Table 1, of one GPU; its last row is printed as 4 and is 2."""
    tiers = TierShape("host", optimizer=optimizer, gradients=gradients)
    for theory in (ZERO1, ZERO2):
        assert floor_bytes(StrategyShape(theory), model(1000), GroupShape(1), ADAM, HALF, tiers) == left * 1000


@pytest.mark.parametrize(("theory", "each"), [(DDP, 2), (ZERO1, 2), (MEGATRON, 2), (ZERO2, 2), (ZERO3, 3)])
def test_volumes_are_those_of_section_7(theory: StrategyTheory, each: int) -> None:
    one = volume_formula(StrategyShape(theory), Schedule.sequential(model(1000)), 4)
    assert (one.equation, one.value) == (f"{each}ψ", each * 1000)
    three = Schedule.sequential(model(1000), 3)
    reduced = {DDP: 6, ZERO3: 9}.get(theory, 4)
    assert volume_formula(StrategyShape(theory, accumulate="every"), three, 4).value == reduced * 1000
    assert volume_formula(StrategyShape(theory), three, 1).value == 0


SHAPES = [
    ParameterShape(1000, 4, True, ""), ParameterShape(37, 4, True, "blocks.0"), ParameterShape(5, 4, False, "blocks.0"),
    ParameterShape(70, 4, True, "blocks.1"), ParameterShape(9, 4, True, "blocks.1"),
]  # fmt: skip


OPTIONS = (
    {}, {"accumulate": "every"}, {"reduce_with": "all_reduce"}, {"persistence_numel": 9}, {"keep_root": False},
    {"reshard_after_forward": False},
)  # fmt: skip


@pytest.mark.parametrize("theory", [DDP, ZERO1, ZERO2, ZERO3, MEGATRON])
@pytest.mark.parametrize("options", OPTIONS)
def test_the_volume_is_the_formula_and_its_terms(theory: StrategyTheory, options: dict) -> None:
    strategy = StrategyShape(theory, bucket_bytes=1024, **options)
    for micro_batches in (1, 3):
        usual = Schedule.sequential(SHAPES, micro_batches)
        for schedule in (usual, replace(usual, uses=("blocks.0", "blocks.0"), returns=(), arrivals=(2, 1, 1, 0))):
            formula = explained_volume(strategy, schedule, GroupShape(3))
            total = formula.value + sum(term.size for term in formula.beyond)
            assert total == predict_traffic(strategy, schedule, GroupShape(3)).volume


def test_zeropp_sends_a_quarter_between_nodes() -> None:
    """ZeRO++, section 3: 3M become 0.75M; each part for itself, and beside the replay, which has scales and padding."""
    schedule, strategy = Schedule.sequential(model(2**20)), StrategyShape(ZERO3, keep_root=False)
    plain = between_nodes_formula(strategy, schedule, GroupShape(8, 4), HALF)
    parts = {"weight_block": 2048, "gradient_block": 512, "secondary": True}
    left = {"weight_block": 2 / 3, "gradient_block": 0.75, "secondary": 2 / 3}
    for chosen, share in [*(({key}, left[key]) for key in parts), (set(parts), 0.25)]:
        groups = GroupShape(8, 4, **{key: parts[key] for key in chosen})
        found = between_nodes_formula(strategy, schedule, groups, HALF)
        assert found.value == share * plain.value
        sent = predict_traffic(strategy, schedule, groups, HALF).between
        assert found.value <= sent < 1.02 * found.value
    assert plain.equation == "6ψ(Z − 1)/N"


LARGE = [ParameterShape(2**20, 2, True, f"blocks.{number}") for number in range(8)]


def beyond(theory: StrategyTheory, n: int) -> dict[str, float]:
    """Category -> what the formula leaves to the term without a name, over the replay's bytes, of a large model."""
    strategy, groups = StrategyShape(theory, bucket_bytes=2**20), GroupShape(n)
    replayed = predict_states(strategy, Schedule.sequential(LARGE), groups, ADAM, HALF)
    found = explained(closed_forms.state_formulas(strategy, LARGE, groups, ADAM, HALF), replayed)
    rests = {name: [term.size for term in one.beyond if term.name == REST] for name, one in found.items()}
    return {name: abs(sum(rests[name])) / max(1, replayed.of_category(name) or 0) for name in rests if name != "states"}


@pytest.mark.parametrize("theory", [DDP, ZERO1, ZERO2, ZERO3, MEGATRON])
def test_a_wrong_formula_is_seen(theory: StrategyTheory, monkeypatch) -> None:
    """Partitioned or not, halved or doubled, a state leaves a rest; as it is, formula and named terms explain all."""
    right, n = closed_forms.states_of, 4
    assert max(beyond(theory, n).values()) < 0.001
    changes = (
        lambda s: replace(s, ranks=None if s.ranks else n),
        lambda s: replace(s, size=s.size // 2),
        lambda s: replace(s, size=2 * s.size),
    )
    for category in ("parameters", "gradients", "master", "optimizer"):
        for change in changes:

            def planted(*given, category=category, change=change) -> tuple[closed_forms.State, ...]:
                return tuple(change(s) if s.category == category and s.size else s for s in right(*given))

            monkeypatch.setattr(closed_forms, "states_of", planted)
            assert beyond(theory, n)[category] > 0.1


FORMULAS = {
    "gradients": Formula("2ψ/N", 1000, {"ψ": 1000, "N": 2}, (Term("padding", 124), Term("idle", -100))),
    "communication": Formula("0", 0, {}),
    "states": Formula("2ψ + (2 + K)ψ/N", 9000, {"ψ": 1000, "N": 2, "K": 12.0}, (Term("padding", 24),)),
    "volume": Formula("(r + 1)ψ", 4000, {"ψ": 1000, "r": 3}, (Term("padding", 30),)),
}


def row(text: Any) -> dict[str, Any]:
    return {"formulas": text, "psi": 1000}


def memory() -> pd.DataFrame:
    sizes = {"gradients": 1024, "communication": 0, "states": 9016, "total": 9999}
    rows = [MemoryRow(rank, "step", c, 0, 0, size - 8 * rank, size) for c, size in sizes.items() for rank in (0, 1)]
    return pd.DataFrame(map(asdict, rows))


def test_each_category_has_its_equation_and_its_bytes() -> None:
    assert from_json(to_json(FORMULAS)) == FORMULAS
    table, lines = table_of_formulas(row(to_json(FORMULAS)), memory())
    gradients, communication, states = table.rows
    assert gradients == ["gradients", "2ψ/N", "1000 B", "24 B", "1.0 KiB", "1.0 KiB"]
    assert communication[:2] == ["communication", "0"]
    assert states[1] == "2ψ + (2 + K)ψ/N"
    assert lines[0].startswith("ψ = 1,000 trained parameters, N = 2 ranks that share the states, K = 12 bytes")
    assert lines[1:] == ["in flight, gradients: padding 124 B, idle -100 B"]


def test_the_volume_is_in_psi_and_bytes_between_nodes_stand_beside_their_formula() -> None:
    assert traffic_lines(row(to_json(FORMULAS))) == [
        "formula (r + 1)ψ = 4.000 ψ, with r = 3 reductions of a gradient",
        "besides: padding +0.030 ψ",
    ]
    formulas = {"between nodes": Formula("1.5ψ(Z − 1)/N", 1536, {"ψ": 4096, "Z": 2, "N": 4})}
    assert traffic_lines(row(to_json(formulas))) == ["between nodes by formula 1.5ψ(Z − 1)/N = 1.5 KiB"]


DAMAGED = ("", '{"states": 3}', '{"volume": {"equation": "ψ", "value": 1, "numbers": {}, "beyond": [1]}}')


@pytest.mark.parametrize("text", [None, float("nan"), *DAMAGED])
def test_a_run_without_formulas_has_none_and_damaged_ones_are_reported(text: Any) -> None:
    table, lines = table_of_formulas(row(text), memory())
    assert table is None
    assert [line.startswith("formulas cannot be read: ") for line in lines] == [True] * isinstance(text, str)
    assert traffic_lines(row(text)) == []


def formula(layers: int, hidden: int, vocabulary: int, sequence: int, tokens: int) -> float:
    """6 FLOPs a weight of a product and token, 12 · layers · hidden · sequence a token for attention."""
    weights = 12 * layers * hidden**2 + vocabulary * hidden
    return tokens * (6 * weights + 12 * layers * hidden * sequence)


def test_a_gpt_has_the_flops_of_the_formula() -> None:
    config = cell("zero2", 2, "million", micro_batch=3).config
    counted = step_flops(config)
    assert counted.model == counted.hardware == pytest.approx(formula(5, 128, 256, 32, 3 * 32), rel=1e-3)


def test_what_is_recomputed_counts_for_the_hardware_only() -> None:
    plain, again = (step_flops(cell("zero2", 2, model).config) for model in ("tiny", "checkpointed"))
    assert again.model == plain.model == plain.hardware
    tokens, head, last = 4 * 32, 2 * 48 * 256, 2 * 4 * 48**2  # a block's last product need not be computed again
    assert again.hardware - plain.model == pytest.approx(plain.model / 3 - tokens * (head + 3 * last), rel=1e-3)


def test_shares_of_the_peak_of_a_whole_gpu_and_none_of_a_slice() -> None:
    assert utilization(int(989.4e12), 2.0, "NVIDIA H200", "bf16") == pytest.approx(0.5)
    assert utilization(int(67e12), 1.0, "NVIDIA H100 80GB HBM3", "fp32") == pytest.approx(1.0)
    assert utilization(10**12, 1.0, "NVIDIA A10G", "fp16") == pytest.approx(1 / 70)
    assert utilization(10**12, 1.0, "cpu", "fp32") is None
    assert utilization(10**12, 1.0, "a GPU of tomorrow", "bf16") is None
    assert utilization(10**12, 1.0, "NVIDIA H200 MIG 1g.18gb", "bf16") is None


@pytest.mark.parametrize("options", [{}, {"tiles": 2, "tied": False}, {"lora": 4, "loss_chunks": 2, "mlp_chunks": 2}])
def test_a_deep_model_takes_what_its_blocks_add(monkeypatch, options: dict[str, Any]) -> None:
    """Blocks of our GPT are equal, so two shallow models are counted; the whole model gives the same."""
    flops._COUNTED.clear()
    base = cell("zero2", 2).config
    assert isinstance(base.model, Gpt)
    deep = replace(base, model=replace(base.model, layers=5, **options))
    short = step_flops(deep)
    monkeypatch.setattr(flops, "Transformer", ())
    flops._COUNTED.clear()
    assert short == step_flops(deep)
