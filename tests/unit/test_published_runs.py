"""Published runs: peaks of our own real runs are met, other files refused, causes executed."""

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from validation.__main__ import main
from validation.published_runs.causes import GIB
from validation.published_runs.cells import built_as, family_of, plan_of
from validation.published_runs.hardware import hardware_of
from validation.published_runs.rows import NotGivenError, PublishedRun
from validation.runner import run_real
from zerobench.fake_execution.execute import execute, settled

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

ROWS: list[dict[str, Any]] = [
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
@pytest.mark.parametrize("chosen", [ROWS[1:2], pytest.param(ROWS, marks=pytest.mark.thorough)], ids=["one", "all"])
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


NO_ESTIMATE = {
    "too many": ({"gpus": 10**6}, "world_size=1000000"),
    "unknown": ({"model": "Wurlitzer 7B"}, "model=Wurlitzer 7B: no architecture is known by that name"),
    "encoder": ({"model": "bert 82M"}, "a loss over masked tokens"),
    "shape": ({"layers": "", "vocab": ""}, "the row does not give layers, vocab"),
    "tensor parallel": ({"tp": 8}, "tp=8: only data parallelism is simulated"),
    "eight bits": ({"precision": "float8 rowwise"}, "precision=float8 rowwise: less than 16 bits is not simulated"),
    "tiers": ({"notes": "CPU offload"}, "the notes mention offloading"),
    "stage": (
        {"system": "jax-pax", "strategy": "zero3"},
        "strategy=zero3 of jax-pax: no strategy here corresponds to it",
    ),
    "policy": ({"act_ckpt": "some"}, "act_ckpt=some: none of none, full, selective"),
}


@pytest.mark.parametrize("case", NO_ESTIMATE)
def test_a_run_that_cannot_be_estimated_says_why(case: str) -> None:
    pytest.importorskip("transformers")
    more, words = NO_ESTIMATE[case]
    with pytest.raises(NotGivenError) as refused:
        plan_of(run_of(ROWS[1] | more))
    assert words in str(refused.value)


FP32_SUMS = {"system": "nanotron", "precision": "bf16, fp32 accumulation of gradients and fp32 masters"}


def test_gradients_that_are_accumulated_in_fp32_take_four_bytes() -> None:
    pytest.importorskip("transformers")
    row = SMALL | FP32_SUMS | {"id": "sums", "strategy": "zero1", "grad_accum": 2, "notes": "tied embeddings"}
    records = [execute(plan_of(run_of(row | more)).config).known for more in ({}, {"precision": "bf16"})]
    numel = sum(shape.numel for shape in records[0].schedule.shapes)
    of_backward = ({(m.phase, m.category): m.max_bytes for m in record.memory} for record in records)
    wide, usual = (most["backward", "gradients"] for most in of_backward)
    assert wide - usual == pytest.approx(2 * numel, rel=0.02)
    assert hardware_of(run_of(row | {"gpu": "H100-SXM"})).declared.gradient_factor == 1, (
        "the schedule sends fp32 itself"
    )
    tied, untied = (run_of(row | {"notes": f"{how}tied embeddings"}) for how in ("", "un"))
    options = [built_as(run, family_of(run)).options["tie_word_embeddings"] for run in (tied, untied)]
    assert options == [True, False]


def test_the_runs_of_a_file_are_predicted_or_say_why_not(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    row = ROWS[2] | {"id": "one", "gpus": 8, "gpu": "A100-SXM"}
    rows = [row, row | {"id": "two", "gpu": "GB200"}, row | {"id": "three", "precision": "FP8"}]
    path = written(tmp_path / "runs.csv", rows)
    assert main(["predicted-runs", "--file", str(path), "--cache", str(tmp_path / "cache")]) == 0
    one, two, three = csv.DictReader((tmp_path / "runs_predicted.csv").read_text().splitlines())
    assert float(one["low"]) < float(one["predicted_tokens_s_gpu"]) < float(one["high"])
    assert "no device of that name" in two["reason"]
    assert "less than 16 bits" in three["reason"]
    assert not two["predicted_tokens_s_gpu"]
    assert list((tmp_path / "cache").glob("*.parquet")), "a command that was stopped goes on there"
