"""Offsets, padding, shards, segments, strides, Linears in tiles; and theory's own arithmetic beside the engine's."""

import pytest
import torch
from torch import nn

from tests.zoo import gpt
from zerobench.theory import layout as partition
from zerobench.theory.layout import TAIL_NUMEL, lay_out, lay_out_buckets
from zerobench.theory.shapes import ParameterShape
from zerobench.theory.strategy import ZERO2, StrategyShape, settle
from zerobench.zero import STAGES, Offload, initialize
from zerobench.zero.comm import gloo
from zerobench.zero.layout import MemoryOrder, buckets, one_unit
from zerobench.zero.modules.tiled_linear import TiledLinear, tiled_state, whole_state
from zerobench.zero.options import Options

NUMELS = [(0, 1), (1, 703), (2, 0), (3, 16), (4, 5000), (5, 17), (6, 64)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("bucket_numel", [16, 256, 1000, 10**6])
def test_segments_cover_every_element_once_and_cuts_are_aligned(world_size: int, bucket_numel: int) -> None:
    layouts = [layout for run in buckets(NUMELS, bucket_numel, world_size, align=16) for layout in run]
    seen = {parameter: [0] * numel for parameter, numel in NUMELS}
    for layout in layouts:
        assert layout.padded_numel == layout.shard_numel * world_size
        assert layout.shard_numel % 16 == 0
        for rank in range(world_size):
            for segment in layout.segments(rank):
                assert segment.start % 16 == 0
                assert 0 <= segment.offset <= layout.shard_numel - segment.numel
                for element in range(segment.start, segment.stop):
                    seen[segment.parameter][element] += 1
    assert all(count == 1 for counts in seen.values() for count in counts)


def test_a_bucket_holds_whole_parameters_and_a_larger_parameter_is_cut_evenly() -> None:
    runs = buckets([(0, 100), (1, 300), (2, 1000), (3, 40)], 600, 3, align=16)
    assert [[layout.padded_numel for layout in run] for run in runs] == [[432], [528, 480], [48]]
    assert [[piece.parameter for layout in run for piece in layout.pieces] for run in runs] == [[0, 1], [2, 2], [3]]
    assert sum(layout.numel for run in runs for layout in run) == 1440


def test_segments_are_cut_where_asked_and_the_tail_is_kept_free() -> None:
    layout = one_unit([(0, 100), (1, 300)], 1, align=16)
    assert [s.numel for s in layout.segments(0, max_numel=128)] == [100, 128, 128, 44]
    assert [s.offset for s in layout.segments(0, max_numel=128)] == [0, 112, 240, 368]
    assert one_unit([(0, 64)], 2, align=16, tail=8).padded_numel == 96


def test_gaps_are_all_that_no_parameter_owns_and_a_unit_without_elements_is_empty() -> None:
    layout = one_unit([(0, 10), (1, 20)], 2, align=16)
    assert layout.gaps == ((10, 6), (36, 28))
    assert layout.padded_numel == 64
    assert buckets([(0, 0)], 100, 2) == []
    assert one_unit([(0, 0)], 2).padded_numel == 0


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("bucket_bytes", [1024, 4096, None])
def test_theory_lays_out_as_the_engine_does(world_size: int, bucket_bytes: int | None) -> None:
    shapes = [ParameterShape(numel, 4, True, "") for _, numel in NUMELS]
    if bucket_bytes is None:
        theory = [lay_out(shapes, range(len(shapes)), world_size)]
        engine = [one_unit(NUMELS, world_size, align=16, tail=TAIL_NUMEL)]
    else:
        theory = lay_out_buckets(shapes, range(len(shapes)), world_size, bucket_bytes)
        engine = [layout for run in buckets(NUMELS, bucket_bytes // 4, world_size, align=16) for layout in run]
    assert [numel for buffer in theory for _, numel in buffer.units] == [layout.padded_numel for layout in engine]
    for rank in range(world_size):
        for most in (None, 128):
            segments = [(s.parameter, s.numel) for layout in engine for s in layout.segments(rank, most)]
            assert [(one[0], one[3]) for buffer in theory for one in buffer.held(rank, most)] == segments


@pytest.mark.parametrize("numel", [3, 2**20, 10**7, 10**8, 10**9])
@pytest.mark.parametrize("ranks", [1, 2, 5, 64, 4096])
def test_theory_and_the_engine_mean_the_same_buckets(numel: int, ranks: int) -> None:
    """And a number, or a strategy without buckets, is left alone."""
    parameter, frozen = torch.empty(numel, device="meta"), ParameterShape(999, 4, False, "")
    engine = Options().resolved([torch.nn.Parameter(parameter)], ranks)
    shapes = [ParameterShape(numel, 4, True, ""), frozen]
    settled = settle(StrategyShape(ZERO2, bucket_bytes="auto"), shapes, ranks)
    assert settled == StrategyShape(ZERO2, bucket_bytes=engine.bucket_bytes)
    assert 2**20 <= engine.bucket_bytes <= 25 * 2**20
    for left in (StrategyShape(ZERO2, bucket_bytes=7000), StrategyShape(ZERO2)):
        assert settle(left, shapes, ranks) == left


def test_theory_and_the_exchange_mean_the_same_slots() -> None:
    assert (partition.PIECE_BYTES, partition.SLOTS) == (gloo.REDUCE_PIECE_BYTES, gloo.SLOTS)
    sizes = [partition.slots_bytes(size, n) for size, n in ((2048, 2), (3072, 4), (50 * 2**20, 2), (50 * 2**20, 64))]
    assert sizes == [1024, 2 * 768, 2 * 2**20, 2 * 50 * 2**14]


TENSORS = {
    "rows": torch.arange(24.0).view(2, 3, 4),
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "channels last": torch.arange(72.0).view(2, 3, 4, 3).to(memory_format=torch.channels_last),
    "one channel": torch.arange(18.0).view(2, 1, 3, 3).to(memory_format=torch.channels_last),
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0, 3, 2).transpose(0, 1),
    "columns of a wider one": torch.arange(48.0).view(8, 6)[:, ::2],
    "rows of a wider one, transposed": torch.arange(48.0).view(8, 6)[:4, :3].t(),
    "expanded": torch.arange(3.0).expand(4, 3),
}


@pytest.mark.parametrize("name", TENSORS)
def test_elements_lie_as_in_a_tensor_that_torch_makes_like_it(name: str) -> None:
    tensor = TENSORS[name]
    like = torch.empty_like(tensor).copy_(tensor)
    order = MemoryOrder.of(tensor)
    assert order.strides == like.stride()
    memory = like.as_strided((like.numel(),), (1,))
    assert torch.equal(order.flatten(tensor), memory)
    assert order.flatten(tensor).is_contiguous()
    assert torch.equal(order.view(memory), tensor)
    if tensor.stride() == like.stride() and tensor.numel():
        assert order.flatten(tensor).data_ptr() == tensor.data_ptr()
    saved = MemoryOrder.from_dims(tensor.shape, order.dims)
    assert saved.agrees(order)
    assert torch.equal(saved.view(memory), tensor)
    assert order.is_row_major == torch.equal(memory, tensor.reshape(-1))


class Strided(nn.Module):
    """Parameters of every order, some frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Conv2d(6, 8, 3), nn.Conv2d(8, 6, 3).requires_grad_(False)])
        self.layers.to(memory_format=torch.channels_last)
        self.head = nn.Linear(6, 37, bias=False)
        self.head.weight = nn.Parameter(torch.randn(6, 37).t())
        self.cut = nn.Linear(37, 5)
        self.cut.weight = nn.Parameter(torch.randn(10, 37)[::2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.cut(self.head(x.mean((2, 3)))).square().mean()


@pytest.mark.parametrize("strategy", [*STAGES, "offloaded"])
def test_every_parameter_keeps_its_strides_and_trains_with_them(strategy: str) -> None:
    """Equal to the bit to plain torch, whose kernels see the same strides, on any CPU."""
    offload = {"offload": Offload(optimizer=True, gradients=True)} if strategy == "offloaded" else {}
    plain, model = Strided(), Strided()
    strides = {name: torch.empty_like(p).stride() for name, p in plain.named_parameters()}
    plain.cut.weight.data = plain.cut.weight.data.contiguous()
    optimizers = [torch.optim.Adagrad(m.parameters(), lr=0.1, initial_accumulator_value=0.1) for m in (plain, model)]
    engine = initialize(model, optimizers[1], strategy.replace("offloaded", "zero2"), bucket_bytes=1024, **offload)
    for step in range(3):
        x = torch.randn(2, 6, 9, 9, generator=torch.Generator().manual_seed(step)).to(memory_format=torch.channels_last)
        loss, other = plain(x), engine(x)
        loss.backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        engine.backward(other)
        engine.step()
        assert loss.item() == other.item()
    with engine.full_parameters() as module:
        assert {name: p.stride() for name, p in module.named_parameters()} == strides
    state = engine.full_state_dict()
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())


def test_a_rank_state_of_other_strides_is_refused() -> None:
    states = []
    for order in (torch.channels_last, torch.contiguous_format):
        model = nn.Sequential(nn.Conv2d(6, 8, 3)).to(memory_format=order)
        engine = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "zero2")
        states.append((engine, engine.state_dict()))
    (first, mine), (_, other) = states
    first.load_state_dict(mine)
    other.pop("orders")  # as it was written before orders were
    with pytest.raises(ValueError, match=r"state_dict: the memory order of 0\.weight differs"):
        first.load_state_dict(other)


@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (1, 3), (3, 1), (4, 5)])
@pytest.mark.parametrize("bias", [True, False])
def test_it_is_the_whole_linear(inputs: int, outputs: int, bias: bool) -> None:
    """To rounding, gradients too: kernels of some processors sum in an order that depends on the width."""
    torch.manual_seed(0)
    linear = nn.Linear(70, 52, bias=bias)
    tiled = TiledLinear.from_linear(linear, inputs, outputs)
    x = torch.randn(3, 7, 70, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    expected, found = linear(x), tiled(y)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    expected.sin().sum().backward()
    found.sin().sum().backward()
    torch.testing.assert_close(y.grad, x.grad, rtol=1e-5, atol=1e-6)
    for parameter in tiled.parameters():
        assert parameter.is_contiguous()
    whole = whole_state(tiled, tiled.state_dict())
    assert whole.keys() == linear.state_dict().keys()
    assert all(torch.equal(whole[name], value) for name, value in linear.state_dict().items())
    linear.weight.requires_grad_(False)
    for tile in TiledLinear.from_linear(linear, inputs, outputs).tiles:
        assert [p.requires_grad for p in tile.parameters()] == [False, True][: 1 + (tile.bias is not None)]


def test_sizes_that_do_not_divide_differ_by_one_and_bad_ones_are_refused() -> None:
    tiled = TiledLinear(10, 7, in_splits=3, out_splits=2)
    assert [tuple(tile.weight.shape) for tile in tiled.tiles] == [(4, 4), (4, 3), (4, 3), (3, 4), (3, 3), (3, 3)]
    assert [tile.bias is not None for tile in tiled.tiles] == [True, False, False] * 2
    with pytest.raises(ValueError, match="out_splits: 8 is invalid; use 1 to 7, the number of features"):
        TiledLinear(10, 7, out_splits=8)


@pytest.mark.parametrize("tiles", [2, 3])
def test_a_seed_means_one_model_however_it_is_tiled(tiles: int) -> None:
    plain, tiled = gpt(tiles=1), gpt(tiles=tiles)
    expected = plain.state_dict()
    found = whole_state(tiled, tiled.state_dict())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    back = tiled_state(tiled, expected)
    assert back.keys() == tiled.state_dict().keys()
    tiled.load_state_dict(back)
    tokens = torch.randint(0, 50, (2, 16))
    torch.testing.assert_close(tiled(tokens, tokens), plain(tokens, tokens), rtol=1e-6, atol=0)
