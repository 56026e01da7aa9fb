"""An estimate next to a published peak, and causes of an error: the run is executed again with one thing changed.

allocated    the estimate is one figure: the allocator's peak; on a CPU the peak of live bytes
reserved     a range: what the caching allocator reserves by default and with expandable segments
`?`          a range from allocated to the highest reserved
error        of the nearest figure of the range, over the published one; 0 inside of it

A cause:

applies     the row leaves the thing open, or prints something that is not executed
explains    the error with the change is at most 5 %
nothing is tuned: a cause is a choice that published code makes, named by its key
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from zerobench.config.schema_memory import SCHEMAS
from zerobench.fake_execution import Execution
from zerobench.published.cells import RunPlan
from zerobench.published.rows import PublishedRun

CLOSE = 0.05
"""Largest error that needs no explanation."""

GIB = 2**30


@dataclass(frozen=True)
class ExecutedSizes:
    """Bytes of one executed cell. `reserved_*`: of a GPU's allocator; on a CPU as allocated. `problem`: a sentence
    where it could not be executed; then sizes are 0.
    """

    allocated_bytes: int = 0
    reserved_low_bytes: int = 0
    reserved_high_bytes: int = 0
    problem: str = ""


def range_of(sizes: ExecutedSizes, kind: str) -> tuple[int, int]:
    """Returns the lowest and highest bytes that stand beside a peak of `kind`."""
    if kind == "allocated":
        return sizes.allocated_bytes, sizes.allocated_bytes
    low = sizes.reserved_low_bytes if kind == "reserved" else sizes.allocated_bytes
    return low, sizes.reserved_high_bytes


def error_of(sizes: ExecutedSizes, kind: str, published_gib: float) -> float:
    """Returns the signed error, a fraction of the published peak."""
    low, high = (size / GIB for size in range_of(sizes, kind))
    nearest = min(max(published_gib, low), high)
    return nearest / published_gib - 1


@dataclass(frozen=True)
class Judged:
    """A row of the errors file. `status`: compared, no peak (none is published), no estimate, or failed; `reason`: why.
    `error`: a fraction, None unless compared. `explanation`: found by executing it again with something changed.
    `eager`: of a run that its publisher compiled, what the same estimate is without `compile`.
    """

    run: PublishedRun
    status: str
    reason: str = ""
    low_bytes: int | None = None
    high_bytes: int | None = None
    error: float | None = None
    explanation: str = ""
    assumed: str = ""
    eager: ExecutedSizes | None = None

    @property
    def close(self) -> bool:
        """True if the error needs no explanation."""
        return self.error is not None and abs(self.error) <= CLOSE


def sizes_of(found: Execution) -> ExecutedSizes:
    """Returns the bytes of an execution."""
    if found.problem:
        return ExecutedSizes(problem=found.problem)
    allocated = found.allocated_bytes if found.allocated_bytes is not None else found.peak_bytes
    low, high = found.reserved_bytes or (allocated, allocated)
    return ExecutedSizes(allocated, low, high)


Change = Callable[[RunPlan], RunPlan]

PART, NONE = "in part: ", "none of the causes that are known here"
"""How explanations begin that leave more than 5 %."""

NEARLY_FULL = 0.9
"""Fraction of a card's memory above which the allocator gives cached blocks back rather than fail."""


@dataclass(frozen=True)
class Cause:
    """`words` complete "within 5 % ...". `applies` reads the run and the plan; `change` makes the other plan."""

    words: str
    applies: Callable[[PublishedRun, RunPlan], bool]
    change: Change


def _activation(name: str) -> Change:
    return lambda plan: plan.changed(activation=SCHEMAS["activation"][name]())


def _loss(name: str) -> Change:
    def change(plan: RunPlan) -> RunPlan:
        assert plan.config.huggingface is not None
        return plan.changed(huggingface=replace(plan.config.huggingface, loss=name))

    return change


def _no_masters(plan: RunPlan) -> RunPlan:
    precision: Any = plan.config.precision
    return plan.changed(precision=replace(precision, masters=False, wire_dtype=precision.name))


def _in_half(run: PublishedRun, plan: RunPlan) -> bool:
    return plan.config.precision.name == "bf16" and plan.config.strategy.name.startswith("fsdp2")


CAUSES = (
    Cause(
        "without fp32 master weights and states (precision.masters=false)",
        lambda run, plan: _in_half(run, plan) and bool({"precision", "masters"} & plan.open_keys),
        _no_masters,
    ),
    Cause(
        "with all blocks recomputed, which the row leaves open (activation=checkpoint)",
        lambda run, plan: "act_ckpt" in plan.open_keys,
        _activation("checkpoint"),
    ),
    Cause(
        "with blocks recomputed selectively, which the row leaves open (activation=selective)",
        lambda run, plan: "act_ckpt" in plan.open_keys,
        _activation("selective"),
    ),
    Cause(
        "with the fp32 logits kept through the backward, as a loop does that holds on to what the model returned"
        " (huggingface.loss=kept)",
        lambda run, plan: run.compile in ("", "0") or "compile" in plan.open_keys,
        _loss("kept"),
    ),
    Cause(
        "with the loss fused, as a compiler does: no fp32 logits (huggingface.loss=fused)",
        lambda run, plan: "compile" in plan.open_keys,
        _loss("fused"),
    ),
)


@dataclass(frozen=True)
class CauseTrial:
    """The plan of a run with some causes at work."""

    causes: tuple[Cause, ...]
    plan: RunPlan

    @property
    def words(self) -> str:
        """The causes, joined."""
        return " and ".join(cause.words for cause in self.causes)


def trials_of(run: PublishedRun, plan: RunPlan, at_once: int) -> Iterator[CauseTrial]:
    """Yields what may explain an error: so many causes at once that do not exclude each other."""
    mine = [cause for cause in CAUSES if cause.applies(run, plan)]
    for chosen in combinations(mine, at_once):
        changed = plan
        for cause in chosen:
            changed = cause.change(changed)
        if all(cause.change(changed) == changed for cause in chosen):
            yield CauseTrial(chosen, changed)


def printed_gb(run: PublishedRun) -> bool:
    """Returns True if the row's notes say that its unit was printed GB, which may be 1e9 bytes."""
    return re.search(r"\bGB\b", run.notes) is not None


def explained(
    run: PublishedRun, before: float, found: list[tuple[CauseTrial, ExecutedSizes]], sizes: ExecutedSizes
) -> str:
    """Returns the explanation of an error beyond 5 %: the first cause, or pair, that it vanishes with; else the one
    that comes nearest, said to be only a part; else that none is known.
    """
    assert run.peak_mem_gib is not None
    readings = [("", run.peak_mem_gib)]
    if printed_gb(run):
        readings.append(("with GB as 1e9 bytes", run.peak_mem_gib * 1e9 / GIB))
    candidates = [
        (error_of(one, run.peak_kind, peak), " and ".join(filter(None, [words, unit])))
        for words, one in [("", sizes), *((trial.words, size) for trial, size in found if not size.problem)]
        for unit, peak in readings
        if words or unit
    ]
    for error, words in candidates:
        if abs(error) <= CLOSE:
            return f"{error:+.1%} {words}"
    nearest = min(candidates, key=lambda one: abs(one[0]), default=None)
    if nearest is not None and abs(nearest[0]) < abs(before):
        return f"{PART}{nearest[0]:+.1%} {nearest[1]}{_of_a_full_card(run, sizes)}"
    return NONE + _of_a_full_card(run, sizes)


def is_part(explanation: str) -> bool:
    """Returns True for an explanation that leaves more than 5 %."""
    return explanation.startswith((PART, NONE))


def _of_a_full_card(run: PublishedRun, sizes: ExecutedSizes) -> str:
    """Returns a clause where the published figure is that of a card that is nearly full."""
    if run.peak_kind == "allocated" or not run.gpu_mem_gib or run.peak_mem_gib is None:
        return ""
    filled = run.peak_mem_gib / run.gpu_mem_gib
    low, _ = range_of(sizes, run.peak_kind)
    if filled < NEARLY_FULL or low / GIB < run.peak_mem_gib:
        return ""
    return f"; {filled:.0%} of the card is reserved, where the allocator gives blocks back that are counted here"
