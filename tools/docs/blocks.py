"""Blocks of the pages on the stages, the memory cap and tiers, and the table of all blocks.

Each block is a function of the folder of folders of committed tables, and returns Markdown. Those on groups, ZeRO++
and ZeRO-R are in blocks_systems.py, those on times of tiers in blocks_times.py, references in blocks_reference.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.largest_model import read, table, table_2
from analysis.offload import parts_of
from tools.docs import (
    blocks_gpu,
    blocks_predicted,
    blocks_published,
    blocks_reference,
    blocks_stages,
    blocks_strategies,
    blocks_systems,
    blocks_table1,
    blocks_training,
    blocks_validated,
    blocks_versions,
)
from tools.docs.blocks_systems import MIB, pipes
from tools.docs.blocks_times import offload_time, step_costs, step_costs_link
from tools.docs.committed import load
from tools.docs.recorded import recorded
from validation.kills import KillsRow
from validation.store import read as read_rows
from zerobench.config.schema_training import OPTIMIZERS
from zerobench.judging.budget_file import read_budget
from zerobench.plots.losses import losses
from zerobench.results.summary import summarize
from zerobench.sizes import show_bytes
from zerobench.strategies import spec_of


def answer(root: Path) -> str:
    """States, volume and step time of each stage compared with DDP, and the fastest that trains under each limit."""
    cells = _cells(root / "stages")
    ddp = cells["ddp"]
    costs = [f"DDP: {ddp.states_bytes / MIB:.1f} MiB of model states per rank, {ddp.volume_psi:.2f} ψ per step"]
    for name in ("zero1", "zero2", "zero3"):
        one = cells[name]
        size = f"{one.states_bytes / MIB:.1f} MiB ({_signed(one.states_bytes / ddp.states_bytes - 1)})"
        costs.append(f"{spec_of(name).label}: {size}, {one.volume_psi:.2f} ψ")
    setting = f"{ddp.model} (ψ = {ddp.psi / 1e6:.1f} M, fp32, N = {ddp.world_size}, {ddp.cores} cores)"
    said = [f"Measured on {setting}:", "", *(f"- {cost}" for cost in costs), "", recorded(root, "stages"), ""]
    return "\n".join([*said, *_step_times(root), "", *_under_limits(root), "", recorded(root, "memory_cap")])


def _step_times(root: Path) -> list[str]:
    """Step times over DDP's, from interleaved launches: those of one launch each differ by chance."""
    ratios = pd.read_parquet(root.parent.parent / "compare" / root.name / "ratios.parquet")
    ratios = ratios[(ratios["metric"] == "step_s") & (ratios["peer"] == "ddp")]
    lines = [
        "Step time over DDP's, from interleaved launches with 95 % intervals (none: a single launch), `make compare` "
        "(DDP with `gradient_as_bucket_view=true`, which is not torch's default):",
        "",
    ]
    for setting, mine in ratios.groupby("setting", sort=False):
        times = (
            f"{spec_of(one.ours).label} {one.ratio:.2f}"
            + (f" ({one.low:.2f}–{one.high:.2f})" if pd.notna(one.low) else "")
            for one in mine.itertuples()
        )
        lines.append(f"- {setting}: {', '.join(times)}")
    return lines


def _under_limits(root: Path) -> list[str]:
    searches = load(root / "memory_cap").searches.sort_values(["limit_bytes", "strategy"])
    words = []
    for limit, mine in searches.groupby("limit_bytes"):
        found = mine[mine["status"] == "found"].sort_values("tokens_per_s", ascending=False)
        out = [spec_of(name).label for name in mine[mine["status"] != "found"]["strategy"]]
        if found.empty:
            words.append(f"- {show_bytes(limit)}: nothing fits")
            continue
        best = [f"{spec_of(one.strategy).label} {one.tokens_per_s:.0f}" for one in found.itertuples()]
        rest = f"; not {' or '.join(out)}" * bool(out)
        words.append(f"- {show_bytes(limit)}: {', '.join(best)}{rest}")
    first = searches.iloc[0]
    what = f"{first.model}, N = {first.world_size}, batch {first.batch} × {first.sequence}"
    return [f"The fastest that fits under a memory limit per rank ({what}), tokens/s:", "", *words]


def stages(root: Path) -> str:
    """The table of the main job, and where it comes from."""
    cells = _cells(root / "stages")
    lines = [
        "| strategy | peak MiB | states MiB | predicted | volume ψ | predicted | step ms | tokens/s | loss |",
        "| --- | --: | --: | --: | --: | --: | --: | --: | --: |",
    ]
    for run in cells.values():
        sizes = (run.peak_bytes, run.states_bytes, run.predicted_states_bytes)
        step = f"{run.step_s * 1000:.0f} ({run.step_s_low * 1000:.0f}–{run.step_s_high * 1000:.0f})"
        shown = [run.strategy, *(f"{size / MIB:.1f}" for size in sizes), f"{run.volume_psi:.3f}"]
        shown += [f"{run.predicted_volume_psi:.3f}", step, f"{run.tokens_per_s:.0f}", f"{run.loss_last:.4f}"]
        lines.append(pipes(shown))
    first = next(iter(cells.values()))
    source = (
        f"{first.model}, ψ = {int(first.psi):,}, N = {first.world_size}, {first.batch} sequences of {first.sequence} "
        f"tokens per step, {first.precision}, {first.optimizer}; {first.cores} cores, torch {first.torch_version}. "
        f"Medians of the slowest rank with their 95 % intervals over its steps. `{first.command}`"
    )
    return "\n".join([*lines, "", source])


def memory_cap(root: Path) -> str:
    """The fastest way to train of each strategy under each limit."""
    searches = load(root / "memory_cap").searches.sort_values(["limit_bytes", "strategy"])
    lines = [
        "| limit per rank | strategy | micro-batch × accumulation | peak | tokens/s (95 % interval) |",
        "| --: | --- | --- | --: | --: |",
    ]
    for one in searches.itertuples():
        limit = show_bytes(one.limit_bytes)
        if one.status != "found":
            lines.append(pipes([limit, one.strategy, f"nothing fits: {one.reason}", "–", "–"]))
            continue
        how = f"{one.micro_batch} × {one.accumulation}" + ", recomputed" * bool(one.checkpointing)
        interval = "" if pd.isna(one.tokens_per_s_low) else f" ({one.tokens_per_s_low:.0f}–{one.tokens_per_s_high:.0f})"
        lines.append(pipes([limit, one.strategy, how, show_bytes(one.peak_bytes), f"{one.tokens_per_s:.0f}{interval}"]))
    return "\n".join(lines)


def compare(root: Path) -> str:
    """The ratios to the peers, which stand beside the reference by the same device's name."""
    folder = root.parent.parent / "compare" / root.name
    if not (folder / "ratios.md").is_file():
        return "No comparison is on record for this version yet; `make compare` makes one."
    figure = f"![Ours over the peers]({folder.relative_to(root.parents[2])}/compare.png)"
    return (folder / "ratios.md").read_text().rstrip() + f"\n\n{figure}"


OFFLOADED = {(False, False): "nothing", (False, True): "gradients", (True, False): "optimizer", (True, True): "both"}


def offload(root: Path) -> str:
    """Bytes per parameter by tier and link, of every part that leaves and every stage."""
    lines = [
        "| | leaves | device, formula | kept | with buffers in flight | host memory | down | up |",
        "| --- | --- | --: | --: | --: | --: | --: | --: |",
    ]
    results = load(root / "offload")
    for run in summarize(results.runs).sort_values(["world_size", "strategy"], kind="stable").itertuples():
        section = json.loads(run.config).get("offload", {})
        leaves = OFFLOADED[section.get("optimizer", False), section.get("gradients", False)]
        others = (run.states_bytes, run.host_states_bytes, run.down_bytes, run.up_bytes)
        sizes = [run.floor_states_bytes / run.psi, parts_of(results, run)["device"], *(s / run.psi for s in others)]
        lines.append(pipes([f"{run.strategy}, N = {run.world_size}", leaves, *(f"{size:.2f}" for size in sizes)]))
    return "\n".join(lines)


def infinity(root: Path) -> str:
    """Bytes by tier as the model grows, and bytes that a step moves."""
    lines = [
        "| ψ | states on the device | host memory, peak | in files | read, both ranks | written, both "
        "| down, both | up, both |",
        "| --: | --: | --: | --: | --: | --: | --: | --: |",
    ]
    for run in load(root / "infinity").runs.sort_values("psi").itertuples():
        columns = ("states", "host_peak", "nvme", "read", "write", "down", "up")
        sizes = [f"{getattr(run, f'{name}_bytes') / MIB:.1f} MiB" for name in columns]
        lines.append(pipes([f"{run.psi / 1e6:.1f} M", *sizes]))
    return "\n".join(lines)


def delayed(root: Path) -> str:
    """Loss that the delayed update costs."""
    results, means = load(root / "delayed"), {}
    for run in summarize(results.runs).itertuples():
        section = json.loads(run.config)["offload"]
        means["delayed" if section["delayed"] else "as it is"] = float(losses(results, run).iloc[-50:].mean())
    exact = means.pop("as it is")
    late = [f"{mean:.3f} {name} ({mean - exact:+.3f})" for name, mean in means.items()]
    return f"Mean loss of the last 50 steps: {exact:.3f} as it is, {', '.join(late)}."


def low_bit(root: Path) -> str:
    """Bytes of each optimizer's states, by theory and measured, and its losses less AdamW's."""
    lines = [
        "| optimizer | states, bytes per parameter | measured on a rank of 2 | last 50 losses, mean | minus adamw's |",
        "| --- | --: | --: | --: | --: |",
    ]
    results, budget = load(root / "low_bit"), read_budget(root.parent.parent / "budgets/low_bit.yaml")
    cells = [item for one in budget.environments.values() for item in one.cells.items()]
    held = {next((name for name in OPTIMIZERS if name in label.split()), "adamw"): cell for label, cell in cells}
    usual = None
    for run in summarize(results.runs).itertuples():
        name, mean = json.loads(run.config)["optimizer"]["name"], float(losses(results, run).iloc[-50:].mean())
        usual = mean if usual is None else usual
        psi, shape = 2**20, OPTIMIZERS[name](implementation="loop").theory_shape()
        size = f"{int(held[name].limits['max_optimizer_bytes'].value):,} bytes"
        each = f"{shape.states_bytes(psi, 4) / psi:g}"
        lines.append(pipes([name, each, size, f"{mean:.4f}", f"{mean - usual:+.4f}"]))
    return "\n".join(lines)


def kills(root: Path) -> str:
    """Each recorded campaign of kills."""
    rows = read_rows(root.parent.parent / "kills/kills.csv", KillsRow)
    names = [name for name in KillsRow.__annotations__ if name not in ("commit", "date")]
    lines = [pipes([name.replace("_", " ") for name in names]), "|" + " --: |" * len(names)]
    lines += [pipes([str(getattr(row, name)) for name in names]) for row in rows]
    recorded = ", ".join(f"seed {row.seed} on {row.date} (commit `{row.commit[:7]}`)" for row in rows)
    return "\n".join([*lines, "", f"Recorded: {recorded}."])


def largest_model(root: Path) -> str:
    """Returns the largest model for each strategy and device, and ZeRO's Table 2 beside what was executed."""
    rows = read(root.parent.parent / "largest_model")
    said = "ZeRO's Table 2 (64 GPUs of 32 GB, no model parallelism), and simulated cells of the same world:"
    paper = table_2(rows)
    return "\n".join([table(rows), *([said, "", paper] if paper else [])]).strip()


def dated(make: Callable[[Path], str], experiment: str) -> Callable[[Path], str]:
    """Returns `make` with a sentence below its block on the code that recorded the experiment's runs."""
    return lambda root: f"{make(root)}\n\n{recorded(root, experiment)}"


EXPERIMENT = {"stage_bytes": "stages", "stage_traffic": "stages"}
"""Block -> the experiment that its runs are of, where the block has another name."""

UNDATED = (
    "answer",
    "compare",
    "peer_bytes",
    "peer_volume",
    "codes",
    "kills",
    "step_costs",
    "step_costs_link",
    "versions",
    *blocks_reference.BLOCKS,
    *blocks_strategies.BLOCKS,
    *blocks_table1.BLOCKS,
    *blocks_validated.BLOCKS,
    "largest_model",
    *blocks_published.BLOCKS,
    *blocks_predicted.BLOCKS,
    *blocks_gpu.BLOCKS,
)
"""Blocks that are of no experiment below the reference, or say their date themselves."""

MADE: dict[str, Callable[[Path], str]] = {
    "answer": answer,
    "stages": stages,
    "memory_cap": memory_cap,
    "compare": compare,
    "offload": offload,
    "infinity": infinity,
    "offload_time": offload_time,
    "delayed": delayed,
    "low_bit": low_bit,
    "step_costs": step_costs,
    "step_costs_link": step_costs_link,
    "kills": kills,
    "largest_model": largest_model,
    **blocks_systems.BLOCKS,
    **blocks_stages.BLOCKS,
    **blocks_versions.BLOCKS,
    **blocks_table1.BLOCKS,
    **blocks_validated.BLOCKS,
    **blocks_published.BLOCKS,
    **blocks_predicted.BLOCKS,
    **blocks_gpu.BLOCKS,
    **blocks_reference.BLOCKS,
    **blocks_strategies.BLOCKS,
    **blocks_training.BLOCKS,
}
BLOCKS = {name: make if name in UNDATED else dated(make, EXPERIMENT.get(name, name)) for name, make in MADE.items()}
"""Block -> what makes it, with its date."""


def _cells(folder: Path) -> dict[str, Any]:
    return {str(cell.strategy): cell for cell in summarize(load(folder).runs).itertuples()}


def _signed(share: float) -> str:
    return f"{'+' if share >= 0 else '−'}{abs(share):.0%}".replace("%", " %")
