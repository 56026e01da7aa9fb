"""The sources, one file each: what it prints, as rows. A row more is an entry of its file's ROWS."""

from __future__ import annotations

from dataclasses import dataclass

from ..row import Row
from . import activations, deepspeed, infinity, megatron, offload, zero, zeropp


@dataclass(frozen=True)
class Source:
    """A paper or a document. `label`: as tables name it; `citation`: where it is to be found."""

    label: str
    citation: str
    rows: tuple[Row, ...]


SOURCES = {
    "zero": Source("ZeRO", "arXiv 1910.02054v3", zero.ROWS),
    "megatron": Source("Megatron-core", "dist_optimizer.md", megatron.ROWS),
    "offload": Source("ZeRO-Offload", "arXiv 2101.06840", offload.ROWS),
    "infinity": Source("ZeRO-Infinity", "arXiv 2104.07857", infinity.ROWS),
    "zeropp": Source("ZeRO++", "arXiv 2306.10209", zeropp.ROWS),
    "deepspeed": Source("DeepSpeed's estimators", "deepspeed/runtime/zero and memory.rst", deepspeed.ROWS),
    "activations": Source("Korthikanti et al.", "arXiv 2205.05198", activations.ROWS),
}
"""Name on the command line -> source."""
