"""Tensors that a backend's thread holds a moment longer than the loop: what is counted does not depend on it."""

import weakref

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from tests.unit.test_clock import Clock
from zerobench.models.linears import TensorAxis
from zerobench.probes import AccountedPass, in_transit, make_pass
from zerobench.probes.in_transit import LOOK_S, PATIENCE_S, InTransit
from zerobench.probes.ledger import Ledger
from zerobench.zero.activations.offload import ActivationPartition


@pytest.mark.slow
def test_what_gloo_has_finished_with_is_gone_before_the_next_storage_is_counted() -> None:
    late = run_ranks(2, _reduce_and_drop)
    assert late == [0, 0]


def _reduce_and_drop(_rank: int, _world_size: int) -> int:
    late = 0
    with Ledger() as ledger:
        ledger.in_transit = InTransit()
        for _ in range(100):
            dropped, kept = torch.ones(3000), torch.ones(3000)
            seen = weakref.ref(dropped)
            dist.all_reduce(dropped)
            dist.reduce_scatter_tensor(kept[:1500], dropped)  # gloo makes a copy of its input
            del dropped
            torch.ones(1)
            late += seen() is not None or sum(ledger.live_bytes().values()) != kept.nbytes
    return late


def test_what_functional_collectives_make_and_keep_is_gone_once_their_output_was_waited_for() -> None:
    """A model's own, on two ranks: the output of a sum over tensor-parallel ranks, the input and output of a gather."""
    assert [len(peaks) for peaks in run_ranks(2, _sum_and_gather)] == [1, 1]


def _sum_and_gather(_rank: int, _world_size: int) -> set[int]:
    axis, peaks = TensorAxis.connect(2, "cpu"), set()
    partition = ActivationPartition(axis.mesh)
    accounted = make_pass("accounted", torch.device("cpu"), None, model_ranks=2)
    assert isinstance(accounted, AccountedPass)
    with accounted.ledger as ledger:
        for step in range(203):
            ledger.begin()
            x = torch.ones(2, 128, 144, requires_grad=True)
            summed = axis.left(axis.entered(x) * 2).bfloat16()
            whole = partition.pack(summed, "", lambda part: lambda: part)
            kept = torch.ones(3000)
            whole()
            summed.sum().backward()
            last = torch.ones(3000)
            del x, summed, whole, kept, last
            ledger.end("step")
            peak = ledger.sums.extremes.pop("step").peak
            peaks |= {peak} if step >= 3 else set()  # the first outputs of a kind teach how many owners they have
    return peaks


def test_a_thread_that_stays_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_transit, "threads_without_frame", lambda: {1})
    monkeypatch.setattr(in_transit, "time", clock := Clock())
    transit = InTransit()
    for patience in (PATIENCE_S, 0.0):
        transit.give(torch.ones(3), always=True)
        begun = clock.now
        transit.settle()
        assert patience <= clock.now - begun < patience + 3 * LOOK_S
