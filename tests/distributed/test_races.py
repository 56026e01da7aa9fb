"""Overlapped and serialized runs agree to the bit, with freed buffers poisoned; and planted races are seen.

    serialized   every collective is waited for where it is launched: nothing overlaps
    late         a send leaves after a random delay and waiters sleep first: the widest windows that the scheme allows
    poisoned     freed storages of parameters, and gradients that were sent, are NaN; their memory stays, to be read

A run that is late and poisoned must be equal to a serialized one. `Plants` are the mistakes that it must catch.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any
from unittest import mock

import pytest
import torch

from tests import zoo
from tests.distributed import training
from tests.ranks import on_ranks
from zerobench.zero.bucket import GradientBucket
from zerobench.zero.comm import gloo
from zerobench.zero.comm.base import Handle

MOST_DELAY_S = 5e-4
PLANTED_DELAY_S = 5e-3
"""Delay of sends that rank 0 forgets: the others' come first, so that it is done before its own have left."""
ALL_ONES = 0xFF
"""A byte of which every floating dtype makes NaN."""


class Transfer:
    """A send or a receive whose `wait` sleeps first; a `forgotten` one does not wait at all: a planted mistake."""

    def __init__(self, delay: Callable[[], None], forgotten: bool) -> None:
        self._delay, self.forgotten = delay, forgotten
        self.work: Any = None
        self.started = threading.Event()

    def wait(self) -> None:
        if not self.forgotten:
            self._delay()
            self.finish()

    def finish(self) -> None:
        """Waits for the transfer itself, once: gloo would wait for another one the second time."""
        self.started.wait()
        work, self.work = self.work, None
        if work is not None:
            work.wait()


class LateNetwork:
    """`send` and `receive` of comm/gloo.py, late. `forgotten`: (name, kind) of transfers nobody waits for."""

    def __init__(self, rank: int, forgotten: tuple[str, str] | None) -> None:
        self._rank, self._random = rank, random.Random(rank)
        self._forgotten = forgotten
        self._real = {"send": gloo.send, "receive": gloo.receive}
        self._tag_of, self._kinds = gloo.tag_of, {}
        self._unsent: SimpleQueue[tuple[Transfer, Callable[[], Any]] | None] = SimpleQueue()
        self._transfers: list[tuple[Transfer, torch.Tensor]] = []  # with what they move: it must outlive a mistake
        threading.Thread(target=self._send_all, daemon=True).start()

    def _delay(self) -> None:
        time.sleep(self._random.random() * MOST_DELAY_S)

    def _send_all(self) -> None:
        """Sends leave in the order of their launch, each after a delay."""
        while (one := self._unsent.get()) is not None:
            transfer, send = one
            self._delay()
            if transfer.forgotten and self._rank == 0:
                time.sleep(PLANTED_DELAY_S)
            transfer.work = send()
            transfer.started.set()

    def tag_of(self, kind: str, unit: str, size_bytes: int) -> int:
        tag = self._tag_of(kind, unit, size_bytes)
        self._kinds[tag] = kind
        return tag

    def launch(self, name: str, tensor: torch.Tensor, *where: Any) -> Transfer:
        transfer = Transfer(self._delay, (name, self._kinds[where[-1]]) == self._forgotten)
        self._transfers.append((transfer, tensor))
        if name == "send":
            self._unsent.put((transfer, lambda: self._real[name](tensor, *where)))
        else:
            transfer.work = self._real[name](tensor, *where)
            transfer.started.set()
        return transfer

    def drain(self) -> None:
        for transfer, _ in self._transfers:
            transfer.finish()
        self._unsent.put(None)


@contextmanager
def late(rank: int, forgotten: tuple[str, str] | None = None) -> Iterator[None]:
    network = LateNetwork(rank, forgotten)
    with (
        mock.patch.object(gloo, "send", partial(network.launch, "send")),
        mock.patch.object(gloo, "receive", partial(network.launch, "receive")),
        mock.patch.object(gloo, "tag_of", network.tag_of),
    ):
        yield
        network.drain()


@contextmanager
def poisoned(engine: Any) -> Iterator[list[str]]:
    """Yields the list of what has been poisoned."""
    done: list[str] = []
    resize, end_round = torch.UntypedStorage.resize_, GradientBucket.end_round

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        if size == 0 and storage.nbytes():
            done.append("storage")
            return storage.fill_(ALL_ONES)
        return storage if size == storage.nbytes() else resize(storage, size)

    def end(bucket: GradientBucket) -> None:
        end_round(bucket)
        done.append("gradients")
        if bucket.full is not None:  # the buffer stays; of it the others' slices are free
            for rank, part in enumerate(bucket.full.chunk(engine.comm.size)):
                if rank != engine.comm.rank:
                    part.fill_(float("nan"))

    resizes = mock.patch.object(torch.UntypedStorage, "resize_", resize_)
    with resizes, mock.patch.object(GradientBucket, "end_round", end):
        yield done


@contextmanager
def serialized(engine: Any) -> Iterator[None]:
    def at_once(launch: Callable[..., Handle]) -> Callable[..., Handle]:
        def launch_and_wait(*arguments: Any, **options: Any) -> Handle:
            handle = launch(*arguments, **options)
            handle.wait()
            return handle

        return launch_and_wait

    comm = engine.comm
    names = ("reduce_scatter", "all_gather", "all_reduce")
    with mock.patch.multiple(comm, **{name: at_once(getattr(comm, name)) for name in names}):
        yield


@contextmanager
def unawaited_gathers(engine: Any) -> Iterator[None]:
    """A mistake: parameters are read before their gather is waited for."""
    gather = engine.comm.all_gather
    handles: list[Handle] = []

    def all_gather(*arguments: Any) -> Handle:
        handles.append(gather(*arguments))
        return Handle([])

    with mock.patch.object(engine.comm, "all_gather", all_gather):
        yield
        for handle in handles:
            handle.wait()


UNSENT, UNRECEIVED = ("send", "reduction"), ("receive", "reduction")


STEPS = 3

RUNS: list[tuple[str, dict[str, Any]]] = [
    ("zero1", {}),
    ("zero1", {"overlap_gather": True}),
    ("zero1", {"wire_dtype": torch.bfloat16}),
    ("zero2", {}),
    ("zero2", {"overlap_gather": True}),
    ("zero2", {"wire_dtype": torch.bfloat16}),
    ("megatron", {}),
    *(("zero3", {"prefetch": depth}) for depth in range(4)),
    ("zero3", {"prefetch": 2, "keep_root": False}),
    ("zero3", {"prefetch": 2, "reshard_after_forward": False}),
    ("zero3", {"persistence_numel": 60}),
]


def train(engine: Any, rank: int, n: int) -> list[torch.Tensor]:
    """Losses and weights, as a list of tensors. Two micro-batches a step, an evaluation after each step."""
    losses = []
    for step in range(STEPS):
        for micro in range(2):
            loss = engine(*zoo.tokens(rank, n, 2 * step + micro))
            engine.backward(loss)
            losses.append(loss.detach())
        engine.step()
        with torch.no_grad():
            losses.append(engine(*zoo.tokens(rank, n, 50)))
    return [torch.stack(losses), *engine.full_state_dict().values()]


def in_series(rank: int, n: int, strategy: str, options: dict[str, Any], model: str = "tied") -> list[torch.Tensor]:
    engine = training.engine_of(strategy, zoo.build(model), **options)
    with serialized(engine):
        return train(engine, rank, n)


def overlapped(rank: int, n: int, strategy: str, options: dict[str, Any], model: str = "tied", mistake: Any = None):
    """Late and poisoned. `mistake`: transfers that are not waited for, or a context that makes one."""
    engine = training.engine_of(strategy, zoo.build(model), **options)
    with ExitStack() as stack:
        stack.enter_context(late(rank, mistake if isinstance(mistake, tuple) else None))
        done = stack.enter_context(poisoned(engine))
        if callable(mistake):
            stack.enter_context(mistake(engine))
        results = train(engine, rank, n)
    assert "gradients" in done
    assert strategy in ("zero1", "megatron") or "storage" in done
    return results


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@on_ranks(2, 3)
def test_overlapped_runs_equal_serialized_ones(rank: int, n: int, thorough: bool) -> None:
    for strategy, options in RUNS if thorough else [RUNS[4], RUNS[9]]:
        for model in ("tied", "recomputed") if strategy == "zero3" and n == 2 else ("tied",):
            expected = in_series(rank, n, strategy, options, model)
            assert all(values.isfinite().all() for values in expected)
            assert equal(overlapped(rank, n, strategy, options, model), expected), (strategy, options, model)


PLANTED: dict[str, tuple[str, dict[str, Any], Any]] = {
    "gradients given back before they are sent": ("zero2", {}, UNSENT),
    "gradients overwritten before they are sent": ("zero1", {}, UNSENT),
    "gradients summed before they have come": ("zero2", {}, UNRECEIVED),
    "parameters read before they have come": ("zero3", {"prefetch": 1}, unawaited_gathers),
    "updated parameters read before they have come": ("zero1", {"overlap_gather": True}, unawaited_gathers),
}


@pytest.mark.thorough
@on_ranks(2)
def test_planted_races_are_seen(rank: int, n: int) -> None:
    for name, (strategy, options, mistake) in PLANTED.items():
        found = overlapped(rank, n, strategy, options, mistake=mistake)
        assert not equal(found, in_series(rank, n, strategy, options)), name
