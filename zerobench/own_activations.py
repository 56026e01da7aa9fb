"""What a cell's model needs of activations by itself, for rank 0 of the accounted pass to bring home."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

KINDS = ("gpt", "mlp")
"""Models that look at no values: their activations can be foretold."""

DATA = ("text", "synthetic")
"""Batches of tokens."""


def of(config: dict[str, Any], batches: Any, build: Callable[[dict[str, Any]], nn.Module]) -> int | None:
    """Bytes on the device at most, of the model that `build` makes of a resolved cell; None where nothing is foretold:
    for GPUs, whose kernels keep other things, for models and data of others, and where a policy moves activations.
    """
    moved = config.get("activation", {}).get("name", "none") != "none" or config.get("arena")
    if config["device"] != "cpu" or moved:
        return None
    if config["model"]["kind"] not in KINDS or config["data"]["name"] not in DATA:
        return None
    from .probes.foretold import activation_bytes  # not for ranks that do without

    with torch.device("meta"):
        model = build(config)
    return activation_bytes(model, batches.batch(0, 0))
