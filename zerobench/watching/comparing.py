"""The checks of a certificate against another one: the first updates of a reference, and an option's effect.

[Note: bounds]
They depend on the narrowest dtype that computes or stores, in either loop. Losses and norms: relative, as in a sweep's
comparison with DDP (sweep/parity.py). Parameters, after each update, for the whole tensor of each name:

    |own - reference| <= share · |reference's movement since the beginning| + eps · |reference|

`eps` is the machine epsilon of the reference's masters, by which two roundings of a sum may differ. Values whose
gradient may be mere rounding error move arbitrarily under Adam and are not compared: elements in FirstUpdates.noise,
and parameters whose gradient norm is below `rounding` times that of all gradients. Initial values are bit-identical.

A loop may sum its losses over tokens and divide the gradients later. If gradients agree at the update, and parameters
after it, losses and earlier norms that differ by one constant factor are reported, but not as `different`.

Updates are compared until either loop skips one: the batches of later ones are not the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..records import CertificateRow
from ..sweep.parity import TOLERANCES, relative_deviation
from .certificate import DIFFERENT, NARROW, SAME, UNKNOWN, UNUSUAL, JobSeen
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


BOUNDS = {
    "float32": Bounds("float32", *TOLERANCES["fp32"], 1e-3, 1e-6),
    "bfloat16": Bounds("bfloat16", *TOLERANCES["bf16"], 0.45, 1e-2),
    "float16": Bounds("float16", *TOLERANCES["fp16"], 0.45, 1e-2),
}
"""By the narrower dtype of the two loops."""

EQUAL = "equal to the bit"
AGREES = "gradients at the update and parameters after it agree, so that a later factor makes up for it"


_row = partial(CertificateRow, "reference")


def compare_with_reference(job: JobSeen, reference: JobSeen) -> Iterator[CertificateRow]:
    """Yields the checks of the first updates. Both loops must have trained on the same global batches."""
    yield from _trained(job, reference)
    steps = min([job.steps, reference.steps, UPDATES, *job.skipped, *reference.skipped])
    if not steps:
        why = "the first update was skipped: the next one has another batch than the reference's"
        yield _row("updates", "not compared", "", why, UNKNOWN)
        return
    bounds = BOUNDS[min(job.precision, reference.precision, key=NARROW.index)]
    values = list(_values(job, reference, bounds, steps))
    # Clipping makes norms agree whatever they were before.
    unclipped = [
        n for n in range(steps) if relative_deviation(reference.norm(n, True), reference.norm(n)) <= bounds.norm
    ]
    at_update = [(job.norm(step, True), reference.norm(step, True)) for step in unclipped]
    agrees = bool(at_update) and all(row.verdict == SAME for row in values)
    agrees = agrees and all(own and relative_deviation(own, other) <= bounds.norm for own, other in at_update)
    yield _losses(job, reference, bounds, steps, agrees)
    yield from _norms(job, reference, bounds, steps, agrees)
    yield from _rates(job, reference, steps)
    yield from values


def _trained(job: JobSeen, reference: JobSeen) -> Iterator[CertificateRow]:
    """Yields the checks that the loop trains the parameters that the reference trains, and no frozen one changes."""
    subject = "parameters that are trained"
    if not (job.held and reference.held and job.names & reference.names):
        if job.held and reference.held:
            yield _row(subject, "not compared", "", "no name of the loop is one of the reference", UNKNOWN)
        return
    sides = {
        "trained here alone": job.held - reference.held,
        "trained by the reference alone": reference.held - job.held,
        "frozen, and changed here alone": set(job.changed_frozen) - set(reference.changed_frozen),
    }
    for finding, names in sides.items():
        if names:
            parameters = f"training of {shown_names(sorted(names), 0)}"
            yield _row(parameters, finding, "the reference's", "by their names", DIFFERENT)
    if not any(sides.values()):
        yield _row(subject, f"{len(job.held)} of the same names", "the reference's", "by their names", SAME)


def _losses(job: JobSeen, reference: JobSeen, bounds: Bounds, steps: int, agrees: bool) -> CertificateRow:
    pairs = [(job.loss(step), reference.loss(step)) for step in range(steps)]
    if not all(map(any, zip(*pairs, strict=True))):
        return _row(
            f"losses of {steps} steps",
            "none seen",
            "",
            "backward was not given a scalar loss in this loop, or in the reference",
            UNKNOWN,
        )
    row, first = _series(f"losses of {steps} steps", pairs, bounds.loss, bounds, agrees)
    if first == 0 and row.verdict == DIFFERENT:
        row.why += "; there was no update yet: check the data, the seed, the initial values and the forward"
        factor = pairs[0][0] / pairs[0][1] if pairs[0][1] else math.nan
        if math.isclose(factor, job.ranks[0].steps[0].backwards, rel_tol=1e-2) and factor > 1.5:
            row.why += "; the factor is the number of micro-batches: the loss is not divided by it"
    elif first and row.verdict == DIFFERENT:
        row.why += f"; losses agree until update {first}: check that update"
    return row


def _norms(job: JobSeen, reference: JobSeen, bounds: Bounds, steps: int, agrees: bool) -> Iterator[CertificateRow]:
    for at_update in (False, True):
        if job.reduces_late and not at_update:
            continue  # they are of one rank
        when = "at the update" if at_update else "before clipping"
        own = () if at_update else job.ranks[0].own  # a loop may reduce them later
        pairs = [(job.norm(step, at_update, own), reference.norm(step, at_update, own)) for step in range(steps)]
        if not all(own and other for own, other in pairs):
            why = "gradients are not on the parameters of this loop, or of the reference"
            yield _row(f"norms of gradients, {when}", "none seen", "", why, UNKNOWN)
            continue
        row, first = _series(f"norms of gradients, {when}", pairs, bounds.norm, bounds, agrees and not at_update)
        if first is None:
            # single parameters may differ though the norm of all does not
            for step in range(steps):
                changes, total = _changes(job, reference, step, at_update), reference.norm(step, at_update)
                if off := [
                    name for name, change in changes.items() if change > bounds.norm * total and name not in own
                ]:
                    subject = f"norms of gradients of {shown_names(sorted(off), 0)}, {when}"
                    why = f"of each parameter within {bounds.norm:.0e} of the norm of all, for {bounds.dtype}"
                    row = _row(subject, f"they differ in step {step + 1}", "the reference's", why, DIFFERENT)
                    first = step
                    break
        elif row.verdict == DIFFERENT:
            factor, ranks = pairs[first][0] / pairs[first][1], len(job.ranks)
            if ranks > 1 and math.isclose(factor, ranks, rel_tol=1e-2):
                row.why += f"; it is {ranks} times the reference's, as a sum over {ranks} ranks in place of the mean"
            elif ranks > 1 and math.isclose(factor, 1 / ranks, rel_tol=1e-2):
                row.why += f"; it is 1/{ranks} of the reference's, as after a second division by the ranks"
            else:
                row.why += f"; it is {factor:.4g} times the reference's from step {first} on: check the backward and"
                row.why += " the reduction"
            clips = [side.norm(first, True) < side.norm(first) * (1 - bounds.norm) for side in (job, reference)]
            if at_update and not job.reduces_late and clips[0] != clips[1]:
                row.why += f"; {'this loop' if clips[0] else 'the reference'} alone clips them"
        changes = _changes(job, reference, first or 0, at_update)
        worst = max(changes, key=lambda name: changes[name], default="")
        if worst and changes[worst]:
            row.found += f", most in {worst}"
        yield row


def _changes(job: JobSeen, reference: JobSeen, step: int, at_update: bool) -> dict[str, float]:
    """Returns parameter -> difference of its gradient's norm from the reference's."""
    own, other = job.squares(step, at_update), reference.squares(step, at_update)
    return {name: abs(math.sqrt(own[name]) - math.sqrt(other[name])) for name in own.keys() & other}


def _series(
    subject: str, pairs: list[tuple[float, float]], bound: float, bounds: Bounds, agrees: bool
) -> tuple[CertificateRow, int | None]:
    """Returns the row of values next to the reference's, and the first step out of `bound`."""
    offs = [relative_deviation(own, other) for own, other in pairs]
    first = next((step for step, off in enumerate(offs) if off > bound), None)
    finding, expected = (", ".join(f"{value:.6g}" for value in side) for side in zip(*pairs, strict=True))
    ulps = [ulps_between(*torch.tensor([[own], [other]])) for own, other in pairs]
    finding += f"; off by at most {max(offs):.1e}, {-1 if -1 in ulps else max(ulps):,} fp32 ULP"
    factors = [own / other if other else math.nan for own, other in pairs]
    is_one_factor = all(math.isclose(factor, factors[0], rel_tol=bounds.norm) for factor in factors)
    if first is not None and agrees and is_one_factor:
        why = f"they are {factors[0]:.4g} times the reference's; {AGREES}"
        return _row(subject, finding, expected, why, UNKNOWN), first
    why = f"relative difference within {bound:.0e} for {bounds.dtype}"
    return _row(subject, finding, expected, why, verdict_of(first is None)), first


def _rates(job: JobSeen, reference: JobSeen, steps: int) -> Iterator[CertificateRow]:
    groups: dict[tuple[str, str], list[str]] = {}
    for name in reference.parts.keys() & job.parts:
        other = reference.parts[name].rates[:steps]
        for own in (rank.parts[name].rates[:steps] for rank in job.ranks if name in rank.parts):
            if len(own) != len(other) or not all(map(math.isclose, own, other)):
                if own and other:
                    sides = [", ".join(f"{lr:.4g}" for lr in rates) for rates in (own, other)]
                    groups.setdefault((sides[0], sides[1]), []).append(name)
                break
    for (finding, expected), names in groups.items():
        subject = f"learning rates of {shown_names(sorted(names), len(job.parts))}"
        yield _row(subject, finding, expected, "in each update", DIFFERENT)
    if not groups and any(seen.rates for seen in job.parts.values()):
        yield _row("learning rates", "equal", "the reference's", "of each parameter, in each update", SAME)


def _values(job: JobSeen, reference: JobSeen, bounds: Bounds, steps: int) -> Iterator[CertificateRow]:
    if not job.deviations(0):
        why = "the reference has no values, or the parts that this engine updates have no names"
        yield _row("parameters", "not compared", "", why, UNKNOWN)
        return
    initial = {name: deviation for name, deviation in job.deviations(0).items() if deviation.off}
    finding, why = shown_worst(initial) if initial else EQUAL, "the same seed; rounded if the model is narrower"
    yield _row("initial values", finding, EQUAL, why, verdict_of(not initial))

    dtypes = [{seen.in_model for seen in side.parts.values()} for side in (job, reference)]
    buffers = reference.ranks[0].buffers[0] if dtypes[0] == dtypes[1] else {}  # their bits depend on the dtype
    off = [name for name, bits in buffers.items() if any(rank.buffers[0].get(name, bits) != bits for rank in job.ranks)]
    if off:
        subject, why = f"initial values of buffers: {shown_names(off, 0)}", "checksums of the bits, on all ranks"
        yield _row(subject, "other values", EQUAL, why, UNUSUAL)
    if missing := sorted((job.held & reference.held) - job.deviations(0).keys()):
        why = "of another shape, complex, or unknown"
        yield _row(f"values of {shown_names(missing, 0)}", "not compared", "", why, UNKNOWN)

    rounded: set[str] = set()  # parameters whose gradients are rounding errors, in any of the first steps
    for step in range(min(reference.steps, UPDATES)):
        squares = reference.squares(step)
        limit = bounds.rounding**2 * sum(squares.values())
        rounded |= {name for name, square in squares.items() if square <= limit}
    for number in range(1, steps + 1):
        deviations = job.deviations(number)
        compared = {name: deviation for name, deviation in deviations.items() if name not in rounded}
        if compared:
            yield _update_row(number, compared, reference, bounds, sorted(rounded & deviations.keys()))


def _update_row(
    number: int, compared: dict[str, Deviation], reference: JobSeen, bounds: Bounds, left_out: list[str]
) -> CertificateRow:
    over: list[str] = []
    for name, deviation in compared.items():
        master = reference.parts[name].master if name in reference.parts else "float32"
        eps = torch.finfo(getattr(torch, master)).eps
        limit = bounds.share * math.sqrt(deviation.update) + eps * math.sqrt(deviation.value)
        if deviation.off and not math.sqrt(deviation.off) <= limit:  # not a number is over
            over.append(name)
    subject = f"parameters after update {number}"
    if over:
        subject += f": {shown_names(over, len(compared))}"
    why = f"within {bounds.share:g} of the movement plus the eps of the masters, for {bounds.dtype}"
    if left_out:
        why += f"; not compared, as their gradients are rounding alone: {shown_names(left_out, 0)}"
    finding = shown_worst({name: compared[name] for name in over} or compared)
    return _row(subject, finding, "the reference's", why, verdict_of(not over))


def shown_worst(deviations: dict[str, Deviation]) -> str:
    """Returns the largest deviations with the names of their parameters as text."""

    def share(name: str) -> float:
        scale = deviations[name].update or deviations[name].value
        return math.sqrt(deviations[name].off / scale) if scale else 0.0

    worst = max(deviations, key=share)
    if not deviations[worst].off:
        return EQUAL
    by_ulp = max(deviations, key=lambda name: deviations[name].ulp)
    ulps = "not finite" if deviations[worst].ulp < 0 else f"{deviations[by_ulp].ulp:,} ULP in {by_ulp}"
    of = "of the movement" if deviations[worst].update else "relative"
    return f"off by at most {share(worst):.1e} {of} in {worst}, {ulps}"


def effect_of_option(job: JobSeen, other: JobSeen) -> CertificateRow:
    """Returns the check that a loop differs from another one that was meant to differ."""
    count = min(job.steps, other.steps)
    values: dict[str, Callable[[JobSeen], Any]] = {
        "dtypes": lambda side: [(p.in_model, p.master, p.gradient, p.moments) for p in side.parts.values()],
        "dtypes that compute": lambda side: side.computes,
        "collectives and their bytes": lambda side: side.sent,
        "reductions": lambda side: side.reductions(side.steps - 1),
        "copies of states": lambda side: side.copies,
        "peak bytes": lambda side: max(rank.peak_bytes for rank in side.ranks),
        "losses": lambda side: [side.loss(step) for step in range(count)],
    }
    changed = [name for name, read in values.items() if read(job) != read(other)]
    subject = f"effect of the option, against {other.name or other.strategy}"
    finding = "this option changed nothing: equal dtypes, bytes, collectives and losses"
    finding = f"it changed {', '.join(changed)}" if changed else finding
    return CertificateRow("knob", subject, finding, "a change", "it is declared", verdict_of(bool(changed)))
