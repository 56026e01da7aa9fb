"""`zerobench calibrate`: rows of every transfer, lines through them, one sentence for what is wrong."""

from pathlib import Path

import pandas as pd
import pytest

import zerobench as package
from analysis.__main__ import main
from tests.end_to_end.command import zerobench
from zerobench.calibrate.collectives import TRANSFERS, evenly, fit_all
from zerobench.commands.calibrate import slowest


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


def test_no_calibration_is_a_sentence(tmp_path: Path, capsys) -> None:
    assert main(["calibration", str(tmp_path)]) == 2
    assert "no calibration" in capsys.readouterr().err
