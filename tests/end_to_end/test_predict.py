"""`zerobench predict`, `plan --goal fastest` and `calibrate`, as a user types them."""

import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import zerobench as package
from analysis.__main__ import main
from tests.end_to_end.command import zerobench
from zerobench.commands.calibrate import slowest
from zerobench.commands.plan.command import plan
from zerobench.commands.predict import predict
from zerobench.ranks.collectives import TRANSFERS, evenly, fit_all

MODEL = ("model=gpt", "model.layers=2", "model.hidden=256", "model.heads=4", "model.vocabulary=512", "precision=bf16")


def assert_priced(row: dict[str, Any], tokens: int) -> None:
    """At 3.60 dollars an hour a GPU costs 0.1 cents a second. `tokens`: of a GPU in a step."""
    for end, seconds in (("", row["step_s"]), ("_low", row["low_s"]), ("_high", row["high_s"])):
        assert row[f"dollars_per_mtokens{end}"] == pytest.approx(0.001 * seconds / tokens * 1e6)


def test_a_prediction_says_step_interval_and_what_it_rests_on(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--cluster", "a100-80gb-1600", *MODEL, "strategy=ddp,zero3", "world_size=16"]
    words += ["--price", "3.60", "--format", "json"]
    assert predict(words) == 0
    ddp, zero3 = json.loads(capsys.readouterr().out)
    assert (ddp["strategy"], zero3["strategy"]) == ("ddp", "zero3")
    for row in (ddp, zero3):
        assert row["low_s"] < row["step_s"] < row["high_s"]
        assert_priced(row, row["micro_batch"] * row["sequence"])
        assert row["validated"] == "33 published runs on a100, several nodes"
        parts = row["exposed_forward_s"] + row["exposed_backward_s"] + row["exposed_update_s"]
        assert parts + row["host_s"] < row["step_s"]
    assert zero3["communication_s"] > ddp["communication_s"]


def test_a_prediction_prints_what_it_predicts_and_parts_that_add_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """FSDP2's copies on other streams are no part of the step's compute; without a sequence it is one of training."""
    assert predict(["--cluster", "h100-3200", *MODEL, "strategy=zero1", "micro_batch=2"]) == 0
    setting = "gpt, N = 8, micro-batch 2, sequence 1024, bf16, adamw/fused, batch 16 over all ranks; on h100-3200:"
    printed = capsys.readouterr().out
    assert printed.startswith(setting)
    assert "$/M tokens" not in printed
    out = tmp_path / "new/folder/step.json"
    assert predict(["--cluster", "h100-3200", *MODEL, "strategy=fsdp2", "sequence=128", "--out", str(out)]) == 0
    (row,) = json.loads(out.read_text())
    assert (row["model"], row["batch"], row["sequence"], row["precision"]) == ("gpt", 32, 128, "bf16")
    exposed = sum(row[f"exposed_{phase}_s"] for phase in ("forward", "backward", "update"))
    assert row["compute_s"] + exposed + row["host_s"] == pytest.approx(row["step_s"], rel=1e-3)


@pytest.mark.parametrize("word", ["offload=cpu", "node_size=2"])
def test_what_has_no_rates_has_no_prediction(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--cluster", "h100-3200", *MODEL, "strategy=zero3", word, "--format", "json"]
    assert predict(words) == 1
    (found,) = json.loads(capsys.readouterr().out)
    assert found["step_s"] is None
    assert found["problem"].startswith(word)


@pytest.mark.thorough
def test_the_fastest_of_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--device-memory", "2 GiB", "--gpus", "8", "--goal", "fastest", "--cluster", "h100-3200", *MODEL]
    assert (
        plan([*words, "strategy=ddp,zero3", "activation=none", "batch=48", "--price", "3.60", "--format", "json"]) == 0
    )
    told = json.loads(capsys.readouterr().out)
    names = {row["name"] for row in told["rows"]}
    assert {"ddp", "zero3"} <= names
    assert names - {"ddp", "zero3"} <= {f"zero3 strategy.prefetch={number}" for number in (0, 2, 4)}
    for row in told["rows"]:
        assert row["micro_batch"] * row["accumulation"] * 8 == 48, "6 samples per rank: 4 do not divide them"
        assert_priced(row, 6 * 1024)
    rates = [row["tokens_per_s_gpu"] for row in told["rows"]]
    assert rates == sorted(rates, reverse=True)
    assert told["sentence"].startswith(f"Take {told['recommended']} with micro_batch=")
    assert re.search(
        r"With the same micro-batches, on (32|128|32 and 128) GPUs (ddp|zero3|it is a tie)", told["sentence"]
    )


def test_transfers_are_measured_fitted_and_drawn(tmp_path: Path) -> None:
    done = zerobench("calibrate", "--sizes", "4KiB,64KiB", "--repetitions", "6", "--out", "here", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = package.load_calibration(tmp_path / "here")
    assert len(found.transfers) == len(TRANSFERS) * 2 * 6
    assert (found.transfers["seconds"] > 0).all()
    assert {(fit.via, fit.collective) for fit in found.fits} == set(TRANSFERS)
    assert {"date", "versions", "processor", "commit"} <= set(found.provenance)
    for fit in found.fits:
        assert fit.bytes_per_s_low <= fit.bytes_per_s <= fit.bytes_per_s_high
        assert fit.collective in done.stdout
    with pytest.raises(KeyError, match="seam all_gather N=3 is not calibrated; there is seam reduce_scatter N=2"):
        found.fit("all_gather", 3)
    assert main(["calibration", str(tmp_path / "here"), "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "calibration.png").stat().st_size > 10_000


def rows_of(latency: float, bandwidth: float) -> pd.DataFrame:
    rows = [
        {"via": "seam", "collective": "all_gather", "world_size": 2, "dtype": "float32", "bytes": size,
         "repetition": repetition, "seconds": (latency + size / bandwidth) * (1 + 0.01 * (repetition - 2))}
        for size in (2**12, 2**16, 2**20, 2**24) for repetition in range(5)
    ]  # fmt: skip
    return pd.DataFrame(rows)


def test_a_line_is_found_again_and_a_row_has_the_slowest_ranks_time() -> None:
    (fit,) = fit_all(rows_of(1e-4, 2e9))
    assert fit.latency_s == pytest.approx(1e-4)
    assert fit.bytes_per_s == pytest.approx(2e9)
    assert fit.bytes_per_s_low < 2e9 < fit.bytes_per_s_high
    assert fit.largest_error < 1e-6
    assert fit.seconds(2 * 10**9) == pytest.approx(1.0001)
    with pytest.raises(ValueError, match="two sizes"):
        fit_all(rows_of(1e-4, 2e9).query("bytes == 4096"))
    ranks = [[{"via": "seam", "collective": "x", "bytes": 8, "repetition": 0, "seconds": t}] for t in (0.1, 0.3, 0.2)]
    (row,) = slowest(ranks, 3, "float32")
    assert (row.seconds, row.world_size) == (0.3, 3)
    assert [evenly(size, 3) for size in (1, 384, 385)] == [384, 384, 768]
