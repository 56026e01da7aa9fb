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

from ..config.cell import WATCHED, CellConfig
from ..host.environment import SIMULATED
from ..host.files import read_text
from ..host.terminal import print_on, stdout_console
from ..probes import snapshot
from ..results.frames import table_of
from ..results.grid import Grid
from ..results.printed_table import name_of, step_interval
from ..results.tables import Results
from ..sizes import counted, show_bytes, show_count, show_ms, show_rate, show_samples
from .account_memory import formulas_of, memory_passages, numbers_in, tier_passages
from .folder_contents import code_of
from .passages import Passage, print_passages

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
    for label, text in setting_of(row):
        room = console.width - len(INDENT) if console.is_terminal else len(text) + 1  # a file's lines stay whole
        for number, line in enumerate(textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)):
            print_on(console, f"  {'' if number else label:<9} {line}")
    console.print()
    print_passages(console, passages_of(row, results, folder))


def passages_of(row: Row, results: Results, folder: Path | None) -> list[Passage]:
    """Returns the account without the setting; for a failed run, the ends of its logs."""
    if row["status"] != "ok":
        return [*_logs(folder)]
    passages = [*memory_passages(row, results.memory, results.tensors)]
    if passages and folder is not None:
        passages[-1].parts.extend(f"for torch's memory viewer: {folder}/{name}" for name in snapshot.written(folder))
    passages += [*tier_passages(row, results.memory), _traffic(row, results.traffic)]
    passages += [Passage("Time, the slowest rank of each step, medians", [*_time_lines(row)])]
    passages += [Passage("Loss", [*_loss_lines(row)])]
    if isinstance(unexplained := row["unexplained"], str) and unexplained:  # predict/unexplained.py
        title = "Unexplained: a bug, or what kernels, a model of your own or its data hold"
        passages.append(Passage(title, [*unexplained.split("; ")]))
    return passages


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
    seed = "" if row["data"] == WATCHED else f", seed {row['seed']}"  # a watch knows no seed of the loop's
    yield "training", f"{how}; data {row['data']}{seed}"
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
    unknown = [key for key in ("lr",) if section.get(key) is None]  # of a watched loop, which may change it
    shown = {key: value for key, value in section.items() if key not in ("name", "kind", *unknown)}
    rest = [f"{key}={json.dumps(value)}" for key, value in shown.items()]
    return f"{section['name']} ({', '.join(rest)})" if rest else str(section["name"])


def _traffic(row: Row, traffic: pd.DataFrame) -> Passage:
    if traffic.empty or pd.isna(row["volume_psi"]):
        return Passage(f"Traffic: {'not counted' if pd.isna(row['payload_bytes']) else 'none'}", [])
    # ties go to rank 0; control traffic has no volume
    busiest = traffic.groupby("rank")["volume_elements"].sum().idxmax()
    rows = traffic[traffic["rank"] == busiest]
    what = rows["collective"].where(rows["collective"] != "", rows["operator"])
    rows = rows.assign(what=what.where(rows["known"], what + " (not counted)"))
    figures = ["calls", "payload_bytes", "wire_bytes", "volume_elements"]
    summed = rows.groupby(["phase", "what"], sort=False, observed=True)[figures].sum().astype("float64")
    summed /= CellConfig.from_json(row["config"]).measure.steps
    summed["volume_psi"] = summed["volume_elements"] / row["psi"]
    headings = {"phase": "phase", "what": "collective", "calls": "calls", "payload_bytes": "payload"}
    headings |= {"wire_bytes": "wire", "volume_psi": "volume ψ"}
    collectives = table_of(summed.reset_index(), headings, left=2)
    sums: list[list[str]] = []
    for name, key in SUMS.items():
        show = show_bytes if key.endswith("_bytes") else "{:.6g} ψ".format
        measured, predicted = row[key], row[f"predicted_{key}"]
        if pd.notna(predicted):
            sums.append([name, show(measured), show(predicted), show(measured - predicted)])
        elif pd.notna(measured) and "nodes" not in name:  # those of nodes if there are several
            sums.append([name, show(measured), NONE, NONE])
    compared = Grid(["sum", "measured", "predicted", "residual"], sums)
    return Passage(f"Traffic of one step, rank {busiest}", [collectives, compared, *traffic_lines(row)])


SUMS = {
    "volume": "volume_psi",
    "sent by a rank in the mean": "wire_bytes",
    "control traffic": "control_bytes",
    "within nodes": "within_nodes_bytes",
    "between nodes": "between_nodes_bytes",
}
"""Name of a sum over a step -> its column of a run."""


def traffic_lines(row: Row) -> list[str]:
    """Lines on the formulas of volume and bytes between nodes, the loopback interface, and quantized traffic."""
    try:
        formulas = formulas_of(row)
    except ValueError:
        formulas = {}  # the message is beside the states
    lines = []
    if (volume := formulas.get("volume")) is not None and row["psi"]:
        numbers = numbers_in({"volume": volume}, without=("ψ", "N"))
        meanings = f", with {numbers}" if numbers else ""
        lines.append(f"formula {volume.equation} = {volume.value / row['psi']:.3f} ψ{meanings}")
        terms = [f"{term.name} {term.size / row['psi']:+.3f} ψ" for term in volume.beyond]
        lines += [f"besides: {'; '.join(terms)}"] if terms else []
    if formula := formulas.get("between nodes"):
        lines.append(f"between nodes by formula {formula.equation} = {show_bytes(formula.value)}")
    if pd.notna(row.get("loopback_bytes")) and row["wire_bytes"]:
        measured, sent = row["loopback_bytes"], row["predicted_loopback_bytes"]
        line = f"loopback {show_bytes(measured)}, {measured / row['wire_bytes']:.2f} of what a rank sends"
        if pd.notna(sent) and sent > 1.1 * row["wire_bytes"]:
            line += f": gloo carries a reduce-scatter as an all-reduce, {show_bytes(sent)} in all"
        lines.append(line)
    gathers, reductions = (row.get(f"quantized_{what}_share") or 0.0 for what in ("gather", "reduction"))
    if gathers > 0 or reductions > 0:
        lines.append(f"quantized: gathers of {gathers:.1%} of ψ, reductions of {reductions:.1%}")
    return lines


def _time_lines(row: Row) -> Iterator[str]:
    if pd.isna(row["step_s"]):
        if row["backend"] == SIMULATED:
            yield "none: of a simulated world one rank alone is run, and its times mean nothing"
        else:
            sharing = CellConfig.from_json(row["config"]).ranks_per_gpu > 1
            yield f"none: {'ranks that share a GPU take turns' if sharing else 'no pass was timed'}"
        return
    interval = step_interval(row) or "too few steps for an interval"
    yield f"step {show_ms(row['step_s'])}, {interval}; {show_rate(row['tokens_per_s'], row['sequence'])}"
    yield ", ".join(f"{name} {show_ms(row[f'{name}_s'])}" for name in ("forward", "backward", "update"))
    if pd.notna(row["save_s"]):
        done, step = show_ms(row["save_done_s"]), show_ms(row["save_step_s"])
        saving = f"save {show_ms(row['save_s'])} of the loop's time, complete after {done}; a step meanwhile {step}"
        yield f"{saving}; {show_bytes(row['checkpoint_bytes'])} in files"
    if pd.notna(row["model_flops"]):
        shares = "" if pd.isna(row["mfu"]) else f", MFU {row['mfu']:.1%}, HFU {row['hfu']:.1%}"
        yield f"{row['model_flops'] / row['step_s'] / 1e12:.3g} TFLOP/s a rank{shares}"
    state: list[str] = []
    if pd.notna(row["sm_clock_mhz"]):
        most = "" if pd.isna(row["sm_clock_max_mhz"]) else f" of {row['sm_clock_max_mhz']}"
        state.append(f"SM clock {row['sm_clock_mhz']}{most} MHz")
    units = {"gpu_temperature_c": "°C", "gpu_power_w": "W"}
    state += [f"{row[key]:.0f} {unit}" for key, unit in units.items() if pd.notna(row[key])]
    if state:
        held = "not known" if pd.isna(row["throttle"]) else row["throttle"] or "nothing"
        yield f"{', '.join(state)} before or after the steps; held down by: {held}"
    if pd.notna(row["energy_j"]):
        noun = counted([row["sequence"]])
        yield f"energy {row['energy_j']:,.1f} J in the measured steps, {row['tokens_per_j']:.3g} {noun}/J"
    if pd.notna(row["communication_s"]):
        step, inside, exposed = (row[f"{name}_s"] * 1000 for name in ("traced_step", "communication", "exposed"))
        hidden = "" if pd.isna(row["overlap"]) else f", {row['overlap']:.0%} hidden"
        traced = f"communication in {inside:.1f} ms of {step:.1f}, exposed {exposed:.1f} ms{hidden}"
        yield f"traced, which slows a step down: {traced}"


def _loss_lines(row: Row) -> Iterator[str]:
    if row["backend"] == SIMULATED:
        yield "none: in a simulated world no rank sends anything to it"
        return
    ends = {"first": row["loss_first"], "last": row["loss_last"]}
    losses = ", ".join(f"{'–' if pd.isna(loss) else f'{loss:.4f}'} at the {end} step" for end, loss in ends.items())
    if pd.notna(row["passes_agree"]):
        agree = "agree to the bit" if row["passes_agree"] else "differ: the model or device is not deterministic"
        losses += f"; the losses of all passes {agree}"
    if pd.notna(row["grad_norm_last"]):
        losses += f"; gradient norm {row['grad_norm_last']:.4g} before clipping"
    yield losses
    if pd.notna(row["training"]):
        yield f"training {row['training']}: {row['training_words']}"
    if row["precision"].startswith("fp16") and pd.notna(row["skipped_steps"]):
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
            part = f", the last {LOG_LINES} of {len(lines)} lines" if len(lines) > LOG_LINES else ""
            yield Passage(f"Log {name}{part}", [*lines[-LOG_LINES:]])
