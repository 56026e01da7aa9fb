"""Probes of the three passes, with one interface. The timed pass has a clock and nothing else; the accounted pass the
ledger and the traffic meter; the traced pass, where requested, a profiler. All work beneath every strategy, without
its cooperation.
"""

from __future__ import annotations

import torch

from .accounted import AccountedPass
from .clock import TimedPass
from .traced import TracedPass

PASSES: dict[str, type[TimedPass] | type[AccountedPass]] = {
    "timed": TimedPass,
    "accounted": AccountedPass,
    "traced": TracedPass,
}


def make_pass(mode: str, device: torch.device, node_size: int | None) -> TimedPass | AccountedPass:
    """The probe of a pass. `node_size`: ranks a node, of which the traffic meter must know; None: all are one."""
    probe = PASSES[mode](device)
    if isinstance(probe, AccountedPass):
        probe.meter.node_size = node_size
    return probe


__all__ = ["PASSES", "AccountedPass", "TimedPass", "TracedPass", "make_pass"]
