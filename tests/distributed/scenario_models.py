"""Models for the scenarios that the peers' own suites have. Each takes `zoo.tokens` and returns the loss."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.zoo import WIDTH, WORDS, Block


class Chain(nn.Module):
    """An embedding, blocks in a row, a head. The models below differ in their blocks, or in how they run them."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, WORDS)

    def run(self, h):
        for block in self.blocks:
            h = block(h)
        return h

    def forward(self, x, y):
        return F.cross_entropy(self.head(self.run(self.embedding(x))).flatten(0, 1), y.flatten())


class Plain(Chain):
    """Blocks on an embedding that the caller may move; `states`: return the last hidden states instead of the loss."""

    def __init__(self) -> None:
        super().__init__(*(Block() for _ in range(3)))

    def forward(self, x, y, moved=0.0, states=False):
        h = self.run(self.embedding(x) + moved)
        if states:
            return h
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


class Tiny(nn.Module):
    """Fewer elements than ranks, and no element at all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, bias=False))
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.none_frozen = nn.Parameter(torch.empty(0), requires_grad=False)

    def forward(self, x, y):
        h = self.layers(x[:, :1].float() / WORDS) * self.scale
        return (h - y[:, :1].float() / WORDS).square().mean() + self.nothing.sum()


class OnlyRoot(nn.Module):
    """No container, so that stage 3 has the root's unit alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH, padding_idx=0), nn.Linear(WIDTH, WORDS)
        self.bag = nn.EmbeddingBag(WORDS, WIDTH, mode="sum")

    def forward(self, x, y):
        h = self.embedding(x) + self.bag(x).unsqueeze(1)
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


class EmptyRoot(nn.Module):
    """A root without parameters of its own, whose blocks are of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList([nn.Embedding(WORDS, WIDTH), Block(), nn.ReLU(), nn.Linear(WIDTH, WORDS)])

    def forward(self, x, y):
        for step in self.steps:
            x = step(x)
        return F.cross_entropy(x.flatten(0, 1), y.flatten())


class InPlace(Chain):
    """Outputs of blocks that the model writes to."""

    def __init__(self) -> None:
        super().__init__(*(Block() for _ in range(3)))

    def run(self, h):
        for block in self.blocks:
            h = block(h)
            h.mul_(1.1).add_(0.1)
            h[..., 0] = 0
        return h


class NestedCheckpoints(Chain):
    """Recomputation inside recomputation. `reentrant`: None for none."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__(*(Block() for _ in range(4)))
        self.reentrant = reentrant

    def again(self, function, h):
        return function(h) if self.reentrant is None else checkpoint(function, h, use_reentrant=self.reentrant)

    def inner(self, first):
        return lambda h: self.blocks[first + 1](self.again(self.blocks[first], h))

    def run(self, h):
        def outer(h):
            return self.again(self.inner(2), self.again(self.inner(0), h))

        return self.again(outer, h)


class Auxiliary(Chain):
    """Blocks that leave a loss of their own in an attribute, as mixtures of experts do."""

    class Expert(Block):
        def __init__(self) -> None:
            super().__init__()
            self.probe, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

        def forward(self, x):
            out = super().forward(x)
            self.loss = self.gate(self.probe(x)).square().mean()
            return out

    def __init__(self) -> None:
        super().__init__(*(Auxiliary.Expert() for _ in range(3)))

    def forward(self, x, y):
        loss = super().forward(x, y)
        return loss + 0.1 * sum(block.loss for block in self.blocks)


class Hooked(Chain):
    """Hooks of the user's: on parameters, a tied one among them, on modules, and on their backward."""

    def __init__(self) -> None:
        super().__init__(*(Block() for _ in range(3)))
        self.tied = nn.Linear(WIDTH, WORDS, bias=False)
        self.tied.weight = self.embedding.weight
        self.embedding.weight.register_hook(lambda gradient: gradient.clamp(-1e-2, 1e-2))
        self.blocks[0].up.weight.register_hook(lambda gradient: 3 * gradient)
        self.blocks[1].register_forward_pre_hook(lambda module, inputs: (inputs[0] * module.norm.weight,))
        self.blocks[1].register_forward_hook(lambda module, inputs, output: output * module.norm.weight.sum())
        self.blocks[2].register_full_backward_hook(
            lambda module, gradients, _: tuple(g * module.up.weight.detach().mean() for g in gradients)
        )

    def forward(self, x, y):
        h = self.run(self.embedding(x))
        return F.cross_entropy((self.head(h) + self.tied(h)).flatten(0, 1), y.flatten())


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
