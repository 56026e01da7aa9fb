"""Batches for training: tokens of a text file read byte by byte, seeded random ones, or batches of a user's builder.

A step's *global* batch depends on the seed and the step only. Rank r of N takes its r-th part, which is split into
micro-batches, so that N ranks together train on the batch of one rank, for every accumulation.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .registry import DATA

TEXT_VOCABULARY = 256


@dataclass(frozen=True)
class Batching:
    """The source of a run's batches. `options`: of a user's builder; `path`, `vocabulary`: of built-in data.
    `micro_batch`: samples of one rank; `dtype`: of floating-point tensors.
    """

    name: str
    options: Mapping[str, Any]
    path: str | None
    vocabulary: int
    world_size: int
    micro_batch: int
    accumulation: int
    sequence: int
    seed: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Batches:
    """Batches of one rank. `text`: (bytes,) uint8, or None for uniform random tokens below the source's vocabulary."""

    source: Batching
    text: torch.Tensor | None
    rank: int
    device: torch.device

    def batch(self, step: int, micro: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns tokens and targets (the following tokens), both (micro_batch, sequence) int64, of one micro-batch."""
        source, size = self.source, self.source.micro_batch
        generator = torch.Generator().manual_seed(source.seed * 1_000_003 + step)
        rows, length = size * source.accumulation * source.world_size, source.sequence + 1
        if self.text is None:
            drawn = torch.randint(source.vocabulary, (rows, length), generator=generator)
        else:
            starts = torch.randint(len(self.text) - length + 1, (rows, 1), generator=generator)
            drawn = self.text[starts + torch.arange(length)].long()
        first = (self.rank * source.accumulation + micro) * size
        own = drawn[first : first + size]
        if self.device.type == "cuda":  # asynchronously, from pinned memory
            own = own.pin_memory().to(self.device, non_blocking=True)
        return own[:, :-1].contiguous(), own[:, 1:].contiguous()


class OwnBatches:
    """Batches of one rank from a user's builder: a function of step and micro-batch, or an iterable. Tensors in a
    batch, at any depth of tuples, lists and dicts, are moved to `device`; floating-point ones become `dtype`. Raises
    TypeError for anything else.
    """

    def __init__(self, name: str, source: Any, device: torch.device, dtype: torch.dtype) -> None:
        if not callable(source) and not isinstance(source, Iterable):
            given = type(source).__name__
            raise TypeError(
                f"data={name}: its builder returned {given}; return a function of (step, micro) or an iterable"
            )
        if getattr(source, "num_workers", 0):
            raise TypeError(f"data={name}: a rank starts no processes of its own; make the DataLoader's num_workers 0")
        self.name, self._device, self._dtype = name, device, dtype
        self._source: Callable[[int, int], Any] = source if callable(source) else _Repeated(name, source)

    def batch(self, step: int, micro: int = 0) -> Any:
        with _blamed_on(self.name):
            return self._place(self._source(step, micro))

    def _place(self, part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            part = part.to(self._dtype) if part.is_floating_point() else part
            pinned = part.pin_memory() if self._device.type == "cuda" and part.device.type == "cpu" else part
            return pinned.to(self._device, non_blocking=True)
        if isinstance(part, dict):
            return {key: self._place(value) for key, value in part.items()}
        if isinstance(part, tuple) and hasattr(part, "_fields"):
            return type(part)(*(self._place(value) for value in part))
        return type(part)(self._place(value) for value in part) if isinstance(part, tuple | list) else part


class _Repeated:
    """An iterable as a function of step and micro-batch, called in their order; restarted at its end."""

    def __init__(self, name: str, source: Iterable[Any]) -> None:
        self._name, self._source = name, source
        self._left: Iterator[Any] = iter(source)

    def __call__(self, _step: int, _micro: int) -> Any:
        for _ in range(2):
            for batch in self._left:
                return batch
            self._left = iter(self._source)
        raise ValueError(f"data={self._name}: its iterable is empty, or can be gone through only once")


def arguments_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the positional and the named arguments with which a model is called on a batch."""
    if isinstance(batch, dict):
        return (), batch
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,), {}


def shown_call(batch: Any) -> str:
    """Describes a call with this batch: "forward(float32 (8, 3, 32, 32), int64 (8,))"."""
    inputs, named = arguments_of(batch)

    def shown(part: Any) -> str:
        if isinstance(part, torch.Tensor):
            return f"{str(part.dtype).removeprefix('torch.')} {tuple(part.shape)}"
        return type(part).__name__

    parts = [*map(shown, inputs), *(f"{key}={shown(part)}" for key, part in named.items())]
    return f"forward({', '.join(parts)})"


def build_batches(source: Batching, rank: int, device: torch.device) -> Batches | OwnBatches:
    """The batches of one rank."""
    if source.name not in DATA.own:
        # a user's builder gets its options, and those values of the run that it takes as parameters
        given = vars(source) | {"rank": rank}
        filled = {key: given[key] for key in DATA.filled if DATA.takes(source.name, key)}
        with _blamed_on(source.name):
            built = DATA.all()[source.name](**source.options, **filled)
        return OwnBatches(source.name, built, device, source.dtype)
    text = read_text(source.path, source.sequence) if source.name == "text" else None
    return Batches(source, text, rank, device)


@contextmanager
def _blamed_on(name: str) -> Iterator[None]:
    """Adds a note on the origin to errors that are raised inside."""
    try:
        yield
    except Exception as error:
        error.add_note(f"it comes from the builder or the batches of data={name}")
        raise


def default_text() -> Path:
    """Returns an English text that every Python includes: the source of `pydoc_data.topics`, about half a megabyte."""
    spec = importlib.util.find_spec("pydoc_data.topics")
    if spec is None or spec.origin is None:
        raise ValueError("data.path: this Python carries no pydoc_data.topics; name a text file of your own")
    return Path(spec.origin)


def read_text(path: str | None, sequence: int) -> torch.Tensor:
    """Returns the bytes of `path` (default: `default_text`), (bytes,) uint8. Raises ValueError."""
    where = Path(path).expanduser() if path else default_text()
    if not where.is_file():
        raise ValueError(f"data.path={path}: there is no such file; name a local text file")
    content = where.read_bytes()
    if len(content) <= sequence:
        raise ValueError(f"data.path={path}: {len(content)} bytes are too few for sequence={sequence}")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def text_hash(path: str | None) -> str:
    """Returns the SHA-256 of the text, 16 hex digits; it is part of the row, since texts differ between machines."""
    where = Path(path).expanduser() if path else default_text()
    return hashlib.sha256(where.read_bytes()).hexdigest()[:16]
