"""The life of a bucket of gradients under ZeRO-2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tests.ranks import run_ranks
from zerobench.zero import initialize
from zerobench.zero.stage2 import ShardedBucket


@contextmanager
def told(transitions: list[tuple[str, str]]) -> Iterator[None]:
    """Inside, what ZeRO-2's buckets do is noted, with their names."""
    names = ("open", "target", "store", "release")
    before = {name: getattr(ShardedBucket, name) for name in names}

    def noted(name: str) -> Any:
        def transition(bucket: ShardedBucket, *args: Any, **kwargs: Any) -> Any:
            transitions.append((bucket.unit.name, name))
            result = before[name](bucket, *args, **kwargs)
            is_open = bucket.full is not None and bucket.full.untyped_storage().nbytes() > 0
            assert is_open == (name in ("open", "target")), (bucket.unit.name, name)
            shard = bucket.shard.untyped_storage().nbytes()
            assert name == "open" or (shard > 0) == (name != "release")
            return result

        return transition

    for name in names:
        setattr(ShardedBucket, name, noted(name))
    try:
        yield
    finally:
        for name in names:
            setattr(ShardedBucket, name, before[name])


def life_of_a_step(rank: int, n: int) -> list[tuple[str, str]]:
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
    engine = initialize(module, torch.optim.AdamW(module.parameters(), fused=True), "zero2", bucket_bytes=40_000)
    transitions: list[tuple[str, str]] = []
    with told(transitions):
        engine.backward(engine(torch.ones(2, 64)).square().mean())
        engine.step()
    return transitions


def test_each_bucket_lives_in_order() -> None:
    for transitions in run_ranks(2, life_of_a_step):
        buckets = list(dict.fromkeys(bucket for bucket, _ in transitions))
        assert len(buckets) == 3
        for bucket in buckets:
            assert [name for one, name in transitions if one == bucket] == ["open", "target", "store", "release"]
        # one is in flight at most: each is stored before the next one is sent
        sent = [(bucket, name) for bucket, name in transitions if name in ("target", "store")]
        assert sent == [(bucket, name) for bucket in buckets for name in ("target", "store")]
