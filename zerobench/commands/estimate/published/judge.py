"""An estimate beside a published peak: which figures are compared, and by how much they differ.

allocated    the estimate is one figure: the allocator's peak; on a CPU the peak of live bytes
reserved     a range: what the caching allocator reserves by default and with expandable segments
`?`          a range from allocated to the highest reserved
error        of the nearest figure of the range, over the published one; 0 inside of it
"""

from __future__ import annotations

from dataclasses import dataclass

from .rows import Run

CLOSE = 0.05
"""Largest error that needs no explanation."""

GIB = 2**30


@dataclass(frozen=True)
class Sizes:
    """Bytes of one executed cell. `reserved_*`: of a GPU's allocator; on a CPU as allocated. `problem`: a sentence
    where it could not be executed; then sizes are 0.
    """

    allocated_bytes: int = 0
    reserved_low_bytes: int = 0
    reserved_high_bytes: int = 0
    problem: str = ""


def range_of(sizes: Sizes, kind: str) -> tuple[int, int]:
    """Returns the lowest and highest bytes that stand beside a peak of `kind`."""
    if kind == "allocated":
        return sizes.allocated_bytes, sizes.allocated_bytes
    low = sizes.reserved_low_bytes if kind == "reserved" else sizes.allocated_bytes
    return low, sizes.reserved_high_bytes


def error_of(sizes: Sizes, kind: str, published_gib: float) -> float:
    """Returns the signed error, a fraction of the published peak."""
    low, high = (size / GIB for size in range_of(sizes, kind))
    nearest = min(max(published_gib, low), high)
    return nearest / published_gib - 1


@dataclass(frozen=True)
class Judged:
    """A row of the errors file. `status`: compared, no peak (none is published), no estimate, or failed; `reason`: why.
    `error`: a fraction, None unless compared. `explanation`: found by executing it again with something changed.
    """

    run: Run
    status: str
    reason: str = ""
    low_bytes: int | None = None
    high_bytes: int | None = None
    error: float | None = None
    explanation: str = ""
    assumed: str = ""

    @property
    def close(self) -> bool:
        """True where the error needs no explanation."""
        return self.error is not None and abs(self.error) <= CLOSE
