"""The peak of a simulated cell by part, with activations as wide as the vocabulary separate from the others.

logits        outputs as wide as the vocabulary that a module with a weight makes: the output projection
loss          tensors as wide as the vocabulary made elsewhere: in the loss, its fp32 copy, their gradients
activations, temporary
              the rest of these two ledger categories
"""

from __future__ import annotations

from ..records import CATEGORIES, LineRow, TensorRow
from .execute import Execution

LOGITS, LOSS = "logits", "loss"

FLEETING = ("activations", "temporary")
"""Categories that logits and loss are taken from."""

PARTS = (*(name for name in CATEGORIES if name not in ("inputs", "temporary")), LOGITS, LOSS, "inputs", "temporary")
"""The parts, in display order."""


def part_of(row: LineRow | TensorRow, execution: Execution) -> str:
    """Returns the part of a row of an execution's tables. If modules are unknown (the model cannot be built on the meta
    device), logits count as loss.
    """
    if row.category not in FLEETING:
        return row.category
    vocabulary = execution.config.model_options.get("vocabulary")
    width = vocabulary if isinstance(vocabulary, int) else execution.config.vocabulary or None
    if row.shape.split("x")[-1] != str(width):
        return row.category
    return LOGITS if execution.facts and row.module in execution.facts.weighted else LOSS


def parts_at_peak(execution: Execution) -> dict[str, int]:
    """Returns part -> its bytes at the peak instant; they add up to the peak."""
    parts = dict.fromkeys(PARTS, 0) | execution.at_peak
    for row in execution.known.lines:
        if row.at == "peak" and (part := part_of(row, execution)) != row.category:
            parts[row.category] -= row.bytes
            parts[part] += row.bytes
    return parts
