"""One rank of a cell, executed on fake tensors in this process: what a run would hold, and send, before there is one.

cell        any resolved cell; it is run as backend=simulated tensors=fake, with as few steps as reach the steady state
rank        the one that the cell names, or the fullest
execution   that rank's records, as an accounted pass leaves them, or the sentence that says why there are none
"""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch.distributed as dist

from ..config.cell import CellConfig
from ..fake.as_gpu import DeviceMemory
from ..host.environment import FAKE, SIMULATED
from ..predict.estimate import host_bytes_beyond, simulated_rank
from ..rank_record import RankRecord
from ..records import CATEGORIES, STATES, MemoryRow, TensorRow
from ..worker import RankJob, run_rank
from .steady_step import settled
from .target import CPU, Target

Tell = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Execution:
    """The findings on one rank of a cell: its memory, its traffic.

    `problem`: a sentence where it could not be executed, else empty. `seconds`: time that the execution itself took.
    `memory`: a GPU's, under its allocator; None for a CPU. `resident_bytes`: the most memory that the process which
    executed it has had of this machine's.
    """

    config: CellConfig
    rank: int
    seconds: float
    record: RankRecord | None
    problem: str = ""
    memory: DeviceMemory | None = None
    resident_bytes: int = 0

    @property
    def allocated_bytes(self) -> int | None:
        """The peak as a GPU's allocator has it: in blocks of 512 bytes, with cuBLAS's workspaces; None for a CPU."""
        return None if self.memory is None else self.memory.allocated_bytes

    @property
    def reserved_bytes(self) -> tuple[int, int] | None:
        """Bytes that a GPU's allocator reserves, by default and with expandable segments, smaller first; CPU: None."""
        return None if self.memory is None else self.memory.reserved_bytes

    @property
    def peak_bytes(self) -> int:
        """The largest sum of live bytes on the device in a step."""
        return self._of("total").max_bytes

    @property
    def states_bytes(self) -> int:
        """The largest sum of the states on the device: parameters, gradients, masters, optimizer, communication."""
        return self._of("states").max_bytes

    @property
    def host_bytes(self) -> int:
        """The largest sum of live bytes in host memory in a step, on the rank that is fullest there."""
        return self._largest_in("host") + host_bytes_beyond(self.config, self.known.schedule, self.rank)

    @property
    def file_bytes(self) -> int:
        """The largest sum of bytes in files in a step."""
        return self._largest_in("nvme")

    @property
    def at_peak(self) -> dict[str, int]:
        """Category -> its bytes at the peak instant; they add up to `peak_bytes`."""
        return {category: self._of(category).at_peak_bytes or 0 for category in CATEGORIES}

    @property
    def at_most_states(self) -> dict[str, int]:
        """Category of states -> its bytes when their sum is largest; they add up to `states_bytes`."""
        return {category: self._of(category).at_states_peak_bytes or 0 for category in STATES}

    @property
    def tensors(self) -> list[TensorRow]:
        """The largest storages at the peak instant."""
        return self.known.tensors

    @property
    def volume_elements(self) -> float:
        """Elements that the rank moves in a step, by the paper's convention."""
        return sum(row.volume_elements for row in self.known.traffic)

    @property
    def wire_bytes(self) -> float:
        """Bytes that the rank sends in a step, without control traffic."""
        return sum(row.wire_bytes for row in self.known.traffic if not row.control)

    @property
    def known(self) -> RankRecord:
        """The record. Raises ValueError where the cell could not be executed."""
        if self.record is None:
            raise ValueError(self.problem)
        return self.record

    @cached_property
    def _step(self) -> dict[str, MemoryRow]:
        return {row.category: row for row in self.known.memory if row.phase == "step" and row.tier == "device"}

    def _largest_in(self, tier: str) -> int:
        rows = [row for row in self.known.memory if (row.phase, row.tier, row.category) == ("step", tier, "total")]
        return max((row.max_bytes for row in rows), default=0)

    def _of(self, category: str) -> MemoryRow:
        return self._step[category]


def execute(config: CellConfig, tell: Tell = lambda _: None, target: Target = CPU) -> Execution:
    """Executes one rank of a resolved cell as on `target`. Whatever goes wrong is a sentence of the result. `tell`
    takes progress.
    """
    config = replace(settled(target.defaults(config)), backend=SIMULATED, device="cpu", tensors=FAKE)
    rank, begun = simulated_rank(config), time.perf_counter()
    record, memory, problem = None, None, ""
    with tempfile.TemporaryDirectory(prefix="zerobench-") as folder:
        try:
            with target.stands_in() as allocations:
                record = run_rank(RankJob(config, "accounted", rank, "", folder), tell)
            memory = None if allocations is None else allocations.memory()
        except Exception as error:  # a model may be any code: the other cells are executed all the same
            problem = sentence_of(error)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Execution(config, rank, time.perf_counter() - begun, record, problem, memory, resident)


def sentence_of(error: BaseException) -> str:
    """Returns an error as one line: its message, and its type where that is not one of ours."""
    words = (str(error).strip() or "no message").splitlines()[0]
    return words if type(error).__module__.startswith("zerobench") else f"{type(error).__name__}: {words}"
