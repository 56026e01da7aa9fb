"""Joins the records of all ranks and passes into one row: measurements, predictions, and unexplained bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from operator import itemgetter
from statistics import fmean, median
from typing import Any

import numpy as np
import scipy

from ..config.cell import CellConfig
from ..config.world import has_times
from ..host.environment import SIMULATED
from ..predict import estimate
from ..predict.flops import step_flops, utilization
from ..predict.unexplained import Accounted, Expected, coded_share, unexplained, units_of
from ..probes.probe import ASYNCHRONOUS
from ..probes.traffic import gloo_factor
from ..rank_record import RankRecord
from ..records import BETWEEN, CATEGORIES, COLLECTIVES, DATA_AXIS, LINKS, PHASE_PEAKS, TENSOR_AXIS, MemoryRow, RunRow
from ..sections import known
from ..strategies import predicts
from ..theory.closed_forms import floor_bytes, to_json
from ..theory.groups import Moved
from ..theory.replay.states import predict_states
from ..theory.replay.traffic import predict_control, predict_parts
from ..theory.strategy import settle

PROCESS_MEMORY = (
    "resident_bytes", "allocated_bytes", "reserved_bytes", "fragmentation_bytes", "largest_free_block_bytes",
    "split_bytes", "alloc_retries", "device_used_bytes", "pinned_requested_bytes", "pinned_bytes",
    "timed_allocator_peak_bytes",
)  # fmt: skip
"""Process memory figures from sources other than the ledger; the row has the maximum over the ranks."""

PASSES = ("timed", "accounted", "traced")


@dataclass(frozen=True)
class JoinedColumn:
    """A column of a run, joined from its ranks. `passes`: the first of these that ran supplies the values. `value`:
    maps a rank's record and the number of measured steps to a value, or None. `join`: combines the ranks' values.
    `fullest`: if true, take the value only from the rank with the largest peak.
    """

    passes: tuple[str, ...]
    value: Callable[[RankRecord, int], Any]
    join: Callable[[list[Any]], Any] = max
    fullest: bool = False

    def of(self, passes: Mapping[str, list[RankRecord]], steps: int) -> Any:
        """Returns the row's value; None if no rank has one."""
        records = next((passes[name] for name in self.passes if passes[name]), [])
        if self.fullest and records:
            records = [max(records, key=lambda record: PEAK.value(record, steps))]
        values = [value for record in records if (value := self.value(record, steps)) is not None]
        return self.join(values) if values else None


def _memory(
    category: str, phase: str = "step", tier: str = "device", none: int | None = None, **how: Any
) -> JoinedColumn:
    """A figure of the ledger; `none`: of a rank without such a row."""
    name = "at_peak_bytes" if how.get("fullest") else "max_bytes"

    def value(record: RankRecord, _: int) -> int | None:
        rows = (m for m in record.memory if (m.tier, m.phase, m.category) == (tier, phase, category))
        return next((getattr(m, name) for m in rows), none)

    return JoinedColumn(("accounted",), value, **how)


def _process(name: str, *passes: str) -> JoinedColumn:
    return JoinedColumn(passes, lambda record, _: record.process_memory.get(name))


def _traffic(name: str, join: Callable[[list[Any]], Any], links: bool = False, **only: Any) -> JoinedColumn:
    """Traffic in one step, of the rows with these values: between ranks, or with `links` between tiers."""

    def value(record: RankRecord, steps: int) -> float:
        rows = (t for t in record.traffic if (t.kind in LINKS) == links)
        return float(sum(getattr(t, name) for t in rows if all(getattr(t, k) == v for k, v in only.items()))) / steps

    return JoinedColumn(("accounted",), value, join)


def _seconds(name: str, join: Callable[[list[float]], Any] = median) -> JoinedColumn:
    """A time of the slowest rank in each measured step, joined over the steps."""

    def value(record: RankRecord, _: int) -> list[float]:
        return [getattr(step, name) for step in record.steps if not step.warmup]

    return JoinedColumn(("timed",), value, lambda ranks: join([max(times) for times in zip(*ranks, strict=True)]))


def _gpu(name: str, worst: Callable[..., Any]) -> JoinedColumn:
    """The worst reading of any GPU."""

    def value(record: RankRecord, _: int) -> Any:
        return worst((v for state in record.gpu_states if (v := getattr(state, name)) is not None), default=None)

    return JoinedColumn(("timed",), value, worst)


def _throttle(record: RankRecord, _: int) -> list[str] | None:
    """Returns the reasons for which a rank's GPU was slowed down; None if nobody knows."""
    reasons = [state.throttle for state in record.gpu_states if state.throttle is not None]
    return list(chain.from_iterable(reasons)) if reasons else None


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def median_interval(values: list[float]) -> tuple[float | None, float | None]:
    """Returns the 95 % confidence interval of the median by order statistics; (None, None) below 6 values."""
    interval = scipy.stats.quantile_test(values, p=0.5).confidence_interval(0.95)
    if not np.isfinite([interval.low, interval.high]).all():
        return None, None
    return float(interval.low), float(interval.high)


PEAK = _memory("total")
DATA: dict[str, Any] = {"axis": DATA_AXIS, "control": False}

COLUMNS = {
    "peak_bytes": PEAK,
    "states_bytes": _memory("states"),
    "allocator_peak_bytes": _memory("allocated"),
    "outside_ledger_bytes": _memory("outside_ledger", join=partial(max, key=abs)),
    "host_peak_bytes": _memory("total", tier="host", none=0),
    "host_states_bytes": _memory("states", tier="host", none=0),
    "nvme_bytes": _memory("total", tier="nvme", none=0),
    **{f"max_{category}_bytes": _memory(category) for category in CATEGORIES},
    **{f"peak_{category}_bytes": _memory(category, fullest=True) for category in CATEGORIES},
    **{f"between_steps_{category}_bytes": _memory(category, BETWEEN) for category in CATEGORIES},
    **{column: _memory("total", column.removesuffix("_peak_bytes")) for column in PHASE_PEAKS},
    "save_peak_bytes": _memory("total", "save"),
    "allocator_witness": JoinedColumn(("accounted",), lambda record, _: record.witness, itemgetter(0)),
    # Volume and wire bytes are means over the ranks, since a matrix may have uneven owners.
    "payload_bytes": _traffic("payload_bytes", max, **DATA),
    "wire_bytes": _traffic("wire_bytes", _mean, **DATA),
    "within_nodes_bytes": _traffic("within_bytes", _mean, **DATA),
    "between_nodes_bytes": _traffic("between_bytes", _mean, **DATA),
    "control_bytes": _traffic("payload_bytes", max, control=True),
    "volume_psi": _traffic("volume_elements", fmean, **DATA),
    **{f"volume_{kind}_psi": _traffic("volume_elements", fmean, kind=kind, **DATA) for kind in COLLECTIVES},
    **{f"{kind}_bytes": _traffic("payload_bytes", _mean, links=True, kind=kind, control=False) for kind in LINKS},
    "tensor_axis_all_reduce_bytes": _traffic("wire_bytes", _mean, kind="all_reduce", axis=TENSOR_AXIS),
    "tensor_axis_all_gather_bytes": _traffic("wire_bytes", _mean, kind="all_gather", axis=TENSOR_AXIS),
    **{name: _process(name, "timed", "accounted") for name in PROCESS_MEMORY},  # the timed pass has no probes
    **{name: _process(name, "accounted") for name in ("kept_bytes", "growth_bytes")},
}
"""Columns of every run."""

TRAINING = {
    "loss_first": JoinedColumn(PASSES, lambda record, _: record.steps[0].loss, _mean),
    "loss_last": JoinedColumn(PASSES, lambda record, _: record.steps[-1].loss, _mean),
    "loss_scale_last": JoinedColumn(PASSES, lambda record, _: record.steps[-1].loss_scale, itemgetter(0)),
    "skipped_steps": JoinedColumn(PASSES, lambda record, _: sum(step.skipped for step in record.steps), itemgetter(0)),
    "grad_norm_last": JoinedColumn(("accounted", "timed"), lambda record, _: record.steps[-1].grad_norm, itemgetter(0)),
}
"""Columns that a simulated world lacks: its one rank trains on a part of each batch."""

TIMES = {
    "step_s": _seconds("seconds"),
    "step_s_low": _seconds("seconds", lambda seconds: median_interval(seconds)[0]),
    "step_s_high": _seconds("seconds", lambda seconds: median_interval(seconds)[1]),
    **{f"{phase}_s": _seconds(f"{phase}_s") for phase in ("forward", "backward", "update")},
    "wall_s": JoinedColumn(("timed",), lambda record, _: record.wall_s or 0.0),
    "sm_clock_mhz": _gpu("sm_clock_mhz", min),
    "sm_clock_max_mhz": _gpu("sm_clock_max_mhz", min),
    "gpu_temperature_c": _gpu("temperature_c", max),
    "gpu_power_w": _gpu("power_w", max),
    "throttle": JoinedColumn(("timed",), _throttle, lambda ranks: ", ".join(dict.fromkeys(chain.from_iterable(ranks)))),
}
"""Columns that ranks which share a GPU lack: they take turns."""


def blank_row(config: CellConfig, machine: Mapping[str, Any], started: str, repeat: int = 0) -> RunRow:
    """Returns the row of a run that measured nothing yet. `machine`: its provenance."""
    return RunRow(
        run_id="", cell_id=config.cell_id, repeat=repeat, status="", reason="", strategy=config.strategy.name,
        model=config.model_name, world_size=config.world_size, device=config.device, backend=config.backend,
        precision=config.precision.label, optimizer=config.optimizer_label, micro_batch=config.micro_batch,
        accumulation=config.accumulation, batch=config.batch, sequence=config.sequence, seed=config.seed,
        threads=config.launch.threads,  # type: ignore[arg-type]  # None of a cell that was not resolved
        data=config.data.name, text_hash=config.text_hash, config=json.dumps(config.written()),
        command=machine["command"], commit=machine["commit"], source_hash=machine["source_hash"],
        torch_version=machine["versions"]["torch"], device_class=machine["device_class"],
        processor=machine["processor"], cores=machine["cores"], started=started, seconds=0.0,
    )  # fmt: skip


def join(row: RunRow, config: CellConfig, records: list[RankRecord], theory: bool = True) -> dict[str, list[Any]]:
    """Fills `row` from the records of all passes, and returns the rows of the other tables.

    `theory`: False for a training loop whose config lacks what a prediction needs.
    """
    passes = {mode: [record for record in records if record.mode == mode] for mode in PASSES}
    timed, accounted, traced = passes.values()
    present = [ranks for ranks in passes.values() if ranks]
    for ranks in present:
        _join_norms(ranks)
    schedule, predicted = (accounted or timed)[0].schedule, predicts(config.strategy.values())
    row.psi = sum(shape.numel for shape in schedule.shapes if shape.trainable)
    join_columns(row, COLUMNS, passes, config.measure.steps)
    # All ranks read the same counter, at slightly different times. Bytes between machines bypass the loopback.
    seen = [record.process_memory.get("loopback_bytes") for record in timed if config.nodes == 1]
    counted = [value for value in seen if value is not None]
    if row.backend == "gloo" and counted:  # a step's mean, warm-up included
        row.loopback_bytes = round(median(counted) / len(timed[0].steps) / len(timed))
    if config.backend != SIMULATED:
        row.passes_agree = _agree(present)
        join_columns(row, TRAINING, passes, config.measure.steps)
    if timed and has_times(config):
        join_columns(row, TIMES, passes, config.measure.steps)
        _join_timed(row, config, timed, traced)
    if accounted:
        _join_accounted(row, config, accounted)
    if accounted and config.backend == SIMULATED and predicted:
        _join_unmeasured_ranks(row, config, accounted[0])
    if timed and row.device == "cuda":
        row.timed_allocator_peak_bytes = row.allocated_bytes

    expected, memory = Expected(), [m for record in accounted for m in record.memory]
    if theory and predicted:
        expected = _join_theory(row, config, memory, (accounted or timed)[0])
    if theory and accounted:  # for the ranks' mean traffic, like the volume, and for the memory of all ranks
        kept, growing = (
            max(accounted, key=lambda record: record.process_memory.get(name) or 0)
            for name in ("kept_bytes", "growth_bytes")
        )
        moved = [t for record in accounted for t in record.traffic if t.kind not in LINKS]
        steps, saves_aside = config.measure.steps * len(accounted), config.measure.save == ASYNCHRONOUS
        slots = config.arena and config.recomputes
        accounts = Accounted(memory, moved, steps, kept.kept, growing.lines, saves_aside, slots)
        row.unexplained = unexplained(row, accounts, expected)
    of_accounted = ("memory", "tensors", "lines", "traffic", "timeline", "events")
    tables = {name: [entry for record in accounted for entry in getattr(record, name)] for name in of_accounted}
    return {"steps": [step for record in records for step in record.steps], **tables}


def _join_timed(row: RunRow, config: CellConfig, timed: list[RankRecord], traced: list[RankRecord]) -> None:
    """Fills rates, energy, saves, FLOPs and overlap: what follows from times and is not one column by itself."""
    tokens = row.batch * row.sequence * sum(not step.warmup for step in timed[0].steps)
    row.tokens_per_s = tokens / row.wall_s if row.wall_s else None
    row.energy_j = _energy(timed, 1 if row.device == "cuda" else -(-config.world_size // config.nodes))
    row.tokens_per_j = tokens / row.energy_j if row.energy_j else None

    measured = [steps for steps in zip(*(record.steps for record in timed), strict=True) if not steps[0].warmup]
    if saves := [steps for steps in measured if steps[0].save_s is not None]:  # the slowest rank of each step
        row.save_s = median(max(known(step.save_s) for step in steps) for steps in saves)
        row.save_done_s = median(max(known(step.save_done_s) for step in steps) for steps in saves)
        during = [steps for steps in measured if any(step.save_in_flight for step in steps)]
        row.save_step_s = median(max(known(step.seconds) for step in steps) for steps in during)
        row.checkpoint_bytes = timed[0].checkpoint_bytes

    counted = step_flops(config)
    if counted is not None and row.step_s is not None:
        row.model_flops, row.hardware_flops = counted.model, counted.hardware
        row.mfu, row.hfu = (
            utilization(flops, row.step_s, row.device_class, config.precision.name)
            for flops in (counted.model, counted.hardware)
        )

    # Medians over the measured steps of the traced pass, from the rank with the longest step.
    names = ("seconds", "communication_s", "exposed_s")
    steps_of_ranks = [[step for step in record.steps if not step.warmup] for record in traced]
    medians = [tuple(median(getattr(step, name) for step in steps) for name in names) for steps in steps_of_ranks]
    if medians:
        row.traced_step_s, row.communication_s, row.exposed_s = max(medians)
    if row.communication_s and row.exposed_s is not None:
        row.overlap = 1 - row.exposed_s / row.communication_s


def join_columns(
    row: RunRow, columns: Mapping[str, JoinedColumn], passes: Mapping[str, list[RankRecord]], steps: int
) -> None:
    """Fills columns; those in ψ are divided by it, and bytes are whole."""
    for name, column in columns.items():
        value = column.of(passes, steps)
        if value is not None and name.endswith("_psi"):
            value = value / row.psi if row.psi else None
        if isinstance(value, float) and name.endswith("_bytes"):
            # The ranks' mean times their number. In a simulated world _join_unmeasured_ranks then corrects the sum.
            value = round(value * row.world_size if name.removesuffix("_bytes") in LINKS else value)
        setattr(row, name, value)


def _join_accounted(row: RunRow, config: CellConfig, accounted: list[RankRecord]) -> None:
    """Fills what only the accounted pass measures and is not one column by itself."""
    row.peaks_of_ranks = json.dumps({record.rank: PEAK.value(record, 1) for record in accounted})
    on_host = {record.rank: COLUMNS["host_peak_bytes"].value(record, 1) for record in accounted}
    row.host_peak_all_bytes = _fullest_node(on_host, config.ranks_per_node, row.backend == SIMULATED)
    if config.tensor_parallel == 1:
        row.tensor_axis_all_reduce_bytes = row.tensor_axis_all_gather_bytes = None
    if config.node_size is None:  # without node_size the nodes are unknown
        row.within_nodes_bytes = row.between_nodes_bytes = None
    matrices = sum(shape.matrices for shape in accounted[0].schedule.shapes)
    calls, flops = (
        [record.process_memory.get(f"newton_schulz_{name}") or 0 for record in accounted] for name in ("calls", "flops")
    )
    if matrices or any(calls):  # Muon's computation in a step
        row.newton_schulz_matrices, row.newton_schulz_calls = matrices, sum(calls) / config.measure.steps
        row.newton_schulz_flops = round(sum(flops) / config.measure.steps)
        all_ranks = row.backend != SIMULATED and any(flops)
        row.newton_schulz_balance = max(flops) * len(flops) / sum(flops) if all_ranks else None
    if row.backend == "gloo":  # the predicted transport: the mean over the ranks, like wire_bytes
        sent = [sum(t.wire_bytes * gloo_factor(t.operator) for t in record.traffic) for record in accounted]
        row.predicted_loopback_bytes = round(_mean(sent) / config.measure.steps)
    # All ranks have the same units, so one rank has the shares of quantized traffic.
    units = units_of(accounted[0].schedule.shapes, config.strategy.whole_numel)
    row.quantized_gather_share = coded_share(accounted[0].traffic, "all_gather", units)
    row.quantized_reduction_share = coded_share(accounted[0].traffic, "reduce_scatter", units)


def _fullest_node(peaks: dict[int, int], per_node: int, is_simulated: bool) -> int:
    """Returns the largest sum over the `per_node` ranks of a node; all ranks of a simulated node count the same."""
    nodes: dict[int, list[int]] = {}
    for rank, peak in peaks.items():
        nodes.setdefault(rank // per_node, []).append(peak)
    alike = per_node if is_simulated else 1
    return max(sum(node) * alike for node in nodes.values())


def _energy(timed: list[RankRecord], sharing: int) -> float | None:
    """Returns the sum over the devices, each of which `sharing` ranks have read; None if a rank has no reading."""
    devices: dict[int, float] = {}
    for record in timed:
        if record.energy_j is None:
            return None
        device = record.rank // sharing
        devices[device] = max(devices.get(device, 0.0), record.energy_j)
    return sum(devices.values())


def _agree(passes: list[list[RankRecord]]) -> bool | None:
    """Returns whether all passes have bit-equal losses on every rank; None for a single pass."""
    first, *others = (
        [(step.rank, step.step, step.loss.hex()) for record in records for step in record.steps] for records in passes
    )
    return all(losses == first for losses in others) if others else None


def divergence(records: list[RankRecord]) -> str:
    """Returns an error message for the first non-finite loss of any rank and pass; empty if all are finite."""
    lost = [(step.step, step.rank, step.loss) for r in records for step in r.steps if not math.isfinite(step.loss)]
    if not lost:
        return ""
    number, rank, loss = min(lost, key=lambda step: step[:2])
    count = len(records[0].steps)
    return f"the loss of rank {rank} is {loss} at step {number + 1} of {count}: try a smaller optimizer.lr, or clip=1.0"


def _join_norms(records: list[RankRecord]) -> None:
    """Computes each step's norm from the ranks' parts; replicas have equal parts, which count once."""
    holders = records[0].gradient_holders
    for rows in zip(*(record.steps for record in records), strict=True):
        parts = [row.grad_squares for row in rows]
        measured = [part for part in parts if part is not None]
        if len(measured) == len(parts):
            for row in rows:
                row.grad_norm = math.sqrt(sum(measured) / holders)


def _join_theory(row: RunRow, config: CellConfig, memory: list[MemoryRow], record: RankRecord) -> Expected:
    """Fills predictions, also of the memory table, for DDP and our stages; returns those that `unexplained` takes."""
    strategy, rest = estimate.theory_of(config)
    groups, _, precision, tiers = rest
    schedule, data_rank = record.schedule, record.rank // config.tensor_parallel
    bucket_bytes = settle(strategy, schedule.shapes, groups.shard_ranks).bucket_bytes
    row.bucket_bytes = bucket_bytes if isinstance(bucket_bytes, int) else None

    executed = data_rank if row.backend == SIMULATED and tiers.medium is None else None
    prediction = predict_states(strategy, schedule, *rest, executed)
    row.predicted_states_bytes = prediction.states_bytes
    row.floor_states_bytes = floor_bytes(strategy, schedule.shapes, *rest)
    row.predicted_host_states_bytes, row.predicted_nvme_bytes = prediction.host_bytes, prediction.file_bytes
    row.predicted_activations_bytes = record.own_activation_bytes
    row.formulas = to_json(estimate.formulas_of(config, schedule, prediction))
    for line in memory:
        if line.phase == "step" and line.tier in ("device", "host"):
            is_activations = (line.tier, line.category) == ("device", "activations")
            own = record.own_activation_bytes
            line.predicted_bytes = own if is_activations else prediction.of_category(line.category, line.tier)

    parts: dict[str, Moved] = {}
    if row.psi:
        alone = data_rank if (row.backend, row.device) == (SIMULATED, "cpu") else None
        parts = predict_parts(strategy, schedule, groups, precision, alone)
        moved = sum(parts.values(), Moved())
        row.predicted_volume_psi = moved.volume / row.psi
        row.predicted_wire_bytes = round(moved.within + moved.between)
        if config.node_size is not None:
            row.predicted_within_nodes_bytes = round(moved.within)
            row.predicted_between_nodes_bytes = round(moved.between)
    row.predicted_control_bytes = predict_control(
        strategy, schedule, config.data_ranks, estimate.norms_of(config), record.buffer_bytes
    )
    sizes = {f"tensor_axis_{name}": size for name, size in estimate.tensor_axis_bytes(config).items()}
    if (links := estimate.links_of(config, schedule)) is not None and (tiers.medium is not None or links.down):
        sizes |= asdict(links)
    for name, size in sizes.items():
        setattr(row, f"predicted_{name}_bytes", size)
    return Expected(prediction, parts)


def _join_unmeasured_ranks(row: RunRow, config: CellConfig, record: RankRecord) -> None:
    """Scales a simulated world from its one measured rank. The traffic between tiers and host memory of other ranks
    differ from it by their shards, which theory predicts to the byte; a deviation in the measured rank is multiplied in
    the sum.
    """
    if config.offload.theory_shape().medium is None:
        return
    schedule, rank = record.schedule, record.rank
    alone, together = (asdict(estimate.links_of_states(config, schedule, which)) for which in (rank, None))
    for link, size in together.items():
        measured = getattr(row, f"{link}_bytes")
        setattr(row, f"{link}_bytes", measured + size - alone[link] * row.world_size)
    beyond = estimate.host_bytes_beyond(config, schedule, rank)
    row.host_peak_bytes = known(row.host_peak_bytes) + beyond
    row.host_states_bytes = known(row.host_states_bytes) + beyond
