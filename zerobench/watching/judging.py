"""The checks of a loop by itself, one function for each kind; between_ranks.py has those of several ranks, comparing.py
those against another certificate.

Parameters with equal findings share a row. A check without an expectation is `cannot be told`, and so is one that
these steps or this engine do not show. A finding that contradicts a declaration, the reference or an invariant (what
backward left reaches the optimizer; parameters are finite) is `different`; one that most loops do not have, `unusual`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from ..records import CertificateRow
from .certificate import DIFFERENT, SAME, UNKNOWN, UNUSUAL
from .expected import ExpectedTraining
from .job_seen import JobSeen
from .observed import UPDATES, PartSeen

WIDE = "float32 or wider"
LOST = "an update smaller than 2^-8 of a bfloat16 weight is lost, and moments decay in steps of 2^-8"
NOTHING_EXPECTED, DECLARED = "nothing is declared", "it is declared"
ONCE = "once per step"
COMPENSATIONS = ("comp", "kahan")
"""Beginnings of the names of states that keep what bfloat16 weights lose."""

SURE = 4.0
"""A part whose largest change is this many times what changes its value must change."""
REL = 1e-3
"""Relative slack of a clipped norm: torch divides by the norm plus 1e-6, in fp32."""

LEAST_LR = 1e-7
"""A learning rate below it may change no element of a parameter."""

Finding = tuple[str, str, str, str, str]
"""found, expected, why, verdict, source."""


def judge(job: JobSeen, expected: ExpectedTraining, reference: JobSeen | None) -> Iterator[CertificateRow]:
    """Yields the checks of a loop by itself. `reference`: its dtypes and optimizers are expected, if any."""
    yield from _dtypes(job, expected, reference)
    yield from _optimizers(job, expected, reference)
    yield from _updates(job, reference)
    yield from _finite(job)
    yield from _schedules(job)
    yield from _accumulation(job, expected)
    yield from _norms(job, expected)
    yield from _scaling(job)


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
                wanted = _expected_dtype(kind, value, declared, by_reference, seen)
                found[name] = (value, *wanted, seen.lines.get(kind, ""))
        yield from _grouped("dtypes", kind, found)
    yield _computes(job, expected.computes)
    yield from _collectives(job, expected)


def _computes(job: JobSeen, wanted: str) -> CertificateRow:
    """Returns the check of the dtypes that modules compute in. Norms, losses and embeddings may keep another one."""
    found, subject = ", ".join(job.computes) or "nothing was seen", "modules compute"
    others = {n: size for dtype, sizes in job.computes.items() if dtype != wanted for n, size in sizes.items() if size}
    if not wanted or not job.computes or (wanted in job.computes and not others):
        return declared("dtypes", subject, found, wanted if job.computes else "", is_so=True)
    as_declared = sum(job.computes.get(wanted, {}).values())
    verdict = DIFFERENT if sum(others.values()) >= as_declared else UNUSUAL
    found += f"; not in {wanted}: {shown_names([*others], 0)}" if others else ""
    return CertificateRow("dtypes", subject, found, wanted, f"{DECLARED}: norms and embeddings aside", verdict)


def _expected_dtype(kind: str, value: str, declared: str, reference: str, seen: PartSeen) -> tuple[str, str, str]:
    """Returns expectation, reason and verdict."""
    if declared:
        return declared, DECLARED, verdict_of(value == declared)
    if kind in ("masters", "moments") and reference:
        return reference, "the reference has it", verdict_of(value == reference)
    if any(state.startswith(COMPENSATIONS) for state in seen.moments):
        return "", "a state of the optimizer keeps what its dtype loses", UNKNOWN
    if kind == "masters" or (kind == "moments" and seen.is_torchs):
        is_wide = all(getattr(torch, dtype).itemsize >= 4 for dtype in value.split(", "))
        return WIDE, LOST, SAME if is_wide else UNUSUAL
    return "", NOTHING_EXPECTED, UNKNOWN


def _collectives(job: JobSeen, expected: ExpectedTraining) -> Iterator[CertificateRow]:
    for kind in dict.fromkeys((*job.sent, *expected.wire)):
        sizes, wanted = job.sent.get(kind, {}), expected.wire.get(kind, "")
        found = ", ".join(f"{size:,} bytes in {dtype}" for dtype, size in sizes.items()) or "none in a step"
        row = declared("dtypes", f"{kind} per step and rank", found, wanted, set(sizes) == {wanted})
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
    yield from _grouped("update", "class of the optimizer", found)


def _updates(job: JobSeen, reference: JobSeen | None) -> Iterator[CertificateRow]:
    named = any(name in job.sizes for name in job.parts)
    found = {name: _updated(job, name, reference) for name in job.sizes} if named else {}
    yield from _grouped("update", "updates", found)
    if not named:
        why = "the optimizer's tensors are not the model's parameters, and their names are unknown"
        yield CertificateRow("update", "updates", "tensors without names", "", why, UNKNOWN)


def _updated(job: JobSeen, name: str, reference: JobSeen | None) -> Finding:
    seen = job.parts.get(name)
    gradients = [(job.squares(step).get(name), job.squares(step, True).get(name)) for step in range(job.steps)]
    has_left = any(before for before, _ in gradients)
    if seen is None and name in job.held:
        return "no update", "", "its optimizer took no step in these steps", UNKNOWN, ""
    if seen is None:
        why = "backward leaves a gradient on it: give all optimizers to the watch, or is it meant to be frozen?"
        verdict = UNUSUAL if has_left else UNKNOWN
        return "in no optimizer", ONCE if has_left else "", why if has_left else "it gets no gradient", verdict, ""
    line = seen.lines.get("gradients", "")
    if name in job.ranks[0].replaced:
        why = "the loop has put another parameter in its place: does the optimizer have that one?"
        return "another parameter has its name", ONCE, why, UNUSUAL, line
    if seen.lost and seen.changes and not seen.is_torchs:
        why = f"{seen.optimizer} changes it: has it gradients of its own?"
        return "no gradient in the optimizer", "", why, UNKNOWN, line
    if seen.lost:
        return *_lost(job, seen), line
    if max(seen.updates, default=0) > 1:
        why = "no backward came in between"
        return f"{max(seen.updates)} updates with the same gradient", ONCE, why, UNUSUAL, line
    if not seen.gradients:
        if reference is not None and name in reference.parts:
            has = reference.parts[name].gradients > 0
            return "no gradient", "a gradient" if has else "none", "as the reference", verdict_of(not has), ""
        if name.rpartition(".")[0] in job.ranks[0].called:
            why = "its module is called: is an activation detached, or made under no_grad?"
            return "no gradient", "a gradient", why, UNUSUAL, ""
        return "no gradient", "", "the loop may not use it in these steps", UNKNOWN, ""
    if not seen.changes:
        return *_unchanged(job, seen, gradients), line
    if seen.not_finite:
        return "values that are not finite", "", "see the check of finite values", UNKNOWN, ""
    if job.updates_copies_alone and seen.is_copy:
        why = "the optimizer's copies change, and the model keeps its values"
        return "no change of the model", ONCE, why, UNUSUAL, seen.lines.get("masters", "")
    if reference is not None and name in reference.names - reference.held and reference.held:
        return ONCE, "none", "the reference does not train it", DIFFERENT, ""
    if seen.changes < (number := sum(map(bool, seen.updates))):
        why = "is it frozen later, or has it no gradient or learning rate in some steps?"
        return f"{seen.changes} of {number} updates change it", "", why, UNKNOWN, ""
    return ONCE, ONCE, "a step is one update", SAME, ""


def _lost(job: JobSeen, seen: PartSeen) -> tuple[str, str, str, str]:
    """Returns the finding for a part whose gradient did not reach the optimizer: of all parts, or of some."""
    wanted = "the gradient that backward left"
    if seen.is_copy:
        why = "backward makes one on the model's parameter, and the optimizer has another tensor of its shape"
        return "no gradient in the optimizer", wanted, why, DIFFERENT
    why = f"backward left one before {seen.lost} of {job.steps} updates: is it dropped, or set to 0, before the update?"
    reaches = any(square for step in range(job.steps) for square in job.squares(step, True).values())
    return "no gradient in the optimizer", wanted, why, UNUSUAL if reaches else DIFFERENT


def _unchanged(
    job: JobSeen, seen: PartSeen, gradients: list[tuple[float | None, float | None]]
) -> tuple[str, str, str, str]:
    """Returns the finding for a part that got gradients, and has the values that it had before."""
    if len(job.skipped) == job.steps or any(got is not None and not math.isfinite(got) for _, got in gradients):
        return "no change", "", "updates are skipped, or gradients not finite, in these steps", UNKNOWN
    if (lr := max(seen.rates, default=math.inf)) < LEAST_LR:
        why = f"the learning rate is {lr:.2g} in these steps: less than float32 can add to most values"
        return "no change", "", why if lr else "the learning rate is 0 in these steps", UNKNOWN
    if not any(got for _, got in gradients):
        return "no change", "", "its gradient is 0 in these steps", UNKNOWN
    if seen.reach < SURE:
        is_wide = getattr(torch, seen.master).itemsize >= 4
        why = f"its updates are about half a unit in the last place of its {seen.master} values, or less"
        return "never changed", "" if is_wide else ONCE, why, UNKNOWN if is_wide else UNUSUAL
    why = "it has a gradient, and a learning rate that is not 0"
    return "never changed", ONCE, why, DIFFERENT if math.isfinite(seen.reach) else UNUSUAL


def _finite(job: JobSeen) -> Iterator[CertificateRow]:
    broken = {name: seen.not_finite for name, seen in job.parts.items() if seen.not_finite}
    losses = [n for n in range(job.steps) if not math.isfinite(job.loss(n)) and n not in job.skipped]
    norms = [n for n in range(job.steps) if not math.isfinite(job.norm(n, True)) and n not in job.skipped]
    found = [
        *(
            [f"parameters after step {min(broken.values())}: {shown_names([*broken], len(job.parts))}"]
            if broken
            else []
        ),
        *([f"gradients of step {norms[0] + 1}"] if norms else []),
        *([f"losses of step {losses[0] + 1}"] if losses else []),
    ]
    why = "a value that is not finite spreads to all others"
    seen = {"losses": job.loss, "gradients": job.norm}
    kinds = [kind for kind, read in seen.items() if any(map(read, range(job.steps)))]
    subject = f"{', '.join(kinds)} and parameters" if kinds else "parameters"
    if not found:
        yield declared("finite", subject, "finite", "finite" if job.parts else "", True, "after each step")
        return
    if not broken:
        why += "; the parameters are finite: is the update skipped?"
    verdict = DIFFERENT if broken else UNUSUAL
    yield CertificateRow("finite", subject, f"not finite: {', '.join(found)}", "finite", why, verdict)


def _schedules(job: JobSeen) -> Iterator[CertificateRow]:
    steps = [step for rank in job.ranks for step in rank.steps]
    if (most := max(step.schedules for step in steps)) > 1:
        yield _unusual_schedule(
            f"{most} steps of a scheduler per update", "once per update", "is it stepped per micro-batch?"
        )
    if any(step.schedules_early for step in steps):
        yield _unusual_schedule("a scheduler steps before the update", "after it", "the first rate is never used")
    if (rates := [lr for seen in job.parts.values() for lr in seen.rates]) and not any(rates):
        yield _unusual_schedule(f"a learning rate of 0 in {job.steps} steps", "another one", "nothing is trained")


def _unusual_schedule(found: str, wanted: str, why: str) -> CertificateRow:
    return CertificateRow("update", "schedule of the learning rate", found, wanted, why, UNUSUAL)


def _accumulation(job: JobSeen, expected: ExpectedTraining) -> Iterator[CertificateRow]:
    by_rank = [[step.micro_batches for step in rank.steps[: job.steps]] for rank in job.ranks]
    counts, wanted, subject = by_rank[0], expected.accumulation, "micro-batches per update"
    found = ", ".join(map(str, counts if len(set(counts)) > 1 else counts[:1]))
    if other := next((number for number, own in enumerate(by_rank) if own != counts), 0):
        found += f" on rank 0, {', '.join(map(str, by_rank[other]))} on rank {other}"
        why, verdict = (
            "gradients are means over the ranks: a rank with fewer weighs more, unless losses are sums over all tokens",
            DIFFERENT if wanted else UNUSUAL,
        )
        yield CertificateRow("accumulation", subject, found, "equal on all ranks", why, verdict)
        return
    if wanted is None or not any(counts):
        yield declared("accumulation", subject, found, "", False)
    else:
        why, verdict = _counted(counts, wanted)
        yield CertificateRow("accumulation", subject, found, str(wanted), why, verdict)
    if any(step.between for rank in job.ranks for step in rank.steps):
        why = "the sum so far is clipped or scaled before the next micro-batch is added: another training"
        found = "gradients change between the micro-batches of an update"
        yield CertificateRow("accumulation", "gradients", found, "only backward changes them", why, UNUSUAL)
    stale = [step.stale for step in job.ranks[0].steps[1 : job.steps]]
    if any(stale):
        found = f"those of earlier updates are there before backward in {sum(stale)} of {len(stale)} steps"
        why = "gradients of several updates add up: is zero_grad missing?"
        yield CertificateRow("accumulation", "gradients", found, "none", why, UNUSUAL)


def _counted(counts: list[int], wanted: int) -> tuple[str, str]:
    """Returns why, and the verdict, of the micro-batches of each update against a declared number."""
    if set(counts) == {wanted}:
        return DECLARED, SAME
    if min(counts) > wanted and not any(count % wanted for count in counts):
        return f"{DECLARED}; a forward and a backward count as a micro-batch: has a batch several of them?", UNUSUAL
    if max(counts) == wanted and counts[0] == 1 and set(counts[1:]) == {wanted}:
        return f"{DECLARED}; the first update alone has 1: is the counter compared before it counts?", DIFFERENT
    if max(counts) == wanted:
        return f"{DECLARED}; an epoch may end with fewer", UNKNOWN
    if min(counts) == wanted:
        return f"{DECLARED}; some updates have more: a penalty now and then?", UNUSUAL
    return DECLARED, DIFFERENT


def _norms(job: JobSeen, expected: ExpectedTraining) -> Iterator[CertificateRow]:
    numbers = [n for n in range(job.steps) if job.squares(n) and n not in job.skipped]
    pairs = [(job.norm(n), job.norm(n, at_update=True)) for n in numbers]
    pairs = [pair for pair in pairs if pair[0]]
    if not pairs:
        why = "all updates were skipped" if job.skipped else "they are not on the parameters after backward"
        yield CertificateRow("norm", "gradients", "none seen", "", why, UNKNOWN)
        return
    acted = sum(after < before * (1 - REL) for before, after in pairs)
    shown = ", ".join(f"{before:.4g} → {after:.4g}" for before, after in pairs[:UPDATES])
    others = [n for n in numbers if job.squares(n) and job.squares(n, True).keys() - job.squares(n).keys()]
    found, limit = f"{shown}: clipping acted in {acted} of {len(pairs)} steps", expected.clip or 0.0
    subject = "after backward → at the update"
    if not limit or others:  # others: of all models, if there are several
        yield declared("norm", subject, found, "", False)
        return
    changes = any(step.between for rank in job.ranks for step in rank.steps)
    is_within = all(after <= limit * (1 + REL) for _, after in pairs)
    is_seen = all(after > 0 for _, after in pairs) and not changes
    verdict = DIFFERENT if not is_within else SAME if is_seen else UNKNOWN
    why = f"{DECLARED}: the norm over all parameters and ranks"
    is_scaled = any(step.scale != 1 for step in job.ranks[0].steps)
    if is_within and is_scaled and any(before > limit and after < 0.9 * limit for before, after in pairs):
        why = "a norm above the limit becomes the limit: are gradients clipped before they are unscaled?"
        verdict = UNUSUAL
    yield CertificateRow("norm", subject, found, f"at most {limit:g}", why, verdict)


def _scaling(job: JobSeen) -> Iterator[CertificateRow]:
    steps, skipped = job.ranks[0].steps, job.skipped
    if skipped or any(step.scale != 1 for step in steps):
        scales = [step.scale for step in steps]
        found = f"factors {', '.join(f'{scale:g}' for scale in scales)}; {len(skipped)} of {len(steps)} updates skipped"
        is_stuck = len(steps) == len(skipped) > 1 and scales[-1] > scales[0] * 0.51 ** (len(steps) - 1)
        why = "nothing is trained, and no skip halves the factor" if is_stuck else "a scaler lowers its factor by skips"
        wanted, verdict = ("at least one update", UNUSUAL) if is_stuck else ("", UNKNOWN)
        yield CertificateRow("scaling", "factor of the loss", found, wanted, why, verdict)


def declared(check: str, subject: str, found: str, wanted: str, is_so: bool, why: str = DECLARED) -> CertificateRow:
    """Returns a check with a declaration or an invariant, or, if `wanted` is empty, with nothing but its finding."""
    if not wanted:
        return CertificateRow(check, subject, found, "", NOTHING_EXPECTED, UNKNOWN)
    return CertificateRow(check, subject, found, wanted, why, verdict_of(is_so))


def _grouped(check: str, subject: str, found: dict[str, Finding]) -> Iterator[CertificateRow]:
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
