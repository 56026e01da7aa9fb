"""Tiers, residual policies, codecs and groups together: what of them makes no sense, and what the engine hears."""

from __future__ import annotations

from typing import Any

from . import grouping, offloading, policies


def problems_of(plain: dict[str, Any]) -> list[str]:
    """Sentences on what of a resolved config's systems makes no sense, alone or together."""
    problems: list[str] = []
    policies.resolve(plain, problems)
    return problems + offloading.problems_of(plain) + grouping.problems_of(plain)


def engine_options(plain: dict[str, Any], folder: str | None = None) -> dict[str, Any]:
    """Keyword arguments for our engine: what a resolved config says of its systems, beside the usual.

    `folder`: for files, where the config names none.
    """
    return offloading.engine_options(plain, folder) | policies.engine_options(plain) | grouping.engine_options(plain)
