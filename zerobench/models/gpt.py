"""A GPT: pre-norm blocks, causal attention by scaled_dot_product_attention, tied embeddings by default.

Shapes: tokens and targets (B, S) int64; hidden (B, S, H); logits (B, S, V). The loss is the mean
cross-entropy in nats per token, in fp32 for any dtype of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from ..zero.activations import policies
from ..zero.modules import tiled_linear
from .chunks import LossHead, in_chunks
from .linears import InputsCut, OutputsCut, TensorAxis, add_adapters, base_linear, initialize_adapter


class Block(nn.Module):
    """Attention, then a four times wider MLP, each on the normalized residual stream. With `tiles` above 1 each matrix
    of the MLP is cut into that many, along its outputs; with `mlp_chunks` above 1 the MLP runs on that many parts of
    the sequence, and again on each in backward.
    """

    def __init__(self, hidden: int, heads: int, tiles: int = 1, mlp_chunks: int = 1) -> None:
        super().__init__()
        self.heads, self.mlp_chunks = heads, mlp_chunks
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention_in = nn.Linear(hidden, 3 * hidden)
        self.attention_out = nn.Linear(hidden, hidden)
        self.mlp_norm = nn.LayerNorm(hidden)
        linear = nn.Linear if tiles == 1 else partial(tiled_linear.TiledLinear, out_splits=tiles)
        self.mlp_in = linear(hidden, 4 * hidden)
        self.mlp_out = linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (B, S, H) to (B, S, H)."""
        x = x + self.attend(self.attention_norm(x))
        return x + in_chunks(self.transform, self.mlp_norm(x), self.mlp_chunks)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        """Computes causal self-attention, (B, S, H) -> (B, S, H)."""
        split = self.attention_in(x).unflatten(2, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.attention_out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def transform(self, x: torch.Tensor) -> torch.Tensor:
        """Applies the MLP, (B, S, H) -> (B, S, H)."""
        return self.mlp_out(F.gelu(self.mlp_in(x), approximate="tanh"))  # type: ignore[no-any-return]

    def cut(self, axis: TensorAxis) -> None:
        """Keeps only this rank's heads and its part of the MLP."""
        self.heads //= axis.ranks
        for name, parts in (("attention_in", 3), ("mlp_in", 1)):
            setattr(self, name, OutputsCut(getattr(self, name), axis, parts))
        for name in ("attention_out", "mlp_out"):
            setattr(self, name, InputsCut(getattr(self, name), axis))


class GPT(nn.Module):
    """`forward(tokens, targets)` returns the loss. With `checkpointing` blocks are recomputed in backward.

    `lora`: rank of the adapters, which are then the only trained parameters; 0: none. `loss_chunks`: parts of the
    tokens in which the head and the loss are computed.
    """

    def __init__(
        self, layers: int, hidden: int, heads: int, vocabulary: int, positions: int, tied: bool, checkpointing: bool,
        tiles: int = 1, lora: int = 0, loss_chunks: int = 1, mlp_chunks: int = 1,
    ) -> None:  # fmt: skip
        super().__init__()
        self.token_embedding = nn.Embedding(vocabulary, hidden)
        self.position_embedding = nn.Embedding(positions, hidden)
        self.blocks = nn.ModuleList([self.new_block(hidden, heads, tiles, mlp_chunks) for _ in range(layers)])
        self.norm = nn.LayerNorm(hidden)
        linear = nn.Linear if loss_chunks == 1 else partial(LossHead, loss_chunks)
        self.head = linear(hidden, vocabulary, bias=False)
        if lora:
            add_adapters(self, self.blocks, lora)
        if not self.head.weight.is_meta:  # there are no values, and torch takes long to draw none
            for module, initialize in self.initializers():
                initialize(module)
        if tied:
            self.head.weight = self.token_embedding.weight
        if checkpointing:
            for block in self.blocks:
                policies.recompute(block)

    def initializers(self) -> Iterator[tuple[nn.Module, Callable[[nn.Module], None]]]:
        """Yields the constructor's initialization steps, in order; a model built on meta runs them later."""
        for module in self.modules():
            yield module, initialize
        smaller_normal = partial(nn.init.normal_, std=0.02 / (2 * len(self.blocks)) ** 0.5)
        smaller = partial(tiled_linear.draw_weight, draw=smaller_normal)
        for block in self.blocks:  # GPT-2: the deeper the model, the smaller its residual projections start
            assert isinstance(block, Block)
            yield base_linear(block.attention_out), smaller
            for part in tiled_linear.parts_of(base_linear(block.mlp_out)):
                yield part, smaller
        for module in self.modules():  # last, so that a seed gives the frozen part of a model with and without adapters
            yield module, initialize_adapter

    def cut(self, axis: TensorAxis) -> None:
        """Keeps only this rank's part of each block, for tensor parallelism."""
        for block in self.blocks:
            assert isinstance(block, Block)
            block.cut(axis)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Returns the mean cross-entropy of predicting `targets`, both (B, S)."""
        positions = torch.arange(tokens.size(1), device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if isinstance(self.head, LossHead):
            return self.head(x.flatten(0, 1), targets.flatten())  # type: ignore[no-any-return]
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def new_block(self, *shape: int) -> Block:
        """Returns a block, without initial values."""
        return Block(*shape)


def initialize(module: nn.Module) -> None:
    """Draws the weight of a Linear, an Embedding or a tile; a bias is 0."""
    if isinstance(module, nn.Linear | nn.Embedding | tiled_linear.Tile):
        tiled_linear.draw_weight(module, partial(nn.init.normal_, std=0.02))
    if isinstance(module, nn.Linear | tiled_linear.Tile) and module.bias is not None:
        nn.init.zeros_(module.bias)
