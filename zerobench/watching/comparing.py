"""The checks of a certificate against another one: the first updates of a reference, and an option's effect.

[Note: bounds]
They depend on the narrowest dtype that computes or stores, in either loop. Losses and norms: relative, as in a sweep's
comparison with DDP (sweep/parity.py). Parameters, after each update, for the whole tensor of each name:

    |own - reference| <= share · |reference's movement since the beginning| + eps · |reference|

`eps` is that of the reference's masters: two roundings of a sum may differ by so much. Elements and parameters whose
gradient may be rounding alone move arbitrarily under Adam, and are not compared: FirstUpdates.noise, and parameters
whose gradient is below `rounding` of all gradients' norm. Initial values are equal to the bit.

A loop may sum its losses over tokens and divide the gradients later. If gradients agree at the update, and parameters
after it, losses and earlier norms that are off by one factor are shown, and not accused.

Updates are compared until either loop skips one: the batches of later ones are not the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..records import CertificateRow
from ..sweep.parity import TOLERANCES
from .certificate import DIFFERENT, SAME, UNKNOWN, UNUSUAL
from .job_seen import NARROW, JobSeen
from .judging import shown_names, verdict_of
from .observed import UPDATES, Deviation, ulps_between


@dataclass(frozen=True)
class Bounds:
    """Largest relative deviations of losses and norms; `share`: of a parameter's movement; `rounding`: see above."""

    dtype: str
    loss: float
    norm: float
    share: float
    rounding: float

    @classmethod
    def between(cls, job: JobSeen, reference: JobSeen) -> Bounds:
        """Returns the bounds for two loops."""
        dtype = min(job.precision, reference.precision, key=NARROW.index)
        name, share, rounding = {
            "float32": ("fp32", 1e-3, 1e-6),
            "bfloat16": ("bf16", 0.45, 1e-2),
            "float16": ("fp16", 0.45, 1e-2),
        }[dtype]
        return cls(dtype, *TOLERANCES[name], share, rounding)


def compare_with_reference(job: JobSeen, reference: JobSeen) -> Iterator[CertificateRow]:
    """Yields the checks of the first updates. Both loops must have trained on the same global batches."""
    yield from _trained(job, reference)
    steps = min([job.steps, reference.steps, UPDATES, *job.skipped, *reference.skipped])
    if not steps:
        why = "the first update was skipped: the next one has another batch than the reference's"
        yield _row("updates", "not compared", "", why, UNKNOWN)
        return
    bounds = Bounds.between(job, reference)
    values = list(_values(job, reference, bounds, steps))
    # Clipping makes norms agree whatever they were before.
    unclipped = [n for n in range(steps) if relative(reference.norm(n, True), reference.norm(n)) <= bounds.norm]
    at_update = [(job.norm(step, True), reference.norm(step, True)) for step in unclipped]
    agrees = bool(at_update) and all(own and relative(own, other) <= bounds.norm for own, other in at_update)
    agrees = agrees and all(row.verdict == SAME for row in values)
    yield from _losses(job, reference, bounds, steps, agrees)
    yield from _norms(job, reference, bounds, steps, agrees)
    yield from _rates(job, reference, steps)
    yield from values


def _trained(job: JobSeen, reference: JobSeen) -> Iterator[CertificateRow]:
    """Yields the checks that the loop trains the parameters that the reference trains, and no frozen one changes."""
    subject = "parameters that are trained"
    if not (job.held and reference.held and job.names & reference.names):
        if job.held and reference.held:
            why = "no name of the loop is one of the reference"
            yield _row(subject, "not compared", "", why, UNKNOWN)
        return
    changed = set(job.changed_frozen) - set(reference.changed_frozen)
    sides = {
        "trained here alone": job.held - reference.held,
        "trained by the reference alone": reference.held - job.held,
        "frozen, and changed here alone": changed,
    }
    for found, names in sides.items():
        if names:
            parameters = f"training of {shown_names(sorted(names), 0)}"
            yield _row(parameters, found, "the reference's", "by their names", DIFFERENT)
    if not any(sides.values()):
        found = f"{len(job.held)} of the same names"
        yield _row(subject, found, "the reference's", "by their names", SAME)


def _rates(job: JobSeen, reference: JobSeen, steps: int) -> Iterator[CertificateRow]:
    groups: dict[tuple[str, str], list[str]] = {}
    for name in reference.parts.keys() & job.parts:
        other = reference.parts[name].rates[:steps]
        own = [rank.parts[name].rates[:steps] for rank in job.ranks if name in rank.parts]
        off = next(
            (rates for rates in own if len(rates) != len(other) or not all(map(math.isclose, rates, other))), None
        )
        if off is not None and off and other:
            sides = tuple(", ".join(f"{lr:.4g}" for lr in side) for side in (off, other))
            groups.setdefault((sides[0], sides[1]), []).append(name)
    for (found, expected), names in groups.items():
        subject = f"learning rates of {shown_names(sorted(names), len(job.parts))}"
        yield _row(subject, found, expected, "in each update", DIFFERENT)
    if not groups and any(seen.rates for seen in job.parts.values()):
        yield _row("learning rates", "equal", "the reference's", "of each parameter, in each update", SAME)


EQUAL = "equal to the bit"
AGREES = "gradients at the update and parameters after it agree, so that a later factor makes up for it"


def _row(subject: str, found: str, expected: str, why: str, verdict: str) -> CertificateRow:
    return CertificateRow("reference", subject, found, expected, why, verdict)


def _losses(job: JobSeen, reference: JobSeen, bounds: Bounds, steps: int, agrees: bool) -> Iterator[CertificateRow]:
    pairs = [(job.loss(step), reference.loss(step)) for step in range(steps)]
    row, first = _series(f"losses of {steps} steps", pairs, bounds.loss, bounds, agrees)
    if first == 0 and row.verdict == DIFFERENT:
        row.why += "; there was no update yet: check the data, the seed, the initial values and the forward"
        factor = pairs[0][0] / pairs[0][1] if pairs[0][1] else math.nan
        if math.isclose(factor, job.ranks[0].steps[0].backwards, rel_tol=1e-2) and factor > 1.5:
            row.why += "; the factor is the number of micro-batches: the loss is not divided by it"
    elif first and row.verdict == DIFFERENT:
        row.why += f"; losses agree until update {first}: check that update"
    yield row


def _norms(job: JobSeen, reference: JobSeen, bounds: Bounds, steps: int, agrees: bool) -> Iterator[CertificateRow]:
    for late in (False, True):
        pairs = [(job.norm(step, late), reference.norm(step, late)) for step in range(steps)]
        subject = f"norms of gradients, {'at the update' if late else 'before clipping'}"
        if job.reduces_late and not late:
            continue  # they are of one rank
        if not all(own and other for own, other in pairs):
            why = "gradients are not on the parameters of this loop, or of the reference"
            yield _row(subject, "none seen", "", why, UNKNOWN)
            continue
        row, first = _series(subject, pairs, bounds.norm, bounds, agrees and not late)
        if first is None:
            first, row = next(_by_name(job, reference, steps, late, bounds), (None, row))
        elif row.verdict == DIFFERENT:
            row.why += _factor(*pairs[first], len(job.ranks), first)
            acted = [one.norm(first, True) < one.norm(first) * (1 - bounds.norm) for one in (job, reference)]
            if late and not job.reduces_late and acted[0] != acted[1]:
                row.why += f"; {'this loop' if acted[0] else 'the reference'} alone clips them"
        own, other = job.squares(first or 0, late), reference.squares(first or 0, late)
        named = {name: abs(math.sqrt(own[name]) - math.sqrt(other[name])) for name in own.keys() & other}
        worst = max(named, key=lambda name: named[name], default="")
        row.found += f", most in {worst}" * bool(worst and named[worst])
        yield row


def _by_name(
    job: JobSeen, reference: JobSeen, steps: int, late: bool, bounds: Bounds
) -> Iterator[tuple[int, CertificateRow]]:
    """Yields the first step whose norms of single parameters differ, though those of all parameters do not."""
    for step in range(steps):
        own, other, total = job.squares(step, late), reference.squares(step, late), reference.norm(step, late)
        off = [n for n in own.keys() & other if abs(math.sqrt(own[n]) - math.sqrt(other[n])) > bounds.norm * total]
        if off:
            subject = (
                f"norms of gradients of {shown_names(sorted(off), 0)}, {'at the update' if late else 'before clipping'}"
            )
            why = f"of each parameter within {bounds.norm:.0e} of the norm of all, for {bounds.dtype}"
            yield step, _row(subject, f"they differ in step {step + 1}", "the reference's", why, DIFFERENT)


def _series(
    subject: str, pairs: list[tuple[float, float]], bound: float, bounds: Bounds, agrees: bool
) -> tuple[CertificateRow, int | None]:
    """Returns the row of a value of each step beside the reference's, and the first step that is out of `bound`.
    `agrees`: gradients at the update and parameters do.
    """
    offs = [relative(own, other) for own, other in pairs]
    first = next((step for step, off in enumerate(offs) if off > bound), None)
    found, expected = (", ".join(f"{value:.6g}" for value in side) for side in zip(*pairs, strict=True))
    found += f"; off by at most {max(offs):.1e}, {ulps_of(pairs):,} fp32 ULP"
    factors = [own / other if other else math.nan for own, other in pairs]
    if first is not None and agrees and all(math.isclose(one, factors[0], rel_tol=bounds.norm) for one in factors):
        why = f"they are {factors[0]:.4g} times the reference's; {AGREES}"
        return _row(subject, found, expected, why, UNKNOWN), first
    why = f"relative difference within {bound:.0e} for {bounds.dtype}"
    return _row(subject, found, expected, why, verdict_of(first is None)), first


def _factor(own: float, other: float, ranks: int, step: int) -> str:
    """Returns the probable cause of a norm's deviation as text."""
    factor = own / other
    if ranks > 1 and math.isclose(factor, ranks, rel_tol=1e-2):
        return f"; it is {ranks} times the reference's, as a sum over {ranks} ranks in place of the mean"
    if ranks > 1 and math.isclose(factor, 1 / ranks, rel_tol=1e-2):
        return f"; it is 1/{ranks} of the reference's, as after a second division by the ranks"
    return f"; it is {factor:.4g} times the reference's from step {step} on: check the backward and the reduction"


def _values(job: JobSeen, reference: JobSeen, bounds: Bounds, steps: int) -> Iterator[CertificateRow]:
    if not job.deviations(0):
        why = "the reference has no values, or the parts that this engine updates have no names"
        yield _row("parameters", "not compared", "", why, UNKNOWN)
        return
    initial = {name: one for name, one in job.deviations(0).items() if one.off}
    found, why = worst_of(initial) if initial else EQUAL, "the same seed; rounded if the model is narrower"
    yield _row("initial values", found, EQUAL, why, verdict_of(not initial))
    yield from _buffers(job, reference)
    if missing := sorted((job.held & reference.held) - job.deviations(0).keys()):
        why = "of another shape, complex, or unknown"
        yield _row(f"values of {shown_names(missing, 0)}", "not compared", "", why, UNKNOWN)
    left_out = _rounding_alone(reference, bounds)
    for number in range(1, steps + 1):
        all_of = job.deviations(number)
        compared = {name: one for name, one in all_of.items() if name not in left_out}
        if compared:
            yield _update_row(number, compared, reference, bounds, sorted(left_out & all_of.keys()))


def _buffers(job: JobSeen, reference: JobSeen) -> Iterator[CertificateRow]:
    """Yields the check of initial buffers, whose bits depend on the model's dtype."""
    dtypes = [{seen.in_model for seen in one.parts.values()} for one in (job, reference)]
    others = reference.ranks[0].buffers[0] if dtypes[0] == dtypes[1] else {}
    off = [
        name for name in others if any(rank.buffers[0].get(name, others[name]) != others[name] for rank in job.ranks)
    ]
    if off:
        subject, why = f"initial values of buffers: {shown_names(off, 0)}", "checksums of the bits, on all ranks"
        yield _row(subject, "other values", EQUAL, why, UNUSUAL)


def _update_row(
    number: int, compared: dict[str, Deviation], reference: JobSeen, bounds: Bounds, left_out: list[str]
) -> CertificateRow:
    over = [name for name, one in compared.items() if one.off and not _is_within(one, reference, name, bounds)]
    subject = f"parameters after update {number}"
    if over:
        subject += f": {shown_names(over, len(compared))}"
    why = f"within {bounds.share:g} of the movement plus the eps of the masters, for {bounds.dtype}"
    if left_out:
        why += f"; not compared, as their gradients are rounding alone: {shown_names(left_out, 0)}"
    found = worst_of({name: compared[name] for name in over} or compared)
    return _row(subject, found, "the reference's", why, verdict_of(not over))


def _is_within(one: Deviation, reference: JobSeen, name: str, bounds: Bounds) -> bool:
    master = reference.parts[name].master if name in reference.parts else "float32"
    eps = torch.finfo(getattr(torch, master)).eps
    return math.sqrt(one.off) <= bounds.share * math.sqrt(one.update) + eps * math.sqrt(one.value)


def _rounding_alone(reference: JobSeen, bounds: Bounds) -> set[str]:
    """Returns the parameters whose gradients are rounding errors, in any of the first steps."""
    found: set[str] = set()
    for step in range(min(reference.steps, UPDATES)):
        squares = reference.squares(step)
        limit = bounds.rounding**2 * sum(squares.values())
        found |= {name for name, square in squares.items() if square <= limit}
    return found


def worst_of(deviations: dict[str, Deviation]) -> str:
    """Returns the largest deviations with the names of their parameters as text."""

    def share(name: str) -> float:
        one = deviations[name]
        return math.sqrt(one.off / one.update) if one.update else math.sqrt(one.off / one.value) if one.value else 0.0

    worst = max(deviations, key=share)
    if not deviations[worst].off:
        return EQUAL
    by_ulp = max(deviations, key=lambda name: deviations[name].ulp)
    ulps = "not finite" if deviations[worst].ulp < 0 else f"{deviations[by_ulp].ulp:,} ULP in {by_ulp}"
    of = "of the movement" if deviations[worst].update else "relative"
    return f"off by at most {share(worst):.1e} {of} in {worst}, {ulps}"


def ulps_of(pairs: list[tuple[float, float]]) -> int:
    """Returns the largest difference of pairs in fp32 ULP; -1 if a value is not finite."""
    ulps = [ulps_between(*torch.tensor([[own], [other]])) for own, other in pairs]
    return -1 if -1 in ulps else max(ulps)


def relative(own: float, other: float) -> float:
    """Returns |own − other| over |other|; infinite if only one is finite."""
    if own == other or (math.isnan(own) and math.isnan(other)):
        return 0.0
    off = abs(own - other) / abs(other) if other else math.inf
    return off if math.isfinite(off) else math.inf


def effect_of_option(job: JobSeen, other: JobSeen) -> CertificateRow:
    """Returns the check that a loop differs from another one that was meant to differ."""
    count = min(job.steps, other.steps)
    sides: dict[str, list[Any]] = {
        "dtypes": [[(p.in_model, p.master, p.gradient, p.moments) for p in one.parts.values()] for one in (job, other)],
        "dtypes that compute": [one.computes for one in (job, other)],
        "collectives and their bytes": [one.sent for one in (job, other)],
        "reductions": [one.reductions(one.steps - 1) for one in (job, other)],
        "copies of states": [one.copies for one in (job, other)],
        "peak bytes": [max(rank.peak_bytes for rank in one.ranks) for one in (job, other)],
        "losses": [[one.loss(step) for step in range(count)] for one in (job, other)],
    }
    changed = [name for name, (own, theirs) in sides.items() if own != theirs]
    subject = f"effect of the option, against {other.name or other.strategy}"
    if changed:
        return CertificateRow("knob", subject, f"it changed {', '.join(changed)}", "a change", "it is declared", "same")
    found = "this option changed nothing: equal dtypes, bytes, collectives and losses"
    return CertificateRow("knob", subject, found, "a change", "it is declared", DIFFERENT)
