"""Seconds of one operator on one device, and of one collective between devices.

matrix products   a table of measured times by shape, interpolated: log(time per FLOP) over log m, n, k, by the nearest
                  shapes; outside the table its nearest shape. Without a table a fraction of the peak
attention         FLOPs over a fraction of the peak, by sequence length
all else          bytes over a fraction of the memory's bandwidth, at least the shortest kernel
collectives       inside a node a table by size and ranks; between nodes the bytes that a node receives over its
                  network's bandwidth, with a latency per step of NCCL's ring, which has as many as there are ranks, or
                  of its tree; the slower of both. A group's ranks per node follow from the distance between them: each
                  hop of a two-hop collective is priced by its own group

A collective that spans nodes gathers inside them as well, so the slower of the two sets its pace.

A step on one GPU has no collectives to hide behind, so its memory and its host count (GpuCosts.alone):

launch            each launch of a kernel that computes little takes a fixed time, beside its bytes
blocks            a multi-tensor kernel has one block of threads for BLOCK elements, and TURN of them in flight. A list
                  of few blocks keeps few bytes in flight, and waits for the memory's latency (Little's law)
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from ..records import EventRow
from ..records.long_rows import MOVE
from .hardware import GB_S, GBIT_S, TABLES, US, Cluster, Device, Scales, scales_of, validated

if TYPE_CHECKING:  # pandas and scipy take most of a second, which a plan without times does not spend
    import pandas as pd

NEIGHBORS = 16
"""Number of shapes of a table used to interpolate a shape."""

BACKWARD = "backward"
SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
HALVES = ("bf16", "fp16")
ALIGNED = 8
"""Elements of two bytes in 16 bytes: a row that is no multiple of them keeps a product from a GPU's fast kernels."""

LISTS, TWICE = re.compile(r"_fused_|_(amp_)?foreach_"), re.compile(r"_fused_|_foreach_copy_")
"""Multi-tensor operators, and those of them for which a schedule counts one list twice (gradients; a copy's target).
Scales of clusters were fitted with this double count."""
BLOCK, TURN = 2**16, 2048
"""Elements of a block of a multi-tensor kernel, and of its threads at a time (torch: kChunkSize, kBlockSize * kILP)."""
MOST_BLOCKS = {"2.11": 320, "2.13": 2240}
"""torch -> most blocks of one launch; from 2.13 on in builds for CUDA 13. The fitted steps ran with 2.11."""
OWN_LAUNCHES = {"zerobench.adam_": 3, "zerobench.squares": 2}
"""Our kernels -> launches, with the copy of a table to the device."""
PROTOCOLS = {"LL": (0.6, 2.7 / 4.0, 2.0), "LL128": (1.9, 1.0, 1.0)}
"""NCCL's protocol -> us of a step over NVLink, network latencies of a step between nodes, factor on the bytes' time.
NCCL takes the faster one for a size (2.28.9, src/graph/tuning.cc, which has 4.0 us for a network under LL128)."""
LATENCY_S = 0.5e-6
"""Latency of a GPU's memory; stated (0.4 to 0.6 us are published for an H100): no measured step depends on it."""


@dataclass(frozen=True)
class Transfer:
    """A collective. `host_s`: seconds of the issuing thread; `wire_s`: seconds on the network, while others compute."""

    host_s: float
    wire_s: float


def numbers(sizes: str) -> tuple[int, ...]:
    """Returns the numbers of a compute event's `sizes`; none for an event without sizes."""
    return tuple(int(part) for part in sizes.split("x") if part)


# -- tables ----------------------------------------------------------------------------------------


class ShapeTable:
    """Times of matrix products by shape. `rows`: columns m, n, k, seconds."""

    def __init__(self, rows: pd.DataFrame) -> None:
        from scipy.interpolate import RBFInterpolator

        shapes = rows[["m", "n", "k"]].to_numpy(float)
        self._low, self._high = shapes.min(axis=0), shapes.max(axis=0)
        per_flop = rows["seconds"].to_numpy(float) / (2 * shapes.prod(axis=1))
        neighbors = min(NEIGHBORS, len(rows))
        self._log_per_flop = RBFInterpolator(np.log(shapes), np.log(per_flop), neighbors=neighbors, kernel="linear")
        self._seconds: dict[tuple[int, ...], float] = {}

    def seconds(self, m: int, n: int, k: int) -> float:
        """Returns the time of one (m, k) by (k, n) product."""
        shape = m, n, k
        if shape not in self._seconds:
            inside = np.clip(np.array(shape, float), self._low, self._high)
            per_flop = float(np.exp(self._log_per_flop(np.log(inside)[None])[0]))
            self._seconds[shape] = per_flop * 2 * math.prod(shape)
        return self._seconds[shape]


@cache
def matmul_rows(table: str) -> pd.DataFrame:
    """Returns columns m, n, k, seconds of a table by name (hardware.Device.matmul_table)."""
    import pandas as pd

    if table.endswith(".parquet"):
        rows = pd.read_parquet(TABLES / table)
        return rows[["m", "n", "k"]].assign(seconds=rows["latency_ms"] / 1e3)
    rows = pd.read_csv(TABLES / "efficiency_by_shape.csv")
    rows = rows[(rows["device"] == table) & (rows["operator"] == "matmul")]
    shapes = rows["shape"].str.extract(r"b=(?P<b>\d+), m=(?P<m>\d+), k=(?P<k>\d+), n=(?P<n>\d+)").astype(float)
    shapes = shapes.assign(efficiency=rows["efficiency"], peak=rows["peak_tflops"])[shapes["b"] == 1]
    shapes["seconds"] = 2 * shapes[["m", "n", "k"]].prod(axis=1) / (shapes["peak"] * 1e12 * shapes["efficiency"])
    return shapes.groupby(["m", "n", "k"])["seconds"].median().reset_index()


@cache
def matmul_table(table: str) -> ShapeTable:
    """Returns the interpolation of a table by name."""
    return ShapeTable(matmul_rows(table))


@cache
def _collectives(table: str) -> dict[tuple[str, int], _Curve]:
    """Returns (collective, ranks) -> seconds over the bytes of the full tensor."""
    import pandas as pd

    rows = pd.read_csv(TABLES / "collectives_in_node.csv")
    rows = rows[rows["device"] == table].sort_values("elements_fp16")
    return {
        (str(kind), int(str(ranks))): _Curve(points["elements_fp16"] * 2, points["latency_us"] * US)
        for (kind, ranks), points in rows.groupby(["collective", "gpus"])
    }


TABLE_NAMES = {"all_gather": "all_gather", "reduce_scatter": "reduce_scatter", "all_reduce": "all_reduce",
               "all_to_all": "alltoall", "broadcast": "all_gather"}  # fmt: skip


def link_factor(kind: str, ranks: int) -> float:
    """Returns the bytes that a rank sends, over the bytes of the full tensor."""
    return (2 if kind == "all_reduce" else 1) * (ranks - 1) / ranks


class GpuCosts:
    """Costs on GPUs of a cluster. `bus_gb_s`: collective -> bus bandwidth over all ranks measured on this cluster, in
    1e9 bytes per second as nccl-tests counts them; it replaces the network's.

    `one_stream`: all streams take turns. `host_s`, `order_s`, `loop_s`: seconds of the host for an operator, for an
    order between streams, and for the rest of a step. `launch_s`: of the device for a launch; `most_blocks`: of one.
    """

    one_stream = False
    order_s = loop_s = launch_s = 0.0
    most_blocks = MOST_BLOCKS["2.11"]

    def __init__(
        self, device: Device, cluster: Cluster, bus_gb_s: dict[str, float] | None = None, scales: Scales | None = None
    ) -> None:  # fmt: skip
        self.device, self.cluster = device, cluster
        self.host_s, self.contention = device.host_us * US, device.contention
        self._bus = bus_gb_s or {}
        self.scales = scales or scales_of(device)

    def scaled(self, scales: Scales) -> GpuCosts:
        """Returns these costs with other scales."""
        return GpuCosts(self.device, self.cluster, self._bus, scales)

    def alone(self, rates: Mapping[str, float] | None = None) -> GpuCosts:
        """Returns these costs for a run on one GPU. `rates`: used in place of the rates fitted to steps on one GPU.

        memory_efficiency           of the bandwidth, which copies on other streams take from the model's
        launch_us                   of the device, for a kernel that computes little
        products, unaligned         as in Scales
        attention                   as in Scales; not fitted here: the value with which the other rates were fitted
        operator_us, order_us       of the host, for an operator, and for an event or a wait between streams
        loop_us                     of the host, for the rest of a step
        """
        fitted = rates or validated()["one_gpu"]
        device = replace(self.device, memory_efficiency=fitted["memory_efficiency"], host_us=fitted["operator_us"])
        scales = Scales(1.0, fitted["attention"], fitted["products"], fitted["unaligned"])
        costs = GpuCosts(device, self.cluster, self._bus, scales)
        costs.order_s, costs.loop_s, costs.launch_s = (
            fitted[f"{name}_us"] * US for name in ("order", "loop", "launch")
        )
        costs.one_stream = True
        return costs

    def peak_flops(self, dtype: str) -> float:
        """Returns the peak of matrix products in a precision, FLOPs per second."""
        peaks = self.device.peak_tflops
        return peaks.get(dtype, max(peaks.values())) * 1e12

    def compute(self, event: EventRow) -> float:
        """Returns the seconds of an operator's kernels."""
        if not self.one_stream or event.flops:
            slower = self.scales.compute if event.flops else 1.0  # a clock under load slows no memory
            return max(self.device.kernel_us * US, self._work(event)) * slower
        if not LISTS.match(event.operator):
            return self.kernels_s(event.bytes, OWN_LAUNCHES.get(event.operator, 1))
        twice = event.elements * (2 if SHORT.get(event.dtype) in HALVES else 4)
        size = event.bytes - twice * bool(TWICE.match(event.operator))
        return self.kernels_s(size, -(-event.elements // (BLOCK * self.most_blocks)), event.elements)

    def kernels_s(self, size: float, launches: float, elements: int = 0) -> float:
        """Returns the seconds of launches that read and write `size` bytes. `elements`: of a multi-tensor operator."""
        least = launches * min(elements, BLOCK) / TURN * LATENCY_S
        return launches * self.launch_s + max(self._memory_s(size), least)

    def _memory_s(self, size: float) -> float:
        return size / (self.device.memory_gb_s * GB_S * self.device.memory_efficiency)

    def _work(self, event: EventRow) -> float:
        device, memory = self.device, self._memory_s(event.bytes)
        if not event.flops:
            return memory
        dtype = SHORT.get(event.dtype, event.dtype)
        peak, sizes = self.peak_flops(dtype), numbers(event.sizes)
        if len(sizes) == 5:
            rates = device.attention_backward if BACKWARD in event.operator else device.attention_forward
            fraction = float(np.interp(math.log(sizes[2]), np.log(list(rates)), list(rates.values())))
            return max(memory, event.flops / (peak * fraction) * self.scales.attention)
        if len(sizes) == 4 and device.matmul_table and dtype in HALVES:
            batch, m, n, k = sizes
            slower = self.scales.unaligned if any(size % ALIGNED for size in sizes[1:]) else self.scales.products
            return max(memory, batch * matmul_table(device.matmul_table).seconds(m, n, k) * slower)
        return max(memory, event.flops / (peak * device.matmul_efficiency))

    def transfer(self, event: EventRow) -> Transfer:
        """Returns the cost of a collective; the host only launches it."""
        ranks = event.group_size
        if event.kind == MOVE:
            return Transfer(self.host_s, event.bytes / (ANY_BUS_GB_S * GB_S))
        if ranks <= 1:
            return Transfer(self.host_s, 0.0)
        kind = event.collective if event.collective in TABLE_NAMES else OPERATORS.get(event.operator, "all_reduce")
        members = min(ranks, max(1, self.cluster.devices_per_node // max(event.stride, 1)))
        inside = self._inside(kind, event.bytes, members) if members > 1 else 0.0
        between = self._between(kind, event, members) if ranks > members else 0.0
        return Transfer(self.host_s, max(inside, between))

    def _inside(self, kind: str, size: int, ranks: int) -> float:
        rows = _collectives(self.device.collectives_table) if self.device.collectives_table else {}
        measured = [n for name, n in rows if name == TABLE_NAMES[kind]]
        if not measured:
            return 10 * US + size * link_factor(kind, ranks) / (self.device.link_gb_s * GB_S)
        near = min(measured, key=lambda n: abs(math.log(n / ranks)))
        return rows[TABLE_NAMES[kind], near].seconds(max(size, 1) * link_factor(kind, ranks) / link_factor(kind, near))

    def _between(self, kind: str, event: EventRow, members: int) -> float:
        """Returns the seconds between nodes of a group with `members` ranks on each. As many similar groups as the
        stride between its ranks send at the same time. Only an all-to-all has parts for every rank.
        """
        cluster, ranks = self.cluster, event.group_size
        nodes = -(-ranks // members)
        if kind == "all_reduce":  # a tree over nodes, up and down
            steps_in_node, steps = 2 * (members - 1), 2 * math.ceil(math.log2(nodes))
        else:
            steps_in_node, steps = ranks - nodes, nodes
        if kind in self._bus:
            seconds = event.bytes * link_factor(kind, ranks) / (self._bus[kind] * GB_S)
        else:
            alike = min(max(event.stride, 1), cluster.devices_per_node) * (members if kind == "all_to_all" else 1)
            node_bytes_per_s = cluster.node_gbit_s * GBIT_S * cluster.network_efficiency
            seconds = alike * event.bytes * link_factor(kind, nodes) / node_bytes_per_s
        return min(
            (steps_in_node * in_node_us + steps * latency * cluster.network_latency_us) * US + slower * seconds
            for in_node_us, latency, slower in PROTOCOLS.values()
        )


ANY_BUS_GB_S = 24.0
"""Bandwidth between a GPU and its host: PCIe 4.0 x16 at 75 %, stated."""

OPERATORS = {
    "_allgather_base_": "all_gather", "allgather_": "all_gather", "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter", "allreduce_": "all_reduce", "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all", "all_to_all_single": "all_to_all", "broadcast_": "broadcast", "broadcast": "broadcast",
    "send": "broadcast",
}  # fmt: skip
"""Operator of a launch without an engine's label -> its kind."""


def costs_at(costs: GpuCosts, ranks: int) -> GpuCosts:
    """Returns the costs for `ranks` ranks: for a single one, with the rates fitted to steps on one GPU."""
    return costs.alone() if ranks == 1 and not costs.one_stream else costs


class _Curve:
    """Seconds over bytes, or over FLOPs, interpolated in logarithms."""

    def __init__(self, amounts: pd.Series | pd.Index, seconds: pd.Series) -> None:
        self._at, self._seconds = np.log(amounts.to_numpy(float)), np.log(seconds.to_numpy(float))

    def seconds(self, amount: float) -> float:
        at = math.log(max(amount, 1))
        if at > self._at[-1]:
            return float(np.exp(self._seconds[-1] + at - self._at[-1]))
        return float(np.exp(np.interp(at, self._at, self._seconds)))
