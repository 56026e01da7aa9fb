"""One rank does what the others do not: all hear of it in one sentence, soon; what DDP allows trains."""

import re
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.ranks import on_ranks, run_ranks
from zerobench import initialize
from zerobench.zero import Zeropp
from zerobench.zero.comm import out_of_step
from zerobench.zero.comm.out_of_step import Position, wait_cycle

SOON_S, GROUP_S = 30.0, 60.0
"""For all that a case does, on a machine that is busy, and the group's timeout, after which gloo alone would raise."""


class Odd(nn.Module):
    """Blocks of unequal size, a tied pair, and a way to do without the last block."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 12)
        self.blocks = nn.ModuleList([nn.Linear(12, 20), nn.Linear(20, 12), nn.Linear(12, 12)])
        self.tied = nn.Linear(12, 12)
        self.head = nn.Linear(12, 12)
        self.head.weight = self.tied.weight
        self.again = self.without = self.reads_tied = self.raises = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.first(x))
        if self.reads_tied:
            h = h @ self.tied.weight
        if self.again:
            h = checkpoint(self.blocks[2], h, use_reentrant=True)
        for block in list(self.blocks)[: 2 if self.without else 3]:
            h = checkpoint(block, h, use_reentrant=True)
            if self.raises:
                raise ArithmeticError("a batch that cannot be")
        return self.head(self.tied(h)).square().mean()


def data(rank: int) -> torch.Tensor:
    return torch.arange(8.0).view(2, 4).div(8) + rank


def train(engine: Any, rank: int, steps: int = 1) -> None:
    for _ in range(steps):
        engine.backward(engine(data(rank)))
        engine.step()


def goes_another_way(engine: Any, rank: int, way: str) -> None:
    """Rank 0's model does."""
    setattr(engine.module, way, rank == 0)
    train(engine, rank)


def evaluate(engine: Any) -> None:
    with torch.no_grad():
        engine.eval()(data(0))
    engine.train()


def keep_a_gradient(engine: Any) -> None:
    with engine.no_sync():
        engine.backward(engine(data(0)))


def read_parameters(engine: Any) -> None:
    with engine.full_parameters():
        pass


ALONE: dict[str, Callable[[Any], object]] = {
    "evaluates": evaluate,
    "goes through a micro-batch": keep_a_gradient,
    "goes through a batch": lambda engine: engine.backward(engine(data(0))),
    "reads parameters": read_parameters,
    "keeps its state": lambda engine: engine.state_dict(),
    "keeps the full state": lambda engine: engine.full_state_dict(),
    "saves": lambda engine: engine.save("never written"),
    "steps": lambda engine: engine.step(),
    "clips": lambda engine: engine.clip_grad_norm_(1.0),
}


def acts_alone(engine: Any, rank: int, what: str) -> None:
    """Rank 0 does, before a step of all."""
    if rank == 0:
        ALONE[what](engine)
    train(engine, rank)


def acts_alone_in_a_step(engine: Any, rank: int, what: str) -> None:
    """Between backward and update."""
    engine.backward(engine(data(rank)))
    if rank == 0:
        ALONE[what](engine)
    engine.step()


late_gradient = partial(goes_another_way, way="again")
tied_weight_read_elsewhere = partial(goes_another_way, way="reads_tied")
does_not_reach_a_unit = partial(goes_another_way, way="without")
evaluates, micro_batch_more, backward_more, reads_parameters, keeps_its_state, keeps_the_full_state, saves = (
    partial(acts_alone, what=what) for what in list(ALONE)[:-2]
)
steps_alone, clips_alone = (partial(acts_alone_in_a_step, what=what) for what in ("steps", "clips"))


def reads_another_gradient(engine: Any, rank: int) -> None:
    engine.backward(engine(data(rank)))
    engine.full_gradient("first.weight" if rank == 0 else "tied.weight")


def reads_a_gradient_or_norms(engine: Any, rank: int) -> None:
    engine.backward(engine(data(rank)))
    engine.gradient_norms() if rank == 0 else engine.full_gradient("tied.weight")


def skips_a_batch_that_raises(engine: Any, rank: int) -> None:
    engine.module.raises = rank == 0
    try:
        engine(data(rank))
    except ArithmeticError:
        engine.module.raises = False
    train(engine, rank)


def leaves(engine: Any, rank: int) -> None:
    """Rank 1 ends between two steps of rank 0, so that no launch of the step before is left."""
    store = engine.comm.group.get_group_store()
    if rank == 1:
        store.wait(["past its step"])
        end(engine)
    store.set("past its step", "")
    store.wait(["ended"])  # else rank 0 may call rank 1 gone, which a busy machine has yet to wake
    train(engine, rank)


def leaves_before_gathers(engine: Any, rank: int) -> None:
    """Rank 1 ends after a step whose gathers rank 0, which is slower, has yet to launch."""
    if rank == 0:
        engine.optimizer.register_step_post_hook(lambda *_: engine.comm.group.get_group_store().wait(["ended"]))
    train(engine, rank)
    if rank == 1:
        end(engine)


def end(engine: Any) -> None:
    """Closes this rank's connections, as the end of its process does."""
    out_of_step.break_connections(engine.comm.group)
    engine.comm.group.get_group_store().set("ended", "")
    raise RuntimeError("left")


def is_slow(engine: Any, rank: int) -> None:
    if rank == 0:
        time.sleep(3 * out_of_step.PATIENCE_S)
    loss = engine(data(rank))
    if rank == 1:
        time.sleep(3 * out_of_step.PATIENCE_S)
    engine.backward(loss)
    engine.step()


Act = Callable[[Any, int], None]
Heard = tuple[str, float]
Case = tuple[Act, str, dict[str, Any]]


def hear(rank: int, act: Act, strategy: str, options: dict[str, Any]) -> Heard:
    """A step that goes well, then `act`, and a step that should go well; what this rank heard, and how soon."""
    torch.manual_seed(0)
    model = Odd()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = initialize(model, sgd, strategy, **{"bucket_bytes": 1024, **options})
    train(engine, rank)
    start = time.monotonic()
    try:
        act(engine, rank)
        train(engine, rank)
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return "", time.monotonic() - start


def hear_all(rank: int, n: int, folder: str, cases: list[Case], answer_s: float = SOON_S) -> list[Heard]:
    """Each case in a process group of its own, for a fault breaks it. `answer_s`: for ranks that answer, but late."""
    out_of_step.PATIENCE_S, out_of_step.LOOK_S, out_of_step.ANSWER_S = 0.25, 0.05, answer_s
    dist.barrier()  # a rank that has connected would close the group on one that is still connecting
    done = dist.FileStore(f"{folder}/done", n)
    heard = []
    for number, (act, strategy, options) in enumerate(cases):
        dist.destroy_process_group()
        store = dist.FileStore(f"{folder}/{number}", n)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=timedelta(seconds=GROUP_S))
        heard.append(hear(rank, act, strategy, options))
        done.set(f"{number} {rank}", "")  # the first rank to close a group removes the file of its store
        done.wait([f"{number} {other}" for other in range(n)])
    return heard


def heard_by_all(n: int, folder: Path, cases: list[Case]) -> list[str]:
    """Returns the error message of each case, which must be equal on all ranks and have come soon."""
    sentences = []
    for case, heard in zip(cases, zip(*run_ranks(n, hear_all, str(folder), cases), strict=True), strict=True):
        words = {sentence for sentence, _ in heard}
        assert len(words) == 1, (case, heard)
        assert max(seconds for _, seconds in heard) < SOON_S, (case, heard)
        sentences += words
    return sentences


FAULTS: list[tuple[Act, str, tuple[str, str]]] = [
    (late_gradient, "zero1", ("in backward() at ", "for the agreement")),
    (late_gradient, "zero2", ("for reduction 2 of bucket 0 (head.bias, tied.bias, ...) in step", "for the agreement")),
    (late_gradient, "megatron", ("for reduction 2 of bucket 0", "for the agreement")),
    (late_gradient, "zero3", ("for gather 1 of blocks.2", "for gather 1 of blocks.1")),
    (backward_more, "zero1", ("for reduction 2 of bucket 0", "for the agreement")),
    (backward_more, "zero3", ("in forward()", "in step()")),
    (steps_alone, "zero2", ("in step()", "in backward()")),
    (steps_alone, "zero3", ("in step()", " of (root) (first.weight, first.bias, ...) in step 1")),
    (saves, "zero2", ("in save()", "in backward()")),
    (clips_alone, "zero1", ("calling clip_grad_norm_() in step 1", "calling step() in step 1")),
    (clips_alone, "zero3", ("calling clip_grad_norm_() in step 1", "calling step() in step 1")),
    (reads_another_gradient, "zero2", ("the full_gradient, first.weight", "the full_gradient, tied.weight")),
    (reads_a_gradient_or_norms, "zero1", ("the gradient_norms, norm_type 2.0", "the full_gradient, tied.weight")),
    (evaluates, "zero3", ("in forward()", "in backward()")),
    (micro_batch_more, "zero3", ("for gather", "in step 1")),
    (reads_parameters, "zero3", ("in full_parameters()", "in backward()")),
    (reads_parameters, "megatron", ("in full_parameters()", "in backward()")),
    (keeps_the_full_state, "zero3", ("in forward()", "in backward()")),
    (does_not_reach_a_unit, "zero3", ("of blocks.", "of blocks.")),
    (skips_a_batch_that_raises, "zero3", ("for gather", "for gather")),
]
"""What rank 0 does alone, and what the sentence has of it and of rank 1."""


def test_a_rank_that_goes_another_way_is_named_on_all_ranks(tmp_path: Path, thorough: bool) -> None:
    """In every run every fourth of the faults, of which each is a wait of seconds."""
    faults = FAULTS if thorough else FAULTS[::4]
    cases: list[Case] = [(act, strategy, {}) for act, strategy, _ in faults]
    for (act, strategy, (first, second)), sentence in zip(faults, heard_by_all(2, tmp_path, cases), strict=True):
        place = re.fullmatch(r"the ranks are out of step: rank 0 is (.*), rank 1 is (.*); every rank must .*", sentence)
        assert place is not None, (act, strategy, sentence)
        assert first in place[1], (act, strategy, sentence)
        assert second in place[2], (act, strategy, sentence)


LEGAL: list[Case] = [
    *((act, "zero2", {}) for act in (
        tied_weight_read_elsewhere, evaluates, micro_batch_more, does_not_reach_a_unit, skips_a_batch_that_raises,
        keeps_the_full_state, is_slow)),
    *((act, "megatron", {}) for act in (evaluates, is_slow)),
    *((act, "zero3", {}) for act in (tied_weight_read_elsewhere, keeps_its_state, is_slow)),
]  # fmt: skip


def test_what_ddp_allows_and_slow_ranks_train(tmp_path: Path, thorough: bool) -> None:
    assert not any(heard_by_all(2, tmp_path, LEGAL if thorough else LEGAL[1::2]))


@pytest.mark.thorough
def test_groups_of_ranks_and_collectives_of_others_are_watched_too(tmp_path: Path) -> None:
    every = Zeropp(quantize_weights=True, secondary_shards=True, quantize_gradients=True)
    cases: list[Case] = [
        (late_gradient, "zero2", {"node_size": 2}),
        (late_gradient, "zero2", {"shard_group": 2}),
        (late_gradient, "zero2", {"mode": "vendor"}),
        (micro_batch_more, "zero3", {"node_size": 2}),
        (micro_batch_more, "zero3", {"shard_group": 2}),
        (reads_parameters, "zero3", {"node_size": 2, "zeropp": every}),
    ]
    for case, sentence in zip(cases, heard_by_all(4, tmp_path, cases), strict=True):
        assert sentence.startswith("the ranks are out of step: rank 0 is waiting in "), (case, sentence)
    slow: list[Case] = [(is_slow, strategy, options) for _, strategy, options in cases[1::2]]
    (tmp_path / "slow").mkdir()
    assert not any(heard_by_all(4, tmp_path / "slow", slow))


def test_a_rank_that_has_left_is_named(tmp_path: Path) -> None:
    cases: list[Case] = [(leaves, "zero2", {}), (leaves_before_gathers, "zero2", {})]
    heard, left = run_ranks(2, hear_all, str(tmp_path), cases, 1.0)
    assert [said for said, _ in left] == ["left"] * 2
    # rank 0 is in the next forward, which waits for gathers, or has them all and waits for a reduction; or at the end
    # of its step, which launches the gathers, or in the forward after it if it had launched them before it knew
    places = (
        r"(forward|backward)\(\) at .* (gather|reduction) \d of bucket \d .* in step 1",
        r"(step\(\) at .* gather \d of bucket \d .* in step 1|forward\(\) at .* gather \d of bucket \d .* in step 2)",
    )
    for (said, seconds), where in zip(heard, places, strict=True):
        words = rf"rank 1 ended, or did not answer, while rank 0 is waiting in {where}: "
        assert re.match(words, said), heard
        assert seconds < SOON_S, heard


def waits(rank: int, channel: str, **launched: int) -> Position:
    return Position(rank, f"at {channel}", launched, channel, launched[channel], [0, 1, 2])


def test_ranks_that_wait_in_a_circle_are_told_from_slow_ones() -> None:
    a, b = waits(0, "a", a=2, b=1), waits(1, "b", a=1, b=2)
    assert wait_cycle([a, b]) == [a, b]
    assert wait_cycle([a]) == [], "rank 1 computes"
    assert wait_cycle([a, waits(1, "b", a=2, b=2)]) == [], "rank 0's wait is about to end"
    assert wait_cycle([a, Position(1, "", {"a": 1})]) == [], "rank 1 does not wait"
    c = waits(2, "a", a=2, b=2)
    assert wait_cycle([a, b, c]) == [a, b, c], "rank 2 waits for rank 1, which will never come"
    apart = Position(2, "", {"a": 2, "b": 2, "c": 1}, "c", 1, [2])
    assert wait_cycle([a, b, apart]) == [a, b], "nobody else is to launch it"
    assert out_of_step.out_of_step([b, a, c]).startswith(
        "the ranks are out of step: ranks 0 and 2 are at a, rank 1 is at b; every"
    )
    one, other = Position(0, "here", {"a": 1}), Position(1, "here", {"a": 1, "b": 3})
    assert "ranks 0 and 1 are here, of b rank 0 had 0, rank 1 had 3; every rank" in out_of_step.out_of_step(
        [one, other]
    )


class CountedStore(dist.Store):
    """A store that counts the requests to it."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self.requests = 0
        for name in ("get", "set", "add", "check", "wait", "compare_set"):
            setattr(self, name, self._counted(getattr(store, name)))

    def _counted(self, request: Callable[..., Any]) -> Callable[..., Any]:
        def count(*arguments: Any) -> Any:
            self.requests += 1
            return request(*arguments)

        return count


@on_ranks(2)
def test_steps_ask_the_store_for_nothing(rank: int, n: int, tmp_path: Path) -> None:
    """Neither the watch nor gloo; a question that the watch would ask is seen."""
    dist.barrier()
    dist.destroy_process_group()
    store = CountedStore(dist.FileStore(f"{tmp_path}/counted", n))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n)
    for strategy in ("zero1", "zero2", "zero3"):
        model = Odd()
        engine = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
        before = store.requests
        train(engine, rank, steps=5)
        assert store.requests == before, strategy
    out_of_step.hang_watch(dist.group.WORLD)._message()
    assert store.requests == before + 1
