"""Checkpoints that hold less, or more, than the model that is there: in an accumulation, without frozen parameters."""

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import on_ranks
from zerobench.zero import initialize


def model_of(seed: int = 0, **more: nn.Module) -> nn.ModuleDict:
    torch.manual_seed(seed)
    base = nn.Linear(6, 6).requires_grad_(False)
    return nn.ModuleDict({"base": base, "norm": nn.BatchNorm1d(6), "adapter": nn.Linear(6, 6), **more})


class Chain(nn.Module):
    """Runs the layers one after another; `layers` are in units of zero3 of their own."""

    def __init__(self, layers: nn.ModuleDict) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x.square().mean()


def engine_of(strategy: str, layers: nn.ModuleDict) -> Any:
    model = Chain(layers)
    units: Any = {"units": tuple(layers.values())} if strategy == "zero3" else {}
    return initialize(model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True), strategy, **units)


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def train(engine: Any, rank: int, steps: range) -> dict[str, torch.Tensor]:
    for step in steps:
        engine.backward(engine(batch(rank, step)))
        engine.step()
    return engine.full_state_dict()


def equal(state: dict[str, torch.Tensor], other: dict[str, torch.Tensor], but: str = "running") -> bool:
    """Compares tensors that both have; running statistics are rank 0's in a checkpoint, and each rank's own here."""
    return all(
        torch.equal(state[name], other[name])
        for name in state
        if name in other and but not in name and "running" not in name
    )


def in_an_accumulation(rank: int, strategy: str, folder: str) -> None:
    """The gradients stay for the next step; the checkpoint has none, and is that of the last step."""
    for waits in (False, True):
        states = []
        for saves in (False, True):
            engine = engine_of(strategy, model_of())
            before = train(engine, rank, range(1))
            with engine.no_sync() if waits else nullcontext():
                engine.backward(engine(batch(rank, 1)))
            if saves:
                with pytest.raises(ValueError, match=r"save: there are gradients, .* or with without_gradients=True"):
                    engine.save(folder)
                engine.save(folder, without_gradients=True, user_state={"waits": waits})
            states.append(train(engine, rank, range(2, 3)))
        assert equal(states[0], states[1]), strategy
        fresh = engine_of("zero1", model_of(1))
        assert fresh.load(folder) == {"waits": waits}
        loaded = fresh.full_state_dict()
        parameters = {name: loaded[name] for name, _ in fresh.named_parameters()}
        assert equal(parameters, before)
        assert loaded["layers.norm.num_batches_tracked"] == 2  # the forward in between counts


def without_frozen(rank: int, strategy: str, folder: str) -> None:
    engine = engine_of(strategy, model_of())
    saved = train(engine, rank, range(2))
    engine.save(folder, exclude_frozen=True)
    expected = train(engine, rank, range(2, 3))
    other = engine_of("zero3" if strategy == "zero2" else "zero2", model_of(1))
    before = other.full_state_dict()
    missing = r"layers\.base\.weight: the model has this parameter, the checkpoint has not; strict=False keeps"
    with pytest.raises(ValueError, match=missing):
        other.load(folder)
    assert equal(before, other.full_state_dict())
    with pytest.warns(UserWarning, match=missing) if rank == 0 else warnings.catch_warnings():
        other.load(folder, strict=False)
    state = other.full_state_dict()
    assert equal(state, saved, but="base")
    assert torch.equal(state["layers.base.weight"], before["layers.base.weight"])
    keys = other.load_weights(folder, strict=False)
    assert keys.missing_keys == ["layers.base.weight", "layers.base.bias"]
    same = engine_of("zero3", model_of())  # the same base: goes on to the bit
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        same.load(folder, strict=False)
    assert equal(train(same, rank, range(2, 3)), expected)


def of_another_model(rank: int, strategy: str, folder: str) -> None:
    """Without `strict` only what both have is loaded, with its states; the rest keeps its values and states."""
    engine = engine_of(strategy, model_of(out=nn.Linear(6, 2)))
    saved = train(engine, rank, range(2))
    engine.save(folder)
    for more, shape in (({"new": nn.Linear(6, 3)}, None), ({"out": nn.Linear(6, 3)}, "shape")):
        other = engine_of(strategy, model_of(1, **more))
        before = train(other, rank, range(1))
        states = {key: value.clone() for key, value in _states(other).items()}
        if shape:
            with pytest.raises(ValueError, match=r"layers\.out\.weight: its shape is \[2, 6\] in the checkpoint"):
                other.load(folder, strict=False)
            assert equal(before, other.full_state_dict())
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            other.load(folder, strict=False)
        state = other.full_state_dict()
        assert equal(state, saved)
        assert all(torch.equal(state[name], before[name]) for name in ("layers.new.weight", "layers.new.bias"))
        theirs, now = _states(engine), _states(other)
        for name, value in now.items():
            assert torch.equal(value, (states if "new" in name else theirs)[name]), name
        train(other, rank, range(3))


def _states(engine: Any) -> dict[str, torch.Tensor]:
    names = ((engine.names[one.span.parameter], one) for one in engine.segments)
    return {f"{name} {one.span.start}": engine.optimizer.state[one.tensor]["exp_avg"] for name, one in names}


@on_ranks(2)
def test_partial_checkpoints(rank: int, n: int, tmp_path: Path) -> None:
    for scenario in (in_an_accumulation, without_frozen, of_another_model):
        for strategy in ("zero2", "zero3"):
            scenario(rank, strategy, f"{tmp_path}/{scenario.__name__}-{strategy}")
