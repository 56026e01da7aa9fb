"""Section 8: where states, activations and gradients are. What leaves the device, and what that costs.

states        zero1 at N = 1, nothing, gradients, the optimizer or both in host memory: the step's time, files too; and
              bytes a parameter kept on the device beside table 1 of ZeRO-Offload (arXiv 2101.06840): 16, 14, 4, 2
activations   each policy's peak on the device and its step
"""

from __future__ import annotations

from typing import Any

from zerobench.config.cell import CellConfig
from zerobench.config.schema_memory import CpuOffload
from zerobench.sizes import show_bytes

from .suite import NONE, SuiteLaunch, SuiteSection, SuiteSetup, SuiteTable
from .training import SMALL_GPT

SAME = ("strategy=zero1", "world_size=1", "precision=bf16", "optimizer=adam", "data=synthetic", "draw_on=device")
SHAPE = ("model=gpt2_124m", "sequence=1024", "micro_batch=4", "measure.warmup=2")
STEPS = {"none": 8, "cpu": 8, "nvme": 2}
"""Timed steps by the value of `offload`: one with files takes seconds."""
SMALL_SHAPE = (*SMALL_GPT, "measure.warmup=2", "launch.threads=1")

PAPER = {"none": 16, "cpu_gradients": 14, "cpu_optimizer": 4, "cpu": 2}
"""Device bytes a parameter by the value of `offload`."""

TILE = {False: "precision.tile_bytes=4194304", True: "precision.tile_bytes=4096"}
"""Small beside the model, by `small`: a tile of gradients in fp32 is none of the paper's rows."""

OFFLOADS, SMALL_OFFLOADS = ("none", "cpu_gradients", "cpu_optimizer", "cpu"), ("none", "cpu")
TIMED, SMALL_TIMED = ("none", "cpu", "nvme"), ("nvme",)
POLICIES, SMALL_POLICIES = ("checkpoint", "offload", "checkpoint_offload"), ("checkpoint_offload",)
"""Beside none, which is the timed cell that offloads nothing."""

LIMIT_S = 40.0


def _cells(setup: SuiteSetup) -> list[Any]:
    small = setup.small
    same = (*SAME, *(SMALL_SHAPE if small else SHAPE), TILE[small])
    timed = ("measure.passes=timed", f"measure.steps={2 if small else 8}")
    found = []
    for name in SMALL_TIMED if small else TIMED:
        found += setup.cells("tiers", *same, *timed[:1], f"measure.steps={STEPS[name]}", f"offload={name}")
    offloads = ",".join(SMALL_OFFLOADS if small else OFFLOADS)
    found += setup.cells("tiers", *same, "measure.passes=accounted", "measure.steps=2", f"offload={offloads}")
    policies = ",".join(SMALL_POLICIES if small else POLICIES)
    return found + setup.cells("tiers", *same, *timed, f"activation={policies}")


HEADER = ["what", "kept", "paper", "step ms", "allocated", "host", "pinned", "idle", "free", "retries"]

KEPT = ("parameters", "gradients", "master", "optimizer")


def _table(setup: SuiteSetup, done: list[SuiteLaunch]) -> SuiteTable:
    notes = [
        "kept: bytes a parameter on the device, each category's most, without what is on its way; paper: its table"
    ]
    notes.append("idle: reserved - allocated; free: the largest free block")
    rows = []
    for one in done:
        if not one.is_ok:
            rows.append([_name(one), one.words])
        elif one.row is not None:
            rows.append(_line(one, one.row, one.cell.measure.passes))
    if setup.device == "cpu":
        notes.append("on a CPU there is one memory, told apart by labels, and no allocator to ask")
    return SuiteTable(HEADER, rows, notes)


def _name(one: SuiteLaunch) -> str:
    offload, activation = one.cell.offload, one.cell.activation
    if isinstance(offload, CpuOffload):
        away = ["optimizer"] * offload.optimizer + ["gradients"] * offload.gradients
        return f"offload=cpu: {' and '.join(away)}"
    words = [axis.label for axis in (offload, activation) if axis.label]
    recomputed = one.cell.model.checkpoints and not activation.label
    return " ".join([*words, *["activation=checkpoint"] * bool(recomputed)]) or "nothing leaves"


def _line(one: SuiteLaunch, found: dict[str, Any], passes: str) -> list[str]:
    kept, paper = NONE, NONE
    if passes == "accounted":
        kept = f"{sum(found[f'max_{name}_bytes'] or 0 for name in KEPT) / found['psi']:.2f}"
        paper = str(PAPER[_offload_of(one.cell)])
    step = NONE if found["step_s"] is None else f"{1000 * found['step_s']:.1f}"
    names = ("allocated_bytes", "host_peak_bytes", "pinned_bytes", "fragmentation_bytes", "largest_free_block_bytes")
    sizes = [NONE if found.get(name) is None else show_bytes(found[name]) for name in names]
    retries = found.get("alloc_retries")
    return [_name(one), kept, paper, step, *sizes, NONE if retries is None else str(retries)]


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
    cells=_cells,
    table=_table,
    answers=("ok", "oom"),
    limit_s=LIMIT_S,
)
