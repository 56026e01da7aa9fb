"""Tokens for training: a text file read byte by byte, or seeded random ones.

A step's *global* batch depends on the seed and the step only. Rank r of N takes its r-th part, and that part
is split into micro-batches, so that N ranks together see what one rank would, however they accumulate.
"""

from __future__ import annotations

import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch

TEXT_VOCABULARY = 256


@dataclass(frozen=True)
class Batches:
    """Batches of one rank. `text`: (bytes,) uint8, or None for uniform random tokens below `vocabulary`."""

    text: torch.Tensor | None
    vocabulary: int
    sequence: int
    micro_batch: int
    accumulation: int
    rank: int
    world_size: int
    seed: int
    device: torch.device

    def batch(self, step: int, micro: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and targets (the tokens that follow), both (micro_batch, sequence) int64, of one micro-batch."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        rows, length = self.micro_batch * self.accumulation * self.world_size, self.sequence + 1
        if self.text is None:
            drawn = torch.randint(self.vocabulary, (rows, length), generator=generator)
        else:
            starts = torch.randint(len(self.text) - length + 1, (rows, 1), generator=generator)
            drawn = self.text[starts + torch.arange(length)].long()
        first = (self.rank * self.accumulation + micro) * self.micro_batch
        mine = self._place(drawn[first : first + self.micro_batch])
        return mine[:, :-1].contiguous(), mine[:, 1:].contiguous()

    def _place(self, tokens: torch.Tensor) -> torch.Tensor:
        """On the device; a GPU fetches them from pinned memory when it gets to it."""
        return tokens.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tokens


def default_text() -> Path:
    """English that every Python carries: the source of `pydoc_data.topics`, about half a megabyte."""
    spec = importlib.util.find_spec("pydoc_data.topics")
    if spec is None or spec.origin is None:
        raise ValueError("data.path: this Python carries no pydoc_data.topics; name a text file of your own")
    return Path(spec.origin)


def read_text(path: str | None, sequence: int) -> torch.Tensor:
    """The bytes of `path` (default: `default_text`), (bytes,) uint8. Raises ValueError with a sentence."""
    where = Path(path).expanduser() if path else default_text()
    if not where.is_file():
        raise ValueError(f"data.path={path}: there is no such file; name a local text file")
    content = where.read_bytes()
    if len(content) <= sequence:
        raise ValueError(f"data.path={path}: {len(content)} bytes are too few for sequence={sequence}")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def text_hash(path: str | None) -> str:
    """SHA-256 of the text, 16 hex digits; it goes into the row, for texts differ between machines."""
    where = Path(path).expanduser() if path else default_text()
    return hashlib.sha256(where.read_bytes()).hexdigest()[:16]
