"""The calling convention of models; an error in a user's `forward` gets a note on how it was called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..data import arguments_of, words_of
from ..registry import DATA, MODELS


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
    try:
        loss: torch.Tensor = engine(*inputs, **named)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        if called.kind not in MODELS.own or called.data not in DATA.own:
            error.add_note(_terms(batch, called))
        raise
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        result = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise TypeError(f"forward returned {result}; {_terms(batch, called)}")
    if not loss.requires_grad:
        raise TypeError(f"forward returned a loss that depends on no trainable parameter; {_terms(batch, called)}")
    return loss


def _terms(batch: Any, called: Called) -> str:
    model, data = called.model, called.data
    return f"model={model} is called as {words_of(batch)} with data={data}, and must return the loss, a scalar tensor"
