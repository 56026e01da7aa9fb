"""Our optimizers: Muon, whose matrices are whole on one rank each; AdamW with moments of 8 bits or in bf16."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import zerobench
from tests import zoo
from tests.cells import cell
from zerobench.config.schema_training import Muon
from zerobench.predict.build import shapes_of
from zerobench.theory import layout as theory
from zerobench.theory.shapes import OptimizerShape, owners_of
from zerobench.zero import MuonWithAdamW, NvmeOffload, initialize
from zerobench.zero.layout import buckets, one_unit
from zerobench.zero.low_bit import LEVELS, MOMENTS, AdamW8bit, AdamWBf16, round_stochastically
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
    optimizer = MuonWithAdamW([{"params": [model.layers[0].weight], "owned": True}])
    optimizer.add_param_group({"params": [model.layers[0].bias], "owned": False})
    assert optimizer.param_groups[1]["betas"] == (0.9, 0.999)
    with pytest.raises(ValueError, match="each group says owned=True"):
        optimizer.add_param_group({"params": [model.layers[1].bias]})
    with pytest.raises(ValueError, match=r"node_size: 1 does not go with MuonWithAdamW"):
        initialize(model, muon(model), node_size=1)


def test_adagrad_over_a_model_without_memory_starts_from_its_initial_accumulators() -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    engine = initialize(model, optim.Adagrad(model.parameters(), initial_accumulator_value=0.3), "zero3")
    sums = [state["sum"] for state in engine.optimizer.state.values()]
    assert torch.equal(torch.cat([one.flatten() for one in sums]), torch.full((8,), 0.3))


def dynamic_map(signed: bool) -> list[float]:
    """As the authors of arXiv 2110.02861 make it (bitsandbytes, create_dynamic_map): means of linspace(0.1, 1)."""
    found = []
    for i in range(7):
        edges = torch.linspace(0.1, 1, (2**i if signed else 2 ** (i + 1)) + 1, dtype=torch.float64)
        found += ((edges[:-1] + edges[1:]) / 2 * 10 ** (i - 6)).tolist()
    return sorted([*found, *(-one for one in found if signed), 0.0, 1.0])


@pytest.mark.parametrize(("key", "signed"), [("exp_avg", True), ("exp_avg_sq", False)])
def test_levels_are_those_of_the_paper(key: str, signed: bool) -> None:
    assert len(LEVELS[key]) == 256
    assert LEVELS[key] == pytest.approx(dynamic_map(signed), rel=1e-9)


def trained(kind: type[torch.optim.Optimizer], steps: int = 30, **more: Any) -> tuple[nn.Parameter, Any]:
    """A parameter of 700 elements, the last block ragged, that follows fixed noisy gradients."""
    generator = torch.Generator().manual_seed(0)
    parameter = nn.Parameter(torch.randn(7, 100, generator=generator))
    optimizer = kind([parameter], lr=1e-2, **more)
    for _ in range(steps):
        parameter.grad = parameter.detach() + torch.randn(7, 100, generator=generator)
        optimizer.step()
    return parameter, optimizer


@pytest.mark.parametrize(("kind", "error"), [(AdamW8bit, 0.02), (AdamWBf16, 0.002)])
def test_updates_are_near_those_of_torch(kind: type[torch.optim.Optimizer], error: float) -> None:
    """The parameters move by about 0.3 per element; after one step, which reads no stored state, they are equal."""
    found, wanted = trained(kind)[0], trained(torch.optim.AdamW, foreach=False)[0]
    assert 0 < (found - wanted).square().mean().sqrt() < error
    assert torch.equal(trained(kind, 1)[0], trained(torch.optim.AdamW, 1, foreach=False)[0])


def test_an_element_without_gradients_for_long_is_not_thrown_out() -> None:
    """As a row of an embedding: its second moment is below the smallest level of a block with large ones."""
    parameter = nn.Parameter(torch.zeros(256))
    optimizer = AdamW8bit([parameter], lr=1e-3)
    for step in range(20):
        parameter.grad = torch.ones(256)
        parameter.grad[0] = 1e-4 if step == 0 else 0.0
        optimizer.step()
    assert parameter[0].abs() < 20 * 1e-3


def test_stochastic_rounding_has_the_value_as_its_mean() -> None:
    values = torch.tensor([1.001, -1.001, 3e-9, 0.0, float("inf"), -float("inf")])
    rounded = torch.stack([round_stochastically(values, salt) for salt in range(4000)])
    assert len(rounded[:, 0].unique()) == 2
    torch.testing.assert_close(rounded.double().mean(0)[:3], values.double()[:3], rtol=2e-4, atol=0)
    assert torch.equal(rounded[0, 3:].float(), values[3:])
    assert round_stochastically(torch.tensor([float("nan")]), 1).isnan().all()
    fractions = torch.rand(2**16, generator=torch.Generator().manual_seed(0)) + 1
    error = round_stochastically(fractions, 5).double() - fractions.double()
    assert error.mean().abs() < 4 * 2**-7 / 6**0.5 / 2**8, "four standard deviations over neighbors 2^-7 apart"


@pytest.mark.parametrize("kind", [AdamW8bit, AdamWBf16])
def test_states_keep_their_dtypes_in_a_state_dict(kind: type[Any]) -> None:
    parameter, first = trained(kind)
    parameter.data = parameter.data.half()  # torch's load_state_dict casts states to this
    second = kind([parameter], lr=1e-2)
    second.load_state_dict(first.state_dict())
    for key, dtype in kind.dtypes.items():
        assert second.state[parameter][key].dtype == dtype
        assert torch.equal(second.state[parameter][key], first.state[parameter][key])
    assert set(MOMENTS) < kind.dtypes.keys() or kind is AdamWBf16


def test_the_engine_refuses_files_and_the_optimizer_wrong_options(tmp_path: Path) -> None:
    model = zoo.build("tied")
    with pytest.raises(ValueError, match="files hold states of a parameter's size"):
        zerobench.initialize(model, AdamW8bit(model.parameters()), "zero2", offload=NvmeOffload(path=str(tmp_path)))
    for wrong in ({"lr": -1.0}, {"betas": (0.9, 1.0)}, {"foreach": True}):
        with pytest.raises(ValueError, match=f"AdamW8bit: {next(iter(wrong))} is out of range"):
            AdamW8bit(model.parameters(), **wrong)


def test_blocks_are_loaded_in_the_memory_order_that_they_were_saved_in_alone(tmp_path: Path) -> None:
    """Codes could be put in another order, but a block would then have elements of several."""

    def engine_of(order: torch.memory_format) -> Any:
        model = nn.Conv2d(4, 8, 3).to(memory_format=order)
        return zerobench.initialize(model, AdamW8bit(model.parameters()), "zero2")

    engine = engine_of(torch.channels_last)
    engine.backward(engine(torch.ones(1, 4, 3, 3)).sum())
    engine.step()
    engine.save(tmp_path / "saved")
    engine_of(torch.channels_last).load(tmp_path / "saved")
    with pytest.raises(
        (ValueError, RuntimeError), match="exp_avg_scale has blocks of elements in the parameter's memory"
    ):
        engine_of(torch.contiguous_format).load(tmp_path / "saved")
