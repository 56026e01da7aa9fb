"""Whole matrices on one rank each: the owners, the layout, the list of what AdamW takes, and what is refused."""

from typing import Any

import pytest
import torch
from torch import nn, optim

from tests.cells import cell
from zerobench.config.schema_memory import CpuOffload, NvmeOffloadConfig, Qwz
from zerobench.config.schema_training import Muon
from zerobench.predict.build import shapes_of
from zerobench.theory import layout as theory
from zerobench.theory.shapes import OptimizerShape, owners_of
from zerobench.zero import MuonWithAdamW, initialize
from zerobench.zero.layout import buckets, one_unit
from zerobench.zero.optim.muon import split
from zerobench.zero.optim.segments import assign, muon_cost


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 24), nn.Linear(24, 8), nn.Linear(8, 8)])
        self.head = nn.Linear(8, 20)


def muon(model: nn.Module, **more: Any) -> MuonWithAdamW:
    matrices, rest = split(model, ["not_2d", "embeddings", "head"])
    return MuonWithAdamW([{"params": matrices, "owned": True, **more}, {"params": rest, "owned": False}])


def test_the_costliest_matrix_goes_first_to_the_rank_with_least() -> None:
    assert assign([1, 5, 3, 3], 2) == [0, 0, 1, 1]
    assert assign([7, 7, 7], 2) == [0, 1, 0]
    assert assign([4], 3) == [0], "ranks may own nothing"
    costs = [muon_cost(shape) for shape in ((64, 192), (64, 64), (64, 256), (256, 64)) for _ in range(12)]
    loads = [sum(c for c, owner in zip(costs, assign(costs, 5), strict=True) if owner == rank) for rank in range(5)]
    assert max(loads) - min(loads) <= max(costs)
    assert muon_cost((7, 5, 3)) == 7 * muon_cost((3, 5))
    assert muon_cost((3, 5)) == muon_cost((5, 3)) == 4 * 9 * 5 + 2 * 27


def test_shards_of_owned_matrices_hold_them_whole_and_may_be_empty() -> None:
    unit = one_unit([(0, 100), (1, 30), (2, 50)], 3, align=16, tail=8, owners={0: 2, 1: 0, 2: 2})
    assert unit.sizes == (32, 0, 112 + 64 + 16), "the tail begins at a multiple of align"
    assert [(s.parameter, s.start, s.stop, s.offset) for s in unit.segments(2, max_numel=16)] == [
        (0, 0, 100, 0),
        (2, 0, 50, 112),
    ], "a matrix is never cut"
    assert list(unit.segments(1)) == []
    assert unit.padded_numel == sum(unit.sizes)
    assert sum(numel for _, numel in unit.gaps) + unit.numel == unit.padded_numel
    large, rest = buckets([(0, 100), (1, 30)], 64, 2, owners={0: 1, 1: 1})
    assert [one.sizes for one in (*large, *rest)] == [(0, 100), (0, 30)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_theory_lays_out_the_same_shards(ranks: int) -> None:
    model = Tiny()
    model.experts = nn.Parameter(torch.zeros(3, 8, 24))
    matrices = [p for p in model.parameters() if p.dim() in (2, 3)]
    shapes = shapes_of(model, matrices)
    numbers = [i for i, shape in enumerate(shapes) if shape.matrix]
    owners = owners_of(shapes, ranks)
    assert sum(shape.matrices for shape in shapes) == 5 + 3
    assert [owners[i] for i in numbers] == assign([muon_cost(p.shape) for p in matrices], ranks)
    for bucket in (8, 300, 4096):
        runs = buckets([(i, shapes[i].numel) for i in numbers[::-1]], bucket, ranks, 16, owners)
        expected = theory.lay_out_buckets(shapes, numbers[::-1], ranks, bucket * 4)
        assert [one.sizes for run in runs for one in run] == [one.sizes for one in expected]
        for one, other in zip((one for run in runs for one in run), expected, strict=True):
            held = [[(s.parameter, s.offset, s.numel) for s in one.segments(rank)] for rank in range(ranks)]
            assert held == [[(p, at, n) for p, _, at, n, _ in other.held(rank, 16)] for rank in range(ranks)]


@pytest.mark.parametrize(
    ("rest", "words"),
    [
        ([], "the list of parameters for AdamW is empty"),
        (["not_2d", "layers.0.weigth"], "did you mean layers.0.weight?"),
        (["nobody*"], "is no trainable parameter of Tiny"),
        (["embeddings"], "layers.0.bias has 1 dimensions, and Muon takes only matrices; add not_2d"),
        (["*"], "leaves no matrix for Muon; use adamw"),
    ],
)
def test_lists_that_are_unknown_or_empty_are_refused(rest: list[str], words: str) -> None:
    with pytest.raises(ValueError) as error:
        split(Tiny(), rest)
    assert words in str(error.value)
    problems = cell("zero2", 2, optimizer=Muon(adamw=rest), model="mlp").problems
    assert [one.startswith(f"optimizer.adamw={rest}: ") for one in problems] == [True], problems


def test_every_parameter_has_one_optimizer() -> None:
    model = Tiny()
    matrices, rest = split(model, ["not_2d", "embeddings", "head", "layers.2.*"])
    assert {id(p) for p in matrices} == {id(layer.weight) for layer in model.layers[:2]}
    assert {id(p) for p in (*matrices, *rest)} == {id(p) for p in model.parameters()}
    model.head.weight = model.embedding.weight
    assert len(split(model, ["not_2d", "embeddings"])[1]) == 1 + 4


def test_stacks_of_matrices_go_to_muon_by_a_word() -> None:
    model = Tiny()
    model.experts = nn.Parameter(torch.zeros(3, 8, 24))
    assert model.experts in set(split(model, ["not_2d", "embeddings", "head"])[1])
    assert model.experts in set(split(model, ["not_2d_or_3d", "embeddings", "head"])[0])
    with pytest.raises(ValueError, match=r"experts has 3 dimensions, .* not_2d_or_3d in place of not_2d leaves Muon"):
        split(model, ["embeddings", "*bias"])


def test_the_states_are_a_momentum_and_those_of_adamw() -> None:
    model = Tiny()
    optimizer = muon(model)
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    kept = {id(p): set(state) for p, state in optimizer.state.items()}
    matrices = {id(layer.weight) for layer in model.layers}
    assert all(kept[i] == {"momentum_buffer"} for i in matrices)
    assert all(one == {"step", "exp_avg", "exp_avg_sq"} for i, one in kept.items() if i not in matrices)
    numels = [p.numel() for p in model.parameters()]
    owned = sum(layer.weight.numel() for layer in model.layers)
    size = sum(v.numel() * 4 for state in optimizer.state.values() for v in state.values())
    shape = Muon().theory_shape()
    assert shape.owned == OptimizerShape(1, 0)
    counts = 4 * shape.counts * (len(numels) - 3)
    expected = shape.states_bytes(sum(numels) - owned, 4) + counts + shape.owned.states_bytes(owned, 4)
    assert size == expected == 8 * sum(numels) - 4 * owned + 4 * (len(numels) - 3), "4 bytes a matrix's element less"


@pytest.mark.parametrize(
    ("name", "more", "words"),
    [
        ("fsdp2", {}, "optimizer=muon: strategy=fsdp2 cuts its matrices, which Muon needs whole; use one of ddp, zer"),
        ("zero_redundancy", {}, "optimizer=muon: strategy=zero_redundancy cuts"),
        ("zero2", {"node_size": 2}, "node_size=2: Muon's matrices are owned whole by one rank each"),
        ("zero3", {"shard_group": 2}, "shard_group=2: Muon's"),
        ("zero3", {"zeropp": Qwz(), "node_size": None}, "zeropp=qwz: Muon's"),
        ("zero2", {"offload": CpuOffload(fraction=0.5)}, "offload.fraction=0.5: Muon's"),
        ("zero2", {"offload": NvmeOffloadConfig()}, "offload=nvme: Muon's"),
        ("zero2", {"optimizer": Muon(adjust_lr="mine")}, "optimizer.adjust_lr=mine: use original or match_rms_adamw"),
    ],
)
def test_what_owned_matrices_do_not_go_with_is_refused_in_one_message(name: str, more: Any, words: str) -> None:
    problems = [*cell(name, 4, **{"optimizer": Muon()} | more).problems]
    assert [one.startswith(words) for one in problems] == [True], problems


def test_an_optimizer_that_is_neither_elementwise_nor_owned_is_refused() -> None:
    model = Tiny()
    with pytest.raises(ValueError, match=r"Adafactor cannot be sharded: .* give each of its groups owned=True, or"):
        initialize(model, optim.Adafactor(model.parameters()))
    rest = {"params": [model.layers[0].bias], "owned": False}  # it is not elementwise there either
    with pytest.raises(ValueError, match="Adafactor cannot be sharded"):
        initialize(model, optim.Adafactor([{"params": [model.layers[0].weight], "owned": True}, rest]))
    with pytest.raises(ValueError, match=r"of shape \(24,\) is in a group with owned=True, which is for matrices"):
        initialize(model, optim.SGD([{"params": list(model.layers.parameters()), "owned": True}], lr=0.1))
    with pytest.raises(ValueError, match="each group says owned=True"):
        MuonWithAdamW([{"params": list(model.parameters())}])
    with pytest.raises(ValueError, match=r"node_size: 1 does not go with MuonWithAdamW"):
        initialize(model, muon(model), node_size=1)
