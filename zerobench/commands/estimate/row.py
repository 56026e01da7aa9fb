"""The estimate of one cell, as shown in the table, JSON and CSV. Bytes are for one rank, the fullest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ...config.cell import Cell, CellConfig
from ...fake_execution import Execution, Target
from ...fake_execution.parts import Parts
from ...predict.estimate import closed_form
from ...records import TensorRow

LARGEST = 5
"""Number of tensors at the peak that are listed individually."""


@dataclass(frozen=True)
class LargeTensor:
    """A storage that lives at the peak instant."""

    bytes: int
    """Its size."""
    part: str
    """Its part of the peak, as in parts_bytes."""
    name: str
    """Its label, a parameter's name or a unit; empty for activations."""
    module: str
    """The module that ran when it was made; empty for the model itself."""
    shape: str
    """Shape of the first tensor that used this storage, "4x1024x768"."""
    source: str
    """The line that made it."""

    @classmethod
    def of(cls, row: TensorRow, parts: Parts) -> LargeTensor:
        """Builds it from a row of the table of tensors."""
        return cls(row.bytes, parts.of(row), row.name, row.module, row.shape, row.source)

    @property
    def where(self) -> str:
        """Its name and the module that made it, if known."""
        return " in ".join(filter(None, dict.fromkeys([self.name, self.module]))) or "the model itself"


@dataclass(frozen=True)
class EstimateRow:
    """One cell. Where `problem` is not empty, figures that it kept from being found are None."""

    name: str
    """The strategy, and the keys in which cells of one strategy differ."""
    strategy: str
    """Choice of the key `strategy`."""
    model: str
    """Choice of the key `model`."""
    world_size: int
    """Ranks."""
    micro_batch: int
    """Sequences per rank in one forward."""
    accumulation: int
    """Micro-batches per step."""
    sequence: int
    """Tokens per sequence."""
    precision: str
    """dtypes of the training."""
    optimizer: str
    """Optimizer and its implementation on the device."""
    systems: str
    """Further axes that are not at their defaults: offload, activation, ..."""
    device: str
    """Device that it was executed for: cpu or cuda."""
    attention: str | None
    """Kernel of attention that was asked for."""
    problem: str = ""
    """An error message if there is no estimate."""
    rank: int | None = None
    """The rank that was executed, the fullest."""
    psi: int | None = None
    """Trainable parameters."""
    frozen: int | None = None
    """Parameters that are not trained."""
    peak_bytes: int | None = None
    """Largest sum of live bytes on the device in a step."""
    parts_bytes: dict[str, int] = field(default_factory=dict)
    """Part -> its bytes at the peak instant; their sum is peak_bytes."""
    states_bytes: int | None = None
    """Largest sum of parameters, gradients, masters, optimizer states and communication buffers."""
    formula_bytes: int | None = None
    """The paper's formula for these states; None if there is none for the strategy."""
    in_flight_bytes: int | None = None
    """states_bytes less formula_bytes: gathered units, buckets, temporaries of an update."""
    host_bytes: int = 0
    """Peak in host memory of the bytes that were sent there, on the rank with the most."""
    file_bytes: int = 0
    """Peak in files."""
    volume_psi: float | None = None
    """Elements that the rank moves in a step, by the paper's convention, over psi."""
    volume_elements: float | None = None
    """Elements that the rank moves in a step, by the paper's convention."""
    wire_bytes: float | None = None
    """Bytes that the rank sends in a step."""
    allocated_bytes: int | None = None
    """Peak of torch.cuda.memory_allocated: blocks of 512 bytes; cuda alone."""
    reserved_low_bytes: int | None = None
    """Least that the caching allocator reserves for it; cuda alone."""
    reserved_high_bytes: int | None = None
    """Most that it reserves; cuda alone."""
    tensors: tuple[LargeTensor, ...] = ()
    """The largest storages at the peak."""
    seconds: float | None = None
    """Time that the execution took."""
    config: dict[str, Any] = field(default_factory=dict)
    """The cell, as config.yaml of a run has it."""

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON."""
        return asdict(self)

    @property
    def needed_bytes(self) -> int | None:
        """Bytes that must fit the device: the most that its allocator reserves; for a CPU the peak."""
        return self.reserved_high_bytes or self.peak_bytes


def rows_of(cells: Sequence[Cell], names: Sequence[str], found: dict[str, Execution], target: Target,
            most: int = LARGEST) -> list[EstimateRow]:  # fmt: skip
    """Returns a row per cell. `found`: executions by the id of their cell; `most`: number of tensors to list."""
    return [_row_of(cell, name, found.get(cell.cell_id), target, most) for cell, name in zip(cells, names, strict=True)]


def _row_of(cell: Cell, name: str, execution: Execution | None, target: Target, most: int) -> EstimateRow:
    config = execution.config if execution is not None else cell.config
    setting: dict[str, Any] = {
        "name": name, "strategy": config.strategy.name, "model": model_of(config), "world_size": config.world_size,
        "micro_batch": config.micro_batch, "accumulation": config.accumulation, "sequence": config.sequence,
        "precision": config.precision.label, "optimizer": config.optimizer_label, "systems": config.systems_label,
        "device": target.kind, "attention": target.attention, "config": config.as_dict(),
    }  # fmt: skip
    if execution is None or execution.record is None:
        problem = "; ".join(cell.problems) if execution is None else execution.problem
        return EstimateRow(**setting, problem=problem)
    facts, states, parts = execution.facts, execution.states_bytes, Parts(execution)
    psi, formula = (facts.psi, closed_form(execution.config, facts)) if facts else (None, None)
    reserved = execution.reserved_bytes or (None, None)
    return EstimateRow(
        **setting, rank=execution.rank, psi=psi, frozen=facts.frozen if facts else None,
        peak_bytes=execution.peak_bytes,
        parts_bytes=parts.at_peak(), states_bytes=states, formula_bytes=formula,
        in_flight_bytes=None if formula is None else states - formula, host_bytes=execution.host_bytes,
        file_bytes=execution.file_bytes, volume_elements=execution.volume_elements,
        volume_psi=execution.volume_elements / psi if psi else None,
        wire_bytes=execution.wire_bytes, allocated_bytes=execution.allocated_bytes,
        reserved_low_bytes=reserved[0], reserved_high_bytes=reserved[1],
        tensors=tuple(LargeTensor.of(one, parts) for one in execution.tensors[:most]), seconds=execution.seconds,
    )  # fmt: skip


def model_of(config: CellConfig) -> str:
    """Returns the model's name, with its architecture unless it is a preset."""
    shape = config.huggingface if config.model_name == "huggingface" else None
    return config.model_name if shape is None else f"{config.model_name} {shape.architecture}"
