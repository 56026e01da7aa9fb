"""What theory needs to know of a model."""

from __future__ import annotations

from collections.abc import Sequence
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


@dataclass(frozen=True)
class OptimizerShape:
    """`states`: tensors of the parameter's size that are kept; `counts`: 4-byte scalars that are kept of a tensor."""

    states: int
    counts: int

    def bytes_of(self, size: int, tensors: int) -> int:
        """For parameters of `size` bytes in all, in so many tensors."""
        return self.states * size + 4 * self.counts * tensors


@dataclass(frozen=True)
class PrecisionShape:
    """Bytes an element of a parameter below fp32: of its gradient as it is accumulated, and as it is sent. Such a
    parameter has an fp32 master; `tile_bytes` of fp32 gradients, or all, exist at once as the optimizer is given them.
    """

    gradient_bytes: int = 4
    wire_bytes: int = 4
    tile_bytes: int | None = 4 * 2**20


@dataclass(frozen=True)
class Schedule:
    """A model's parameters, and one step's order of events.

    `arrivals`: parameters in the order in which their gradients come; one that is missing is not used. Our engine is
    handed the gradient of each use of a tied parameter apart, so that it comes more than once.
    `uses`: stage 3 units in the order in which forward runs them, repeats included, the root not. Both in one
    micro-batch, of which a step has `micro_batches`.
    """

    shapes: tuple[ParameterShape, ...]
    arrivals: tuple[int, ...]
    uses: tuple[str, ...]
    micro_batches: int = 1

    @staticmethod
    def sequential(shapes: Sequence[ParameterShape], micro_batches: int = 1) -> Schedule:
        """What to expect before a run: units as registered, gradients in the reverse order of the parameters."""
        trained = [i for i in reversed(range(len(shapes))) if shapes[i].trainable and shapes[i].numel]
        heads = [i for i in trained for _ in range(shapes[i].uses - 1)]  # tied embeddings are used last, too
        units = tuple(dict.fromkeys(s.unit for s in shapes if s.unit != ROOT))
        return Schedule(tuple(shapes), (*heads, *trained), units, micro_batches)
