"""The entry to the replay of traffic: elements moved in one step of m micro-batches, to the element.

An all-reduce counts its elements twice, the others once (ZeRO, arXiv 1910.02054, section 7.1). r micro-batches are
reduced: all (`accumulate` "every", the default of zero2 and zero3) or the last (default of ddp, zero1 and megatron).

ddp        2rψ                   all-reduce
buckets    (r + 1) · padded      zero1, zero2, megatron: reduce-scatters and one all-gather; all-reduces count twice
units      zero3: r reduce-scatters of the padded size of trained parameters, and per micro-batch these all-gathers:
             root: 1, or 2 if it is not kept from forward to backward, and 1 more each time that it is freed
             and one of its own modules reads it in backward
             a unit that forward uses u times: u, and 1 more if backward returns to it; 1 if it stays whole in between
             parameters that stay whole: none, but 1 per step for trained ones

bf16 halves bytes but not volume. Traffic of one collective with nodes, shard groups or quantization: groups.py.
Secondary shards serve every gather of a unit except the first in a step; for frozen units, every gather.

Control traffic is everything except parameters and gradients; payload bytes on each rank:

flags      4 bytes per trained parameter: which had a gradient on any rank                   our stages
           the same, per reduction: which were used                                          DDP, if asked for
norm       8 bytes, fp64, if a step takes the gradients' norm (clipping, overflow)           our stages
buffers    the module's, broadcast from rank 0 before a forward whose gradients are reduced  all

Under DDP every rank has whole gradients and computes their norm locally.
"""

from __future__ import annotations

from ..closed_forms import FULL
from ..groups import GroupShape, Moved
from ..shapes import ParameterShape, PrecisionShape, Schedule, wire_bytes
from ..strategy import StrategyShape, buffers_of, gathers_of, settle

REDUCTION, GATHER = "reduce_scatter", "all_gather"


def predict_traffic(
    strategy: StrategyShape, schedule: Schedule, groups: GroupShape, precision: PrecisionShape = FULL
) -> Moved:
    """Elements, padding included, and the bytes that each rank sends."""
    return sum(predict_parts(strategy, schedule, groups, precision).values(), Moved())


def predict_parts(
    strategy: StrategyShape, schedule: Schedule, groups: GroupShape, precision: PrecisionShape = FULL,
    rank: int | None = None,
) -> dict[str, Moved]:  # fmt: skip
    """The traffic by collective (records.COLLECTIVES); `predict_traffic` is the sum. `rank`: for pairwise exchanges,
    in which ranks that own matrices send different amounts; None: the mean over the ranks.
    """
    if groups.world_size == 1:
        return {}
    reductions = strategy.reductions(schedule.micro_batches)
    if not strategy.theory.optimizer:  # one ring over all ranks, in the parameters' dtype
        trained = [s for s in schedule.shapes if s.trainable]
        each = [groups.all_reduction(s.numel, s.element_bytes).times(reductions) for s in trained]
        return {"all_reduce": sum(each, Moved())}
    strategy = settle(strategy, schedule.shapes, groups.shard_ranks)
    by_all = strategy.reduce_with == "all_reduce"
    reduce = groups.all_reduction if by_all else groups.reduction
    reduced, gathered = Moved(), Moved()
    for unit, buffer in buffers_of(strategy, schedule.shapes, groups.shard_ranks):
        shape = schedule.shapes[buffer.spans[0].parameter]
        gathers = 1 if unit is None else schedule.micro_batches * gathers_of(strategy, schedule, unit)
        for _, numel in buffer.units:
            if rank is not None and buffer.sizes is not None and not by_all:
                own, size = buffer.sizes[rank], wire_bytes(shape, precision)
                gathered += groups.owned_gather(own, shape.element_bytes).times(gathers)
                reduced += groups.owned_reduction(numel - own, size).times(reductions if gathers else 0)
                continue
            if unit is not None:
                gathered += _gathered(groups, numel, shape, gathers)
            elif shape.trainable:
                gathered += groups.exact_gather(numel, shape.element_bytes)
            if shape.trainable and gathers:
                reduced += reduce(numel, wire_bytes(shape, precision)).times(reductions)
    return {"all_reduce" if by_all else REDUCTION: reduced, GATHER: gathered}


def _gathered(groups: GroupShape, numel: int, shape: ParameterShape, gathers: int) -> Moved:
    """The gathers of a ZeRO-3 unit in a step; secondary shards serve all but the first if it is trained."""
    from_all = min(gathers, int(shape.trainable)) if groups.secondary else gathers
    gather = groups.first_gather if shape.trainable else groups.gather
    whole = gather(numel, shape.element_bytes).times(from_all)
    return whole + groups.secondary_gather(numel, shape.element_bytes).times(gathers - from_all)


# -- control ---------------------------------------------------------------------------------------


FLAG_BYTES, NORM_BYTES = 4, 8


def predict_control(strategy: StrategyShape, schedule: Schedule, world_size: int, norms: int, buffer_bytes: int) -> int:
    """Returns the control traffic of DDP or our stages. `norms`: how often a step computes the gradients' norm."""
    if world_size == 1:
        return 0
    reductions, flags = strategy.reductions(schedule.micro_batches), flags_bytes(schedule)
    if not strategy.theory.optimizer:
        return reductions * (buffer_bytes + flags * strategy.find_unused_parameters)
    return reductions * buffer_bytes + flags + NORM_BYTES * norms


def flags_bytes(schedule: Schedule) -> int:
    """Bytes of a 32-bit flag per trained parameter."""
    return FLAG_BYTES * sum(shape.trainable for shape in schedule.shapes)
