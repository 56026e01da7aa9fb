"""The checks of a loop by itself and between its ranks, one function for each kind; comparing.py has those against
another certificate.

Parameters with equal findings share a row. A check without an expectation is `cannot be told`, and so is one that
these steps or this engine do not show. A finding that contradicts a declaration, the reference or an invariant (what
backward left reaches the optimizer; parameters are finite) is `different`; one that most loops do not have, `unusual`.

DDP and ZeroRedundancyOptimizer keep equal parameters on all ranks: after each update their bits are equal, by checksums
of whole tensors. A loop that averages its parameters now and then lets them differ in between, which is unusual.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations, pairwise

import torch

from ..records import CertificateRow
from ..sizes import show_count
from .certificate import DIFFERENT, SAME, UNKNOWN, UNUSUAL, ExpectedTraining, JobSeen
from .observed import UPDATES, PartSeen

PARTITIONED = ("zero_redundancy", "zero1", "zero2", "zero3", "megatron", "fsdp1", "fsdp2", "deepspeed")
"""Strategies that partition optimizer states."""

REPLICATED = ("ddp", "zero_redundancy")
"""Strategies that keep equal parameters on all ranks; in a plain loop ranks may hold different experts."""

DATA_PARALLEL = (*PARTITIONED, "ddp")
"""Strategies whose ranks usually have samples of their own."""

WIDE = "float32 or wider"
LOST = "in bfloat16 an update smaller than 2^-8 of a weight is lost, and moments decay in steps of 2^-8"
NOTHING_EXPECTED, DECLARED = "nothing is declared", "it is declared"
ONCE = "once per step"
COMPENSATIONS = ("comp", "kahan")
"""Beginnings of the names of states that keep what bfloat16 weights lose."""

SURE = 4.0
"""Smallest `reach` (largest expected change of an element, in half ULPs) at which updates must change a part."""

REL = 1e-3
"""Relative slack of a clipped norm: torch divides by the norm plus 1e-6, in fp32."""

LEAST_LR = 1e-7
"""A learning rate below it may change no element of a parameter."""

NEVER = 0.05
"""Average reductions per gradient and update below which only the loss or metrics were reduced, no gradients."""

REDUCED = 0.02
"""Largest deviation from a declared number of reductions, for scalars that a loop reduces beside its gradients."""

Finding = tuple[str, str, str, str, str]
"""found, expected, why, verdict, source."""


def judge(job: JobSeen, expected: ExpectedTraining, reference: JobSeen | None) -> Iterator[CertificateRow]:
    """Yields the checks of a loop by itself. `reference`: its dtypes and optimizers are expected, if any."""
    yield from _dtypes(job, expected, reference)
    yield from _optimizers(job, expected, reference)
    if any(name in job.sizes for name in job.parts):
        yield from _grouped("update", "updates", {name: _updated(job, name, reference) for name in job.sizes})
    else:
        why = "the optimizer's tensors are not the model's parameters, and their names are unknown"
        yield CertificateRow("update", "updates", "tensors without names", "", why, UNKNOWN)
    yield from _finite(job)
    yield from _schedules(job)
    yield from _accumulation(job, expected)
    yield from _norms(job, expected)
    yield from _scaling(job)
    if len(job.ranks) > 1:
        yield _values(job)
        yield from _ignored(job)
        yield from _buffers(job)
        yield _reductions(job, expected)
        yield from _rates(job)
        yield from _data(job, expected)
        yield _copies(job, expected)


def verdict_of(is_as_expected: bool) -> str:
    """Returns the verdict on a check that can be told."""
    return SAME if is_as_expected else DIFFERENT


def declared_row(
    check: str, subject: str, finding: str, wanted: str, is_so: bool, why: str = DECLARED
) -> CertificateRow:
    """Returns the row of a check against `wanted`; if `wanted` is empty, a row with the finding alone."""
    if not wanted:
        return CertificateRow(check, subject, finding, "", NOTHING_EXPECTED, UNKNOWN)
    return CertificateRow(check, subject, finding, wanted, why, verdict_of(is_so))


def shown_names(names: list[str], total: int) -> str:
    """Returns the names of parameters as text: at most three, and how many more; "all 24 parameters"."""
    if len(names) == total > 1:
        return f"all {total} parameters"
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _grouped(check: str, subject: str, findings: dict[str, Finding]) -> Iterator[CertificateRow]:
    """Yields a row for each distinct finding, with the names of its parameters; lines of code are of the first."""
    groups: dict[tuple[str, str, str, str], list[str]] = {}
    for name, finding in findings.items():
        groups.setdefault(finding[:4], []).append(name)
    for (value, expected, why, verdict), names in groups.items():
        source = next((findings[name][4] for name in names if findings[name][4]), "")
        title = f"{subject} of {shown_names(names, len(findings))}"
        yield CertificateRow(check, title, value, expected, why, verdict, source)


# -- a loop by itself -------------------------------------------------------------------------------------


def _dtypes(job: JobSeen, expected: ExpectedTraining, reference: JobSeen | None) -> Iterator[CertificateRow]:
    theirs = reference.parts if reference is not None else {}
    kinds: tuple[tuple[str, str, Callable[[PartSeen], str]], ...] = (
        ("masters", expected.masters, lambda seen: seen.master),
        ("moments", expected.moments, lambda seen: ", ".join(sorted(set(seen.moments.values())))),
        ("gradients", expected.gradients, lambda seen: seen.gradient),
        ("values in the model", "", lambda seen: seen.in_model),
    )
    for kind, declared, read in kinds:
        findings: dict[str, Finding] = {}
        for name, seen in job.parts.items():
            if value := read(seen):
                by_reference = read(theirs[name]) if name in theirs else ""
                wanted = _expected_dtype(kind, value, declared, by_reference, seen)
                findings[name] = (value, *wanted, seen.lines.get(kind, ""))
        yield from _grouped("dtypes", kind, findings)

    # Norms, losses and embeddings may compute in another dtype than matrices.
    wanted_dtype, dtypes, why = expected.computes, ", ".join(job.computes) or "nothing was seen", DECLARED
    others = {n: s for dtype, sizes in job.computes.items() if dtype != wanted_dtype for n, s in sizes.items() if s}
    if not wanted_dtype or not job.computes or (wanted_dtype in job.computes and not others):
        yield declared_row("dtypes", "modules compute", dtypes, wanted_dtype if job.computes else "", is_so=True)
    else:
        as_declared = sum(job.computes.get(wanted_dtype, {}).values())
        verdict = DIFFERENT if sum(others.values()) >= as_declared else UNUSUAL
        dtypes += f"; not in {wanted_dtype}: {shown_names([*others], 0)}" if others else ""
        why = f"{DECLARED}: norms and embeddings aside"
        yield CertificateRow("dtypes", "modules compute", dtypes, wanted_dtype, why, verdict)

    for kind in dict.fromkeys((*job.sent, *expected.wire)):
        sizes, on_wire = job.sent.get(kind, {}), expected.wire.get(kind, "")
        traffic = ", ".join(f"{size:,} bytes in {dtype}" for dtype, size in sizes.items()) or "none in a step"
        row = declared_row("dtypes", f"{kind} per step and rank", traffic, on_wire, set(sizes) == {on_wire})
        row.source = job.ranks[0].lines.get(kind, "")
        yield row


def _expected_dtype(kind: str, value: str, declared: str, reference: str, seen: PartSeen) -> tuple[str, str, str]:
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


def _optimizers(job: JobSeen, expected: ExpectedTraining, reference: JobSeen | None) -> Iterator[CertificateRow]:
    findings: dict[str, Finding] = {}
    for name, seen in job.parts.items():
        declared, why = expected.optimizer_class(name), DECLARED
        if not declared and reference is not None and name in reference.parts:
            declared, why = reference.parts[name].optimizer, "the reference has it"
        verdict = verdict_of(seen.optimizer == declared) if declared else UNKNOWN
        findings[name] = (seen.optimizer, declared, why if declared else NOTHING_EXPECTED, verdict, "")
    yield from _grouped("update", "class of the optimizer", findings)


def _updated(job: JobSeen, name: str, reference: JobSeen | None) -> Finding:
    """Returns whether a parameter is updated once per step, or the first reason that it is not."""
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
    if seen.lost:  # its gradient did not reach the optimizer: that of all parts, or of some
        finding, wanted = "no gradient in the optimizer", "the gradient that backward left"
        why = "backward makes one on the model's parameter, and the optimizer has another tensor of its shape"
        if not seen.is_copy:
            why = f"backward left one before {seen.lost} of {job.steps} updates: is it dropped or zeroed before them?"
        others = {
            other for other, part in job.parts.items() if part.is_copy or not seen.is_copy
        }  # for a copy, only other copies
        reaches = any(job.squares(step, True).get(other) for step in range(job.steps) for other in others)
        return finding, wanted, why, UNUSUAL if reaches else DIFFERENT, line
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
        squares, lr = [at_update for _, at_update in gradients], max(seen.rates, default=math.inf)
        if len(job.skipped) == job.steps or any(s is not None and not math.isfinite(s) for s in squares):
            return "no change", "", "updates are skipped, or gradients not finite, in these steps", UNKNOWN, line
        if lr < LEAST_LR:
            why = f"the learning rate is {lr:.2g} in these steps: less than float32 can add to most values"
            return "no change", "", why if lr else "the learning rate is 0 in these steps", UNKNOWN, line
        if not any(squares):
            return "no change", "", "its gradient is 0 in these steps", UNKNOWN, line
        if seen.reach < SURE:
            is_wide = getattr(torch, seen.master).itemsize >= 4
            why = f"its updates are about half a unit in the last place of its {seen.master} values, or less"
            return "never changed", "" if is_wide else ONCE, why, UNKNOWN if is_wide else UNUSUAL, line
        why = "it has a gradient, and a learning rate that is not 0"
        return "never changed", ONCE, why, DIFFERENT if math.isfinite(seen.reach) else UNUSUAL, line
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


def _finite(job: JobSeen) -> Iterator[CertificateRow]:
    broken = {name: seen.not_finite for name, seen in job.parts.items() if seen.not_finite}
    problems, steps = [], [step for step in range(job.steps) if step not in job.skipped]
    if broken:
        problems.append(f"parameters after step {min(broken.values())}: {shown_names([*broken], len(job.parts))}")
    if norms := [step for step in steps if not math.isfinite(job.norm(step, True))]:
        problems.append(f"gradients of step {norms[0] + 1}")
    if losses := [step for step in steps if not math.isfinite(job.loss(step))]:
        problems.append(f"losses of step {losses[0] + 1}")
    why = "a value that is not finite spreads to all others"
    values = {"losses": job.loss, "gradients": job.norm}
    kinds = [kind for kind, read in values.items() if any(map(read, range(job.steps)))]
    subject = f"{', '.join(kinds)} and parameters" if kinds else "parameters"
    if not problems:
        yield declared_row("finite", subject, "finite", "finite" if job.parts else "", True, "after each step")
        return
    if not broken:
        why += "; the parameters are finite: is the update skipped?"
    verdict = DIFFERENT if broken else UNUSUAL
    yield CertificateRow("finite", subject, f"not finite: {', '.join(problems)}", "finite", why, verdict)


def _schedules(job: JobSeen) -> Iterator[CertificateRow]:
    steps = [step for rank in job.ranks for step in rank.steps]
    most, rates = max(step.schedules for step in steps), [lr for seen in job.parts.values() for lr in seen.rates]
    row = partial(CertificateRow, "update", "schedule of the learning rate")
    if most > 1:
        wanted, why, verdict = "once per update", "is it stepped per micro-batch?", UNUSUAL
        if most == len(job.ranks) and "accelerate" in sys.modules:
            wanted, why, verdict = "", "as many as there are ranks, as accelerate's scheduler takes", UNKNOWN
        yield row(f"{most} steps of a scheduler per update", wanted, why, verdict)
    if any(step.schedules_early for step in steps):
        yield row("a scheduler steps before the update", "after it", "the first rate is never used", UNUSUAL)
    if rates and not any(rates):
        yield row(f"a learning rate of 0 in {job.steps} steps", "another one", "nothing is trained", UNUSUAL)


def _accumulation(job: JobSeen, expected: ExpectedTraining) -> Iterator[CertificateRow]:
    by_rank = [[step.micro_batches for step in rank.steps[: job.steps]] for rank in job.ranks]
    counts, wanted, subject = by_rank[0], expected.accumulation, "micro-batches per update"
    shown = ", ".join(map(str, counts if len(set(counts)) > 1 else counts[:1]))
    if other := next((number for number, own in enumerate(by_rank) if own != counts), 0):
        shown += f" on rank 0, {', '.join(map(str, by_rank[other]))} on rank {other}"
        why = "gradients are means over the ranks: one with fewer weighs more, unless losses are sums over all tokens"
        verdict = DIFFERENT if wanted else UNUSUAL
        yield CertificateRow("accumulation", subject, shown, "equal on all ranks", why, verdict)
        return
    if wanted is None or not any(counts):
        yield declared_row("accumulation", subject, shown, "", False)
    else:
        why, verdict = _counted(counts, wanted)
        yield CertificateRow("accumulation", subject, shown, str(wanted), why, verdict)
    if any(step.between for rank in job.ranks for step in rank.steps):
        why = "the sum so far is clipped or scaled before the next micro-batch is added: another training"
        finding = "gradients change between the micro-batches of an update"
        yield CertificateRow("accumulation", "gradients", finding, "only backward changes them", why, UNUSUAL)
    stale = [step.stale for step in job.ranks[0].steps[1 : job.steps]]
    if any(stale):
        finding = f"those of earlier updates are there before backward in {sum(stale)} of {len(stale)} steps"
        why = "gradients of several updates add up: is zero_grad missing?"
        yield CertificateRow("accumulation", "gradients", finding, "none", why, UNUSUAL)


def _counted(counts: list[int], wanted: int) -> tuple[str, str]:
    """Returns the reason and the verdict for the micro-batches of each update, given a declared number."""
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
    steps = [step for step in range(job.steps) if job.squares(step) and step not in job.skipped]
    pairs = [(job.norm(step), job.norm(step, at_update=True)) for step in steps if job.norm(step)]
    if not pairs:
        why = "all updates were skipped" if job.skipped else "they are not on the parameters after backward"
        yield CertificateRow("norm", "gradients", "none seen", "", why, UNKNOWN)
        return
    clipped = sum(after < before * (1 - REL) for before, after in pairs)
    shown = ", ".join(f"{before:.4g} → {after:.4g}" for before, after in pairs[:UPDATES])
    finding, limit = f"{shown}: clipping acted in {clipped} of {len(pairs)} steps", expected.clip or 0.0
    subject = "after backward → at the update"
    # with several models the norm after backward is of one of them, the limit of all
    if not limit or any(job.squares(step, True).keys() - job.squares(step).keys() for step in steps):
        yield declared_row("norm", subject, finding, "", False)
        return
    is_within = all(after <= limit * (1 + REL) for _, after in pairs)
    changes = any(step.between for rank in job.ranks for step in rank.steps)
    is_seen = all(after > 0 for _, after in pairs) and not changes
    has_parts = job.strategy == "plain" and len(job.ranks) > 1 and bool(job.unequal("values", 0))
    verdict = DIFFERENT if not is_within else SAME if is_seen and not has_parts else UNKNOWN
    why = f"{DECLARED}: the norm over all parameters and ranks"
    why += "; ranks have other values at the beginning: are these parts of one model, whose norm is larger?" * has_parts
    is_scaled = any(step.scale != 1 for step in job.ranks[0].steps)
    if is_within and is_scaled and any(before > limit and after < 0.9 * limit for before, after in pairs):
        why = "a norm above the limit becomes the limit: are gradients clipped before they are unscaled?"
        verdict = UNUSUAL
    yield CertificateRow("norm", subject, finding, f"at most {limit:g}", why, verdict)


def _scaling(job: JobSeen) -> Iterator[CertificateRow]:
    steps, skipped = job.ranks[0].steps, job.skipped
    scales = [step.scale for step in steps]
    if skipped or any(scale != 1 for scale in scales):
        shown = ", ".join(f"{scale:g}" for scale in scales)
        finding = f"factors {shown}; {len(skipped)} of {len(steps)} updates skipped"
        is_stuck = len(steps) == len(skipped) > 1 and scales[-1] > scales[0] * 0.51 ** (len(steps) - 1)
        why = "nothing is trained, and no skip halves the factor" if is_stuck else "a scaler lowers its factor by skips"
        wanted, verdict = ("at least one update", UNUSUAL) if is_stuck else ("", UNKNOWN)
        yield CertificateRow("scaling", "factor of the loss", finding, wanted, why, verdict)


# -- between ranks ----------------------------------------------------------------------------------------


def _values(job: JobSeen) -> CertificateRow:
    own = set(job.ranks[0].own)
    names = [name for name in job.shared("values") if name not in own]
    if not names:
        why = "parameters that an engine divides or gathers are not"
        return CertificateRow("partition", "values on all ranks", "not compared", "", why, UNKNOWN)
    subject = f"values of {shown_names(names, len(job.names))} on all ranks"
    off = [[name for name in job.unequal("values", step) if name not in own] for step in range(job.steps + 1)]
    bits = f"checksums of the bits at the beginning and after each of {job.steps} steps"
    is_replicated = job.strategy in REPLICATED
    keeps, wanted, verdict = f"{job.strategy} keeps them equal: {bits}", "equal", UNUSUAL
    if not any(off):
        wanted, why, verdict = ("equal", keeps, SAME) if is_replicated else ("", bits, UNKNOWN)
        return CertificateRow("partition", subject, "equal", wanted, why, verdict)
    first = next(step for step, unequal in enumerate(off) if unequal)
    since = f"step {first}" if first else "the beginning"
    finding = f"they differ in {shown_names(off[-1] or off[first], len(names))} from {since} on"
    if is_replicated and job.ranks[0].has_hook:
        why = f"a hook of DDP reduces; {bits}"
    elif is_replicated and _averages(off):
        why = f"they are equal again later: are they averaged?; {bits}"
    elif is_replicated:
        why, verdict = keeps, DIFFERENT
    elif first > 0 and off[-1]:
        why = f"they were equal at the beginning: {bits}"
    elif job.reduces_by_hand:
        why = f"the loop reduces their gradients: {bits}"
    else:
        wanted, why, verdict = "", "ranks of a plain loop may have different parts", UNKNOWN
    return CertificateRow("partition", subject, finding, wanted, why, verdict)


def _averages(off: list[list[str]]) -> bool:
    return any(before and not after for before, after in pairwise(off))


def _ignored(job: JobSeen) -> Iterator[CertificateRow]:
    """Yields the check of parameters that DDP was told to leave to each rank, if they were equal at the beginning."""
    initial, own = job.unequal("values", 0), job.ranks[0].own
    if off := [name for name in job.unequal("values", job.steps) if name in own and name not in initial]:
        why = "DDP was told to ignore them, and they were equal at the beginning"
        subject = f"values of {shown_names(off, 0)} on all ranks"
        yield CertificateRow("partition", subject, "they differ", "equal", why, UNUSUAL)


def _buffers(job: JobSeen) -> Iterator[CertificateRow]:
    own = set(job.ranks[0].own)
    names = [name for name in job.shared("buffers") if name not in own]
    if not names:
        return
    off = [name for name in job.unequal("buffers", job.steps) if name not in own]
    subject, wanted, verdict = f"buffers {shown_names(names, len(names))} on all ranks", "", UNKNOWN
    finding = f"they differ in {shown_names(off, len(names))}" if off else "equal"
    if not off:
        why = "checksums of the bits after the last step"
    elif job.ranks[0].syncs_buffers if job.strategy != "plain" else not job.reduces_by_hand:
        why = "DDP and our engines send rank 0's before each forward; each rank's forward changes them again"
    else:
        why = "each rank has statistics of its own samples, and a checkpoint has rank 0's"
        wanted, verdict = "equal", UNUSUAL
    yield CertificateRow("partition", subject, finding, wanted, why, verdict)


def _reductions(job: JobSeen, expected: ExpectedTraining) -> CertificateRow:
    subject, rank, number = "each gradient is reduced over the ranks", job.ranks[0], expected.reductions
    times = job.reductions(job.steps - 1)
    *in_micro_batches, after = (
        f"{round(count, 2):g} ({show_count(calls, 'collective')}, {size:,} bytes)"
        for count, (calls, size) in zip(times, rank.steps[job.steps - 1].calls, strict=True)
    )
    finding = f"{sum(times):.3g} times: {', '.join(in_micro_batches)} in its micro-batches, {after} after them"
    sums = [sum(job.reductions(step)) for step in range(job.steps)]
    if rank.is_ddp and min(sums) < NEVER:
        off = [job.unequal("values", step) for step in range(job.steps + 1)]
        why = "DDP reduces each gradient at least once per update"
        if not rank.wrapper_calls:
            why = "the DDP wrapper was not called, only the module in it: its gradients are not reduced"
        verdict, finding = UNUSUAL if rank.has_hook or _averages(off) else DIFFERENT, f"{min(sums):.2g} times in a step"
        return CertificateRow("accumulation", subject, finding, "at least once", why, verdict)
    if number is None:
        return declared_row("accumulation", subject, finding, "", False)
    is_so = all(abs(count - number) < REDUCED for count in sums)
    has_more = min(sums) > number - REDUCED and max(sums) < number + 0.5
    verdict = SAME if is_so else UNKNOWN if has_more else DIFFERENT
    why = f"{DECLARED}; are the others of metrics or padding?" if has_more and not is_so else DECLARED
    return CertificateRow("accumulation", subject, finding, f"{number} times", why, verdict)


def _rates(job: JobSeen) -> Iterator[CertificateRow]:
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
        finding = "equal to the bit in every step on several ranks" if is_equal else "distinct"
        why = DECLARED if expected.data else f"{NOTHING_EXPECTED}; have these ranks the same samples?"
        verdict = SAME if not is_equal else DIFFERENT if expected.data else UNUSUAL
        is_close = any(
            all(math.isclose(own, other, rel_tol=1e-6) for own, other in zip(*pair, strict=True))
            for pair in combinations(losses, 2)
        )
        if is_close and not is_equal:
            finding, why, verdict = "distinct by rounding alone", "the same samples in another order?", UNUSUAL
        yield CertificateRow("data", subject, finding, "distinct", why, verdict)


def _copies(job: JobSeen, expected: ExpectedTraining) -> CertificateRow:
    copies, ranks, subject = job.copies, len(job.ranks), "copies of each optimizer state"
    if copies is None:
        why = "the optimizer has no states, or their parameters are unknown"
        return CertificateRow("partition", subject, "none seen", "", why, UNKNOWN)
    finding = f"{copies:.3g} on {ranks} ranks"
    if expected.copies is not None:
        is_so = abs(copies - expected.copies) < 0.1
        return declared_row("partition", subject, finding, f"{expected.copies:g}", is_so)
    if job.strategy not in PARTITIONED:
        return declared_row("partition", subject, finding, "", False)
    verdict, why = SAME if copies < ranks - 0.1 else UNUSUAL, f"{job.strategy} partitions states over ranks"
    return CertificateRow("partition", subject, finding, f"fewer than {ranks}", why, verdict)
