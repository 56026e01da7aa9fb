"""A run as a readable account: what was run, memory, traffic, time, losses; a failed run's reason and logs.

The *fullest rank* is the one whose peak is the run's peak_bytes. A *residual* is what was measured less what was
predicted. Traffic is that of one step on the rank that moves most.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from ...config.cell import CellConfig
from ...host.environment import SIMULATED
from ...probes import snapshot
from ...records import ALLOCATOR, CATEGORIES
from ...results.printed_table import name_of, plain_table, stdout_console
from ...results.tables import Results
from ...sizes import printable, show_bytes, show_count
from ..status_table import code_of
from .formulas import between_nodes_lines, table_of_formulas, volume_lines
from .tiers import tables_of
from .witnesses import gpu_lines, process_lines, unexplained_lines, wire_lines

Row = dict[str, Any]

PHASES = ("init", "data", "forward", "backward", "update", "step")
TENSORS = 10
LOG_LINES = 20
INDENT = " " * 12
NONE = "–"

BESIDE = {
    "allocated": "allocated",
    "reserved": "reserved",
    "outside_ledger": "outside the ledger",
    "fragmentation": "fragmentation",
    "pinned": "pinned",
    "device_used": "device used",
}
"""The allocator's rows of the memory table, as columns beside the ledger's."""


def print_account(row: Row, results: Results, folder: Path | None) -> None:
    """Prints the account of one run; `results` holds its tables, `folder` its logs where it has any."""
    console = stdout_console()
    _say(console, f"{name_of(row)}: {row['status']}" + (f": {row['reason']}" if row["reason"] else ""), "bold")
    _say(console, row["run_id"], "dim")
    _head(console, "What was run")
    for label, words in _setting(row):
        room = console.width - len(INDENT) if console.is_terminal else len(words) + 1  # a file's lines stay whole
        for number, line in enumerate(textwrap.wrap(words, room, break_long_words=False, break_on_hyphens=False)):
            _say(console, f"  {'' if number else label:<9} {line}")
    if row["status"] != "ok":
        _print_logs(console, folder)
        return
    _print_memory(console, row, results)
    for name in snapshot.written(folder) if folder is not None else []:
        _say(console, f"  for torch's memory viewer: {folder}/{name}")
    for title, table in tables_of(row, results.memory):
        _head(console, title)
        console.print(table)
    _print_traffic(console, row, results)
    _print_time(console, row)
    _print_loss(console, row)
    if lines := unexplained_lines(row):
        _head(console, "Unexplained: a bug, or what kernels, a model of your own or its data hold")
        for line in lines:
            _say(console, f"  {line}")


def _head(console: Console, title: str) -> None:
    _say(console, f"\n{title}", "bold")


def _say(console: Console, words: str, style: str = "") -> None:
    console.print(
        "\n".join(map(printable, words.split("\n"))), style=style, markup=False, highlight=False, soft_wrap=True
    )


def _setting(row: Row) -> Iterator[tuple[str, str]]:
    config = CellConfig.from_json(row["config"])
    psi: str = "" if pd.isna(row["psi"]) else f", ψ = {row['psi']:,}"
    yield "strategy", _words(config.section("strategy"))
    yield "model", _words(config.section("model")) + psi
    yield "ranks", f"{row['world_size']} on {row['device']} over {row['backend']}, threads a rank: {row['threads']}"
    parts = f"{row['micro_batch']} a micro-batch × {row['accumulation']} × {row['world_size']} ranks"
    yield "batch", f"{row['batch']} sequences of {row['sequence']} tokens a step: {parts}"
    clip = "" if config.clip is None else f", clipped at {config.clip:g} (norm {config.clip_norm})"
    how = f"{row['precision']}, {_words(config.section('optimizer'))}{clip}"
    yield "training", f"{how}; data {row['data']}, seed {row['seed']}"
    yield "steps", f"{config.measure.steps} measured after {config.measure.warmup} to warm up"
    yield "command", row["command"]
    when = row["started"].replace("T", " ")[:19]
    yield "when", f"{when} UTC, {row['seconds']:.1f} s for all passes; launch {row['repeat'] + 1} of its cell"
    commit = f"commit {row['commit'][:12]}, " if isinstance(row["commit"], str) else ""
    yield "code", f"{row['source_hash']} ({code_of(row)}), {commit}torch {row['torch_version']}"
    device = "" if row["device_class"] == "cpu" else f", {row['device_class']}"
    yield "machine", f"{row['processor']}, {row['cores']} cores{device}"


def _words(section: Row) -> str:
    """A section of the config: "zero2 (bucket_bytes=26214400)"."""
    rest = [f"{key}={json.dumps(value)}" for key, value in section.items() if key not in ("name", "kind")]
    return f"{section['name']} ({', '.join(rest)})" if rest else str(section["name"])


def _print_memory(console: Console, row: Row, results: Results) -> None:
    everywhere = results.memory
    memory = everywhere[everywhere["tier"] == "device"]
    totals = memory[(memory["phase"] == "step") & (memory["category"] == "total")]
    if totals.empty:
        return
    fullest = totals["rank"].to_list()[int(totals["max_bytes"].astype("int64").argmax())]
    mine = memory[memory["rank"] == fullest]
    _head(console, f"Memory in a step, rank {fullest}, the fullest of {len(totals)}")
    console.print(plain_table(["category", "at the peak", "at most", "predicted", "residual"], _categories(mine)))
    _print_formulas(console, row, everywhere)
    _head(console, "Memory by phase, the same rank")
    beside = [name for name in ALLOCATOR if (mine["category"] == name).any()]
    words = [BESIDE[name] for name in beside]
    console.print(plain_table(["phase", "peak", "states at most", *words], _phases(mine, beside)))
    _head(console, "Memory by rank")
    ranks = [_rank(memory, rank) for rank in totals["rank"]]
    console.print(plain_table(["rank", "peak", "states at most", "predicted", "residual"], ranks))
    _print_process(console, row)
    tensors = results.tensors[results.tensors["rank"] == fullest].nlargest(TENSORS, "bytes")
    _head(console, f"Largest tensors at the peak, rank {fullest}")
    columns = ["category", "name", "module", "phase", "bytes"]
    rows = [[*map(str, t[:4]), show_bytes(t[4])] for t in tensors[columns].itertuples(index=False)]
    console.print(plain_table(["category", "name", "made in module", "phase", "size"], rows, left=4))


def _print_formulas(console: Console, row: Row, memory: pd.DataFrame) -> None:
    table, lines = table_of_formulas(row, memory)
    if table is not None:
        _head(console, "The states by the paper's formula, the fullest rank of each category")
        console.print(table)
    for line in lines:
        _say(console, f"  {line}")


def _print_process(console: Console, row: Row) -> None:
    lines = process_lines(row)
    if lines:
        _head(console, "Memory by the system and the allocators, the most of all ranks")
    for line in lines:
        _say(console, f"  {line}")


def _categories(mine: pd.DataFrame) -> list[list[str]]:
    whole = _whole_step(mine)
    return [[c, show_bytes(whole[c]["at_peak_bytes"]), *_against(whole[c])] for c in (*CATEGORIES, "states", "total")]


def _phases(mine: pd.DataFrame, beside: list[str]) -> list[list[str]]:
    most: dict[Any, int] = mine.set_index(["phase", "category"])["max_bytes"].to_dict()
    there = [phase for phase in PHASES if (phase, "total") in most]
    names = ("total", "states", *beside)  # a profiler tells of the whole step alone
    sizes = {phase: [most.get((phase, name)) for name in names] for phase in there}
    return [[phase, *(NONE if size is None else show_bytes(size) for size in sizes[phase])] for phase in there]


def _rank(memory: pd.DataFrame, rank: int) -> list[str]:
    whole = _whole_step(memory[memory["rank"] == rank])
    return [str(rank), show_bytes(whole["total"]["max_bytes"]), *_against(whole["states"])]


def _whole_step(mine: pd.DataFrame) -> dict[str, Row]:
    """Category -> its row over the whole step, of one rank's."""
    rows: list[Any] = mine[mine["phase"] == "step"].to_dict("records")
    return {row["category"]: row for row in rows}


def _against(one: Row) -> list[str]:
    """At most, predicted, residual."""
    measured, predicted = one["max_bytes"], one["predicted_bytes"]
    if pd.isna(predicted):
        return [show_bytes(measured), NONE, NONE]
    return [show_bytes(measured), show_bytes(predicted), show_bytes(measured - predicted)]


def _print_traffic(console: Console, row: Row, results: Results) -> None:
    traffic, steps = results.traffic, CellConfig.from_json(row["config"]).measure.steps
    if traffic.empty or pd.isna(row["volume_psi"]):
        _head(console, "Traffic: not counted" if pd.isna(row["payload_bytes"]) else "Traffic: none")
        return
    # ties go to rank 0; control traffic has no volume
    busiest = traffic.groupby("rank")["volume_elements"].sum().idxmax()
    mine = traffic[traffic["rank"] == busiest].copy()
    mine["what"] = mine["collective"].where(mine["collective"] != "", mine["operator"])
    mine.loc[~mine["known"], "what"] += " (not counted)"
    figures = ["calls", "payload_bytes", "wire_bytes", "volume_elements"]
    summed = mine.groupby(["phase", "what"], sort=False)[figures].sum() / steps
    rows = [
        [phase, what, f"{calls:g}", show_bytes(payload), show_bytes(wire), f"{volume / row['psi']:.3f}"]
        for (phase, what), (calls, payload, wire, volume) in zip(summed.index, summed.to_numpy(), strict=True)
    ]
    _head(console, f"Traffic of one step, rank {busiest}")
    console.print(plain_table(["phase", "collective", "calls", "payload", "wire", "volume ψ"], rows, left=2))
    said = f"volume {row['volume_psi']:.3f} ψ"
    if pd.isna(row["predicted_volume_psi"]):
        said += ", without a prediction"
    else:
        off = row["volume_psi"] - row["predicted_volume_psi"]
        said += f", predicted {row['predicted_volume_psi']:.3f} ψ, residual {off:.3g} ψ"
    for line in (said, *volume_lines(row), *wire_lines(row)):
        _say(console, f"  {line}")
    _print_nodes(console, row)


def _print_nodes(console: Console, row: Row) -> None:
    """Bytes within and between nodes, and what of the model traveled in codes, where there is any of it."""
    for where in ("within", "between"):
        sent, predicted = row[f"{where}_nodes_bytes"], row[f"predicted_{where}_nodes_bytes"]
        if pd.notna(predicted):
            beside = f"predicted {show_bytes(predicted)}, residual {show_bytes(sent - predicted)}"
            _say(console, f"  {where} nodes {show_bytes(sent)}, {beside}")
    for line in between_nodes_lines(row):
        _say(console, f"  {line}")
    shares = [row[f"quantized_{what}_share"] for what in ("gather", "reduction")]
    if any(pd.notna(share) and share for share in shares):
        _say(console, "  quantized: gathers of {:.1%} of ψ, reductions of {:.1%}".format(*shares))


def _print_time(console: Console, row: Row) -> None:
    _head(console, "Time, the slowest rank of each step, medians")
    if pd.isna(row["step_s"]):
        simulated = "of a simulated world one rank alone is run, and its times mean nothing"
        sharing = CellConfig.from_json(row["config"]).ranks_per_gpu > 1
        shared = "ranks that share a GPU take turns" if sharing else "no pass was timed"
        _say(console, f"  none: {simulated if row['backend'] == SIMULATED else shared}")
        return
    if pd.isna(row["step_s_low"]):
        interval = "too few steps for an interval"
    else:
        interval = f"95 % interval {row['step_s_low'] * 1000:.1f}–{row['step_s_high'] * 1000:.1f} ms"
    parts = ", ".join(f"{name} {row[f'{name}_s'] * 1000:.1f} ms" for name in ("forward", "backward", "update"))
    _say(console, f"  step {row['step_s'] * 1000:.1f} ms, {interval}; {row['tokens_per_s']:.0f} tokens/s")
    _say(console, f"  {parts}")
    if not pd.isna(row["model_flops"]):
        words = f"  {row['model_flops'] / row['step_s'] / 1e12:.3g} TFLOP/s a rank"
        shares = "" if pd.isna(row["mfu"]) else f", MFU {row['mfu']:.1%}, HFU {row['hfu']:.1%}"
        _say(console, words + shares)
    for line in gpu_lines(row):
        _say(console, f"  {line}")
    _print_overlap(console, row)


def _print_overlap(console: Console, row: Row) -> None:
    if pd.isna(row["communication_s"]):
        return
    step, inside, exposed = (row[f"{name}_s"] * 1000 for name in ("traced_step", "communication", "exposed"))
    hidden = "" if pd.isna(row["overlap"]) else f", {row['overlap']:.0%} hidden"
    words = f"communication in {inside:.1f} ms of {step:.1f}, exposed {exposed:.1f} ms{hidden}"
    _say(console, f"  traced, which slows a step down: {words}")


def _loss(value: float) -> str:
    return NONE if pd.isna(value) else f"{value:.4f}"


def _print_loss(console: Console, row: Row) -> None:
    _head(console, "Loss")
    first, last = (_loss(row[f"loss_{at}"]) for at in ("first", "last"))
    if row["backend"] == SIMULATED:
        _say(console, "  none: in a simulated world no rank sends anything to it")
        return
    agree = "agree to the bit" if row["passes_agree"] else "differ: the model or device is not deterministic"
    both: str = "" if pd.isna(row["passes_agree"]) else f"; the losses of all passes {agree}"
    norm: str = "" if pd.isna(row["grad_norm_last"]) else f"; gradient norm {row['grad_norm_last']:.4g} before clipping"
    _say(console, f"  {first} at the first step, {last} at the last{both}{norm}")
    if not pd.isna(row["training"]):
        _say(console, f"  training {row['training']}: {row['training_words']}")
    if row["precision"].startswith("fp16") and not pd.isna(row["skipped_steps"]):
        skipped = show_count(row["skipped_steps"], "step")
        _say(console, f"  loss scale {row['loss_scale_last']:g} at the last step; {skipped} of all overflowed, skipped")


def _print_logs(console: Console, folder: Path | None) -> None:
    logs = sorted((folder / "logs").rglob("*.log")) if folder is not None else []
    for log in logs:
        lines = log.read_text(errors="replace").rstrip().splitlines()
        if lines:
            name = log.relative_to(log.parents[1] if log.parent.name != "logs" else log.parent)
            _head(console, f"Log {name}" + (f", the last {LOG_LINES} of {len(lines)} lines" * (len(lines) > LOG_LINES)))
            for line in lines[-LOG_LINES:]:
                _say(console, f"  {line}")
