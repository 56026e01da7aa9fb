"""Activations on their way to the host and back, in one process: bytes by tier, races on a modeled GPU, mistakes."""

import copy
import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.distributed.streams import ModeledCuda, RaceDetector
from zerobench.probes import AccountedPass
from zerobench.zero.activations import policies
from zerobench.zero.activations.offload import OffloadedStorage, Offloader, StreamPair
from zerobench.zero.activations.policies import POLICIES, ActivationPolicy
from zerobench.zero.comm import backends

WIDTH, ROWS, BLOCKS = 64, 32, 5
BYTES = 4 * WIDTH * ROWS
SLABS = ActivationPolicy(recompute=True, keep="slab")


class Block(nn.Module):
    """Saves its input and what it makes of it, BYTES each, and its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).sin()


def model_of(policy: ActivationPolicy, block: Callable[[], nn.Module] = Block, blocks: int = BLOCKS) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(block() for _ in range(blocks)))
    policies.apply(model, replace(policy, least_bytes=BYTES))
    return model


def inputs() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    model(inputs()).square().sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


ON_HOST = {
    "none": 0, "checkpoint": 0, "selective": 0, "offload": 2 * (BLOCKS - 1), "checkpoint_offload": BLOCKS - 1,
    "partition": 0, "partition_offload": BLOCKS - 1,
}  # fmt: skip
"""Tensors of BYTES: what blocks save, but the last; without a mesh parts are wholes."""


@pytest.mark.parametrize("name", POLICIES)
def test_bytes_lie_where_the_policy_says(name: str) -> None:
    """And go over the bus once each way; the last block's stay; nothing is left when backward is over."""
    model = model_of(POLICIES[name])
    with AccountedPass(torch.device("cpu")) as probe:
        probe.adopt(model)
        for _ in range(2):
            with probe.step(measured=True):
                with probe.phase("forward"):
                    loss = model(inputs()).square().sum()
                with probe.phase("backward"):
                    loss.backward()
                    del loss
    host = {(r.tier, r.category): r.max_bytes for r in probe.memory_rows(0) if r.phase == "step" and r.tier == "host"}
    assert host.get(("host", "activations"), 0) == ON_HOST[name] * BYTES
    moved = dict.fromkeys(("down", "up"), 0)
    for row in probe.traffic_rows(0):
        moved[row.kind] += row.payload_bytes
    assert moved == dict.fromkeys(("down", "up"), 2 * ON_HOST[name] * BYTES)
    last = probe.timeline_rows(0)[-1]
    assert (last.host_bytes, last.activations_bytes) == (0, 0)


def most_activations(model: nn.Module) -> int:
    """The most bytes of activations in a forward."""
    with AccountedPass(torch.device("cpu")) as probe:
        probe.adopt(model)
        with probe.step(measured=True), probe.phase("forward"):
            model(inputs())
    return next(r.max_bytes for r in probe.memory_rows(0) if (r.phase, r.category) == ("step", "activations"))


def test_two_blocks_are_on_the_device_at_most() -> None:
    """Twice as many blocks need nothing more there, unlike without a policy."""

    def most(name: str, blocks: int) -> int:
        return most_activations(model_of(POLICIES[name], blocks=blocks))

    assert most("none", 10) - most("none", 5) == 5 * 2 * BYTES
    assert most("offload", 10) == most("offload", 5) < most("none", 5)
    assert most("checkpoint_offload", 10) == most("checkpoint_offload", 5) < most("checkpoint", 5)


def test_selective_recomputation_keeps_every_second_product_and_attention() -> None:
    """And computes what is between them again, to the bit."""

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query, key, value = (linear(x).view(1, 1, ROWS, WIDTH) for linear in (self.query, self.key, self.value))
            mixed = nn.functional.scaled_dot_product_attention(query, key, value).view(ROWS, WIDTH)
            return x + self.out(mixed).sin()

    def kept(name: str, blocks: int) -> int:
        model = nn.Sequential(*(Attends() for _ in range(blocks)))
        policies.apply(model, POLICIES[name])
        return most_activations(model)

    outputs = {"checkpoint": 0, "selective": 3}  # query and value of the four products, and attention's output
    for name, count in outputs.items():
        grown = kept(name, 6) - kept(name, 5)
        assert grown == BYTES * (1 + count) + (4 * ROWS if count else 0)  # with the sums of attention's softmax
    found = {}
    for name in ("none", "selective"):
        model = model_of(POLICIES[name], Attends)
        found[name] = gradients_of(model)
    assert all(torch.equal(one, other) for one, other in zip(*found.values(), strict=True))


@pytest.mark.shown(2)
@pytest.mark.slow
@pytest.mark.parametrize("policy", [*POLICIES.values(), SLABS])
def test_what_autograd_lets_go_of_is_gone_without_the_garbage_collector(policy: ActivationPolicy) -> None:
    gc.collect()
    gc.disable()
    try:
        born: list[Any] = []
        with mock.patch.object(OffloadedStorage, "__del__", lambda moved: born.append(moved._host.numel())):
            model = model_of(policy)
            gradients_of(model)
            dropped = model(inputs())  # a graph that no backward comes to
            del dropped
        kept = 2 * (BLOCKS - 1) if not policy.recompute else BLOCKS - 1
        assert len(born) == (2 * kept if policy.keep == "host" else 0)
    finally:
        gc.enable()


def test_one_memory_travels_once_and_views_come_back_with_their_strides() -> None:
    seen: list[tuple[int, ...]] = []

    class Views(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            whole = x * 2.0
            left, right = whole[:, ::2], whole.t()[1::2]
            y = left * right.t()
            y.register_hook(lambda _: seen.extend(saved.stride() for saved in stored(y)))
            return torch.cat((y, y), dim=1) + x

    def stored(y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return y.grad_fn._saved_self, y.grad_fn._saved_other

    model = model_of(POLICIES["offload"], Views, blocks=2)
    x = inputs().requires_grad_()
    with AccountedPass(torch.device("cpu")) as probe, probe.step(measured=True):
        model(x).sum().backward()
    assert [row.payload_bytes for row in probe.traffic_rows(0) if row.kind == "down"] == [BYTES]
    assert set(seen) == {(WIDTH, 2)}
    plain = inputs().requires_grad_()
    model_of(POLICIES["none"], Views, blocks=2)(plain).sum().backward()
    assert torch.equal(x.grad, plain.grad)


class Overwriting(nn.Module):
    """Writes to what autograd has saved; torch refuses the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 1.5
        z = y.sin()
        y.add_(1.0)
        return z


@pytest.mark.parametrize("least_bytes", [BYTES, BYTES + 1], ids=["moved", "kept"])
def test_a_saved_tensor_that_is_written_to_is_an_error_as_it_is_without(least_bytes: int) -> None:
    for policy, words in ((POLICIES["none"], "modified by an inplace operation"), (POLICIES["offload"], "written to")):
        model = nn.Sequential(Block(), Overwriting(), Block(), Block())
        policies.apply(model, replace(policy, least_bytes=least_bytes))
        with pytest.raises(RuntimeError, match=words):
            model(inputs()).sum().backward()


def test_backward_may_come_twice_and_a_graph_may_be_needed_of_it() -> None:
    model = model_of(POLICIES["offload"])
    loss = model(inputs()).square().sum()
    loss.backward(retain_graph=True)
    once = [parameter.grad.clone() for parameter in model.parameters()]
    loss.backward()
    assert all(torch.equal(parameter.grad, 2 * one) for parameter, one in zip(model.parameters(), once, strict=True))
    x = inputs().requires_grad_()
    found = []
    for policy in (POLICIES["none"], POLICIES["offload"]):
        (gradient,) = torch.autograd.grad(model_of(policy)(x).sin().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(gradient.square().sum(), x)[0])
    assert torch.equal(*found)


@pytest.mark.parametrize("policy", [*POLICIES.values(), SLABS])
def test_a_copy_of_the_model_is_plain_and_its_own(policy: ActivationPolicy) -> None:
    model = model_of(policy)
    twin = copy.deepcopy(model)
    assert not any(isinstance(block.forward, policies.Wrapped) for block in twin)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(twin(inputs()), inputs())
    assert all(torch.equal(a, b) for a, b in zip(gradients_of(model), gradients_of(model_of(policy)), strict=True))


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"activation: Linear has no blocks .* nn\.ModuleList"):
        policies.apply(nn.Linear(3, 3), POLICIES["offload"])


# -- on a modeled GPU (host/pipes.py) -----------------------------------------------------------------------


def races_of(policy: ActivationPolicy) -> list[str]:
    """Returns the races of two steps on the lanes of a GPU, with a forward between them that has no backward."""
    cuda = ModeledCuda()
    on_gpu = {"cpu": StreamPair(backends.CommStream(cuda), backends.CommStream(cuda))}
    with mock.patch.dict(policies.KEEPERS, {"host": lambda least: Offloader(least, on_gpu)}):
        model = model_of(policy)
    with RaceDetector(cuda) as detector:
        for _ in range(2):
            gradients_of(model)
            x = model[:3](inputs())
            torch.autograd.grad(model[3:](x).sum(), x)  # what comes before has been fetched, and nobody asks for it
            del x
    assert all(stream.clock.get(stream.number) for stream in cuda.streams[1:])
    return detector.races


@pytest.mark.parametrize("name", ["offload", "checkpoint_offload"])
def test_no_race(name: str) -> None:
    assert races_of(POLICIES[name]) == []


def unawaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends.StreamWork, "wait", lambda one: None)


def let_go_of_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def free_device(moved: OffloadedStorage) -> None:
        moved._views, moved._on_device = [], None

    monkeypatch.setattr(OffloadedStorage, "free_device", free_device)


def dropped_while_it_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(OffloadedStorage, "__del__")
    monkeypatch.delattr(backends.StreamWork, "__del__")


@pytest.mark.parametrize("mistake", [unawaited, let_go_of_at_once, dropped_while_it_travels])
def test_planted_mistakes_are_races(mistake: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch)
    assert races_of(POLICIES["offload"]) != []
