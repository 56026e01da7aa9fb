"""A model built on the meta device: the values of a plain construction, and never ψ on a rank of stage 3."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.training import assert_equal
from tests.ranks import on_ranks
from zerobench.models import MLP
from zerobench.models.gpt import GPT
from zerobench.probes.ledger import Ledger
from zerobench.zero import STAGES, initialize, labels


class Mixed(nn.Module):
    """Convolutions, BatchNorm's buffers, an embedding with padding, a frozen layer, a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8, padding_idx=0)
        self.layers = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Bilinear(4, 4, 5))
        self.frozen = nn.Linear(7, 3).requires_grad_(False)
        self.scale = nn.Parameter(torch.empty(3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.scale)


class Parent(nn.Module):
    """Sets its children's parameters: in whole, by `.data`, by their own method, from one another, and by a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(9, 9) for _ in range(4))
        self.scale = nn.Parameter(torch.empty(3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        constant, copied, drawn, scaled = self.layers
        nn.init.ones_(self.scale)
        nn.init.constant_(constant.weight, 0.3)
        copied.bias.data.normal_(std=0.02)
        drawn.reset_parameters()
        with torch.no_grad():
            copied.weight.copy_(drawn.weight)
            scaled.weight.mul_(0.5)
            scaled.bias.data /= 4


def gpt(tied: bool = True, **more: int) -> nn.Module:
    return GPT(3, 48, 4, 61, 16, tied, False, **more)


BUILDERS: dict[str, Any] = {
    "gpt": gpt,
    "untied": lambda: gpt(tied=False),
    "tiles": lambda: gpt(tiles=3),
    "adapters": lambda: gpt(lora=4),
    "mlp": lambda: MLP(3, 24, 50),
    "mixed": Mixed,
    "parent": Parent,
    "channels last": lambda: Mixed().to(memory_format=torch.channels_last),
}


@on_ranks(1, 2, 3)
def test_the_values_are_those_of_a_plain_construction(rank: int, n: int, thorough: bool) -> None:
    """In one dtype and under one stage by turns, unless all are asked for."""
    dtypes = (torch.float32, torch.bfloat16)
    for number, (name, build) in enumerate(BUILDERS.items()):
        for dtype in dtypes if thorough else [dtypes[number % 2]]:
            torch.manual_seed(7)
            plain = build().to(dtype)
            after = torch.get_rng_state()
            for strategy in STAGES if thorough else [list(STAGES)[number % 4]]:
                torch.manual_seed(7)
                with torch.device("meta"):
                    model = build().to(dtype)
                parameters = list(model.parameters())
                optimizer = torch.optim.Adam(parameters)
                if rank > 0:
                    torch.manual_seed(rank)  # the values are rank 0's all the same
                engine = initialize(model, optimizer, strategy, bucket_bytes=2048)
                state, case = engine.full_state_dict(), (name, dtype, strategy)
                assert_equal(state, plain.state_dict(), *case)
                assert all(state[key].stride() == value.stride() for key, value in plain.state_dict().items()), case
                assert all(p is q for p, q in zip(parameters, model.parameters(), strict=True)), case
                assert rank > 0 or torch.equal(torch.get_rng_state(), after), case


@on_ranks(4)
def test_no_rank_of_stage_3_holds_the_model(rank: int, n: int) -> None:
    ledger = Ledger()
    labels.listen(ledger)
    with ledger:
        ledger.begin()
        with torch.device("meta"):
            model = GPT(12, 64, 4, 61, 16, True, False)
        psi = sum(p.numel() * 4 for p in model.parameters())
        engine = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "zero3", bucket_bytes=2**15)
        ledger.end("init")
    labels.unlisten(ledger)
    assert engine.full_state_dict(rank0_only=True) or rank > 0
    peak, unit, largest = ledger.sums.extremes["init"].peak, psi / 12, 4 * 64 * 64 * 4
    # shards of parameters and gradients, one unit and the scratch of one parameter
    assert peak <= 2 * psi / 4 + unit + 2 * largest + 5000
    assert peak < 0.75 * psi


class Silent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))


class Resetting(nn.Linear):
    """Its initializer is `reset`, after Linear's own if it goes on from that."""

    def __init__(self, reset: Callable[[nn.Linear], object], goes_on: bool = False) -> None:
        self.reset, self.goes_on = reset, goes_on
        super().__init__(3, 3)

    def reset_parameters(self) -> None:
        if self.goes_on:
            super().reset_parameters()
        with torch.no_grad():
            self.reset(self)


def zero_a_row(linear: nn.Linear) -> None:
    linear.weight[0].zero_()


def halve(linear: nn.Linear) -> None:
    linear.weight.data.mul_(0.5)


def replace(linear: nn.Linear) -> None:
    linear.weight = nn.Parameter(torch.ones(3, 3))


class Buffered(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("table", torch.arange(3.0))


class Own(nn.Linear):
    def _init_weights(self, module: nn.Module) -> None: ...


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (Silent, "Silent: Silent has parameters and no reset_parameters"),
        (lambda: Resetting(zero_a_row), "Resetting.weight: an initializer writes to a part of it"),
        (lambda: Resetting(halve), "Resetting.weight: an initializer writes to a part of it, or changes its values"),
        (lambda: Resetting(replace), "Resetting.weight: an initializer replaces this parameter"),
        (Buffered, "table: nothing has restored its values"),
        (lambda: Own(3, 3), "Own: it initializes itself in _init_weights"),
    ],
)
def test_what_cannot_be_replayed_is_refused(build: Any, words: str) -> None:
    with torch.device("meta"):
        model = build()
    with pytest.raises(ValueError, match=words):
        initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "zero3")


def test_overwriting_a_part_after_the_whole_is_replayed() -> None:
    torch.manual_seed(0)
    plain = Resetting(zero_a_row, goes_on=True)
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Resetting(zero_a_row, goes_on=True)
    engine = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "zero3")
    assert torch.equal(engine.full_state_dict()["weight"], plain.weight)


def test_a_model_partly_on_meta_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match=r"1\.weight: it is on the meta device while other parameters are not"):
        initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "zero3")
