"""An MLP that predicts the next token from the current one: embedding, hidden layers, head.

Shapes: tokens and targets (B, S) int64; hidden (B, S, H); logits (B, S, V).
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class MLP(nn.Module):
    """`forward(tokens, targets)` returns the mean cross-entropy in fp32. Each hidden layer is a unit of stage 3."""

    def __init__(self, layers: int, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers))
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Returns the mean cross-entropy of predicting `targets`, both (B, S)."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = F.gelu(layer(x))
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())
