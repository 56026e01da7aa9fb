"""The checks of a certificate that need several ranks: equal bits, reductions, samples, copies of states.

DDP and ZeroRedundancyOptimizer keep equal parameters on all ranks: after each update their bits are equal, by checksums
of whole tensors. A loop that averages its parameters now and then lets them differ in between, which is unusual.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations, pairwise

from ..records import CertificateRow
from ..sizes import show_count
from .certificate import DIFFERENT, SAME, UNKNOWN, UNUSUAL
from .expected import DATA_PARALLEL, PARTITIONED, REPLICATED, ExpectedTraining
from .job_seen import JobSeen
from .judging import DECLARED, NOTHING_EXPECTED, declared, shown_names

NEVER = 0.05
"""Reductions of the gradients per update, on average, that are none: of the loss or of metrics alone."""


REDUCED = 0.02
"""Largest deviation from a declared number of reductions, for scalars that a loop reduces beside its gradients."""


def judge_ranks(job: JobSeen, expected: ExpectedTraining) -> Iterator[CertificateRow]:
    """Yields the checks between the ranks of a job."""
    if len(job.ranks) > 1:
        yield _values(job)
        yield from _ignored(job)
        yield from _buffers(job)
        yield _reductions(job, expected)
        yield from _rates(job)
        yield from _data(job, expected)
        yield _copies(job, expected)


def _values(job: JobSeen) -> CertificateRow:
    own, shared = set(job.ranks[0].own), job.shared("values")
    names = [name for name in shared if name not in own]
    subject, steps = f"values of {shown_names(names, len(job.names))} on all ranks", range(job.steps + 1)
    if not names:
        why = "parameters that an engine divides or gathers are not"
        return CertificateRow("partition", "values on all ranks", "not compared", "", why, UNKNOWN)
    off = [[name for name in job.unequal("values", step) if name not in own] for step in steps]
    bits = f"checksums of the bits at the beginning and after each of {job.steps} steps"
    if not any(off):
        is_kept = job.strategy in REPLICATED
        why = f"{job.strategy} keeps them equal: {bits}" if is_kept else bits
        return CertificateRow("partition", subject, "equal", "equal" * is_kept, why, SAME if is_kept else UNKNOWN)
    first = next(step for step in steps if off[step])
    found = f"they differ in {shown_names(off[-1] or off[first], len(names))} from {_shown(first)} on"
    if job.strategy not in REPLICATED:
        drifts = first > 0 and bool(off[-1])
        why = "ranks of a plain loop may have different parts"
        if drifts or job.reduces_by_hand:
            why = f"{'they were equal at the beginning' if drifts else 'the loop reduces their gradients'}: {bits}"
            return CertificateRow("partition", subject, found, "equal", why, UNUSUAL)
        return CertificateRow("partition", subject, found, "", why, UNKNOWN)
    if _averages(off) or job.ranks[0].has_hook:
        why = "a hook of DDP reduces" if job.ranks[0].has_hook else "they are equal again later: are they averaged?"
        return CertificateRow("partition", subject, found, "equal", f"{why}; {bits}", UNUSUAL)
    return CertificateRow("partition", subject, found, "equal", f"{job.strategy} keeps them equal: {bits}", DIFFERENT)


def _ignored(job: JobSeen) -> Iterator[CertificateRow]:
    """Yields the check of parameters that DDP was told to leave to each rank, if they were equal at the beginning."""
    off = [name for name in job.unequal("values", job.steps) if name in job.ranks[0].own]
    if off := [name for name in off if name not in job.unequal("values", 0)]:
        why = "DDP was told to ignore them, and they were equal at the beginning"
        subject = f"values of {shown_names(off, 0)} on all ranks"
        yield CertificateRow("partition", subject, "they differ", "equal", why, UNUSUAL)


def _averages(off: list[list[str]]) -> bool:
    """Returns True if values that differed are equal again after a later step."""
    return any(before and not after for before, after in pairwise(off))


def _shown(step: int) -> str:
    return f"step {step}" if step else "the beginning"


def _buffers(job: JobSeen) -> Iterator[CertificateRow]:
    own = set(job.ranks[0].own)
    names = [name for name in job.shared("buffers") if name not in own]
    off = [name for name in job.unequal("buffers", job.steps) if name not in own]
    if not names:
        return
    subject = f"buffers {shown_names(names, len(names))} on all ranks"
    if not off:
        yield CertificateRow("partition", subject, "equal", "", "checksums of the bits after the last step", UNKNOWN)
        return
    found = f"they differ in {shown_names(off, len(names))}"
    if job.ranks[0].syncs_buffers if job.strategy != "plain" else not job.reduces_by_hand:
        why = "DDP and our engines send rank 0's before each forward; each rank's forward changes them again"
        yield CertificateRow("partition", subject, found, "", why, UNKNOWN)
        return
    why = "each rank has statistics of its own samples, and a checkpoint has rank 0's"
    yield CertificateRow("partition", subject, found, "equal", why, UNUSUAL)


def _reductions(job: JobSeen, expected: ExpectedTraining) -> CertificateRow:
    times, number = job.reductions(job.steps - 1), expected.reductions
    *each, after = (
        f"{round(count, 2):g} ({show_count(calls, 'collective')}, {size:,} bytes)"
        for count, (calls, size) in zip(times, job.ranks[0].steps[job.steps - 1].calls, strict=True)
    )
    found = f"{sum(times):.3g} times: {', '.join(each)} in its micro-batches, {after} after them"
    subject, rank = "each gradient is reduced over the ranks", job.ranks[0]
    fewest = min(sum(job.reductions(step)) for step in range(job.steps))
    if rank.is_ddp and fewest < NEVER:
        off = [job.unequal("values", step) for step in range(job.steps + 1)]
        why = "DDP reduces each gradient at least once per update"
        if not rank.wrapper_calls:
            why = "the DDP wrapper was not called, only the module in it: its gradients are not reduced"
        verdict = UNUSUAL if rank.has_hook or _averages(off) else DIFFERENT
        return CertificateRow("accumulation", subject, f"{fewest:.2g} times in a step", "at least once", why, verdict)
    if number is None:
        return declared("accumulation", subject, found, "", False)
    sums = [sum(job.reductions(step)) for step in range(job.steps)]
    is_so = all(abs(count - number) < REDUCED for count in sums)
    has_more = min(sums) > number - REDUCED and max(sums) < number + 0.5
    verdict = SAME if is_so else UNKNOWN if has_more else DIFFERENT
    why = f"{DECLARED}; are the others of metrics or padding?" if has_more and not is_so else DECLARED
    return CertificateRow("accumulation", subject, found, f"{number} times", why, verdict)


def _rates(job: JobSeen) -> Iterator[CertificateRow]:
    """Yields the check that a parameter has one learning rate on all ranks."""
    rates = [{name: seen.rates for name, seen in rank.parts.items() if seen.elements} for rank in job.ranks]
    first = {name: own for rank in reversed(rates) for name, own in rank.items()}
    off = [name for name, own in first.items() if any(rank.get(name, own) != own for rank in rates)]
    if off and job.strategy in DATA_PARALLEL:
        subject, why = f"learning rates of {shown_names(off, len(first))}", "does one rank alone step a scheduler?"
        yield CertificateRow("partition", subject, "they differ between ranks", "equal", why, UNUSUAL)


def _data(job: JobSeen, expected: ExpectedTraining) -> Iterator[CertificateRow]:
    losses = [tuple(step.loss for step in rank.steps[: job.steps]) for rank in job.ranks]
    is_seen = all(any(loss) and all(map(math.isfinite, loss)) for loss in losses)
    is_equal = is_seen and len(set(losses)) < len(losses)
    subject = "losses of the ranks"
    if expected.data and not is_seen:
        yield CertificateRow("data", subject, "none seen", "distinct", "no loss is a finite number", UNKNOWN)
    elif expected.data or (is_equal and job.strategy in DATA_PARALLEL):
        found = "equal to the bit in every step on several ranks" if is_equal else "distinct"
        why = DECLARED if expected.data else f"{NOTHING_EXPECTED}; have these ranks the same samples?"
        verdict = SAME if not is_equal else DIFFERENT if expected.data else UNUSUAL
        is_close = any(all(map(_is_close, own, other)) for own, other in combinations(losses, 2))
        if is_close and not is_equal:
            found, why, verdict = "distinct by rounding alone", "the same samples in another order?", UNUSUAL
        yield CertificateRow("data", subject, found, "distinct", why, verdict)


def _is_close(own: float, other: float) -> bool:
    return math.isclose(own, other, rel_tol=1e-6)


def _copies(job: JobSeen, expected: ExpectedTraining) -> CertificateRow:
    copies, n, subject = job.copies, len(job.ranks), "copies of each optimizer state"
    if copies is None:
        why = "the optimizer has no states, or their parameters are unknown"
        return CertificateRow("partition", subject, "none seen", "", why, UNKNOWN)
    found = f"{copies:.3g} on {n} ranks"
    if expected.copies is not None:
        return declared("partition", subject, found, f"{expected.copies:g}", abs(copies - expected.copies) < 0.1)
    if job.strategy not in PARTITIONED:
        return declared("partition", subject, found, "", False)
    verdict, why = SAME if copies < n - 0.1 else UNUSUAL, f"{job.strategy} partitions states over ranks"
    return CertificateRow("partition", subject, found, f"fewer than {n}", why, verdict)
