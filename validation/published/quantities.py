"""Quantities of an executed cell: bytes held and moved, operations of a step; and the sizes that divide them."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from zerobench.fake_execution import Execution
from zerobench.predict.flops import step_flops
from zerobench.records import STATES

from .figure import Parts

HALF_BYTES = 2
"""Bytes of an element of parameters, which M of ZeRO-Offload and ZeRO++ counts in."""


# -- sizes ------------------------------------------------------------------------------------------


def psi(one: Execution) -> float:
    """Trained parameters, ψ."""
    return float(sum(shape.numel for shape in one.result.schedule.shapes if shape.trainable))


def per_size(*names: str) -> Callable[[Execution], float]:
    """Returns the product of sizes of a cell: L layers, h hidden, b sequences, s tokens of one; one may come twice."""

    def size(one: Execution) -> float:
        options = one.config.model_options
        sizes = {"L": options["layers"], "h": options["hidden"], "b": one.config.micro_batch, "s": one.config.sequence}
        return float(prod(sizes[name] for name in names))

    return size


# -- memory -----------------------------------------------------------------------------------------


def states(one: Execution) -> Parts:
    """Bytes of the states on the device, at the instant where their sum is largest."""
    rows = [row for row in one.result.memory if row.phase == "step" and row.tier == "device"]
    return {row.category: float(row.at_states_peak_bytes or 0) for row in rows if row.category in STATES}


def most_of(category: str) -> Callable[[Execution], Parts]:
    """Returns the largest sum of one category on the device."""

    def most(one: Execution) -> Parts:
        rows = [row for row in one.result.memory if (row.phase, row.tier) == ("step", "device")]
        return {category: float(sum(row.max_bytes for row in rows if row.category == category))}

    return most


# -- traffic ----------------------------------------------------------------------------------------


def volume(one: Execution) -> Parts:
    """Elements that the rank moves in a step, by collective, as the paper counts them."""
    return _sums(one, "volume_elements")


def moved(*kinds: str) -> Callable[[Execution], Parts]:
    """Returns payload bytes in a step by kind of collective or link."""
    return lambda one: {kind: size for kind, size in _sums(one, "payload_bytes").items() if kind in kinds}


def between_nodes(*where: tuple[str, str]) -> Callable[[Execution], Parts]:
    """Returns bytes that cross nodes in (phase, kind) collectives, in units of 2-byte elements of the whole model: each
    of N ranks in Z nodes sends (Z - 1)/N of what a collective moves.
    """

    def crossing(one: Execution) -> Parts:
        ranks = one.config.world_size
        nodes = ranks // (one.config.node_size or ranks)
        whole = ranks / (nodes - 1) / HALF_BYTES
        rows = [row for row in one.result.traffic if not row.control]
        return {
            f"{phase} {kind}": whole * sum(r.between_bytes for r in rows if (r.phase, r.kind) == (phase, kind))
            for phase, kind in where
        }

    return crossing


def _sums(one: Execution, column: str) -> Parts:
    sums: Parts = {}
    for row in one.result.traffic:
        if not row.control:
            sums[row.kind] = sums.get(row.kind, 0.0) + getattr(row, column)
    return sums


# -- arithmetic -------------------------------------------------------------------------------------


def flops(one: Execution) -> Parts:
    """FLOPs of a step, with what is computed again; torch's counter over the model without memory."""
    counted = step_flops(one.config)
    if counted is None:
        raise ValueError("the model reads values, so that its FLOPs cannot be counted without a run")
    return {"FLOPs": float(counted.hardware)}


def sum_of(parts: Callable[[Execution], Parts]) -> Callable[[Execution], float]:
    """Returns a quantity as a size."""
    return lambda one: sum(parts(one).values())
