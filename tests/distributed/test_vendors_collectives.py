"""A backend's own collectives, as on a GPU, carry true values: over gloo with CPU tensors.

Ranks that share a GPU go through StagedComm, NCCL through NcclComm, whose lanes are here those of a modeled GPU.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from tests.distributed.streams import ModeledCuda
from tests.distributed.test_races import engine_for, train
from tests.ranks import run_ranks
from zerobench.zero import Zeropp
from zerobench.zero.comm import backends, hierarchical
from zerobench.zero.comm.base import Comm, WrappedComm

KINDS: dict[str, Callable[..., Any]] = {
    "staged": backends.StagedComm,
    "lanes": lambda group: backends.NcclComm(group, ModeledCuda()),
}
RUNS: list[tuple[str, dict[str, Any]]] = [
    ("zero1", {}),
    ("zero2", {"overlap_gather": True}),
    ("zero3", {"prefetch": 2}),
    ("zero3", {"prefetch": 1, "persistence_numel": 60}),
]


IN_GROUPS: list[tuple[str, dict[str, Any]]] = [
    ("zero2", {"node_size": 2}),
    ("zero3", {"shard_group": 2}),
    ("zero3", {"node_size": 2, "zeropp": Zeropp(True, True, True)}),
]


def beneath(comm: Comm) -> Comm:
    """Returns the innermost Comm, which carries the collectives."""
    while isinstance(comm, WrappedComm):
        comm = comm._below
    return comm


def trained(
    rank: int, n: int, kind: str | None, runs: list[tuple[str, dict[str, Any]]] = RUNS
) -> list[list[torch.Tensor]]:
    """Losses and weights of every run."""
    found = []
    patched = {} if kind is None else {("gloo", "cpu"): KINDS[kind]}
    with mock.patch.dict(hierarchical.KINDS, patched):
        for strategy, options in runs:
            torch.manual_seed(0)
            engine = engine_for(strategy, options)
            if kind is not None and runs is RUNS:
                assert isinstance(beneath(engine.comm), backends.StagedComm)
            found.append(train(engine, rank, n))
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.thorough)])
def test_they_train_as_slices_sent_pairwise_do(n: int) -> None:
    expected = run_ranks(n, trained, None)
    for kind in KINDS:
        for rank, (mine, theirs) in enumerate(zip(run_ranks(n, trained, kind), expected, strict=True)):
            for run, one, other in zip(RUNS, mine, theirs, strict=True):
                for got, want in zip(one, other, strict=True):
                    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, msg=f"{kind} {run} rank {rank}")


@pytest.mark.thorough
def test_groups_and_codes_through_them() -> None:
    expected = run_ranks(4, trained, None, IN_GROUPS)
    for kind in KINDS:
        for mine, theirs in zip(run_ranks(4, trained, kind, IN_GROUPS), expected, strict=True):
            for run, one, other in zip(IN_GROUPS, mine, theirs, strict=True):
                for got, want in zip(one, other, strict=True):
                    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, msg=f"{kind} {run}")
