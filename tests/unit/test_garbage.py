"""An engine without references is collected, with its model, optimizer, files and threads."""

import gc
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import zerobench
from zerobench.predict.build import shapes_of
from zerobench.zero import NvmeOffload, Offload


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.two.weight = self.one.weight

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(values).relu())


def train(strategy: str, offload: Offload | None) -> list[weakref.ref]:
    """An engine's life; returns what must be gone after it."""
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    engine = zerobench.initialize(model, optimizer, strategy=strategy, offload=offload)
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 8)).sum())
        engine.step()
    return [weakref.ref(one) for one in (engine, model, optimizer, model.one.weight)]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "tier"), [("zero3", "device"), ("zero3", "files"), ("zero2", "host")])
def test_an_engine_that_nobody_holds_is_collected(strategy: str, tier: str, tmp_path: Path) -> None:
    gc.collect()  # what other tests have left
    threads = threading.active_count()
    path = str(tmp_path)
    offload = {"device": None, "host": Offload(), "files": NvmeOffload(path=path, block_bytes=4096)}[tier]
    left = train(strategy, offload)
    gc.collect()
    assert [one() for one in left] == [None] * len(left)
    assert list(tmp_path.iterdir()) == [], "files go with it"
    assert threading.active_count() == threads, "and so do threads"


def test_looking_at_a_model_leaves_no_circle_that_keeps_its_parameters() -> None:
    model = Tied()
    left = [weakref.ref(parameter) for parameter in model.parameters()]
    gc.collect()
    gc.disable()  # a cycle would be collected some time, and count in the memory of a run until then
    try:
        assert len(shapes_of(model)) == len(left)
        del model
        assert [one() for one in left] == [None] * len(left)
    finally:
        gc.enable()
