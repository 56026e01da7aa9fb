"""Causes of an error, each tested: the run is executed again with one thing changed, or its unit is read otherwise.

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

from ....config.schema_memory import SCHEMAS
from .judge import CLOSE, GIB, Sizes, error_of, range_of
from .plan import Plan
from .rows import Run

Change = Callable[[Plan], Plan]

PART, NONE = "in part: ", "none of the causes that are known here"
"""How explanations begin that leave more than 5 %."""

NEARLY_FULL = 0.9
"""Fraction of a card's memory above which the allocator gives cached blocks back rather than fail."""


@dataclass(frozen=True)
class Cause:
    """`words` complete "within 5 % ...". `applies` reads the run and the plan; `change` makes the other plan."""

    words: str
    applies: Callable[[Run, Plan], bool]
    change: Change


def _activation(name: str) -> Change:
    return lambda plan: plan.changed(activation=SCHEMAS["activation"][name]())


def _loss(name: str) -> Change:
    def change(plan: Plan) -> Plan:
        assert plan.config.huggingface is not None
        return plan.changed(huggingface=replace(plan.config.huggingface, loss=name))

    return change


def _no_masters(plan: Plan) -> Plan:
    precision: Any = plan.config.precision
    return plan.changed(precision=replace(precision, masters=False, wire_dtype=precision.name))


def _in_half(run: Run, plan: Plan) -> bool:
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
class Trial:
    """The plan of a run with some causes at work."""

    causes: tuple[Cause, ...]
    plan: Plan

    @property
    def words(self) -> str:
        """The causes, joined."""
        return " and ".join(cause.words for cause in self.causes)


def trials_of(run: Run, plan: Plan, at_once: int) -> Iterator[Trial]:
    """Yields what may explain an error: so many causes at once that do not exclude each other."""
    mine = [cause for cause in CAUSES if cause.applies(run, plan)]
    for chosen in combinations(mine, at_once):
        changed = plan
        for cause in chosen:
            changed = cause.change(changed)
        if all(cause.change(changed) == changed for cause in chosen):
            yield Trial(chosen, changed)


def printed_gb(run: Run) -> bool:
    """Returns True where the row's notes say that its unit was printed GB, which may be 1e9 bytes."""
    return re.search(r"\bGB\b", run.notes) is not None


def explained(run: Run, before: float, found: list[tuple[Trial, Sizes]], sizes: Sizes) -> str:
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


def _of_a_full_card(run: Run, sizes: Sizes) -> str:
    """Returns a clause where the published figure is that of a card that is nearly full."""
    if run.peak_kind == "allocated" or not run.gpu_mem_gib or run.peak_mem_gib is None:
        return ""
    filled = run.peak_mem_gib / run.gpu_mem_gib
    low, _ = range_of(sizes, run.peak_kind)
    if filled < NEARLY_FULL or low / GIB < run.peak_mem_gib:
        return ""
    return f"; {filled:.0%} of the card is reserved, where the allocator gives blocks back that are counted here"
