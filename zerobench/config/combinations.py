"""Tiers, residual policies, codecs and groups together: what of them makes no sense, and what the engine hears."""

from __future__ import annotations

from typing import Any

from . import activations, offload, topology


def problems_of(plain: dict[str, Any]) -> list[str]:
    """Sentences on what of a resolved config's systems makes no sense, alone or together."""
    problems: list[str] = []
    activations.resolve(plain, problems)
    return problems + offload.problems_of(plain) + topology.problems_of(plain)


def engine_options(plain: dict[str, Any], folder: str | None = None) -> dict[str, Any]:
    """Keyword arguments for our engine: what a resolved config says of its systems, beside the usual.

    `folder`: for files, where the config names none.
    """
    return offload.engine_options(plain, folder) | activations.engine_options(plain) | topology.engine_options(plain)
