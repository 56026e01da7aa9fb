"""Published figures and runs, and table 1: rows, formulas, executions; what is printed, written and committed."""

import csv
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cells import cell
from validation import table1
from validation.__main__ import main
from validation.published.command import record_of, write
from validation.published.equations import states_per_parameter
from validation.published.figure import Reproduced, reproduce
from validation.published.sources import SOURCES
from validation.published_runs.cells import built_as, family_of, plan_of
from validation.published_runs.hardware import hardware_of
from validation.published_runs.peaks import GIB
from validation.published_runs.rows import PublishedRun
from validation.runner import run_real
from validation.store import read
from validation.table1 import GB, CellRow, StatesRow, TableCell, place_of, places
from zerobench.fake_execution import Execution
from zerobench.fake_execution.execute import execute, settled

ROWS = [(name, row) for name, source in SOURCES.items() for row in source.rows]
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_row_that_differs_says_so_and_one_without_execution_says_why() -> None:
    name, row = "zero", replace(SOURCES["zero"].rows[1], note="why")
    assert Reproduced(name, row, row.value + 2 * row.margin).verdict == "no; why"
    assert Reproduced(name, row, row.value + row.margin / 2).verdict == "yes"
    failed = reproduce([(name, row)], lambda work: [_failed for _ in work])[0]
    assert failed.verdict == "not executed: it has no values"


_failed = Execution(cell("zero1", 2).config, 0, 0.0, None, "it has no values")


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
    records = [execute(plan_of(run_of(row | more)).config).known for more in ({}, {"precision": "bf16"})]
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

TABLE = [(size, ranks, stage) for size in table1.SIZES for ranks in table1.RANKS for stage in table1.STAGES]


def test_all_54_printed_numbers_agree_with_the_formula_within_one_unit() -> None:
    """The rule for all cells; which columns are rounded, and which are cut off; that a wrong number is seen."""
    assert len(TABLE) == 54
    how: dict[str, Counter[str]] = {size: Counter() for size in table1.SIZES}
    for size, ranks, stage in TABLE:
        text, value = table1.printed(size, ranks, stage), table1.SIZES[size] * states_per_parameter(stage, ranks) / GB
        assert table1.how_printed(text, value) != "misprint", (size, ranks, stage)
        how[size][table1.how_printed(text, value)] += 1
    assert how["7.5B"]["cut off"] == 0
    assert how["128B"]["cut off"] + how["1T"]["cut off"] > 0
    assert not any(one["misprint"] for one in how.values())
    assert [table1.how_printed(text, 4187.5) for text in ("4187", "4188", "4186")] == ["cut off", "rounded", "misprint"]


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
