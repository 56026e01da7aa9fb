"""A run as a readable account: configuration, memory, traffic, time, losses; a failed run's reason and logs.

Traffic is given for one step, on the rank that moves the most.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from ...config.cell import CellConfig
from ...host.environment import SIMULATED
from ...host.files import read_text
from ...host.terminal import print_on, stdout_console
from ...probes import snapshot
from ...results.grid import Grid
from ...results.printed_table import name_of
from ...results.tables import Results
from ...sizes import show_bytes, show_count, show_rate, show_samples
from ..folder_contents import code_of
from ..text_blocks import Passage, print_parts
from .memory import formulas_of, numbers_in, passages_of_memory, passages_of_tiers

Row = dict[str, Any]

LOG_LINES = 20
INDENT = " " * 12
NONE = "–"


def print_account(row: Row, results: Results, folder: Path | None) -> None:
    """Prints the account of one run; `results` holds its tables, `folder` its logs if it has any."""
    console = stdout_console()
    print_on(console, f"{name_of(row)}: {row['status']}" + (f": {row['reason']}" if row["reason"] else ""), "bold")
    print_on(console, row["run_id"], "dim")
    console.print()
    print_on(console, "What was run", "bold")
    for label, words in setting_of(row):
        room = console.width - len(INDENT) if console.is_terminal else len(words) + 1  # a file's lines stay whole
        for number, line in enumerate(textwrap.wrap(words, room, break_long_words=False, break_on_hyphens=False)):
            print_on(console, f"  {'' if number else label:<9} {line}")
    for passage in passages_of(row, results, folder):
        console.print()
        print_on(console, passage.title, "bold")
        print_parts(console, passage.parts)


def passages_of(row: Row, results: Results, folder: Path | None) -> list[Passage]:
    """Returns the account without the setting; for a failed run, the ends of its logs."""
    if row["status"] != "ok":
        return list(_logs(folder))
    found = [*passages_of_memory(row, results)]
    if found and folder is not None:
        found[-1].parts.extend(f"for torch's memory viewer: {folder}/{name}" for name in snapshot.written(folder))
    found += [*passages_of_tiers(row, results.memory), _traffic(row, results)]
    found += [Passage("Time, the slowest rank of each step, medians", [*_time_lines(row)])]
    found += [Passage("Loss", [*_loss_lines(row)])]
    if isinstance(said := row["unexplained"], str) and said:  # predict/unexplained.py
        title = "Unexplained: a bug, or what kernels, a model of your own or its data hold"
        found.append(Passage(title, [*said.split("; ")]))
    return found


def setting_of(row: Row) -> Iterator[tuple[str, str]]:
    """Yields the setting of the run: a label and its text."""
    config = CellConfig.from_json(row["config"])
    psi: str = "" if pd.isna(row["psi"]) else f", ψ = {row['psi']:,}"
    yield "strategy", _words(config.section("strategy"))
    yield "model", _words(config.section("model")) + psi
    yield "ranks", f"{row['world_size']} on {row['device']} over {row['backend']}, threads a rank: {row['threads']}"
    parts = f"{row['micro_batch']} a micro-batch × {row['accumulation']} × {row['world_size']} ranks"
    yield "batch", f"{show_samples(row['batch'], row['sequence'])} a step: {parts}"
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


def _traffic(row: Row, results: Results) -> Passage:
    traffic, steps = results.traffic, CellConfig.from_json(row["config"]).measure.steps
    if traffic.empty or pd.isna(row["volume_psi"]):
        return Passage(f"Traffic: {'not counted' if pd.isna(row['payload_bytes']) else 'none'}", [])
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
    table = Grid(["phase", "collective", "calls", "payload", "wire", "volume ψ"], rows, left=2)
    said = f"volume {row['volume_psi']:.3f} ψ"
    if pd.isna(row["predicted_volume_psi"]):
        said += ", without a prediction"
    else:
        off = row["volume_psi"] - row["predicted_volume_psi"]
        said += f", predicted {row['predicted_volume_psi']:.3f} ψ, residual {off:.3g} ψ"
    lines = [said, *volume_lines(row), *wire_lines(row), *_node_lines(row)]
    return Passage(f"Traffic of one step, rank {busiest}", [table, *lines])


def _node_lines(row: Row) -> Iterator[str]:
    """Yields lines on bytes within and between nodes, and on the part of the model that was sent quantized."""
    for where in ("within", "between"):
        sent, predicted = row[f"{where}_nodes_bytes"], row[f"predicted_{where}_nodes_bytes"]
        if pd.notna(predicted):
            beside = f"predicted {show_bytes(predicted)}, residual {show_bytes(sent - predicted)}"
            yield f"{where} nodes {show_bytes(sent)}, {beside}"
    yield from between_nodes_lines(row)
    shares = [row[f"quantized_{what}_share"] for what in ("gather", "reduction")]
    if any(pd.notna(share) and share for share in shares):
        yield "quantized: gathers of {:.1%} of ψ, reductions of {:.1%}".format(*shares)


def volume_lines(row: Row) -> list[str]:
    """The formula of the volume, and the terms beyond it, in ψ."""
    try:
        formula = formulas_of(row).get("volume")
    except ValueError:
        return []  # said above, beside the states
    if formula is None or not row["psi"]:
        return []
    terms = [f"{term.name} {term.size / row['psi']:+.3f} ψ" for term in formula.beyond]
    numbers = numbers_in({"volume": formula}, without=("ψ", "N"))
    said = f"formula {formula.equation} = {formula.value / row['psi']:.3f} ψ"
    return [said + (f", with {numbers}" if numbers else ""), *([f"besides: {'; '.join(terms)}"] if terms else [])]


def between_nodes_lines(row: Row) -> list[str]:
    """The formula of the bytes that a rank sends to other nodes."""
    try:
        formula = formulas_of(row).get("between nodes")
    except ValueError:
        return []
    return [f"between nodes by formula {formula.equation} = {show_bytes(formula.value)}"] if formula else []


def wire_lines(row: Row) -> list[str]:
    """Lines on a rank's wire bytes, by the ring optimum, and its control traffic, each with its prediction."""
    lines = [f"a rank sends {show_bytes(row['wire_bytes'])} in the mean{_next_to(row, 'wire')}"]
    if pd.notna(row["control_bytes"]):
        lines.append(f"control traffic {show_bytes(row['control_bytes'])}{_next_to(row, 'control')}")
    if pd.notna(row["loopback_bytes"]) and row["wire_bytes"]:
        lines.append(_loopback(row))
    return lines


def _loopback(row: Row) -> str:
    """A line on the bytes over the loopback interface, and why they exceed the ring optimum."""
    words = f"loopback {show_bytes(row['loopback_bytes'])}, {row['loopback_bytes'] / row['wire_bytes']:.2f} of it"
    sent = row["predicted_loopback_bytes"]
    if pd.notna(sent) and sent > 1.1 * row["wire_bytes"]:
        words += f": gloo carries a reduce-scatter as an all-reduce, {show_bytes(sent)} in all"
    return words


def _next_to(row: Row, name: str) -> str:
    measured, predicted = row[f"{name}_bytes"], row[f"predicted_{name}_bytes"]
    if pd.isna(predicted):
        return ""
    return f", predicted {show_bytes(predicted)}, residual {show_bytes(measured - predicted)}"


def _time_lines(row: Row) -> Iterator[str]:
    if pd.isna(row["step_s"]):
        simulated = "of a simulated world one rank alone is run, and its times mean nothing"
        sharing = CellConfig.from_json(row["config"]).ranks_per_gpu > 1
        shared = "ranks that share a GPU take turns" if sharing else "no pass was timed"
        yield f"none: {simulated if row['backend'] == SIMULATED else shared}"
        return
    if pd.isna(row["step_s_low"]):
        interval = "too few steps for an interval"
    else:
        interval = f"95 % interval {row['step_s_low'] * 1000:.1f}–{row['step_s_high'] * 1000:.1f} ms"
    parts = ", ".join(f"{name} {row[f'{name}_s'] * 1000:.1f} ms" for name in ("forward", "backward", "update"))
    yield f"step {row['step_s'] * 1000:.1f} ms, {interval}; {show_rate(row['tokens_per_s'], row['sequence'])}"
    yield parts
    if not pd.isna(row["model_flops"]):
        words = f"{row['model_flops'] / row['step_s'] / 1e12:.3g} TFLOP/s a rank"
        shares = "" if pd.isna(row["mfu"]) else f", MFU {row['mfu']:.1%}, HFU {row['hfu']:.1%}"
        yield words + shares
    yield from gpu_lines(row)
    yield from _overlap_lines(row)


GPU = {"gpu_temperature_c": "°C", "gpu_power_w": "W"}
"""Columns of a run, and their units."""


def gpu_lines(row: Row) -> list[str]:
    """State of the GPU before or after the steps, as far as nvidia-smi reported it."""
    said: list[str] = []
    if pd.notna(row["sm_clock_mhz"]):
        of = "" if pd.isna(row["sm_clock_max_mhz"]) else f" of {row['sm_clock_max_mhz']}"
        said.append(f"SM clock {row['sm_clock_mhz']}{of} MHz")
    said += [f"{row[key]:.0f} {unit}" for key, unit in GPU.items() if pd.notna(row[key])]
    held = "not known" if pd.isna(row["throttle"]) else row["throttle"] or "nothing"
    return [f"{', '.join(said)} before or after the steps; held down by: {held}"] if said else []


def _overlap_lines(row: Row) -> Iterator[str]:
    if pd.isna(row["communication_s"]):
        return
    step, inside, exposed = (row[f"{name}_s"] * 1000 for name in ("traced_step", "communication", "exposed"))
    hidden = "" if pd.isna(row["overlap"]) else f", {row['overlap']:.0%} hidden"
    words = f"communication in {inside:.1f} ms of {step:.1f}, exposed {exposed:.1f} ms{hidden}"
    yield f"traced, which slows a step down: {words}"


def _show_loss(value: float) -> str:
    return NONE if pd.isna(value) else f"{value:.4f}"


def _loss_lines(row: Row) -> Iterator[str]:
    first, last = (_show_loss(row[f"loss_{at}"]) for at in ("first", "last"))
    if row["backend"] == SIMULATED:
        yield "none: in a simulated world no rank sends anything to it"
        return
    agree = "agree to the bit" if row["passes_agree"] else "differ: the model or device is not deterministic"
    both: str = "" if pd.isna(row["passes_agree"]) else f"; the losses of all passes {agree}"
    norm: str = "" if pd.isna(row["grad_norm_last"]) else f"; gradient norm {row['grad_norm_last']:.4g} before clipping"
    yield f"{first} at the first step, {last} at the last{both}{norm}"
    if not pd.isna(row["training"]):
        yield f"training {row['training']}: {row['training_words']}"
    if row["precision"].startswith("fp16") and not pd.isna(row["skipped_steps"]):
        skipped = show_count(row["skipped_steps"], "step")
        yield f"loss scale {row['loss_scale_last']:g} at the last step; {skipped} of all overflowed, skipped"


def _logs(folder: Path | None) -> Iterator[Passage]:
    logs = sorted((folder / "logs").rglob("*.log")) if folder is not None else []
    for log in logs:
        try:
            lines = read_text(log, errors="replace").rstrip().splitlines()
        except (OSError, ValueError) as error:  # such as a pipe: others may have written the folder
            lines = [str(error)]
        if lines:
            name = log.relative_to(log.parents[1] if log.parent.name != "logs" else log.parent)
            title = f"Log {name}" + (f", the last {LOG_LINES} of {len(lines)} lines" * (len(lines) > LOG_LINES))
            yield Passage(title, [*lines[-LOG_LINES:]])
