"""A user's script for `kills`: it registers models that fail by design, and runs the command line."""

from __future__ import annotations

import time

import torch
from torch import nn

import zerobench


class Failing(nn.Module):
    """A layer, and a forward that ends as `how` says, at its third call: raises, grabs all memory, or hangs."""

    def __init__(self, how: str, vocabulary: int, hidden: int = 8) -> None:
        super().__init__()
        self.how, self.calls = how, 0
        self.embedding, self.head = nn.Embedding(vocabulary, hidden), nn.Linear(hidden, vocabulary)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Returns the loss of tokens (batch, sequence), until it fails."""
        self.calls += 1
        if self.calls == 3:
            FAILURES[self.how]()
        logits = self.head(self.embedding(tokens))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _raise() -> None:
    raise RuntimeError("this model fails by design")


FAILURES = {
    "raises": _raise,
    "grabs": lambda: torch.empty(2**60, dtype=torch.uint8),
    "hangs": lambda: time.sleep(1000),
}


def build_raises(vocabulary: int = 256) -> nn.Module:
    """A model whose cell is a crash."""
    return Failing("raises", vocabulary)


def build_grabs(vocabulary: int = 256) -> nn.Module:
    """A model whose cell is out of memory."""
    return Failing("grabs", vocabulary)


def build_hangs(vocabulary: int = 256) -> nn.Module:
    """A model whose cell is a timeout."""
    return Failing("hangs", vocabulary)


zerobench.register_model("raises", build_raises)
zerobench.register_model("grabs", build_grabs)
zerobench.register_model("hangs", build_hangs)

if __name__ in ("__main__", "__mp_main__"):
    zerobench.main()
