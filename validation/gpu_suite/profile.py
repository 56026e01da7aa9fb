"""Section 4: why a step of the 124M model takes as long as it does: its kernels, with GPT-2's 50,257 words and with the
next multiple of 64, from the trace of a third pass (measure.trace).

On a CPU operators take the place of kernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from zerobench.config.cell import Cell
from zerobench.probes.traced_pass import FOLDER, STEP, length, read_trace, spans

from .suite import NONE, SuiteLaunch, SuiteSection, SuiteSetup, SuiteTable
from .training import SMALL_GPT

SHAPE = ("model=gpt2_124m", "sequence=1024", "micro_batch=8", "model.vocabulary=50257,50304")
SMALL_SHAPE = (*SMALL_GPT, "model.vocabulary=257,320", "launch.threads=1")
LISTED, WIDTH = 8, 80
"""Kernels that are listed, those that take longest, and letters of a kernel's name."""


def _cells(setup: SuiteSetup) -> list[Cell]:
    same = ("strategy=ddp", "precision=bf16", "data=synthetic", "world_size=1", "draw_on=device")
    how = ("measure.passes=timed", "measure.trace=true", "measure.warmup=3", "measure.steps=3")
    return setup.cells("profile", *same, *how, *(SMALL_SHAPE if setup.small else SHAPE))


HEADER = ["words", "kernel", "ms a step", "launches a step"]


def _table(setup: SuiteSetup, done: list[SuiteLaunch]) -> SuiteTable:
    rows = []
    for one in done:
        words = str(getattr(one.cell.model, "vocabulary", NONE))
        if not one.is_ok or one.row is None:
            rows.append([words, one.words])
            continue
        trace = read_trace(setup.folder("profile") / one.row["run_id"] / FOLDER / "rank0.json.gz")
        rows.append([words, "the step, without a profiler", f"{1e3 * one.row['step_s']:.2f}", NONE])
        rows += [[words, *line] for line in kernels(trace, "kernel" if setup.device == "cuda" else "cpu_op")]
    return SuiteTable(HEADER, rows, ["words: of the vocabulary; busy: at least one kernel runs"])


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
    cells=_cells,
    table=_table,
)
