"""Sections 6, 7 and 9: cells of the harness alone. The speed of a step, the memory of a rank, parity with DDP."""

from __future__ import annotations

from typing import Any

import pandas as pd

from zerobench import strategies
from zerobench.config.cell import Cell, CellConfig
from zerobench.records import RunRow
from zerobench.results.frames import frame_of
from zerobench.results.summary import summarize
from zerobench.results.tables import load
from zerobench.sizes import show_bytes
from zerobench.sweep.parity import DIFFERS, UNCHECKED, compare

from .suite import NONE, OURS, SuiteLaunch, SuiteSection, SuiteSetup, SuiteTable, shorter

SMALL_GPT = ("model=gpt", "model.layers=2", "model.hidden=32", "model.heads=2", "sequence=32", "micro_batch=2")

# -- parity --------------------------------------------------------------------------------------------------

ALL, BELOW_FP32 = "ddp,zero1,zero2,zero3,megatron,fsdp2", "ddp,zero1,zero2,zero3,fsdp2"
WORLDS = ((1, "fp32", ALL), (2, "fp32", ALL), (1, "bf16", BELOW_FP32), (2, "bf16", BELOW_FP32))
SMALL_WORLDS = ((2, "fp32", "ddp,zero3"), (2, "bf16", "ddp,zero2,fsdp2"))
"""Ranks, precision, strategies. Two ranks share a GPU if there is only one."""

PARITY_SHAPE = ("model=gpt_tiny", "sequence=128", "micro_batch=4", "measure.steps=4")
SMALL_PARITY_SHAPE = (
    "model=gpt", "model.layers=1", "model.hidden=16", "model.heads=2", "sequence=16", "micro_batch=2",
    "measure.steps=2", "launch.threads=1",
)  # fmt: skip


def _parity_cells(setup: SuiteSetup) -> list[Cell]:
    cells = []
    for ranks, precision, names in SMALL_WORLDS if setup.small else WORLDS:
        backend = "nccl" if setup.device == "cuda" and ranks == 1 else "gloo"
        how = (f"world_size={ranks}", f"backend={backend}", "measure.passes=timed")
        what = (f"strategy={names}", f"precision={precision}", "measure.warmup=2", "deterministic=true")
        cells += setup.cells("parity", *what, *how, *(SMALL_PARITY_SHAPE if setup.small else PARITY_SHAPE))
    return cells


def _parity_table(setup: SuiteSetup, done: list[SuiteLaunch]) -> SuiteTable:
    """A sweep's own check (sweep/parity.py) compares the losses of every step and rank with DDP's on as many ranks."""
    header = ["cell", "backend", "training against DDP's", "largest relative difference of a loss", "last loss"]
    steps = {one.name: load(setup.folder("parity") / one.row["run_id"]).steps for one in done if one.row and one.is_ok}
    (names, notes), rows, differs = shorter(done), [], []
    for one in done:
        config = one.cell
        start = [names[one.name], config.backend + ", sharing a GPU" * (config.ranks_per_gpu > 1)]
        ddp = next((other for other in done if _world(other) == _world(one) and _is_ddp(other.cell)), None)
        if not one.is_ok:
            rows.append([*start, one.words])
        elif one is ddp:
            rows.append([*start, "the measure", NONE, _last(steps[one.name])])
        elif ddp is None or not ddp.is_ok:
            rows.append([*start, "DDP itself did not run"])
        else:
            verdict = compare(config, steps[one.name], ddp.cell, steps[ddp.name])
            off = NONE if verdict.loss is None else f"{verdict.loss:.1e}"
            rows.append([*start, verdict.message, off, _last(steps[one.name])])
            differs += [f"{one.name}: {verdict.message}"] if verdict.kind in (DIFFERS, UNCHECKED) else []
    return SuiteTable(header, rows, notes, differs)


def _world(one: SuiteLaunch) -> tuple[Any, ...]:
    return one.cell.world_size, one.cell.precision.name


def _is_ddp(config: CellConfig) -> bool:
    return bool(config.strategy.name == strategies.reference().name)


def _last(steps: pd.DataFrame) -> str:
    return f"{steps.sort_values(['rank', 'step'])['loss'].iloc[-1]:.6f}"


PARITY = SuiteSection(
    name="parity",
    title="Parity with DDP",
    asks="Do ours and FSDP2 train what DDP trains, in fp32 and bf16, at N = 1 and with two ranks?",
    like=(("parity", "", 1.0),),
    cells=_parity_cells,
    table=_parity_table,
    # FSDP2 was not made for ranks that share a GPU: its failure is a result
    may_fail=lambda one: (
        one.config is not None and one.config.strategy.name == "fsdp2" and one.config.ranks_per_gpu > 1
    ),
    limit_s=40.0,
)

# -- speed ---------------------------------------------------------------------------------------------------

SPEED_WORKLOADS = (
    ("model=gpt2_124m", "sequence=1024", "micro_batch=8", "measure.steps=20", "measure.warmup=5", "measure.repeats=3"),
    ("model=gpt2_1_5b", "sequence=1024", "micro_batch=8", "measure.steps=10", "measure.warmup=2", "measure.repeats=2"),
)
"""Launches of each by turns (measure.repeats), so that a drift of the clocks affects all alike."""
SMALL_SPEED_WORKLOADS = (
    (*SMALL_GPT, "measure.steps=6", "measure.warmup=2", "measure.repeats=2", "launch.threads=1"),
)  # fmt: skip


def speed_cells(setup: SuiteSetup, section: str = "speed", *how: str) -> list[Cell]:
    """The cells at N = 1 of a section; `how` they are measured, if not by time."""
    same = ("precision=bf16", "data=synthetic", "world_size=1", "measure.passes=timed", "draw_on=device")
    names, workloads = ("ddp,zero3", SMALL_SPEED_WORKLOADS) if setup.small else (BELOW_FP32, SPEED_WORKLOADS)
    return [cell for what in workloads for cell in setup.cells(section, f"strategy={names}", *same, *what, *how)]


SPEED_HEADER = [
    "cell", "launches", "step ms", "95 %", "forward", "backward", "update", "tokens/s", "MFU", "over DDP",
    "allocated", "reserved", "last loss",
]  # fmt: skip


def speed_table(setup: SuiteSetup, done: list[SuiteLaunch]) -> SuiteTable:
    """Returns a row per cell: its steps by phase, and memory."""
    groups = {name: [one for one in done if one.name == name] for name in dict.fromkeys(one.name for one in done)}
    cells = {name: _summary(launches) for name, launches in groups.items()}
    rows = []
    for name, launches in groups.items():
        cell = cells[name]
        if cell is None:
            worst = next((one for one in launches if not one.is_ok), launches[0])
            rows.append([name, worst.words])
            continue
        others = (c for c in cells.values() if c and c["model"] == cell["model"])
        ddp = next((c for c in others if c["strategy"] == strategies.reference().name), None)
        rows.append([name, *_show_speed(cell, ddp)])
    notes = ["bf16, N = 1; the loss of the last step tells whether they train the same"]
    if not setup.small:
        notes.append("50257 words, as in GPT-2, are no multiple of 8: the head's products run below what a GPU can do")
    return SuiteTable(SPEED_HEADER, rows, notes)


def _summary(launches: list[SuiteLaunch]) -> dict[Any, Any] | None:
    """One row of a cell's launches so far; None if none is ok."""
    rows = [one.row for one in launches if one.is_ok and one.row is not None]
    if not rows:
        return None
    return summarize(frame_of(rows, RunRow)).to_dict("records")[0]


def _show_speed(cell: dict[Any, Any], ddp: dict[Any, Any] | None) -> list[str]:
    interval = NONE
    if not pd.isna(cell["step_s_low"]):
        interval = f"{1000 * cell['step_s_low']:.1f}–{1000 * cell['step_s_high']:.1f}"
    over = NONE if ddp is None else f"{cell['step_s'] / ddp['step_s']:.3f}"
    mfu = NONE if pd.isna(cell["mfu"]) else f"{100 * cell['mfu']:.1f} %"
    memory = [show_bytes(cell[key]) for key in ("allocated_bytes", "reserved_bytes")]
    step, tokens, loss = f"{1000 * cell['step_s']:.1f}", f"{cell['tokens_per_s']:.0f}", f"{cell['loss_last']:.4f}"
    phases = [f"{1000 * cell[f'{name}_s']:.1f}" for name in ("forward", "backward", "update")]
    return [str(cell["launches"]), step, interval, *phases, tokens, mfu, over, *memory, loss]


SPEED = SuiteSection(
    name="speed",
    title="Speed at N = 1",
    asks="Step time, tokens/s and MFU of DDP, ZeRO-1, 2, 3 and FSDP2 on GPT-2 124M and 1.5B in bf16.",
    like=(("speed", "124m", 1.5), ("speed", "1_5b", 2.0)),
    cells=speed_cells,
    table=speed_table,
)

# -- memory --------------------------------------------------------------------------------------------------

MEMORY_SHAPE = ("sequence=1024", "micro_batch=4")
MEMORY_WORKLOADS: tuple[tuple[str, ...], ...] = (
    (f"strategy={OURS}", "world_size=8,64", "model=gpt_7b", "model.checkpointing=true", "strategy.construct=meta"),
    (f"strategy=ddp,{OURS}", "world_size=8", "model=gpt2_1_5b"),
)
"""A 7B is built by none of our ranks as a whole: its 28 GB in fp32 are more than zero3 needs."""
COUNTED = ("measure.warmup=2", "measure.steps=1")
"""Bytes are counted from the third step on, and are then the same in every step."""
SMALL_MEMORY_SHAPE = (*SMALL_GPT, "model.checkpointing=true", "launch.threads=1")


def _memory_cells(setup: SuiteSetup) -> list[Cell]:
    same = ("backend=simulated", "precision=bf16", "data=synthetic", "draw_on=device", *COUNTED)
    if setup.small:
        return setup.cells("memory", "strategy=zero3", "world_size=8,64", *same, *SMALL_MEMORY_SHAPE)
    how = (*same, *MEMORY_SHAPE)
    return [cell for what in MEMORY_WORKLOADS for cell in setup.cells("memory", *how, *what)]


MEMORY_HEADER = [
    "cell", "peak", "states", "predicted", "paper", "bytes a parameter", "paper's", "activations, peak", "allocated",
    "outside",
]  # fmt: skip


def _memory_table(setup: SuiteSetup, done: list[SuiteLaunch]) -> SuiteTable:
    """The paper's formula (ZeRO, arXiv 1910.02054, figure 1) is, in fp32 with Adam, in bytes per parameter: DDP 16,
    P_os 4 + 12/N, P_os+g 2 + 14/N, P_os+g+p 16/N.
    """
    (names, notes), rows = shorter(done), []
    notes += ["peak: the ledger's; states: parameters, gradients, masters, optimizer and what is being sent, at most"]
    notes += ["outside: what the allocator has at its peak beyond the ledger: kernels, libraries, rounding"]
    for one in done:
        if one.is_ok and one.row is not None:
            rows.append([names[one.name], *_show_memory(one.row)])
            notes += _published(one.cell, one.row)
        else:
            rows.append([names[one.name], one.words])
    return SuiteTable(MEMORY_HEADER, rows, notes)


def _show_memory(row: Any) -> list[str]:
    psi, floor = row["psi"], row["floor_states_bytes"]
    names = ("peak", "states", "predicted_states", "floor_states", "peak_activations", "allocated", "outside_ledger")
    sizes = [show_bytes(row[f"{name}_bytes"]) for name in names]
    per_parameter = [f"{size / psi:.3f}" for size in (row["states_bytes"], floor)]
    return [*sizes[:4], *per_parameter, *sizes[4:]]


def _published(config: CellConfig, row: Any) -> list[str]:
    """ZeRO, section 3.2, on GPT-2 1.5B's activations at 32 sequences of 1K tokens."""
    if config.model_name != "gpt2_1_5b" or not _is_ddp(config):
        return []
    words = f"{row['max_activations_bytes'] * 32 / config.micro_batch / 1e9:.0f} GB by this run"
    return [f"GPT-2 1.5B's activations, at 32 sequences: {words}, about 60 GB in the paper"]


MEMORY = SuiteSection(
    name="memory",
    title="Memory of one rank of N",
    asks="What do ZeRO-1, 2, 3 need on one rank of 8 and of 64, beside our prediction and the paper's formula?",
    like=(("memory", "zero.* gpt_7b|1_5b N=8 b=32 simulated", 1.0),),
    cells=_memory_cells,
    table=_memory_table,
    answers=("ok", "oom"),
)
