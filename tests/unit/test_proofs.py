"""Proofs of validation/: published figures and runs, table 1, certificates, ratios to peers; each has its target."""

import csv
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis import compare
from tests.made_up import results_of, run
from validation import table1
from validation.__main__ import main
from validation.certificates.command import Work, judged, loops, run_one
from validation.certificates.loops import Plant, plant, usual
from validation.published.command import record_of, write
from validation.published.figure import reproduce, states_per_parameter
from validation.published.sources import SOURCES
from validation.published_runs.cells import built_as, family_of, plan_of
from validation.published_runs.hardware import hardware_of
from validation.published_runs.peaks import GIB
from validation.published_runs.rows import PublishedRun
from validation.runner import run_real
from validation.store import read
from validation.table1 import CellRow, StatesRow, TableCell, place_of, places
from zerobench.records import CertificateRow
from zerobench.simulation.execute import execute, settled

# -- published figures and runs, and table 1 ----

ROWS = [(name, row) for name, source in SOURCES.items() for row in source.rows]
ROOT = Path(__file__).parents[2]


@pytest.mark.thorough
def test_every_row_is_executed_as_in_the_committed_table(tmp_path: Path) -> None:
    """`make published` writes the table; values are exact, and the same on every machine."""
    recorded = list(csv.DictReader((ROOT / "results/published/published.csv").read_text().splitlines()))
    found = reproduce(ROWS)
    assert [one.problem for one in found if one.problem] == []
    write(found, tmp_path)
    assert (tmp_path / "published.md").read_text() == (ROOT / "results/published/published.md").read_text()
    for one, row in zip(found, recorded, strict=True):
        assert {key: str(value) for key, value in record_of(one).items() if value is not None} == {
            key: value for key, value in row.items() if value
        }
    disagreeing = [one.row.quantity for one in found if not one.is_within and not one.row.note]
    assert disagreeing == []


HEADER = [
    "id", "system", "strategy", "model", "params", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq",
    "micro_batch", "grad_accum", "gpus", "gpu", "precision", "optimizer", "act_ckpt", "compile", "peak_mem_gib",
    "peak_kind", "tp", "notes",
]  # fmt: skip

SMALL = {
    "model": "llama-tiny", "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 80, "vocab": 977, "seq": 48,
    "micro_batch": 2, "grad_accum": 1, "gpus": 2, "gpu": "CPU", "precision": "fp32", "optimizer": "AdamW",
    "act_ckpt": "none", "peak_kind": "allocated",
}  # fmt: skip

RUNS: list[dict[str, Any]] = [
    SMALL | {"id": "mine-ddp", "strategy": "ddp", "model": "gpt2-tiny", "act_ckpt": "full", "kv_heads": "", "ffn": ""},
    SMALL | {"id": "mine-zero2", "strategy": "zero2", "micro_batch": 3},
    SMALL | {"id": "mine-fsdp2", "system": "fsdp2", "strategy": "zero3", "precision": "bf16", "act_ckpt": "selective"},
]


def run_of(row: dict[str, Any]) -> PublishedRun:
    return PublishedRun(**{key: value for key, value in row.items() if value != ""})


def written(path: Path, rows: list[dict[str, Any]], header: list[str] = HEADER) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, header, restval="", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path


def measured_gib(run: PublishedRun, folder: Path) -> float:
    config = replace(settled(plan_of(run).config), backend="gloo", tensors="real")
    (records,) = run_real({run.id: config}, folder / run.id).values()
    assert not [one for one in records.values() if isinstance(one, str)]
    rows = [row for record in records.values() for row in record.memory]
    return max(r.max_bytes for r in rows if (r.phase, r.tier, r.category) == ("step", "device", "total")) / GIB


@pytest.mark.thorough
@pytest.mark.parametrize("chosen", [RUNS[1:2], pytest.param(RUNS, marks=pytest.mark.thorough)], ids=["one", "all"])
def test_peaks_of_our_own_real_runs_are_met(tmp_path: Path, chosen: list[dict[str, Any]]) -> None:
    """And a run without a configuration is in the file, with its reason; what was executed is not simulated again."""
    pytest.importorskip("transformers")
    rows = [row | {"peak_mem_gib": measured_gib(run_of(row), tmp_path)} for row in chosen]
    open_rows = [
        rows[0] | {"id": "no batch", "micro_batch": ""}, rows[0] | {"id": "none", "peak_mem_gib": "", "peak_kind": ""}
    ]  # fmt: skip
    path, out = written(tmp_path / "runs.csv", rows + open_rows), tmp_path / "errors.csv"
    words = ["published-runs", "--runs", str(path), "--out", str(out), "--cache", str(tmp_path / "cache")]
    assert main(words) == 0
    found = list(csv.DictReader(out.read_text().splitlines()))
    assert [one["status"] for one in found] == ["compared"] * len(rows) + ["no estimate", "no peak"]
    assert all(abs(float(one["error_percent"])) <= 0.1 for one in found[: len(rows)])
    assert found[-2]["reason"] == "the row does not give micro_batch"
    kept = (tmp_path / "cache" / "cells.csv").read_text()
    before = out.read_text()
    out.unlink()
    assert main(words) == 0
    assert ((tmp_path / "cache" / "cells.csv").read_text(), out.read_text()) == (kept, before)


FP32_SUMS = {"system": "nanotron", "precision": "bf16, fp32 accumulation of gradients and fp32 masters"}


def test_gradients_that_are_accumulated_in_fp32_take_four_bytes() -> None:
    pytest.importorskip("transformers")
    row = SMALL | FP32_SUMS | {"id": "sums", "strategy": "zero1", "grad_accum": 2, "notes": "tied embeddings"}
    records = [execute(plan_of(run_of(row | more)).config).result for more in ({}, {"precision": "bf16"})]
    numel = sum(shape.numel for shape in records[0].schedule.shapes)
    of_backward = ({(m.phase, m.category): m.max_bytes for m in record.memory} for record in records)
    wide, usual = (most["backward", "gradients"] for most in of_backward)
    assert wide - usual == pytest.approx(2 * numel, rel=0.02)
    hardware = hardware_of(run_of(row | {"gpu": "H100-SXM"}))
    assert hardware.declared.gradient_factor == 1, "the schedule sends fp32 itself"
    tied, untied = (run_of(row | {"notes": f"{how}tied embeddings"}) for how in ("", "un"))
    options = [built_as(run, family_of(run)).options["tie_word_embeddings"] for run in (tied, untied)]
    assert options == [True, False]


def test_the_runs_of_a_file_are_predicted_or_say_why_not(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    row = RUNS[2] | {"id": "one", "gpus": 8, "gpu": "A100-SXM"}
    rows = [row, row | {"id": "two", "gpu": "GB200"}, row | {"id": "three", "precision": "FP8"}]
    path = written(tmp_path / "runs.csv", rows)
    assert main(["predicted-runs", "--file", str(path), "--cache", str(tmp_path / "cache")]) == 0
    one, two, three = csv.DictReader((tmp_path / "runs_predicted.csv").read_text().splitlines())
    assert float(one["low"]) < float(one["predicted_tokens_s_gpu"]) < float(one["high"])
    assert "no device of that name" in two["reason"]
    assert "less than 16 bits" in three["reason"]
    assert not two["predicted_tokens_s_gpu"]
    assert list((tmp_path / "cache").glob("*.parquet")), "a command that was stopped goes on there"


COMMITTED = Path(__file__).parents[2] / "results" / "table1"


def test_the_committed_rows_are_the_papers_cells_and_their_parts_add_up() -> None:
    """Printed numbers and formulas as of today; the executed states are the formula, what is in flight, and the sum of
    their lines; the replay expects them to a millionth.
    """
    rows = read(COMMITTED / "cells.csv", CellRow)
    parts = Counter[TableCell]()
    for part in read(COMMITTED / "in_flight.csv", StatesRow):
        parts[place_of(part)] += part.bytes
    assert rows
    assert {place_of(row) for row in rows} == set(parts) <= set(places())
    for row in rows:
        assert row.printed_gb == table1.printed(row.size, row.ranks, row.strategy)
        assert row.paper_formula_bytes == round(table1.SIZES[row.size] * states_per_parameter(row.strategy, row.ranks))
        assert row.formula_bytes == pytest.approx(row.psi * states_per_parameter(row.strategy, row.ranks), rel=1e-9)
        assert parts[place_of(row)] == row.executed_bytes >= row.formula_bytes
        assert row.replayed_bytes == pytest.approx(row.executed_bytes, rel=1e-6)
        assert row.resident_bytes < 4 * 2**30


def launches(strategy: str, steps: list[float], ranks: int = 2, minute: int = 0, **more):
    rows = [run(strategy, ranks, repeat=n, step=step, **more) for n, step in enumerate(steps)]
    for n, row in enumerate(rows):
        row.started = f"2026-01-01T10:{10 * n + minute:02}:00+00:00"
    return rows


def peaks(size: int) -> dict[str, int]:
    """By the allocator, in both passes; the ledger's own says nothing here."""
    return {"allocator_peak_bytes": size, "timed_allocator_peak_bytes": size + 100, "peak_bytes": 1}


def example() -> list:
    return [
        *launches("zero3", [0.07, 0.08, 0.09], minute=1, **peaks(100), loopback_bytes=600),
        *launches("fsdp2", [0.10, 0.10, 0.10], **peaks(200), loopback_bytes=800),
        *launches("ddp", [0.05, 0.06, 0.07], minute=2, **peaks(400), loopback_bytes=400),
        run("deepspeed_zero3", 2, "invalid", repeat=0),
    ]


@pytest.mark.slow
def test_a_ratio_is_that_of_paired_launches_with_its_interval() -> None:
    found = {(one.peer, one.metric): one for one in compare.ratios_of(results_of(example())) if one.pairs}
    step = found["fsdp2", "step_s"]
    assert step.ratio == pytest.approx((0.7 * 0.8 * 0.9) ** (1 / 3))
    assert step.low < 0.75 < 0.85 < step.high
    assert (step.pairs, step.interleaved, step.goal) == (3, True, 0.80)
    assert step.verdict == "met, within noise"
    assert found["fsdp2", "allocator_peak_bytes"].ratio == 0.5
    assert found["fsdp2", "timed_allocator_peak_bytes"].ratio == pytest.approx(2 / 3)
    assert found["fsdp2", "loopback_bytes"].ratio == 0.75
    assert found["fsdp2", "allocator_peak_bytes"].verdict == ""
    assert pd.isna(found["ddp", "step_s"].goal)


PLANTED = plant(usual(), causes="masters.*bfloat16", about="dtypes: masters")


def judged_row(verdict: str, subject: str = "masters of all 6 parameters", found: str = "bfloat16") -> CertificateRow:
    return CertificateRow("dtypes", subject, found, "float32", "it is declared", verdict)


def class_of(*rows: CertificateRow, planted: Plant | None = PLANTED) -> tuple[str, str]:
    found = judged("a loop", 1, "", rows, 0, planted)
    return found.kind, found.named_by


def test_certificates_get_their_classes() -> None:
    unusual = judged_row("unusual")
    beside = judged_row("different", "moments of all 6 parameters", "float64")
    assert class_of(judged_row("different"), beside) == ("named", "different")
    assert class_of(judged_row("unusual"), beside) == ("named", "unusual")
    assert class_of(beside) == ("misnamed", "")
    assert class_of(judged_row("cannot be told")) == ("cannot be told", "")
    assert class_of(judged_row("same")) == class_of() == ("missed", "")
    wrongly = judged("a loop", 1, "", [judged_row("same")], 0, PLANTED).wrongly_same
    assert wrongly.startswith("dtypes: masters of all 6")
    assert not judged("a loop", 1, "", [judged_row("different")], 0, PLANTED).wrongly_same
    assert [class_of(*rows, planted=None)[0] for rows in ([], [unusual], [unusual, beside])] == [
        "clean", "unusual", "accused",
    ]  # fmt: skip


@pytest.mark.slow
def test_an_honest_loop_is_accused_of_nothing(tmp_path: Path) -> None:
    reference = loops()["zero2"].reference
    assert run_one(Work(reference), 11, tmp_path).kind == "clean"
    found = run_one(Work("zero2", reference), 11, tmp_path)
    assert (found.kind, found.rows) == ("clean", "")
    assert found.same > 5
