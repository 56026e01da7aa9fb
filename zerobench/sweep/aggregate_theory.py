"""Theory's columns of a run's row, and the unexplained remainder."""

from __future__ import annotations

from dataclasses import asdict

from ..config.cell import CellConfig
from ..predict.estimate import formulas_of, host_bytes_beyond, links_of, links_of_states, norms_of, training_shapes
from ..predict.unexplained import Accounted, Expected, unexplained
from ..probes.collective_operators import gloo_factor
from ..rank_record import RankRecord
from ..records import LINKS, MemoryRow, RunRow
from ..sections import known
from ..strategies import shape_of
from ..theory.closed_forms import floor_bytes, to_json
from ..theory.replay.states import predict_states
from ..theory.replay.traffic import predict_control, predict_parts, predict_traffic
from ..theory.shapes import Schedule
from ..theory.strategy import settle


def join_theory(
    row: RunRow, config: CellConfig, schedule: Schedule, memory: list[MemoryRow], record: RankRecord
) -> Expected:
    """Fills the columns of states, traffic, control and links, and the memory table's predictions, for DDP and our
    stages; returns what `unexplained` is told against.
    """
    shapes, groups = training_shapes(config), config.groups
    strategy, tiers = shape_of(config.strategy.values()), config.offload.theory_shape()
    bucket_bytes = settle(strategy, schedule.shapes, groups.shard_ranks).bucket_bytes
    row.bucket_bytes = bucket_bytes if isinstance(bucket_bytes, int) else None
    prediction = predict_states(strategy, schedule, row.world_size, *shapes, groups, tiers)
    row.predicted_states_bytes = prediction.states_bytes
    row.floor_states_bytes = floor_bytes(strategy, schedule.shapes, groups, *shapes, tiers)
    row.predicted_host_states_bytes, row.predicted_nvme_bytes = prediction.host_bytes, prediction.file_bytes
    row.formulas = to_json(formulas_of(config, schedule, prediction))
    if row.psi:
        moved = predict_traffic(strategy, schedule, row.world_size, groups, shapes[1])
        row.predicted_volume_psi = moved.volume / row.psi
        row.predicted_wire_bytes = round(moved.within + moved.between)
        if config.node_size is not None:
            row.predicted_within_nodes_bytes, row.predicted_between_nodes_bytes = (
                round(moved.within),
                round(moved.between),
            )
    row.predicted_activations_bytes = record.own_activation_bytes
    row.predicted_control_bytes = predict_control(
        strategy, schedule, row.world_size, norms_of(config), record.buffer_bytes
    )
    if (links := links_of(config, schedule)) is not None and (tiers.place is not None or links.down):
        for link, size in asdict(links).items():
            setattr(row, f"predicted_{link}_bytes", size)
    for m in memory:
        if m.phase == "step" and m.tier in ("device", "host"):
            m.predicted_bytes = prediction.of_category(m.category, m.tier)
        if (m.phase, m.tier, m.category) == ("step", "device", "activations"):
            m.predicted_bytes = record.own_activation_bytes
    return Expected(prediction, predict_parts(strategy, schedule, row.world_size, groups, shapes[1]))


def join_others(row: RunRow, config: CellConfig, schedule: Schedule, rank: int) -> None:
    """Of a simulated world one rank has been measured: what the others move between tiers, and hold in host memory,
    differs from it by their own shards, which theory knows to the byte; what goes wrong in the one stays in the sum, as
    many times.
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
    """Fills `unexplained`, for traffic of the rank with most, as the volume is, and for memory of all ranks."""

    def most(name: str) -> RankRecord:
        return max(accounted, key=lambda record: record.process_memory.get(name) or 0)

    moved = [[t for t in record.traffic if t.kind not in LINKS] for record in accounted]
    busiest = max(moved, key=lambda traffic: sum(t.volume_elements for t in traffic if not t.control))
    memory = [m for record in accounted for m in record.memory]
    kept, lines = most("kept_bytes").kept, most("growth_bytes").lines
    row.unexplained = unexplained(row, Accounted(memory, busiest, config.measure.steps, kept, lines), expected)


def join_transport(row: RunRow, accounted: list[RankRecord], steps: int) -> None:
    """Fills the predicted transport: the mean over the ranks, as wire_bytes is."""
    if row.backend == "gloo":
        sent = [sum(t.wire_bytes * gloo_factor(t.operator) for t in record.traffic) for record in accounted]
        row.predicted_loopback_bytes = round(sum(sent) / len(sent) / steps)
