"""Memory-centric tiling: a large Linear as many small ones (ZeRO-Infinity, arXiv 2104.07857, section 5.1.3).

A Linear of (out, in) is divided into out_splits × in_splits *tiles*, as evenly as possible; tile (o, i) holds::

    weight   (out_o, in_i)   rows and columns of the whole
    bias     (out_o,)        in the first tile of a row only

    y_o  =  ((x_0 W_o0ᵀ + b_o) + x_1 W_o1ᵀ) + ...        rows of tiles compute parts of the output, concatenated

Under stage 3 each tile is a unit, gathered before it runs and freed after it: only this tile and the prefetched ones
are whole in memory, not the layer. The output equals the whole Linear's except for rounding: in_splits change the order
of sums, and out_splits that of the input gradient's sums. Even with only out_splits the output's rounding may differ,
since some processors choose matrix kernels by the width.

Initial values are drawn for the whole Linear and then divided, so that a seed gives the same model for every tiling.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Draw = Callable[[torch.Tensor], Any]
"""Fills a tensor in place, from the default generator."""


class TiledLinear(nn.Module):
    """A Linear in tiles: (..., in_features) -> (..., out_features). Raises ValueError for an empty tile."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, in_splits: int = 1, out_splits: int = 1,
        device: Any = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        for name, splits, size in (("in_splits", in_splits, in_features), ("out_splits", out_splits, out_features)):
            if not 1 <= splits <= size:
                raise ValueError(f"{name}: {splits} is invalid; use 1 to {size}, the number of features")
        self.in_features, self.out_features = in_features, out_features
        self._in_sizes = [part.stop - part.start for part in _slices(in_features, in_splits)]
        whole = nn.Linear(in_features, out_features, bias, device, dtype)
        drawn = Drawn(whole)
        self._rows = [
            [Tile(whole, rows, columns, drawn) for columns in _slices(in_features, in_splits)]
            for rows in _slices(out_features, out_splits)
        ]
        for o, row in enumerate(self._rows):
            for i, tile in enumerate(row):
                self.add_module(f"tile_{o}_{i}", tile)

    @staticmethod
    def from_linear(linear: nn.Linear, in_splits: int = 1, out_splits: int = 1) -> TiledLinear:
        """Builds the equivalent of `linear` in tiles, with copies of its values."""
        like, has_bias = linear.weight, linear.bias is not None
        shape = linear.in_features, linear.out_features, has_bias, in_splits, out_splits
        tiled = TiledLinear(*shape, device="meta", dtype=like.dtype).to_empty(device=like.device)
        with torch.no_grad():
            for tile in tiled.tiles:
                tile.take(like, linear.bias)
                for own, whole in zip(tile.parameters(), linear.parameters(), strict=False):  # weight, and maybe bias
                    own.requires_grad_(whole.requires_grad)
        return tiled.train(linear.training)

    @property
    def tiles(self) -> list[Tile]:
        """The tiles, row by row."""
        return [tile for row in self._rows for tile in row]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (..., in_features) to (..., out_features)."""
        columns = x.split(self._in_sizes, dim=-1) if len(self._in_sizes) > 1 else [x]
        rows = [
            reduce(torch.add, (tile(column) for tile, column in zip(row, columns, strict=True))) for row in self._rows
        ]
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=-1)


class Tile(nn.Module):
    """Rows and columns of a Linear, with its bias in the tile of the first columns. A unit of stage 3."""

    is_unit = True

    def __init__(self, whole: nn.Linear, rows: slice, columns: slice, drawn: Drawn) -> None:
        super().__init__()
        self.rows, self.columns = rows, columns
        self._drawn = drawn
        has_bias = whole.bias is not None and columns.start == 0
        self.weight = nn.Parameter(whole.weight.detach()[rows, columns].clone())
        self.bias = nn.Parameter(whole.bias.detach()[rows].clone()) if has_bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (..., columns) to (..., rows)."""
        return F.linear(x, self.weight, self.bias)

    def take(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Copies its part of a whole Linear's values."""
        self.weight.copy_(weight[self.rows, self.columns])
        if self.bias is not None and bias is not None:
            self.bias.copy_(bias[self.rows])

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Takes this tile's part of nn.Linear's initial values."""
        whole = self._drawn.by(self, nn.Linear.reset_parameters)
        self.take(whole.weight, whole.bias)

    @torch.no_grad()
    def draw_weight(self, draw: Draw) -> None:
        """Takes this tile's part of a whole weight that `draw` has filled."""
        self.take(self._drawn.by(self, lambda whole: draw(whole.weight)).weight, None)

    def extra_repr(self) -> str:
        return f"rows={self.rows.start}:{self.rows.stop}, columns={self.columns.start}:{self.columns.stop}"


class Drawn:
    """A whole Linear, drawn for its first tile and released by its last; tiles in between take their part in order."""

    def __init__(self, like: nn.Linear) -> None:
        self._shape = like.in_features, like.out_features, like.bias is not None
        self._whole: nn.Linear | None = None

    def by(self, tile: Tile, draw: Callable[[nn.Linear], Any]) -> nn.Linear:
        """Returns the whole for `tile`, of its dtype and on its device."""
        columns, rows, _ = self._shape
        if (tile.rows.start, tile.columns.start) == (0, 0):
            like = tile.weight
            self._whole = nn.Linear(*self._shape, device="meta", dtype=like.dtype).to_empty(device=like.device)
            draw(self._whole)
        whole = self._whole
        assert whole is not None, "tiles are initialized in their order"
        if (tile.rows.stop, tile.columns.stop) == (rows, columns):
            self._whole = None
        return whole


def draw_weight(module: nn.Module, draw: Draw) -> None:
    """Fills the weight of a module, or of the whole Linear that a tile belongs to, with `draw`."""
    if isinstance(module, Tile):
        module.draw_weight(draw)
    else:
        draw(module.weight)  # type: ignore[arg-type]


def parts_of(linear: nn.Module) -> Sequence[nn.Module]:
    """Returns the tiles of a TiledLinear; for another module, the module itself."""
    return linear.tiles if isinstance(linear, TiledLinear) else [linear]


def whole_state(model: nn.Module, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Converts the state of a model with TiledLinears to that of its equivalent with Linears; copies."""
    converted = dict(state)
    for path, tiled in _tiled(model):
        weights, biases = [], []
        for name, tile in tiled.named_children():
            assert isinstance(tile, Tile)
            weights.append((tile, converted.pop(f"{path}{name}.weight")))
            biases += [(tile, converted.pop(f"{path}{name}.bias"))] if tile.bias is not None else []
        converted[f"{path}weight"] = weight = weights[0][1].new_empty(tiled.out_features, tiled.in_features)
        for tile, part in weights:
            weight[tile.rows, tile.columns] = part
        if biases:
            converted[f"{path}bias"] = torch.cat([part for _, part in biases])
    return converted


def tiled_state(model: nn.Module, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Converts `state` of a model with Linears to the state of `model`, with TiledLinears in their places; views."""
    converted = dict(state)
    for path, tiled in _tiled(model):
        weight, bias = converted.pop(f"{path}weight"), converted.pop(f"{path}bias", None)
        for name, tile in tiled.named_children():
            assert isinstance(tile, Tile)
            converted[f"{path}{name}.weight"] = weight[tile.rows, tile.columns]
            if tile.bias is not None and bias is not None:
                converted[f"{path}{name}.bias"] = bias[tile.rows]
    return converted


def _tiled(model: nn.Module) -> list[tuple[str, TiledLinear]]:
    named = model.named_modules()
    return [(f"{name}." if name else "", module) for name, module in named if isinstance(module, TiledLinear)]


def _slices(size: int, splits: int) -> list[slice]:
    """Divides `size` into `splits` parts, the first ones larger by one if it is not divisible."""
    edges = [size // splits * part + min(part, size % splits) for part in range(splits + 1)]
    return [slice(start, stop) for start, stop in pairwise(edges)]
