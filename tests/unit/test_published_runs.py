"""Published runs: peaks of our own real runs are met, other files refused, causes executed."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from validation.__main__ import main
from validation.published_runs.causes import GIB, ExecutedSizes, error_of, explained, is_part, trials_of
from validation.published_runs.plan import plan_of
from validation.published_runs.runs import NEEDED, NotGivenError, PublishedRun
from validation.runner import run_real
from zerobench.fake_execution.execute import settled

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
@pytest.mark.slow
@pytest.mark.parametrize("chosen", [ROWS[1:2], pytest.param(ROWS, marks=pytest.mark.thorough)], ids=["one", "all"])
def test_peaks_of_our_own_real_runs_are_met(tmp_path: Path, chosen: list[dict[str, Any]]) -> None:
    """And a run without a configuration is in the file, with its reason; what was executed is not executed again."""
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


WRONG = {
    "empty": ("", "the file is empty"),
    "column": (",".join(name for name in NEEDED if name != "gpus") + ",gpu\n", "no column gpus; did you mean gpu?"),
    "number": ("{header}\na,ddp,gpt2,two,1,1,1,?\n", "row 2, gpus=two: write a whole number above 0"),
    "part": ("{header}\na,ddp,gpt2,2.5,1,1,1,?\n", "row 2, gpus=2.5: write a whole number"),
    "infinite": ("{header}\na,ddp,gpt2,2,1,1,inf,?\n", "row 2, peak_mem_gib=inf: write a number above 0"),
    "kind": ("{header}\na,ddp,gpt2,2,1,1,1,peak\n", "row 2, peak_kind=peak: use one of allocated, reserved, ?"),
    "cells": ("{header}\na,ddp,gpt2\n", "row 2: it has 3 cells, and the header 8"),
    "twice": ("{header}\na,ddp,gpt2,2,1,1,1,?\na,ddp,gpt2,2,1,1,1,?\n", "row 3, id=a: each row needs an id of its own"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_file_of_another_kind_is_refused_in_a_sentence(
    tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text, words = WRONG[case]
    path, out = tmp_path / "runs.csv", tmp_path / "errors.csv"
    path.write_text(text.replace("{header}", ",".join(NEEDED)))
    assert main(["published-runs", "--runs", str(path), "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
    assert not out.exists()


NO_ESTIMATE = {
    "too many": ({"gpus": 10**6}, "world_size=1000000"),
    "unknown": ({"model": "Wurlitzer 7B"}, "model=Wurlitzer 7B: no architecture is known by that name"),
    "encoder": ({"model": "bert 82M"}, "a loss over masked tokens"),
    "shape": ({"layers": "", "vocab": ""}, "the row does not give layers, vocab"),
    "tensor parallel": ({"tp": 8}, "tp=8: only data parallelism is executed"),
    "eight bits": ({"precision": "float8 rowwise"}, "precision=float8 rowwise: less than 16 bits is not executed"),
    "tiers": ({"notes": "CPU offload"}, "the notes speak of offloading"),
    "stage": ({"system": "jax-pax", "strategy": "zero3"}, "strategy=zero3 of jax-pax: no strategy here stands for it"),
    "policy": ({"act_ckpt": "some"}, "act_ckpt=some: none of none, full, selective"),
}


@pytest.mark.parametrize("case", NO_ESTIMATE)
def test_a_run_that_cannot_be_estimated_says_why(case: str) -> None:
    pytest.importorskip("transformers")
    more, words = NO_ESTIMATE[case]
    with pytest.raises(NotGivenError) as refused:
        plan_of(run_of(ROWS[1] | more))
    assert words in str(refused.value)


def test_what_a_row_leaves_open_is_assumed_aloud_and_tried_otherwise() -> None:
    pytest.importorskip("transformers")
    row = ROWS[2] | {"gpu": "A100", "act_ckpt": "", "precision": "", "compile": "1", "params": 10**6, "system": "fsdp1"}
    run = run_of(row | {"peak_mem_gib": 2.0, "peak_kind": "?", "notes": "printed GB"})
    plan = plan_of(run)
    said = "; ".join(plan.assumed)
    for words in ("FSDP2 in place of FSDP1", "bf16 with fp32", "no activations recomp", "eagerly", "of what the row"):
        assert words in said
    trials = [trial for count in (1, 2) for trial in trials_of(run, plan, count)]
    assert len(trials) == len({trial.plan.config.cell_id for trial in trials})
    assert all(trial.plan != plan for trial in trials)
    assert not any("activation=checkpoint" in one.words and "activation=selective" in one.words for one in trials)

    far, near = (ExecutedSizes(size, size, size) for size in (4 * GIB, 2 * GIB))
    assert error_of(far, "?", 2.0) == 1.0
    assert error_of(ExecutedSizes(GIB, GIB, 3 * GIB), "?", 2.0) == 0.0
    assert explained(run, 1.0, [(trials[0], far), (trials[1], near)], far) == f"+0.0% {trials[1].words}"
    assert explained(run, 0.07, [], ExecutedSizes(*[int(2e9)] * 3)) == "+0.0% with GB as 1e9 bytes"
    partly = explained(run, 1.0, [(trials[0], ExecutedSizes(3 * GIB, 3 * GIB, 3 * GIB))], far)
    assert is_part(partly)
    assert partly.startswith("in part: ")
    assert is_part(explained(replace(run, notes=""), 1.0, [], far))
