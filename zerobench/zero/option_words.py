"""Parses the word form of `initialize`'s options, as on the command line: offload="cpu", zeropp="qwz",
wire_dtype="bf16".
"""

from __future__ import annotations

from typing import Any

import torch

from .comm.zeropp import Zeropp
from .offload.policy import Offload
from .precision import DTYPES

WORDS: dict[str, dict[str, Any]] = {
    "offload": {"none": None, "cpu": Offload()},
    "zeropp": {
        "none": None,
        "qwz": Zeropp(quantize_weights=True),
        "hpz": Zeropp(secondary_shards=True),
        "qgz": Zeropp(quantize_gradients=True),
        "all": Zeropp(quantize_weights=True, secondary_shards=True, quantize_gradients=True),
    },
    "gradient_dtype": DTYPES,
    "wire_dtype": DTYPES,
    "initial_dtype": DTYPES,
}

KINDS: dict[str, type] = {"offload": Offload, "zeropp": Zeropp}
"""Option -> the type that it may have besides a word, apart from None."""


def spelled_out(options: dict[str, Any]) -> dict[str, Any]:
    """Returns `options` with words replaced by their values. Raises ValueError for unknown words."""
    return {name: _value_of(name, given) for name, given in options.items()}


def _value_of(name: str, given: Any) -> Any:
    if isinstance(given, str) and name in ("device", "initial_device"):
        return torch.device(given)
    if isinstance(given, str) and name in WORDS:
        if name == "offload" and given == "nvme":
            raise ValueError("offload: 'nvme' needs a folder for its files; pass zerobench.zero.NvmeOffload(path=...)")
        if given not in WORDS[name]:
            raise ValueError(f"{name}: {given!r} is unknown; use one of {', '.join(WORDS[name])}")
        return WORDS[name][given]
    kind = KINDS.get(name)
    if kind is not None and given is not None and not isinstance(given, kind):
        words = ", ".join(repr(word) for word in WORDS[name])
        raise ValueError(f"{name}: {given!r} cannot be; use {words} or a zerobench.zero.{kind.__name__}")
    return given
