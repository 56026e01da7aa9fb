"""What theory needs to know of a model."""

from __future__ import annotations

from dataclasses import dataclass

ROOT = ""
"""The stage 3 unit of what lies in no module group."""


@dataclass(frozen=True)
class ParameterShape:
    """One unique parameter, in the module's order. `unit`: its module group in stage 3, ROOT for the rest.

    `uses`: the number of places in the module where it stands; more than one means that it is tied.
    """

    numel: int
    element_bytes: int
    trainable: bool
    unit: str
    uses: int = 1
