"""Linears in tiles: the same function, the same values, the same units whoever asks."""

import pytest
import torch
from torch import nn

from tests.zoo import gpt
from zerobench.zero.modules.tiled_linear import TiledLinear, tiled_state, whole_state
from zerobench.zero.modules.wrapping import blocks, default_units, unit_of_parameters


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


def test_sizes_that_do_not_divide_differ_by_one_and_bad_ones_are_refused() -> None:
    tiled = TiledLinear(10, 7, in_splits=3, out_splits=2)
    assert [tuple(tile.weight.shape) for tile in tiled.tiles] == [(4, 4), (4, 3), (4, 3), (3, 4), (3, 3), (3, 3)]
    assert [tile.bias is not None for tile in tiled.tiles] == [True, False, False] * 2
    with pytest.raises(ValueError, match="out_splits: 8 cannot be; use 1 to 7, the number of features"):
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


def test_tiles_are_units_and_no_blocks() -> None:
    model = gpt(tiles=2)
    names = [name for name, _ in default_units(model)]
    tiles = [f"{layer}.tile_{number}_0" for layer in ("mlp_in", "mlp_out") for number in (0, 1)]
    assert names == [name for block in ("blocks.0", "blocks.1") for name in (block, *(f"{block}.{t}" for t in tiles))]
    assert [name for name, _ in blocks(model)] == ["blocks.0", "blocks.1"]
    units = unit_of_parameters(model, default_units(model))
    assert all(units[p] == name.rsplit(".", 1)[0] for name, p in model.named_parameters() if "tile" in name)
    alone = nn.Sequential(nn.Linear(4, 4), TiledLinear(4, 4, out_splits=2))
    assert [name for name, _ in default_units(alone)] == ["0", "1", "1.tile_0_0", "1.tile_1_0"]
