"""Sections of the GPU suite that are cells of the harness: speed, memory, parity, peaks, a profile, tiers."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from zerobench import strategies
from zerobench.config.cell import Cell, CellConfig
from zerobench.config.schema_memory import CpuOffload
from zerobench.probes.snapshot import written
from zerobench.probes.traced_pass import FOLDER, STEP, length, read_trace, spans
from zerobench.records import RunRow
from zerobench.results.frames import frame_of
from zerobench.results.summary import summarize
from zerobench.results.tables import load
from zerobench.sections import known
from zerobench.simulation.execute import CPU, CUDA, Execution
from zerobench.sizes import show_bytes
from zerobench.sweep.parity import DIFFERS, UNCHECKED, compare

from ..gpu_runs import LIMITS
from ..runner import execute_cells
from .suite import NONE, OURS, WAITING, SuiteLaunch, SuiteSection, SuiteSetup, SuiteTable, rows_of, shorter

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
            rows.append([*start, one.message])
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
            rows.append([name, worst.message])
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
    names, notes = shorter(done)
    notes += ["peak: the ledger's; states: parameters, gradients, masters, optimizer and what is being sent, at most"]
    notes += ["outside: what the allocator has at its peak beyond the ledger: kernels, libraries, rounding"]
    for one in done:
        config, row = one.cell, one.row
        # ZeRO, section 3.2, on GPT-2 1.5B's activations at 32 sequences of 1K tokens
        if one.is_ok and row and config.model_name == "gpt2_1_5b" and _is_ddp(config):
            size = f"{row['max_activations_bytes'] * 32 / config.micro_batch / 1e9:.0f} GB by this run"
            notes.append(f"GPT-2 1.5B's activations, at 32 sequences: {size}, about 60 GB in the paper")
    show = lambda one: [[names[one.name], *_show_memory(known(one.row))]]  # noqa: E731
    return SuiteTable(MEMORY_HEADER, rows_of(done, show, lambda one: names[one.name]), notes)


def _show_memory(row: Any) -> list[str]:
    psi, floor = row["psi"], row["floor_states_bytes"]
    names = ("peak", "states", "predicted_states", "floor_states", "peak_activations", "allocated", "outside_ledger")
    sizes = [show_bytes(row[f"{name}_bytes"]) for name in names]
    per_parameter = [f"{size / psi:.3f}" for size in (row["states_bytes"], floor)]
    return [*sizes[:4], *per_parameter, *sizes[4:]]


MEMORY = SuiteSection(
    name="memory",
    title="Memory of one rank of N",
    asks="What do ZeRO-1, 2, 3 need on one rank of 8 and of 64, beside our prediction and the paper's formula?",
    like=(("memory", "zero.* gpt_7b|1_5b N=8 b=32 simulated", 1.0),),
    cells=_memory_cells,
    table=_memory_table,
    answers=("ok", "oom"),
)


# -- peaks -----------------------------------------------------------------------------------------


PEAK_HEADER = [
    "cell", "peak", "estimated", "allocated", "estimated", "reserved", "estimated", "beside free memory reserved for",
]  # fmt: skip


def _peak_cells(setup: SuiteSetup) -> list[Cell]:
    how = ("measure.passes=accounted", "measure.snapshot=true", "measure.repeats=1")
    return speed_cells(setup, "peaks", *how, *COUNTED)


def _peak_table(setup: SuiteSetup, done: list[SuiteLaunch]) -> SuiteTable:
    ended = not any(one.status == WAITING for one in done)  # all estimates at once, one per core
    work = [(one.cell, CUDA if setup.device == "cuda" else CPU) for one in done if ended]
    found = execute_cells("estimates", work, limits=LIMITS) if ended else []
    executions = dict(zip((one.name for one in done), found, strict=False))

    def show(launch: SuiteLaunch) -> list[list[str]]:
        row = known(launch.row)
        return [[launch.name, *_sizes(row, executions.get(launch.name)), _causes(setup, row["run_id"])]]

    return SuiteTable(PEAK_HEADER, rows_of(done, show))


def _sizes(row: Mapping[str, Any], found: Execution | None) -> list[str]:
    estimated: list[int | None] = [None] * 3
    if found is not None and not found.problem:
        estimated[0] = found.peak_bytes
        if found.memory:
            estimated[1:] = found.memory.allocated_bytes, found.memory.reserved_by_default
    measured = [row[f"{name}_bytes"] for name in ("peak", "allocated", "reserved")]
    pairs = zip(measured, estimated, strict=True)
    return [NONE if size is None else show_bytes(size) for pair in pairs for size in pair]


def _causes(setup: SuiteSetup, run_id: str) -> str:
    folder = setup.folder("peaks") / run_id
    if setup.device == "cpu" or not written(folder):
        return NONE
    with Path(folder, written(folder)[0]).open("rb") as file:
        traces = [trace for trace in pickle.load(file)["device_traces"] if trace]  # written by this suite
    grown = fragmentation(traces[0] if traces else [])
    return ", ".join(f"{category} {show_bytes(size)}" for category, size in grown.most_common(3)) or "nothing"


def fragmentation(trace: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """Returns category -> bytes of segments that were requested while as much was reserved and free. In the allocator's
    trace the entry of a segment is followed by that of the allocation.
    """
    found, reserved, used, requested = Counter[str](), 0, 0, 0
    for entry in trace:
        action, size = entry["action"], entry.get("size", 0)
        if action == "segment_alloc":
            requested = size if reserved - used >= size else 0
            reserved += size
        elif action == "segment_free":
            reserved -= size
        elif action == "alloc":
            found[entry.get("category", "unknown")] += requested
            used, requested = used + size, 0
        elif action == "free_completed":
            used -= size
    return +found


PEAKS = SuiteSection(
    name="peaks",
    title="Peaks and reserved memory at N = 1",
    asks="Are peaks and reserved memory as estimated without a GPU, and what is more memory reserved for?",
    like=(("memory", "(124m|1_5b) N=8 b=32 simulated", 1.25),),
    cells=_peak_cells,
    table=_peak_table,
    answers=("ok", "oom"),
)


# -- profile ---------------------------------------------------------------------------------------


PROFILE_SHAPE = ("model=gpt2_124m", "sequence=1024", "micro_batch=8", "model.vocabulary=50257,50304")
SMALL_PROFILE_SHAPE = (*SMALL_GPT, "model.vocabulary=257,320", "launch.threads=1")
LISTED, WIDTH = 8, 80
"""Kernels that are listed, those that take longest, and letters of a kernel's name."""


def _profile_cells(setup: SuiteSetup) -> list[Cell]:
    same = ("strategy=ddp", "precision=bf16", "data=synthetic", "world_size=1", "draw_on=device")
    how = ("measure.passes=timed", "measure.trace=true", "measure.warmup=3", "measure.steps=3")
    return setup.cells("profile", *same, *how, *(SMALL_PROFILE_SHAPE if setup.small else PROFILE_SHAPE))


PROFILE_HEADER = ["words", "kernel", "ms a step", "launches a step"]


def _profile_table(setup: SuiteSetup, done: list[SuiteLaunch]) -> SuiteTable:

    def vocabulary(launch: SuiteLaunch) -> str:
        return str(getattr(launch.cell.model, "vocabulary", NONE))

    def show(launch: SuiteLaunch) -> list[list[str]]:
        row = known(launch.row)
        trace = read_trace(setup.folder("profile") / row["run_id"] / FOLDER / "rank0.json.gz")
        lines = [["the step, without a profiler", f"{1e3 * row['step_s']:.2f}", NONE]]
        lines += kernels(trace, "kernel" if setup.device == "cuda" else "cpu_op")
        return [[vocabulary(launch), *line] for line in lines]

    return SuiteTable(
        PROFILE_HEADER, rows_of(done, show, vocabulary), ["words: of the vocabulary; busy: at least one kernel runs"]
    )


def kernels(trace: Sequence[Mapping[str, Any]], category: str) -> list[list[str]]:
    """Returns a line with the time in which the device is busy, and one for each kernel that takes long."""
    whole = [event for event in trace if event.get("ph") == "X"]
    steps = sum(event["name"] == STEP and event["cat"] == "user_annotation" for event in whole)
    ran = [event for event in whole if event.get("cat") == category]
    times, launches = Counter[str](), Counter(event["name"] for event in ran)
    for event in ran:
        times[event["name"]] += event["dur"]
    found = [("busy", length(spans(ran)), launches.total())]
    found += [(name, time, launches[name]) for name, time in times.most_common(LISTED)]
    return [[name[:WIDTH], f"{time / 1e3 / steps:.2f}", f"{number / steps:.0f}"] for name, time, number in found]


PROFILE = SuiteSection(
    name="profile",
    title="Profile of the 124M model",
    asks="Which kernels take the time of a step, and what do 50,257 words cost beside 50,304?",
    like=(("speed", "ddp gpt2_124m", 2.0),),
    cells=_profile_cells,
    table=_profile_table,
)


# -- tiers -----------------------------------------------------------------------------------------


TIER_SAME = ("strategy=zero1", "world_size=1", "precision=bf16", "optimizer=adam", "data=synthetic", "draw_on=device")
TIER_SHAPE = ("model=gpt2_124m", "sequence=1024", "micro_batch=4", "measure.warmup=2")
STEPS = {"none": 8, "cpu": 8, "nvme": 2}
"""Timed steps by the value of `offload`: one with files takes seconds."""
SMALL_TIER_SHAPE = (*SMALL_GPT, "measure.warmup=2", "launch.threads=1")

PAPER = {"none": 16, "cpu_gradients": 14, "cpu_optimizer": 4, "cpu": 2}
"""Device bytes a parameter by the value of `offload`."""

TIER_TILE = {False: "precision.tile_bytes=4194304", True: "precision.tile_bytes=4096"}
"""Small beside the model, by `small`: a tile of gradients in fp32 is none of the paper's rows."""

OFFLOADS, SMALL_OFFLOADS = ("none", "cpu_gradients", "cpu_optimizer", "cpu"), ("none", "cpu")
TIMED, SMALL_TIMED = ("none", "cpu", "nvme"), ("nvme",)
POLICIES, SMALL_POLICIES = ("checkpoint", "offload", "checkpoint_offload"), ("checkpoint_offload",)
"""Beside none, which is the timed cell that offloads nothing."""

LIMIT_S = 40.0


def _tier_cells(setup: SuiteSetup) -> list[Any]:
    small = setup.small
    same = (*TIER_SAME, *(SMALL_TIER_SHAPE if small else TIER_SHAPE), TIER_TILE[small])
    timed = ("measure.passes=timed", f"measure.steps={2 if small else 8}")
    found = []
    for name in SMALL_TIMED if small else TIMED:
        found += setup.cells("tiers", *same, *timed[:1], f"measure.steps={STEPS[name]}", f"offload={name}")
    offloads = ",".join(SMALL_OFFLOADS if small else OFFLOADS)
    found += setup.cells("tiers", *same, "measure.passes=accounted", "measure.steps=2", f"offload={offloads}")
    policies = ",".join(SMALL_POLICIES if small else POLICIES)
    return found + setup.cells("tiers", *same, *timed, f"activation={policies}")


TIER_HEADER = ["what", "kept", "paper", "step ms", "allocated", "host", "pinned", "idle", "free", "retries"]

KEPT = ("parameters", "gradients", "master", "optimizer")


def _tier_table(setup: SuiteSetup, done: list[SuiteLaunch]) -> SuiteTable:
    notes = [
        "kept: bytes a parameter on the device, each category's most, without what is on its way; paper: its table"
    ]
    notes.append("idle: reserved - allocated; free: the largest free block")
    if setup.device == "cpu":
        notes.append("on a CPU there is one memory, told apart by labels, and no allocator to ask")
    return SuiteTable(TIER_HEADER, rows_of(done, _line, _name), notes)


def _name(one: SuiteLaunch) -> str:
    offload, activation = one.cell.offload, one.cell.activation
    if isinstance(offload, CpuOffload):
        away = ["optimizer"] * offload.optimizer + ["gradients"] * offload.gradients
        return f"offload=cpu: {' and '.join(away)}"
    words = [axis.label for axis in (offload, activation) if axis.label]
    recomputed = one.cell.model.checkpoints and not activation.label
    return " ".join([*words, *["activation=checkpoint"] * bool(recomputed)]) or "nothing leaves"


def _line(one: SuiteLaunch) -> list[list[str]]:
    row, kept, paper = known(one.row), NONE, NONE
    if one.cell.measure.passes == "accounted":
        kept = f"{sum(row[f'max_{name}_bytes'] or 0 for name in KEPT) / row['psi']:.2f}"
        paper = str(PAPER[_offload_of(one.cell)])
    step = NONE if row["step_s"] is None else f"{1000 * row['step_s']:.1f}"
    names = ("allocated_bytes", "host_peak_bytes", "pinned_bytes", "fragmentation_bytes", "largest_free_block_bytes")
    sizes = [NONE if row.get(name) is None else show_bytes(row[name]) for name in names]
    retries = row.get("alloc_retries")
    return [[_name(one), kept, paper, step, *sizes, NONE if retries is None else str(retries)]]


def _offload_of(config: CellConfig) -> str:
    offload = config.offload
    if not isinstance(offload, CpuOffload):
        return "none"
    parts = {(False, True): "cpu_gradients", (True, False): "cpu_optimizer", (True, True): "cpu"}
    return parts[offload.optimizer, offload.gradients]


TIERS = SuiteSection(
    name="tiers",
    title="Tiers and activations",
    asks="What do states and activations that leave the device save and cost?",
    like=(("tiers", "passes=|recomputed|activation=", 1.0), ("tiers", "nvme", 0.5)),
    cells=_tier_cells,
    table=_tier_table,
    answers=("ok", "oom"),
    limit_s=LIMIT_S,
)
