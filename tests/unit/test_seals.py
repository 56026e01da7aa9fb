"""Seals: ranks that have launched other collectives than one another hear of it in their next agreement.

And stamps: those of every hop are looked at.
"""

from __future__ import annotations

import pytest
import torch

from zerobench.zero.comm.base import Comm
from zerobench.zero.comm.checked_later import Sealed
from zerobench.zero.comm.gloo import tag_of
from zerobench.zero.comm.hierarchical import Hierarchical, Nodes, ShardGroup

FLAGS = [1, 0, 0, 1, 0]
GATHERS = ("gather", "bucket 0"), ("gather", "bucket 1")


def agree(ranks: list[tuple[tuple[str, str], ...]], asks: tuple[str, str] = ("step", "step")) -> list[list[int]]:
    """Each rank's reading of the maximum of all flags, after the collectives that it has launched."""
    comms = [Sealed(Comm(), {}) for _ in ranks]
    sealed = []
    for comm, launched, what in zip(comms, ranks, asks, strict=True):
        for kind, unit in launched:
            comm.count(kind, unit)
        flags = torch.tensor(FLAGS, dtype=torch.int32)
        comm.seal(flags, what)
        sealed.append(flags)
    most = torch.stack(sealed).amax(0)
    return [comm.unseal(most.tolist(), what) for comm, what in zip(comms, asks, strict=True)]


def test_ranks_that_launched_the_same_agree() -> None:
    assert agree([GATHERS, GATHERS]) == [FLAGS, FLAGS]
    assert agree([GATHERS, GATHERS[::-1]]) == [FLAGS, FLAGS]  # their order is the stamps' business


@pytest.mark.parametrize(
    "other",
    [(GATHERS[0],), (GATHERS[0], GATHERS[0]), (GATHERS[0], ("reduction", "bucket 1")), (*GATHERS, GATHERS[1])],
    ids=["fewer", "another unit", "another kind", "more"],
)
def test_ranks_that_did_not_are_told(other: tuple[tuple[str, str], ...]) -> None:
    for ranks in ([GATHERS, other], [other, GATHERS]):
        with pytest.raises(RuntimeError, match="the ranks"):
            agree(ranks)


def test_ranks_that_ask_for_different_things_are_told() -> None:
    with pytest.raises(RuntimeError, match="the ranks"):
        agree([GATHERS, GATHERS], ("step", "clip_grad_norm_"))


class Looked(Comm):
    """Of so many ranks; says when its stamps are looked at."""

    def __init__(self, name: str, size: int, looked: list[str]) -> None:
        self.name, self.size, self.looked = name, size, looked

    def check_stamps(self) -> None:
        self.looked.append(self.name)


@pytest.mark.parametrize("kind", ["nodes", "shard groups"])
def test_stamps_of_every_hop_are_looked_at(kind: str) -> None:
    looked: list[str] = []
    everybody, within, between = (Looked(n, s, looked) for n, s in (("all", 4), ("within", 2), ("between", 2)))
    nodes = Nodes(within, between)
    comm = Hierarchical(everybody, nodes) if kind == "nodes" else ShardGroup(everybody, within, between)
    comm.check_stamps()
    assert sorted(looked) == ["all", "between", "within"]


def test_transfers_of_different_collectives_have_different_tags() -> None:
    """Where their sizes are equal, too: they must not be paired with one another."""
    kinds, units, sizes = ("gather", "reduction"), ("bucket 0", "bucket 1"), (64, 128)
    tags = [tag_of(kind, unit, size) for kind in kinds for unit in units for size in sizes]
    assert len(set(tags)) == len(tags)
    assert tags == [tag_of(kind, unit, size) for kind in kinds for unit in units for size in sizes]
