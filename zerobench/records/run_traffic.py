"""Columns of a run on traffic between ranks, in one step."""

from __future__ import annotations

from dataclasses import dataclass

from .run_allocator import RunAllocator


@dataclass
class RunTraffic(RunAllocator):
    """Volumes in elements over ψ, by the paper's convention; bytes by operator, by formula and as they were sent."""

    volume_psi: float | None = None
    """Elements moved in one step over ψ, by the paper's convention (an all-reduce 2), control traffic apart."""
    predicted_volume_psi: float | None = None
    """volume_psi as the theory has it."""
    volume_all_reduce_psi: float | None = None
    """The part of volume_psi by all-reduce."""
    volume_reduce_scatter_psi: float | None = None
    """The part of volume_psi by reduce-scatter."""
    volume_all_gather_psi: float | None = None
    """The part of volume_psi by all-gather."""
    volume_other_psi: float | None = None
    """The part of volume_psi by other collectives: broadcast, reduce, sends without a label."""
    payload_bytes: int | None = None
    """Bytes of the logical tensors of one step's operations."""
    wire_bytes: int | None = None
    """Bytes that one rank sends in a step where collectives are rings, mean over the group."""
    predicted_wire_bytes: int | None = None
    """wire_bytes as the theory has it."""
    within_nodes_bytes: int | None = None
    """The part of wire_bytes that stays in a node of `node_size` ranks; None without that key, as the next three."""
    between_nodes_bytes: int | None = None
    """The part of wire_bytes that goes from one node to another."""
    predicted_within_nodes_bytes: int | None = None
    """within_nodes_bytes as the theory has it."""
    predicted_between_nodes_bytes: int | None = None
    """between_nodes_bytes as the theory has it."""
    quantized_gather_share: float | None = None
    """Fraction of ψ whose gathers, if not all of them, were sent quantized, as the traffic meter saw them."""
    quantized_reduction_share: float | None = None
    """Fraction of ψ whose reductions were sent quantized."""
    loopback_bytes: int | None = None
    """Bytes over the loopback interface in a step of the timed pass, over the ranks: what one really sends on gloo,
    headers included, and what else ran on the machine meanwhile. wire_bytes is what the ring optimum would send."""
    predicted_loopback_bytes: int | None = None
    """Bytes that gloo sends for the operators that were seen, control traffic included, headers apart: wire_bytes, but
    for a reduce-scatter, which it carries as an all-reduce and so sends twice."""
    control_bytes: int | None = None
    """Payload of one step's flags, buffers and scalars, outside the volume."""
    predicted_control_bytes: int | None = None
    """control_bytes as the theory has it."""
