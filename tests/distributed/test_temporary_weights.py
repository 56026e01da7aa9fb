"""`engine.temporary_weights`: a loop that evaluates with averages trains on as if it had not, to the bit."""

from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests import zoo
from tests.distributed.test_writes import HALF, kinds, other_state
from tests.distributed.test_zeropp import SDP4BIT
from tests.distributed.training import assert_equal, assert_same, engine_of, loss_of, take_steps
from tests.ranks import on_ranks
from zerobench.zero import STAGES, Zeropp, labels
from zerobench.zero.labels import Observer
from zerobench.zero.modules.wrapping import in_normal_mode

LOSSY: list[tuple[str, str, torch.dtype, dict[str, Any]]] = [
    ("zero3", "tied", HALF, {"zeropp": SDP4BIT, "node_size": 2}),
    ("zero3", "tied", torch.float32, {"zeropp": Zeropp(True, True, True, 64, 64), "node_size": 2}),
]


def evaluate(engine: Any, averages: dict[str, torch.Tensor], inputs: Any, is_exact: bool) -> None:
    """Evaluates as a plain module with these weights does, and reads them."""
    plain = zoo.build("tied" if hasattr(engine.module, "recompute") else "unused")
    plain = plain.to(next(engine.module.parameters()).dtype)
    plain.load_state_dict(averages)
    plain.calls = calls = getattr(engine.module, "calls", 0)
    with engine.temporary_weights(averages) as module:
        loss = loss_of(engine(*inputs)).item()
        state = engine.full_state_dict()
        with engine.full_parameters(), torch.no_grad():
            next(module.parameters()).zero_()  # goes with the other weights
    module.calls = calls
    assert_equal(state, plain.state_dict())
    if is_exact:
        assert loss == loss_of(plain(*inputs)).item()


MODES = (nullcontext, torch.no_grad, torch.inference_mode)


def check_that_it_trains_on(
    rank: int, n: int, cases: list[tuple[str, str, torch.dtype, dict[str, Any]]], every_mode: bool
) -> None:
    """Each engine evaluates in one of the modes by turns, unless in `every_mode`."""
    for number, (stage, name, dtype, options) in enumerate(cases):
        averages = other_state(name, torch.float32)
        ends = []
        for mode in (None, *(MODES if every_mode else MODES[number % 3 :][:1])):
            engine = engine_of(stage, zoo.build(name).to(dtype), **options)
            losses = take_steps(engine, rank, n, range(2))
            if mode is not None:
                with mode():
                    evaluate(engine, averages, zoo.tokens(rank, n, 9), "zeropp" not in options)
            losses += take_steps(engine, rank, n, range(2, 4))
            ends.append((losses, in_normal_mode(engine.state_dict)()["tensors"]))
            assert ends[0][1].keys() == ends[-1][1].keys()
            assert_same(ends[-1], ends[0], stage, name, dtype, options, mode)


@on_ranks(2, 1)
def test_evaluation_with_averages_leaves_training_as_it_was(rank: int, n: int, tmp_path: Path, thorough: bool) -> None:
    check_that_it_trains_on(rank, n, kinds(n, tmp_path, 1 if thorough else 3), thorough)


@pytest.mark.thorough
@on_ranks(4)
def test_evaluation_with_averages_leaves_secondary_shards_as_they_were(rank: int, n: int) -> None:
    check_that_it_trains_on(rank, n, LOSSY, every_mode=True)


class Normalized(nn.Module):
    """Buffers that a forward updates, one that is replaced, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(2))
        self.frozen = nn.Linear(8, 1).requires_grad_(False)
        self.register_buffer("last", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        self.last = self.last + 1
        return self.frozen(x).square().mean()


@on_ranks(2)
def test_buffers_and_frozen_parameters_are_put_back(rank: int, n: int) -> None:
    """Statistics of the averages are computed inside, as torch's update_bn does, and do not stay."""
    batches = [torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * rank + step)) for step in range(4)]
    for stage in STAGES:
        ends = []
        for swaps in (False, True):
            engine = engine_of(stage, Normalized())
            for step, batch in enumerate(batches):
                engine.backward(engine(batch))
                engine.step()
                if swaps and step == 1:
                    averages = {name: value * 0.5 for name, value in engine.full_state_dict().items()}
                    with engine.temporary_weights(averages), torch.no_grad():
                        assert torch.equal(engine.full_state_dict()["frozen.weight"], averages["frozen.weight"])
                        engine(batch)
            ends.append(engine.full_state_dict())
        assert_equal(ends[1], ends[0], stage)


@on_ranks(2)
def test_training_and_saving_inside_are_refused(rank: int, n: int) -> None:
    for stage in STAGES:
        engine = engine_of(stage, zoo.build("tied").to(HALF))
        take_steps(engine, rank, n, range(1))
        before = engine.state_dict()["tensors"]
        weight = torch.ones(zoo.WORDS, zoo.WIDTH)
        for wrong, words in (
            ({"n_averaged": torch.ones(())}, r"n_averaged: the module has no parameter or buffer .*averaged\.module"),
            ({"embedding.weight": weight[1:]}, r"embedding\.weight: it is of shape \(36, 19\).* of shape \(37, 19\)"),
            ({"embedding.weight": weight.to_sparse()}, r"torch\.sparse_coo, on cpu; give a dense tensor"),
            ({"embedding.weight": weight.long()}, r"its dtype is torch\.int64; give values of a floating"),
            (zoo.build("tied"), "weights: it is a Tied; give tensors by name"),
        ):
            with pytest.raises(ValueError, match=words), engine.temporary_weights(wrong):
                pass
        inside = pytest.raises(RuntimeError, match=r"leave `with engine\.full_parameters\(\)` first")
        with inside, engine.full_parameters(), engine.temporary_weights({}):
            pass
        with engine.temporary_weights({"embedding.weight": weight}):
            loss = loss_of(engine(*zoo.tokens(rank, n, 1)))
            calls = {"backward": loss, "save": "x", "load": "x", "load_weights": "x", "load_state_dict": {}}
            inside = r"inside `with engine\.temporary_weights"
            for name in (*calls, "step", "state_dict", "sync_parameters"):
                with pytest.raises(RuntimeError, match=f"^{name}: {inside}"):
                    getattr(engine, name)(*[calls[name]] if name in calls else [])
            with pytest.raises(RuntimeError, match=f"^temporary_weights: {inside}"), engine.temporary_weights({}):
                pass
        with pytest.raises(RuntimeError):  # its parameters are gone
            engine.backward(loss)
        engine.zero_grad()
        with pytest.raises(KeyError), engine.temporary_weights({"embedding.weight": weight}):
            raise KeyError  # on every rank
        assert_equal(engine.state_dict()["tensors"], before)
        take_steps(engine, rank, n, range(1, 2))


class Copies(Observer):
    """Bytes of model states that get a label, by tier."""

    def __init__(self) -> None:
        self.sizes: Counter[str | None] = Counter()

    def on_tensor(self, tensor: torch.Tensor, category: str, name: str, tier: str | None) -> None:
        if category in (labels.PARAMETERS, labels.MASTER):
            self.sizes[tier] += tensor.nbytes


@pytest.mark.parametrize(
    ("stage", "dtype", "size"),
    [("zero1", torch.float32, 4), ("zero1", HALF, 0), ("zero3", torch.float32, 4), ("zero3", HALF, 4)],
)
def test_device_has_no_second_copy_of_masters(stage: str, dtype: torch.dtype, size: int) -> None:
    """Masters beside half parameters restore these, and others wait in host memory."""
    engine = engine_of(stage, zoo.build("tied").to(dtype))
    take_steps(engine, 0, 1, range(1))
    labels.listen(copies := Copies())
    try:
        with engine.temporary_weights(other_state("tied", dtype)):
            pass
    finally:
        labels.unlisten(copies)
    assert copies.sizes == ({labels.HOST: size * sum(unit.shard_numel for unit in engine.units)} if size else {})
