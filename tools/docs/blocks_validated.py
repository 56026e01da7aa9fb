"""The blocks on published runs, from the committed file of errors (`make published-runs`; see blocks.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from tools.docs.blocks_systems import pipes
from validation.published_runs.command import OUT_OF_MEMORY
from zerobench.commands.plan.candidates import RESERVE
from zerobench.published.rows import read

NONE_YET = "No comparison is on record yet; `make published-runs` makes one."


def validated(root: Path) -> str:
    """The runs that were compared, the largest error first, and a sentence for each beyond 5 %."""
    errors = _errors(root)
    if errors is None:
        return NONE_YET
    there = errors[errors["status"] == "compared"]
    there = there.reindex(there["error_percent"].astype(float).abs().sort_values(ascending=False, kind="stable").index)
    head = ["run", "model", "GPUs", "sequence × micro-batch", "kind", "published GiB", "estimate GiB", "error %"]
    lines = [pipes(head), "| --- | --- | --: | --: | --- | --: | --: | --: |"]
    for one in there.itertuples():
        low, high = one.estimate_low_gib, one.estimate_high_gib
        estimate = low if low == high else f"{low} to {high}"
        size = f"{one.seq} × {one.micro_batch}"
        kind = "not said" if one.peak_kind == "?" else one.peak_kind
        cells = [one.id, one.model, one.gpus, size, kind, one.published_gib, estimate, one.error_percent]
        lines.append(pipes(cells))
    close = there["error_percent"].astype(float).abs()
    counts = Counter(errors["status"])
    words = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    said = f"{len(errors)} rows: {words}. Of those compared {sum(close <= 5)} of {len(there)} are within 5 %,"
    far = [f"- `{one.id}`: {one.explanation}" for one in there.itertuples() if one.explanation]
    assumed = [f"- `{one.id}`: {one.assumed}" for one in there.itertuples()]
    parts = ["\n".join(lines), f"{said} median |error| {close.median():.1f} %."]
    parts += ["Beyond 5 %, simulated again with one change:", "\n".join(far)] if far else []
    return "\n\n".join([*parts, "What each row leaves open, and the simulated choice:", "\n".join(assumed)])


def compiled(root: Path) -> str:
    """The runs that their publishers compiled: estimated without a compiler, and with compile=blocks."""
    errors = _errors(root)
    if errors is None:
        return NONE_YET
    lines = [pipes(["run", "published GiB", "eager: GiB", "error %", "compiled: GiB", "error %", "and"])]
    lines += ["| --- | --: | --: | --: | --: | --: | --- |"]
    for one in errors[errors["eager_error_percent"] != ""].itertuples():
        sizes = f"{one.eager_low_gib} to {one.eager_high_gib}", f"{one.estimate_low_gib} to {one.estimate_high_gib}"
        numbers = [one.published_gib, sizes[0], one.eager_error_percent, sizes[1], one.error_percent]
        lines.append(pipes([f"`{one.id}`", *map(str, numbers), str(one.explanation) or "–"]))
    return "\n".join(lines)


def not_compared(root: Path) -> str:
    """The runs with a peak that have no estimate, by reason."""
    errors = _errors(root)
    if errors is None:
        return NONE_YET
    others = errors[errors["status"].isin(["no estimate", "failed"])]
    lines = ["| why | runs |", "| --- | --- |"]
    for reason, mine in others.groupby("reason", sort=False):
        lines.append(pipes([str(reason), ", ".join(f"`{name}`" for name in mine["id"])]))
    return "\n".join(lines)


def verdicts(root: Path) -> str:
    """Whether a run fits its card, as estimated, next to what happened: precision and recall of "does not fit"."""
    errors = _errors(root)
    if errors is None:
        return NONE_YET
    cards = {run.id: run.gpu_mem_gib for run in read(root.parent.parent / "published_runs" / "training.csv")}
    lines = [pipes(["run", "GPU's memory, GiB", "estimated peak, GiB", "estimated", "reported"])]
    lines += ["| --- | --: | --: | --- | --- |"]
    found: Counter[tuple[bool, bool]] = Counter()
    for one in errors[errors["status"].isin(["compared", OUT_OF_MEMORY])].itertuples():
        card, failed = cards[str(one.id)], one.status == OUT_OF_MEMORY
        if card is None:
            continue
        refused = float(str(one.estimate_low_gib)) > card * (1 - RESERVE)
        found[refused, failed] += 1
        shown = ["does not fit" if no else "fits" for no in (refused, failed)]
        lines.append(pipes([f"`{one.id}`", f"{card:g}", str(one.estimate_low_gib), *shown]))
    right, refused_in_all = found[True, True], found[True, True] + found[True, False]
    failed_in_all = right + found[False, True]
    words = f"Estimated not to fit: {refused_in_all} ({right} did not). Out of memory: {failed_in_all} ({right} found)."
    return "\n".join([*lines, "", words])


def _errors(root: Path) -> pd.DataFrame | None:
    path = root.parent.parent / "published_runs" / "errors.csv"
    return pd.read_csv(path, dtype=str, keep_default_na=False) if path.exists() else None


BLOCKS: dict[str, Callable[[Path], str]] = {
    "validated": validated, "compiled_runs": compiled, "not_compared": not_compared, "memory_verdicts": verdicts,
}  # fmt: skip
