"""The reference of keys: every group and key with its unit and meaning."""

from __future__ import annotations

from zerobench.config.meanings import KEYS


def page() -> str:
    """A table of all keys."""
    lines = [f"| `{key}` | {unit} | {meaning} |" for key, (unit, meaning) in KEYS.items()]
    return "\n".join(["| key | unit | meaning |", "| --- | --- | --- |", *lines])
