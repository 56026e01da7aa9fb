"""`zerobench show`: a run as a readable account: setting, memory, traffic, times and losses, or why it failed."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from ..config.cell import WATCHED, CellConfig
from ..config.flat import base_name
from ..host.environment import SIMULATED
from ..host.files import read_text
from ..host.terminal import print_on, stdout_console
from ..probes import snapshot
from ..records import CATEGORIES, LINKS, PHASES
from ..results import selection
from ..results.frames import Row, table_of
from ..results.grid import Grid, Passage, print_passages
from ..results.options import RESULTS, Parser, verb
from ..results.printed_table import ONE_MEMORY, step_interval
from ..results.tables import Results, load
from ..sizes import counted, show_bytes, show_count, show_ms, show_rate, show_samples
from ..theory.closed_forms import Formula, from_json
from .folder_contents import FolderContents, RunInFolder, code_age, look, warnings_to
from .reserved import show_snapshots

TENSORS = 10
"""Number of tensors that are listed."""

PROCESS = {
    "allocator_peak": "torch's allocator at its peak",
    "timed_allocator_peak": "the same in the timed pass",
    "outside_ledger": "outside the ledger",
    "kept": "kept from step to step",
    "resident": "resident set",
    "allocated": "allocated on the GPU",
    "reserved": "reserved on the GPU",
    "fragmentation": "reserved beyond allocated",
    "largest_free_block": "largest free block",
    "device_used": "in use on the device",
    "pinned_requested": "pinned host memory in use",
    "pinned": "pinned host memory held",
}
"""Columns of a run without the suffix `_bytes` -> their description."""

IN_A_PHASE = {
    "total": "peak",
    "states": "states at most",
    "allocated": "allocated",
    "reserved": "reserved",
    "outside_ledger": "outside the ledger",
    "fragmentation": "fragmentation",
    "pinned": "pinned",
    "device_used": "device used",
}
"""Rows of the memory table that are the columns of the phases: the ledger's, then the allocator's if there are any."""

PHASE_NAMES = {"data": "data and rest"}
"""Phase -> its label. The rest of a step counts as data, including the instant between forward and backward, when the
activations are alive.
"""

RESIDUAL = {"max_bytes": "at most", "predicted_bytes": "predicted", "residual_bytes": "residual"}
"""Columns of bytes beside a prediction."""


def memory_passages(row: Row, everywhere: pd.DataFrame, tensors: pd.DataFrame) -> Iterator[Passage]:
    """Yields passages on the categories, formulas, phases, ranks and largest tensors; none without a memory table.
    `everywhere`, `tensors`: the run's tables.
    """
    memory = everywhere[everywhere["tier"] == "device"]
    step = _with_residual(memory[memory["phase"] == "step"])
    peaks = step[step["category"] == "total"].set_index("rank")["max_bytes"].astype("int64")
    if peaks.empty:
        return
    fullest = peaks.idxmax()
    categories = table_of(
        _by_category(step, fullest), {"category": "category", "at_peak_bytes": "at the peak"} | RESIDUAL
    )
    yield Passage(f"Memory in a step, rank {fullest}, the largest of {len(peaks)}", [categories])
    formulas, lines = table_of_formulas(row, everywhere)
    if formulas is not None:
        yield Passage("The states by the paper's formula; for each category the rank with the most", [formulas, *lines])
    elif lines:
        yield Passage("The states by the paper's formula", [*lines])
    own = memory[memory["rank"] == fullest].astype({"phase": "object", "category": "object"})
    by_phase = own.pivot_table("max_bytes", "phase", "category", "max")  # a profiler tells of the whole step alone
    shown = {name: heading for name, heading in IN_A_PHASE.items() if name in by_phase}
    phases = [phase for phase in PHASES if phase in by_phase.index]
    by_phase = by_phase.loc[phases, list(shown)].rename(index=PHASE_NAMES).add_suffix("_bytes").reset_index()
    headings = {"phase": "phase", **{f"{name}_bytes": heading for name, heading in shown.items()}}
    yield Passage("Memory by phase, the same rank", [table_of(by_phase, headings)])
    ranks = step[step["category"] == "states"].set_index("rank").assign(peak_bytes=peaks).reset_index()
    headings = {"rank": "rank", "peak_bytes": "peak", **RESIDUAL, "max_bytes": "states at most"}
    yield Passage("Memory by rank", [table_of(ranks, headings)])
    sizes = {description: row[f"{name}_bytes"] for name, description in PROCESS.items()}
    process = [[description, show_bytes(size)] for description, size in sizes.items() if pd.notna(size)]
    if pd.notna(row["alloc_retries"]):
        process.append(["retries of the allocator", str(row["alloc_retries"])])
    if pd.notna(row["allocator_witness"]) and row["allocator_witness"] in ("profiler", "none"):
        process.append(["source of the allocator's total", row["allocator_witness"]])
    if process:
        yield Passage("Memory by the system and the allocators, the most of all ranks", [Grid(["source", ""], process)])
    largest = tensors[tensors["rank"] == fullest].nlargest(TENSORS, "bytes")
    headings = {"category": "category", "name": "name", "module": "made in module", "phase": "phase", "bytes": "size"}
    yield Passage(f"Largest tensors at the peak, rank {fullest}", [table_of(largest, headings, left=4)])


def _with_residual(memory: pd.DataFrame) -> pd.DataFrame:
    sizes = memory[["max_bytes", "predicted_bytes"]].astype("Float64")
    return memory.assign(residual_bytes=sizes["max_bytes"] - sizes["predicted_bytes"])


def _by_category(memory: pd.DataFrame, rank: Any) -> pd.DataFrame:
    """Returns a rank's rows in the order of the ledger, without the allocator's."""
    rows = memory[memory["rank"] == rank].astype({"category": "object"}).set_index("category")
    ordered: pd.DataFrame = rows.loc[[name for name in (*CATEGORIES, "states", "total") if name in rows.index]]
    return ordered.reset_index()


# -- other tiers -------------------------------------------------------------------------------------


ELSEWHERE = {"host": "predicted_host_states_bytes", "nvme": "predicted_nvme_bytes"}
"""Tier -> the column of a run that predicts its states."""

LINK_WORDS = {"down": "device to host", "up": "host to device", "read": "files to host", "write": "host to files"}


def tier_passages(row: Row, memory: pd.DataFrame) -> Iterator[Passage]:
    """Yields passages of one table each; none if everything is on the device. `memory`: the run's table."""
    note = f"; {ONE_MEMORY}" if row["device"] == "cpu" else ""
    step = memory[(memory["phase"] == "step") & (memory["max_bytes"] > 0)]
    tiers = [_in_tier(row, tier, step[step["tier"] == tier]) for tier in ELSEWHERE if (step["tier"] == tier).any()]
    if tiers:
        title = f"Memory in other tiers in a step, on the rank with the most in each{note}"
        headings = {"tier": "tier", "category": "category", "at_peak_bytes": "at the peak"} | RESIDUAL
        yield Passage(title, [table_of(_with_residual(pd.concat(tiers)), headings, left=2)])
    moved = [
        {"link": LINK_WORDS[link], "max_bytes": row[f"{link}_bytes"], "predicted_bytes": row[f"predicted_{link}_bytes"]}
        for link in LINKS
        if pd.notna(row[f"{link}_bytes"]) and row[f"{link}_bytes"]
    ]
    if moved:
        headings = {"link": "link", **RESIDUAL, "max_bytes": "bytes", "predicted_bytes": "by formula"}
        title = "Bytes between tiers in a step, over all ranks"
        yield Passage(title, [table_of(_with_residual(pd.DataFrame(moved)), headings)])


def _in_tier(row: Row, tier: str, memory: pd.DataFrame) -> pd.DataFrame:
    """Returns the categories of the rank with the most in a tier, and for host memory a row for the fullest node."""
    fullest = memory[memory["category"] == "total"].set_index("rank")["max_bytes"].astype("int64").idxmax()
    rows = _by_category(memory, fullest)[["category", "at_peak_bytes", "max_bytes"]].to_dict("records")
    states = memory[memory["category"] == "states"]["max_bytes"].max()  # over the ranks, as the prediction is
    for entry in rows:
        if entry["category"] == "states":
            entry |= {"max_bytes": states, "predicted_bytes": row[ELSEWHERE[tier]]}
    if tier == "host" and pd.notna(row["host_peak_all_bytes"]):
        size = CellConfig.from_json(row["config"]).ranks_per_node
        rows.append({"category": f"a node of {size}", "max_bytes": row["host_peak_all_bytes"]})
    columns = ["category", "at_peak_bytes", "max_bytes", "predicted_bytes"]
    return pd.DataFrame(rows, columns=columns, dtype="object").assign(tier=tier)


# -- the paper's formulas ---------------------------------------------------------------------------


SYMBOLS = {
    "ψ": "trained parameters",
    "φ": "frozen parameters",
    "N": "ranks that share the states",
    "k": "ranks that share a shard",
    "K": "bytes of the optimizer per parameter, masters included",
    "P": "bytes of parameters",
    "G": "bytes of gradients",
    "O": "bytes of the optimizer",
    "f": "of it leaves the device",
    "r": "reductions of a gradient",
    "m": "micro-batches",
}
"""Symbol of an equation -> its meaning."""


def table_of_formulas(row: Row, memory: pd.DataFrame) -> tuple[Grid | None, list[str]]:
    """The table, and lines below it; no table if theory does not cover the run."""
    try:
        formulas = from_json(row["formulas"])
    except ValueError as error:
        return None, [str(error)]
    step = memory[(memory["phase"] == "step") & (memory["tier"] == "device")].astype({"category": "object"})
    most = step.groupby("category")[["max_bytes", "predicted_bytes"]].max()
    states = {name: formula for name, formula in formulas.items() if name in most.index}
    if not states:
        return None, []
    rows = most.loc[list(states)].assign(
        formula=[formula.equation for formula in states.values()],
        formula_bytes=[formula.value for formula in states.values()],
    )
    rows["in_flight_bytes"] = rows["predicted_bytes"] - rows["formula_bytes"]
    headings = {
        "category": "category", "formula": "formula", "formula_bytes": "in bytes", "in_flight_bytes": "in flight",
        "predicted_bytes": "replayed", "max_bytes": "measured",
    }  # fmt: skip
    beyond = {
        name: ", ".join(f"{term.name} {show_bytes(term.size)}" for term in formula.beyond)
        for name, formula in states.items()
        if name != "states"
    }
    lines = [numbers_in(states), *(f"in flight, {name}: {terms}" for name, terms in beyond.items() if terms)]
    return table_of(rows.reset_index(), headings, left=2), [line for line in lines if line]


def numbers_in(formulas: dict[str, Formula], without: tuple[str, ...] = ()) -> str:
    """Lists the numbers in these formulas, each with its symbol and meaning."""
    numbers = {symbol: value for formula in formulas.values() for symbol, value in formula.numbers.items()}
    shown = {symbol: value for symbol, value in numbers.items() if symbol not in without}
    return ", ".join(f"{symbol} = {value:,.10g} {SYMBOLS.get(symbol, '')}".rstrip() for symbol, value in shown.items())


# -- the account ------------------------------------------------------------------------------------

LOG_LINES = 20
INDENT = " " * 12
NONE = "–"


def print_account(row: Row, results: Results, folder: Path | None) -> None:
    """Prints the account of one run; `results` holds its tables, `folder` its logs if it has any."""
    console = stdout_console()
    name, reason = base_name(CellConfig.from_json(row["config"])), row["reason"]
    print_on(console, f"{name}: {row['status']}" + (f": {reason}" if reason else ""), "bold")
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
    parts = f"{row['micro_batch']} a micro-batch × {row['accumulation']} × {config.data_ranks} ranks"
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
    age = code_age(row)
    age = "age unknown" if age == "?" else age
    yield "code", f"{row['source_hash']} ({age}), {commit}torch {row['torch_version']}"
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
        formulas = from_json(row["formulas"])
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
            yield "none: only one rank of a simulated world runs, and its times are meaningless"
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


@verb
def show(arguments: list[str]) -> int:
    """Runs the verb. Returns the exit code: 0, or 2 if RUN names no run, or several."""
    description = (
        "What was run, its memory, traffic, times and losses; for a failed run its reason and logs. Of snapshots of"
        " torch's allocator: what is reserved and not allocated, by cause, and the lines that filled the devices."
    )
    parser = Parser("zerobench show", description)
    run_help = (
        "its folder, or a results folder of one run, its run_id or a part that fits one run, or, quoted, a cell's name"
        " as status prints it; or files of torch.cuda.memory._dump_snapshot, one of each rank"
    )
    parser.add_argument("run", metavar="RUN", nargs="+", help=run_help)
    results_help = "where to look for a run_id (default: %(default)s)"
    parser.add_argument("--results", type=Path, default=RESULTS, help=results_help)
    chosen = parser.parse_args(arguments)
    paths = [Path(name) for name in chosen.run]
    if all(path.is_file() for path in paths):
        show_snapshots(paths)
        return 0
    if len(paths) > 1:
        raise ValueError(f"{' '.join(chosen.run)}: name one run, or files of snapshots, which all exist")
    run, results = find(chosen.run[0], chosen.results)
    print_account(vars(run.row), results, run.folder)
    return 0


def find(name: str, where: Path) -> tuple[RunInFolder, Results]:
    """Returns the run and its tables. Raises ValueError if `name` fits none or several."""
    for folder in (Path(name), where / name):
        if (folder / "run.json").is_file():
            held = look(folder)
            if not held.runs:
                raise ValueError("; ".join(held.unreadable))
            return held.runs[0], _load_run(folder)
    if Path(name).is_dir() and (inside := look(Path(name))).runs:  # a results folder: of one run, it is meant
        name, held = "", inside
    else:
        held = look(where)
    run = pick(name, held)
    if run.folder is not None:
        return run, _load_run(run.folder)
    return run, load(where).of([run.row.run_id])


def _load_run(folder: Path) -> Results:
    """Raises ValueError if a table is damaged."""
    problems: list[str] = []
    with warnings_to(problems):
        results = load(folder)
    if results.runs.empty:
        raise ValueError("; ".join(problems))
    return results


def pick(name: str, held: FolderContents) -> RunInFolder:
    """Returns the run that `name` selects (results/selection.py)."""
    hint = f"; `zerobench status {held.where}` lists the runs"
    how = "" if str(held.where) == RESULTS else f", with --results {held.where}"
    row = selection.pick(name, [vars(run.row) for run in held.runs], str(held.where), hint, held.unreadable, how)
    return next(run for run in held.runs if vars(run.row) is row)
