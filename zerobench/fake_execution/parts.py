"""The peak of a simulated cell by part, with activations as wide as the vocabulary separate from the others.

logits        outputs as wide as the vocabulary that a module with a weight makes: the output projection
loss          tensors as wide as the vocabulary made elsewhere: in the loss, its fp32 copy, their gradients
activations, temporary
              the rest of these two ledger categories
"""

from __future__ import annotations

from ..config.cell import CellConfig
from ..records import CATEGORIES, LineRow, TensorRow
from .execute import Execution

LOGITS, LOSS = "logits", "loss"

FLEETING = ("activations", "temporary")
"""Categories that logits and loss are taken from."""

PARTS = (*(name for name in CATEGORIES if name not in ("inputs", "temporary")), LOGITS, LOSS, "inputs", "temporary")
"""The parts, in display order."""


class Parts:
    """Assigns rows of an execution's tables to parts. If modules are unknown (the model cannot be built on the meta
    device), logits count as loss.
    """

    def __init__(self, execution: Execution) -> None:
        self._execution, self._wide = execution, str(vocabulary_of(execution.config))
        self._weighted = execution.facts.weighted if execution.facts else frozenset()

    def of(self, row: LineRow | TensorRow) -> str:
        """Returns the part of a row."""
        if row.category not in FLEETING or row.shape.split("x")[-1] != self._wide:
            return row.category
        return LOGITS if row.module in self._weighted else LOSS

    def at_peak(self) -> dict[str, int]:
        """Returns part -> its bytes at the peak instant; they add up to the peak."""
        execution = self._execution
        parts = dict.fromkeys(PARTS, 0) | execution.at_peak
        for row in execution.record.lines if execution.record else []:
            if row.at == "peak" and (part := self.of(row)) != row.category:
                parts[row.category] -= row.bytes
                parts[part] += row.bytes
        return parts


def vocabulary_of(config: CellConfig) -> int | None:
    """Returns the number of different tokens that the model predicts; None if it has no such option."""
    found = config.model_options.get("vocabulary")
    return found if isinstance(found, int) else config.vocabulary or None
