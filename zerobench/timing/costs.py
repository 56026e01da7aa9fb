"""Seconds of one operator on one device, and of one collective between devices.

matrix products   a table of measured times by shape, interpolated: log(time per FLOP) over log m, n, k, by the nearest
                  shapes; outside the table its nearest shape. Without a table a fraction of the peak
attention         FLOPs over a fraction of the peak, by sequence length
all else          bytes over a fraction of the memory's bandwidth, at least the shortest kernel
collectives       inside a node a table by size and ranks; between nodes the bytes that a node receives over its
                  network's bandwidth, with a latency per hop; the slower of both. A group's ranks per node follow
                  from the distance between them: each hop of a two-hop collective is priced by its own group

A collective that spans nodes gathers inside them as well, so the slower of the two sets its pace.

A step on one GPU has no collectives to hide behind, so its memory and its host count (GpuCosts.alone).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from ..calibrate.operators import APART, BESIDE, CALLED, CALLS, IN_STEP
from ..records import EventRow
from ..records.event_row import COMPUTE, LAUNCH, MOVE
from .hardware import GB_S, GBIT_S, TABLES, US, Cluster, Device, Scales, scales_of, validated

if TYPE_CHECKING:  # pandas and scipy take most of a second, which a plan without times does not spend
    import pandas as pd

    from ..calibrate.collectives import Calibration

NEIGHBORS = 16
"""Number of shapes of a table used to interpolate a shape."""

BACKWARD = "backward"
SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
HALVES = ("bf16", "fp16")
ALIGNED = 8
"""Elements of two bytes in 16 bytes: a row that is no multiple of them keeps a product from a GPU's fast kernels."""


@dataclass(frozen=True)
class Transfer:
    """A collective: `host_s`: seconds of the issuing thread; `wire_s`: seconds on the network, while others compute;
    `within_s`: the part of `host_s` that is done during `wire_s` if the host waits.
    """

    host_s: float
    wire_s: float
    within_s: float = 0.0


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
        self._find = RBFInterpolator(
            np.log(shapes), np.log(per_flop), neighbors=min(NEIGHBORS, len(rows)), kernel="linear"
        )
        self._known: dict[tuple[int, ...], float] = {}

    def seconds(self, m: int, n: int, k: int) -> float:
        """Returns the time of one (m, k) by (k, n) product."""
        shape = m, n, k
        if shape not in self._known:
            inside = np.clip(np.array(shape, float), self._low, self._high)
            self._known[shape] = float(np.exp(self._find(np.log(inside)[None])[0])) * 2 * math.prod(shape)
        return self._known[shape]


@cache
def matmul_rows(table: str) -> pd.DataFrame:
    """Returns columns m, n, k, seconds of a table by name (hardware.Device.matmul_table)."""
    import pandas as pd

    if table.endswith(".parquet"):
        rows = pd.read_parquet(TABLES / table)
        return rows[["m", "n", "k"]].assign(seconds=rows["latency_ms"] / 1e3)
    found = pd.read_csv(TABLES / "efficiency_by_shape.csv")
    found = found[(found["device"] == table) & (found["operator"] == "matmul")]
    shapes = found["shape"].str.extract(r"b=(?P<b>\d+), m=(?P<m>\d+), k=(?P<k>\d+), n=(?P<n>\d+)").astype(float)
    shapes = shapes.assign(efficiency=found["efficiency"], peak=found["peak_tflops"])[shapes["b"] == 1]
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
        (str(kind), int(str(ranks))): _Curve(mine["elements_fp16"] * 2, mine["latency_us"] * US)
        for (kind, ranks), mine in rows.groupby(["collective", "gpus"])
    }


FACTOR: dict[str, Callable[[int], float]] = {"all_reduce": lambda n: 2 * (n - 1) / n}
"""Collective -> bytes on a link over bytes of the tensor; (n - 1) / n for the others."""

TABLE_NAMES = {"all_gather": "all_gather", "reduce_scatter": "reduce_scatter", "all_reduce": "all_reduce",
               "all_to_all": "alltoall", "broadcast": "all_gather"}  # fmt: skip


def link_factor(kind: str, ranks: int) -> float:
    """Returns the bytes that a rank sends, over the bytes of the full tensor."""
    return FACTOR.get(kind, lambda n: (n - 1) / n)(ranks)


class GpuCosts:
    """Costs on GPUs of a cluster. `bus_gb_s`: collective -> bus bandwidth over all ranks measured on this cluster, in
    1e9 bytes per second as nccl-tests counts them; it replaces the network's.
    """

    blocking, one_stream = False, False
    order_s = loop_s = 0.0

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
        """Returns these costs for a rank without others, with `rates` in place of those fitted to one GPU's steps.

        memory_efficiency           of the bandwidth, which copies on other streams take from the model's
        products, unaligned         as in Scales
        operator_us, order_us       of the host, for an operator, and for an event or a wait between streams
        loop_us                     of the host, for the rest of a step
        """
        fitted = rates or validated()["one_gpu"]
        device = replace(self.device, memory_efficiency=fitted["memory_efficiency"], host_us=fitted["operator_us"])
        scales = Scales(1.0, self.scales.attention, fitted["products"], fitted["unaligned"])
        found = GpuCosts(device, self.cluster, self._bus, scales)
        found.order_s, found.loop_s, found.one_stream = fitted["order_us"] * US, fitted["loop_us"] * US, True
        return found

    def peak_flops(self, dtype: str) -> float:
        """Returns the peak of matrix products in a precision, FLOPs per second."""
        peaks = self.device.peak_tflops
        return peaks.get(dtype, max(peaks.values())) * 1e12

    def compute(self, event: EventRow) -> float:
        """Returns the seconds of an operator's kernels."""
        return max(self.device.kernel_us * US, self._work(event)) * self.scales.compute

    def _work(self, event: EventRow) -> float:
        device = self.device
        memory = event.bytes / (device.memory_gb_s * GB_S * device.memory_efficiency)
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
        there = [n for one, n in rows if one == TABLE_NAMES[kind]]
        if not there:
            return 10 * US + size * link_factor(kind, ranks) / (self.device.link_gb_s * GB_S)
        near = min(there, key=lambda n: abs(math.log(n / ranks)))
        return rows[TABLE_NAMES[kind], near].seconds(max(size, 1) * link_factor(kind, ranks) / link_factor(kind, near))

    def _between(self, kind: str, event: EventRow, members: int) -> float:
        """Returns the seconds between nodes of a group with `members` ranks on each. As many similar groups as the
        stride between its ranks send at the same time. Only an all-to-all has parts for every rank.
        """
        cluster, ranks = self.cluster, event.group_size
        nodes = -(-ranks // members)
        hops = 2 * math.ceil(math.log2(nodes)) * cluster.network_latency_us * US
        if kind in self._bus:
            return hops + event.bytes * link_factor(kind, ranks) / (self._bus[kind] * GB_S)
        alike = min(max(event.stride, 1), cluster.devices_per_node) * (members if kind == "all_to_all" else 1)
        node_bytes_per_s = cluster.node_gbit_s * GBIT_S * cluster.network_efficiency
        return hops + alike * event.bytes * link_factor(kind, nodes) / node_bytes_per_s

    def apart(self, seconds: float) -> float:
        """Returns 0 in place of the seconds by which the last rank is later than the mean: no table has it."""
        return 0.0


ANY_BUS_GB_S = 24.0
"""Bandwidth between a GPU and its host: PCIe 4.0 x16 at 75 %, stated."""

OPERATORS = {
    "_allgather_base_": "all_gather", "allgather_": "all_gather", "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter", "allreduce_": "all_reduce", "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast", "send": "broadcast",
}  # fmt: skip
"""Operator of a launch without an engine's label -> its kind."""


# -- a CPU -----------------------------------------------------------------------------------------


class CpuCosts:
    """Costs on a machine that `zerobench calibrate --compute` has measured. The host itself computes.

    `link_bytes_per_s`: of a network between two nodes with half of the ranks each, which transfers while they compute;
    None: they are on one machine. If the ranks use all cores, they do a collective's work themselves; `has_idle_core`:
    they do not.
    """

    blocking, one_stream, contention = True, False, 1.0
    host_s = order_s = loop_s = 0.0

    def __init__(
        self, operators: pd.DataFrame, calibration: Calibration, cores: int, link_bytes_per_s: float | None = None
    ) -> None:
        import pandas as pd

        self.ranks = int(operators["world_size"].iloc[0])
        shapes = operators[operators["operator"] == "mm"]["sizes"].str.split("x", expand=True).astype(int)
        products = pd.DataFrame({"m": shapes[1], "n": shapes[2], "k": shapes[3]})
        self._products = ShapeTable(products.assign(seconds=operators.loc[shapes.index, "seconds"]))
        sized = operators[(operators["operator"] != "mm") & operators[["bytes", "flops"]].any(axis=1)]
        self._curves = {str(name): _Curve.of(rows) for name, rows in sized.groupby("operator")}
        known = operators.groupby("operator")["seconds"].mean()
        self._in_step = float(known.get(IN_STEP, 0.0))
        self._call = {via: float(known.get(name, 0.0)) for via, name in CALLS.items()}
        apart = operators[operators["operator"] == APART]
        self._apart = [0.0, *apart["sizes"].astype(float)], [0.0, *apart["seconds"]]
        self._calibration, self.has_idle_core = calibration, cores > self.ranks
        self._link = link_bytes_per_s

    def peak_flops(self, dtype: str) -> float | None:
        """Returns None: the peak of a CPU is not known."""
        return None

    def compute(self, event: EventRow) -> float:
        """Returns the seconds of an operator in a step."""
        return max(0.0, self._alone(event) + (self._in_step if is_cold(event) else 0.0))

    def _alone(self, event: EventRow) -> float:
        sizes = numbers(event.sizes)
        if len(sizes) == 4:
            batch, m, n, k = sizes
            return batch * self._products.seconds(m, n, k)
        name = ALIKE.get(event.operator, event.operator)
        curve = self._curves.get(name) or self._curves["copy_"]
        return curve.seconds(event.flops if len(sizes) == 5 else event.bytes)

    def transfer(self, event: EventRow) -> Transfer:
        """Returns the cost of a launch: the engine's collectives are sends, other strategies' are torch's."""
        ranks = event.group_size
        if ranks <= 1 or event.kind == MOVE:
            return Transfer(0.0, 0.0)
        own = event.operator == "send"
        kind = event.collective if event.collective in TABLE_NAMES else OPERATORS.get(event.operator, "all_reduce")
        size = event.wire_bytes / link_factor(kind, ranks) if own else event.bytes
        line = self._calibration.fit(kind if kind != "all_to_all" else "all_gather", ranks, "seam" if own else "torch")
        alone, via = line.seconds(int(size)), "seam" if own else "torch"
        wire = 0.0
        if self._link is not None:
            slower = OVER_RATE.get((via, kind, ranks > 2), 1.0) if event.wire_bytes >= LARGE_BYTES else 1.0
            wire = crossing(via, kind, event.wire_bytes, ranks) * slower / (self._link * TCP)
        call = self._call[via] if is_called(event) else 0.0
        if self.has_idle_core:
            return Transfer(max(0.0, call), alone + wire)
        curve = self._curves.get(f"{BESIDE} {via} {kind}")
        beside = alone if curve is None else curve.seconds(int(size))
        host = max(0.0, beside + call)
        if self._link is None:
            return Transfer(host, max(0.0, alone - beside))
        return Transfer(host, wire, min(host, beside, wire))

    def apart(self, seconds: float) -> float:
        """Returns how late the last rank is; after more than the longest measured time as late as after that."""
        return float(np.interp(seconds, *self._apart))


def costs_at(costs: Costs, ranks: int) -> Costs:
    """Returns the costs of a world: on one GPU the rates of one."""
    return costs.alone() if isinstance(costs, GpuCosts) and ranks == 1 and not costs.one_stream else costs


Costs = GpuCosts | CpuCosts
"""A device's costs, for a timeline. `blocking`: the host itself computes. `one_stream`: all streams take turns.
`host_s`, `order_s`, `loop_s`: of the host, for an operator, an order between streams, and the rest of a step.
"""

COLD_BYTES = 2**20


def is_cold(event: EventRow) -> bool:
    """Returns whether an operator takes longer in a step than alone: its tensors are not in a core's cache. Small ones
    in a loop, such as those of quantization, find theirs there.
    """
    return event.kind == COMPUTE and event.bytes >= COLD_BYTES


def is_called(event: EventRow) -> bool:
    """Returns whether a launch has the cost of a call: hooks within forward and backward launch it, not the loop after
    the update.
    """
    return event.kind == LAUNCH and event.collective in CALLED and event.phase in ("forward", "backward")


def crossing(via: str, kind: str, sent: float, ranks: int) -> float:
    """Returns the bytes of a collective of all ranks that cross a link between two nodes in each direction, half of the
    ranks on each. `sent`: the bytes that a rank must send. Our ranks send to every other one; torch's on gloo send to a
    neighbor in a ring.
    """
    if via == "torch":
        return sent * GLOO_SENDS.get(kind, 1.0)
    return sent * (ranks // 2) * (ranks - ranks // 2) / (ranks - 1)


GLOO_SENDS = {"reduce_scatter": 2.0}
"""torch's collective on gloo -> bytes sent over bytes needed: its reduce-scatter is an all-reduce
(torch/csrc/distributed/c10d/ProcessGroupGloo.cpp).
"""

LARGE_BYTES = 2 * 2**20
OVER_RATE = {("torch", "all_gather", False): 1.45, ("seam", "reduce_scatter", True): 1.17}
"""(via, collective, more than two ranks) -> seconds over those of the link's rate if a rank sends LARGE_BYTES or more,
measured in series of ten.

torch's all-gather between two ranks on gloo: the request for the next slice waits behind the data of the last in the
same connection, so that the directions partly take turns; in larger groups it has a connection of its own. Our
reduce-scatter among more than two ranks receives into two slots (zero/comm/gloo.py).
"""

TCP = 0.95
"""Fraction of a link's rate that remains with the headers of 1,448-byte segments."""


class _Curve:
    """Seconds over bytes, or over FLOPs, interpolated in logarithms."""

    def __init__(self, amounts: pd.Series | pd.Index, seconds: pd.Series) -> None:
        self._at, self._seconds = np.log(amounts.to_numpy(float)), np.log(seconds.to_numpy(float))

    @staticmethod
    def of(rows: pd.DataFrame) -> _Curve:
        """Returns the curve of an operator over its bytes, or of attention over its FLOPs."""
        medians = rows.groupby("flops" if rows["flops"].max() else "bytes")["seconds"].median()
        return _Curve(medians.index, medians)

    def seconds(self, amount: float) -> float:
        at = math.log(max(amount, 1))
        if at > self._at[-1]:
            return float(np.exp(self._seconds[-1] + at - self._at[-1]))
        return float(np.exp(np.interp(at, self._at, self._seconds)))


ALIKE = {
    "add_": "add", "mul_": "mul", "div": "mul", "zeros": "zero_", "fsdp.all_gather_copy_in": "copy_",
    "fsdp.split_with_sizes_copy": "copy_", "fsdp.chunk_cat": "copy_", "_to_copy": "clone", "cat": "stack",
    "_foreach_copy_": "copy_", "_foreach_add_": "add", "gelu_": "gelu", "nll_loss_backward": "zero_",
    "embedding_dense_backward": "zero_", "embedding": "clone",
}  # fmt: skip
"""Operator -> the measured operator that does the same work per byte."""
