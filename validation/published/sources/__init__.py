"""The sources, one file each: what it prints, as rows. A row more is an entry of its file's ROWS."""

from __future__ import annotations

from dataclasses import dataclass

from ..figure import PublishedFigure
from . import activations, deepspeed, infinity, megatron, offload, zero, zeropp


@dataclass(frozen=True)
class Paper:
    """A paper or a document. `label`: as tables name it; `citation`: where it is to be found."""

    label: str
    citation: str
    rows: tuple[PublishedFigure, ...]


SOURCES = {
    "zero": Paper("ZeRO", "arXiv 1910.02054v3", zero.ROWS),
    "megatron": Paper("Megatron-core", "dist_optimizer.md", megatron.ROWS),
    "offload": Paper("ZeRO-Offload", "arXiv 2101.06840", offload.ROWS),
    "infinity": Paper("ZeRO-Infinity", "arXiv 2104.07857", infinity.ROWS),
    "zeropp": Paper("ZeRO++", "arXiv 2306.10209", zeropp.ROWS),
    "deepspeed": Paper("DeepSpeed's estimators", "deepspeed/runtime/zero and memory.rst", deepspeed.ROWS),
    "activations": Paper("Korthikanti et al.", "arXiv 2205.05198", activations.ROWS),
}
"""Name on the command line -> source."""
