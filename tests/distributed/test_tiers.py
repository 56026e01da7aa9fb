"""Checkpoints know nothing of tiers: what one wrote any other loads, to the bit, and training goes on."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import zoo
from tests.distributed.test_checkpoint import assert_same, gathered, whole_state
from tests.ranks import run_ranks
from zerobench.zero import NvmeOffload, Offload, Zeropp, initialize

pytestmark = pytest.mark.thorough

BATCH = 4

OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "zero2": ("zero2", {}),
    "zero2 cpu": ("zero2", {"offload": Offload()}),
    "zero3 nvme": ("zero3", {"offload": NvmeOffload(parameters=True)}),
    "zero3 cpu": ("zero3", {"offload": Offload(parameters=True)}),
    "zero1 part": ("zero1", {"offload": Offload(fraction=0.4)}),
    "zero3 groups": ("zero3", {"shard_group": 2}),
    "zero3 zeropp": ("zero3", {"zeropp": Zeropp(True, True, True, 64, 64), "node_size": 2}),
}


def fresh(kind: str, folder: str, shift: float = 0.0, model_name: str = "unused", **more: Any) -> Any:
    """An engine; with `shift` its weights are others than those of all engines here."""
    strategy, options = OPTIONS[kind]
    model = zoo.build(model_name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(shift)
    offload = options.get("offload")
    if isinstance(offload, NvmeOffload):
        files = {"path": folder, "block_bytes": 8192, "buffers": 10, "depth": 2}
        options = options | {"offload": NvmeOffload(**vars(offload) | files)}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    return initialize(model, optimizer, strategy, bucket_bytes=4096, tile_bytes=4096, **options, **more)


def steps(engine: Any, numbers: range, clip: bool = False) -> list[float]:
    """Losses of the whole batch, the same at every N."""
    n, losses = dist.get_world_size(), []
    for number in numbers:
        engine.module.calls = number
        loss = engine(*zoo.tokens(dist.get_rank(), n, number, rows=BATCH // n))
        engine.backward(loss)
        if clip:
            engine.clip_grad_norm_(0.1)
        engine.step()
        losses.append(sum(gathered(engine, loss.item())) / n)
    return losses


def save_all(rank: int, n: int, folder: str) -> None:
    """Leaves, of each kind, what was saved and the losses that come after."""
    found = {}
    for kind in OPTIONS:
        engine = fresh(kind, folder)
        steps(engine, range(3))
        engine.save(f"{folder}/{kind} 4")
        found[kind] = whole_state(engine), steps(engine, range(3, 6))
    for kind in ("zero2 cpu", "zero3 nvme", "zero3 cpu", "zero1 part"):
        assert_same(found[kind][0], found["zero2"][0])
        assert found[kind][1] == found["zero2"][1]
    if rank == 0:
        torch.save(found, f"{folder}/found.pt")


def load_all(rank: int, n: int, folder: str, back: bool) -> int:
    """Each checkpoint under some kinds, and saved again under the last of them; `back`: these again."""
    loaded, saved = 0, torch.load(f"{folder}/found.pt", weights_only=False)
    for number, (kind, (state, losses)) in enumerate(saved.items()):
        kinds = [list(OPTIONS)[(number + step) % len(OPTIONS)] for step in ((0, 3) if back else (1, 2, 5))]
        for other in kinds:
            engine = fresh(other, folder, shift=1.0)
            engine.load(f"{folder}/{kind} {2 if back else 4}")
            assert_same(whole_state(engine), state)
            if other == kinds[-1] and not back:
                engine.save(f"{folder}/{kind} 2")
            after = steps(engine, range(3, 6))
            if "zeropp" in kind + other:  # lossy, and otherwise at another N
                assert after == pytest.approx(losses, abs=0.3)
            else:
                assert after == pytest.approx(losses, rel=2e-6), (kind, other)
            if back and other == kind:
                assert after == losses, kind
            loaded += 1
    return loaded


def late(rank: int, n: int, folder: str) -> None:
    """An update that is pending goes along; where there is no delay it is made."""
    for strategy in ("zero1", "zero2", "zero3"):
        options = {"bucket_bytes": 4096, "tile_bytes": 4096}

        def engine_of(offload: Offload | None, strategy=strategy, options=options, **more: Any) -> Any:
            model = zoo.build("unused")
            return initialize(
                model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), strategy, offload=offload,
                **options, **more,
            )  # fmt: skip

        late = Offload(delayed_after=2)
        straight = engine_of(late)
        losses = steps(straight, range(8), clip=True)
        first = engine_of(late)
        assert steps(first, range(4), clip=True) == losses[:4]
        folder_of = Path(folder) / strategy
        first.save(folder_of)
        first.save(folder_of)  # changes nothing
        kept = first.state_dict()
        for how in ("folder", "dict"):
            second = engine_of(late)
            steps(second, range(5), clip=True)  # of which an update is pending, too
            second.load(folder_of) if how == "folder" else second.load_state_dict(kept)
            assert steps(second, range(4, 8), clip=True) == losses[4:], (strategy, how)
        early = engine_of(late)
        steps(early, range(1), clip=True)
        early.save(f"{folder_of}-early")
        second.load(f"{folder_of}-early")  # from here on nothing is pending, and a step is left before delay
        assert steps(second, range(1, 8), clip=True) == losses[1:], strategy
        plain = engine_of(None)
        plain.load(folder_of)
        assert first.update.complete()
        assert not first.update.complete()
        first.placement.round_masters()
        first.after_update()
        assert_same(whole_state(plain), whole_state(first))
        assert all(torch.equal(v, plain.full_state_dict()[k]) for k, v in first.full_state_dict().items())
        loss = straight(*zoo.tokens(rank, n, 8, rows=BATCH // n))
        with pytest.raises(ValueError, match="a delayed update is running since the last forward"):
            straight.save(folder_of)
        straight.backward(loss)
        straight.step()
        dist.barrier()


def test_checkpoints_go_from_tier_to_tier_and_from_4_ranks_to_2_and_back(tmp_path: Path) -> None:
    run_ranks(4, save_all, str(tmp_path))
    assert run_ranks(2, load_all, str(tmp_path), False) == [3 * len(OPTIONS)] * 2
    assert run_ranks(4, load_all, str(tmp_path), True) == [2 * len(OPTIONS)] * 4


def test_an_update_that_is_pending_is_part_of_the_state(tmp_path: Path) -> None:
    run_ranks(2, late, str(tmp_path))
