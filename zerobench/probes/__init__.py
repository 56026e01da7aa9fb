"""Probes of the three passes, with one interface. The timed pass has only a clock and the allocator's counter; the
accounted pass the ledger and the traffic meter; the traced pass, if requested, a profiler. All work beneath every
strategy, without its cooperation.

Ranks (worker.py), watches and all above them import it.
"""

from __future__ import annotations

import torch

from .accounted_pass import AccountedPass
from .in_transit import InTransit
from .intervals import History
from .probe import Probe
from .timed_pass import TimedPass
from .traced_pass import TracedPass


def make_pass(
    mode: str, device: torch.device, node_size: int | None, history: History | None = None, fake: bool = False,
    foreign: bool = False, events: bool = False, operators: bool = False, model_ranks: int = 1,
) -> Probe:  # fmt: skip
    """Returns the probe of a pass. `node_size`: ranks per node, for traffic between nodes; None: all are on one node.

    `fake`: tensors are fake. `foreign`: code other than ours launches collectives, and drops tensors before gloo does.
    `history`: the records that an accounted pass keeps for a snapshot; None: none.
    `events`: whether it keeps its last step event by event; `operators`: with every operator that computes.
    `model_ranks`: consecutive ranks that share a model.
    """
    if mode != "accounted":
        return {"timed": TimedPass, "traced": TracedPass}[mode](device)
    accounted = AccountedPass(device, node_size, history=history, fake=fake, events=events, operators=operators)
    accounted.ledger.in_transit = InTransit() if (foreign or model_ranks > 1) and not fake else None
    accounted.meter.model_ranks = model_ranks
    if model_ranks > 1:
        accounted.ledger.within_model = accounted.meter.within_model
    return accounted


__all__ = ["AccountedPass", "Probe", "TimedPass", "TracedPass", "make_pass"]
