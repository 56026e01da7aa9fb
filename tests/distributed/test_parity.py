"""Every stage against torch DDP, and the stages against one another. The tolerances: CONTRIBUTING.md."""

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from tests import zoo
from tests.distributed import training
from tests.ranks import on_ranks, run_ranks
from zerobench.zero import STAGES

WITH_DDP = ("ddp", *STAGES)
ADAM_TOLERANCE = 0.02 * 1e-2
"""Adam divides by the size of the gradient: where that is rounding alone, it moves by a share of the learning rate."""


def check_parity(results: list[dict], n: int, tolerance: float = ADAM_TOLERANCE, of: str = "") -> None:
    """`results`: a dict per rank of strategy -> (losses, state). Bit-equal with DDP at N <= 2, close beyond.

    The stages are bit-equal with one another at every N. `of`: a word for a failure."""
    for mine in results:
        stages = [stage for stage in STAGES if stage in mine]
        for stage in stages:
            training.assert_same(mine[stage], mine["ddp" if n <= 2 else stages[0]], of, stage)
            training.assert_close(mine[stage], mine["ddp"], 1e-6, tolerance, of, stage)
        for key in (k for k in mine["ddp"][1] if "running" not in k):  # every rank ends with the same weights
            assert torch.equal(mine[stages[-1]][1][key], results[0][stages[-1]][1][key])


MODELS = [m for m in zoo.MODELS if "reentrant" not in m]
# A bias before BatchNorm has no true gradient, only rounding, which Adam would make steps of: SGD there.
CHOICES = {m: ("sgd", 1e-6) if m == "convolutions" else ("adamw", ADAM_TOLERANCE) for m in MODELS}


FOURS = [MODELS[first : first + 4] for first in range(0, len(MODELS), 4)]


@pytest.mark.parametrize("n", [3, *(pytest.param(n, marks=pytest.mark.thorough) for n in (1, 2, 4))])
@pytest.mark.parametrize("models", FOURS, ids=" ".join)
def test_models_train_as_under_ddp(models: list[str], n: int, thorough: bool) -> None:
    """Each under one stage by turns, unless all are asked for; in every run on three ranks, which divide nothing."""
    results = run_ranks(n, training.train_each, by_turns([(model, CHOICES[model][0]) for model in models], thorough))
    for model, result in zip(models, zip(*results, strict=True), strict=True):
        check_parity(list(result), n, CHOICES[model][1])


def by_turns(cases: list[tuple[str, str]], thorough: bool) -> list[tuple[str, str, list[str]]]:
    return [(*case, list(STAGES) if thorough else [list(STAGES)[at % 4]]) for at, case in enumerate(cases)]


@pytest.mark.thorough
@on_ranks(1, 2)
def test_reentrant_recomputation(rank: int, n: int) -> None:
    """torch DDP refuses it with find_unused_parameters, so the oracle is the model without recomputation."""
    for plain, recomputed in (
        ("tied", "recomputed_reentrant"),
        ("adapted", "adapted_reentrant"),
        ("adapted", "adapted_spans_reentrant"),
    ):
        expected = training.train(rank, n, "ddp", plain, "adamw")
        for stage in STAGES:
            found = training.train(rank, n, stage, recomputed, "adamw")
            training.assert_close(found, expected, 1e-6, ADAM_TOLERANCE, stage, recomputed)


SHOWN = ["adamw", "adamw_foreach", "adam_amsgrad", "sgd_momentum", "nadam", "adamw8bit"]
"""Optimizers of every run: each implementation, and states of every sort."""


def test_optimizers_update_as_under_ddp(thorough: bool) -> None:
    """Each under one stage by turns, unless all are asked for."""
    optimizers = list(zoo.OPTIMIZERS) if thorough else SHOWN
    results = run_ranks(2, training.train_each, by_turns([("tied", optimizer) for optimizer in optimizers], thorough))
    for optimizer, result in zip(optimizers, zip(*results, strict=True), strict=True):
        check_parity(list(result), 2, of=optimizer)


def loops(rank: int, n: int) -> list[dict[str, Any]]:
    for straight, resumed in training.by_strategy(rank, n, training.resume, STAGES).values():
        assert straight == resumed
    compared = (training.evaluate_between, training.schedule_and_groups)
    return [training.by_strategy(rank, n, loop, WITH_DDP) for loop in compared]


@pytest.mark.parametrize("n", [2, *(pytest.param(n, marks=pytest.mark.thorough) for n in (1, 3))])
def test_evaluations_groups_schedulers_two_forwards_and_resumed_states(n: int) -> None:
    for results in zip(*run_ranks(n, loops), strict=True):
        check_parity(list(results), n)


def test_ddp_still_has_the_private_method_that_we_label() -> None:
    assert callable(DistributedDataParallel._sync_buffers)


def test_ddp_starts_with_rank_0s_values_whatever_their_strides() -> None:
    mine, others = run_ranks(2, training.start_under_ddp)
    refusal = others.pop("refused")
    assert mine.pop("refused")  # rank 0 hears that another has left
    assert mine == others
    assert "params[0] in this process with sizes [1, 3] appears not to match" in refusal
