"""Checksums: ranks that have launched other collectives than one another hear of it in their next agreement."""

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zerobench.zero.comm.base import Comm
from zerobench.zero.comm.gloo import tag_of
from zerobench.zero.comm.out_of_step import ComparedLaunches

FLAGS = [1, 0, 0, 1, 0]
GATHERS = ("gather", "bucket 0"), ("gather", "bucket 1")


class Together(Comm):
    """Takes the maximum with all flags that were sent before."""

    def __init__(self, sent: list[torch.Tensor]) -> None:
        self.sent = sent

    def maximum(self, flags: torch.Tensor) -> None:
        self.sent.append(flags.clone())
        flags.copy_(torch.stack(self.sent).amax(0))


def launches_of(launched: tuple[tuple[str, str], ...], watch: Any, by_unit: bool) -> ComparedLaunches:
    launches = ComparedLaunches(watch, by_unit)
    for kind, unit in launched:
        launches.add(kind, unit)
    return launches


def agree(
    ranks: list[tuple[tuple[str, str], ...]], asks: tuple[str, str] = ("step", "step"), by_unit: bool = True
) -> list[list[int]]:
    """Each rank's reading of the maximum of all flags, after the collectives that it has launched."""
    sent: list[torch.Tensor] = []
    watch: Any = SimpleNamespace(launched={}, differ=lambda what, asked: RuntimeError(f"the ranks: {what}, {asked}"))

    def agreed() -> list[list[int]]:
        return [
            launches_of(launched, watch, by_unit).agree(
                Together(sent), torch.tensor(FLAGS, dtype=torch.int32), torch.zeros(len(FLAGS), dtype=torch.int32), what
            )
            for launched, what in zip(ranks, asks, strict=True)
        ]

    with suppress(RuntimeError):  # the flags of both ranks are sent before they are compared
        agreed()
    return agreed()


def test_ranks_that_launched_the_same_agree_and_the_order_counts_where_collectives_pair_by_it() -> None:
    for by_unit in (True, False):
        assert agree([GATHERS, GATHERS], by_unit=by_unit) == [FLAGS, FLAGS]
    assert agree([GATHERS, GATHERS[::-1]], by_unit=True) == [FLAGS, FLAGS]
    with pytest.raises(RuntimeError, match="the ranks"):
        agree([GATHERS, GATHERS[::-1]], by_unit=False)


@pytest.mark.parametrize(
    "other",
    [(GATHERS[0],), (GATHERS[0], GATHERS[0]), (GATHERS[0], ("reduction", "bucket 1")), (*GATHERS, GATHERS[1])],
    ids=["fewer", "another unit", "another kind", "more"],
)
def test_ranks_that_did_not_are_told(other: tuple[tuple[str, str], ...]) -> None:
    for ranks in ([GATHERS, other], [other, GATHERS]):
        for by_unit in (True, False):
            with pytest.raises(RuntimeError, match="the ranks"):
                agree(ranks, by_unit=by_unit)


def test_ranks_that_ask_for_different_things_are_told() -> None:
    with pytest.raises(RuntimeError, match="the ranks"):
        agree([GATHERS, GATHERS], ("step", "clip_grad_norm_"))


def test_transfers_of_different_collectives_have_different_tags() -> None:
    """Where their sizes are equal, too: they must not be paired with one another."""
    kinds, units, sizes = ("gather", "reduction"), ("bucket 0", "bucket 1"), (64, 128)
    tags = [tag_of(kind, unit, size) for kind in kinds for unit in units for size in sizes]
    assert len(set(tags)) == len(tags)
    assert tags == [tag_of(kind, unit, size) for kind in kinds for unit in units for size in sizes]
