"""Two policies of activations in one model: the first `recomputed` of its blocks are computed again in backward, the
others keep what they need. Each block is a unit of FSDP2 and of ZeRO-3.

    python examples/recompute_some_blocks.py estimate model=mixed model.recomputed=0,2 strategy=fsdp2
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zerobench


class Mixed(nn.Module):
    """Transformer layers between an embedding and a head; `forward(tokens, targets)` returns the loss."""

    def __init__(self, recomputed: int, layers: int, hidden: int, heads: int, vocabulary: int) -> None:
        super().__init__()
        self.recomputed = recomputed
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(hidden, heads, 4 * hidden, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Returns the mean cross-entropy of `targets`, (B, S) as `tokens`."""
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if number < self.recomputed else block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())


def build(recomputed: int = 0, layers: int = 4, hidden: int = 384, heads: int = 6, vocabulary: int = 256) -> nn.Module:
    """Builds the model from the keys `model.recomputed`, `model.layers`, ..."""
    return Mixed(recomputed, layers, hidden, heads, vocabulary)


zerobench.register_model("mixed", build)

if __name__ == "__main__":
    zerobench.main()
