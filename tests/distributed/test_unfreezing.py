"""Parameters that are trained later, by hand, or never: unfrozen, frozen again, in a late group, in codes of 4 bits."""

from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import zerobench
from tests import zoo
from tests.cells import MODELS, sound
from tests.distributed.training import adamw, assert_alike, assert_equal, take_steps
from tests.distributed.variants import account, assert_as_predicted, run_all
from tests.ranks import on_ranks
from zerobench.config import schema as schemas
from zerobench.config.schema import Measure
from zerobench.registry import MODELS as REGISTRY
from zerobench.zero import STAGES, NvmeOffload, Offload, initialize

TIERS: list[tuple[str, dict[str, Any]]] = [
    *((strategy, {}) for strategy in STAGES),
    ("zero2", {"offload": Offload()}),
    ("zero3", {"offload": Offload(parameters=True)}),
    ("zero3", {"persistence_numel": 60, "keep_root": True}),
]


def phases(model: nn.Module, name: str) -> list[tuple[Iterable[nn.Parameter], bool]]:
    """What is frozen (False) or unfrozen before each of several steps."""
    blocks = list(model.blocks)
    first = list(model.root.parameters()) if name == "lists" else [model.embedding.weight, model.scale]
    return [
        ([*first, *blocks[0].parameters(), *blocks[1].parameters()], False),
        (blocks[1].parameters(), True),
        ([], True),
        ([next(iter(blocks[0].parameters())), *first], True),
        (blocks[1].parameters(), False),
        ([*blocks[0].parameters(), *blocks[1].parameters()], True),
        ([], True),
    ]


def unfrozen(rank: int, n: int, folder: Path, thorough: bool) -> None:
    """Parameters of the groups that are unfrozen at any step, frozen again, and unfrozen: to the bit as in torch."""

    def change(model: nn.Module, name: str, step: int) -> None:
        parameters, trains = phases(model, name)[step] if step < 7 else ([], True)
        for parameter in parameters:
            parameter.requires_grad_(trains)

    for name, tiers in (("lists", TIERS), ("tied", TIERS[:3])) if thorough else (("lists", TIERS[2:5:2]),):
        plain = zoo.build(name)
        reference, expected = adamw(plain.parameters()), []
        for step in range(8):
            change(plain, name, step)
            zoo.step_plainly(plain, reference, rank, n, (step,))
            expected.append(deepcopy(plain))
        for strategy, options in tiers:
            model = zoo.build(name)
            change(model, name, 0)
            engine = initialize(model, adamw(model.parameters()), strategy, bucket_bytes=4096, **options)
            for step in range(7):
                change(model, name, step)
                if step % 2:
                    engine(*zoo.tokens(rank, n, step)).backward()
                    engine.optimizer.step()
                else:
                    take_steps(engine, rank, n, (step,))
                assert_alike(engine, expected[step], name, strategy, options, step)
            engine.save(f"{folder}/saved")
            fresh = zoo.build(name)
            other = initialize(fresh, adamw(fresh.parameters()), "zero1")
            other.load(f"{folder}/saved")
            take_steps(other, rank, n, (7,))
            assert_alike(other, expected[7], name, strategy, options)


def halves(rank: int, n: int) -> None:
    """bf16 with masters: as an engine that has trained them from the beginning, if they had no gradient until then."""

    def trained(strategy: str, late: bool) -> dict[str, torch.Tensor]:
        model = zoo.build("lists").bfloat16()
        optimizer = adamw(model.parameters())
        model.blocks[1].requires_grad_(not late)
        engine = initialize(model, optimizer, strategy, bucket_bytes=4096)
        model.blocks[1].requires_grad_(False)
        take_steps(engine, rank, n, range(2))
        model.blocks[1].requires_grad_(True)
        take_steps(engine, rank, n, range(2, 4))
        return engine.full_state_dict()

    for strategy in ("zero2", "zero3"):
        early, late = trained(strategy, False), trained(strategy, True)
        assert_equal(late, early, strategy)


def taken_over_frozen(rank: int, n: int) -> None:
    """A plain run freezes a part, goes on under an engine, and unfreezes it: its states are those of the plain run."""
    for strategy in ("zero1", "zero3"):
        runs = []
        for _ in range(2):
            model = zoo.build("lists")
            optimizer = adamw(model.parameters())
            zoo.step_plainly(model, optimizer, rank, n, (0, 1))
            model.blocks[0].requires_grad_(False)
            runs.append((model, optimizer))
        (model, optimizer), (plain, reference) = runs
        engine = initialize(model, optimizer, strategy, bucket_bytes=4096)
        for trains, step in ((False, 2), (True, 3)):
            model.blocks[0].requires_grad_(trains)
            plain.blocks[0].requires_grad_(trains)
            take_steps(engine, rank, n, (step,))
            zoo.step_plainly(plain, reference, rank, n, (step,))
        assert_alike(engine, plain, strategy)


def late_groups(rank: int, n: int, thorough: bool) -> None:
    """A group after the first step, of parameters that were frozen, or trainable in no group."""
    both = [(strategy, was_frozen) for strategy in STAGES for was_frozen in (True, False)]
    for strategy, was_frozen in both if thorough else both[2::3]:
        model, plain = zoo.build("lists"), zoo.build("lists")
        engine: Any = None
        optimizers = []
        for module in (model, plain):
            module.head.requires_grad_(not was_frozen)
            head = set(module.head.parameters())
            optimizers.append(adamw([p for p in module.parameters() if p not in head]))
        engine = initialize(model, optimizers[0], strategy, bucket_bytes=4096)
        if was_frozen:
            take_steps(engine, rank, n, (0,))
            model.head.requires_grad_(True)
            engine.backward(engine.module(*zoo.tokens(rank, n, 1)))
            with pytest.raises(ValueError, match=r"head\.weight: it was frozen before.*add_param_group before the for"):
                engine.step()
        else:
            engine.backward(engine(*zoo.tokens(rank, n, 0)))
            with pytest.raises(ValueError, match=r"does not hold head\.weight.* drop its gradient before the step"):
                engine.step()
            engine.zero_grad()
            engine.backward(engine(*zoo.tokens(rank, n, 0)))
            model.head.zero_grad()  # it is trained by hand, or not at all
            engine.step()
        engine.zero_grad()
        model.head.zero_grad()
        zoo.step_plainly(plain, optimizers[1], rank, n, (0,))
        plain.head.requires_grad_(True).zero_grad()
        engine.optimizer.add_param_group({"params": model.head.parameters(), "lr": 3e-3})
        optimizers[1].add_param_group({"params": plain.head.parameters(), "lr": 3e-3})
        take_steps(engine, rank, n, (1, 2))
        zoo.step_plainly(plain, optimizers[1], rank, n, (1, 2))
        assert_alike(engine, plain, strategy, was_frozen)
        with pytest.raises(ValueError, match="parameters of the model that no group holds"):
            engine.optimizer.add_param_group({"params": model.head.parameters()})


def ignored(rank: int, n: int, folder: Path, thorough: bool) -> None:
    """Ignored parameters stay as they are on each rank, with its own gradient: an optimizer of the user's trains them.

    One that has no engine's dtype is ignored, too; both are in a full state, and not in a checkpoint.
    """
    for strategy in STAGES if thorough else ("zero3",):
        model, plain = zoo.build("lists"), zoo.build("lists")
        norm = model.blocks[0][1].norm
        codes = norm.codes = nn.Parameter(torch.full((3,), rank, dtype=torch.int32), requires_grad=False)
        own = [norm.weight, norm.bias]
        held = [p for p in model.parameters() if p not in {*own, codes}]
        by_hand, reference = adamw(own), adamw(plain.parameters())
        left_out = {*own, codes}
        engine = initialize(model, adamw(held), strategy, bucket_bytes=4096, ignored_parameters=left_out)
        for step in range(3):
            engine.backward(engine(*zoo.tokens(rank, n, step)))
            for parameter in own:
                dist.all_reduce(parameter.grad.div_(n))
            engine.step()
            by_hand.step()
            by_hand.zero_grad()
        zoo.step_plainly(plain, reference, rank, n, range(3))
        assert_alike(engine, plain, strategy)
        assert engine.full_state_dict()["blocks.0.1.norm.codes"].tolist() == [rank] * 3
        engine.save(f"{folder}/ignored")
        with torch.no_grad():
            norm.weight.fill_(7)
        engine.load(f"{folder}/ignored")
        engine.load_state_dict(engine.state_dict())
        assert (norm.weight == 7).all()
        with engine.temporary_weights({"blocks.0.1.norm.weight": torch.zeros(zoo.WIDTH)}):
            assert (norm.weight == 0).all()
        assert (norm.weight == 7).all()
    for arguments, words in (
        ({"ignored_parameters": [nn.Parameter(torch.ones(1))]}, "1 of them are not parameters of the model"),
        ({"ignored_parameters": plain.head.parameters()}, "it holds parameters of ignored_parameters="),
    ):
        with pytest.raises(ValueError, match=words):
            initialize(plain, reference, "zero2", **arguments)


@on_ranks(2)
def test_parameters_are_trained_later(rank: int, n: int, tmp_path: Path, thorough: bool) -> None:
    unfrozen(rank, n, tmp_path, thorough)
    halves(rank, n)
    taken_over_frozen(rank, n)
    late_groups(rank, n, thorough)
    ignored(rank, n, tmp_path, thorough)


# -- frozen parameters of integers and 8 bits: a low-rank adapter over a base in 4 bits, by hand ----------------

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
        shift, one = (torch.int16, torch.float8_e4m3fn) if narrow else (torch.int32, torch.float32)
        self.shift = nn.Parameter(torch.full((3,), 8, dtype=shift), requires_grad=False)
        self.signed = nn.Parameter(torch.tensor([True, False, True]), requires_grad=False)
        self.one = nn.Parameter(torch.ones(5, dtype=one), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(outputs), requires_grad=False)
        self.down = nn.Parameter(torch.randn(rank, inputs) / inputs**0.5)
        self.up = nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, x):
        codes = torch.stack((self.codes >> 4, self.codes & 15), 2).float() - self.shift[0]
        weight = codes.view(*self.scale.shape[:2], BLOCK) * self.scale.float() * self.one.float()[0]
        return F.linear(x, weight.flatten(1), self.bias) + F.linear(F.linear(x, self.down), self.up)


class Model(zoo.Chain):
    def __init__(self, vocabulary: int = zoo.WORDS, narrow: bool = True) -> None:
        super().__init__(*(Quantized(24, 24, 2, narrow) for _ in range(3)), words=vocabulary, width=24)
        self.embedding.requires_grad_(False)
        self.head.requires_grad_(False)

    def run(self, h):
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        return h


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
    accounted = account(list(configs.values()), tmp_path, run=run_here)
    for (name, config), records in zip(configs.items(), accounted, strict=True):
        assert_as_predicted(config, records, name)
        held = [m for m in records[0].memory if (m.phase, m.category) == ("step", "parameters")]
        of_codes[name] = max(m.max_bytes for m in held)
    own = sum(parameter.nbytes for parameter in quantized().parameters())
    assert of_codes["ddp"] == own
    assert own <= of_codes["zero2"] < own + 1024  # with the gaps of one bucket
