"""The time of a model's operators on a CPU, by shape and size, on all ranks concurrently: the input of a prediction.

matrix product   by m, n, k
attention        forward and backward, by b x heads x queries x keys x head
all else         by the bytes that it reads and writes
beside           a collective's cost to a rank that computes meanwhile: compute with it minus compute alone, by the
                 bytes of the full tensor. It includes the wait for the last rank
apart            how much later than their mean the last rank arrives, by the seconds that all have computed since they
                 last met (`sizes`): what a collective waits for before it moves a byte
step             of a reference model in training, without communication (timing/reference.py)
in step          what that step takes beyond the times above, divided by its operators on 1 MiB or more: in a step
                 caches are cold, and Python and autograd run between operators. Below 0 if it takes less
call             what a reference step with communication takes beyond its layout, divided by its launches in forward
                 and backward, for our collectives (`seam`) and for torch's: Python of hooks, ranks that wait for one
                 another, and whatever else the layout lacks. Below 0 if the layout is too slow

Every rank computes with one thread, and all of them at the same time, so that what they share (cores, caches, memory)
is shared as in training. Each time is the median of the repetitions, the mean over the ranks. A folder of a calibration
holds them as `operators.parquet`, one OperatorTime each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from ..host.environment import Rendezvous, rank_environment
from ..zero.comm.base import Comm
from ..zero.comm.hierarchical import connect
from .collectives import evenly, own_slice, replace_table

if TYPE_CHECKING:  # imported when a table is read or written
    import pandas as pd

FILE = "operators.parquet"


@dataclass(frozen=True)
class OperatorTime:
    """Seconds of one call. `operator`, `sizes`, `bytes`: as in the events of a schedule (records/event_row.py)."""

    operator: str
    sizes: str
    bytes: int
    flops: int
    world_size: int
    seconds: float


@dataclass(frozen=True)
class OperatorJob:
    """The work of one rank."""

    rank: int
    world_size: int
    rendezvous: Rendezvous
    repetitions: int
    timeout_s: float


@dataclass(frozen=True)
class Sample:
    """One call to time: `make` returns it, with its tensors made."""

    operator: str
    make: Callable[[], Callable[[], object]]
    sizes: str = ""
    bytes: int = 0
    flops: int = 0


# -- what is measured ------------------------------------------------------------------------------


EDGES = (64, 128, 256, 512, 1024, 2048, 4096)
LEAST_FLOPS, MOST_FLOPS = 4e6, 3e9
"""Sizes of matrix products: smaller ones take no time, larger ones too much."""

BYTES = tuple(2**power for power in range(14, 27, 2))
WIDTH = 512
ATTENTIONS = tuple(product((4, 16, 64), (64, 128, 512), (32, 64)))
"""(heads in all, tokens, width of a head)."""


def samples() -> list[Sample]:
    """Returns all that is measured, in an order that spreads each kind over the time that it takes."""
    others = (Sample(name, partial(make, size), bytes=size) for name, make in OTHERS.items() for size in BYTES)
    made = [*_products(), *_attentions(), *others]
    step = 17
    return [one for start in range(step) for one in made[start::step]]


def _products() -> Iterator[Sample]:
    for m, n, k in product(EDGES, repeat=3):
        if LEAST_FLOPS <= 2 * m * n * k <= MOST_FLOPS:
            make = partial(_product, m, n, k)
            yield Sample("mm", make, f"1x{m}x{n}x{k}", 4 * (m * k + k * n + m * n), 2 * m * n * k)


def _product(m: int, n: int, k: int) -> Callable[[], object]:
    return partial(torch.mm, torch.ones(m, k), torch.ones(n, k).t())  # as a Linear has its weight


def _attentions() -> Iterator[Sample]:
    name = "_scaled_dot_product_flash_attention_for_cpu"
    for heads, tokens, width in ATTENTIONS:
        flops, size = 4 * heads * tokens * tokens * width, 4 * heads * tokens * width
        sizes = f"1x{heads}x{tokens}x{tokens}x{width}"
        yield Sample(name, partial(_attention, heads, tokens, width), sizes, 4 * size, flops)
        backward = partial(_attention_backward, heads, tokens, width)
        yield Sample(f"{name}_backward", backward, sizes, 8 * size, 5 * flops // 2)


def _attention(heads: int, tokens: int, width: int) -> Callable[[], Any]:
    tensors = [torch.ones(1, heads, tokens, width) for _ in range(3)]
    return partial(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, *tensors, 0.0, True)


def _attention_backward(heads: int, tokens: int, width: int) -> Callable[[], Any]:
    tensors = [torch.ones(1, heads, tokens, width) for _ in range(3)]
    back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*tensors, 0.0, True)
    return partial(back, out, *tensors, out, sums, 0.0, True)


def _rows(size: int, tensors: int) -> torch.Tensor:
    """Returns a tensor of which `tensors` have `size` bytes, (rows, WIDTH)."""
    return torch.ones(max(1, size // (4 * WIDTH * tensors)), WIDTH)


def _adamw(size: int) -> Callable[[], object]:
    lists = [[_rows(size, 8).abs()] for _ in range(4)]
    named = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8}
    return partial(torch._fused_adamw_, *lists, [], [torch.ones(())], amsgrad=False, maximize=False, **named)


def _norm_backward(size: int) -> Callable[[], object]:
    x, weight, bias = _rows(size, 3), torch.ones(WIDTH), torch.zeros(WIDTH)
    _, means, deviations = torch.native_layer_norm(x, [WIDTH], weight, bias, 1e-5)
    back = torch.ops.aten.native_layer_norm_backward
    return lambda: back(x, x, [WIDTH], means, deviations, weight, bias, [True, True, True])


def _softmax_backward(size: int) -> Callable[[], object]:
    x = _rows(size, 3)
    out = torch.log_softmax(x, -1)
    return lambda: torch.ops.aten._log_softmax_backward_data(x, out, -1, torch.float32)


def _with(call: Callable[..., object], tensors: int, inputs: int = 1) -> Callable[[int], Callable[[], object]]:
    def make(size: int) -> Callable[[], object]:
        return partial(call, *(_rows(size, tensors) for _ in range(inputs)))

    return make


OTHERS: dict[str, Callable[[int], Callable[[], object]]] = {
    "copy_": _with(lambda x, y: y.copy_(x), 2, inputs=2),
    "clone": _with(torch.clone, 2),
    "zero_": _with(torch.zero_, 1),
    "add": _with(torch.add, 3, inputs=2),
    "mul": _with(lambda x: torch.mul(x, 0.5), 2),
    "div_": _with(lambda x: x.div_(1.0), 2),
    "sum": _with(lambda x: torch.sum(x, 0), 1),
    "gelu": _with(F.gelu, 2),
    "gelu_backward": _with(torch.ops.aten.gelu_backward, 3, inputs=2),
    "silu": _with(F.silu, 2),
    "tanh": _with(torch.tanh, 2),
    "native_layer_norm": _with(lambda x: F.layer_norm(x, [WIDTH]), 2),
    "native_layer_norm_backward": _norm_backward,
    "_log_softmax": _with(lambda x: torch.log_softmax(x, -1), 2),
    "_log_softmax_backward_data": _softmax_backward,
    "_softmax": _with(lambda x: torch.softmax(x, -1), 2),
    "stack": _with(lambda x, y: torch.stack([x, y]), 4, inputs=2),
    "_fused_adamw_": _adamw,
}
"""Operator -> what makes one call that reads and writes so many bytes."""


# -- one rank --------------------------------------------------------------------------------------


COLD_BYTES, MOST_COPIES = 2**26, 64
"""An operator is called on so many bytes in turns, or so many sets of tensors, that no cache holds the next ones: in a
step nothing is used twice in a row."""

LEAST_S = 2e-3
"""A repetition calls an operator as often as it takes to last so long."""


BESIDE = "beside"
STEP, IN_STEP = "step", "in step"
APART = "apart"
CALLS = {"seam": "call seam", "torch": "call torch"}
CALLED = ("all_gather", "reduce_scatter")
"""The collectives that a call's cost is counted for: no step of the calibration has others that Python launches."""
BESIDE_BYTES = tuple(2**power for power in (18, 20, 22, 24))
BESIDE_REPETITIONS = 12
BLOCK_S = 0.04
"""Compute beside which a collective runs, seconds."""

APART_S = (0.005, 0.02, 0.08, 0.32)
APART_REPETITIONS = 15
"""Seconds of compute after which ranks meet, and how often each."""

COLLECTIVES: dict[tuple[str, str], Callable[[Comm, torch.Tensor], Callable[[], object]]] = {
    ("seam", "reduce_scatter"): lambda comm, full: comm.reduce_scatter(full).wait,
    ("seam", "all_gather"): lambda comm, full: comm.all_gather(full).wait,
    ("torch", "reduce_scatter"): lambda _, full: (
        dist.reduce_scatter_tensor(own_slice(full).clone(), full, async_op=True).wait
    ),
    ("torch", "all_gather"): lambda _, full: (
        dist.all_gather_into_tensor(full, own_slice(full).clone(), async_op=True).wait
    ),
    ("torch", "all_reduce"): lambda _, full: dist.all_reduce(full, async_op=True).wait,
}
"""(via, collective) -> launches it over a full tensor, and returns what waits for it."""


def _beside() -> list[OperatorTime]:
    """Returns the cost of each collective to a rank that computes meanwhile."""
    comm = connect(None, torch.device("cpu"))
    block = _product(512, 1536, 384)
    times = max(1, round(BLOCK_S / _seconds([block], 3)))
    rows, ranks = [], dist.get_world_size()
    for (via, kind), begin in COLLECTIVES.items():
        for size in BESIDE_BYTES:
            full = torch.zeros(evenly(size, ranks) // 4)
            found = [_extra(comm, full, begin, block, times) for _ in range(BESIDE_REPETITIONS + 1)][1:]
            rows.append(OperatorTime(f"{BESIDE} {via} {kind}", "", size, 0, ranks, max(median(found), 1e-6)))
    return rows


def _extra(comm: Comm, full: torch.Tensor, begin: Any, block: Callable[[], object], times: int) -> float:
    alone, _ = _compute_and_meet(block, times)
    started = time.perf_counter()
    wait = begin(comm, full)
    for _ in range(times):
        block()
    wait()
    return time.perf_counter() - started - alone


def _compute_and_meet(block: Callable[[], object], times: int) -> tuple[float, float]:
    """Returns the seconds of this rank's blocks, and until the last rank has computed its own."""
    dist.barrier()
    started = time.perf_counter()
    dist.barrier()
    barrier = time.perf_counter() - started
    started = time.perf_counter()
    for _ in range(times):
        block()
    mine = time.perf_counter() - started
    dist.barrier()
    return mine, time.perf_counter() - started - barrier


def _apart() -> list[OperatorTime]:
    """Returns how much later than the mean the last rank arrives."""
    block = _product(512, 1536, 384)
    per_second = torch.tensor(1 / _seconds([block], 20))
    dist.broadcast(per_second, 0)
    rows, ranks = [], dist.get_world_size()
    for seconds in APART_S:
        found = []
        for _ in range(APART_REPETITIONS):
            mine, until_all = _compute_and_meet(block, max(1, round(seconds * float(per_second))))
            whole = torch.tensor(mine)
            dist.all_reduce(whole)
            found.append(until_all - float(whole) / ranks)
        rows.append(OperatorTime(APART, f"{seconds:g}", 0, 0, ranks, max(0.0, median(found))))
    return rows


def time_operators(job: OperatorJob, tell: Callable[[int], None]) -> list[OperatorTime]:
    """Returns this rank's times. `tell` receives the number of operators that are done."""
    rows = []
    with rank_environment(job.rank, job.world_size, "cpu", "gloo", job.rendezvous, 1, job.timeout_s), torch.no_grad():
        for number, sample in enumerate(samples(), 1):
            calls = [sample.make() for _ in range(min(MOST_COPIES, 1 + COLD_BYTES // max(sample.bytes, 1)))]
            _seconds(calls, 1)
            times = max(1, round(LEAST_S / max(_seconds(calls, 1) * len(calls), 1e-7)))
            if job.world_size > 1:
                dist.barrier()
            found = median(_seconds(calls, times) for _ in range(job.repetitions))
            rows.append(OperatorTime(sample.operator, sample.sizes, sample.bytes, sample.flops, job.world_size, found))
            if job.rank == 0:
                tell(number)
        if job.world_size > 1:
            rows += [*_apart(), *_beside()]
    return rows


def _seconds(calls: Sequence[Callable[[], object]], times: int) -> float:
    """Returns the time of one call, of `times` rounds through all."""
    begun = time.perf_counter()
    for _ in range(times):
        for call in calls:
            call()
    return (time.perf_counter() - begun) / (times * len(calls))


def mean_of_ranks(ranks: Sequence[list[OperatorTime]]) -> list[OperatorTime]:
    """Returns a row for each operator: the mean over the ranks, which all compute at the same time."""
    return [replace(same[0], seconds=mean(row.seconds for row in same)) for same in zip(*ranks, strict=True)]


def write_operators(folder: Path, rows: Sequence[OperatorTime]) -> None:
    """Writes the times beside the collectives of the same calibration."""
    import pandas as pd

    folder.mkdir(parents=True, exist_ok=True)
    replace_table(folder / FILE, pd.DataFrame([asdict(row) for row in rows]))


def load_operators(folder: Path) -> pd.DataFrame:
    """Reads the times. Raises FileNotFoundError with the command that makes them."""
    import pandas as pd

    if not (folder / FILE).is_file():
        raise FileNotFoundError(
            f"{folder}: no times of operators; zerobench calibrate --compute --out {folder} makes them"
        )
    return pd.read_parquet(folder / FILE)
