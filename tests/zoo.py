"""Small models with everything that is hard for a flat buffer. Each: `build() -> (module, inputs(rank, n, step))`."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from zerobench import models
from zerobench.zero.low_bit import AdamW8bit, AdamWBf16

WIDTH, WORDS = 19, 37


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width + 1)
        self.down = nn.Linear(3 * width + 1, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Chain(nn.Module):
    """An embedding, blocks in a row (three, if none are given), a head. Models differ in their blocks, or in how they
    run them.
    """

    def __init__(self, *blocks: nn.Module, words: int = WORDS, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(blocks or (Block() for _ in range(3)))
        self.head = nn.Linear(width, words)

    def run(self, h):
        for block in self.blocks:
            h = block(h)
        return h

    def forward(self, x, y):
        return F.cross_entropy(self.head(self.run(self.embedding(x))).flatten(0, 1), y.flatten())


class Tied(Chain):
    """Tied head, scalar parameter, a block run twice, sizes that divide by nothing."""

    def __init__(self, recompute: bool | None = None) -> None:
        super().__init__(*(Block() for _ in range(4)))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.recompute = recompute

    def run(self, h):
        for block in (*self.blocks, self.blocks[1]):
            h = block(h) if self.recompute is None else checkpoint(block, h, use_reentrant=self.recompute)
        return h * self.scale


class Unused(Chain):
    """Parameters that no step uses, ones that every second step uses, and frozen ones."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(WIDTH, 5)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.blocks[2].norm.requires_grad_(False)
        self.calls = 0

    def run(self, h):
        self.calls += 1
        h = self.blocks[0](h)
        if self.calls % 2:
            h = self.blocks[1](h)
        return self.frozen(self.blocks[2](h))


@dataclass
class Output:
    loss: torch.Tensor
    extra: Any = None


class Rich(nn.Module):
    """Blocks that return dataclasses, dicts and tuples with None; an empty module; float64 beside float32."""

    class Stage(nn.Module):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.kind, self.block, self.nothing = kind, Block(), nn.Identity()

        def forward(self, x):
            h = self.block(self.nothing(x))
            return {"dataclass": Output(h), "dict": {"h": h, "none": None}, "tuple": (h, None, 3)}[self.kind]

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Rich.Stage(kind) for kind in ("dataclass", "dict", "tuple"))
        self.wide = nn.Linear(WIDTH, WIDTH).double()
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x, y):
        h = self.blocks[0](self.embedding(x)).loss
        h = self.blocks[2](self.blocks[1](h)["h"])[0]
        h = h + self.wide(h.double()).float()
        return Output(F.cross_entropy(self.head(h).flatten(0, 1), y.flatten()))


class Adapted(Chain):
    """Blocks part frozen, part trainable, recomputed in spans of two."""

    def __init__(self, span: int, reentrant: bool) -> None:
        super().__init__(*(Block() for _ in range(4)))
        for block in self.blocks:
            block.up.requires_grad_(False)
        self.span, self.reentrant = span, reentrant

    def run(self, h):
        for first in range(0, 4, self.span):
            h = checkpoint(self.run_span, first, h, use_reentrant=self.reentrant)
        return h

    def run_span(self, first, h):
        for block in self.blocks[first : first + self.span]:
            h = block(h)
        return h


class Lists(nn.Module):
    """Lists inside a list, called element by element; a module that is called "root"; strided and odd buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.root = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.ModuleList([Block(), Block()]) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)
        self.register_buffer("strided", torch.arange(40.0).view(2, 20)[:, :WIDTH])
        self.register_buffer("transposed", torch.arange(6.0).view(2, 3).t())

    def forward(self, x, y):
        h = self.root(x) + 1e-3 * self.strided[0]
        for pair in self.blocks:
            for block in pair:
                h = block(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


class Convolutions(nn.Module):
    """Convolutions in channels-last memory and BatchNorm's buffers, in a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 7, 3, bias=False), nn.BatchNorm2d(7)
        ).to(memory_format=torch.channels_last)
        self.head = nn.Linear(7, WORDS)

    def forward(self, x, y):
        picture = F.one_hot(x, WORDS).float().unsqueeze(1)
        return F.cross_entropy(self.head(self.layers(picture).mean((2, 3))), y[:, 0])


def tokens(rank: int, n: int, step: int, rows: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randint(0, WORDS, (rows * n, 9), generator=generator)[rows * rank : rows * (rank + 1)]
    return x, (x * 7 + 3) % WORDS


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied,
    "recomputed": lambda: Tied(recompute=False),
    "unused": Unused,
    "rich": Rich,
    "convolutions": Convolutions,
    "adapted": lambda: Adapted(1, False),
    "adapted_spans": lambda: Adapted(2, False),
    "lists": Lists,
    "recomputed_reentrant": lambda: Tied(recompute=True),
    "adapted_reentrant": lambda: Adapted(1, True),
    "adapted_spans_reentrant": lambda: Adapted(2, True),
}

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adam_amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "adamw8bit": lambda p: AdamW8bit(p, lr=1e-2),
    "adamw_bf16": lambda p: AdamWBf16(p, lr=1e-2),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def gpt(**more: Any) -> nn.Module:
    """A GPT of two narrow blocks; `more`: other options of it. The values are those of one seed."""
    torch.manual_seed(3)
    shape = {"layers": 2, "hidden": 20, "heads": 2, "vocabulary": 50, "positions": 16}
    return models.build("gpt", {**shape, "tied": True, "checkpointing": False, **more})


def step_plainly(model: nn.Module, optimizer: optim.Optimizer, rank: int, n: int, steps: Iterable[int]) -> None:
    """Steps of torch alone, with gradients as DDP gives them."""
    for step in steps:
        model(*tokens(rank, n, step)).backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        means = torch.cat([gradient.flatten() for gradient in gradients]).div_(n)
        dist.all_reduce(means)  # at once: collectives are what such a step costs
        for gradient, mean in zip(gradients, means.split([one.numel() for one in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))
        optimizer.step()
        optimizer.zero_grad()
