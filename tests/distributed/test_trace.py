"""The traced pass on real ranks: communication lies within the step, what is exposed within communication."""

from pathlib import Path

import pandas as pd
import pytest

from tests.cells import cell
from tests.distributed.variants import account
from zerobench.config.schema import Measure
from zerobench.probes.traced_pass import overlaps, read_trace
from zerobench.results import tables
from zerobench.sweep import cell as cells

TRACED = Measure(steps=3, warmup=2, trace=True)


def test_a_third_pass_tells_what_is_exposed(tmp_path: Path) -> None:
    one = cell("zero2", 2, results_dir=str(tmp_path), measure=TRACED)
    row = cells.run_cell(one, lambda _: None)
    assert row.status == "ok", row.reason
    assert row.passes_agree
    assert 0 < row.exposed_s <= row.communication_s <= row.traced_step_s
    assert row.overlap == 1 - row.exposed_s / row.communication_s
    assert row.step_s is not None
    results = tables.load(tmp_path / row.run_id)
    steps = results.steps[results.steps["mode"] == "traced"]
    measured = steps[~steps["warmup"]]
    assert len(steps) == 2 * 5
    assert (measured["exposed_s"] <= measured["communication_s"]).all()
    assert (measured["communication_s"] <= measured["seconds"]).all()
    assert steps[steps["warmup"]]["communication_s"].isna().all()
    assert results.steps[results.steps["mode"] != "traced"]["communication_s"].isna().all()
    # the trace that is kept says the same
    kept = overlaps(read_trace(tmp_path / row.run_id / "traces/rank0.json.gz"), "cpu")
    pd.testing.assert_series_equal(
        pd.Series([one.exposed_s for one in kept]), measured[measured["rank"] == 0]["exposed_s"],
        check_index=False, check_names=False,
    )  # fmt: skip
    assert [path.name for path in (tmp_path / row.run_id / "traces").iterdir()] == ["rank0.json.gz"]


@pytest.mark.thorough
def test_every_strategy_is_measured_alike(tmp_path: Path) -> None:
    """torch's DDP, a peer and ours in one launch; what one collective of all gradients takes, none can do without."""
    configs = [cell(name, 2, "million", measure=TRACED).config for name in ("ddp", "fsdp2", "zero1", "zero3")]
    for records in account(configs, tmp_path, "traced"):
        for record in records:
            measured = [one for one in record.steps if not one.warmup]
            assert len(measured) == 3
            for one in measured:
                assert 0 < one.exposed_s <= one.communication_s <= one.seconds
