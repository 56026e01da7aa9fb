"""Keys that a config does not have, and the names nearest to them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields, is_dataclass
from difflib import get_close_matches

from omegaconf import DictConfig, OmegaConf

from .config import Config


def stray_keys(
    config: DictConfig, elsewhere: Collection[str] = (), schema: type = Config, prefix: str = ""
) -> list[str]:
    """Sentences for keys of a composed config that its schema does not have, but for those of `elsewhere`."""
    known = [one.name for one in fields(schema)]
    problems = []
    for key in config:
        name = f"{prefix}{key!s}"
        if key not in known:
            if name not in elsewhere:
                problems.append(f"{name}: no such key{nearest(str(key), known, prefix.rstrip('.'))}")
            continue
        node = config._get_node(key)
        kind = OmegaConf.get_type(node) if isinstance(node, DictConfig) else None
        if isinstance(node, DictConfig) and kind is not None and is_dataclass(kind):
            problems += stray_keys(node, elsewhere, kind, f"{name}.")
    return problems


def nearest(name: str, known: list[str], prefix: str = "") -> str:
    """What is nearest to a mistyped name, and what is valid, to follow a sentence."""
    full = [f"{prefix}.{k}" if prefix else k for k in known]
    by_last = dict(zip(known, full, strict=True))
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"; did you mean {by_last[near[0]]}?" if near else ""
    return f"{hint} (valid: {', '.join(known)})" if known else hint
