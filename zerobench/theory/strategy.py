"""A strategy as theory sees it: what it partitions (`StrategyTheory`), and its resolved options (`StrategyShape`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

AUTO = "auto"


@dataclass(frozen=True)
class StrategyTheory:
    """A strategy's row in figure 1 of ZeRO (arXiv 1910.02054): which model states the ranks partition.

    Partitioned parameters lie in units of modules (P_os+g+p); else partitioned optimizer states lie in buckets of
    parameters; else everything is replicated. `replay` plays a step's schedule (theory/replay/).
    """

    replay: Callable[..., None]
    parameters: bool = False
    gradients: bool = False
    optimizer: bool = False
    persistent_gradients: bool = False
    """The whole gradients are one buffer that lives as long as the engine, as in Megatron-core."""


@dataclass(frozen=True)
class StrategyShape:
    """The options of a resolved strategy section that theory needs; each is described in config/schema.py."""

    theory: StrategyTheory
    accumulate: str = "last"
    bucket_bytes: int | str | None = None
    """Bytes, AUTO, or None where there are no buckets."""
    reduce_with: str = "reduce_scatter"
    persistence_numel: int = 0
    prefetch: int = 0
    keep_root: bool | str = True
    reshard_after_forward: bool = True
    find_unused_parameters: bool = False

    @staticmethod
    def of(theory: StrategyTheory, section: Mapping[str, Any]) -> StrategyShape:
        """The shape of a resolved section, whose other keys theory does not need."""
        names = {field.name for field in fields(StrategyShape)} - {"theory"}
        return replace(StrategyShape(theory), **{key: section[key] for key in names & section.keys()})

    @property
    def has_buckets(self) -> bool:
        """Parameters lie in flat buckets: ZeRO-1, ZeRO-2, Megatron's distributed optimizer."""
        return self.theory.optimizer and not self.theory.parameters

    @property
    def bucket_limit(self) -> int:
        """Bytes of a bucket, once `choices.settle` has made a number of AUTO."""
        assert isinstance(self.bucket_bytes, int), f"bucket_bytes={self.bucket_bytes} is not settled"
        return self.bucket_bytes

    def synchronizes(self, last: bool) -> bool:
        """True for a micro-batch whose gradients are reduced over the ranks."""
        return last or self.accumulate == "every"

    def reductions(self, micro_batches: int) -> int:
        """Reductions of each gradient in a step."""
        return micro_batches if self.accumulate == "every" else 1
