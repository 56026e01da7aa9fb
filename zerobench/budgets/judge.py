"""Budgets: limits of chosen cells, and error messages for limits that are not met.

A *limit* applies to one metric of one cell::

    12345678               exactly this value: more is a regression, less an improvement worth recording
    12345678 ± 2 %         this value, with a tolerance
    <= 24 GiB              a manual ceiling; >= is a floor

A *finding* is a limit that is not simply met. Bytes and volumes repeat exactly, so they need no tolerance; times do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas as pd

from ..config.cell import CellConfig
from ..records import BETWEEN_STEPS, CATEGORIES, COLLECTIVES, PHASE_PEAKS, STATES
from ..sizes import parse_bytes, show_bytes
from .lines import SHARE, CodeLine, Lines, categories_behind, largest_lines, lines_behind

MAXIMA = tuple(f"max_{category}_bytes" for category in CATEGORIES)
PARTS = tuple(f"volume_{collective}_psi" for collective in COLLECTIVES)
ELSEWHERE = ("host_peak_bytes", "nvme_bytes", "down_bytes", "up_bytes")
FILES = ("read_bytes", "write_bytes")
BETWEEN = ("within_nodes_bytes", "between_nodes_bytes")
SHARES = ("quantized_gather_share", "quantized_reduction_share")
RECORDED = (
    "peak_bytes", "growth_bytes", "allocator_peak_bytes", "outside_ledger_bytes", "states_bytes", *MAXIMA,
    *BETWEEN_STEPS, *PHASE_PEAKS, *ELSEWHERE, *FILES,
    "volume_psi", *PARTS, "wire_bytes", *BETWEEN, "control_bytes", *SHARES,
)  # fmt: skip
"""Metrics that repeat exactly; the default of `record`."""


SAYS_NOTHING_WITHOUT: dict[str, Callable[[CellConfig], bool]] = {
    **dict.fromkeys(FILES, lambda config: bool(config.offload.label)),
    **dict.fromkeys(BETWEEN, lambda config: config.node_size is not None),
    **dict.fromkeys(SHARES, lambda config: bool(config.zeropp.label)),
}
"""Metric -> a condition on a cell's resolved config: if false, the metric is 0 or equal to another one."""

BY_HAND = (
    "step_s", "tokens_per_s", "resident_bytes", "allocated_bytes", "reserved_bytes", "pinned_bytes",
    "payload_bytes", "timed_allocator_peak_bytes", "loopback_bytes",
)  # fmt: skip
METRICS = (*RECORDED, *BY_HAND)
MORE_IS_BETTER = ("tokens_per_s", *SHARES)
DEFAULT_TOLERANCE = {
    "allocator_peak_bytes": 0.005,
    "timed_allocator_peak_bytes": 0.01,
    "loopback_bytes": 0.03,
    "step_s": 0.25,
    "tokens_per_s": 0.25,
    "resident_bytes": 0.1,
    "reserved_bytes": 0.02,
}

WHERE_READABLE = ("loopback_bytes",)
"""Metrics that some systems do not report; a missing value is then not a failure."""

SLACK = {"allocator_peak_bytes": 64 * 1024, "outside_ledger_bytes": 64 * 1024}
"""Absolute slack in bytes: threads of libraries allocate at varying times."""

DIFFERENCES = ("growth_bytes", "outside_ledger_bytes")
"""Metrics that may be negative, the latter only by a few bytes."""

IMPOSSIBLE = {"outside_ledger_bytes": "the ledger counts memory that the allocator does not hold"}
"""Metric -> the meaning of a value far below 0, which is not an improvement."""

PEAKS = ("peak_bytes", "allocator_peak_bytes", "timed_allocator_peak_bytes")
"""Metrics that are at least states_bytes."""

METER = "the meter: "
"""Beginning of a message in `unexplained` on the meter of traffic itself."""

NOT_TENSORS = {
    "outside_ledger_bytes": "memory of torch's allocator that no tensor has: scratch of kernels",
}
"""Metric -> its meaning, where no line of code and no category can explain a difference."""

OF_KERNELS = ("allocator_peak_bytes", "timed_allocator_peak_bytes", "outside_ledger_bytes")
"""Metrics that include the scratch memory of kernels, which depends on the processor: oneDNN's kernels for bf16 need
150 KiB more on processors with AMX tiles.
"""

ROUNDING = 1e-9
"""Relative slack of quotients, whose last digit may differ between versions of Python."""

LEAST_SHARE, MOST_SHARE = 0.0001, 10.0
"""Range of deviations that are also shown in percent: a limit of a few bytes can be exceeded by millions of percent."""

_LIMIT = re.compile(r"(<=|>=)?\s*([^±]+?)\s*(?:±\s*([0-9.]+)\s*%)?")


@dataclass(frozen=True)
class Limit:
    """One limit. `bound`: "" for an exact value, "<=" or ">="; `tolerance`: a fraction of the value."""

    value: float
    bound: str = ""
    tolerance: float = 0.0

    def judge(self, metric: str, value: float) -> str:
        """Returns ok, regression or improvement."""
        relative = self.tolerance if metric.endswith("_bytes") else max(self.tolerance, ROUNDING)
        slack = max(relative * abs(self.value), SLACK.get(metric, 0))
        if metric in IMPOSSIBLE and value < min(self.value, 0) - slack:
            return "regression"
        if self.bound:
            crossed = value > self.value + slack if self.bound == "<=" else value < self.value - slack
            return "regression" if crossed else "ok"
        if abs(value - self.value) <= slack:
            return "ok"
        better = value > self.value if metric in MORE_IS_BETTER else value < self.value
        return "improvement" if better else "regression"


OK = "ok"
"""Kind of the finding of a limit that holds."""


@dataclass(frozen=True)
class Finding:
    """The verdict on a limit, or on a whole cell that could not be judged, whose `metric` is empty."""

    kind: str
    """ok, regression, improvement, missing or unjudged."""
    cell: str
    metric: str
    sentence: str
    """The complete message."""
    code_lines: tuple[CodeLine, ...] = ()
    """The lines of code that changed the metric, the largest first."""
    limit: Limit | None = None
    value: float | None = None
    limits: int = 1
    """The number of limits that the verdict is about."""


def recorded(config: CellConfig) -> list[str]:
    """Returns the metrics that `record` writes by default for a cell with this resolved config."""
    return [metric for metric in RECORDED if metric not in SAYS_NOTHING_WITHOUT or SAYS_NOTHING_WITHOUT[metric](config)]


def parse_limit(metric: str, text: Any) -> Limit:
    """Parses a limit of a budget file. Raises ValueError that names valid forms."""
    match = _LIMIT.fullmatch(str(text).strip())
    problem = f"{metric}: {text!r} is no limit; write a value, a value ± 2 %, or <= with a ceiling, as in <= 24 GiB"
    if match is None or isinstance(text, bool):
        raise ValueError(problem)
    try:
        is_below_zero = metric in DIFFERENCES and match[2].startswith("-")
        size = match[2].removeprefix("-") if is_below_zero else match[2]
        value = float(parse_bytes(size) if metric.endswith("_bytes") else size) * (-1 if is_below_zero else 1)
        tolerance = float(match[3] or 0) / 100
    except ValueError as error:
        raise ValueError(problem) from error
    if not math.isfinite(value):
        raise ValueError(problem)
    return Limit(value, match[1] or "", tolerance)


def show_limit(metric: str, limit: Limit) -> Any:
    """Formats a limit as `record` writes it: a bare number if it is exact."""
    number: Any = int(limit.value) if metric.endswith("_bytes") else limit.value
    if not limit.bound and not limit.tolerance:
        return number
    return f"{limit.bound} {number}".strip() + show_tolerance(limit)


def show_tolerance(limit: Limit) -> str:
    """Formats a limit's tolerance as a budget file has it: " ± 0.5 %"; empty if it has none."""
    return f" ± {limit.tolerance * 100:g} %" if limit.tolerance else ""


def show_value(metric: str, value: float) -> str:
    """Formats a value with its unit."""
    if metric.endswith("_bytes"):
        return f"{value:,.0f} B ({show_bytes(value)})" if abs(value) >= 1024 else f"{value:.0f} B"
    if metric.endswith("_psi"):
        return f"{value:.6g} ψ"
    return f"{value * 1000:.4g} ms" if metric == "step_s" else f"{value:.6g}"


def show_difference(metric: str, by: float) -> str:
    """Formats a difference, which is not 0, with its sign and unit."""
    return f"{'+' if by > 0 else '−'}{show_value(metric, abs(by))}"


def judge_cell(
    cell: str, limits: dict[str, Limit], row: dict[str, Any] | None, lines: Lines | None = None
) -> list[Finding]:
    """Returns the findings of one cell whose limits do not hold: see `judge_limits`."""
    return [finding for finding in judge_limits(cell, limits, row, lines) if finding.kind != OK]


def judge_limits(
    cell: str, limits: dict[str, Limit], row: dict[str, Any] | None, lines: Lines | None = None
) -> list[Finding]:
    """Returns a finding per limit, or one for a cell that was not measured. `row`: its summarized row, with its `lines`
    if known; None if there is none; `lines`: recorded with the limits.
    """
    if row is None:
        return [
            Finding("missing", cell, "", f"{cell}: it is in the budget, but not among the runs", limits=len(limits))
        ]
    if row["status"] != "ok":
        message = f"{cell}: it could not be measured ({row['status']}: {row['reason']})"
        return [Finding("unjudged", cell, "", message, limits=len(limits))]
    return [_judge_limit(cell, metric, limits, row, lines or {}) for metric in limits]


def _judge_limit(cell: str, metric: str, limits: dict[str, Limit], row: dict[str, Any], lines: Lines) -> Finding:
    limit, measured = limits[metric], row.get(metric)
    if measured is None or pd.isna(measured):
        if metric in WHERE_READABLE:
            return Finding(OK, cell, metric, "")
        return Finding("missing", cell, metric, f"{cell}: {metric} is in the budget and was not measured")
    value = float(measured)
    verdict, reason = limit.judge(metric, value), contradiction(metric, row)
    if reason and metric in PEAKS and (limit.bound or verdict == "improvement"):
        verdict = "regression"
    if verdict == OK:
        return Finding(OK, cell, metric, "", (), limit, value)
    by_line, code_lines = _by_line(metric, limit, row, lines)
    cause = f"; {reason}" if reason else what_moved(metric, limits, row) + by_line
    if not cause and metric in NOT_TENSORS:
        cause = f"; {NOT_TENSORS[metric]}"
    off = abs(value / limit.value - 1) if limit.value else 0.0
    by = show_value(metric, abs(value - limit.value))
    by += f", {off:.2%}" if LEAST_SHARE <= off < MOST_SHARE else ""
    side = "above" if value > limit.value else "below"
    kind = {"<=": "its ceiling", ">=": "its floor"}.get(limit.bound, "its budget")
    budget = f"{kind} of {show_value(metric, limit.value)}{show_tolerance(limit)}"
    message = f"{cell}: {metric} is {show_value(metric, value)}: {by} {side} {budget}{cause}"
    return Finding(verdict, cell, metric, message, code_lines, limit, value)


def contradiction(metric: str, row: dict[str, Any]) -> str:
    """Returns why a measured value cannot be right, whatever its limit; empty if nothing contradicts it."""
    value, states = float(row[metric]), row.get("states_bytes")
    if metric in PEAKS and pd.notna(states) and value < states - SLACK.get(metric, 0):
        return f"less than the {states:,.0f} B of states, which cannot be: it was reset, or not read on every rank"
    if metric in IMPOSSIBLE and value < 0:
        return IMPOSSIBLE[metric]
    if not metric.startswith(("volume", "wire", "payload", "control")):
        return ""
    messages = str(row.get("unexplained") or "").split("; ")
    return "; ".join(message for message in messages if message.startswith(METER))


def _by_line(metric: str, limit: Limit, row: dict[str, Any], before: Lines) -> tuple[str, tuple[CodeLine, ...]]:
    """Returns the end of a message on the lines that changed a metric, and these lines; for a manual limit that they do
    not explain, the lines with the most bytes of the categories that exceed it.
    """
    value, now = float(row[metric]), row.get("lines") or {}
    above, table = value - limit.value, categories_behind(metric)
    by = above
    if limit.bound and table and table[0] in before and table[0] in now:
        by = max(now[table[0]].bytes - before[table[0]].bytes, 0) if above > 0 else 0
    moved = lines_behind(metric, by, before, now)
    code_lines, category = [line.code_line for line in moved], ""
    if moved and metric == "growth_bytes":
        category = f"; {moved[0].category} moved most"
    if not moved and limit.bound:
        code_lines = largest_lines(metric, now, beyond_psi(metric, above, row))
        at_peak = row.get(metric.replace("max_", "peak_"))
        differs = metric in MAXIMA and pd.notna(at_peak) and show_bytes(at_peak) != show_bytes(value)
        if code_lines and differs:
            category = f"; {show_bytes(at_peak)} at the overall peak, where lines are recorded"
    return category + "".join(f"; {line.sentence}" for line in code_lines), tuple(code_lines)


def what_moved(metric: str, limits: dict[str, Limit], row: dict[str, Any]) -> str:
    """Names the category, or the collective, that deviates most from the budget, as the end of a message; of a limit
    without parts, the categories that exceed it.
    """
    part = most_moved(metric, limits, row)
    if part is None:
        if not limits[metric].bound and len(limits) > 1:
            return ""
        beyond = beyond_psi(metric, float(row[metric]) - limits[metric].value, row)
        return f"; {', '.join(beyond.values())}" if beyond else ""
    was, now = show_value(part, limits[part].value), show_value(part, row[part])
    return f"; {part_name(part)} moved most: {was} before, {now} now"


def most_moved(metric: str, limits: dict[str, Limit], row: dict[str, Any]) -> str | None:
    """Returns the part of a metric (itself a metric) that deviates most from the budget in the metric's direction."""
    parts = PARTS if metric in ("volume_psi", "wire_bytes", "payload_bytes") else ()
    if metric in ("peak_bytes", "states_bytes"):
        parts = MAXIMA if metric == "peak_bytes" else tuple(f"max_{category}_bytes" for category in STATES)
    exact = {p: row[p] - limits[p].value for p in parts if p in limits and not limits[p].bound and pd.notna(row[p])}
    grown = float(row[metric]) > limits[metric].value
    # A deviation in the other direction explains nothing.
    same_way = {p: by for p, by in exact.items() if by and (by > 0) == grown}
    return max(same_way, key=lambda p: abs(same_way[p]), default=None)


ONCE = ("parameters", "gradients")
"""Categories that a rank needs once: whole, or its share. Optimizers and masters may have several tensors of ψ."""


def beyond_psi(metric: str, by: float, row: dict[str, Any]) -> dict[str, str]:
    """Returns category -> "gradients 1000.0 KiB above 4ψ", for the categories that may explain that a metric is `by`
    bytes above its limit, the largest first. If no category is considerably above a multiple of ψ, or of a rank's
    share of it, in elements of the model's dtype, all categories of states have their multiples: "gradients 8ψ".
    """
    table = categories_behind(metric)
    if not by > 0 or metric == "growth_bytes" or table is None or pd.isna(row.get("psi")) or not row["psi"]:
        return {}
    element, at = 4 if str(row.get("precision")).startswith("fp32") else 2, "peak" if "peak" in metric else "max"
    ranks = row.get("world_size") or 1
    excess: dict[str, float] = {}  # category -> bytes above its multiple of ψ
    multiples: dict[str, float] = {}
    for name in table[1]:
        measured = row.get(f"{at}_{name}_bytes")
        size = 0 if pd.isna(measured) else float(measured)
        shares = size * ranks // (element * row["psi"]) if name in STATES and name != "communication" else 0
        if name in ONCE:
            shares = ranks if shares >= ranks else min(shares, 1)
        excess[name], multiples[name] = size - shares * element * row["psi"] / ranks, shares * element / ranks
    if len(excess) == 1 and not any(multiples.values()):
        return {}
    largest = sorted((name for name in excess if excess[name] >= SHARE * by), key=lambda name: -excess[name])
    if not largest:
        return {name: f"{name} {multiple:g}ψ" for name, multiple in multiples.items() if multiple}
    above = {name: f" above {multiples[name]:g}ψ" if multiples[name] else "" for name in largest}
    return {name: f"{name} {show_bytes(excess[name])}{above[name]}" for name in largest}


def part_name(part: str) -> str:
    """Returns the category, or the collective, of a metric in `MAXIMA` or `PARTS`; empty for other metrics."""
    if part not in (*MAXIMA, *PARTS):
        return ""
    return part.removeprefix("max_").removeprefix("volume_").removesuffix("_bytes").removesuffix("_psi")


def shares_cause(finding: Finding, first: Finding) -> bool:
    """Returns True if a broken limit of a cell has the same cause as the cell's `first` one: both deviate in the same
    direction, and both are limits on traffic, share a line of code, or `finding` is a peak that no line explains.
    """
    if finding.kind != first.kind:
        return False
    if first.metric == "volume_psi":
        return finding.metric in (*PARTS, "wire_bytes", "payload_bytes", *BETWEEN)
    if finding.code_lines:
        own, others = ({(line.file, line.line) for line in side.code_lines} for side in (finding, first))
        return bool(own & others)
    return bool(first.code_lines) and finding.metric in (*BETWEEN_STEPS, *PHASE_PEAKS, *PEAKS)


class UnjudgedError(ValueError):
    """Raised if nothing can be judged, with the message for the user."""
