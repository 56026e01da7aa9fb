"""Models by name. Each name has a builder of a module whose `forward(tokens, targets)` returns the loss.

Config and all above it may import it.

A model of your own is a function whose keyword parameters are its options (registry.py, docs/tutorials/own-model.md)::

    def build(width: int = 64, depth: int = 2, vocabulary: int = 256) -> nn.Module: ...

    zerobench.register_model("mine", build)      # in your script, at top level
    zerobench.main()                             # then: python mine.py -m model=mine model.width=64,128

`vocabulary` and `sequence`, if the function takes them, are filled from the run's data. A package can offer models
without a script, by entry points of the group "zerobench.models". An error in a user's `forward` gets a note on how it
was called.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..data import arguments_of, shown_call
from ..registry import DATA, MODELS, Builder
from . import huggingface
from .gpt import GPT
from .gpt_moe import GPTMoe


class MLP(nn.Module):
    """Predicts the next token from the current one: embedding, hidden layers, head. `forward(tokens, targets)` returns
    the mean cross-entropy in fp32. Each hidden layer is a unit of stage 3.
    """

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


OWN: dict[str, Builder] = {"gpt": GPT, "gpt_moe": GPTMoe, "mlp": MLP}

_BUILT_IN = OWN | {"huggingface": huggingface.build}


def build(kind: str, options: dict[str, Any]) -> nn.Module:
    """Builds model `kind` from its resolved options."""
    builder = _BUILT_IN.get(kind) or MODELS.all()[kind]
    model: nn.Module = builder(**options)
    return model


@dataclass(frozen=True)
class Called:
    """The model and data of a call, for errors. `kind`: its builder's name; `model`: the choice in the group."""

    kind: str
    model: str
    data: str


def loss_of(engine: Any, batch: Any, called: Called) -> torch.Tensor:
    """Returns the loss of a batch, a scalar. Raises TypeError if the model returns anything else; errors of a user's
    model or data carry a note on how it was called.
    """
    inputs, named = arguments_of(batch)

    def terms() -> str:
        call = f"model={called.model} is called as {shown_call(batch)} with data={called.data}"
        return f"{call}, and must return the loss, a scalar tensor"

    try:
        loss: torch.Tensor = engine(*inputs, **named)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        if called.kind not in MODELS.own or called.data not in DATA.own:
            error.add_note(terms())
        raise
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        result = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise TypeError(f"forward returned {result}; {terms()}")
    if not loss.requires_grad:
        raise TypeError(f"forward returned a loss that depends on no trainable parameter; {terms()}")
    return loss
