"""The peak of an execution by part, with what the vocabulary costs apart from the other activations.

logits        outputs as wide as the vocabulary that a module with a weight makes: the output projection's
loss          what is as wide as the vocabulary and made elsewhere: the loss, its copy in fp32, their gradients
activations, temporary
              all others of these two categories of the ledger
"""

from __future__ import annotations

import torch
from torch import nn

from ..config.cell import CellConfig
from ..fake.skipped_random_draws import Undrawn
from ..predict.build import build_model
from ..records import CATEGORIES, LineRow, TensorRow
from .execute import Execution

LOGITS, LOSS = "logits", "loss"

FLEETING = ("activations", "temporary")
"""Categories that logits and loss are taken out of."""

PARTS = (*(name for name in CATEGORIES if name not in ("inputs", "temporary")), LOGITS, LOSS, "inputs", "temporary")
"""The parts, in the order in which they are shown."""


class Parts:
    """Tells the part of what an execution's tables name. Where no module can be told (a model that cannot be built
    without memory), logits count as loss.
    """

    def __init__(self, config: CellConfig) -> None:
        self._wide = str(vocabulary_of(config))
        self._weighted = _modules_with_weights(config)

    def of(self, row: LineRow | TensorRow) -> str:
        """Returns the part of a row."""
        if row.category not in FLEETING or row.shape.split("x")[-1] != self._wide:
            return row.category
        return LOGITS if row.module in self._weighted else LOSS

    def at_peak(self, execution: Execution) -> dict[str, int]:
        """Returns part -> its bytes at the peak instant; they add up to the peak."""
        parts = dict.fromkeys(PARTS, 0) | execution.at_peak
        for row in execution.record.lines if execution.record else []:
            if row.at == "peak" and (part := self.of(row)) != row.category:
                parts[row.category] -= row.bytes
                parts[part] += row.bytes
        return parts


def vocabulary_of(config: CellConfig) -> int | None:
    """Returns the number of different tokens that the model predicts; None for one that has no such option."""
    found = config.model_options.get("vocabulary")
    return found if isinstance(found, int) else config.vocabulary or None


def _modules_with_weights(config: CellConfig) -> set[str]:
    """Returns the names of modules without children that have parameters."""
    try:
        with torch.device("meta"), Undrawn():
            model: nn.Module = build_model(config)
    except Exception:  # a user's builder may do things that a model without memory cannot
        return set()
    return {name for name, one in model.named_modules() if not [*one.children()] and [*one.parameters(recurse=False)]}
