"""Optimizer states: whole, by name; taken over from a plain run; torch's functions for them."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from tests import zoo
from tests.distributed.training import assert_alike, assert_equal, take_steps
from tests.ranks import on_ranks
from zerobench.zero import STAGES, MuonWithAdamW, NvmeOffload, Offload, initialize
from zerobench.zero.low_bit import AdamW8bit, AdamWBf16
from zerobench.zero.optim.muon import split

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda model: optim.AdamW(model.parameters(), lr=1e-2, fused=True, amsgrad=True),
    "foreach": lambda model: optim.Adam(model.parameters(), lr=1e-2, foreach=True),
    "sgd": lambda model: optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "nadam": lambda model: optim.NAdam(model.parameters(), lr=1e-2, foreach=False),
    "adagrad": lambda model: optim.Adagrad(model.parameters(), lr=1e-2),
    "8bit": lambda model: AdamW8bit(model.parameters(), lr=1e-2),
    "bf16": lambda model: AdamWBf16(model.parameters(), lr=1e-2),
    "muon": lambda model: muon(model),
}


def muon(model: nn.Module) -> optim.Optimizer:
    matrices, rest = split(model, ["not_2d", "embeddings", "head"])
    return MuonWithAdamW([{"params": matrices, "owned": True}, {"params": rest, "owned": False}])


def stepped(name: str, rank: int, n: int, steps: int) -> tuple[nn.Module, optim.Optimizer]:
    model = zoo.build("lists")
    optimizer = OPTIMIZERS[name](model)
    for step in range(steps):
        zoo.step_plainly(model, optimizer, rank, n, [step])
    return model, optimizer


def taken_over(rank: int, n: int, folder: Path, thorough: bool) -> None:
    """A plain run of two steps goes on under each stage and tier as it would have gone on plainly, to the bit."""
    tiers: list[tuple[str, str, dict[str, Any]]] = [
        *((name, "zero2", {}) for name in OPTIMIZERS),
        *(("adamw", strategy, {}) for strategy in STAGES),
        *(("sgd", "zero3", {}), ("nadam", "zero1", {}), ("8bit", "zero3", {"offload": Offload()})),
        *(("adamw", strategy, {"offload": Offload()}) for strategy in ("zero1", "zero2")),
        ("adamw", "zero3", {"offload": Offload(parameters=True)}),
        ("adamw", "zero3", {"offload": NvmeOffload(path=folder, parameters=True)}),
    ]
    tiers = tiers if thorough else [tier for tier in tiers if tier[0] in ("adamw", "8bit", "muon")][::2]
    plain = {name: stepped(name, rank, n, 4) for name in {tier[0]: None for tier in tiers}}
    for name, strategy, options in tiers:
        model, optimizer = stepped(name, rank, n, 2)
        engine = initialize(model, optimizer, strategy, bucket_bytes=4096, **options)
        if "offload" in options:
            engine.save(folder / strategy)  # before the first step: the states are as taken over
            engine.load(folder / strategy)
        take_steps(engine, rank, n, (2, 3))
        expected, kept = plain[name]
        assert_alike(engine, expected, name, strategy)
        for key, parameter in expected.named_parameters():
            states = engine.full_optimizer_state(key)
            assert states.keys() == kept.state[parameter].keys()
            for state, value in kept.state[parameter].items():
                alike = torch.equal(states[state].flatten(), value.flatten()) if torch.is_tensor(value) else None
                assert states[state] == value if alike is None else alike, (name, strategy, key, state)


def whole_states(rank: int, n: int) -> None:
    """The whole state of a parameter, of any memory order, on one rank or on all; none before the first update."""
    model = zoo.build("lists")
    engine = initialize(model, OPTIMIZERS["adamw"](model), "zero3")
    name = "blocks.1.0.up.weight"
    assert engine.full_optimizer_state(name) == {}
    take_steps(engine, rank, n, range(1))
    state = engine.full_optimizer_state(name)
    assert state["exp_avg"].shape == (3 * zoo.WIDTH + 1, zoo.WIDTH)
    assert state["step"] == 1
    assert (engine.full_optimizer_state(name, rank0_only=True) == {}) == (rank > 0)
    with pytest.raises(ValueError, match=r"did you mean blocks\.1\.0\.up\.weight"):
        engine.full_optimizer_state("blocks.1.0.up.weigth")


def refused(rank: int, n: int) -> None:
    """States that differ between ranks; torch's functions, which know whole parameters alone."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    model, optimizer = stepped("adamw", rank, n, 1)
    other, changed = copy.deepcopy((model, optimizer))
    changed.state[other.head.weight]["exp_avg"] += rank
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(ValueError, match="its states differ between the ranks"):
        initialize(other, changed, "zero2")
    assert_equal(before, other.state_dict())
    uneven = torch.nn.Sequential(torch.nn.Linear(6, 6 + rank), torch.nn.Linear(6 + rank, 6))  # of equal flat sizes
    with pytest.raises(ValueError, match="shapes, dtypes or requires_grad of its parameters or buffers differ between"):
        initialize(uneven, OPTIMIZERS["adamw"](uneven))
    plain = get_optimizer_state_dict(model, optimizer)
    engine = initialize(model, optimizer, "zero2")
    with pytest.raises(RuntimeError, match=r"get_optimizer_state_dict .* engine\.full_optimizer_state\(name\)"):
        get_optimizer_state_dict(model, engine.optimizer)
    with pytest.raises(KeyError, match=r"set_optimizer_state_dict .* engine\.load\(path\)"):
        set_optimizer_state_dict(model, engine.optimizer, plain)
    take_steps(engine, rank, n, range(1))


@on_ranks(2)
def test_states_are_taken_over_and_returned_whole(rank: int, n: int, tmp_path: Path, thorough: bool) -> None:
    taken_over(rank, n, tmp_path, thorough)
    whole_states(rank, n)
    refused(rank, n)
