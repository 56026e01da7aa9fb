"""Blocks of the page on predicted time: others' runs, and this machine's, beside what was predicted of them; maps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median

from tools.docs.blocks_systems import pipes
from validation import link_rates, predicted_here, predicted_maps, predicted_runs
from validation.store import Row, read
from zerobench.timing.costs import held_out_error, matmul_rows
from zerobench.timing.hardware import validated

MISSES = 15
"""Runs that are listed on top, the largest errors first."""

TABLES = ("gemm_bf16_a100.parquet", "gemm_bf16_h100.parquet")


def runs(root: Path) -> list[predicted_runs.ErrorRow]:
    """Returns the committed rows of others' runs."""
    return read(_results(root) / "predicted_runs" / "errors.csv", predicted_runs.ErrorRow)


def _results(root: Path) -> Path:
    return root.parent.parent


def table(header: Sequence[str], words: int, lines: Sequence[Sequence[str]]) -> str:
    """Returns a table in Markdown, of which the first `words` columns are words."""
    rules = "| " + " | ".join(["---"] * words + ["--:"] * (len(header) - words)) + " |"
    return "\n".join([pipes(header), rules, *map(pipes, lines)])


# -- others' runs ----------------------------------------------------------------------------------


def by_source(root: Path) -> str:
    """|error| of predicted throughput by source, fitted to all, left out, and naive (`make predicted-runs`)."""
    found = validated()
    scales = ", ".join(f"{name} {value:g}" for name, value in found["compute"].items())
    fitted = f"Fitted: time of all kernels, {scales}; of attention besides, {found['attention']:g}."
    return f"{table(predicted_runs.HEADER, 1, predicted_runs.table(runs(root)))}\n\n{fitted}"


def intervals(_: Path) -> str:
    """The intervals of predictions, and how many rows they cover that did not make them."""
    lines = [
        [kind, str(row["runs"]), f"{row['low']:.2f}", f"{row['high']:.2f}", f"{row['covered']:.0%}"]
        for kind, row in validated()["intervals"].items()
    ]
    return table(["kind of run", "runs", "step, lowest", "highest", "covered"], 1, lines)


def compared(root: Path) -> list[predicted_runs.ErrorRow]:
    """Returns the runs that have a prediction, the largest errors first."""
    there = [row for row in runs(root) if row.error is not None]
    return sorted(there, key=lambda row: -abs(row.left_out_error or 0.0))


def run_lines(rows: Sequence[predicted_runs.ErrorRow]) -> str:
    """A line for each run, with its error if its publisher is left out."""
    header = ["run", "publisher", "published", "predicted, left out", "error", "naive", "waits for collectives"]
    return table(header, 2, [
        [f"`{row.id}`", row.source, f"{row.published:,.0f}", f"{row.left_out:,.0f}", f"{row.left_out_error:+.0%}",
         "–" if row.naive_error is None else f"{row.naive_error:+.0%}", f"{row.exposed:.0%}"]
        for row in rows
    ])  # fmt: skip


def misses(root: Path) -> str:
    """The largest errors, and the runs without a prediction by reason."""
    reasons: dict[str, int] = {}
    for row in runs(root):
        if row.error is None:
            reasons[row.reason] = reasons.get(row.reason, 0) + 1
    lines = [f"- {number} × {reason}" for reason, number in sorted(reasons.items(), key=lambda t: -t[1])]
    return "\n".join([run_lines(compared(root)[:MISSES]), "", "Without a prediction:", "", *lines])


def every_run(root: Path) -> str:
    """Every run that has a prediction."""
    return run_lines(compared(root))


# -- this machine ----------------------------------------------------------------------------------


def here_rows(root: Path) -> list[predicted_here.HereRow]:
    """Returns the committed rows of this machine."""
    return predicted_here.predicted(_results(root) / "predicted_here" / f"{root.name}.csv")


def here(root: Path) -> str:
    """Steps of a calibrated machine beside predictions that were written before (`make predicted-here`)."""
    every = here_rows(root)
    rows = sorted(every, key=lambda row: -abs(row.error or 0.0))
    lines = []
    for row in rows:
        if row.strategy == predicted_here.REFERENCE:
            continue
        seen = ["–", "–"] if row.measured_s is None else [f"{row.measured_s:.3f} s", f"{row.error:+.1%}"]
        lines.append([row.model, str(row.ranks), _link(row), f"`{row.cell}`", f"{row.predicted_s:.3f} s", *seen])
    said = table(["model", "N", "link", "strategy", "predicted", "measured", "error"], 4, lines)
    errors = [abs(error) for error in predicted_here.measured_errors(rows)]
    if not errors:
        return said
    right, apart = predicted_here.order_of(rows)
    words = f"Mean |error| {sum(errors) / len(errors):.1%}, median {median(errors):.1%}, largest {max(errors):.1%};"
    words = f"{words} {right} of {apart} pairs of strategies that all launches separate are in the right order."
    again = [row for row in every if row.strategy == predicted_here.REFERENCE and row.error is not None]
    if again:
        drift = " and ".join(f"{1 / (1 + (row.error or 0.0)) - 1:+.1%} with {row.ranks} ranks" for row in again)
        left = [abs(error) for error in predicted_here.without_drift(every)]
        words += f"\n\nThe calibration's own reference step, measured again in the same rounds, had changed by {drift}."
        words += f" Relative to it the mean |error| is {mean(left):.1%}, the largest {max(left):.1%}."
    return f"{said}\n\n{words}"


def _link(row: predicted_here.HereRow) -> str:
    return f"{row.link_gbit_s:g} Gbit/s" if row.link_gbit_s else "loopback"


def here_options(root: Path) -> str:
    """What options add to a step of this machine, predicted and measured (`make predicted-here`)."""
    rows = predicted_here.predicted(_results(root) / "predicted_here" / "options" / f"{root.name}.csv")
    return table(["option", "link", "predicted", "measured"], 2, [
        [f"`{row.cell}`", _link(row), f"{predicted:+.1%}", "–" if measured is None else f"{measured:+.1%}"]
        for row, predicted, measured in predicted_here.effects(rows)
    ])  # fmt: skip


def rates_of_links(root: Path) -> str:
    """Collectives of a series over a link, over the seconds of their bytes at its rate (`make link-rates`)."""
    rows = read(_results(root) / "predicted_here" / "link_rates.csv", link_rates.LinkRow)
    sizes = sorted({row.bytes for row in rows})
    found = {(row.via, row.collective, row.ranks, row.link_gbit_s, row.bytes): row.over_rate for row in rows}
    lines = [
        [VIA[key[0]], key[1], str(key[2]), f"{key[3]:g}", *(f"{found[*key, size]:.2f}" for size in sizes)]
        for key in sorted({key[:-1] for key in found})
    ]
    return table(["", "collective", "N", "Gbit/s", *(f"{size / 2**20:g} MiB" for size in sizes)], 4, lines)


VIA = {"seam": "ours", "torch": "torch's"}


# -- maps ------------------------------------------------------------------------------------------


def _maps(root: Path, name: str, kind: type[Row]) -> list[Row]:
    return read(_results(root) / "predicted_maps" / f"{name}.csv", kind)


def map_fastest(root: Path) -> str:
    """The fastest strategy of what fits, over parameters and ranks."""
    steps = _maps(root, "steps", predicted_maps.StepRow)
    found = {(row.psi, row.ranks): row for row in predicted_maps.fastest(steps)}
    ranks = sorted({row.ranks for row in steps})

    def cell(psi: int, number: int) -> str:
        row = found.get((psi, number))
        return "–" if row is None else f"{row.strategy}, {row.tokens_s_gpu:,.0f}"

    sizes = sorted({row.psi for row in steps})
    lines = [[f"{psi / 1e9:.1f}B", *(cell(psi, number) for number in ranks)] for psi in sizes]
    return table(["parameters", *(f"{number:,} ranks" for number in ranks)], 1, lines)


def map_scaling(root: Path) -> str:
    """Tokens per second and GPU of one model over the ranks."""
    steps = [row for row in _maps(root, "steps", predicted_maps.StepRow) if row.model == predicted_maps.SCALED]
    ranks = sorted({row.ranks for row in steps})
    rate = {(row.strategy, row.ranks): f"{row.tokens_s_gpu:,.0f}" for row in steps}
    strategies = dict.fromkeys(row.strategy for row in steps)
    lines = [[f"`{name}`", *(rate.get((name, number), "does not fit") for number in ranks)] for name in strategies]
    return table(["strategy", *(f"{number:,} ranks" for number in ranks)], 1, lines)


def map_break_even(root: Path) -> str:
    """The network between nodes below which one is ahead of another."""
    lines = []
    for row in _maps(root, "break_even", predicted_maps.BreakEvenRow):
        edge = "always" if row.always else "never" if row.node_gbit_s is None else f"{row.node_gbit_s:,.0f}"
        lines.append([row.model, f"{row.ranks:,}", f"`{row.fast}`", f"`{row.slow}`", edge])
    return table(["model", "ranks", "ahead", "of", "below Gbit/s per node"], 4, lines)


def map_options(root: Path) -> str:
    """What options add to a predicted step, and whether that is beyond the interval."""
    return table(["option", "Gbit/s per node", "step", "interval", "live"], 2, [
        [f"`{row.strategy} {row.option}`", f"{row.node_gbit_s:,.0f}", f"{row.effect:+.1%}", f"± {row.interval:.0%}",
         "yes" if row.live else "no"]
        for row in _maps(root, "options", predicted_maps.OptionRow)
    ])  # fmt: skip


def interpolation(_: Path) -> str:
    """The error of interpolation in the tables of matrix products, a tenth held out."""
    lines = []
    for name in TABLES:
        errors = sorted(abs(held_out_error(matmul_rows(name))))
        lines.append([name, str(len(errors)), f"{median(errors):.1%}", f"{errors[int(0.9 * len(errors))]:.1%}"])
    return table(["table", "shapes held out", "median", "90th percentile"], 1, lines)


BLOCKS: dict[str, Callable[[Path], str]] = {
    "predicted_by_source": by_source, "predicted_intervals": intervals, "predicted_misses": misses,
    "predicted_runs": every_run, "predicted_here": here, "predicted_options": here_options,
    "link_rates": rates_of_links, "map_fastest": map_fastest, "map_scaling": map_scaling,
    "map_break_even": map_break_even, "map_options": map_options, "interpolation": interpolation,
}  # fmt: skip
