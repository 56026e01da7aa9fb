"""Models for the scenarios, made of layers and parameters of torch's that are unlike a Linear's."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from tests.distributed.scenario_models import Chain
from tests.zoo import WIDTH, WORDS, Block


class Attention(Chain):
    """torch's own layers, which read their children's weights without calling them."""

    def __init__(self, dropout: float = 0.1) -> None:
        layer = nn.TransformerEncoderLayer(WIDTH, 1, 40, dropout, batch_first=True, norm_first=True)
        super().__init__(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
        self.attention = nn.MultiheadAttention(WIDTH, 1, dropout, batch_first=True, kdim=WIDTH, vdim=WIDTH)

    def run(self, h):
        mask = nn.Transformer.generate_square_subsequent_mask(h.shape[1])
        h = self.blocks[0](h, mask=mask, is_causal=True)
        return h + self.attention(query=h, key=h, value=h, need_weights=False)[0]


class Recurrent(Chain):
    """LSTM and GRU keep their parameters in a flat list of their own."""

    class Cell(nn.Module):
        def __init__(self, kind: type[nn.RNNBase]) -> None:
            super().__init__()
            self.cell, self.out = kind(WIDTH, 7, 2, batch_first=True, bidirectional=True), nn.Linear(14, WIDTH)

        def forward(self, x):
            return x + self.out(self.cell(x)[0])

    def __init__(self) -> None:
        super().__init__(Recurrent.Cell(nn.LSTM), Recurrent.Cell(nn.GRU))


class Parametrized(Chain):
    """Weights that are computed from others at each use; buffers that a forward writes."""

    def __init__(self) -> None:
        super().__init__(Block(), Block(), parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)))
        parametrizations.weight_norm(self.blocks[0].up)
        parametrizations.spectral_norm(self.blocks[1].down)
        parametrizations.orthogonal(self.blocks[1].up, orthogonal_map="householder")
        self.old = nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))

    def run(self, h):
        return self.old(super().run(h))


class Lists(Chain):
    """Parameters in lists and dicts, which are modules that nobody calls."""

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList([torch.randn(WIDTH, WIDTH) / 9 for _ in range(3)])
            self.biases = nn.ParameterDict({"a": torch.zeros(WIDTH), "b": torch.ones(())})

        def forward(self, h):
            for weight in self.weights:
                h = torch.tanh(h @ weight + self.biases["a"] * self.biases["b"])
            return h

    def __init__(self) -> None:
        super().__init__(Lists.Mixture(), Lists.Mixture())
        self.own = nn.ParameterList([torch.ones(WIDTH)])

    def run(self, h):
        return super().run(h) * self.own[0]


class Strided(nn.Module):
    """Parameters whose memory is not in the order of their elements."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Conv2d(6, 8, 3)).to(
            memory_format=torch.channels_last
        )
        self.head = nn.Linear(8, WORDS)
        self.head.weight = nn.Parameter(torch.randn(8, WORDS).t() / 3)

    def forward(self, x, y):
        picture = F.one_hot(x, WORDS).to(self.head.bias.dtype).unsqueeze(1).to(memory_format=torch.channels_last)
        return F.cross_entropy(self.head(self.convolutions(picture).mean((2, 3))), y[:, 0])


class HalfFrozen(Chain):
    """Adapters in fp32 on a frozen base in bf16."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(WIDTH, WIDTH).bfloat16().requires_grad_(False)
            self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

        def forward(self, h):
            return h + self.base(h.bfloat16()).float() + self.up(self.down(h))

    def __init__(self) -> None:
        super().__init__(*(HalfFrozen.Adapted() for _ in range(3)))
        self.embedding.requires_grad_(False)
