"""Updates as on a GPU, by one kernel, on several ranks: losses are those of tiles; all ranks learn of lost writes."""

import tempfile
from pathlib import Path
from typing import Any

import torch

from tests import zoo
from tests.plain_kernels import acts_as_gpu
from tests.ranks import on_ranks, run_ranks
from zerobench.strategies import wrap
from zerobench.zero import LossScaling, initialize
from zerobench.zero.optim.step_by_tiles import ONE_PASS

KINDS: dict[str, dict[str, Any]] = {
    "zero1": {}, "zero2": {"gradient_dtype": torch.float32}, "zero3": {}, "megatron": {},
}  # fmt: skip


def engine_of(strategy: str, tile_bytes: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Several buckets or units; two parameter groups."""
    model = zoo.build("tied").to(dtype)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    groups: Any = [
        {"params": matrices},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=True)
    options: dict[str, Any] = {"tile_bytes": tile_bytes}
    if dtype == torch.float16:
        options["loss_scaling"] = LossScaling(initial=2.0**22, interval=2)  # the first steps overflow
    if strategy == "ddp":
        section = {"name": "ddp", "bucket_bytes": 4096, "broadcast_buffers": True}
        return wrap(section, model, optimizer, **options)
    options |= KINDS[strategy] if strategy == "zero3" else KINDS[strategy] | {"bucket_bytes": 4096}
    return initialize(model, optimizer, strategy, **options)


def train(engine: Any, rank: int, n: int, steps: int = 4, first: int = 0) -> list[float]:
    losses = []
    for number in range(first, first + steps):
        loss = engine(*zoo.tokens(rank, n, number))
        engine.backward(loss)
        engine.clip_grad_norm_(0.5)
        engine.step()
        losses.append(float(loss))
    return losses


@on_ranks(2, 1)
def test_losses_are_those_of_tiles(rank: int, n: int, thorough: bool) -> None:
    cases = [("ddp", torch.float16), *((one, torch.bfloat16) for one in ("ddp", *KINDS)), ("zero2", torch.float16)]
    for strategy, dtype in cases if thorough else cases[1::2]:
        with acts_as_gpu():
            one_pass, tiles = (train(engine_of(strategy, tile, dtype), rank, n) for tile in (ONE_PASS, 1024))
        assert one_pass == tiles, (strategy, dtype)
        assert len(set(one_pass)) > 2


def lost_writes(rank: int, n: int) -> list[str]:
    """What each rank is told of a write that one rank's update has replaced, at a step, a save and after both."""
    with acts_as_gpu(), tempfile.TemporaryDirectory() as folder:
        engine, messages = engine_of("zero2", ONE_PASS), []
        train(engine, rank, n, 1)

        def write() -> None:
            engine.module.embedding.weight.data[0, 0] += 1  # in the shard of one rank
            train(engine, rank, n, 1)

        for call in (
            lambda: train(engine, rank, n, 1),
            lambda: engine.save(Path(folder) / "saved"),
            engine.full_state_dict,
        ):
            write()
            try:
                call()
                messages.append("")
            except RuntimeError as error:
                messages.append(str(error))
            engine.zero_grad()
            messages.append(str(train(engine, rank, n, 2)[-1] > 0))
        return messages


def test_all_ranks_learn_of_a_lost_write() -> None:
    first, second = run_ranks(2, lost_writes)
    assert first == second
    assert first[1::2] == ["True"] * 3
    assert all("embedding.weight: it was written to between steps" in message for message in first[::2])
