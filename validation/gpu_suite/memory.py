"""Section 4: the memory of one rank of 8 and of 64. A simulated world: real tensors, no other ranks.

Beside the measured bytes are our prediction and the paper's formula (ZeRO, arXiv 1910.02054, figure 1). In fp32 with
Adam that is, in bytes per parameter: DDP 16, P_os 4 + 12/N, P_os+g 2 + 14/N, P_os+g+p 16/N.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zerobench import strategies
from zerobench.config.cell import Cell, CellConfig
from zerobench.sizes import show_bytes

from .section import OURS, SuiteLaunch, SuiteSection, SuiteSetup, SuiteTable, padded, shorter

SAME = (
    "backend=simulated", "precision=bf16", "data=synthetic", "draw_on=device", "measure.warmup=2", "measure.steps=1",
)  # fmt: skip
"""Bytes are counted from the third step on, and are then the same in every step."""


@dataclass(frozen=True)
class MemoryWorkload:
    """A model and its batch, in worlds of so many ranks. `ours`: overrides for our strategies only."""

    model: tuple[str, ...]
    worlds: tuple[int, ...] = (8, 64)
    ours: tuple[str, ...] = ()


WORKLOADS = (
    MemoryWorkload(("model=gpt2_124m", "sequence=1024", "micro_batch=4"), worlds=(8,)),
    MemoryWorkload(("model=gpt2_1_5b", "sequence=1024", "micro_batch=4"), worlds=(8,)),
    MemoryWorkload(("model=gpt2_1_5b", "sequence=1024", "micro_batch=4", "model.checkpointing=true")),
    MemoryWorkload(("model=gpt_7b", "sequence=1024", "micro_batch=4", "model.checkpointing=true"),
             ours=("strategy.construct=meta",)),
)  # fmt: skip
"""A 7B is built by no rank as a whole: its 28 GB in fp32 may be more than a card has, and more than zero3 needs."""
SMALL_WORKLOADS = (
    MemoryWorkload(("model=gpt", "model.layers=2", "model.hidden=32", "model.heads=2", "sequence=32", "micro_batch=2",
         "model.checkpointing=true", "launch.threads=1"), worlds=(8,)),
)  # fmt: skip


def _cells(setup: SuiteSetup) -> list[Cell]:
    found = []
    for workload in SMALL_WORKLOADS if setup.small else WORKLOADS:
        what = (*SAME, *workload.model)
        found += setup.cells(
            "memory", "strategy=ddp", f"world_size={workload.worlds[0]}", *what
        )  # the same in any world
        found += setup.cells(
            "memory", f"strategy={OURS}", f"world_size={','.join(map(str, workload.worlds))}", *what, *workload.ours
        )
    return found


HEADER = [
    "cell", "peak", "states", "predicted", "paper", "bytes a parameter", "paper's", "activations, peak", "allocated",
    "outside",
]  # fmt: skip


def _table(setup: SuiteSetup, done: list[SuiteLaunch]) -> SuiteTable:
    names, notes = shorter(done)
    rows = [
        [names[one.name], *_show(one.row)] if _has_row(one) else padded([names[one.name]], one.words, len(HEADER))
        for one in done
    ]
    notes += ["peak: the ledger's; states: parameters, gradients, masters, optimizer and what is being sent, at most"]
    notes += ["outside: what the allocator has at its peak beyond the ledger: kernels, libraries, rounding"]
    notes += [note for one in done if _has_row(one) and (note := _published(one.cell, one.row))]
    return SuiteTable(HEADER, rows, notes)


def _has_row(one: SuiteLaunch) -> bool:
    return one.is_ok and one.row is not None


def _show(row: Any) -> list[str]:
    psi, floor = row["psi"], row["floor_states_bytes"]
    return [
        show_bytes(row["peak_bytes"]), show_bytes(row["states_bytes"]), show_bytes(row["predicted_states_bytes"]),
        show_bytes(floor), f"{row['states_bytes'] / psi:.3f}", f"{floor / psi:.3f}",
        show_bytes(row["peak_activations_bytes"]), show_bytes(row["allocated_bytes"]),
        show_bytes(row["outside_ledger_bytes"]),
    ]  # fmt: skip


def _published(config: CellConfig, row: Any) -> str | None:
    """ZeRO, section 3.2, on GPT-2 1.5B's activations at 32 sequences of 1K tokens: 60 GB, and 8 GB with checkpoints."""
    if config.model_name != "gpt2_1_5b" or config.strategy.name != strategies.reference().name:
        return None
    recomputed = config.model.checkpoints
    at_32 = row["max_activations_bytes"] * 32 / config.micro_batch / 1e9
    how, paper = ("recomputed", 8) if recomputed else ("kept", 60)
    return (
        f"GPT-2 1.5B's activations {how}, at 32 sequences: {at_32:.0f} GB by these runs, about {paper} GB in the paper"
    )


MEMORY = SuiteSection(
    name="memory",
    title="Memory of one rank of N",
    asks="What do DDP and ZeRO-1, 2, 3 need on one rank of 8 and of 64, beside our prediction and the paper's formula?",
    seconds=122,
    cells=_cells,
    table=_table,
    answers=("ok", "oom"),
)
