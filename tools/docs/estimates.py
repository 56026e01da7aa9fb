"""Parts of the page on estimates: the output of its first command, and the fields of its JSON."""

from __future__ import annotations

from dataclasses import fields

from tools.docs.questions import ESTIMATE, recorded
from zerobench.commands.estimate.row import EstimateRow, LargeTensor
from zerobench.records.describe import meanings_of


def example() -> str:
    """The output of the first command of the page, as questions.py has recorded it."""
    return f"```text\n{recorded(ESTIMATE)}\n```"


def schema() -> str:
    """Tables of the fields of an estimate and of its tensors."""
    return "\n\n".join(
        f"{words}\n\n| field | meaning |\n| --- | --- |\n"
        + "\n".join(f"| `{one.name}` | {meanings_of(row)[one.name]} |" for one in fields(row))
        for words, row in (("An estimate:", EstimateRow), ("One of its `tensors`:", LargeTensor))
    )
