"""Blocks on what people train with: settings by stage, accumulation, compiled blocks, Muon (see blocks.py)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from tools.docs.blocks_stages import name_of
from tools.docs.blocks_systems import MIB, cells_of, pipes
from tools.docs.committed import load
from zerobench.plots.losses import losses
from zerobench.plots.panels import rows_of
from zerobench.results.summary import summarize
from zerobench.results.tables import Results
from zerobench.strategies import spec_of
from zerobench.theory.closed_forms import volume_formula
from zerobench.theory.shapes import ParameterShape, Schedule
from zerobench.theory.strategy import StrategyShape

FP32 = 4
"""Bytes of a parameter, and of a gradient, in these runs; twice that are the optimizer's."""

TORCH = {
    "ddp": "torch DDP", "zero_redundancy": "ZeroRedundancyOptimizer", "zero1": "ours", "zero2": "ours", "zero3": "ours",
    "megatron": "ours, as Megatron-core's `--use-distributed-optimizer`",
    "fsdp2": "FSDP2 `reshard_after_forward=True`", "fsdp2_no_reshard": "FSDP2 `reshard_after_forward=False`",
    "deepspeed_zero1": "DeepSpeed `stage: 1`", "deepspeed_zero2": "DeepSpeed `stage: 2`",
    "deepspeed_zero3": "DeepSpeed `stage: 3`",
}  # fmt: skip
"""Strategy -> the setting of its library."""

STAGE_OF = {
    (False, False, False): "none: DDP", (False, False, True): "ZeRO-1", (False, True, True): "ZeRO-2",
    (True, True, True): "ZeRO-3",
}  # fmt: skip
"""Which of parameters (between forward and backward), gradients and optimizer states are partitioned -> the stage."""


def settings(root: Path) -> str:
    """Bytes that a rank holds under each setting, and the stage that they are."""
    head = ["setting", "strategy here", "parameters in backward", "between steps", "gradients", "optimizer"]
    lines = [pipes([*head, "volume ψ", "that is"]), "| --- | --- |" + " --: |" * 5 + " --- |"]
    ours, theirs = load(root / "settings"), load(root.parent.parent / "compare" / root.name / "compare_n4")
    others = theirs.runs["strategy"].str.startswith("deepspeed")
    for results, runs in ((ours, ours.runs), (theirs, theirs.runs[others])):
        lines += [_setting(results, cell) for cell in summarize(runs).itertuples()]
    first, other = ours.runs.iloc[0], theirs.runs[others].iloc[0]
    said = f"{first.model}, ψ = {first.psi:,}, N = {first.world_size}, {first.precision}, {first.optimizer}"
    early = f"DeepSpeed on {other.started[:10]} (commit `{other.commit[:7]}`, batch {other.batch})"
    return "\n".join([*lines, "", f"{said}; bytes per parameter. {early}."])


def _setting(results: Results, cell: Any) -> str:
    timeline, memory = rows_of(results, "timeline", cell), rows_of(results, "memory", cell)
    last = timeline[(timeline["phase"] == "forward") & (timeline["rank"] == 0)].sort_values("instant").iloc[-1]
    update = memory[(memory["phase"] == "update") & (memory["category"] == "parameters") & (memory["rank"] == 0)]
    held = {
        "parameters": last["parameters_bytes"], "between": update["max_bytes"].iloc[0],
        "gradients": cell.max_gradients_bytes, "optimizer": cell.max_optimizer_bytes,
    }  # fmt: skip
    each = {name: size / cell.psi for name, size in held.items()}
    section = json.loads(cell.config)["strategy"]
    words = TORCH[cell.strategy]
    if few := section.get("reshard_ranks"):
        words = words.replace("True", str(few))
    numbers = [f"{size:.2f}" for size in each.values()] + [f"{cell.volume_psi:.2f}"]
    return pipes([words, f"`{name_of(cell)}`", *numbers, stage_of(each, cell.world_size)])


def stage_of(each: dict[str, float], ranks: int) -> str:
    """The stage of what is held, in bytes per parameter: nearer to 1/N of it than to all of it is partitioned."""
    wholes = {"parameters": FP32, "gradients": FP32, "optimizer": 2 * FP32}
    parts = tuple(each[name] < whole * (1 + 1 / ranks) / 2 for name, whole in wholes.items())
    stage = STAGE_OF.get(parts, "none of them")
    if not parts[0] and each["parameters"] < 0.9 * FP32:
        return "between ZeRO-2 and ZeRO-3"
    if not parts[0] and each["between"] < FP32 * (1 + 1 / ranks) / 2:
        stage += ", parameters partitioned between steps"
    return stage


def accumulation(root: Path) -> str:
    """Traffic of a step with m micro-batches, and the gradients that are held between them, beside formulas."""
    head = ["strategy", "reduced", "m", "volume ψ", "formula", "gradients between micro-batches", "formula", "states"]
    lines = [pipes(head), "| --- | --- |" + " --: |" * 6]
    results = load(root / "accumulation")
    for cell, config in cells_of(root / "accumulation"):
        policy, m, memory = config["strategy"]["accumulate"], cell.accumulation, rows_of(results, "memory", cell)
        forward = memory[(memory["phase"] == "forward") & (memory["category"] == "gradients")]
        held = forward["max_bytes"].max() / cell.psi
        formula = (_volume(cell.strategy, policy, m), _gradients(cell.strategy, policy, cell.world_size))
        numbers = [f"{m}", f"{cell.volume_psi:.2f}", f"{formula[0]}", f"{held:.2f}", f"{formula[1]:.2f}"]
        lines.append(pipes([f"`{cell.strategy}`", policy, *numbers, f"{cell.states_bytes / MIB:.1f} MiB"]))
    said = f"{cell.model}, ψ = {cell.psi:,}, N = {cell.world_size}, {cell.precision}"
    return "\n".join([*lines, "", f"{said}; gradients in bytes per parameter."])


def _gradients(name: str, policy: str, ranks: int) -> float:
    """Bytes per parameter; DDP's buckets are beside its gradients while it does not reduce."""
    if name == "ddp":
        return FP32 * (1 + (policy == "last"))
    return FP32 if policy == "last" or name == "zero1" else FP32 / ranks


def _volume(name: str, policy: str, micro_batches: int) -> int:
    """The closed form of the strategy, or of our stage that partitions the same states, in ψ."""
    spec = spec_of(name)
    theory = spec.theory or spec_of(str(spec.partitions_as)).theory
    assert theory is not None
    one = ParameterShape(numel=1, element_bytes=FP32, trainable=True, unit="block")
    shape = StrategyShape.of(theory, {"accumulate": policy})
    return volume_formula(shape, Schedule.sequential([one], micro_batches), 2).value


def compile_blocks(root: Path) -> str:
    """Losses, peak and step of each strategy, eager and compiled."""
    head = ["strategy", "losses differ by", "from DDP's, compiled", "peak, eager", "compiled"]
    lines = [pipes([*head, "step, eager", "compiled", "ratio"]), "| --- |" + " --: |" * 8]
    results = load(root / "compile")
    pairs = list(_pairs(results))
    reference = losses(results, pairs[0][1])
    for eager, compiled in pairs:
        mine = losses(results, compiled)
        gaps = [float((mine - other).abs().max()) for other in (losses(results, eager), reference)]
        peaks = [f"{cell.peak_bytes / MIB:.1f} MiB" for cell in (eager, compiled)]
        steps = [f"{cell.step_s * 1000:.0f} ms" for cell in (eager, compiled)]
        shown = [f"{gap:.1e}" if gap else "0" for gap in gaps]
        lines.append(pipes([f"`{eager.strategy}`", *shown, *peaks, *steps, f"{compiled.step_s / eager.step_s:.2f}"]))
    said = f"{eager.model}, N = {eager.world_size}, batch {eager.batch} × {eager.sequence}, {eager.precision}"
    return "\n".join([*lines, "", f"{said}, {eager.cores} cores, torch {eager.torch_version}; medians of a step."])


def _pairs(results: Results) -> Iterator[tuple[Any, Any]]:
    cells = summarize(results.runs)
    compiled = cells["config"].map(lambda text: json.loads(text).get("compile", "none") != "none")
    for name in dict.fromkeys(cells["strategy"]):
        mine = cells["strategy"] == name
        yield next(cells[mine & ~compiled].itertuples()), next(cells[mine & compiled].itertuples())


def muon(root: Path) -> str:
    """Optimizer states, model states and volume with AdamW and with Muon, and Newton-Schulz calls of a step."""
    head = ["optimizer", "strategy", "optimizer states, bytes per parameter", "model states", "predicted", "volume ψ"]
    lines = [pipes([*head, "matrices", "Newton-Schulz calls", "balance"]), "| --- | --- |" + " --: |" * 7]
    for cell, config in cells_of(root / "muon"):
        sizes = [f"{size / MIB:.2f} MiB" for size in (cell.states_bytes, cell.predicted_states_bytes)]
        each = f"{cell.max_optimizer_bytes / cell.psi:.2f}"
        counts = [cell.newton_schulz_matrices, cell.newton_schulz_calls]
        calls = ["–" if pd.isna(count) else f"{count:.0f}" for count in counts]
        balance = "–" if pd.isna(cell.newton_schulz_balance) else f"{cell.newton_schulz_balance:.3f}"
        name = config["optimizer"]["name"]
        lines.append(pipes([name, f"`{cell.strategy}`", each, *sizes, f"{cell.volume_psi:.3f}", *calls, balance]))
    return "\n".join([*lines, "", f"{cell.model}, ψ = {cell.psi:,}, N = {cell.world_size}, {cell.precision}."])


BLOCKS: dict[str, Callable[[Path], str]] = {
    "settings": settings, "accumulation": accumulation, "compile": compile_blocks, "muon": muon,
}  # fmt: skip
"""Block -> what makes it."""
