"""Rows and sentences for the blocks that compare with others: published runs, predicted times, one GPU, the ZeRO paper.

A function is named as its block. It returns rows for the block's template in blocks.md, or the Markdown itself.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd

from tools.docs.measured import volume
from tools.docs.recorded import RESULTS, beside
from tools.docs.render import paragraph, render, table
from validation import predicted_runs as runs
from validation.gpu_runs import GpuRunRow, rows_of, steps
from validation.one_gpu import NEXT, refitted
from validation.published.figure import states_per_parameter
from validation.store import read
from validation.table1 import CELLS, GB, IN_FLIGHT, STAGES
from zerobench.simulation.costs import ShapeTable, matmul_rows
from zerobench.simulation.hardware import validated as fitted
from zerobench.sizes import show_bytes
from zerobench.strategies import spec_of

# -- the ZeRO paper --------------------------------------------------------------------------------

SIZE, RANKS = "7.5B", 64
GPUS, DEVICE_GIB = 8, 80
"""Figure 1 of the paper, and the devices of the plans: the header of the template names both."""


def strategies() -> Iterator[Any]:
    """States per rank by the paper and as simulated, traffic of a step, the largest model that fits."""
    cells = {row.strategy: row for row in _table1() if (row.size, row.ranks) == (SIZE, RANKS)}
    for plan in _largest():
        device = (plan.gpus, plan.device_bytes, plan.offload)
        if plan.strategy in ("ddp", "zero1", "zero2", "zero3") and device == (GPUS, DEVICE_GIB * 2**30, "none"):
            cell = cells[plan.strategy]
            simulated = cell.executed_bytes / GB
            digits = 0 if simulated >= 100 else 1 if simulated >= 10 else 2
            policy = str(spec_of(plan.strategy).options().accumulate)
            first, second = (volume(plan.strategy, policy, micro_batches) for micro_batches in (1, 2))
            slope, rest = second - first, 2 * first - second  # with m micro-batches it is slope · m + rest
            factor = "m" if slope == 1 else f"{slope}m"
            by_m = f"{first}ψ" if not slope else f"({factor} + {rest})ψ" if rest else f"{factor}ψ"
            yield SimpleNamespace(
                strategy=plan.strategy, printed_gb=cell.printed_gb, simulated=f"{simulated:.{digits}f}",
                volume=f"{first}ψ", volume_m=by_m, billions=plan.billions,
            )  # fmt: skip


def _table1(name: str = CELLS, **columns: Any) -> list[Any]:
    """Returns the committed rows of table 1, by default of each cell's usual options."""
    rows = pd.read_csv(RESULTS / "table1" / name, keep_default_na=False, dtype={"printed_gb": str})
    for column, value in (columns or {"variant": ""}).items():
        rows = rows[rows[column] == value]
    return list(rows.itertuples())


def table1() -> str:
    """Printed and simulated gigabytes of all 54 cells, a row for each size and number of ranks."""
    rows = [SimpleNamespace(**row._asdict()) for row in _table1() if row.strategy in STAGES]
    for row in rows:
        row.printed = row.printed_gb + "*" * (row.how_printed == "cut off")
    order = sorted(rows, key=lambda row: (row.psi, row.ranks))
    text = render("table1", beside(order, lambda row: (row.size, row.ranks), lambda row: row.strategy))
    psi = dict.fromkeys(f"{row.size}: ψ = {row.psi:,}" for row in order)
    return f"{text}\n\n{len(rows)} cells, GB. {'; '.join(psi)}."


LINES = 8
"""Lines of code that the block on bytes in flight lists."""


def table1_in_flight() -> str:
    """The cell with most bytes in flight: by variant, and by line of code."""
    rows = [row for row in _table1(size=SIZE, ranks=1024) if row.strategy in ("zero2", "zero3")]
    lines = _table1(IN_FLIGHT, size=SIZE, ranks=1024, strategy="zero3", variant="")
    lines = sorted(lines, key=lambda line: -line.bytes)[:LINES]
    return "\n\n".join([render("table1_in_flight", rows), render("table1_lines", lines)])


TABLE_2 = {"ddp": (2.0, 1.3), "zero1": (7.6, 6.2), "zero2": (14.4, None), "zero3": (128.0, None)}
"""Strategy -> the largest model in billions by the paper's analysis, and as it measured (ZeRO, arXiv 1910.02054v3,
Table 2, row of 64 GPUs of 32 GB without model parallelism).
"""

LARGEST = ("ddp", "zero1", "zero2", "zero3", "megatron", "fsdp2_no_reshard", "fsdp2")
"""Strategies in the order of rows: ours, without offload and with it, then the peers from Megatron's on."""


def _largest() -> list[Any]:
    """Returns the largest model of each plan of `make largest-model`, by device and strategy: `best`, executed, is the
    last shape that fits, `beyond` the next.
    """
    plans = [json.loads(path.read_text()) for path in sorted((RESULTS / "largest_model").glob("*.json"))]
    rows = [
        SimpleNamespace(
            **{name: row.get(name) for name in ("strategy", "offload", "best", "beyond", "at_end")},
            gpus=row["best"]["gpus"], device_bytes=plan["device_bytes"], billions=row["best"]["psi"] / 1e9,
        )
        for plan in plans for row in plan["rows"] if row["best"] is not None
    ]  # fmt: skip

    def order(row: Any) -> tuple[Any, ...]:
        number = LARGEST.index(row.strategy)
        is_peer = number >= LARGEST.index("megatron")
        return row.gpus, row.device_bytes, is_peer, row.offload != "none", number

    return sorted(rows, key=order)


def largest_model() -> str:
    """The largest model for each strategy and device, and ZeRO's Table 2 beside what was executed."""
    shape = lambda probe: str(probe["shape"]).replace(" x ", " × ")  # noqa: E731
    rows = _largest()
    for row in rows:
        is_binary = row.device_bytes % 2**30 == 0
        size = f"{row.device_bytes // 2**30} GiB" if is_binary else f"{row.device_bytes / 1e9:g} GB"
        row.device, row.label = f"{row.gpus} × {size}", spec_of(row.strategy).label
        row.label += f" + {row.offload}" if row.offload != "none" else ""
        row.shape, row.following = shape(row.best), "– (the family's largest)" if row.at_end else "– (the states alone)"
        if row.beyond:
            row.following = f"{shape(row.beyond)}: {show_bytes(row.beyond['reserved_bytes'])} reserved"
    same = {row.strategy: row for row in rows if row.gpus == RANKS and row.offload == "none"}
    table_2 = [
        SimpleNamespace(strategy=name, theory=theory, measured=measured and f"{measured}B", row=same[name],
                        formula=32 / states_per_parameter(name, RANKS))
        for name, (theory, measured) in TABLE_2.items()
    ]  # fmt: skip
    return f"{render('largest_model', rows)}\n\n{render('largest_model_table_2', table_2)}"


# -- memory of published runs ----------------------------------------------------------------------


def _errors() -> pd.DataFrame:
    return pd.read_csv(RESULTS / "published_runs/errors.csv", dtype=str, keep_default_na=False)


def validated() -> str:
    """The runs that were compared, the largest error first, and a sentence for each beyond 5 %."""
    errors = _errors()
    there = errors[errors["status"] == "compared"].copy()
    there["error"] = there["error_percent"].astype(float).abs()
    low, high = there["estimate_low_gib"], there["estimate_high_gib"]
    there["estimate"] = low.where(low == high, low + " to " + high)
    rows = list(there.sort_values("error", ascending=False, kind="stable").itertuples())
    words = ", ".join(f"{count} {status}" for status, count in Counter(errors["status"]).most_common())
    close = f"{len(errors)} rows: {words}. Of those compared {sum(there['error'] <= 5)} of {len(rows)} are within 5 %,"
    explained = "\n".join(f"- `{row.id}`: {row.explanation}" for row in rows if row.explanation)
    assumed = "\n".join(f"- `{row.id}`: {row.assumed}" for row in rows)
    return (
        f"{render('validated', rows)}\n\n{close} median |error| {there['error'].median():.1f} %.\n\n"
        f"Beyond 5 %, simulated again with one change:\n\n{explained}\n\n"
        f"What each row leaves open, and the simulated choice:\n\n{assumed}"
    )


def compiled_runs() -> list[Any]:
    """The runs that their publishers compiled: estimated without a compiler, and with compile=blocks."""
    return [row for row in _errors().itertuples() if row.eager_error_percent]


def not_compared() -> Iterator[Any]:
    """The runs with a peak that have no estimate, by reason."""
    errors = _errors()
    for reason, same in errors[errors["status"].isin(["no estimate", "failed"])].groupby("reason", sort=False):
        yield SimpleNamespace(reason=reason, runs=", ".join(f"`{name}`" for name in same["id"]))


# -- predicted time: published runs ----------------------------------------------------------------

MISSES = 15
"""Runs that are listed on top, the largest errors first."""


_runs = partial(read, RESULTS / "predicted_runs/errors.csv", runs.ErrorRow)


def predicted_by_source() -> str:
    """|error| of predicted throughput by source, fitted to all, left out, and naive (`make predicted-runs`)."""
    compute, attention = (
        ", ".join(f"{name} {value:g}" for name, value in fitted()[scale].items()) for scale in ("compute", "attention")
    )
    words = f"Fitted: time of matrix products and attention, {compute}; of attention besides, {attention}."
    return f"{table(runs.HEADER, runs.table(_runs()))}\n\n{words}"


def predicted_intervals() -> Iterator[Any]:
    """The intervals of predictions, and how many rows they cover that did not make them."""
    for kind, row in fitted()["intervals"].items():
        yield SimpleNamespace(kind=kind, **row)


def predicted_runs() -> list[runs.ErrorRow]:
    """Every run that has a prediction, the largest errors first."""
    there = [row for row in _runs() if row.error is not None]
    return sorted(there, key=lambda row: -abs(row.left_out_error or 0.0))


def predicted_misses() -> str:
    """The largest errors, and the runs without a prediction by reason."""
    reasons = Counter(row.reason for row in _runs() if row.error is None)
    lines = "\n".join(f"- {number} × {reason}" for reason, number in reasons.most_common())
    return f"{render('predicted_runs', predicted_runs()[:MISSES])}\n\nWithout a prediction:\n\n{lines}"


# -- predicted time: maps --------------------------------------------------------------------------


def map_fastest() -> str:
    """The fastest strategy of what fits, over parameters and ranks."""
    steps = pd.read_csv(RESULTS / "predicted_maps/steps.csv")
    best = steps.loc[steps.groupby(["psi", "ranks"])["step_s"].idxmin()]
    shown = best["strategy"] + best["tokens_s_gpu"].map(", {:,.0f}".format)
    return _by_ranks("parameters", "–", best.assign(shown=shown, name=best["psi"]), lambda psi: f"{psi / 1e9:.1f}B")


def map_scaling() -> str:
    """Tokens per second and GPU of one model over the ranks."""
    steps = pd.read_csv(RESULTS / "predicted_maps/steps.csv").query("model == 'gpt2_1_5b'")
    shown = steps["tokens_s_gpu"].map("{:,.0f}".format)
    return _by_ranks("strategy", "does not fit", steps.assign(shown=shown, name=steps["strategy"]), "`{}`".format)


def _by_ranks(heading: str, otherwise: str, cells: pd.DataFrame, show: Callable[[Any], str]) -> str:
    wide = cells.pivot(index="name", columns="ranks", values="shown").fillna(otherwise)
    return table(
        [heading, *(f"{ranks:,} ranks" for ranks in wide)], [[show(name), *row] for name, *row in wide.itertuples()]
    )


def interpolation() -> Iterator[Any]:
    """The error of interpolation in the tables of matrix products, a tenth held out."""
    for name in ("gemm_bf16_a100.parquet", "gemm_bf16_h100.parquet"):
        rows = matmul_rows(name)
        held = np.random.default_rng(0).random(len(rows)) < 0.1
        shapes, sizes = ShapeTable(rows[~held]), rows[["m", "n", "k"]]
        asked = held & (2 * sizes.prod(axis=1) >= 1e9)  # times of smaller products are launch times
        seconds = [shapes.seconds(*map(int, shape)) for shape in sizes[asked].to_numpy(int)]
        yield SimpleNamespace(name=name, errors=sorted(abs(np.array(seconds) / rows["seconds"][asked] - 1)))


# -- one GPU ---------------------------------------------------------------------------------------

GPU = RESULTS / "h100"
"""The committed suite of one GPU."""


def gpu_summary() -> str:
    """What one GPU has confirmed, in a paragraph (`make gpu-runs`)."""
    about, predicted = json.loads((GPU / "suite.json").read_text())["about"], steps(GPU)
    states, _, allocated, reserved = gpu_memory()
    missed = [abs(step.error) for step in predicted if not step.low <= step.measured <= step.high]
    others = f"; the others were {min(missed):.0%} to {max(missed):.0%} off" if missed else ""
    return paragraph("gpu_summary", about=about, states=states, allocated=allocated, reserved=reserved,
                     predicted=predicted, missed=missed, others=others)  # fmt: skip


def gpu_memory() -> list[Any]:
    """|error| of the estimates by quantity (`make gpu-runs`). States are compared in all cells, the rest only where the
    engine has not changed since the run: not ZeRO-2 and ZeRO-3.
    """
    quantities = {
        "states": "states of a rank", "peak": "peak of the ledger", "allocated": "peak of the allocator",
        "reserved": "reserved by the allocator",
    }  # fmt: skip
    found = []
    for key, name in quantities.items():
        rows = rows_of(GPU) if key == "states" else _unchanged()
        pairs = [(getattr(row, key), getattr(row, f"estimated_{key}")) for row in rows if getattr(row, key)]
        errors = sorted(abs(estimate / measured - 1) for measured, estimate in pairs)
        equal = sum(measured == estimate for measured, estimate in pairs)
        found.append(SimpleNamespace(name=name, errors=errors, equal=equal))
    return found


def _unchanged() -> list[GpuRunRow]:
    return [row for row in rows_of(GPU) if row.cell.startswith(("ddp", "zero1", "fsdp2"))]


def gpu_reserved() -> list[GpuRunRow]:
    """The four cells whose reserved bytes are estimated worst."""
    return sorted(_unchanged(), key=lambda row: -abs(row.estimated_reserved / row.reserved - 1))[:4]


def gpu_steps() -> list[Any]:
    """Steps that were predicted and committed before they were measured."""
    return sorted(steps(GPU), key=lambda step: step.measured)


def gpu_rates() -> str:
    """What was fitted to the steps of one GPU, and the errors without a cell, its strategies or its model."""
    rates, same = fitted()["one_gpu"], refitted(GPU)
    ours = refitted(GPU, lambda one, other: (one[:4], other[:4]) == ("zero", "zero") or one == other)
    model = refitted(GPU, lambda one, other: one.split()[1] == other.split()[1])
    inside = sum(same["measured"].between(same["low"], same["high"]))
    errors = [median(abs(found[key] / found["measured"] - 1)) for found, key in
              ((same, "predicted"), (same, "left_out"), (ours, "left_out"), (model, "left_out"))]  # fmt: skip
    off = abs(model["left_out"] / model["measured"] - 1).groupby(model["cell"].str.split().str[1])
    by_model = ", ".join(f"{name} {one.min():.0%} to {one.max():.0%}" for name, one in off)
    return paragraph("gpu_rates", **rates, inside=inside, same=same, errors=errors, by_model=by_model)


def gpu_refitted() -> Iterator[Any]:
    """The same steps by the fitted rates."""
    return refitted(GPU).sort_values("measured").itertuples()


def gpu_next() -> Iterator[Any]:
    """Steps on machines that had not run the code when they were predicted; one row if torch's limits do not matter."""
    rows = pd.read_csv(GPU / NEXT, dtype={"torch": str})
    alike = [name for name in rows.columns if name != "torch"]
    return rows.groupby(alike, sort=False)["torch"].agg(", ".join).reset_index().itertuples()


def gpu_section(name: str, *columns: str) -> str:
    """A section of the suite's summary, reduced to columns."""
    section = json.loads((GPU / "suite.json").read_text())["sections"][name]["table"]
    numbers = [section["header"].index(column) for column in columns]
    return table(columns, [[row[number] for number in numbers] for row in section["rows"]])
