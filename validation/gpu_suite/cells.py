"""Sections of the GPU suite that are cells of the harness: speed, memory, parity, peaks, tiers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd

from zerobench.records import RunRow
from zerobench.results.frames import frame_of, show_figure
from zerobench.results.summary import summarize
from zerobench.sections import known
from zerobench.simulation.execute import CPU, CUDA, Execution
from zerobench.strategies import reference
from zerobench.sweep.parity import DIFFERS, UNCHECKED

from ..gpu_runs import LIMITS
from ..runner import execute_cells
from .suite import NONE, WAITING, SuiteLaunch, SuiteSection, SuiteSetup, SuiteTable, rows_of

SMALL_GPT = "model=gpt model.layers=2 model.hidden=32 model.heads=2 sequence=32 micro_batch=2 launch.threads=1"
ON_ONE_RANK = "precision=bf16 data=synthetic world_size=1 draw_on=device"
DDP = reference().name
COUNTED = "measure.warmup=2 measure.steps=1"
"""Bytes are counted from the third step on, and are then the same in every step."""

# -- columns of a table --------------------------------------------------------------------------------------

Columns = Sequence[tuple[str, Callable[[Any], str]]]
"""Headings, and the text of a row's cell below each: of a RunRow, with its cell's config as `cell`."""


def sizes(**names: str) -> Columns:
    """Returns columns of bytes: heading by name in a RunRow, less `_bytes`."""

    show = lambda name, row: show_figure(row.get(f"{name}_bytes"), "bytes")  # noqa: E731
    return [(heading.replace("_", " "), partial(show, name)) for heading, name in names.items()]


def milliseconds(heading: str, name: str) -> tuple[str, Callable[[Any], str]]:
    """Returns a column of times by their name in a RunRow, less `_s`."""
    return heading, lambda row: NONE if pd.isna(row[f"{name}_s"]) else f"{1000 * row[f'{name}_s']:.1f}"


def table_of(
    done: Sequence[SuiteLaunch], columns: Columns, notes: Sequence[str] = (), first: str = "cell"
) -> SuiteTable:
    """Returns a row per launch; `first`: the heading of its names."""
    show = lambda one: [[one.name, *(text(known(one.row) | {"cell": one.cell}) for _, text in columns)]]  # noqa: E731
    return SuiteTable([first, *(heading for heading, _ in columns)], rows_of(done, show), [*notes])


# -- parity --------------------------------------------------------------------------------------------------

BELOW_FP32 = "ddp,zero1,zero2,zero3,fsdp2"
TRAINS_ALIKE = "measure.passes=timed measure.warmup=2 deterministic=true"


PARITY_COLUMNS: Columns = (
    ("backend", lambda row: row["backend"] + ", sharing a GPU" * (row["cell"].ranks_per_gpu > 1)),
    ("training against DDP's", lambda row: row["training_words"] or NONE),
    ("last loss", lambda row: f"{row['loss_last']:.6f}"),
)


def _parity_table(setup: SuiteSetup, done: list[SuiteLaunch]) -> SuiteTable:
    """A sweep's own check (sweep/parity.py) compares the losses of every step and rank with DDP's on as many ranks."""
    rows = [(one.name, one.row) for one in done if one.is_ok and one.row is not None]
    differs = [f"{name}: {row['training_words']}" for name, row in rows if row["training"] in (DIFFERS, UNCHECKED)]
    return replace(table_of(done, PARITY_COLUMNS), differs=differs)


PARITY = SuiteSection(
    name="parity",
    title="Parity with DDP",
    asks="Do ours and FSDP2 train what DDP trains, in fp32 and bf16, at N = 1 and with two ranks?",
    about_s=42,
    # two ranks share a GPU if there is only one
    sweeps=tuple(
        f"strategy={names} precision={precision} world_size={ranks} backend={backend} {TRAINS_ALIKE}"
        " model=gpt_tiny sequence=128 micro_batch=4 measure.steps=4"
        for precision, names in (("fp32", "ddp,zero1,zero2,zero3,megatron,fsdp2"), ("bf16", BELOW_FP32))
        for ranks, backend in ((1, "nccl"), (2, "gloo"))
    ),
    small=tuple(
        f"{what} world_size=2 backend=gloo {TRAINS_ALIKE} {SMALL_GPT} measure.steps=2"
        for what in ("precision=fp32 strategy=ddp,zero3", "precision=bf16 strategy=ddp,zero2,fsdp2")
    ),
    table=_parity_table,
    # FSDP2 was not made for ranks that share a GPU: its failure is a result
    may_fail=lambda one: (
        one.config is not None and one.config.strategy.name == "fsdp2" and one.config.ranks_per_gpu > 1
    ),
    limit_s=40.0,
)

# -- speed ---------------------------------------------------------------------------------------------------


def _interval(cell: Any) -> str:
    low, high = 1000 * cell["step_s_low"], 1000 * cell["step_s_high"]
    return NONE if pd.isna(low) else f"{low:.1f}–{high:.1f}"


SPEED_COLUMNS: Columns = (
    ("launches", lambda cell: str(cell["launches"])),
    milliseconds("step ms", "step"),
    ("95 %", _interval),
    *(milliseconds(phase, phase) for phase in ("forward", "backward", "update")),
    ("tokens/s", lambda cell: f"{cell['tokens_per_s']:.0f}"),
    ("MFU", lambda cell: NONE if pd.isna(cell["mfu"]) else f"{100 * cell['mfu']:.1f} %"),
    ("over DDP", lambda cell: f"{cell['step_s'] / cell['ddp_s']:.3f}" if cell["ddp_s"] else NONE),
    *sizes(allocated="allocated", reserved="reserved"),
    ("last loss", lambda cell: f"{cell['loss_last']:.4f}"),
)


def speed_table(setup: SuiteSetup, done: list[SuiteLaunch]) -> SuiteTable:
    """Returns a row per cell, of all its launches together: its steps by phase, and memory."""
    cells: dict[str, dict[Any, Any]] = {launch.name: {"failed": launch.message} for launch in reversed(done)}
    for name in (names := list(dict.fromkeys(launch.name for launch in done))):
        if launches := [launch.row for launch in done if launch.name == name and launch.is_ok and launch.row]:
            cells[name] = summarize(frame_of(launches, RunRow)).to_dict("records")[0]
    ddp = {cell["model"]: cell["step_s"] for cell in cells.values() if cell.get("strategy") == DDP}
    rows = [
        [name, cell["failed"]] if "failed" in (cell := cells[name])
        else [name, *(text({**cell, "ddp_s": ddp.get(cell["model"])}) for _, text in SPEED_COLUMNS)]
        for name in names
    ]  # fmt: skip
    notes = ["bf16, N = 1; the loss of the last step tells whether they train the same"]
    if not setup.small:
        notes.append("50257 words, as in GPT-2, are no multiple of 8: the head's products run below what a GPU can do")
    return SuiteTable(["cell", *(heading for heading, _ in SPEED_COLUMNS)], rows, notes)


SPEED = SuiteSection(
    name="speed",
    title="Speed at N = 1",
    asks="Step time, tokens/s and MFU of DDP, ZeRO-1, 2, 3 and FSDP2 on GPT-2 124M and 1.5B in bf16.",
    about_s=99,
    # launches of each by turns (measure.repeats), so that a drift of the clocks affects all alike
    sweeps=tuple(
        f"strategy={BELOW_FP32} {ON_ONE_RANK} measure.passes=timed sequence=1024 micro_batch=8 {what}"
        for what in (
            "model=gpt2_124m measure.steps=20 measure.warmup=5 measure.repeats=3",
            "model=gpt2_1_5b measure.steps=10 measure.warmup=2 measure.repeats=2",
        )
    ),
    small=(
        f"strategy=ddp,zero3 {ON_ONE_RANK} measure.passes=timed {SMALL_GPT}"
        " measure.steps=6 measure.warmup=2 measure.repeats=2",
    ),
    table=speed_table,
)

# -- memory --------------------------------------------------------------------------------------------------

ONE_OF_N = f"backend=simulated precision=bf16 data=synthetic draw_on=device {COUNTED}"
MEMORY_COLUMNS: Columns = (
    *sizes(peak="peak", states="states", predicted="predicted_states", paper="floor_states"),
    ("bytes a parameter", lambda row: f"{row['states_bytes'] / row['psi']:.3f}"),
    ("paper's", lambda row: f"{row['floor_states_bytes'] / row['psi']:.3f}"),
    *sizes(peak_activations="peak_activations", allocated="allocated", outside="outside_ledger"),
)


MEMORY_NOTES = (
    "peak: the ledger's; states: parameters, gradients, masters, optimizer and what is being sent, at most",
    "paper: figure 1 of ZeRO (arXiv 1910.02054), in bytes a parameter: 16, 4 + 12/N, 2 + 14/N, 16/N",
    "outside: what the allocator has at its peak beyond the ledger: kernels, libraries, rounding",
)

MEMORY = SuiteSection(
    name="memory",
    title="Memory of one rank of N",
    asks="What do ZeRO-1, 2, 3 need on one rank of 8 and of 64, beside our prediction and the paper's formula?",
    about_s=71,
    # a 7B is built by none of our ranks as a whole: its 28 GB in fp32 are more than zero3 needs
    sweeps=tuple(
        f"{ONE_OF_N} sequence=1024 micro_batch=4 {what}"
        for what in (
            "strategy=zero1,zero2,zero3 world_size=8,64 model=gpt_7b model.checkpointing=true strategy.construct=meta",
            "strategy=ddp,zero1,zero2,zero3 world_size=8 model=gpt2_1_5b",
        )
    ),
    small=(f"{ONE_OF_N} strategy=zero3 world_size=8,64 {SMALL_GPT} model.checkpointing=true",),
    table=lambda _, done: table_of(done, MEMORY_COLUMNS, MEMORY_NOTES),
    answers=("ok", "oom"),
)

# -- peaks ---------------------------------------------------------------------------------------------------

PEAKS_ALONE = f"measure.passes=accounted measure.repeats=1 {COUNTED}"
PEAK_HEADER = ["cell", "peak", "estimated", "allocated", "estimated", "reserved", "estimated"]


def _peak_table(setup: SuiteSetup, done: list[SuiteLaunch]) -> SuiteTable:
    executions: dict[str, Execution] = {}
    if not any(one.status == WAITING for one in done):  # all estimates at once, one per core
        work = [(one.cell, CUDA if setup.device == "cuda" else CPU) for one in done]
        found = execute_cells("estimates", work, limits=LIMITS)
        executions = dict(zip((one.name for one in done), found, strict=True))

    def show(launch: SuiteLaunch) -> list[list[str]]:
        row, execution = known(launch.row), executions.get(launch.name)
        estimated: list[int | None] = [None] * 3
        if execution is not None and not execution.problem:
            estimated[0] = execution.peak_bytes
            if execution.memory:
                estimated[1:] = execution.memory.allocated_bytes, execution.memory.reserved_by_default
        pairs = zip([row[f"{name}_bytes"] for name in ("peak", "allocated", "reserved")], estimated, strict=True)
        both = [show_figure(nbytes, "bytes") for pair in pairs for nbytes in pair]
        return [[launch.name, *both]]

    return SuiteTable(PEAK_HEADER, rows_of(done, show))


PEAKS = SuiteSection(
    name="peaks",
    title="Peaks and reserved memory at N = 1",
    asks="Are peaks and reserved memory as estimated without a GPU?",
    about_s=37,
    sweeps=tuple(f"{words} {PEAKS_ALONE}" for words in SPEED.sweeps),
    small=tuple(f"{words} {PEAKS_ALONE}" for words in SPEED.small),
    table=_peak_table,
    answers=("ok", "oom"),
)

# -- tiers ---------------------------------------------------------------------------------------------------

PAPER = {(False, False): 16, (False, True): 14, (True, False): 4, (True, True): 2}
"""Whether optimizer and gradients leave -> device bytes a parameter."""

KEPT = ("parameters", "gradients", "master", "optimizer")


def _tiers(*how: str, shape: str = "model=gpt2_124m sequence=1024 micro_batch=4", tile: int = 4 * 2**20) -> list[str]:
    """Returns sweeps. `tile`: small beside the model, as a tile of gradients in fp32 is none of the paper's rows."""
    same = f"strategy=zero1 {ON_ONE_RANK} optimizer=adam {shape} measure.warmup=2 precision.tile_bytes={tile}"
    return [f"{same} {words}" for words in how]


def _paper(row: Any) -> str:
    offload = row["cell"].offload
    return str(PAPER[getattr(offload, "optimizer", False), getattr(offload, "gradients", False)])


def _if_accounted(show: Callable[[Any], str]) -> Callable[[Any], str]:
    return lambda row: show(row) if row["cell"].measure.passes == "accounted" else NONE


TIER_COLUMNS: Columns = (
    ("kept", _if_accounted(lambda row: f"{sum(row[f'max_{name}_bytes'] or 0 for name in KEPT) / row['psi']:.2f}")),
    ("paper", _if_accounted(_paper)),
    milliseconds("step ms", "step"),
    *sizes(allocated="allocated", host="host_peak", pinned="pinned", idle="fragmentation", free="largest_free_block"),
    ("retries", lambda row: show_figure(row.get("alloc_retries"), "")),
)


def _tier_table(setup: SuiteSetup, done: list[SuiteLaunch]) -> SuiteTable:
    notes = ["kept: bytes a parameter on the device, each category's most, less what is on its way; paper: its table"]
    notes += ["idle: reserved - allocated; free: the largest free block"]
    if setup.device == "cpu":
        notes.append("on a CPU there is one memory, told apart by labels, and no allocator to ask")
    return table_of(done, TIER_COLUMNS, notes, "what")


TIMED, ACCOUNTED = "measure.passes=timed", "measure.passes=accounted measure.steps=2"
TIERS = SuiteSection(
    name="tiers",
    title="Tiers and activations",
    asks="What do states and activations that leave the device save and cost?",
    about_s=66,
    sweeps=tuple(
        _tiers(
            f"{TIMED} measure.steps=8 offload=none,cpu",
            f"{TIMED} measure.steps=2 offload=nvme",  # a step with files takes seconds
            f"{ACCOUNTED} offload=none,cpu_gradients,cpu_optimizer,cpu",
            f"{TIMED} measure.steps=8 activation=checkpoint,offload,checkpoint_offload",
        )
    ),
    small=tuple(
        _tiers(
            f"{TIMED} measure.steps=2 offload=nvme",
            f"{ACCOUNTED} offload=none,cpu",
            f"{TIMED} measure.steps=2 activation=checkpoint_offload",
            shape=SMALL_GPT,
            tile=4096,
        )
    ),
    table=_tier_table,
    answers=("ok", "oom"),
    limit_s=40.0,
)
