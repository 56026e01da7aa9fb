"""`make codes`: a row a tensor for weights and gradients, and one sentence where the command is wrong."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from validation.__main__ import main

SMALL = ["model=gpt_tiny", "model.layers=1", "model.hidden=32", "micro_batch=1", "sequence=16"]


def test_every_tensor_has_its_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["codes", "--steps", "2", "--out", str(tmp_path / "codes.csv"), "precision=bf16", *SMALL]) == 0
    rows = pd.read_csv(tmp_path / "codes.csv")
    weights, gradients = rows[rows["what"] == "weights"], rows[rows["what"] == "gradients"]
    assert list(weights["name"]) == list(gradients["name"])
    assert "blocks.0.mlp_in.weight" in set(weights["name"])
    matrices = weights["numel"] >= 1024
    assert (weights[matrices]["snr_db"] > 30).all()  # 8 bits of a block
    assert gradients[matrices.to_numpy()]["snr_db"].between(8, 40).all()  # 4 bits
    assert "blocks.0.mlp_in.weight" in capsys.readouterr().out


def test_what_is_wrong_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["codes", "strategy=zero2"]) == 2
    assert "zeropp=all: it is for zero3" in capsys.readouterr().err
    assert main(["codes", "--steps", "0"]) == 2
    assert "it needs one cell, and at least one step" in capsys.readouterr().err
