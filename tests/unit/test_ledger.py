"""The ledger on its own: lives, sizes, labels; and the allocator as an independent witness."""

import pytest
import torch

from zerobench.probes.ledger import Ledger
from zerobench.zero import labels


@pytest.fixture
def ledger():
    one = Ledger()
    labels.listen(one)
    with one:
        yield one
    labels.unlisten(one)


def stretch(ledger: Ledger, work) -> dict[str, int]:
    ledger.begin()
    work()
    ledger.end("all")
    return {k: v for k, v in ledger.sums.extremes["all"].highest.items() if v}


def test_a_storage_counts_once_and_only_while_it_lives(ledger: Ledger) -> None:
    def work() -> None:
        ledger.enter_phase("forward")
        a = torch.empty(1000)
        b = a.view(10, 100)[3:5]
        del a
        c = torch.empty(500)
        del b, c
        torch.empty(1200)

    assert stretch(ledger, work) == {"activations": 6000}


def test_the_first_label_holds_from_birth_and_a_second_from_then_on(ledger: Ledger) -> None:
    ledger.enter_phase("backward")

    def work() -> None:
        with torch.no_grad():
            a = torch.empty(1000)
            scratch = torch.empty(100)
            labels.label(a, labels.GRADIENTS, "a")
            del scratch
            labels.label(a, labels.COMMUNICATION, "a")
            torch.empty(50)

    assert stretch(ledger, work) == {"gradients": 4000, "temporary": 400, "communication": 4000}
    assert ledger.sums.extremes["all"].peak == 4400


def test_the_largest_tensors_are_those_of_the_peak(ledger: Ledger) -> None:
    def work() -> None:
        small = torch.empty(100)
        torch.empty(1000)
        last = torch.empty(400)
        del small, last

    stretch(ledger, work)
    assert [size for size, *_ in ledger.sums.extremes["all"].alive] == [4000, 400]


def test_memory_that_is_asked_for_is_counted_and_so_is_what_outlives_its_phase(ledger: Ledger) -> None:
    slot = torch.empty(1000)
    labels.label(slot, labels.GRADIENTS, "a slot")
    shard = torch.empty(10)
    labels.label(shard, labels.GRADIENTS, "a shard")
    shard.untyped_storage().resize_(0)

    def work(again: bool) -> None:
        ledger.enter_phase("forward")
        kept, short = torch.empty(100), torch.empty(100)
        slot.view(10, 100).fill_(1.0)  # what is there is no birth
        del short
        ledger.enter_phase("backward")
        del kept
        full = torch.empty(50)
        labels.label(full, labels.GRADIENTS, "full")
        del full
        shard.untyped_storage().resize_(40)
        if again:
            torch.empty(7)
        ledger.enter_phase("update")
        shard.untyped_storage().resize_(0)

    with torch.no_grad():
        stretch(ledger, lambda: work(again=False))
        stretch(ledger, lambda: work(again=True))
    seen = ledger.sums.extremes["all"]
    assert seen.made == {"activations": 2, "gradients": 2, "temporary": 1}, "the most of any stretch"
    assert +seen.lasting == {"activations": 1, "gradients": 1}
    assert ledger.sums.extremes["forward"].made is None, "of whole stretches alone"


def test_recomputation_makes_activations_and_backward_makes_temporaries(ledger: Ledger) -> None:
    ledger.enter_phase("backward")

    def work() -> None:
        with torch.enable_grad():
            torch.empty(300)
        with torch.no_grad():
            torch.empty(200)

    assert stretch(ledger, work) == {"activations": 1200, "temporary": 800}
