"""The training that a watched loop is meant to do: what its user declares, a reference, and defaults.

Whatever is not declared is expected to equal the reference, if there is one. Else only an invariant of the engine is
expected; what most loops do (masters of float32, one update per step) is a heuristic, and its opposite unusual.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from .certificate import Certificate

PARTITIONED = ("zero_redundancy", "zero1", "zero2", "zero3", "megatron", "fsdp1", "fsdp2", "deepspeed")
"""Strategies that partition optimizer states."""

REPLICATED = ("ddp", "zero_redundancy")
"""Strategies that keep equal parameters on all ranks; in a plain loop ranks may hold different experts."""

DATA_PARALLEL = (*PARTITIONED, "ddp")
"""Strategies whose ranks usually have samples of their own."""


@dataclass(frozen=True)
class ExpectedTraining:
    """The training that `zerobench.watch(..., verify=...)` expects. All fields are optional.

    masters        dtype of the tensors that the optimizer updates
    moments        dtype of their states
    gradients      dtype of the gradients that the optimizer gets
    computes       dtype that modules with parameters compute in
    wire           kind of collective -> its dtype, such as {"all_gather": "bfloat16"}
    optimizer      class of the optimizer, or pattern of parameters' names -> class; the first match counts
    accumulation   micro-batches per update
    reductions     times that each gradient is reduced over the ranks per update: 1 if only the last micro-batch does so
    copies         copies of each optimizer state in the job: 1 if states are partitioned over all ranks
    clip           the largest norm that the optimizer may get
    data           "distinct": each rank has samples of its own, so that losses differ between ranks
    reference      certificate, or folder, of the same training by plain torch in one process on the same global batches
    unlike         certificate, or folder, of a loop that is meant to differ: equal bytes, dtypes, collectives and
                   losses then mean that the option between them changed nothing
    """

    masters: str = ""
    moments: str = ""
    gradients: str = ""
    computes: str = ""
    wire: Mapping[str, str] = field(default_factory=dict)
    optimizer: str | Mapping[str, str] = ""
    accumulation: int | None = None
    reductions: int | None = None
    copies: float | None = None
    clip: float | None = None
    data: Literal["", "distinct"] = ""
    reference: Certificate | str | Path | None = None
    unlike: Certificate | str | Path | None = None

    def optimizer_of(self, name: str) -> str:
        """Returns the expected class of the optimizer of a parameter; empty if none is declared."""
        patterns = {"*": self.optimizer} if isinstance(self.optimizer, str) else self.optimizer
        return next((kind for pattern, kind in patterns.items() if fnmatch(name, pattern)), "")
