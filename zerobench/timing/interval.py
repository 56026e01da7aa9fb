"""The interval of a prediction: factors around it, by its kind of run.

kinds     zerobench/hardware/validated.yaml: kind of run -> factors on the step that contained 90 % of the published
          runs left out when scales were fitted, and the number of runs. `make predicted-runs` writes it
wide      without validation by published runs: WIDER times as far from 1
never     a device without measured tables, whose type no run was compared with: UNKNOWN
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
    """Returns the interval of a cell's prediction. No published run is on one GPU; the host may bind its step.
    `without_formula`: operators whose time is unknown, and counted by their bytes alone.
    """
    if config.world_size == 1:
        return _unless(without_formula, _wider(costs, f"{costs.device.type}, one GPU"))
    return interval(costs, config.world_size > costs.cluster.devices_per_node, without_formula)


def _unless(without_formula: Sequence[str], found: StepInterval) -> StepInterval:
    """Returns the interval, not validated if there are operators without a formula."""
    if not without_formula:
        return found
    names = f"no formula for the time of {', '.join(without_formula)}"
    if found.words.startswith(NOT_VALIDATED):
        return replace(found, words=f"{found.words}; {names}")
    words = f"{NOT_VALIDATED}: {names}; {WIDER:g} times as wide"
    return StepInterval(found.low**WIDER, found.high**WIDER, words)


def interval(costs: GpuCosts, spans_nodes: bool, without_formula: Sequence[str] = ()) -> StepInterval:
    """Returns the interval of a prediction on some hardware."""
    kind, known = kind_of(costs.device, spans_nodes), validated().get("intervals", {})
    if kind in known:
        row = known[kind]
        found = StepInterval(row["low"], row["high"], f"{row['runs']} published runs on {kind}")
        return _unless(without_formula, found)
    return _unless(without_formula, _wider(costs, kind))


def _wider(costs: GpuCosts, kind: str) -> StepInterval:
    rest = validated().get("intervals", {}).get("all", {"low": 0.8, "high": 1.25})
    low, high = (math.exp(WIDER * math.log(row)) for row in (rest["low"], rest["high"]))
    if not costs.device.matmul_table:
        words = f"never compared with a run on {kind}; a roofline of its peak and memory speed; from half to twice"
        return StepInterval(*UNKNOWN, f"{NOT_VALIDATED}: {words}")
    measured = "" if costs.device.collectives_table else "; no table of its collectives"
    return StepInterval(low, high, f"{NOT_VALIDATED}: no published run on {kind}{measured}; {WIDER:g} times as wide")
