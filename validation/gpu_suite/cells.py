"""Sections of the GPU suite that are cells of the harness: speed, memory, parity, peaks, a profile, tiers."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from zerobench.config.cell import CellConfig
from zerobench.config.schema_memory import CpuOffload
from zerobench.probes.snapshot import written
from zerobench.probes.traced_pass import FOLDER, STEP, length, read_trace, spans
from zerobench.records import RunRow
from zerobench.results.frames import frame_of, show_figure
from zerobench.results.summary import summarize
from zerobench.sections import known
from zerobench.simulation.execute import CPU, CUDA, Execution
from zerobench.sizes import show_bytes
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

    def text_of(name: str) -> Callable[[Any], str]:
        return lambda row: show_figure(row.get(f"{name}_bytes"), "bytes")

    return [(heading.replace("_", " "), text_of(name)) for heading, name in names.items()]


def milliseconds(heading: str, name: str) -> tuple[str, Callable[[Any], str]]:
    """Returns a column of times by their name in a RunRow, less `_s`."""
    return heading, lambda row: NONE if pd.isna(row[f"{name}_s"]) else f"{1000 * row[f'{name}_s']:.1f}"


def table_of(
    done: Sequence[SuiteLaunch], columns: Columns, notes: Sequence[str] = (),
    name: Callable[[SuiteLaunch], str] = lambda one: one.name, first: str = "cell",
) -> SuiteTable:  # fmt: skip
    """Returns a row per launch; `first`: the heading of its names."""
    show = lambda one: [[name(one), *(text(known(one.row) | {"cell": one.cell}) for _, text in columns)]]  # noqa: E731
    return SuiteTable([first, *(heading for heading, _ in columns)], rows_of(done, show, name), [*notes])


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
    cells: dict[str, dict[Any, Any]] = {}
    for name in dict.fromkeys(one.name for one in done):
        if launches := [one.row for one in done if one.name == name and one.is_ok and one.row is not None]:
            cells[name] = summarize(frame_of(launches, RunRow)).to_dict("records")[0]
    ddp = {cell["model"]: cell["step_s"] for cell in cells.values() if cell["strategy"] == DDP}
    failed = {one.name: one.message for one in reversed(done) if one.name not in cells}
    rows = []
    for name in dict.fromkeys(one.name for one in done):
        cell = cells.get(name, {})
        columns = {**cell, "ddp_s": ddp.get(cell.get("model"))}
        rows.append([name, *([text(columns) for _, text in SPEED_COLUMNS] if cell else [failed[name]])])
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


def _memory_table(setup: SuiteSetup, done: list[SuiteLaunch]) -> SuiteTable:
    """The paper's formula (ZeRO, arXiv 1910.02054, figure 1) is, in fp32 with Adam, in bytes per parameter: DDP 16,
    P_os 4 + 12/N, P_os+g 2 + 14/N, P_os+g+p 16/N.
    """
    notes = ["peak: the ledger's; states: parameters, gradients, masters, optimizer and what is being sent, at most"]
    notes += ["outside: what the allocator has at its peak beyond the ledger: kernels, libraries, rounding"]
    for one in done:
        config, row = one.cell, one.row
        # ZeRO, section 3.2, on GPT-2 1.5B's activations at 32 sequences of 1K tokens
        if one.is_ok and row and config.model_name == "gpt2_1_5b" and config.strategy.name == DDP:
            measured = f"{row['max_activations_bytes'] * 32 / config.micro_batch / 1e9:.0f} GB by this run"
            notes.append(f"GPT-2 1.5B's activations, at 32 sequences: {measured}, about 60 GB in the paper")
    return table_of(done, MEMORY_COLUMNS, notes)


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
    table=_memory_table,
    answers=("ok", "oom"),
)

# -- peaks ---------------------------------------------------------------------------------------------------

PEAKS_ALONE = f"measure.passes=accounted measure.snapshot=true measure.repeats=1 {COUNTED}"
PEAK_HEADER = [
    "cell", "peak", "estimated", "allocated", "estimated", "reserved", "estimated", "beside free memory reserved for",
]  # fmt: skip


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
        return [[launch.name, *both, _reserved_for(setup, setup.folder("peaks") / row["run_id"])]]

    return SuiteTable(PEAK_HEADER, rows_of(done, show))


def _reserved_for(setup: SuiteSetup, folder: Path) -> str:
    if setup.device == "cpu" or not written(folder):
        return NONE
    with Path(folder, written(folder)[0]).open("rb") as file:
        traces = [trace for trace in pickle.load(file)["device_traces"] if trace]  # written by this suite
    grown = fragmentation(traces[0] if traces else [])
    return ", ".join(f"{category} {show_bytes(nbytes)}" for category, nbytes in grown.most_common(3)) or "nothing"


def fragmentation(trace: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """Returns category -> bytes of segments that were requested while as much was reserved and free. In the allocator's
    trace the entry of a segment is followed by that of the allocation.
    """
    grown, reserved, used, requested = Counter[str](), 0, 0, 0
    for entry in trace:
        action, nbytes = entry["action"], entry.get("size", 0)
        if action == "segment_alloc":
            requested = nbytes if reserved - used >= nbytes else 0
            reserved += nbytes
        elif action == "segment_free":
            reserved -= nbytes
        elif action == "alloc":
            grown[entry.get("category", "unknown")] += requested
            used, requested = used + nbytes, 0
        elif action == "free_completed":
            used -= nbytes
    return +grown


PEAKS = SuiteSection(
    name="peaks",
    title="Peaks and reserved memory at N = 1",
    asks="Are peaks and reserved memory as estimated without a GPU, and what is more memory reserved for?",
    about_s=37,
    sweeps=tuple(f"{words} {PEAKS_ALONE}" for words in SPEED.sweeps),
    small=tuple(f"{words} {PEAKS_ALONE}" for words in SPEED.small),
    table=_peak_table,
    answers=("ok", "oom"),
)

# -- profile -------------------------------------------------------------------------------------------------

TRACED = f"strategy=ddp {ON_ONE_RANK} measure.passes=timed measure.trace=true measure.warmup=3 measure.steps=3"
LISTED, WIDTH = 8, 80
"""Kernels that are listed, those that take longest, and letters of a kernel's name."""


def _profile_table(setup: SuiteSetup, done: list[SuiteLaunch]) -> SuiteTable:
    vocabulary = lambda launch: str(getattr(launch.cell.model, "vocabulary", NONE))  # noqa: E731

    def show(launch: SuiteLaunch) -> list[list[str]]:
        row = known(launch.row)
        trace = read_trace(setup.folder("profile") / row["run_id"] / FOLDER / "rank0.json.gz")
        lines = [["the step, without a profiler", f"{1e3 * row['step_s']:.2f}", NONE]]
        lines += kernels(trace, "kernel" if setup.device == "cuda" else "cpu_op")
        return [[vocabulary(launch), *line] for line in lines]

    header = ["words", "kernel", "ms a step", "launches a step"]
    notes = ["words: of the vocabulary; busy: at least one kernel runs"]
    return SuiteTable(header, rows_of(done, show, vocabulary), notes)


def kernels(trace: Sequence[Mapping[str, Any]], category: str) -> list[list[str]]:
    """Returns a line with the time in which the device is busy, and one for each kernel that takes long."""
    whole = [event for event in trace if event.get("ph") == "X"]
    steps = sum(event["name"] == STEP and event["cat"] == "user_annotation" for event in whole)
    ran = [event for event in whole if event.get("cat") == category]
    times, launches = Counter[str](), Counter(event["name"] for event in ran)
    for event in ran:
        times[event["name"]] += event["dur"]
    lines = [("busy", length(spans(ran)), launches.total())]
    lines += [(name, time, launches[name]) for name, time in times.most_common(LISTED)]
    return [[name[:WIDTH], f"{time / 1e3 / steps:.2f}", f"{number / steps:.0f}"] for name, time, number in lines]


PROFILE = SuiteSection(
    name="profile",
    title="Profile of the 124M model",
    asks="Which kernels take the time of a step, and what do 50,257 words cost beside 50,304?",
    about_s=14,
    sweeps=(f"{TRACED} model=gpt2_124m sequence=1024 micro_batch=8 model.vocabulary=50257,50304",),
    small=(f"{TRACED} {SMALL_GPT} model.vocabulary=257,320",),
    table=_profile_table,
)

# -- tiers ---------------------------------------------------------------------------------------------------

PAPER = {(False, False): 16, (False, True): 14, (True, False): 4, (True, True): 2}
"""Whether optimizer and gradients leave -> device bytes a parameter."""

KEPT = ("parameters", "gradients", "master", "optimizer")


def _tiers(*how: str, shape: str = "model=gpt2_124m sequence=1024 micro_batch=4", tile: int = 4 * 2**20) -> list[str]:
    """Returns sweeps. `tile`: small beside the model, as a tile of gradients in fp32 is none of the paper's rows."""
    same = f"strategy=zero1 {ON_ONE_RANK} optimizer=adam {shape} measure.warmup=2 precision.tile_bytes={tile}"
    return [f"{same} {words}" for words in how]


def _states_away(config: CellConfig) -> tuple[bool, bool]:
    offload = config.offload
    return (offload.optimizer, offload.gradients) if isinstance(offload, CpuOffload) else (False, False)


def _tier_name(one: SuiteLaunch) -> str:
    config = one.cell
    if any(away := _states_away(config)):
        names = [name for name, is_away in zip(("optimizer", "gradients"), away, strict=True) if is_away]
        return f"offload=cpu: {' and '.join(names)}"
    words = [axis.label for axis in (config.offload, config.activation) if axis.label]
    recomputed = config.model.checkpoints and not config.activation.label
    return " ".join([*words, *["activation=checkpoint"] * bool(recomputed)]) or "nothing leaves"


def _if_accounted(show: Callable[[Any], str]) -> Callable[[Any], str]:
    return lambda row: show(row) if row["cell"].measure.passes == "accounted" else NONE


TIER_COLUMNS: Columns = (
    ("kept", _if_accounted(lambda row: f"{sum(row[f'max_{name}_bytes'] or 0 for name in KEPT) / row['psi']:.2f}")),
    ("paper", _if_accounted(lambda row: str(PAPER[_states_away(row["cell"])]))),
    milliseconds("step ms", "step"),
    *sizes(allocated="allocated", host="host_peak", pinned="pinned", idle="fragmentation", free="largest_free_block"),
    ("retries", lambda row: show_figure(row.get("alloc_retries"), "")),
)


def _tier_table(setup: SuiteSetup, done: list[SuiteLaunch]) -> SuiteTable:
    notes = [
        "kept: bytes a parameter on the device, each category's most, without what is on its way; paper: its table"
    ]
    notes.append("idle: reserved - allocated; free: the largest free block")
    if setup.device == "cpu":
        notes.append("on a CPU there is one memory, told apart by labels, and no allocator to ask")
    return table_of(done, TIER_COLUMNS, notes, _tier_name, "what")


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
