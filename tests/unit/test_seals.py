"""Checksums: ranks that have launched other collectives than one another hear of it in their next agreement.

And stamps: those of every hop are looked at.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zerobench.zero.comm.base import Comm
from zerobench.zero.comm.gloo import tag_of
from zerobench.zero.comm.hierarchical import Hierarchical, Nodes, ShardGroup
from zerobench.zero.comm.out_of_step import CountedComm

FLAGS = [1, 0, 0, 1, 0]
GATHERS = ("gather", "bucket 0"), ("gather", "bucket 1")


class Together(Comm):
    """Takes the maximum with all flags that were sent before."""

    def __init__(self, sent: list[torch.Tensor]) -> None:
        self.sent = sent

    def maximum(self, flags: torch.Tensor) -> None:
        self.sent.append(flags.clone())
        flags.copy_(torch.stack(self.sent).amax(0))


def agree(ranks: list[tuple[tuple[str, str], ...]], asks: tuple[str, str] = ("step", "step")) -> list[list[int]]:
    """Each rank's reading of the maximum of all flags, after the collectives that it has launched."""
    sent: list[torch.Tensor] = []
    watch: Any = SimpleNamespace(launched={}, differ=lambda what, asked: RuntimeError(f"the ranks: {what}, {asked}"))

    def agreed() -> list[list[int]]:
        return [
            CountedComm(Together(sent), watch, Counter(f"{kind} of {unit}" for kind, unit in launched)).agree(
                torch.tensor(FLAGS, dtype=torch.int32), torch.zeros(len(FLAGS), dtype=torch.int32), what
            )
            for launched, what in zip(ranks, asks, strict=True)
        ]

    with suppress(RuntimeError):  # the flags of both ranks are sent before they are compared
        agreed()
    return agreed()


def test_ranks_that_launched_the_same_agree() -> None:
    assert agree([GATHERS, GATHERS]) == [FLAGS, FLAGS]
    assert agree([GATHERS, GATHERS[::-1]]) == [FLAGS, FLAGS]  # the stamps compare their order


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
    """A Comm of `size` ranks that records when its stamps are read."""

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
