"""Stage 3's root: given back while backward is at other units, and there whenever its parameters are read."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests import zoo
from tests.distributed import training
from tests.distributed.test_scenarios import Chain
from tests.ranks import on_ranks
from tests.zoo import WIDTH, WORDS
from zerobench.zero import initialize


class Tied(Chain):
    """A head that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight


class Functional(Tied):
    """The embedding's matrix is read at the end without a module."""

    def __init__(self) -> None:
        super().__init__()
        del self.head

    def forward(self, x, y):
        return F.cross_entropy(F.linear(self.run(self.embedding(x)), self.embedding.weight).flatten(0, 1), y.flatten())


class Front(Tied):
    """A layer before the blocks, whose backward reads what the root has given back."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(WIDTH, WIDTH)

    def run(self, h):
        return super().run(self.front(h))


class Recomputed(Front):
    """The layer is computed again in backward."""

    def run(self, h):
        return Chain.run(self, checkpoint(self.front, h, use_reentrant=False))


class Beside(Front):
    """A model whose layer feeds the last block alone, so backward comes to it between blocks."""

    def run(self, h):
        beside = self.front(h)
        h = self.blocks[1](self.blocks[0](h))
        return self.blocks[2](h + beside)


class Between(Front):
    """The layer's matrix is read between blocks, and in no module."""

    def run(self, h):
        h = F.linear(self.blocks[0](h), self.front.weight, self.front.bias)
        return self.blocks[2](self.blocks[1](h))


class Own(Tied):
    """A parameter of the root module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def run(self, h):
        return super().run(h * self.scale)


GATHERS = {Tied: 1, Functional: 1, Front: 2, Recomputed: 2, Beside: 2, Between: 1, Own: 1}
"""Gathers of the root in a step, and whether it is given back: never where it might be read unseen."""
KEPT = (Between, Own)


@on_ranks(2)
def test_the_root_is_there_when_it_is_read_and_given_back_in_between(rank: int, n: int, thorough: bool) -> None:
    for build, gathers in GATHERS.items():
        expected = train(build, "ddp", rank, n)
        for keep in ("auto", False, True) if thorough else ("auto",):
            found = train(build, "zero3", rank, n, keep_root=keep)
            training.assert_same(found, expected, build, keep)
            assert keep != "auto" or found[2] == (gathers, build in KEPT), (build, found[2])


def train(build: type[Chain], strategy: str, rank: int, n: int, **options: Any) -> tuple[Any, Any, tuple[int, bool]]:
    """Losses, weights, and of the last step: how often the root was gathered, and whether it stayed to the end."""
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if strategy == "ddp":
        engine: Any = training.engine_of("ddp", model, optimizer)
        root = None
    else:
        engine = initialize(model, optimizer, strategy, **options)
        root = engine._root.units[0]
    losses, gathers, stays = [], [], []
    for step in range(4):
        x, y = zoo.tokens(rank, n, step)
        before = 0 if root is None else count(root)
        loss = engine(x, y)
        handle = model.blocks[1].up.weight.register_hook(lambda _g: stays.append(root is not None and root.is_whole))
        engine.backward(loss)
        handle.remove()
        engine.step()
        gathers.append(0 if root is None else count(root) - before)
        losses.append(loss.item())
    return losses, engine.full_state_dict(), (gathers[-1], stays[-1])


def count(unit: Any) -> int:
    """How often the unit was gathered so far; counts from the first call on."""
    if not hasattr(unit, "gathers"):
        unit.gathers, launch = 0, unit.source.launch

        def counted(*arguments: Any) -> Any:
            unit.gathers += 1
            return launch(*arguments)

        unit.source.launch = counted
    return unit.gathers
