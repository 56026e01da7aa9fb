"""Frozen parameters of integers and 8 bits: a low-rank adapter over a base in 4 bits, by hand."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zerobench
from tests import zoo
from tests.cells import MODELS, sound
from tests.distributed.training import adamw, assert_alike, take_steps
from tests.distributed.variants import account, assert_as_predicted, run_all
from tests.ranks import on_ranks
from zerobench.config import schema as schemas
from zerobench.config.schema import Measure
from zerobench.registry import MODELS as REGISTRY
from zerobench.zero import STAGES, NvmeOffload, Offload, initialize

BLOCK = 8


class Quantized(nn.Module):
    """y = W x + b + B (A x): W in codes of 4 bits, two in a byte, with a scale for each BLOCK of a row."""

    def __init__(self, inputs: int, outputs: int, rank: int, narrow: bool) -> None:
        super().__init__()
        weight = torch.randn(outputs, inputs) / inputs**0.5
        scale = weight.view(outputs, -1, BLOCK).abs().amax(2, keepdim=True) / 7
        codes = (weight.view(outputs, -1, BLOCK) / scale + 8).round().to(torch.uint8).view(outputs, -1, 2)
        self.codes = nn.Parameter(codes[..., 0] * 16 + codes[..., 1], requires_grad=False)
        self.scale = nn.Parameter(scale.half() if narrow else scale, requires_grad=False)
        self.shift = nn.Parameter(
            torch.full((3,), 8, dtype=torch.int16 if narrow else torch.int32), requires_grad=False
        )
        self.signed = nn.Parameter(torch.tensor([True, False, True]), requires_grad=False)
        self.one = nn.Parameter(
            torch.ones(5, dtype=torch.float8_e4m3fn if narrow else torch.float32), requires_grad=False
        )
        self.bias = nn.Parameter(torch.zeros(outputs), requires_grad=False)
        self.down = nn.Parameter(torch.randn(rank, inputs) / inputs**0.5)
        self.up = nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, x):
        codes = torch.stack((self.codes >> 4, self.codes & 15), 2).float() - self.shift[0]
        weight = codes.view(*self.scale.shape[:2], BLOCK) * self.scale.float() * self.one.float()[0]
        return F.linear(x, weight.flatten(1), self.bias) + F.linear(F.linear(x, self.down), self.up)


class Model(nn.Module):
    def __init__(self, vocabulary: int = zoo.WORDS, narrow: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 24).requires_grad_(False)
        self.blocks = nn.ModuleList(Quantized(24, 24, 2, narrow) for _ in range(3))
        self.head = nn.Linear(24, vocabulary).requires_grad_(False)

    def forward(self, x, y):
        h = self.embedding(x)
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


@on_ranks(2)
def test_adapters_over_a_base_in_4_bits(rank: int, n: int, tmp_path: Path, thorough: bool) -> None:
    """Adapters train to the bit as under DDP; codes are whole again, also from a checkpoint and in other tiers."""
    options: list[tuple[str, dict[str, Any]]] = [
        *((strategy, {}) for strategy in STAGES),
        ("zero3", {"persistence_numel": 200}),
        ("zero3", {"offload": Offload(parameters=True)}),
        ("zero3", {"offload": NvmeOffload(path=str(tmp_path), parameters=True)}),
    ]

    def build(seed: int = 0) -> Model:
        torch.manual_seed(seed)
        return Model()

    plain = build()
    reference = adamw(plain.parameters())
    zoo.step_plainly(plain, reference, rank, n, range(3))
    for strategy, more in options if thorough else options[::2]:
        model = build(rank)  # the codes become rank 0's
        engine = initialize(model, adamw(model.parameters()), strategy, bucket_bytes=4096, **more)
        take_steps(engine, rank, n, range(3))
        assert_alike(engine, plain, strategy, more)
        engine.save(tmp_path / "saved")
        fresh = build(5)
        other = initialize(fresh, adamw(fresh.parameters()), "zero3" if strategy == "zero1" else "zero1")
        with torch.no_grad(), other.temporary_weights(engine.full_state_dict()):
            assert torch.equal(other(*zoo.tokens(rank, n, 9)), plain(*zoo.tokens(rank, n, 9)))
        other.load(tmp_path / "saved")
        assert_alike(other, plain, strategy, more)
        engine.module.load_state_dict(build(7).state_dict())
        assert_alike(engine, build(7), strategy, more)
    with pytest.raises(RuntimeError, match=r"blocks\.0\.codes: it is read outside of the forward"):
        (lambda: model.blocks[0].codes + 0)()


def quantized(vocabulary: int = 256) -> nn.Module:
    return Model(vocabulary, narrow=False)


zerobench.register_model("quantized", quantized)
MODELS["quantized"] = REGISTRY.schema_of("quantized", quantized, schemas.Model)()


def run_here(*job: Any) -> Any:
    return run_all(*job)


def test_bytes_of_codes_are_those_of_the_theory(tmp_path: Path) -> None:
    """States and volume, to the byte and to the element: a code is a byte, whole or in shards."""
    steady = Measure(steps=1, warmup=2, passes="accounted")
    configs = {
        name: sound(name, 2, "quantized", bucket_bytes=4096, measure=steady).config
        for name in ("ddp", "zero2", "zero3")
    }
    of_codes = {}
    for (name, config), records in zip(
        configs.items(), account(list(configs.values()), tmp_path, run=run_here), strict=True
    ):
        assert_as_predicted(config, records, name)
        held = [m for m in records[0].memory if (m.phase, m.category) == ("step", "parameters")]
        of_codes[name] = max(m.max_bytes for m in held)
    own = sum(parameter.nbytes for parameter in quantized().parameters())
    assert of_codes["ddp"] == own
    assert own <= of_codes["zero2"] < own + 1024  # with the gaps of one bucket
