"""Matrices that one rank owns, under every strategy: Muon equals one process and DDP, once a step, on one rank each."""

import pytest
import torch

from tests.distributed import owned
from tests.distributed.owned import HOST, LATE, MATRICES, Case, Outcome
from tests.ranks import run_ranks

STRATEGIES = ("zero1", "zero2", "zero3", "megatron")

SPREAD = 0.02
"""Newton-Schulz works in bf16: where a norm or a sum of gradients is rounded otherwise, an entry of a matrix may move
by a share of what Muon moves it in all steps, 3 · 0.02 of a matrix of norm about 1 per row."""

CASES = [
    *(Case(strategy) for strategy in ("ddp", *STRATEGIES)),
    *(Case(strategy, micro_batches=2) for strategy in ("ddp", "zero1", "zero2", "zero3")),
    *(Case(strategy, clip=0.1) for strategy in ("ddp", "zero1", "zero3")),
    Case("zero2", options=HOST), Case("zero2", options=LATE), Case("zero3", meta=True),
    Case("zero3", options=(("persistence_numel", 300),)),
    *(Case(strategy, dtype=torch.bfloat16) for strategy in ("ddp", "zero1", "zero3")),
    *(Case(strategy, kind=kind) for kind in ("own", "adafactor") for strategy in ("ddp", "zero1", "zero3")),
]  # fmt: skip


@pytest.fixture(scope="module", params=[2, pytest.param(1, marks=pytest.mark.thorough)])
def ranks(request) -> int:
    return request.param


@pytest.fixture(scope="module")
def found(ranks: int) -> dict[Case, list[Outcome]]:
    """Case -> what each rank found."""
    return dict(zip(CASES, zip(*run_ranks(ranks, owned.train_all, CASES), strict=True), strict=True))


def check_equal(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], of: object = "") -> None:
    assert mine.keys() == theirs.keys()
    assert not [name for name in theirs if not torch.equal(mine[name], theirs[name])], of


def test_every_strategy_equals_one_process_to_the_bit(found, ranks: int) -> None:
    once, twice = owned.in_one_process(ranks), owned.in_one_process(ranks, micro_batches=2)
    for case, outcomes in found.items():
        for one in outcomes:
            if case.kind != "muon" or case.dtype != torch.float32 or case.clip is not None or case.options == LATE:
                continue
            if case.micro_batches == 1:
                check_equal(one.state, once, case)
            elif case.strategy in ("ddp", "zero1", "megatron"):  # the others sum over the ranks in each micro-batch
                check_equal(one.state, twice, case)
            else:
                assert max(float((one.state[k] - twice[k]).abs().max()) for k in twice) < SPREAD


def test_clipped_and_halved_strategies_agree_with_ddp(found) -> None:
    for case in (case for case in found if case.clip is not None or case.dtype != torch.float32 or case.kind != "muon"):
        ddp = found[case._replace(strategy="ddp")][0]
        first = found[case._replace(strategy="zero1")][0]
        for one in found[case] if case.strategy != "ddp" else ():
            check_equal(one.state, first.state, case)
            if case.clip is None:
                check_equal(one.state, ddp.state, case)
            assert max(float((one.state[k] - ddp.state[k]).abs().max()) for k in ddp.state) < SPREAD


def test_a_matrix_is_orthogonalized_once_a_step_by_one_rank(found, ranks: int) -> None:
    """The known faults of others: no Newton-Schulz at all under DDP, one in each micro-batch, none with offload."""
    for case, outcomes in found.items():
        if case.kind == "muon":
            each = [sum(calls) for calls in zip(*(one.calls for one in outcomes), strict=True)]
            if case.options == LATE:  # in a thread, and of the last step not at all
                assert sum(each) in (MATRICES * (owned.STEPS - 1), MATRICES * owned.STEPS), case
                continue
            assert each == [MATRICES * (ranks if case.strategy == "ddp" else 1)] * owned.STEPS, case


def test_matrices_have_a_momentum_on_their_owner_and_no_state_of_adamw(found, ranks: int) -> None:
    names = [f"layers.{i}.weight" for i in range(3)] + ["columns.weight"]
    for case, outcomes in found.items():
        if case.strategy != "ddp" and case.kind == "muon":
            for name in names:
                assert [one.kept[name] for one in outcomes if name in one.kept] == [["momentum_buffer"]], (case, name)
            rest = [states for one in outcomes for name, states in one.kept.items() if name not in names]
            assert {tuple(states) for states in rest} == {("exp_avg", "exp_avg_sq", "step")}


def test_uneven_and_empty_shards_and_checkpoints_at_another_number_of_ranks(tmp_path) -> None:
    """Four matrices on five ranks: one owns none."""
    saved = run_ranks(2, owned.save, "zero2", str(tmp_path))[0]
    loaded = run_ranks(5, owned.load, "zero3", str(tmp_path))
    for state, _ in loaded:
        check_equal(state, saved)
    assert sorted(len(kept) for _, kept in loaded) == [0, 1, 1, 1, 1]
    alone, whole = owned.load(0, 1, "zero1", str(tmp_path))
    check_equal(alone, saved)
    check_equal({name: m for _, kept in loaded for name, m in kept.items()}, whole)
    assert whole["columns.weight"].stride() == (1, 24), "in the order of its memory"


@pytest.mark.thorough
@pytest.mark.parametrize("n", [3, 5])
def test_beyond_two_ranks_the_stages_are_equal_and_close_to_ddp(n: int) -> None:
    cases = [Case(strategy) for strategy in ("ddp", *STRATEGIES)]
    ddp, *stages = zip(*run_ranks(n, owned.train_all, cases), strict=True)
    for outcomes in stages:
        for one in outcomes:
            check_equal(one.state, stages[0][0].state)
        assert [sum(calls) for calls in zip(*(one.calls for one in outcomes), strict=True)] == [MATRICES] * owned.STEPS
    assert max(float((stages[0][0].state[k] - ddp[0].state[k]).abs().max()) for k in ddp[0].state) < SPREAD
