"""A gradient's way from autograd to the optimizer under ZeRO-2: through few files, and in the order that they tell.

A file is on the way where one of its functions runs inside of autograd's backward, in which buckets fill and are sent,
or holds the gradient between that and the update: a tensor over its memory, or its bucket. Beneath the way, and not
counted, are the engine's lowest layers: how elements are ordered, labeled and allocated, how a collective travels.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from tests.ranks import run_ranks
from tests.test_layers import LAYERS
from zerobench import zero
from zerobench.zero import initialize, labels
from zerobench.zero.gradients.bucket_base import GradientBucket
from zerobench.zero.stage2 import ShardedBucket

MOST_FILES = 8

BENEATH = set().union(*LAYERS["zerobench.zero"][:2])
"""Modules and packages of the engine's two lowest layers."""


class Gradients(labels.Observer):
    """Hears which storages are gradients', and which of the engine's functions run for one or hold one."""

    engine: Any = None

    def __init__(self) -> None:
        self._root = Path(zero.__file__).parent
        self._storages: dict[int, torch.UntypedStorage] = {}  # held, so that no other comes to have its address
        self.way: dict[str, None] = {}

    def on_tensor(self, tensor: torch.Tensor, category: str, name: str, tier: str | None) -> None:
        if category in (labels.GRADIENTS, labels.COMMUNICATION):
            storage = tensor.untyped_storage()
            self._storages[storage._cdata] = storage

    def on_file(self, *_: Any) -> None:
        raise AssertionError("there are no files")

    on_transfer = on_file

    def on_call(self, frame: FrameType, event: str, returned: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "return" and path.is_relative_to(self._root):
            inside = path.relative_to(self._root)
            if inside.parts[0].removesuffix(".py") in BENEATH:
                return
            held = (self._is_gradient(value) for value in (*frame.f_locals.values(), returned))
            if self.engine.gradients.in_backward or any(held):
                self.way[inside.as_posix()] = None

    def _is_gradient(self, value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            return value.layout == torch.strided and value.untyped_storage()._cdata in self._storages
        return isinstance(value, GradientBucket)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])


def way_of_a_step(rank: int, n: int) -> list[str]:
    """Files that gradients pass in the third step, without what follows the optimizer's update of the last tile."""
    gradients = Gradients()
    labels.listen(gradients)
    module = model()
    engine = initialize(module, torch.optim.AdamW(module.parameters(), fused=True), "zero2", bucket_bytes=40_000)

    gradients.engine = engine

    def stop(*_: Any) -> None:
        sys.setprofile(None)

    engine.optimizer.register_step_post_hook(stop)
    for step in range(3):
        loss = engine(torch.ones(2, 64)).square().mean()
        if step == 2:
            sys.setprofile(gradients.on_call)
        engine.backward(loss)
        engine.step()
    labels.unlisten(gradients)
    return list(gradients.way)


@contextmanager
def told(transitions: list[tuple[str, str]]) -> Iterator[None]:
    """Inside, what ZeRO-2's buckets do is noted, with their names."""
    names = ("open", "launch", "wait", "release")
    before = {name: getattr(ShardedBucket, name) for name in names}

    def noted(name: str) -> Any:
        def transition(bucket: ShardedBucket, *args: Any, **kwargs: Any) -> None:
            transitions.append((bucket.unit.name, name))
            before[name](bucket, *args, **kwargs)
            is_open = bucket.full is not None and bucket.full.untyped_storage().nbytes() > 0
            assert is_open == (name in ("open", "launch")), (bucket.unit.name, name)
            shard = bucket.shard.untyped_storage().nbytes()
            assert name == "open" or (shard > 0) == (name != "release")

        return transition

    for name in names:
        setattr(ShardedBucket, name, noted(name))
    try:
        yield
    finally:
        for name in names:
            setattr(ShardedBucket, name, before[name])


def life_of_a_step(rank: int, n: int) -> list[tuple[str, str]]:
    module = model()
    engine = initialize(module, torch.optim.AdamW(module.parameters(), fused=True), "zero2", bucket_bytes=40_000)
    transitions: list[tuple[str, str]] = []
    with told(transitions):
        engine.backward(engine(torch.ones(2, 64)).square().mean())
        engine.step()
    return transitions


def both(rank: int, n: int) -> tuple[list[str], list[tuple[str, str]]]:
    return way_of_a_step(rank, n), life_of_a_step(rank, n)


def test_a_gradient_passes_few_files_and_each_bucket_lives_in_order() -> None:
    for way, transitions in run_ranks(2, both):
        assert len(way) <= MOST_FILES, way
        assert {"stage2.py", "gradients/bucket_base.py", "optim/step_by_tiles.py"} <= set(way), way
        buckets = list(dict.fromkeys(bucket for bucket, _ in transitions))
        assert len(buckets) == 3
        for bucket in buckets:
            assert [name for one, name in transitions if one == bucket] == ["open", "launch", "wait", "release"]
        # one is in flight at most: each waits before the next one is launched
        sent = [(bucket, name) for bucket, name in transitions if name in ("launch", "wait")]
        assert sent == [(bucket, name) for bucket in buckets for name in ("launch", "wait")]
