"""How a model is trained: the schemas of optimizers and precisions, and words that options may be."""

from __future__ import annotations

import math

from .optimizers import (
    OPTIMIZERS,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Asgd,
    Betas,
    Decaying,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
    Sgd,
)
from .precision import PRECISIONS, Bf16, Fp16, Fp32, Precision

__all__ = [
    "ACCUMULATE", "NORMS", "OPTIMIZERS", "PRECISIONS", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "Asgd",
    "Betas", "Bf16", "Decaying", "Fp16", "Fp32", "NAdam", "Optimizer", "Precision", "RAdam", "RMSprop", "Rprop", "Sgd",
]  # fmt: skip

NORMS = {"2": 2.0, "inf": math.inf}
"""Values of `clip_norm`, and the p of the norm that each means."""

ACCUMULATE = ("every", "last")
"""Values of `strategy.accumulate`: which micro-batches of a step are reduced over the ranks."""
