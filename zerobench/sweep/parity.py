"""Checks that runs train like DDP: compares losses and gradient norms with a DDP run of the same training.

The *reference* of a run is a DDP run of the same code on equally many ranks, with the same model, data, seed, optimizer
and precision, whatever else differs (`training_key`). Steps that both runs have are compared, rank by rank. Required
agreement:

    equal    bit for bit, if every sum has DDP's order: on a CPU, N <= 2, our stages, one micro-batch, no clipping
    close    within a tolerance in the first COMPARED steps: other orders round differently, and Adam amplifies that
    lossy    within a wide tolerance, for strategies that lose precision by design (ZeRO++)

Norms are fp64 sums in the strategy's order, so equal norms agree only to NORM_ORDER. A strategy that saves bytes by
training differently fails with `differs`; the message names the first deviation, which is where to look.

A run's reference is looked up for free among the sweep's runs, in any order, and in the results folder. If there is
none, `measure.check_training=true` creates one at the end of the sweep: a short DDP run in the folder's REFERENCES,
which is in no table; under auto the row records that there is none.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from glob import escape
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq

from .. import strategies
from ..config.cell import Cell, CellConfig
from ..config.flat import base_name
from ..config.plugins import HERE, LOCAL
from ..config.schema import Measure
from ..config.schema_memory import Activation, Buffers, OffloadConfig, ZeroppConfig
from ..host.environment import SIMULATED
from ..predict.estimate import refuse_unfit
from ..records import RunRow
from ..results import tables
from ..results.folders import amend_row
from ..results.provenance import source_of
from ..results.selection import CODE
from ..sizes import show_count
from ..strategies import spec_of
from .cell import LONGEST_NAME, find_reusable, recorded_versions, run_cell

REFERENCE, EQUAL, CLOSE, DIFFERS, UNCHECKED = "reference", "equal", "close", "differs", "unchecked"
"""Kinds of a verdict."""

COMPARED = 20
"""Number of first steps to which a tolerance applies; later, rounding errors grow without bound."""

NORM_ORDER = 1e-9

TOLERANCES = {"fp32": (1e-5, 1e-4), "bf16": (1e-2, 3e-2), "fp16": (1e-2, 3e-2)}
"""Precision -> largest permitted relative deviations from DDP of a loss and of a norm."""

LOSSY = (5e-2, 2e-1)

SAME = ("model", "huggingface", "data", "seed", "deterministic", "draw_on", "device", "world_size",
        "tensor_parallel", "optimizer", "micro_batch", "accumulation", "sequence", "clip", "clip_norm",
        "compile")  # fmt: skip
"""Sections and keys of a resolved config that determine the training."""

LEAVE_ROUNDING = (
    "model.checkpointing",
    "model.loss_chunks",
    "model.mlp_chunks",
    "model.separate_experts",
    "optimizer.implementation",
    "data.path",
)
"""Keys below SAME that change only rounding, or are compared elsewhere."""

SCALING = ("name", "initial_scale", "growth", "backoff", "interval", "minimum_scale")
"""Precision keys that must agree."""


REFERENCES = ".references"
"""Folder, within a results folder, of DDP runs made for a check."""

REFERENCE_STEPS = 8
"""Steps of a reference made only for the check."""

LATE_S, LOOK_S = 70.0, 0.5
"""Maximum seconds to wait for a run written by another machine, and seconds between two checks. NFS caches attributes
of a folder for 60 s (acdirmax).
"""

ABSENT = "the run is not in its results folder"

NOT_MADE = "the sweep ended before it made the DDP run of this check; the same command makes it"

NONE_AT_HAND = "no DDP run of the same training is in this sweep or folder; measure.check_training=true makes one"


@dataclass(frozen=True)
class Verdict:
    """The verdict on one run. `kind`: reference, equal, close, differs, or unchecked. `loss`, `norm`: the largest
    relative deviations from DDP; None if nothing was compared.
    """

    kind: str
    message: str
    loss: float | None = None
    norm: float | None = None


def training_key(config: CellConfig) -> str:
    """Returns a hash of the config keys that determine the training: equal for a run and its reference."""
    written = config.as_dict()
    kept = {key: value for key, value in written.items() if key in SAME}
    for key in LEAVE_ROUNDING:
        section, last = key.split(".")
        kept.get(section, {}).pop(last, None)
    kept["precision"] = {key: getattr(config.precision, key, None) for key in SCALING}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:12]


def compare(config: CellConfig, steps: pd.DataFrame, reference: CellConfig, theirs: pd.DataFrame) -> Verdict:
    """Compares a run's steps with a reference's. `config`, `reference`: their resolved configs."""
    exact = rounds_alike(config, reference)
    pairs = _pairs(steps, theirs)
    on_time = config.offload.exact_steps
    if on_time is not None:  # by intent parameters are an update older from then on
        pairs = pairs[pairs["step"] <= on_time]
    if not exact:
        pairs = pairs[pairs["step"] < COMPARED]
    if pairs.empty:
        return Verdict(UNCHECKED, "the run and DDP's have no step in common")
    lossy = bool(config.zeropp.label)
    limits = (0.0, NORM_ORDER) if exact else LOSSY if lossy else TOLERANCES[config.precision.name]
    loss, norm = float(pairs["loss_off"].max()), float(pairs["norm_off"].max())
    count = 1 + int(pairs["step"].max())
    of = f"{count} step{'s' * (count > 1)}" + ", after which updates are delayed by design" * (on_time is not None)
    has_norms = pairs[["norm", "norm_ddp"]].notna().all(axis=1).any()
    what = "losses and gradient norms" if has_norms else "losses alone: no norm was taken"
    wrong = pairs[(pairs["loss_off"] > limits[0]) | (pairs["norm_off"] > limits[1])]
    if len(wrong):
        of_step = list(pairs[pairs["step"] == wrong["step"].iloc[0]].itertuples())
        return Verdict(DIFFERS, _blame(next(wrong.itertuples()), of_step, limits, config.world_size), loss, norm)
    if loss == 0 and norm <= NORM_ORDER:
        return Verdict(EQUAL, f"equal to DDP's to the bit over {of}: {what}", loss, norm)
    return Verdict(CLOSE, f"within {loss:.1e} and {norm:.1e} of DDP's over {of}: {what}", loss, norm)


def rounds_alike(config: CellConfig, reference: CellConfig) -> bool:
    """Whether bit equality can be expected: the same sums in the same order by the same kernels."""
    return (
        spec_of(config.strategy.name).rounds_as_reference
        and config.device == "cpu"
        and config.data_ranks <= 2
        and len(config.precision.numbers) == 1
        and config.accumulation == 1  # else a tied parameter's gradients are summed in another order
        and config.clip is None  # torch takes a norm in fp32, and so another coefficient
        and config.optimizer == reference.optimizer
        and config.launch.threads == reference.launch.threads
        and (config.zeropp.label, config.node_size, config.shard_group, config.nodes) == ("", None, None, 1)
    )


def relative_deviation(ours: float, theirs: float) -> float:
    """Returns |ours − theirs| over |theirs|; two values that are non-finite in the same way are equal."""
    if ours == theirs or (math.isnan(ours) and math.isnan(theirs)):
        return 0.0
    off = abs(ours - theirs) / abs(theirs) if theirs else math.inf
    return off if math.isfinite(off) else math.inf


def _pairs(steps: pd.DataFrame, theirs: pd.DataFrame) -> pd.DataFrame:
    """Returns the steps that both runs have, by step and then by rank: the losses and norms of the run and of DDP, and
    their relative deviations. Norms are from any pass that measures them.
    """
    sides = []
    for side in (steps, theirs):
        rows, keys = side[side["mode"] != "traced"], ["step", "rank"]
        losses = rows.drop_duplicates(keys, keep="last").set_index(keys)["loss"]
        norms = rows.groupby(keys)["grad_norm"].first()
        sides.append(pd.DataFrame({"loss": losses, "norm": norms}).astype("float64"))
    pairs = sides[0].join(sides[1].add_suffix("_ddp"), how="inner").sort_index().reset_index()
    for name in ("loss", "norm"):
        both = zip(pairs[name], pairs[f"{name}_ddp"], strict=True)
        pairs[f"{name}_off"] = [relative_deviation(ours, theirs) for ours, theirs in both]
    pairs.loc[pairs[["norm", "norm_ddp"]].isna().any(axis=1), "norm_off"] = 0.0
    return pairs


def _blame(wrong: Any, of_step: list[Any], limits: tuple[float, float], ranks: int) -> str:
    """Returns a message about the first deviation: in the forward, the gradients, or the previous update. `of_step`:
    the pairs of the same step.
    """
    step, off = wrong.step, next((pair for pair in of_step if pair.loss_off > limits[0]), None)
    if off is None:
        ours, theirs, than = wrong.norm, wrong.norm_ddp, f"DDP's {wrong.norm_ddp:.6g}"
        if math.isfinite(ours) and math.isfinite(theirs) and theirs:  # with the usual cause of that factor
            factor = ours / theirs
            than = f"{factor:.6g} times DDP's"
            if math.isclose(factor, ranks, rel_tol=1e-3) and ranks > 1:
                than += f", as a sum over the {ranks} ranks would be in place of the mean"
            elif math.isclose(factor, 1 / ranks, rel_tol=1e-3) and ranks > 1:
                than += f", as after a second division by the {ranks} ranks"
            elif factor < 0.999:
                than += ": the gradients of a rank or of a bucket are missing"
        said = f"gradients: their norm at step {step} is {ours:.6g}, {than}"
        return f"{said}, and the losses before agree: check the backward and the reduction"
    said = f"the loss of rank {off.rank} at step {step} is {off.loss:.9g} and DDP's {off.loss_ddp:.9g}"
    if step == 0:
        return f"{said}: there was no update yet: check the forward, the data and the initial values"
    return f"{said}, after gradient norms that agree: check the update of step {step - 1}, and parts of gradients"


class ParityCheck:
    """Collects the rows of a sweep as they are written; rows without a reference wait for one."""

    def __init__(self) -> None:
        self._references: dict[str, tuple[CellConfig, pd.DataFrame]] = {}
        self._waiting: list[tuple[Cell, RunRow]] = []
        self._late: list[tuple[Cell, RunRow]] = []

    def see(self, cell: Cell, row: RunRow) -> None:
        """Handles a finished run; its verdict, once known, is written into `row` and the run's folder."""
        if row.status != "ok" or row.backend == SIMULATED or cell.config.measure.check_training == "false":
            return
        if not _is_there(cell, row):  # it could not be written there, or is not visible on this machine yet
            row.training, row.training_words = UNCHECKED, ABSENT
            self._late += [(cell, row)] if _may_be_late(row) else []
            return
        key = _key(cell.config, row)
        if row.strategy == strategies.reference().name:
            self._references.setdefault(key, (cell.config, _steps(_folder(cell, row))))
            _write(cell, row, Verdict(REFERENCE, "is the reference of the others"))
            ready = [pair for pair in self._waiting if _key(pair[0].config, pair[1]) == key]
            self._waiting = [pair for pair in self._waiting if not any(pair is other for other in ready)]
            for waiting in ready:
                self._judge(*waiting)
        elif self._find(cell, row):
            self._judge(cell, row)
        else:
            self._waiting.append((cell, row))

    def finish(self, makes: bool, say: Callable[[str], None], run: Callable[[Cell], RunRow] | None = None) -> bool:
        """Ends the sweep: waits for late runs; for rows without a reference, makes one or writes a note. Returns False
        if the user interrupts.

        `makes`: permits new references. `say`: prints a line. `run`: reuses or runs a cell where the sweep's cells ran,
        by default on this machine.
        """
        stopped = False
        if makes:  # runs of other machines may not be visible here yet
            late, self._late = self._late, []
            if absent := sum(not _is_there(*pair) for pair in late):
                say(f"{show_count(absent, 'run')} of other machines cannot be seen here yet: up to {LATE_S:.0f} s more")
            try:
                _wait_for(late)
            except KeyboardInterrupt:
                makes, stopped = False, True
            for pair in late:
                self.see(*pair)
        waiting, self._waiting = self._waiting, []
        for cell, row in waiting:
            wanted = cell.config.measure.check_training == "true"
            why = NOT_MADE if wanted else NONE_AT_HAND
            if makes and wanted and not self._find(cell, row):
                say(f"{base_name(cell.config)}: DDP trains the same for a few steps, to check it")
                try:
                    why = self._make(cell, row, run or run_here)
                except KeyboardInterrupt:
                    return False
            if _key(cell.config, row) in self._references:
                self._judge(cell, row)
            else:
                _write(cell, row, Verdict(UNCHECKED, why))
        return not stopped

    def _judge(self, cell: Cell, row: RunRow) -> None:
        config, steps = self._references[_key(cell.config, row)]
        try:
            own = _steps(_folder(cell, row))
        except OSError:  # removed meanwhile
            _write(cell, row, Verdict(UNCHECKED, ABSENT))
        else:
            _write(cell, row, compare(cell.config, own, config, steps))

    def _find(self, cell: Cell, row: RunRow) -> bool:
        """Returns whether there is a reference, searching the results folder if the sweep has none yet."""
        key, config = _key(cell.config, row), cell.config
        name = escape(config.model_name[:LONGEST_NAME])
        pattern = f"{strategies.reference().name}-{name}-n{config.world_size}-*"
        if key not in self._references:
            for folder in Path(config.results_dir).glob(pattern):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # an unreadable run is not a reference
                    other = tables.read_row(folder)
                if other is not None and other.status == "ok":
                    config = replace(CellConfig.from_json(other.config), results_dir=str(folder.parent))
                    if _key(config, other) == key and tables.is_whole(folder):
                        self._references.setdefault(key, (config, _steps(folder)))
        return key in self._references

    def _make(self, cell: Cell, row: RunRow, run: Callable[[Cell], RunRow]) -> str:
        """Runs DDP for a few steps, or reuses such a run; returns "" or why there is still no reference."""
        config, reference = cell.config, strategies.reference()
        # all steps except one are warm-up, which also has norms
        steps = min(REFERENCE_STEPS, config.measure.steps + config.measure.warmup - 1)
        open_precision = replace(config.precision, gradient_dtype=None, wire_dtype=None, tile_bytes=None)
        made = cell.changed(
            strategy=reference.options(**reference.reference or {}),
            precision=open_precision.resolved(reference.name, config.device, config.optimizer),
            measure=Measure(1, steps, repeats=1, check_training=config.measure.check_training, passes="timed"),
            results_dir=str(Path(config.results_dir) / REFERENCES),
            offload=OffloadConfig(), activation=Activation(), buffers=Buffers(), zeropp=ZeroppConfig(),
            arena=False, node_size=None, shard_group=None,
        )  # fmt: skip
        made = replace(made, repeat=0)
        made_row = run(made)
        if made_row.status != "ok":
            return f"DDP, its reference: {made_row.status}: {made_row.reason}"
        if _may_be_late(made_row):
            _wait_for([(made, made_row)])
        if not _is_there(made, made_row):
            return f"DDP, its reference: {ABSENT}"
        self._references[_key(cell.config, row)] = made.config, _steps(_folder(made, made_row))
        return ""


def run_here(cell: Cell) -> RunRow:
    """Returns the row of a cell, reused or new. Raises StoppedError if the user interrupts."""
    return find_reusable(cell) or run_cell(refuse_unfit(cell), lambda _: None)


def _key(config: CellConfig, row: RunRow) -> str:
    code = {name: getattr(row, name) for name in CODE}
    if code["source_hash"] == source_of(config):  # a user's strategy is code that its reference does not run
        code["source_hash"] = source_of(replace(config, strategy=strategies.reference().options()))
    if config.model.kind == "huggingface":  # whose code builds the model
        code |= recorded_versions(Path(config.results_dir) / row.run_id, ["transformers"])
    return " ".join([training_key(config), *map(str, code.values())])


def _folder(cell: Cell, row: RunRow) -> Path:
    return Path(cell.config.results_dir) / row.run_id


def _may_be_late(row: RunRow) -> bool:
    """Whether another machine may have written the run."""
    return row.launcher not in (LOCAL, *HERE)


def _wait_for(runs: list[tuple[Cell, RunRow]]) -> None:
    """Waits until all runs are visible, for at most LATE_S."""
    deadline = time.monotonic() + LATE_S
    while not all(_is_there(*pair) for pair in runs) and time.monotonic() < deadline:
        time.sleep(LOOK_S)


def _is_there(cell: Cell, row: RunRow) -> bool:
    return (_folder(cell, row) / "steps.parquet").is_file()


def _steps(folder: Path) -> pd.DataFrame:
    steps: pd.DataFrame = pq.read_table(folder / "steps.parquet").to_pandas()
    return steps


def _write(cell: Cell, row: RunRow, verdict: Verdict) -> None:
    changes = {
        "training": verdict.kind,
        "training_words": verdict.message,
        "loss_deviation": verdict.loss,
        "grad_norm_deviation": verdict.norm,
    }
    if any(getattr(row, name) != value for name, value in changes.items()):
        for name, value in changes.items():
            setattr(row, name, value)
        with suppress(OSError, ValueError):  # a read-only folder: the next sweep that reuses the run tries again
            amend_row(_folder(cell, row), changes)
