"""A user's script for `kills`: it registers models that fail by design, and runs the command line."""

import time

import torch
from torch import nn

import zerobench


class Raises(nn.Module):
    """A layer whose forward fails at its third call. The cell is a crash."""

    def __init__(self, vocabulary: int = 256) -> None:
        super().__init__()
        self.calls = 0
        self.embedding, self.head = nn.Embedding(vocabulary, 8), nn.Linear(8, vocabulary)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Returns the loss of tokens (batch, sequence), until it fails."""
        self.calls += 1
        if self.calls == 3:
            self.fail()
        logits = self.head(self.embedding(tokens))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def fail(self) -> None:
        """Raises RuntimeError."""
        raise RuntimeError("this model fails by design")


class Grabs(Raises):
    """The cell is out of memory."""

    def fail(self) -> None:
        """Asks for more memory than any machine has."""
        torch.empty(2**60, dtype=torch.uint8)


class Hangs(Raises):
    """The cell is a timeout."""

    def fail(self) -> None:
        """Waits for longer than any time limit."""
        time.sleep(1000)


for model in (Raises, Grabs, Hangs):
    zerobench.register_model(model.__name__.lower(), model)

if __name__ in ("__main__", "__mp_main__"):
    zerobench.main()
