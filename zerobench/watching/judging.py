"""The checks of a certificate, one function for each kind; comparing.py has those against another certificate.

Parameters with equal findings share a row. A check without an expectation is `cannot be told`, and so is one that
these steps or this engine do not show: only a finding that contradicts an expectation is `different`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from ..records import CertificateRow
from ..sizes import show_count
from .certificate import DIFFERENT, SAME, UNKNOWN
from .expected import PARTITIONED, REPLICATED, ExpectedTraining
from .job_seen import JobSeen
from .observed import UPDATES, PartSeen

WIDE = "float32 or wider"
LOST = "an update smaller than 2^-8 of a bfloat16 weight is lost, and moments decay in steps of 2^-8"
NOTHING_EXPECTED, DECLARED = "nothing is declared", "it is declared"
REL = 1e-3
"""Relative slack of a clipped norm: torch divides by the norm plus 1e-6, in fp32."""

LEAST_LR = 1e-7
"""A learning rate below it may change no element of a parameter."""

Finding = tuple[str, str, str, str, str]
"""found, expected, why, verdict, source."""


def judge(job: JobSeen, expected: ExpectedTraining, reference: JobSeen | None) -> list[CertificateRow]:
    """Returns the checks of a loop by itself. `reference`: its dtypes and optimizers are expected, if any."""
    rows = [
        *_dtypes(job, expected, reference),
        *_optimizers(job, expected, reference),
        *_updates(job, reference),
        *_accumulation(job, expected),
        *_partition(job, expected),
        *_replicas(job),
        *_norms(job, expected),
        *_scaling(job),
    ]
    return sorted(rows, key=lambda row: row.verdict != DIFFERENT)


def verdict_of(is_as_expected: bool) -> str:
    """Returns the verdict on a check that can be told."""
    return SAME if is_as_expected else DIFFERENT


def _dtypes(job: JobSeen, expected: ExpectedTraining, reference: JobSeen | None) -> Iterator[CertificateRow]:
    theirs = reference.parts if reference is not None else {}
    kinds: tuple[tuple[str, str, Callable[[PartSeen], str]], ...] = (
        ("masters", expected.masters, lambda seen: seen.master),
        ("moments", expected.moments, lambda seen: ", ".join(sorted(set(seen.moments.values())))),
        ("gradients", expected.gradients, lambda seen: seen.gradient),
        ("values in the model", "", lambda seen: seen.in_model),
    )
    for kind, declared, read in kinds:
        found: dict[str, Finding] = {}
        for name, seen in job.parts.items():
            value, by_reference = read(seen), read(theirs[name]) if name in theirs else ""
            if value:
                wanted = _expected_dtype(kind, value, declared, by_reference, seen.is_torchs)
                found[name] = (value, *wanted, seen.lines.get(kind, ""))
        yield from _grouped("dtypes", kind, found, job)
    shown, computes = ", ".join(job.computes) or "nothing was seen", expected.computes if job.computes else ""
    yield _declared("dtypes", "modules compute", shown, computes, computes in job.computes)
    yield from _collectives(job, expected)


def _expected_dtype(kind: str, value: str, declared: str, reference: str, is_torchs: bool) -> tuple[str, str, str]:
    """Returns expectation, reason and verdict."""
    if declared:
        return declared, DECLARED, verdict_of(value == declared)
    if kind in ("masters", "moments") and reference:
        return reference, "the reference has it", verdict_of(value == reference)
    if kind == "masters" or (kind == "moments" and is_torchs):
        return WIDE, LOST, verdict_of(all(getattr(torch, one).itemsize >= 4 for one in value.split(", ")))
    return "", NOTHING_EXPECTED, UNKNOWN


def _collectives(job: JobSeen, expected: ExpectedTraining) -> Iterator[CertificateRow]:
    for kind in dict.fromkeys((*job.sent, *expected.wire)):
        sizes, wanted = job.sent.get(kind, {}), expected.wire.get(kind, "")
        found = ", ".join(f"{size:,} bytes in {dtype}" for dtype, size in sizes.items()) or "none in a step"
        row = _declared("dtypes", f"{kind} per step and rank", found, wanted, set(sizes) == {wanted})
        row.source = job.ranks[0].lines.get(kind, "")
        yield row


def _optimizers(job: JobSeen, expected: ExpectedTraining, reference: JobSeen | None) -> Iterator[CertificateRow]:
    found: dict[str, Finding] = {}
    for name, seen in job.parts.items():
        declared, why = expected.optimizer_of(name), DECLARED
        if not declared and reference is not None and name in reference.parts:
            declared, why = reference.parts[name].optimizer, "the reference has it"
        verdict = verdict_of(seen.optimizer == declared) if declared else UNKNOWN
        found[name] = (seen.optimizer, declared, why if declared else NOTHING_EXPECTED, verdict, "")
    yield from _grouped("update", "class of the optimizer", found, job)


def _updates(job: JobSeen, reference: JobSeen | None) -> Iterator[CertificateRow]:
    named = any(name in job.sizes for name in job.parts)
    found = {name: _updated(job, name, reference) for name in job.sizes} if named else {}
    yield from _grouped("update", "updates", found, job)
    if not named:
        why = "the optimizer's tensors are not the model's parameters, and their names are unknown"
        yield CertificateRow("update", "updates", "tensors without names", "", why, UNKNOWN)


def _updated(job: JobSeen, name: str, reference: JobSeen | None) -> Finding:
    wanted, seen = "once per step", job.parts.get(name)
    if seen is None:
        return "in no optimizer", wanted, "it requires a gradient", DIFFERENT, ""
    line = seen.lines.get("gradients", "")
    if max(seen.updates, default=0) > 1:
        found = f"{max(seen.updates)} times per step"
        return found, wanted, "a second update in a step uses the same gradient again", DIFFERENT, line
    gradients = [(job.squares(step).get(name), job.squares(step, True).get(name)) for step in range(job.steps)]
    if not seen.gradients:
        if seen.is_copy and any(before for before, _ in gradients):
            why = "backward makes one on the model's parameter, and the optimizer has another tensor of its shape"
            return "no gradient in the optimizer", wanted, why, DIFFERENT, line
        if reference is not None and name in reference.parts:
            has = reference.parts[name].gradients > 0
            return "no gradient", "a gradient" if has else "none", "as the reference", verdict_of(not has), ""
        return "no gradient", "", "the loop may not use it in these steps", UNKNOWN, ""
    if not seen.changed:
        if seen.lr < LEAST_LR:
            why = f"the learning rate is {seen.lr:.2g} in these steps: less than float32 can add to most values"
            return "no change", "", why if seen.lr else "the learning rate is 0 in these steps", UNKNOWN, ""
        if not any(before and at_update for before, at_update in gradients):
            return "no change", "", "its gradient is 0 in these steps", UNKNOWN, ""
        return "never changed", wanted, "it has a gradient, and a learning rate that is not 0", DIFFERENT, line
    return "once per step", wanted, "a step is one update", SAME, ""


def _replicas(job: JobSeen) -> Iterator[CertificateRow]:
    """Yields the checks that ranks which hold whole parameters hold equal ones: of those that the strategy keeps equal,
    and of others, which may be experts of one rank.
    """
    whole, own = job.replicas, set(job.ranks[0].own)
    kept = [name for name in whole if job.strategy in REPLICATED and name not in own]
    for names, wanted in ((kept, "equal"), ([name for name in whole if name not in kept], "")):
        off = [name for name in names if max(whole[name]) - min(whole[name]) > REL * max(whole[name])]
        if names:
            found = f"they differ in {shown_names(off, len(names))}" if off else "equal"
            subject = f"values of {shown_names(names, len(job.sizes))} on all ranks"
            yield _declared("partition", subject, found, wanted, not off, f"{job.strategy} keeps them equal")


def _accumulation(job: JobSeen, expected: ExpectedTraining) -> Iterator[CertificateRow]:
    counts = [step.backwards for step in job.ranks[0].steps]
    shown, wanted = " or ".join(map(str, sorted(set(counts)))), expected.accumulation if any(counts) else None
    fewer = sum(count != wanted for count in counts)
    is_so = max(counts, default=0) == wanted and fewer <= 1  # an epoch may end with fewer
    yield _declared("accumulation", "micro-batches per update", shown, str(wanted or ""), is_so)
    if len(job.ranks) == 1:
        return
    times, number = job.reductions(job.steps - 1), expected.reductions
    *each, after = (
        f"{round(one, 2):g} ({show_count(calls, 'collective')}, {size:,} bytes)"
        for one, (calls, size) in zip(times, job.ranks[0].steps[job.steps - 1].calls, strict=True)
    )
    found = f"{sum(times):.3g} times: {', '.join(each)} in its micro-batches, {after} after them"
    wanted_words = "" if number is None else f"{number} times"
    is_so = abs(sum(times) - (number or 0)) < 0.5
    yield _declared("accumulation", "each gradient is reduced over the ranks", found, wanted_words, is_so)


def _partition(job: JobSeen, expected: ExpectedTraining) -> Iterator[CertificateRow]:
    copies, n, subject = job.copies, len(job.ranks), "copies of each optimizer state"
    if n == 1:
        return
    if copies is None:
        why = "the optimizer has no states, or their parameters are unknown"
        yield CertificateRow("partition", subject, "none seen", "", why, UNKNOWN)
        return
    if expected.copies is not None:
        wanted, why, is_so = f"{expected.copies:g}", DECLARED, abs(copies - expected.copies) < 0.1
    elif job.strategy in PARTITIONED:
        wanted, why, is_so = f"fewer than {n}", f"{job.strategy} partitions states over ranks", copies < n - 0.1
    else:
        wanted, why, is_so = str(n), f"{job.strategy} keeps all states on each of {n} ranks", copies > n - 0.1
    yield _declared("partition", subject, f"{copies:.3g} on {n} ranks", wanted, is_so, why)


def _norms(job: JobSeen, expected: ExpectedTraining) -> Iterator[CertificateRow]:
    pairs = [(job.norm(step), job.norm(step, at_update=True)) for step in range(job.steps)]
    steps = job.ranks[0].steps
    shown_steps = [
        n for n, (before, _) in enumerate(pairs) if before and math.isfinite(before) and not steps[n].skipped
    ]
    pairs = [pairs[number] for number in shown_steps]
    if not pairs:
        yield CertificateRow("norm", "gradients", "none seen", "", "they are not on the parameters", UNKNOWN)
        return
    acted = sum(after < before * (1 - REL) for before, after in pairs)
    shown = ", ".join(f"{before:.4g} → {after:.4g}" for before, after in pairs[:UPDATES])
    others = [n for n in shown_steps if job.squares(n) and job.squares(n, True).keys() - job.squares(n).keys()]
    found, limit = f"{shown}: clipping acted in {acted} of {len(pairs)} steps", expected.clip or 0.0
    wanted = f"at most {limit:g}, else unchanged" if limit and not others else ""  # of all models, if there are others
    goals = [min(after if job.reduces_late else before, limit) for before, after in pairs]
    is_so = all(abs(after - goal) <= REL * goal for goal, (_, after) in zip(goals, pairs, strict=True))
    why = f"{DECLARED}: the norm over all parameters and ranks"
    yield _declared("norm", "after backward → at the update", found, wanted, is_so, why)


def _scaling(job: JobSeen) -> Iterator[CertificateRow]:
    steps = job.ranks[0].steps
    skipped = [number for number, step in enumerate(steps) if step.skipped]
    if skipped or any(step.scale != 1 for step in steps):
        scales = ", ".join(f"{step.scale:g}" for step in steps)
        found = f"factors {scales}; {len(skipped)} of {len(steps)} updates skipped"
        verdict = UNKNOWN if len(skipped) < len(steps) else DIFFERENT
        why = "a scaler lowers its factor by skips" if verdict == UNKNOWN else "nothing is trained"
        wanted = "" if verdict == UNKNOWN else "at least one update"
        yield CertificateRow("scaling", "factor of the loss", found, wanted, why, verdict)


def _declared(check: str, subject: str, found: str, wanted: str, is_so: bool, why: str = DECLARED) -> CertificateRow:
    """Returns a check with an expectation, or, if `wanted` is empty, with nothing but its finding."""
    if not wanted:
        return CertificateRow(check, subject, found, "", NOTHING_EXPECTED, UNKNOWN)
    return CertificateRow(check, subject, found, wanted, why, verdict_of(is_so))


def _grouped(check: str, subject: str, found: dict[str, Finding], job: JobSeen) -> Iterator[CertificateRow]:
    """Yields a row for each distinct finding, with the names of its parameters; lines of code are of the first."""
    groups: dict[tuple[str, str, str, str], list[str]] = {}
    for name, (value, expected, why, verdict, _) in found.items():
        groups.setdefault((value, expected, why, verdict), []).append(name)
    for (value, expected, why, verdict), names in groups.items():
        row = CertificateRow(check, f"{subject} of {shown_names(names, len(found))}", value, expected, why, verdict)
        row.source = next((found[name][4] for name in names if found[name][4]), "")
        yield row


def shown_names(names: list[str], total: int) -> str:
    """Returns the names of parameters as text: at most three, and how many more; "all 24 parameters"."""
    if len(names) == total > 1:
        return f"all {total} parameters"
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
