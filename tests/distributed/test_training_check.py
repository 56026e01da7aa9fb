"""Training is checked wherever it is measured: norms of every strategy, verdicts, planted faults, and lost losses."""

import math
from math import sqrt
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.cells import cell
from tests.distributed.variants import engine_of
from tests.ranks import run_ranks
from zerobench import data, strategies, worker
from zerobench.config import schema_memory as memory
from zerobench.config import schema_training
from zerobench.config.schema import Measure
from zerobench.probes.probe import current_scale
from zerobench.probes.probe import squares as squares_of
from zerobench.records import RunRow
from zerobench.results import tables
from zerobench.sweep import cell as cells
from zerobench.sweep.parity import REFERENCES, ParityCheck
from zerobench.zero.bucket import GradientBucket

fill = GradientBucket.fill


def zeroed_on_rank_1(job: worker.RankJob, tell: Any) -> worker.RankRecord:
    """run_rank whose rank 1 contributes nothing to any gradient."""
    return _planted(job, tell, lambda gradient: torch.zeros_like(gradient) if job.rank == 1 else gradient)


def doubled(job: worker.RankJob, tell: Any) -> worker.RankRecord:
    """run_rank that sums gradients over two ranks where the mean belongs; Adam does not see the factor."""
    return _planted(job, tell, lambda gradient: gradient * 2)


def doubled_of_one(job: worker.RankJob, tell: Any) -> worker.RankRecord:
    """run_rank that doubles the gradients of parameters as large as the first that comes."""
    first: list[int] = []

    def change(gradient: torch.Tensor) -> torch.Tensor:
        first.append(gradient.numel())
        return gradient * 2 if gradient.numel() == first[0] else gradient

    return _planted(job, tell, change)


def _planted(job: worker.RankJob, tell: Any, change: Any) -> worker.RankRecord:
    def changed(bucket: GradientBucket, piece: Any, gradient: torch.Tensor) -> None:
        fill(bucket, piece, change(gradient))

    with mock.patch.object(GradientBucket, "fill", changed):
        return worker.run_rank(job, tell)


def not_a_number(job: worker.RankJob, tell: Any) -> worker.RankRecord:
    """run_rank of which rank 1's loss is lost in the third step."""
    here: list[int] = []
    loss, draw = torch.nn.functional.cross_entropy, data.Batches.batch

    def batch(batches: data.Batches, step: int, micro: int = 0) -> Any:
        here[:] = [step]
        return draw(batches, step, micro)

    def lose(*inputs: Any, **named: Any) -> torch.Tensor:
        return loss(*inputs, **named) * (math.nan if job.rank == 1 and here == [2] else 1)

    patched = mock.patch.object(data.Batches, "batch", batch)
    with patched, mock.patch.object(torch.nn.functional, "cross_entropy", lose):
        return worker.run_rank(job, tell)


STEPS = 2


def norms_of(
    rank: int, n: int, cases: list[tuple[str, dict[str, Any]]], folder: str
) -> list[list[tuple[float, float]]]:
    """Returns, per case and step, what this rank adds to the squared norm over how many hold the same, and the norm
    that the engine's own clipping tells afterwards.
    """
    found = []
    for name, more in cases:
        config = cell(name, n, **more).config
        engine = engine_of(config, folder)
        batches = data.build_batches(config.batching, rank, torch.device("cpu"))
        steps = []
        for step in range(STEPS):
            scale = current_scale(engine)
            for micro in range(config.accumulation):
                last = micro == config.accumulation - 1
                with strategies.synchronizing(engine, config.strategy.reduces, last):
                    engine.backward(engine(*batches.batch(step, micro)) / config.accumulation)
            squares = squares_of(engine.reduced_gradients(), scale)
            told = engine.clip_grad_norm_(1e9)
            engine.step()
            steps.append((float(squares) / engine.gradient_holders, float(told)))
        found.append(steps)
    return found


DELAYED = memory.CpuOffload(delayed=True, delayed_after=1)
HALVES = {"bf16": schema_training.Bf16(), "fp16": schema_training.Fp16()}
CASES: dict[str, list[tuple[str, dict]]] = {
    "fp32": [
        *((name, {}) for name in ("ddp", "zero1", "zero2", "zero3", "megatron", "fsdp2", "zero_redundancy")),
        ("zero1", {"offload": memory.CpuOffload()}), ("zero2", {"offload": DELAYED}), ("zero2", {"arena": True}),
        ("zero3", {"offload": memory.NvmeOffloadConfig()}), ("zero2", {"offload": memory.CpuOffload(fraction=0.5)}),
    ],
    "replicas": [("ddp", {}), ("zero2", {"shard_group": 2}), ("zero3", {"shard_group": 2})],
    "accumulated": [(name, {"accumulation": 2}) for name in ("ddp", "zero1", "zero2", "zero3", "fsdp2")],
    "bf16": [(name, {"precision": HALVES["bf16"]}) for name in ("ddp", "zero1", "zero2", "zero3")],
    "fp16": [(name, {"precision": HALVES["fp16"]}) for name in ("ddp", "zero1", "zero2", "zero3")],
}  # fmt: skip
"""Cases that have one norm among them: those of DDP, which is the first."""


@pytest.mark.parametrize(
    "n", [pytest.param(1, marks=pytest.mark.thorough), 2, pytest.param(4, marks=pytest.mark.thorough)]
)
def test_every_strategy_has_the_norm_of_ddp_and_of_its_own_clipping(tmp_path: Path, n: int, thorough: bool) -> None:
    """The norm of a delayed update is that of its gradients, which are DDP's until an update has been late."""
    groups = {name: group for name, group in CASES.items() if (name == "replicas") == (n == 4)}
    if not thorough:  # of fp32 every second and FSDP2, of the others DDP and zero3
        groups = {key: [*cases[::2], ("fsdp2", {})] if key == "fp32" else cases[::3] for key, cases in groups.items()}
    ranks = run_ranks(n, norms_of, [one for group in groups.values() for one in group], str(tmp_path))
    place = 0
    for name, mine in groups.items():
        norms, told = [], []
        for offset in range(len(mine)):
            steps = zip(*(rank[place + offset] for rank in ranks), strict=True)
            norms.append([sqrt(sum(squares for squares, _ in step)) for step in steps])
            told.append([step[1] for step in ranks[0][place + offset]])
        for (strategy, more), ours, said in zip(mine, norms, told, strict=True):
            rel = 1e-9 if name == "fp32" else 1e-2 if name in HALVES else 1e-6
            assert ours == pytest.approx(norms[0], rel=rel), (name, strategy, more)
            assert ours == pytest.approx(said, rel=2e-6 if name != "bf16" else 1e-2), (name, strategy, more)
        place += len(mine)


MEASURED = Measure(steps=2, warmup=2, passes="accounted")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A results folder with a run of DDP."""
    folder = tmp_path_factory.mktemp("runs")
    assert cells.run_cell(cell("ddp", 2, results_dir=str(folder), measure=MEASURED), lambda _: None).status == "ok"
    return folder


def judged(folder: Path, one: cells.Cell) -> RunRow:
    """The row of a cell that has run, with its verdict, as it is in its folder."""
    row = cells.run_cell(one, lambda _: None)
    check = ParityCheck()
    check.see(one, row)
    check.finish(makes=True, say=print)
    if row.status == "ok":
        assert tables.read_row(folder / row.run_id) == row
    return row


@pytest.mark.shown(2)
@pytest.mark.parametrize(
    ("worker", "said"),
    [
        (None, "equal to DDP's to the bit over 4 steps: losses and gradient norms"),
        (zeroed_on_rank_1, "the gradients of a rank or of a bucket are missing"),
        (doubled, "2 times DDP's, as a sum over the 2 ranks would be in place of the mean"),
        (doubled_of_one, "times DDP's, and the losses before agree: check the backward"),
    ],
)
def test_planted_faults_of_training_are_named(reference: Path, monkeypatch, worker, said: str) -> None:
    """By bytes and volumes nobody would see them, and both passes agree: both are wrong."""
    if worker is not None:
        monkeypatch.setattr(cells, "run_rank", worker)
    row = judged(reference, cell("zero2", 2, results_dir=str(reference), measure=MEASURED))
    assert row.training == ("equal" if worker is None else "differs")
    assert said in row.training_words
    if worker is doubled:
        assert row.grad_norm_deviation == pytest.approx(1, rel=1e-3)
        assert row.loss_deviation < 1e-5  # Adam hides it


def test_a_loss_that_is_lost_is_a_status(reference: Path, monkeypatch) -> None:
    monkeypatch.setattr(cells, "run_rank", not_a_number)
    row = judged(reference, cell("zero1", 2, results_dir=str(reference), measure=MEASURED))
    assert row.status == "diverged"
    assert row.reason.startswith("the loss of rank 1 is nan at step 3 of 4: ")
    assert row.training is None
    assert row.peak_bytes > 0  # what was measured is kept
    assert len(tables.load(reference / row.run_id).steps) == 2 * 4


def test_a_sweep_without_ddp_says_so_or_makes_one(tmp_path: Path) -> None:
    """The reference that is made is hidden from tables, short, and serves the next sweep."""
    measure = Measure(steps=2, warmup=2, passes="timed", check_training="true")
    one = cell("zero3", 2, results_dir=str(tmp_path), measure=measure)
    row = judged(tmp_path, one)
    assert row.training == "equal"
    assert "equal to DDP's to the bit over 4 steps" in row.training_words
    made = [path.name for path in (tmp_path / REFERENCES).iterdir()]
    assert len(made) == 1
    assert len(tables.load(tmp_path).runs) == 1
    check = ParityCheck()
    check.see(one, row)
    check.finish(makes=True, say=print)
    assert [path.name for path in (tmp_path / REFERENCES).iterdir()] == made
    auto = cell("zero3", 2, results_dir=str(tmp_path), measure=Measure(steps=2, warmup=2, passes="timed"), seed=1)
    row = judged(tmp_path, auto)
    assert row.training == "unchecked"
    assert "measure.check_training=true makes one" in row.training_words
