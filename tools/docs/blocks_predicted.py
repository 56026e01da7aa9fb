"""Blocks of the page on predicted time: others' runs, and this machine's, beside what was predicted of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median

from tools.docs.blocks_systems import pipes
from validation import predicted_here, predicted_runs
from validation.store import read
from zerobench.timing.costs import held_out_error, matmul_rows
from zerobench.timing.hardware import validated

MISSES = 15
"""Runs that are listed one by one, the largest errors first."""

TABLES = ("gemm_bf16_a100.parquet", "gemm_bf16_h100.parquet")


def runs(root: Path) -> list[predicted_runs.ErrorRow]:
    """Returns the committed rows of others' runs."""
    path = root.parent.parent / "predicted_runs" / "errors.csv"
    return read(path, predicted_runs.ErrorRow)


def by_source(root: Path) -> str:
    """|error| of predicted throughput by source, fitted to all, left out, and naive (`make predicted-runs`)."""
    lines = [pipes(predicted_runs.HEADER), "| --- |" + " --: |" * (len(predicted_runs.HEADER) - 1)]
    lines += [pipes(line) for line in predicted_runs.table(runs(root))]
    found = validated()
    scales = ", ".join(f"{name} {value:g}" for name, value in found["compute"].items())
    lines += ["", f"Fitted: time of all kernels, {scales}; of attention besides, {found['attention']:g}."]
    return "\n".join(lines)


def intervals(_: Path) -> str:
    """The intervals of predictions, and how many rows they cover that did not make them."""
    lines = [pipes(["kind of run", "runs", "step, lowest", "highest", "covered"]), "| --- | --: | --: | --: | --: |"]
    for kind, row in validated()["intervals"].items():
        lines.append(
            pipes([kind, str(row["runs"]), f"{row['low']:.2f}", f"{row['high']:.2f}", f"{row['covered']:.0%}"])
        )
    return "\n".join(lines)


def misses(root: Path) -> str:
    """The largest errors, then every other run in short, and the runs without a prediction by reason."""
    rows = runs(root)
    there = sorted((row for row in rows if row.error is not None), key=lambda row: -abs(row.left_out_error or 0.0))
    header = ["run", "published", "predicted, left out", "error", "naive", "waits for collectives"]
    lines = [pipes(header), "| --- | --: | --: | --: | --: | --: |"]
    for row in there[:MISSES]:
        naive = "–" if row.naive_error is None else f"{row.naive_error:+.0%}"
        lines.append(
            pipes([f"`{row.id}`", f"{row.published:,.0f}", f"{row.left_out:,.0f}", f"{row.left_out_error:+.0%}", naive,
                   f"{row.exposed:.0%}"])
        )  # fmt: skip
    reasons: dict[str, int] = {}
    for row in rows:
        if row.error is None:
            reasons[row.reason] = reasons.get(row.reason, 0) + 1
    lines += ["", "Without a prediction:", ""]
    return "\n".join(
        [*lines, *(f"- {number} × {reason}" for reason, number in sorted(reasons.items(), key=lambda t: -t[1]))]
    )


def here(root: Path) -> str:
    """Steps of a calibrated machine beside predictions that were written before (`make predicted-here`)."""
    rows = predicted_here.predicted(root.parent.parent / "predicted_here" / f"{root.name}.csv")
    header = ["model", "N", "link", "strategy", "predicted", "measured", "error"]
    lines = [pipes(header), "| --- | --: | --- | --- | --: | --: | --: |"]
    for row in rows:
        link = f"{row.link_gbit_s:g} Gbit/s" if row.link_gbit_s else "loopback"
        seen = ["–", "–"] if row.measured_s is None else [f"{row.measured_s:.3f} s", f"{row.error:+.0%}"]
        lines.append(pipes([row.model, str(row.ranks), link, f"`{row.strategy}`", f"{row.predicted_s:.3f} s", *seen]))
    errors = [abs(row.error) for row in rows if row.error is not None]
    if errors:
        right, apart = predicted_here.order_of(rows)
        words = f"Mean |error| {sum(errors) / len(errors):.1%}, median {median(errors):.1%}, largest {max(errors):.1%};"
        lines += [
            "",
            f"{words} {right} of {apart} pairs of strategies that all launches separate are in the right order.",
        ]
    return "\n".join(lines)


def interpolation(_: Path) -> str:
    """The error of interpolation in the tables of matrix products, a tenth held out."""
    lines = [pipes(["table", "shapes held out", "median", "90th percentile"]), "| --- | --: | --: | --: |"]
    for name in TABLES:
        errors = sorted(abs(held_out_error(matmul_rows(name))))
        lines.append(pipes([name, str(len(errors)), f"{median(errors):.1%}", f"{errors[int(0.9 * len(errors))]:.1%}"]))
    return "\n".join(lines)


BLOCKS: dict[str, Callable[[Path], str]] = {
    "predicted_by_source": by_source, "predicted_intervals": intervals, "predicted_misses": misses,
    "predicted_here": here, "interpolation": interpolation,
}  # fmt: skip
