"""Joins the records of all ranks and passes into one row: measurements, predictions, and unexplained bytes."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from statistics import fmean, median
from typing import Any

import numpy as np
import scipy

from ..config.cell import CellConfig
from ..config.world import has_times
from ..host.environment import SIMULATED
from ..predict.estimate import (
    formulas_of,
    host_bytes_beyond,
    links_of,
    links_of_states,
    norms_of,
    tensor_axis_bytes,
    training_shapes,
)
from ..predict.flops import step_flops, utilization
from ..predict.quantized_share import coded_share, units_of
from ..predict.unexplained import Accounted, Expected, unexplained
from ..probes.collective_operators import gloo_factor
from ..rank_record import RankRecord
from ..records import (
    BETWEEN,
    CATEGORIES,
    COLLECTIVES,
    DATA_AXIS,
    LINKS,
    PHASE_PEAKS,
    TENSOR_AXIS,
    MemoryRow,
    RunRow,
    StepRow,
    TrafficRow,
)
from ..sections import known
from ..strategies import predicts, shape_of
from ..theory.closed_forms import floor_bytes, to_json
from ..theory.groups import Moved
from ..theory.replay.states import predict_states
from ..theory.replay.traffic import predict_control, predict_parts
from ..theory.shapes import Schedule
from ..theory.strategy import settle

PROCESS_MEMORY = (
    "resident_bytes", "allocated_bytes", "reserved_bytes", "fragmentation_bytes", "largest_free_block_bytes",
    "split_bytes", "alloc_retries", "device_used_bytes", "pinned_requested_bytes", "pinned_bytes",
    "timed_allocator_peak_bytes",
)  # fmt: skip
"""Process memory figures from sources other than the ledger; the row has the maximum over the ranks."""

OF_ACCOUNTED = ("heap_bytes", "kept_bytes", "growth_bytes")
"""Process memory figures that only the accounted pass measures; the row has the maximum over the ranks."""


def join(row: RunRow, config: CellConfig, records: list[RankRecord], theory: bool = True) -> dict[str, list[Any]]:
    """Fills `row` from the records of all passes, and returns the rows of the other tables.

    `theory`: False for a training loop whose config lacks what a prediction needs.
    """
    timed = [record for record in records if record.mode == "timed"]
    accounted = [record for record in records if record.mode == "accounted"]
    traced = [record for record in records if record.mode == "traced"]
    passes = [one for one in (timed, accounted, traced) if one]
    for one in passes:
        _join_norms(one)
    schedule = (accounted or timed)[0].schedule
    row.psi = sum(shape.numel for shape in schedule.shapes if shape.trainable)
    memory = [m for record in accounted for m in record.memory]
    if accounted:
        _join_memory(row, memory, config.topology.ranks_per_node)
        _join_accounted(row, config, accounted)
    _join_process_memory(row, timed, accounted)
    if config.nodes == 1:  # between machines bytes travel otherwise
        _join_loopback(row, timed)
    if config.backend != SIMULATED:
        row.passes_agree = _agree(passes)
        _join_losses(row, passes[0])
        row.grad_norm_last = next((one[0].steps[-1].grad_norm for one in (accounted, timed) if one), None)
    if timed and has_times(config):
        _join_time(row, timed)
        _join_flops(row, config)
        _join_gpu(row, timed)
        _join_trace(row, traced)

    expected = Expected()
    if theory and predicts(config.strategy.values()):
        expected = join_theory(row, config, schedule, memory, (accounted or timed)[0])
    if theory and accounted:
        join_unexplained(row, config, accounted, expected)
    of_accounted = ("memory", "tensors", "lines", "traffic", "timeline", "events")
    tables = {name: [one for record in accounted for one in getattr(record, name)] for name in of_accounted}
    return {"steps": [step for record in records for step in record.steps], **tables}


def _join_accounted(row: RunRow, config: CellConfig, accounted: list[RankRecord]) -> None:
    """Fills what only the accounted pass measures, other than the ledger: process memory, traffic, quantized shares."""
    row.allocator_witness = accounted[0].witness
    for name in OF_ACCOUNTED:
        sizes = (record.process_memory.get(name) for record in accounted)
        setattr(row, name, max((size for size in sizes if size is not None), default=None))
    _join_traffic(row, accounted, config.measure.steps)
    _join_newton_schulz(row, accounted, config.measure.steps)
    if config.backend == SIMULATED and predicts(config.strategy.values()):
        join_others(row, config, accounted[0].schedule, accounted[0].rank)
    join_transport(row, accounted, config.measure.steps)
    if config.node_size is None:  # without node_size the nodes are unknown
        row.within_nodes_bytes = row.between_nodes_bytes = None
    _join_codes(row, accounted[0], config.strategy.whole_numel)


def _join_memory(row: RunRow, memory: list[MemoryRow], per_node: int) -> None:
    on_device = [m for m in memory if m.tier == "device"]
    whole = [m for m in on_device if m.phase == "step"]
    totals = [m for m in whole if m.category == "total"]
    row.peaks_of_ranks = json.dumps({m.rank: m.max_bytes for m in totals})
    worst = max(totals, key=lambda m: m.max_bytes)
    row.peak_bytes = worst.max_bytes
    row.states_bytes = max(m.max_bytes for m in whole if m.category == "states")
    for category in CATEGORIES:
        mine = [m for m in whole if m.category == category]
        setattr(row, f"max_{category}_bytes", max(m.max_bytes for m in mine))
        setattr(row, f"peak_{category}_bytes", next(m.at_peak_bytes for m in mine if m.rank == worst.rank))
        setattr(row, f"between_steps_{category}_bytes", _most(on_device, BETWEEN, category))
    for column in PHASE_PEAKS:
        setattr(row, column, _most(on_device, column.removesuffix("_peak_bytes"), "total"))
    host, files = ([m for m in memory if m.phase == "step" and m.tier == tier] for tier in ("host", "nvme"))
    host_peaks = {m.rank: m.max_bytes for m in host if m.category == "total"}
    row.host_peak_bytes, row.host_peak_all_bytes = (
        max(host_peaks.values(), default=0),
        _fullest_node(host_peaks, per_node, row.backend == SIMULATED),
    )
    row.host_states_bytes = _most(host, "step", "states") or 0
    row.nvme_bytes = _most(files, "step", "total") or 0
    row.allocator_peak_bytes = _most(whole, "step", "allocated")
    outside = [m.max_bytes for m in whole if m.category == "outside_ledger"]
    row.outside_ledger_bytes = max(outside, key=abs, default=None)


def _most(memory: list[MemoryRow], phase: str, category: str) -> int | None:
    return max((m.max_bytes for m in memory if (m.phase, m.category) == (phase, category)), default=None)


def _fullest_node(peaks: dict[int, int], per_node: int, is_simulated: bool) -> int:
    """Returns the largest sum over the `per_node` ranks of a node; all ranks of a simulated node count the same."""
    nodes: dict[int, list[int]] = {}
    for rank, peak in peaks.items():
        nodes.setdefault(rank // per_node, []).append(peak)
    alike = per_node if is_simulated else 1
    return max((sum(node) * alike for node in nodes.values()), default=0)


def _join_process_memory(row: RunRow, timed: list[RankRecord], accounted: list[RankRecord]) -> None:
    """Fills columns of process memory from the timed pass, which has no probes, if there is one."""
    for name in PROCESS_MEMORY:
        values = [record.process_memory.get(name) for record in timed or accounted]
        known = [value for value in values if value is not None]
        setattr(row, name, max(known) if known else None)
    if timed and row.device == "cuda":
        row.timed_allocator_peak_bytes = row.allocated_bytes


def _join_traffic(row: RunRow, accounted: list[RankRecord], steps: int) -> None:
    """Fills columns per step; payload is the maximum over the ranks, volume and wire bytes are means."""

    def per_step(traffic: list[TrafficRow], value: str) -> float:
        total: float = sum(getattr(t, value) for t in traffic)
        return total / steps

    ranks = [[t for t in record.traffic if t.kind not in LINKS] for record in accounted]
    for name in LINKS:  # of a simulated world's one rank: as many times, less what others move otherwise (join_others)
        mine = [[t for t in record.traffic if t.kind == name and not t.control] for record in accounted]
        moved = [per_step(traffic, "payload_bytes") for traffic in mine]
        setattr(row, f"{name}_bytes", round(sum(moved) / len(moved) * row.world_size))
    data = [[t for t in traffic if not t.control and t.axis == DATA_AXIS] for traffic in ranks]
    shared = [t for traffic in ranks for t in traffic if t.axis == TENSOR_AXIS]
    for name in ("all_reduce", "all_gather") if shared else ():
        sent = [t for t in shared if t.kind == name]
        setattr(row, f"tensor_axis_{name}_bytes", round(per_step(sent, "wire_bytes") / len(ranks)))
    control = [[t for t in traffic if t.control] for traffic in ranks]
    row.payload_bytes = round(max(per_step(traffic, "payload_bytes") for traffic in data))
    row.wire_bytes, row.within_nodes_bytes, row.between_nodes_bytes = (
        round(sum(per_step(traffic, value) for traffic in data) / len(data))
        for value in ("wire_bytes", "within_bytes", "between_bytes")
    )
    row.control_bytes = round(max(per_step(traffic, "payload_bytes") for traffic in control))
    if row.psi:
        row.volume_psi = fmean(per_step(traffic, "volume_elements") for traffic in data) / row.psi
        for name in COLLECTIVES:
            parts = [[t for t in traffic if t.kind == name] for traffic in data]
            setattr(row, f"volume_{name}_psi", fmean(per_step(part, "volume_elements") for part in parts) / row.psi)


def _join_newton_schulz(row: RunRow, accounted: list[RankRecord], steps: int) -> None:
    """Fills Muon's computation in a step; leaves None for other optimizers."""
    matrices = sum(shape.matrix is not None for shape in accounted[0].schedule.shapes)
    calls, flops = (
        [record.process_memory.get(f"newton_schulz_{name}") or 0 for record in accounted] for name in ("calls", "flops")
    )
    if matrices or any(calls):
        row.newton_schulz_matrices, row.newton_schulz_calls = matrices, sum(calls) / steps
        row.newton_schulz_flops = round(sum(flops) / steps)
        all_ranks = row.backend != SIMULATED and any(flops)
        row.newton_schulz_balance = max(flops) * len(flops) / sum(flops) if all_ranks else None


def _join_codes(row: RunRow, record: RankRecord, persistence_numel: int) -> None:
    """Fills the shares of quantized traffic from one rank, since all ranks have the same units."""
    units = units_of(record.schedule.shapes, persistence_numel)
    row.quantized_gather_share = coded_share(record.traffic, "all_gather", units)
    row.quantized_reduction_share = coded_share(record.traffic, "reduce_scatter", units)


def _join_loopback(row: RunRow, timed: list[RankRecord]) -> None:
    """Fills the mean bytes over loopback per step, warm-up included. All ranks read the same counter, at slightly
    different times.
    """
    seen = [record.process_memory.get("loopback_bytes") for record in timed]
    known = [value for value in seen if value is not None]
    if row.backend == "gloo" and known:
        row.loopback_bytes = round(median(known) / len(timed[0].steps) / len(timed))


def _join_time(row: RunRow, timed: list[RankRecord]) -> None:
    """Fills times: medians over the measured steps of each step's slowest rank."""

    def slowest(value: str) -> list[float]:
        by_step: dict[int, list[float]] = {}
        for record in timed:
            for step in record.steps:
                if not step.warmup:
                    by_step.setdefault(step.step, []).append(getattr(step, value))
        return [max(times) for times in by_step.values()]

    seconds = slowest("seconds")
    row.step_s = median(seconds)
    row.step_s_low, row.step_s_high = median_interval(seconds)
    row.forward_s, row.backward_s, row.update_s = (median(slowest(f"{p}_s")) for p in ("forward", "backward", "update"))
    steps = sum(not step.warmup for step in timed[0].steps)
    row.wall_s = max(record.wall_s or 0.0 for record in timed)
    row.tokens_per_s = row.batch * row.sequence * steps / row.wall_s if row.wall_s else None


def _join_gpu(row: RunRow, timed: list[RankRecord]) -> None:
    """Fills the GPU's state: the worst reading of any GPU."""
    states = [state for record in timed for state in record.gpu_states]

    def known(name: str) -> list[Any]:
        return [value for state in states if (value := getattr(state, name)) is not None]

    row.sm_clock_mhz = min(known("sm_clock_mhz"), default=None)
    row.sm_clock_max_mhz = min(known("sm_clock_max_mhz"), default=None)
    row.gpu_temperature_c = max(known("temperature_c"), default=None)
    row.gpu_power_w = max(known("power_w"), default=None)
    reasons = known("throttle")
    row.throttle = ", ".join(dict.fromkeys(word for one in reasons for word in one)) if reasons else None


def _join_trace(row: RunRow, traced: list[RankRecord]) -> None:
    """Fills medians over the measured steps of the traced pass, from the rank with the longest step."""
    names = ("seconds", "communication_s", "exposed_s")
    measured = [[step for step in record.steps if not step.warmup] for record in traced]
    medians = [tuple(median(getattr(step, name) for step in steps) for name in names) for steps in measured]
    if medians:
        row.traced_step_s, row.communication_s, row.exposed_s = max(medians)
    if row.communication_s and row.exposed_s is not None:
        row.overlap = 1 - row.exposed_s / row.communication_s


def _join_flops(row: RunRow, config: CellConfig) -> None:
    counted = step_flops(config)
    if counted is not None and row.step_s is not None:
        row.model_flops, row.hardware_flops = counted.model, counted.hardware
        where = row.step_s, row.device_class, config.precision.name
        row.mfu, row.hfu = (utilization(one, *where) for one in (counted.model, counted.hardware))


def median_interval(values: list[float], confidence: float = 0.95) -> tuple[float | None, float | None]:
    """Returns the confidence interval of the median by order statistics; (None, None) below 6 values."""
    interval = scipy.stats.quantile_test(values, p=0.5).confidence_interval(confidence)
    if not np.isfinite([interval.low, interval.high]).all():
        return None, None
    return float(interval.low), float(interval.high)


def _agree(passes: list[list[RankRecord]]) -> bool | None:
    """Returns whether all passes have bit-equal losses on every rank; None for a single pass."""
    first, *others = (_losses(one) for one in passes)
    return all(one == first for one in others) if others else None


def _losses(records: list[RankRecord]) -> list[tuple[int, int, str]]:
    steps: list[StepRow] = [step for record in records for step in record.steps]
    return [(s.rank, s.step, s.loss.hex()) for s in steps]


def _join_losses(row: RunRow, timed: list[RankRecord]) -> None:
    def mean_at(place: int) -> float:
        return sum(record.steps[place].loss for record in timed) / len(timed)

    row.loss_first, row.loss_last = mean_at(0), mean_at(-1)
    row.loss_scale_last = timed[0].steps[-1].loss_scale
    row.skipped_steps = sum(step.skipped for step in timed[0].steps)


def divergence(records: list[RankRecord]) -> str:
    """Returns an error message for the first non-finite loss of any rank and pass; empty if all are finite."""
    lost = [(step.step, step.rank, step.loss) for r in records for step in r.steps if not math.isfinite(step.loss)]
    if not lost:
        return ""
    number, rank, loss = min(lost, key=lambda one: one[:2])
    count = len(records[0].steps)
    return f"the loss of rank {rank} is {loss} at step {number + 1} of {count}: try a smaller optimizer.lr, or clip=1.0"


def _join_norms(records: list[RankRecord]) -> None:
    """Computes each step's norm from the ranks' parts; replicas have equal parts, which count once."""
    holders = records[0].gradient_holders
    for rows in zip(*(record.steps for record in records), strict=True):
        parts = [row.grad_squares for row in rows]
        known = [part for part in parts if part is not None]
        if len(known) == len(parts):
            for row in rows:
                row.grad_norm = math.sqrt(sum(known) / holders)


def join_theory(
    row: RunRow, config: CellConfig, schedule: Schedule, memory: list[MemoryRow], record: RankRecord
) -> Expected:
    """Fills predictions of states, traffic, control and links, and those of the memory table, for DDP and our stages;
    returns the predictions that `unexplained` compares with.
    """
    shapes, groups = training_shapes(config), config.groups
    strategy, tiers = shape_of(config.strategy.values()), config.offload.theory_shape()
    bucket_bytes = settle(strategy, schedule.shapes, groups.shard_ranks).bucket_bytes
    row.bucket_bytes = bucket_bytes if isinstance(bucket_bytes, int) else None
    place = record.rank // config.tensor_parallel
    one = place if row.backend == SIMULATED and tiers.place is None else None
    prediction = predict_states(strategy, schedule, config.data_ranks, *shapes, groups, tiers, one)
    row.predicted_states_bytes = prediction.states_bytes
    row.floor_states_bytes = floor_bytes(strategy, schedule.shapes, groups, *shapes, tiers)
    row.predicted_host_states_bytes, row.predicted_nvme_bytes = prediction.host_bytes, prediction.file_bytes
    row.formulas = to_json(formulas_of(config, schedule, prediction))
    parts: dict[str, Moved] = {}
    if row.psi:
        alone = place if (row.backend, row.device) == (SIMULATED, "cpu") else None
        parts = predict_parts(strategy, schedule, config.data_ranks, groups, shapes[1], alone)
        moved = sum(parts.values(), Moved())
        row.predicted_volume_psi = moved.volume / row.psi
        row.predicted_wire_bytes = round(moved.within + moved.between)
        if config.node_size is not None:
            row.predicted_within_nodes_bytes, row.predicted_between_nodes_bytes = (
                round(moved.within),
                round(moved.between),
            )
    row.predicted_activations_bytes = record.own_activation_bytes
    row.predicted_control_bytes = predict_control(
        strategy, schedule, config.data_ranks, norms_of(config), record.buffer_bytes
    )
    for name, size in tensor_axis_bytes(config).items():
        setattr(row, f"predicted_tensor_axis_{name}_bytes", size)
    if (links := links_of(config, schedule)) is not None and (tiers.place is not None or links.down):
        for link, size in asdict(links).items():
            setattr(row, f"predicted_{link}_bytes", size)
    for m in memory:
        if m.phase == "step" and m.tier in ("device", "host"):
            m.predicted_bytes = prediction.of_category(m.category, m.tier)
        if (m.phase, m.tier, m.category) == ("step", "device", "activations"):
            m.predicted_bytes = record.own_activation_bytes
    return Expected(prediction, parts)


def join_others(row: RunRow, config: CellConfig, schedule: Schedule, rank: int) -> None:
    """Scales a simulated world from its one measured rank. The traffic between tiers and host memory of other ranks
    differ from it by their shards, which theory predicts to the byte; a deviation in the measured rank is multiplied in
    the sum.
    """
    if config.offload.theory_shape().place is None:
        return
    alone, together = (asdict(links_of_states(config, schedule, which)) for which in (rank, None))
    for link, size in together.items():
        measured = getattr(row, f"{link}_bytes")
        setattr(row, f"{link}_bytes", measured + size - alone[link] * row.world_size)
    beyond = host_bytes_beyond(config, schedule, rank)
    row.host_peak_bytes, row.host_states_bytes = (
        known(row.host_peak_bytes) + beyond,
        known(row.host_states_bytes) + beyond,
    )


def join_unexplained(row: RunRow, config: CellConfig, accounted: list[RankRecord], expected: Expected) -> None:
    """Fills `unexplained`, for the ranks' mean traffic, like the volume, and for the memory of all ranks."""

    def most(name: str) -> RankRecord:
        return max(accounted, key=lambda record: record.process_memory.get(name) or 0)

    moved = [t for record in accounted for t in record.traffic if t.kind not in LINKS]
    memory = [m for record in accounted for m in record.memory]
    kept, lines = most("kept_bytes").kept, most("growth_bytes").lines
    row.unexplained = unexplained(
        row, Accounted(memory, moved, config.measure.steps * len(accounted), kept, lines), expected
    )


def join_transport(row: RunRow, accounted: list[RankRecord], steps: int) -> None:
    """Fills the predicted transport: the mean over the ranks, like wire_bytes."""
    if row.backend == "gloo":
        sent = [sum(t.wire_bytes * gloo_factor(t.operator) for t in record.traffic) for record in accounted]
        row.predicted_loopback_bytes = round(sum(sent) / len(sent) / steps)
