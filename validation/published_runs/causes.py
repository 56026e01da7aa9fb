"""Causes of an error of an estimate: the run is simulated again with one or two things changed.

applies     the row leaves the thing open, or names something that is not simulated
explains    the error with the change is at most 5 %
            nothing is tuned: a cause is a choice that published code makes, named by its key
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from zerobench.config.schema_memory import SCHEMAS

from .cells import RunPlan
from .rows import PublishedRun

CLOSE = 0.05
"""Largest error that needs no explanation."""

GIB = 2**30

PART, NONE = "in part: ", "none of the causes that are known here"
"""How explanations begin that leave more than 5 %."""

NEARLY_FULL = 0.9
"""Fraction of a card's memory above which the allocator gives cached blocks back rather than fail."""


@dataclass(frozen=True)
class ExecutedSizes:
    """Bytes of one executed cell, a row of the cache. `key`: the cell, its device, and the code and torch that executed
    it. `reserved_*`: of a GPU's allocator, by default and with expandable segments; on a CPU as allocated.
    """

    key: str
    allocated_bytes: int
    reserved_low_bytes: int
    reserved_high_bytes: int

    def range_gib(self, kind: str) -> tuple[float, float]:
        """Returns the lowest and highest estimate that stands next to a peak of `kind`: one figure if it is allocated;
        from allocated to the highest reserved if the source does not say.
        """
        low = self.reserved_low_bytes if kind == "reserved" else self.allocated_bytes
        high = self.allocated_bytes if kind == "allocated" else self.reserved_high_bytes
        return low / GIB, high / GIB

    def error(self, kind: str, published_gib: float) -> float:
        """Returns the error of the nearest end of the range, as a fraction of the published peak; 0 inside of it."""
        low, high = self.range_gib(kind)
        return min(max(published_gib, low), high) / published_gib - 1


@dataclass(frozen=True)
class Cause:
    """`words` complete "within 5 % ...". `applies` reads the run and the plan; `change` makes the other plan."""

    words: str
    applies: Callable[[PublishedRun, RunPlan], bool]
    change: Callable[[RunPlan], RunPlan]


def _no_masters(plan: RunPlan) -> RunPlan:
    precision: Any = plan.config.precision
    return plan.changed(precision=replace(precision, masters=False, wire_dtype=precision.name))


def _with_loss(plan: RunPlan, name: str) -> RunPlan:
    assert plan.config.huggingface is not None
    return plan.changed(huggingface=replace(plan.config.huggingface, loss=name))


CAUSES = (
    Cause(
        "without fp32 master weights and states (precision.masters=false)",
        lambda run, plan: (
            plan.config.precision.name == "bf16"
            and plan.config.strategy.name.startswith("fsdp2")
            and bool({"precision", "masters"} & plan.open_keys)
        ),
        _no_masters,
    ),
    Cause(
        "with all blocks recomputed, which the row leaves open (activation=checkpoint)",
        lambda run, plan: "act_ckpt" in plan.open_keys,
        lambda plan: plan.changed(activation=SCHEMAS["activation"]["checkpoint"]()),
    ),
    Cause(
        "with blocks recomputed selectively, which the row leaves open (activation=selective)",
        lambda run, plan: "act_ckpt" in plan.open_keys,
        lambda plan: plan.changed(activation=SCHEMAS["activation"]["selective"]()),
    ),
    Cause(
        "with the fp32 logits kept through the backward, as a loop does that holds on to what the model returned"
        " (huggingface.loss=kept)",
        lambda run, plan: run.compile in ("", "0") or "compile" in plan.open_keys,
        lambda plan: _with_loss(plan, "kept"),
    ),
    Cause(
        "with the loss fused, as a compiler does: no fp32 logits (huggingface.loss=fused)",
        lambda run, plan: "compile" in plan.open_keys,
        lambda plan: _with_loss(plan, "fused"),
    ),
)


def trials_of(run: PublishedRun, plan: RunPlan, count: int) -> Iterator[tuple[str, RunPlan]]:
    """Yields every set of `count` causes that do not exclude each other, in words, and the plan changed by them."""
    for causes in combinations([cause for cause in CAUSES if cause.applies(run, plan)], count):
        changed = plan
        for cause in causes:
            changed = cause.change(changed)
        if all(cause.change(changed) == changed for cause in causes):
            yield " and ".join(cause.words for cause in causes), changed


def explain(run: PublishedRun, sizes: ExecutedSizes, tried: Sequence[tuple[str, ExecutedSizes]]) -> str:
    """Returns the explanation of an error beyond 5 %: the first set of causes with which it vanishes; else the one that
    comes nearest, as a part; else that none is known.
    """
    assert run.peak_mem_gib is not None
    readings = [("", run.peak_mem_gib)]
    if re.search(r"\bGB\b", run.notes):
        readings.append(("with GB as 1e9 bytes", run.peak_mem_gib * 1e9 / GIB))
    candidates = [
        (changed.error(run.peak_kind, peak), " and ".join(filter(None, [words, unit])))
        for words, changed in [("", sizes), *tried]
        for unit, peak in readings
        if words or unit
    ]
    for error, words in candidates:
        if abs(error) <= CLOSE:
            return f"{error:+.1%} {words}"
    nearest, words = min(candidates, key=lambda candidate: abs(candidate[0]), default=(float("inf"), ""))
    is_nearer = abs(nearest) < abs(sizes.error(run.peak_kind, run.peak_mem_gib))
    return (f"{PART}{nearest:+.1%} {words}" if is_nearer else NONE) + _of_a_full_card(run, sizes)


def _of_a_full_card(run: PublishedRun, sizes: ExecutedSizes) -> str:
    """Returns a clause if the published figure is that of a card that is nearly full."""
    if run.peak_kind == "allocated" or not run.gpu_mem_gib or run.peak_mem_gib is None:
        return ""
    filled = run.peak_mem_gib / run.gpu_mem_gib
    if filled < NEARLY_FULL or sizes.range_gib(run.peak_kind)[0] < run.peak_mem_gib:
        return ""
    return f"; {filled:.0%} of the card is reserved, where the allocator gives blocks back that are counted here"


def is_explained(explanation: str) -> bool:
    """Returns True for an explanation that leaves at most 5 %."""
    return not explanation.startswith((PART, NONE))
