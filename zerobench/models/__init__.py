"""Models by name. Each name has a builder of a module whose `forward(tokens, targets)` returns the loss.

A model of your own is a function whose keyword parameters are its options (registry.py, docs/tutorials/own-model.md)::

    def build(width: int = 64, depth: int = 2, vocabulary: int = 256) -> nn.Module: ...

    zerobench.register_model("mine", build)      # in your script, at top level
    zerobench.main()                             # then: python mine.py -m model=mine model.width=64,128

`vocabulary` and `sequence`, if the function takes them, are filled from the run's data. A package can offer models
without a script, by entry points of the group "zerobench.models".
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..registry import MODELS, Builder
from . import huggingface
from .gpt import GPT
from .gpt_moe import GPTMoe
from .mlp import MLP

OWN: dict[str, Builder] = {"gpt": GPT, "gpt_moe": GPTMoe, "mlp": MLP}

_BUILT_IN = OWN | {"huggingface": huggingface.build}


def build(kind: str, options: dict[str, Any]) -> nn.Module:
    """Builds model `kind` from its resolved options."""
    builder = _BUILT_IN.get(kind) or MODELS.all()[kind]
    model: nn.Module = builder(**options)
    return model
