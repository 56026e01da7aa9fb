"""Models for the scenarios that the peers' own suites have. Each takes `zoo.tokens` and returns the loss."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
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


class Detached(Chain):
    """A block whose output is detached, one under no_grad, one inside a branch that the loss does not reach."""

    def __init__(self) -> None:
        super().__init__(*(Block() for _ in range(5)))

    def run(self, h):
        h = self.blocks[0](h)
        h = h + self.blocks[1](h).detach()
        with torch.no_grad():
            still = self.blocks[2](h)
        self.blocks[3](h)
        return self.blocks[4](h + still)


class StopsItself(Block):
    """A block that detaches its own output."""

    def forward(self, x):
        return super().forward(x).detach()


class Shared(Chain):
    """One block several times in the list; one layer inside of two blocks."""

    def __init__(self) -> None:
        once, other = Block(), Block()
        other.up = once.up
        again = Block()
        again.down.weight = once.down.weight
        super().__init__(once, other, once, again, once)


class Pair(NamedTuple):
    first: torch.Tensor
    second: Any


class Nested(Chain):
    """Keyword inputs in nested containers; outputs in named tuples, lists and dicts, parts of which nobody uses."""

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.side = Block(), nn.Linear(WIDTH, 3)

        def forward(self, *, state, flag=False):
            h = self.block(state["h"][0]["x"])
            side = self.side(h)
            return Pair(h, {"side": [side, None, "text", 3], "flag": flag})

    def __init__(self) -> None:
        super().__init__(*(Nested.Stage() for _ in range(3)))

    def run(self, h):
        for number, block in enumerate(self.blocks):
            pair = block(state={"h": [{"x": h}]}, flag=True)
            h = pair.first + (pair.second["side"][0].mean() if number == 1 else 0)
        return h


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


class Dropped(Chain):
    """Dropout, recomputed: every rank's own random numbers."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(Block(), nn.Dropout(0.3)) for _ in range(3)))
        self.norm = nn.BatchNorm1d(WIDTH)

    def run(self, h):
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False)
        return self.norm(h.transpose(1, 2)).transpose(1, 2)


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


class Branches(nn.Module):
    """One of several branches in a dict, which the caller chooses for each rank and step."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.branches = nn.ModuleDict({name: Block() for name in "abc"})
        self.chosen = "a"

    def forward(self, x, y):
        h = self.branches[self.chosen](self.embedding(x))
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


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
