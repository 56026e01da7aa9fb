"""The pieces of a simulated exchange: sent once per size, accounted like those that gloo's ranks send."""

import pytest
import torch

from zerobench.zero.comm.gloo import pieces_of
from zerobench.zero.comm.simulated import Pieces


@pytest.mark.parametrize("numel", [1, 7, 8, 9, 16, 23])
def test_pieces_are_those_of_the_exchange(numel: int) -> None:
    part = torch.zeros(numel, dtype=torch.bfloat16)
    pieces, sent = Pieces.of(part, 16), pieces_of(part, 16)
    assert len(pieces) == len(sent)
    assert pieces.largest == sent[0].numel()
    assert [one.numel() for one, times in pieces.different() for _ in range(times)] == [one.numel() for one in sent]


def test_an_empty_slice_sends_nothing() -> None:
    assert list(Pieces.of(torch.zeros(0), 16).different()) == []
