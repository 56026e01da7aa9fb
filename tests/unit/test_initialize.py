"""Refusals of `initialize`, by name and with the reason."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zerobench


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), fused=True)


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (lambda m: torch.optim.LBFGS(m.parameters()), "LBFGS cannot be sharded: its line search"),
        (lambda m: torch.optim.Adafactor(m.parameters()), "Adafactor cannot be sharded: it factors"),
        (lambda m: torch.optim.SparseAdam(list(m.parameters())), "SparseAdam cannot be sharded: it takes sparse"),
        (lambda m: torch.optim.Muon([m.weight]), "Muon cannot be sharded: it orthogonalizes"),
        (lambda m: torch.optim.SGD([*m.parameters(), nn.Parameter(torch.ones(2))], lr=0.1), "1 trainable tensors"),
    ],
)
def test_optimizers_that_cannot_be_sharded(optimizer, words: str) -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=words):
        zerobench.initialize(model, optimizer(model), "zero2")


def test_an_optimizer_that_has_stepped() -> None:
    for kind in (torch.optim.AdamW, torch.optim.SGD):
        model = nn.Linear(4, 4)
        optimizer = kind(model.parameters(), lr=0.1, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        with pytest.raises(ValueError, match="already taken a step"):
            zerobench.initialize(model, optimizer, "zero1")


@pytest.mark.parametrize(
    ("strategy", "options", "words"),
    [
        ("zero4", {}, "'zero4' is unknown; did you mean zero"),
        ("zero2", {"bucket_byte": 5}, "bucket_byte: no such option; did you mean bucket_bytes"),
        ("zero2", {"bucket_bytes": 5}, "bucket_bytes: 5 cannot be"),
        ("zero3", {"prefetch": -1}, "prefetch: -1 cannot be"),
        ("zero2", {"bucket_bytes": 25e6}, "bucket_bytes: 25000000.0 cannot be"),
        ("zero3", {"units": (nn.Linear(1, 1),)}, "Linear is not a submodule"),
    ],
)
def test_options(strategy: str, options: dict, words: str) -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=words):
        zerobench.initialize(model, adam(model), strategy, **options)


def test_precisions_and_sparse_gradients() -> None:
    half = nn.Linear(4, 4, dtype=torch.complex64)
    with pytest.raises(ValueError, match=r"weight: its dtype is torch.complex64"):
        zerobench.initialize(half, torch.optim.SGD(half.parameters(), lr=0.1))
    sparse = nn.Sequential(nn.Embedding(4, 4, sparse=True))
    with pytest.raises(ValueError, match="0: it asks for sparse gradients"):
        zerobench.initialize(sparse, torch.optim.SGD(sparse.parameters(), lr=0.1))


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_without_a_process_group_it_is_a_world_of_one(strategy: str) -> None:
    torch.manual_seed(0)
    plain, model = nn.Linear(5, 3), nn.Linear(5, 3)
    model.load_state_dict(plain.state_dict())
    oracle = adam(plain)
    engine = zerobench.initialize(model, adam(model), strategy)
    for step in range(5):
        x = torch.randn(2, 5, generator=torch.Generator().manual_seed(step))
        plain(x).square().mean().backward()
        oracle.step()
        oracle.zero_grad()
        engine.backward(engine(x).square().mean())
        engine.step()
    state = engine.full_state_dict()
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())


def test_backward_must_go_through_the_engine() -> None:
    model = nn.Linear(4, 4)
    engine = zerobench.initialize(model, adam(model))
    with pytest.raises(RuntimeError, match=r"engine\.backward"):
        engine(torch.ones(4)).sum().backward()


class Shares(nn.Module):
    """A weight whose memory another tensor of the model has."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16, bias=False)
        if how == "tied by .data":
            self.head.weight.data = self.embedding.weight.data
        elif how == "a buffer":
            self.head.register_buffer("kept", self.embedding.weight.data)
        elif how == "a view in an attribute":
            self.head.kept = self.embedding.weight.t()
        elif how == "rows in a list":
            self.rows = [self.embedding.weight.detach()[3:5]]


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "megatron"])
@pytest.mark.parametrize("how", ["tied by .data", "a buffer", "a view in an attribute", "rows in a list"])
def test_memory_that_is_shared_is_refused(how: str, strategy: str) -> None:
    model = Shares(how)
    with pytest.raises(ValueError, match=r"its memory is also that of embedding\.weight.*tie modules by one Parameter"):
        zerobench.initialize(model, adam(model), strategy)


def test_memory_that_is_shared_without_harm_is_accepted() -> None:
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    frozen = Shares("a buffer")
    frozen.embedding.requires_grad_(False)
    flat = torch.zeros(20)
    parts = nn.Linear(4, 4)
    parts.weight.data, parts.bias.data = flat[:16].view(4, 4), flat[16:]
    spectral = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)))
    for model in (tied, frozen, parts, spectral, nn.GRU(4, 4)):
        zerobench.initialize(model, adam(model), "zero2")
