"""Rows and sentences for the blocks on measured runs that need more than the columns of a summary.

A function is named as its block. It returns rows for the block's template in blocks.md, or the Markdown itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pandas as pd

from tools.docs.recorded import COMPARED, REFERENCE, RESULTS, beside, cells, load, recorded
from tools.docs.render import MiB, paragraph, render
from zerobench.budgets.budget_file import read_budget
from zerobench.config.schema_training import OPTIMIZERS
from zerobench.plots.panels import cell_rows
from zerobench.plots.steps import mean_losses
from zerobench.records import STATES
from zerobench.results.selection import latest
from zerobench.results.tables import Results
from zerobench.sizes import show_bytes
from zerobench.strategies import spec_of
from zerobench.theory.closed_forms import volume_formula
from zerobench.theory.shapes import ParameterShape, Schedule
from zerobench.theory.strategy import StrategyShape

# -- stages and peers ------------------------------------------------------------------------------


def answer() -> str:
    """States, volume and step time of each stage compared with DDP, and the fastest that trains under each limit."""
    ddp, *stages = cells(REFERENCE / "stages")
    lines = [f"Measured on {ddp.model} (ψ = {ddp.psi / 1e6:.1f} M, fp32, N = {ddp.world_size}, {ddp.cores} cores):", ""]
    lines.append(f"- DDP: {ddp.states_bytes / MiB:.1f} MiB of model states per rank, {ddp.volume_psi:.2f} ψ per step")
    for cell in stages:
        less = f"{cell.states_bytes / ddp.states_bytes - 1:+.0%}".replace("-", "−").replace("%", " %")
        size = f"{cell.states_bytes / MiB:.1f} MiB ({less})"
        lines.append(f"- {spec_of(cell.strategy).label}: {size}, {cell.volume_psi:.2f} ψ")
    lines += ["", recorded("stages"), "", *_step_times(), "", *_under_limits(), "", recorded("memory_cap")]
    return "\n".join(lines)


def answer_times() -> str:
    """How long README's first commands took with the code measured last, whose rows come first."""
    seconds = pd.read_csv(RESULTS / "answer_times.csv").drop_duplicates("command").set_index("command")["median"]
    first = {"plan": "plan, README", "estimate": "estimate, 124M, 5 strategies", "predict": "predict, 1.5B"}
    times = ", ".join(f"`{verb}` in {seconds[name]:.0f} s" for verb, name in first.items())
    return (
        f"On two cores the first three commands answer: {times}; {seconds['import torch']:.1f} s of each import torch."
    )


def _step_times() -> Iterator[str]:
    """Step times over DDP's, from interleaved launches: those of one launch each differ by chance."""
    ratios = pd.read_parquet(COMPARED / "ratios.parquet")
    ratios = ratios[(ratios["metric"] == "step_s") & (ratios["peer"] == "ddp")]
    yield (
        "Step time over DDP's, from interleaved launches with 95 % intervals (none: a single launch), `make compare` "
        "(DDP with `gradient_as_bucket_view=true`, which is not torch's default):\n"
    )
    for setting, rows in ratios.groupby("setting", sort=False):
        times = [
            f"{spec_of(row.ours).label} {row.ratio:.2f}"
            + (f" ({row.low:.2f}–{row.high:.2f})" if pd.notna(row.low) else "")
            for row in rows.itertuples()
        ]
        yield f"- {setting}: {', '.join(times)}"


def _under_limits() -> Iterator[str]:
    searches = load(REFERENCE / "memory_cap").searches.sort_values(["limit_bytes", "strategy"])
    first = searches.iloc[0]
    setting = f"{first.model}, N = {first.world_size}, batch {first.batch} × {first.sequence}"
    yield f"The fastest that fits under a memory limit per rank ({setting}), tokens/s:\n"
    for limit, rows in searches.groupby("limit_bytes"):
        fits = rows[rows["status"] == "found"].sort_values("tokens_per_s", ascending=False)
        best = [f"{spec_of(row.strategy).label} {row.tokens_per_s:.0f}" for row in fits.itertuples()]
        others = [spec_of(name).label for name in rows[rows["status"] != "found"]["strategy"]]
        rest = f"; not {' or '.join(others)}" * bool(others)
        yield f"- {show_bytes(limit)}: {', '.join(best) or 'nothing fits'}{rest * bool(best)}"


def memory_cap() -> Iterator[Any]:
    """The fastest way to train of each strategy under each limit."""
    searches = load(REFERENCE / "memory_cap").searches.sort_values(["limit_bytes", "strategy"])
    for row in searches.to_dict("records"):
        how = f"{row['micro_batch']} × {row['accumulation']}"
        how += ", recomputed" * (row["status"] == "found" and bool(row["checkpointing"]))
        yield SimpleNamespace(**row, how=how if row["status"] == "found" else f"nothing fits: {row['reason']}")


def stage_traffic() -> Iterator[Any]:
    """Traffic of a step of each stage: phase, collective, elements."""
    results = load(REFERENCE / "stages")
    for run in latest(results.runs).drop_duplicates("cell_id").itertuples():
        rows = results.traffic[(results.traffic["run_id"] == run.run_id) & (results.traffic["rank"] == 0)]
        rows = rows[(rows["step"] == rows["step"].max()) & ~rows["control"]]
        for (phase, operator, collective), same in rows.groupby(["phase", "operator", "collective"], sort=True):
            sums = same[["calls", "elements", "volume_elements"]].sum().to_dict()
            kind = str(collective or same["kind"].iloc[0]).replace("_", "-")
            yield SimpleNamespace(
                **sums, strategy=run.strategy, psi=run.psi, phase=phase, operator=operator, collective=kind
            )


# -- tiers, groups, ZeRO++, ZeRO-R -----------------------------------------------------------------

OFFLOADED = {(False, False): "nothing", (False, True): "gradients", (True, False): "optimizer", (True, True): "both"}


TIERS = ("device", "device, in flight", "host memory", "files")


def parts_of(results: Results, cell: Any) -> dict[str, float]:
    """Bytes a parameter by tier; those on the device at the instant when its states are most."""
    memory = cell_rows(results, "memory", cell)
    memory = memory[(memory["phase"] == "step") & (memory["tier"] == "device")]
    fullest = memory[memory["category"] == "states"].sort_values("max_bytes").iloc[-1]
    of_rank = memory[(memory["run_id"] == fullest["run_id"]) & (memory["rank"] == fullest["rank"])]
    sizes = of_rank.set_index("category")["at_states_peak_bytes"]
    kept = sum(int(sizes[name]) for name in STATES if name != "communication")
    parts = (kept, int(sizes["communication"]), cell.host_states_bytes, cell.nvme_bytes)
    return {name: 0.0 if pd.isna(size) else size / cell.psi for name, size in zip(TIERS, parts, strict=True)}


def offload() -> Iterator[Any]:
    """Bytes per parameter by tier and link, of every part that leaves and every stage."""
    results = load(REFERENCE / "offload")
    for cell in cells(REFERENCE / "offload", "world_size", "strategy"):
        cell.leaves = OFFLOADED[bool(cell.config.offload.optimizer), bool(cell.config.offload.gradients)]
        cell.kept = parts_of(results, cell)["device"]
        yield cell


def offload_time() -> Iterator[Any]:
    """Step time by where the optimizer is, over that of all on the device."""
    results = load(REFERENCE / "offload_time")
    by_states = sorted(cells(REFERENCE / "offload_time"), key=lambda cell: -cell.states_bytes)
    for cell in by_states:
        parts = parts_of(results, cell)
        cell.device, cell.host, cell.files = parts["device"], parts["host memory"], parts["files"]
        offload, fraction = cell.config.offload, cell.config.offload.get("fraction", 1)
        words = [f"offload={offload.name or 'none'}"] + [f"fraction={fraction:g}"] * (fraction < 1)
        cell.offloaded, cell.base = " ".join(words + ["delayed"] * bool(offload.delayed)), by_states[0]
        yield cell


def delayed() -> str:
    """Loss that the delayed update costs."""
    results = load(REFERENCE / "delayed")
    by_delay = sorted(cells(REFERENCE / "delayed"), key=lambda cell: bool(cell.config.offload.delayed))
    usual, late = (float(mean_losses(results, cell).iloc[-50:].mean()) for cell in by_delay)
    return f"Mean loss of the last 50 steps: {usual:.3f} as it is, {late:.3f} delayed ({late - usual:+.3f})."


def low_bit() -> Iterator[Any]:
    """Bytes of each optimizer's states, by theory and measured, and its losses minus AdamW's."""
    results, budget = load(REFERENCE / "low_bit"), read_budget(RESULTS / "budgets/low_bit.yaml")
    limits = {
        next((name for name in OPTIMIZERS if name in label.split()), "adamw"): cell.limits
        for environment in budget.environments.values()
        for label, cell in environment.cells.items()
    }
    usual, psi = None, 2**20
    for cell in cells(REFERENCE / "low_bit"):
        name = cell.config.optimizer.name
        cell.loss = float(mean_losses(results, cell).iloc[-50:].mean())
        cell.usual = usual = cell.loss if usual is None else usual
        cell.bytes_per_parameter = OPTIMIZERS[name](implementation="loop").theory_shape().states_bytes(psi, 4) / psi
        cell.measured_bytes = int(limits[name]["max_optimizer_bytes"].value)
        yield cell


def gradient_dtype() -> str:
    """Losses with gradients of several micro-batches summed in bf16 and in fp32."""
    results, both = load(REFERENCE / "gradient_dtype"), cells(REFERENCE / "gradient_dtype")
    curves = {cell.config.precision.gradient_dtype: mean_losses(results, cell).astype("float64") for cell in both}
    low, high = (curves[dtype].iloc[-10:].mean() for dtype in ("bf16", "fp32"))
    largest = (curves["bf16"] - curves["fp32"]).abs().max()
    return paragraph("gradient_dtype", cell=both[0], steps=len(curves["fp32"]), low=low, high=high, largest=largest)


def outside_ledger() -> str:
    """The largest share of a peak in bf16 that only the allocator sees, of all budgets, which `make budget` checks."""
    shares = [
        (*(int(cell.limits[f"{key}_bytes"].value) for key in ("outside_ledger", "allocator_peak")), name, path.name)
        for path in sorted((RESULTS / "budgets").glob("*.yaml"))
        for environment in read_budget(path).environments.values()
        for name, cell in environment.cells.items()
        if "bf16" in name.split()
    ]
    outside, peak, name, file = max(shares, key=lambda share: share[0] / share[1])
    return paragraph("outside_ledger", number=len(shares), outside=outside, peak=peak, name=name, file=file)


def nodes() -> Iterator[Any]:
    """Flat collectives, and the same in two hops.

    Of what a flat exchange sends, the part to ranks of other nodes counts as sent to others.
    """
    both = cells(REFERENCE / "nodes", "strategy")
    size = next(cell.config.node_size for cell in both if "node_size" in cell.config)
    for cell in both:
        hops = "node_size" in cell.config
        cell.collectives, cell.size = "in two hops" if hops else "flat", size
        flat = (cell.world_size - size) / max(1, cell.world_size - 1) * cell.wire_bytes
        cell.crossing = (cell.between_nodes_bytes if hops else flat) * size
        yield cell


def shard_group() -> list[Any]:
    """States and volume of zero3 by the ranks that share a shard."""
    stage3 = [cell for cell in cells(REFERENCE / "shard_group") if cell.strategy == "zero3"]
    return sorted(stage3, key=lambda cell: cell.config.shard_group)


LAST = 20
"""Steps of ZeRO++ whose losses are averaged."""


def zeropp(experiment: str = "zeropp") -> Iterator[Any]:
    """Bytes between nodes, states and losses, by the parts of ZeRO++; the gap is to plain zero3's loss."""
    plain = next(cell for cell in cells(REFERENCE / "zeropp") if "zeropp" not in cell.config)
    exact = _last_loss(load(REFERENCE / "zeropp"), plain)
    for cell in cells(REFERENCE / experiment):
        section = cell.config.zeropp
        is_qgz = section.name == "hpz" and (section.quantize_weights or section.quantize_gradients)
        parts = [(section.name or "none") + " + qgz" * bool(is_qgz)]
        parts += [f"{section.bits_within} bits within a node"] if (section.bits_within or 4) != 4 else []
        cell.parts = ", ".join(parts + ["differences"] * bool(section.differences))
        cell.node_size, cell.exact = cell.config.node_size, exact
        cell.loss = _last_loss(load(REFERENCE / experiment), cell)
        yield cell


def zeropp_error() -> str:
    """The same by the options of quantization."""
    return render("zeropp", zeropp("zeropp_error"))


def _last_loss(results: Results, cell: Any) -> float:
    return float(mean_losses(results, cell, "accounted").iloc[-LAST:].mean())


def activation() -> list[Any]:
    """Peaks by tier and step times of the policies, stage by stage."""

    def policy(cell: Any) -> str:
        return str(cell.config.activation.name or ("checkpoint" if cell.checkpointing else "none"))

    return beside(cells(REFERENCE / "activation", "strategy"), policy, lambda cell: cell.strategy)


def buffers() -> list[Any]:
    """Communication at its maximum, constant and fused, as the model grows."""
    kind = lambda cell: cell.config.buffers.name or "constant"  # noqa: E731
    return beside(cells(REFERENCE / "buffers", "psi"), lambda cell: cell.psi, kind)


def arena() -> str:
    """Allocations of a step that outlive their phase, and the peak, without slots and with them."""
    rows = cells(REFERENCE / "arena", "strategy")
    for cell in rows:
        memory = cell_rows(load(REFERENCE / "arena"), "memory", cell)
        of_step = memory[(memory["phase"] == "step") & (memory["tier"] == "device")].dropna(subset=["lasting"])
        most = of_step.groupby("category")[["allocations", "lasting"]].max()  # of any rank
        cell.allocations, cell.lasting = most["allocations"].to_dict(), most["lasting"].to_dict()
    pairs = beside(rows, lambda cell: cell.strategy, lambda cell: "slots" if cell.config.arena else "plain")
    spared = [sum(pair.plain.lasting.values()) - sum(pair.slots.lasting.values()) for pair in pairs]
    dearer = [pair.slots.peak_bytes / pair.plain.peak_bytes - 1 for pair in pairs]
    return (
        f"{render('arena', rows)}\n\nIt spares {min(spared):.0f} to {max(spared):.0f} lasting allocations per step, "
        f"and costs {min(dearer):.0%} to {max(dearer):.0%} of the peak."
    )


# -- what people train with ------------------------------------------------------------------------

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


def settings() -> Iterator[Any]:
    """Bytes that a rank holds under each setting, and the stage that they are."""
    ours, peers = REFERENCE / "settings", COMPARED / "compare_n4"
    deepspeed = [cell for cell in cells(peers) if cell.strategy.startswith("deepspeed")]
    for folder, rows in ((ours, cells(ours)), (peers, deepspeed)):
        for cell in rows:
            cell.other, cell.each = deepspeed[0], _held(load(folder), cell)
            cell.stage = stage_of(cell.each, cell.world_size)
            ranks = cell.config.strategy.reshard_ranks
            cell.setting = TORCH[cell.strategy].replace("True", str(ranks or True))
            yield cell


def _held(results: Results, cell: Any) -> dict[str, float]:
    """Bytes per parameter at the end of forward (parameters), between steps, and at most."""
    timeline, memory = cell_rows(results, "timeline", cell), cell_rows(results, "memory", cell)
    last = timeline[(timeline["phase"] == "forward") & (timeline["rank"] == 0)].sort_values("instant").iloc[-1]
    update = memory[(memory["phase"] == "update") & (memory["category"] == "parameters") & (memory["rank"] == 0)]
    held = {
        "parameters": last["parameters_bytes"], "between": update["max_bytes"].iloc[0],
        "gradients": cell.max_gradients_bytes, "optimizer": cell.max_optimizer_bytes,
    }  # fmt: skip
    return {name: size / cell.psi for name, size in held.items()}


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


def accumulation() -> Iterator[Any]:
    """Traffic of a step with m micro-batches, and the gradients that are held between them, beside formulas."""
    results = load(REFERENCE / "accumulation")
    for cell in cells(REFERENCE / "accumulation"):
        policy, memory = cell.config.strategy.accumulate, cell_rows(results, "memory", cell)
        forward = memory[(memory["phase"] == "forward") & (memory["category"] == "gradients")]
        cell.gradients = forward["max_bytes"].max() / cell.psi
        whole = policy == "last"  # DDP's buckets are beside its gradients while it does not reduce
        ours = FP32 if whole or cell.strategy == "zero1" else FP32 / cell.world_size
        cell.gradients_formula = FP32 * (1 + whole) if cell.strategy == "ddp" else ours
        cell.volume_formula = volume(cell.strategy, policy, cell.accumulation)
        yield cell


def volume(name: str, policy: str, micro_batches: int) -> int:
    """The closed form of the strategy, or of our stage that partitions the same states, in ψ."""
    spec = spec_of(name)
    theory = spec.theory or spec_of(str(spec.partitions_as)).theory
    assert theory is not None
    parameter = ParameterShape(numel=1, element_bytes=FP32, trainable=True, unit="block")
    shape = StrategyShape.of(theory, {"accumulate": policy})
    return volume_formula(shape, Schedule.sequential([parameter], micro_batches), 2).value


def compile_blocks() -> list[Any]:
    """Losses, peak and step of each strategy, eager and compiled."""
    results = load(REFERENCE / "compile")
    kind = lambda cell: "compiled" if cell.config.compile else "eager"  # noqa: E731
    pairs = beside(cells(REFERENCE / "compile"), lambda cell: cell.strategy, kind)
    reference = mean_losses(results, pairs[0].compiled)
    for pair in pairs:
        compiled = mean_losses(results, pair.compiled)
        pair.gap = float((compiled - mean_losses(results, pair.eager)).abs().max())
        pair.from_ddp = float((compiled - reference).abs().max())
    return pairs
