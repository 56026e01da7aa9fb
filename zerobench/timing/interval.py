"""The interval of a prediction: factors around it, by its kind of run.

kinds     zerobench/hardware/validated.yaml: kind of run -> factors on the step that contained 90 % of the published
          runs left out when scales were fitted, and the number of runs. `make predicted-runs` writes it
wide      without validation by published runs: WIDER times as far from 1
never     a device without measured tables, whose type no run was compared with: UNKNOWN
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..config.cell import CellConfig
from .costs import GpuCosts
from .hardware import Device, validated

WIDER = 2.0
UNKNOWN = 0.5, 2.0
"""From half to twice the step."""
NOT_VALIDATED = "not validated"


@dataclass(frozen=True)
class StepInterval:
    """`low`, `high`: factors on the step; `words`: their basis."""

    low: float
    high: float
    words: str


def kind_of(device: Device, spans_nodes: bool) -> str:
    """Returns the kind of run that would validate a prediction."""
    return f"{device.type}, {'several nodes' if spans_nodes else 'one node'}"


def interval_of(costs: GpuCosts, config: CellConfig, without_formula: Sequence[str] = ()) -> StepInterval:
    """Returns the interval of a cell's prediction. No published run is on one GPU; the host may bind its step."""
    if config.world_size == 1:
        return interval(costs, f"{costs.device.type}, one GPU", without_formula)
    return interval(costs, kind_of(costs.device, config.world_size > costs.cluster.devices_per_node), without_formula)


def interval(costs: GpuCosts, kind: str, without_formula: Sequence[str] = ()) -> StepInterval:
    """Returns the interval of a prediction for a kind of run. `without_formula`: operators whose time is unknown, and
    counted by their bytes alone.
    """
    known = validated().get("intervals", {})
    unknown = f"no formula for the time of {', '.join(without_formula)}"
    if kind in known:
        low, high = known[kind]["low"], known[kind]["high"]
        if not without_formula:
            return StepInterval(low, high, f"{known[kind]['runs']} published runs on {kind}")
        return StepInterval(low**WIDER, high**WIDER, f"{NOT_VALIDATED}: {unknown}; {WIDER:g} times as wide")
    if costs.device.matmul_table:
        rest = known.get("all", {"low": 0.8, "high": 1.25})
        low, high = (math.exp(WIDER * math.log(rest[end])) for end in ("low", "high"))
        measured = "" if costs.device.collectives_table else "; no table of its collectives"
        reason = f"no published run on {kind}{measured}; {WIDER:g} times as wide"
    else:
        low, high = UNKNOWN
        reason = f"never compared with a run on {kind}; a roofline of its peak and memory speed; from half to twice"
    return StepInterval(low, high, f"{NOT_VALIDATED}: {reason}" + (f"; {unknown}" if without_formula else ""))
